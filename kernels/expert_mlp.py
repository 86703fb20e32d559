"""The experts of one rank as one differentiable function: gather, first product, activation, second product, sum.

Five launches forward, no host read, nothing permuted in memory: the first product gathers tokens itself, and so do the
products of the backward. Gradients of weights go where the caller says (``MainGrads``).
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tessera_rt.errors import Problem, SpecError
from tessera_rt.kernels.expert_rows import expert_rows, expert_rows_backward
from tessera_rt.kernels.gather_sum import gather_sum
from tessera_rt.kernels.operands import DEFAULT_RUN, Run
from tessera_rt.kernels.options import Gate
from tessera_rt.kernels.routing import Routed
from tessera_rt.kernels.row_gradients import Needs
from tessera_rt.kernels.weights import NO_MAIN_GRADS, ExpertWeights, MainGrads

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
    weight is added to its main gradient, or returned in the weight's dtype. Differentiable once.
    """
    for field in fields(MainGrads):
        weight, target = getattr(weights, field.name), getattr(main_grads, field.name)
        if target is not None and (weight is None or target.shape != weight.shape or target.dtype != torch.float32):
            given = (tuple(target.shape), str(target.dtype))
            wanted = "None" if weight is None else f"float32 {tuple(weight.shape)}"
            raise SpecError.of("expert_mlp", [Problem(f"main_grads.{field.name}", given, wanted)])
    out: Tensor = _ExpertMlp.apply(  # type: ignore[no-untyped-call]
        x, weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias, router_weights,
        routed, gate, main_grads, recompute, run,
    )  # fmt: skip
    return out


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
    @once_differentiable
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
