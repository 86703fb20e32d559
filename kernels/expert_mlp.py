"""The experts of one rank as one differentiable function: gather, first product, activation, second product, sum.

Three launches forward (two products and the sum), no host read, nothing permuted in memory: the first product gathers
tokens itself, and so do the products of the backward. Gradients of weights go where the caller says (``MainGrads``).
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from tessera_rt.differentiable_once import differentiable_once
from tessera_rt.errors import Problem
from tessera_rt.kernels.expert_rows import expert_rows, expert_rows_backward
from tessera_rt.kernels.gather_sum import gather_sum
from tessera_rt.kernels.operands import (
    DEFAULT_RUN,
    DTYPES,
    Run,
    check_tensors,
    negation_problems,
    shape_problem,
    tensor_problems,
)
from tessera_rt.kernels.options import Gate
from tessera_rt.kernels.routing import Routed, device_problem
from tessera_rt.kernels.row_gradients import Needs
from tessera_rt.kernels.weights import NO_MAIN_GRADS, ExpertWeights, MainGrads
from tessera_rt.kernels.wgrad import is_destination

__all__ = ["NO_MAIN_GRADS", "ExpertWeights", "MainGrads", "expert_mlp"]


def expert_mlp(
    x: Tensor,
    weights: ExpertWeights,
    routed: Routed,
    router_weights: Tensor,
    gate: Gate,
    *,
    main_grads: MainGrads = NO_MAIN_GRADS,
    recompute: bool = False,
    run: Run = DEFAULT_RUN,
) -> Tensor:
    """x [T, H] -> [T, H]: out[t] = sum over k of router_weights[t, k] (down activation(gate_up x[t])).

    ``router_weights`` [T, K] fp32; dropped choices count as nothing. Saved for backward: x, the first product [R, 2 I]
    (made again with ``recompute``), and with a bias behind the second product also its result. The gradient of a
    weight is added to its main gradient, or returned in the weight's dtype. Differentiable once. ``routed`` must come
    from choices of the same T tokens. Raises SpecError for shapes, dtypes, devices and strides that do not fit.
    """
    problems = _layer_problems(x, weights, routed, router_weights, gate)
    for field in fields(MainGrads):
        weight, target = getattr(weights, field.name), getattr(main_grads, field.name)
        if target is not None:
            problems += _main_grad_problems(f"main_grads.{field.name}", target, weight)
    check_tensors(
        "expert_mlp", problems, x,
        **{field.name: getattr(weights, field.name) for field in fields(ExpertWeights)},
    )  # fmt: skip
    out: Tensor = _ExpertMlp.apply(  # type: ignore[no-untyped-call]
        x, weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias, router_weights,
        routed, gate, main_grads, recompute, run,
    )  # fmt: skip
    return out


def _layer_problems(
    x: Tensor, weights: ExpertWeights, routed: Routed, router_weights: Tensor, gate: Gate
) -> list[Problem]:
    experts, (tokens, top_k) = routed.rows.experts, routed.position.shape
    problems = shape_problem("x", x, tokens, None) + shape_problem("gate_up", weights.gate_up, experts, None, None)
    problems += tensor_problems("router_weights", router_weights, (tokens, top_k), DTYPES, x.device)
    problems += device_problem(routed.rows, x)
    if problems:
        return problems
    columns, hidden = weights.gate_up.shape[1], x.shape[1]
    problems += shape_problem("gate_up", weights.gate_up, experts, None, hidden)
    if gate.gated and columns % 2:
        problems.append(Problem("gate_up.shape[1]", columns, "even with a gated activation"))
    problems += shape_problem("down", weights.down, experts, hidden, gate.width(columns))
    if weights.gate_up_bias is not None:
        problems += shape_problem("gate_up_bias", weights.gate_up_bias, experts, columns)
    if weights.down_bias is not None:
        problems += shape_problem("down_bias", weights.down_bias, experts, hidden)
    return problems


def _main_grad_problems(name: str, target: Tensor, weight: Tensor | None) -> list[Problem]:
    if weight is None:
        return [Problem(name, tuple(target.shape), "None like the weight")]
    problems = tensor_problems(name, target, tuple(weight.shape), (torch.float32,), weight.device)
    problems += negation_problems(name, target)
    if not is_destination(target):
        allowed = "contiguous, or the transpose of that" if target.dim() == 3 else "contiguous"
        problems.append(Problem(f"{name}.stride", target.stride(), allowed))
    return problems


class _ExpertMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        router_weights: Tensor,
        routed: Routed,
        gate: Gate,
        main_grads: MainGrads,
        recompute: bool,
        run: Run,
    ) -> Tensor:
        weights = ExpertWeights(gate_up, down, gate_up_bias, down_bias)
        y, pre = expert_rows(x, weights, routed, gate, save_pre=not recompute, run=run)
        kept = y if down_bias is not None else None
        ctx.save_for_backward(x, gate_up, down, gate_up_bias, down_bias, router_weights, pre, kept)
        ctx.routed, ctx.gate, ctx.main_grads, ctx.run = routed, gate, main_grads, run
        return gather_sum(y, routed.position, router_weights, run=run)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up, down, gate_up_bias, down_bias, router_weights, pre, y = ctx.saved_tensors
        weights = ExpertWeights(gate_up, down, gate_up_bias, down_bias)
        found = expert_rows_backward(
            grad, x, weights, ctx.routed, router_weights, ctx.gate,
            pre=pre, y=y, main_grads=ctx.main_grads, needs=Needs(*ctx.needs_input_grad[:6]), run=ctx.run,
        )  # fmt: skip
        d_x = None if found.x_rows is None else gather_sum(found.x_rows, ctx.routed.position, run=ctx.run)
        d_router = None if found.router is None else found.router.to(router_weights.dtype)
        of_weights = (found.gate_up, found.down, found.gate_up_bias, found.down_bias)
        return d_x, *of_weights, d_router, None, None, None, None, None
