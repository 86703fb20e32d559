"""What the device reaches with torch alone: copies of memory and one dense product of random data."""

from __future__ import annotations

from dataclasses import asdict

import torch

from gpu_check_parts.check import Check
from tessera_rt.microbench.compare import Contender, compare
from tessera_rt.microbench.machine import ClockReader, machine
from tessera_rt.microbench.traffic import copy


def run(check: Check) -> None:
    with check.case("machine") as figures:
        figures |= asdict(machine(check.device))
        reader = ClockReader(check.device)
        figures["clocks"] = reader.note or [asdict(clocks) for clocks in reader.read()]
        import triton

        figures["triton"] = triton.__version__
    samples = 3 if check.dry_run else 20
    with check.case("copy within the device") as figures:
        size = (16 << 20) if check.dry_run else (1 << 30)
        contender = Contender(name="copy", launch=copy(size, device=check.device), bytes=2 * size)  # read and written
        figures |= compare("copy", [contender], device=check.device, samples=samples)[0].as_row()
    for edge in (256,) if check.dry_run else (4096, 8192):
        with check.case(f"dense bf16 product of edge {edge}") as figures:
            a, b = (torch.randn(edge, edge, device=check.device).bfloat16() for _ in range(2))
            product = Contender(name="dense", launch=lambda a=a, b=b: a @ b, flops=2 * edge**3)
            figures |= compare("product", [product], device=check.device, samples=samples)[0].as_row()
