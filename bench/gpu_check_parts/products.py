"""The expert layers' products at released sizes against torch's grouped product and a dense one of equal FLOPs."""

from __future__ import annotations

from gpu_check_parts.check import Check
from tessera_rt.microbench.problems import expert_problem
from tessera_rt.microbench.products import bench_products

MODELS = ("qwen3-30b-a3b", "qwen3-next-80b", "deepseek-v3", "qwen3-235b-a22b", "gpt-oss-120b", "nemotron-3-super")


def run(check: Check) -> None:
    for model in MODELS[:1] if check.dry_run else MODELS:
        with check.case(model) as figures:
            tokens, samples = (16, 1) if check.dry_run else (8192, 20)
            problem = expert_problem(model, tokens=tokens, ep=8, dtype="bf16", device=check.device)
            figures["rows"] = [row.as_row() for row in bench_products(problem, samples=samples)]
