"""Every shipped configuration compiled for this device by several processes; a dry run takes one model's."""

from __future__ import annotations

import os

from gpu_check_parts.check import Check
from tessera_rt.kernels.architecture import architecture
from tessera_rt.kernels.inspection import EVERYTHING, Selection, report
from tessera_rt.kernels.offline import target_named

DRY = Selection(model=("qwen3-30b-a3b",), dtype=("bfloat16", "int32"), size=("large", "any"))


def run(check: Check) -> None:
    target = target_named("sm90" if check.dry_run else architecture(check.device))
    selection = DRY if check.dry_run else EVERYTHING
    workers = 2 if check.dry_run else min(12, os.cpu_count() or 1)
    with check.case(f"compile for {target.name}") as figures:
        data = report(target, selection=selection, workers=workers)
        figures |= {"launches": len(data["rows"]), "workers": workers, "fingerprint": data["fingerprint"]}
        broken = [row for row in data["rows"] if row["problems"]]
        figures["broken"] = broken
        assert data["rows"], "nothing was compiled"
        assert not broken, f"{len(broken)} configurations break a rule, the first: {broken[0]}"
