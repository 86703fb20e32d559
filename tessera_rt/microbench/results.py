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
from tessera_rt.microbench.compare import ComparedRow
from tessera_rt.microbench.machine import Machine, slowed_down
from tessera_rt.microbench.overlap import OverlapResult
from tessera_rt.microbench.traffic import ALL_TO_ALL

RESULT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """``bench``: overlap, gemm, dispatch or layer. ``rows``: times in fields that end in ``_ns``. ``dtype``: of the
    products."""

    bench: str
    machine: Machine
    rows: Sequence[Mapping[str, Any]]
    figures: Mapping[str, float | int] = field(default_factory=dict)
    notes: Sequence[str] = ()
    dtype: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "tessera_bench": RESULT_VERSION,
            "bench": self.bench,
            "machine": asdict(self.machine),
            "dtype": self.dtype,
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
    slowed = slowed_down(clocks for result in results.values() for row in result.rows for clocks in row.clocks)
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
        notes=[*dict.fromkeys((*(note for result in results.values() for note in result.notes), *notes, *slowed))],
    )


def product_figures(rows: Sequence[ComparedRow]) -> dict[str, float | int]:
    """Rates of Tessera's grouped product and of a dense one, of the first product that was measured."""
    names = {"Tessera": "grouped_gemm_flops_per_s", "one dense product": "gemm_flops_per_s"}
    return {
        names[row.name]: row.flops / (row.time.ns / 1e9)
        for row in rows
        if row.name in names and row.problem == rows[0].problem
    }


def link_figures(rows: Sequence[ComparedRow], world: int) -> dict[str, float | int]:
    """The rate over the links of the largest all-to-all: a rank keeps one of ``world`` parts."""
    sent = [row for row in rows if row.name == ALL_TO_ALL]
    if not sent or world < 2:
        return {}
    largest = max(sent, key=lambda row: row.bytes)
    return {"link_bytes_per_s": largest.bytes * (world - 1) / world / (largest.time.ns / 1e9)}
