"""The grouped products of an expert layer against torch's grouped product and one dense product of equal FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tessera_rt.kernels.budget import SmBudget
from tessera_rt.kernels.trace import Trace
from tessera_rt.microbench.compare import ComparedRow, Contender, compare
from tessera_rt.microbench.problems import ExpertProblem
from tessera_rt.microbench.timing import Launch

WITHOUT_GPU = "no GPU: Tessera's Triton products were not timed, only torch's"
BudgetedProduct = Callable[[SmBudget], Trace]


def bench_products(problem: ExpertProblem, *, samples: int = 20, timeout_s: float = 60.0) -> tuple[ComparedRow, ...]:
    """Both forward products and two gradients of ``problem``; Tessera's own come first where there is a GPU."""
    return tuple(
        row
        for name, contenders in _problems(problem)
        for row in compare(
            f"{problem.title}, {name}", contenders, device=problem.device, samples=samples, timeout_s=timeout_s
        )
    )


def grouped_launch(problem: ExpertProblem) -> tuple[Launch, int]:
    """torch's grouped product of the first product's sizes, and its FLOPs."""
    x, weight, ends = _operands(problem, problem.shape.product, problem.shape.hidden)
    return lambda: torch._grouped_mm(x, weight.mT, offs=ends), 2 * problem.rows * weight[0].numel()


def budgeted_product(problem: ExpertProblem) -> tuple[BudgetedProduct, int]:
    """(launch(budget) -> trace, FLOPs): our first product within a budget's compute SMs. Needs a GPU."""
    from tessera_rt.kernels.operands import Run
    from tessera_rt.kernels.routing import expert_rows
    from tessera_rt.kernels.rows_gemm import rows_gemm
    from tessera_rt.kernels.trace import Trace

    x, weight, _ = _operands(problem, problem.shape.product, problem.shape.hidden)
    rows = expert_rows(problem.offsets(), problem.rows)

    def launch(budget: SmBudget) -> Trace:
        trace = Trace()
        rows_gemm(x, weight, rows, zero_tail=False, run=Run(budget=budget, trace=trace))
        return trace

    return launch, 2 * problem.rows * weight[0].numel()


def _problems(problem: ExpertProblem) -> Iterator[tuple[str, list[Contender]]]:
    shape = problem.shape
    for name, n, k in (
        ("first product", shape.product, shape.hidden),
        ("second product", shape.hidden, shape.intermediate),
        ("input gradient of the first", shape.hidden, shape.product),
    ):
        yield name, _rows_contenders(problem, n, k)
    yield "weight gradient of the first", _wgrad_contenders(problem, shape.product, shape.hidden)


def _operands(problem: ExpertProblem, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    x = problem.random(problem.rows, k, seed=1)
    weight = problem.random(problem.experts, n, k, scale=k**-0.5, seed=2)
    return x, weight, problem.offsets()[1:].contiguous()


def _rows_contenders(problem: ExpertProblem, n: int, k: int) -> list[Contender]:
    x, weight, ends = _operands(problem, n, k)
    dense = weight[0]
    work, dense_work = _work(problem, n, k), _work(problem, n, k, weights=1)
    contenders = [
        Contender(name="torch._grouped_mm", launch=lambda: torch._grouped_mm(x, weight.mT, offs=ends), **work),
        Contender(name="one dense product", launch=lambda: x @ dense.mT, **dense_work),
    ]
    if problem.device.type == "cuda":
        from tessera_rt.kernels.routing import expert_rows
        from tessera_rt.kernels.rows_gemm import rows_gemm

        rows = expert_rows(problem.offsets(), problem.rows)
        ours = Contender(name="Tessera", launch=lambda: rows_gemm(x, weight, rows, zero_tail=False), **work)
        contenders.insert(0, ours)
    return contenders


def _wgrad_contenders(problem: ExpertProblem, n: int, k: int) -> list[Contender]:
    grad, x, ends = problem.random(problem.rows, n, seed=1), problem.random(problem.rows, k, seed=2), problem.offsets()
    ends = ends[1:].contiguous()
    work, dense_work = _work(problem, n, k), _work(problem, n, k, weights=1)
    contenders = [
        Contender(name="torch._grouped_mm", launch=lambda: torch._grouped_mm(grad.mT, x, offs=ends), **work),
        Contender(name="one dense product", launch=lambda: grad.mT @ x, **dense_work),
    ]
    if problem.device.type == "cuda":
        from tessera_rt.kernels.routing import expert_rows
        from tessera_rt.kernels.wgrad import wgrad

        rows = expert_rows(problem.offsets(), problem.rows)
        out = torch.empty(problem.experts, n, k, dtype=problem.dtype, device=problem.device)
        ours = Contender(name="Tessera", launch=lambda: wgrad(grad, x, rows, out, accumulate=False), **work)
        contenders.insert(0, ours)
    return contenders


def _work(problem: ExpertProblem, n: int, k: int, *, weights: int | None = None) -> dict[str, int]:
    """What a product must do and move; ``weights``: how many [N, K] it reads or writes (all experts')."""
    moved = problem.rows * (n + k) + (problem.experts if weights is None else weights) * n * k
    return {"flops": 2 * problem.rows * n * k, "bytes": problem.dtype.itemsize * moved}
