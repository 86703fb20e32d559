"""The experts' products without the sum over a token's choices, forward and backward: what the layer of one rank
(``expert_mlp``) and the expert-parallel one, which sums elsewhere, share.

Rows are ordered by expert; row r is choice ``routed.source[r]`` and reads its token, T K choices of T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tessera_rt.kernels.gate_backward import gate_backward
from tessera_rt.kernels.gather_sum import gather_sum_backward, router_weight_gradient
from tessera_rt.kernels.operands import DEFAULT_RUN, Run
from tessera_rt.kernels.options import Gate
from tessera_rt.kernels.routing import Routed
from tessera_rt.kernels.row_gradients import ALL_NEEDS, Needs, RowGradients
from tessera_rt.kernels.rows_gemm import rows_gemm
from tessera_rt.kernels.weights import NO_MAIN_GRADS, ExpertWeights, MainGrads
from tessera_rt.kernels.wgrad import bias_gradient, wgrad


def expert_rows(
    x: Tensor, weights: ExpertWeights, routed: Routed, gate: Gate, *, save_pre: bool, run: Run = DEFAULT_RUN
) -> tuple[Tensor, Tensor | None]:
    """x [T, H] -> (y [R, H], first product [R, 2 I] if ``save_pre``); rows of nobody are left unwritten."""
    act, pre = rows_gemm(
        x, weights.gate_up, routed.rows, index=routed.source, divisor=routed.top_k, bias=weights.gate_up_bias,
        gate=gate, save_pre=save_pre, zero_tail=False, run=run,
    )  # fmt: skip
    y, _ = rows_gemm(act, weights.down, routed.rows, bias=weights.down_bias, zero_tail=False, run=run)
    return y, pre


def expert_rows_backward(
    grad: Tensor,
    x: Tensor,
    weights: ExpertWeights,
    routed: Routed,
    router_weights: Tensor,
    gate: Gate,
    *,
    pre: Tensor | None,
    y: Tensor | None,
    main_grads: MainGrads = NO_MAIN_GRADS,
    needs: Needs = ALL_NEEDS,
    run: Run = DEFAULT_RUN,
) -> RowGradients:
    """Gradients for ``grad`` [T, H] of out[t] = sum over k of router_weights[t, k] y[position[t, k]].

    ``pre`` as saved, or None to compute it again; ``y`` is needed exactly when there is a bias behind the second
    product: the router's gradient otherwise comes from the rows' partial sums, which do not see such a bias.
    """
    rows, source, top_k = routed.rows, routed.source, routed.top_k
    if pre is None:
        _, pre = rows_gemm(
            x, weights.gate_up, rows, index=source, divisor=top_k, bias=weights.gate_up_bias, gate=gate,
            save_pre=True, write_out=False, zero_tail=False, run=run,
        )  # fmt: skip
        assert pre is not None
    d_router = d_down_bias = None
    of_rows: dict[str, Any] = {}
    if y is None:
        d_pre, act, partials = gate_backward(
            grad, weights.down.mT, pre, rows, gate=gate, index=source, divisor=top_k, scale=router_weights.flatten(),
            partials=needs.router, zero_tail=False, run=run,
        )  # fmt: skip
        if partials is not None:
            d_router = router_weight_gradient(partials, routed.position, run=run)
        d_rows = grad
        of_rows = {"index": source, "divisor": top_k, "gather_grad": True}
    else:
        d_rows, d_router = gather_sum_backward(grad, y, source, rows, routed.position, router_weights, run=run)
        d_pre, act, _ = gate_backward(d_rows, weights.down.mT, pre, rows, gate=gate, zero_tail=False, run=run)
        d_down_bias = _into(
            main_grads.down_bias, weights.down_bias, needs.down_bias, lambda out, add: bias_gradient(
                d_rows, rows, out, accumulate=add, run=run
            ),
        )  # fmt: skip
    d_down = _into(
        main_grads.down, weights.down, needs.down, lambda out, add: wgrad(
            d_rows, act, rows, out, accumulate=add, run=run, **of_rows
        ),
    )  # fmt: skip
    d_gate_up = _into(
        main_grads.gate_up, weights.gate_up, needs.gate_up, lambda out, add: wgrad(
            d_pre, x, rows, out, accumulate=add, index=source, divisor=top_k, gather_x=True, run=run
        ),
    )  # fmt: skip
    d_gate_up_bias = _into(
        main_grads.gate_up_bias, weights.gate_up_bias, needs.gate_up_bias, lambda out, add: bias_gradient(
            d_pre, rows, out, accumulate=add, run=run
        ),
    )  # fmt: skip
    d_x_rows = None
    if needs.x:
        d_x_rows, _ = rows_gemm(d_pre, weights.gate_up.mT, rows, kind="dgrad", zero_tail=False, run=run)
    d_router = d_router if needs.router else None
    return RowGradients(d_x_rows, d_router, d_gate_up, d_down, d_gate_up_bias, d_down_bias)


def _into(
    main_grad: Tensor | None, weight: Tensor | None, needed: bool, compute: Callable[[Tensor, bool], object]
) -> Tensor | None:
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
