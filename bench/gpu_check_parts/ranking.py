"""How the configurations that fit a choice rank on this device, against the one that the table has first."""

from __future__ import annotations

from gpu_check_parts.check import Check
from tessera_rt.errors import TesseraError
from tessera_rt.kernels.config_table import TABLE, Config
from tessera_rt.kernels.configs import choose, config_for
from tessera_rt.kernels.operands import Run
from tessera_rt.kernels.options import NO_GATE
from tessera_rt.kernels.routing import expert_rows
from tessera_rt.kernels.rows_gemm import rows_gemm
from tessera_rt.microbench.compare import Contender, compare
from tessera_rt.microbench.problems import expert_problem

MODELS = ("qwen3-30b-a3b", "qwen3-next-80b", "deepseek-v3")


def run(check: Check) -> None:
    if check.dry_run:
        from tessera_rt.testing.interpreter import install

        install()
    for model in MODELS[:1] if check.dry_run else MODELS:
        with check.case(f"forward product, {model}") as figures:
            figures["rows"] = _rank(check, model)


def _rank(check: Check, model: str) -> list[dict[str, object]]:
    tokens = 2 if check.dry_run else 8192
    problem = expert_problem(model, tokens=tokens, ep=8, dtype="bf16", device=check.device)
    n, k = (32, 64) if check.dry_run else (problem.shape.product, problem.shape.hidden)
    x = problem.random(problem.rows, k, seed=1)
    weight = problem.random(problem.experts, n, k, scale=k**-0.5, seed=2)
    choice = choose("forward", x, problem.rows, problem.experts, aligned=True, gather=False, gate=NO_GATE)
    first = config_for(choice)
    tried = [first, *(config for config in _candidates() if config != first)]
    rows = expert_rows(problem.offsets(), problem.rows, sorted({config.block_m for config in tried}))
    contenders, refused = [], []
    for config in tried[:2] if check.dry_run else tried:
        launch = _launch(x, weight, rows, config)
        try:
            launch()
        except (TesseraError, RuntimeError) as error:  # too much shared memory, say: an answer, not a fault
            refused.append({"config": str(config), "refused": str(error)[:200]})
            continue
        contenders.append(Contender(name=str(config), launch=launch, flops=2 * problem.rows * n * k))
    assert contenders and contenders[0].name == str(first), f"the table's own configuration does not run: {refused}"
    samples = 1 if check.dry_run else 10
    ranked = compare(model, contenders, device=check.device, samples=samples, warmup=1)
    ordered = sorted((row.as_row() for row in ranked), key=lambda row: row["duration_ns"])
    return [*ordered, *refused]


def _candidates() -> list[Config]:
    """Every configuration of the table that some forward product has."""
    return list(dict.fromkeys(row.config for row in TABLE if "forward" in row.kernels))


def _launch(x, weight, rows, config):  # type: ignore[no-untyped-def]
    return lambda: rows_gemm(x, weight, rows, zero_tail=False, run=Run(config=config))
