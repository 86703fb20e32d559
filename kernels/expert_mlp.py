"""The experts of one rank as one differentiable function: gather, first product, activation, second product, sum.

Five launches forward, no host read, nothing permuted in memory: the first product gathers tokens itself, and so do the
products of the backward. Gradients of weights go where the caller says (``MainGrads``).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tessera_rt.errors import Problem, SpecError
from tessera_rt.kernels.gate_backward import gate_backward
from tessera_rt.kernels.gather_sum import gather_sum, gather_sum_backward, router_weight_gradient
from tessera_rt.kernels.operands import DEFAULT_RUN, Run
from tessera_rt.kernels.options import Gate
from tessera_rt.kernels.routing import Routed
from tessera_rt.kernels.rows_gemm import rows_gemm
from tessera_rt.kernels.wgrad import bias_gradient, wgrad


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """``gate_up`` [E, 2 I (or I without a gate), H], ``down`` [E, H, I], biases [E, 2 I] and [E, H] or None.

    Any strides: storage [E, H, 2 I] is passed as its transpose.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MainGrads:
    """fp32 buffers of the weights' shapes, to which backward adds. A weight without one gets its ``.grad`` from
    autograd, written in the weight's dtype."""

    gate_up: Tensor | None = None
    down: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


NO_MAIN_GRADS = MainGrads()


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
    out: Tensor = _ExpertMlp.apply(
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
        rows, top_k = routed.rows, routed.top_k
        act, pre = rows_gemm(
            x, gate_up, rows, index=routed.source, divisor=top_k, bias=gate_up_bias, gate=gate,
            save_pre=not recompute, zero_tail=False, run=run,
        )  # fmt: skip
        y, _ = rows_gemm(act, down, rows, bias=down_bias, zero_tail=False, run=run)
        # The router's gradient comes from the rows' partial sums, which do not see a bias behind the second product.
        kept = y if down_bias is not None else None
        ctx.save_for_backward(x, gate_up, down, gate_up_bias, down_bias, router_weights, pre, kept)
        ctx.routed, ctx.gate, ctx.main_grads, ctx.run = routed, gate, main_grads, run
        return gather_sum(y, routed.position, router_weights, run=run)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up, down, gate_up_bias, down_bias, router_weights, pre, y = ctx.saved_tensors
        routed, gate, main, run = ctx.routed, ctx.gate, ctx.main_grads, ctx.run
        rows, source, top_k = routed.rows, routed.source, routed.top_k
        needs_x, needs_gate_up, needs_down, needs_gate_up_bias, needs_down_bias, needs_router = ctx.needs_input_grad[:6]
        if pre is None:
            _, pre = rows_gemm(
                x, gate_up, rows, index=source, divisor=top_k, bias=gate_up_bias, gate=gate,
                save_pre=True, write_out=False, zero_tail=False, run=run,
            )  # fmt: skip
        d_router = d_down_bias = None
        if y is None:
            d_pre, act, partials = gate_backward(
                grad, down.mT, pre, rows, gate=gate, index=source, divisor=top_k, scale=router_weights.flatten(),
                partials=needs_router, zero_tail=False, run=run,
            )  # fmt: skip
            if partials is not None:
                d_router = router_weight_gradient(partials, routed.position, run=run)
            d_rows, of_rows = grad, {"index": source, "divisor": top_k, "gather_grad": True}
        else:
            d_rows, d_router = gather_sum_backward(grad, y, source, rows, routed.position, router_weights, run=run)
            d_pre, act, _ = gate_backward(d_rows, down.mT, pre, rows, gate=gate, zero_tail=False, run=run)
            of_rows = {}
            d_down_bias = _into(
                main.down_bias, down_bias, needs_down_bias, lambda out, add: bias_gradient(
                    d_rows, rows, out, accumulate=add, run=run
                ),
            )  # fmt: skip
        d_down = _into(
            main.down, down, needs_down, lambda out, add: wgrad(
                d_rows, act, rows, out, accumulate=add, run=run, **of_rows
            ),
        )  # fmt: skip
        d_gate_up = _into(
            main.gate_up, gate_up, needs_gate_up, lambda out, add: wgrad(
                d_pre, x, rows, out, accumulate=add, index=source, divisor=top_k, gather_x=True, run=run
            ),
        )  # fmt: skip
        d_gate_up_bias = _into(
            main.gate_up_bias, gate_up_bias, needs_gate_up_bias, lambda out, add: bias_gradient(
                d_pre, rows, out, accumulate=add, run=run
            ),
        )  # fmt: skip
        d_x = None
        if needs_x:
            d_x_rows, _ = rows_gemm(d_pre, gate_up.mT, rows, kind="dgrad", zero_tail=False, run=run)
            d_x = gather_sum(d_x_rows, routed.position, run=run)
        d_router = d_router.to(router_weights.dtype) if needs_router and d_router is not None else None
        return d_x, d_gate_up, d_down, d_gate_up_bias, d_down_bias, d_router, None, None, None, None, None


def _into(main_grad: Tensor | None, weight: Tensor | None, needed: bool, compute: Any) -> Tensor | None:
    """Adds to the main gradient and returns None, or returns a gradient in the weight's dtype and layout."""
    if weight is None or not needed:
        return None
    if main_grad is not None:
        compute(main_grad, True)
        return None
    transposed = weight.dim() == 3 and not weight.is_contiguous() and weight.mT.is_contiguous()
    out = torch.empty_like(weight, memory_format=torch.preserve_format if transposed else torch.contiguous_format)
    compute(out, False)
    return out
