"""Costs from a microbenchmark's result: a device whose measured figures replace the assumed ones.

``tessera bench ... -o result.json`` writes the file. What it did not measure stays as the device file has it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from tessera_rt.cost_sources.device import DeviceSpec
from tessera_rt.cost_sources.work import WorkKind
from tessera_rt.errors import CostError, Problem
from tessera_rt.files.file_checks import StrictModel, problems_of

BENCHMARKED = "+bench"
"""Ends the name of a device with measured figures."""


class _Machine(StrictModel):
    kind: str
    name: str
    sms: int = Field(ge=1)
    versions: str = ""


class _Figures(StrictModel):
    comm_sms: int | None = Field(default=None, ge=0)
    contention: float | None = Field(default=None, ge=0)
    grouped_gemm_flops_per_s: float | None = Field(default=None, gt=0)
    gemm_flops_per_s: float | None = Field(default=None, gt=0)
    link_bytes_per_s: float | None = Field(default=None, gt=0)


class _Result(StrictModel):
    tessera_bench: Literal[1]
    bench: Literal["overlap", "gemm", "dispatch", "layer"]
    machine: _Machine
    dtype: str = ""
    notes: list[str] = Field(default_factory=list)
    figures: _Figures
    rows: list[dict[str, Any]]


def is_bench_result(path: Path) -> bool:
    """Whether a file is a microbenchmark's result, and not a cost table."""
    if path.suffix != ".json":
        return False
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and "tessera_bench" in data


def benchmarked_device(base: DeviceSpec, path: Path, dtype: str = "bf16") -> DeviceSpec:
    """``base`` with the figures of the result at ``path``; rates are of ``dtype``, and links those inside a node.

    Raises CostError with every problem of the file: of another device's SM count, of a CPU, without a figure, or with
    a rate above the device's peak.
    """
    where = str(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise CostError.of(where, [Problem("file", str(fault), "JSON that can be read")]) from None
    try:
        found = _Result.model_validate(data)
    except ValidationError as error:
        raise CostError.of(where, problems_of(error, _Result)) from None
    figures = found.figures.model_dump(exclude_none=True)
    problems = []
    if found.machine.kind != "cuda":
        remedy = "a CPU's lanes say nothing of a GPU: run tessera bench on one (tessera profile is for CPUs)"
        problems.append(Problem("machine.kind", found.machine.kind, "cuda", remedy))
    if not figures:
        problems.append(
            Problem("figures", {}, "at least one measured figure", "run tessera bench overlap or gemm on a GPU")
        )
    if found.machine.kind == "cuda" and found.machine.sms != base.sm_count:
        problems.append(
            Problem("machine.sms", found.machine.sms, f"{base.sm_count}, as {base.name} has", "name the right --device")
        )
    if found.dtype not in ("", dtype) and {"grouped_gemm_flops_per_s", "gemm_flops_per_s"} & set(figures):
        problems.append(
            Problem("dtype", found.dtype, f"{dtype}, as the costs", f"run tessera bench with --dtype {dtype}")
        )
    if dtype not in base.peak_flops:
        problems.append(Problem("dtype", dtype, f"one of {', '.join(base.peak_flops)}"))
    if figures.get("comm_sms", 1) >= base.sm_count:
        problems.append(Problem("figures.comm_sms", figures["comm_sms"], f"below {base.sm_count}"))
    if problems:
        raise CostError.of(where, problems)
    fractions = dict(base.fractions)
    for kind, field in ((WorkKind.GROUPED_GEMM, "grouped_gemm_flops_per_s"), (WorkKind.GEMM, "gemm_flops_per_s")):
        if field in figures:
            fractions[kind] = figures[field] / base.peak_flops[dtype]
            if fractions[kind] > 1:
                allowed = f"at most the peak {base.peak_flops[dtype]:.3g} of {base.name}"
                problems.append(Problem(f"figures.{field}", figures[field], allowed))
    if problems:
        raise CostError.of(where, problems)
    device = replace(base, fractions=fractions, contention=figures.get("contention", base.contention))
    # No SMs set aside means none were needed, as with copy engines: the roofline's rate per SM then stays assumed.
    device = replace(device, comm_sms=figures.get("comm_sms") or base.comm_sms)
    if "link_bytes_per_s" in figures:
        rate = figures["link_bytes_per_s"]
        device = replace(
            device,
            intra_node=replace(base.intra_node, bytes_per_s=rate),
            comm_bytes_per_sm=max(base.comm_bytes_per_sm, rate / device.comm_sms),
        )
    source = f"tessera bench {found.bench} on {found.machine.name} ({found.machine.versions})"
    name = f"{base.name}{BENCHMARKED}"  # a plan that names it must not be costed with the assumed figures again
    sources = {**base.sources, **{field: source for field in figures}}
    return replace(device, name=name, sources=sources, measured=f"{', '.join(figures)}, by {source}")
