"""The put kernels of dispatch beside a grouped product, over the SMs given to communication.

Virtual ranks on one device: bytes stay in its memory, so times say how the two share SMs and memory, nothing of links.
"""

from __future__ import annotations

from dataclasses import asdict

import torch

from gpu_check_parts.check import Check
from gpu_check_parts.virtual import WORLD
from tessera_rt.kernels.budget import SmBudget
from tessera_rt.microbench.overlap import overlap
from tessera_rt.microbench.problems import expert_problem
from tessera_rt.microbench.products import budgeted_product, grouped_launch
from tessera_rt.microbench.puts import budgeted_puts
from tessera_rt.microbench.traffic import unbudgeted

MODELS = ("qwen3-30b-a3b", "deepseek-v3")


def run(check: Check) -> None:
    if check.dry_run:
        from tessera_rt.testing.interpreter import install

        install()
    for model in MODELS[:1] if check.dry_run else MODELS:
        with check.case(model) as figures:
            tokens, samples = (4, 1) if check.dry_run else (4096, 10)
            problem = expert_problem(model, tokens=tokens, ep=8, dtype="bf16", device=check.device)
            puts = budgeted_puts(problem, WORLD, hidden=64 if check.dry_run else None)
            if check.dry_run:
                product = unbudgeted(grouped_launch(problem)[0])
                found = overlap(puts, product, SmBudget(4, 2), samples=samples, warmup=0, device=check.device)
            else:
                found = overlap(puts, budgeted_product(problem)[0], samples=samples, device=check.device)
            assert all(row.both.ns > 0 for row in found.rows)
            figures["rows"] = [row.as_row() for row in found.rows]
            figures["best"], figures["notes"] = asdict(found.best.budget), list(found.notes)
            if not check.dry_run:
                torch.cuda.empty_cache()
