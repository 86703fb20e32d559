"""Results of microbenchmarks as JSON files, and the figures of them that a planner can use.

``figures`` are what ``tessera plan --costs`` takes from such a file (``cost_sources.benchmarked``): rates per second,
SMs, and the contention that belongs to them. A figure that was not measured is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tessera_rt.files.file_checks import write_atomically
from tessera_rt.microbench.machine import Machine
from tessera_rt.microbench.overlap import OverlapResult

RESULT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """``bench``: overlap, gemm, dispatch or layer. ``rows``: times in fields that end in ``_ns``."""

    bench: str
    machine: Machine
    rows: Sequence[Mapping[str, Any]]
    figures: Mapping[str, float | int] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "tessera_bench": RESULT_VERSION,
            "bench": self.bench,
            "machine": asdict(self.machine),
            "notes": list(self.notes),
            "figures": dict(self.figures),
            "rows": [dict(row) for row in self.rows],
        }


def save_result(result: BenchResult, path: Path) -> None:
    """Write the result as JSON; the file is whole or not there."""
    write_atomically(path, json.dumps(result.as_dict(), indent=1) + "\n")


def overlap_result(
    results: Mapping[str, OverlapResult], *, comp_flops: int = 0, link_bytes: int = 0, notes: Sequence[str] = ()
) -> BenchResult:
    """One result out of sweeps by name. The best point of the last sweep gives the figures.

    ``comp_flops``: of one compute launch, a grouped product (0: not known). ``link_bytes``: what one communication
    launch of the last sweep sends over links between GPUs (0: it crosses none, so no bandwidth follows).
    """
    last = list(results.values())[-1]
    best = last.best
    figures: dict[str, float | int] = {"comm_sms": best.budget.communication}
    if best.contention is not None:
        figures["contention"] = best.contention
    if comp_flops:
        figures["grouped_gemm_flops_per_s"] = comp_flops / (best.comp_all.ns / 1e9)
    if link_bytes:
        figures["link_bytes_per_s"] = link_bytes / (best.comm.ns / 1e9)
    return BenchResult(
        bench="overlap",
        machine=last.machine,
        rows=[{"name": name, **row.as_row()} for name, result in results.items() for row in result.rows],
        figures=figures,
        notes=[*dict.fromkeys((*(note for result in results.values() for note in result.notes), *notes))],
    )
