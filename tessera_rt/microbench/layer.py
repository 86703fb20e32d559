"""A whole expert layer after its router, forward and backward, against the same layer written with torch's products."""

from __future__ import annotations

import torch
from torch import Tensor

from tessera_rt.kernels.options import Gate
from tessera_rt.kernels.reference import activate
from tessera_rt.kernels.weights import ExpertWeights
from tessera_rt.microbench.compare import ComparedRow, Contender, compare
from tessera_rt.microbench.problems import ExpertProblem
from tessera_rt.microbench.timing import Launch
from tessera_rt.moe.backends import routed_experts


def bench_layer(problem: ExpertProblem, *, samples: int = 20, timeout_s: float = 60.0) -> tuple[ComparedRow, ...]:
    """Forward, and forward with backward, of ``problem``: ours first, then torch's products composed."""
    x, weights, ids, router_weights = _operands(problem)
    gate = problem.shape.gate
    forwards = {
        "Tessera": lambda: routed_experts(x, ids, router_weights, weights, gate),
        "torch._grouped_mm layer": lambda: grouped_mm_layer(x, ids, router_weights, weights, gate),
    }
    leaves = [
        leaf
        for leaf in (x, router_weights, weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias)
        if leaf is not None
    ]
    grad = problem.random(problem.tokens, problem.shape.hidden, seed=9)

    def forward_only(forward: Launch) -> Launch:
        def launch() -> None:
            with torch.no_grad():
                forward()

        return launch

    def with_backward(forward: Launch) -> Launch:
        def launch() -> None:
            out = forward()
            assert isinstance(out, Tensor)
            torch.autograd.grad(out, leaves, grad)

        return launch

    flops = 2 * problem.rows * (weights.gate_up[0].numel() + weights.down[0].numel())
    rows: list[ComparedRow] = []
    for name, wrap, factor in (("forward", forward_only, 1), ("forward and backward", with_backward, 3)):
        contenders = [Contender(name=who, launch=wrap(made), flops=factor * flops) for who, made in forwards.items()]
        rows += compare(
            f"{problem.title}, {name}", contenders, device=problem.device, samples=samples, timeout_s=timeout_s
        )
    return tuple(rows)


def grouped_mm_layer(x: Tensor, ids: Tensor, router_weights: Tensor, weights: ExpertWeights, gate: Gate) -> Tensor:
    """The layer as a user would write it with torch's grouped product: sort, gather, products, weighted sum."""
    top_k = ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    experts = ids.flatten()[order].long()
    counts = torch.bincount(experts, minlength=weights.gate_up.shape[0])
    ends = counts.cumsum(0).to(torch.int32)
    token = order // top_k
    product = torch._grouped_mm(x[token], weights.gate_up.mT, offs=ends)
    if weights.gate_up_bias is not None:
        product = product + weights.gate_up_bias[experts]
    y = torch._grouped_mm(activate(product, gate), weights.down.mT, offs=ends)
    if weights.down_bias is not None:
        y = y + weights.down_bias[experts]
    scaled = y * router_weights.flatten()[order].unsqueeze(-1).to(y.dtype)
    return torch.zeros_like(x).index_add(0, token, scaled)


def _operands(problem: ExpertProblem) -> tuple[Tensor, ExpertWeights, Tensor, Tensor]:
    shape, experts = problem.shape, problem.experts
    gate_up = problem.random(experts, shape.product, shape.hidden, scale=shape.hidden**-0.5, seed=1).requires_grad_()
    down = problem.random(experts, shape.hidden, shape.intermediate, scale=shape.intermediate**-0.5, seed=2)
    biases = [problem.random(experts, width, seed=3).requires_grad_() for width in (shape.product, shape.hidden)]
    x = problem.random(problem.tokens, shape.hidden, seed=5).requires_grad_()
    ids, router_weights = problem.choices()
    weights = ExpertWeights(gate_up, down.requires_grad_(), *(biases if shape.bias else ()))
    return x, weights, ids, router_weights.requires_grad_()
