"""The expert layers' products at released sizes against torch's grouped product and a dense one of equal FLOPs.

Targets are aims, not checks: one that is missed is told and fails nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_check_parts.check import Check
from tessera_rt.microbench.compare import ComparedRow
from tessera_rt.microbench.problems import expert_problem
from tessera_rt.microbench.products import bench_products

MODELS = ("qwen3-30b-a3b", "qwen3-next-80b", "deepseek-v3", "qwen3-235b-a22b", "gpt-oss-120b", "nemotron-3-super")
TFLOPS = {"qwen3-235b-a22b": 600.0, "deepseek-v3": 600.0, "qwen3-next-80b": 300.0}  # of an H100's 989 in bf16


def run(check: Check) -> None:
    for model in MODELS[:1] if check.dry_run else MODELS:
        with check.case(model) as figures:
            tokens, samples = (16, 1) if check.dry_run else (8192, 20)
            problem = expert_problem(model, tokens=tokens, ep=8, dtype="bf16", device=check.device)
            rows = bench_products(problem, samples=samples)
            figures["rows"] = [row.as_row() for row in rows]
            figures["targets"] = [] if check.dry_run else targets(model, rows)


def targets(model: str, rows: Sequence[ComparedRow]) -> list[dict[str, Any]]:
    """What Tessera's products should reach, and what they do: ratios of rates, and TFLOP/s of the first product."""
    rates = {(row.problem.rpartition(", ")[2], row.name): row.flops / max(row.time.ns, 1) for row in rows}
    forward = rates["first product", "Tessera"]
    found = [
        ("first product over torch._grouped_mm", forward / rates["first product", "torch._grouped_mm"], 1.0),
        ("first product over a dense one", forward / rates["first product", "one dense product"], 0.9),
        ("input gradient over first product", rates["input gradient of the first", "Tessera"] / forward, 0.9),
        ("weight gradient over first product", rates["weight gradient of the first", "Tessera"] / forward, 0.8),
    ]
    if model in TFLOPS:
        found.append(("first product, TFLOP/s", forward / 1e3, TFLOPS[model]))
    return [{"what": what, "found": rate, "aim": aim, "reached": rate >= aim} for what, rate, aim in found]
