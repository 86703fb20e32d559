"""The experts in plain torch, for the CPU and any dtype: gather, first product, activation, second product, sum.

One operator forward and one backward (``tessera::experts``). Saved are the input and the first product; gathered rows
and activations are made again. The router's weights are applied to the activation, so that the sum over a token's
experts is a plain one, taken in fp32 (float64 for float64).

The first product has as many rows as the counts say. A compiler would break its graph at such a shape, so compiled code
has a form of its own (``tessera::experts_of_fixed_shape``) that saves its inputs alone and makes that product again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tessera_rt.kernels.options import Activation, Gate
from tessera_rt.kernels.weights import ExpertWeights
from tessera_rt.moe.activations import Activated, activated
from tessera_rt.moe.grouping import Grouping, bias_gradient, group_choices, rows_product, weight_gradient


class TorchBackend:
    """Any device, any floating dtype."""

    name = "torch"
    budget = None

    def __repr__(self) -> str:
        return "TorchBackend()"

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, gate: Gate) -> Tensor:
        return _run(x, ids, weights, experts, gate)

    def grouped(self, rows: Tensor, offsets: Tensor, experts: ExpertWeights, gate: Gate) -> Tensor:
        row = torch.arange(rows.shape[0], dtype=offsets.dtype, device=rows.device)
        ids = torch.bucketize(row, offsets[1:], right=True)  # E, so not routed, from offsets[E] on
        return _run(rows, ids.unsqueeze(1), None, experts, gate)


def _run(x: Tensor, ids: Tensor, weights: Tensor | None, experts: ExpertWeights, gate: Gate) -> Tensor:
    given = (
        x, ids, weights, experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias,
        int(gate.activation), gate.interleaved, gate.alpha, gate.limit,
    )  # fmt: skip
    out: Tensor = _experts_of_fixed_shape(*given) if torch.compiler.is_compiling() else _experts(*given)[0]
    return out


@torch.library.custom_op("tessera::experts", mutates_args=())
def _experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: int,
    interleaved: bool,
    alpha: float,
    limit: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out [T, H], first product [S, 2 I], and the grouping: source [S], position [T K], counts [E])."""
    gate = Gate(activation=Activation(activation), interleaved=interleaved, alpha=alpha, limit=limit)
    grouping, pre = _first_product(x, ids, gate_up, gate_up_bias)
    act = activated(pre, gate)
    if weights is not None:
        act *= _row_weights(weights, grouping)
    out = _sum_choices(rows_product(act, down, grouping), grouping, ids.shape)
    if down_bias is not None:
        out += _mixture(ids, weights, down_bias) @ down_bias
    return out, pre, grouping.source, grouping.position, grouping.counts


@_experts.register_fake
def _(
    x: Tensor, ids: Tensor, weights: Tensor | None, gate_up: Tensor, *args: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size()
    return (
        x.new_empty(x.shape),
        x.new_empty((rows, gate_up.shape[1])),
        ids.new_empty((rows,), dtype=torch.int64),
        ids.new_empty((ids.numel(),), dtype=torch.int64),
        ids.new_empty((gate_up.shape[0],), dtype=torch.int64),
    )


@torch.library.custom_op("tessera::experts_backward", mutates_args=())
def _experts_backward(
    grad: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    pre: Tensor,
    source: Tensor,
    position: Tensor,
    counts: Tensor,
    activation: int,
    interleaved: bool,
    alpha: float,
    limit: float,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Gradients of x, weights, gate_up, down and both biases; an empty tensor for each that is not needed."""
    gate = Gate(activation=Activation(activation), interleaved=interleaved, alpha=alpha, limit=limit)
    needs_x, needs_weights, needs_gate_up, needs_down, needs_gate_up_bias, needs_down_bias = needs
    grouping, top_k = Grouping.restored(source, position, counts, _work(gate_up)), ids.shape[1]
    d_x, d_weights, d_gate_up, d_down, d_gate_up_bias, d_down_bias = (grad.new_empty(0) for _ in needs)

    # One buffer of rows serves all steps, and the largest results come when the least is held beside them.
    rows = _gather(grad, grouping, top_k)
    d_act = rows_product(rows, down.mT, grouping)
    activation_of = Activated.of(pre, gate)
    act = activation_of.value
    if weights is not None:
        if needs_weights:
            d_weights = _by_choice((act * d_act).sum(-1, dtype=weights.dtype), grouping).view(ids.shape)
        factor = _row_weights(weights, grouping)
        d_act *= factor
        act *= factor
    d_pre = activation_of.gradient(d_act)
    del activation_of, d_act
    if needs_gate_up:
        d_gate_up = _weight_gradient(d_pre, _gather(x, grouping, top_k, out=rows), grouping, gate_up)
    if needs_gate_up_bias:
        d_gate_up_bias = bias_gradient(d_pre, grouping)
    if needs_x:
        d_x = _sum_choices(rows_product(d_pre, gate_up.mT, grouping, out=rows), grouping, ids.shape)
    del d_pre
    if needs_down:
        d_down = _weight_gradient(_gather(grad, grouping, top_k, out=rows), act, grouping, down)
    if down_bias is not None:
        if needs_down_bias:
            d_down_bias = _mixture(ids, weights, down_bias).mT @ grad
        if weights is not None and needs_weights:
            d_weights += _of_choices(grad @ down_bias.mT, ids)
    return [d_x, d_weights, d_gate_up, d_down, d_gate_up_bias, d_down_bias]


@_experts_backward.register_fake
def _empty_gradients(
    grad: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    *args: Any,
) -> list[Tensor]:
    needs = args[-1]
    inputs = (x, weights, gate_up, down, gate_up_bias, down_bias)
    return [
        _empty_like(tensor) if needed and tensor is not None else grad.new_empty(0)
        for tensor, needed in zip(inputs, needs, strict=True)
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:7], *output[1:])
    ctx.gate = inputs[7:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 11
    return _gradients(ctx, lambda needs: _experts_backward(grad, *ctx.saved_tensors, *ctx.gate, needs))


def _gradients(ctx: Any, backward: Callable[[list[bool]], list[Tensor]]) -> tuple[Tensor | None, ...]:
    """What ``backward`` gives for what is needed, at the places of the operator's inputs."""
    needs = [ctx.needs_input_grad[i] for i in (0, 2, 3, 4, 5, 6)]
    d_x, d_weights, *d_parameters = (g if needed else None for g, needed in zip(backward(needs), needs, strict=True))
    return (d_x, None, d_weights, *d_parameters, None, None, None, None)


_experts.register_autograd(_backward, setup_context=_save)


# -- compiled code ----------------------------------------------------------------------------------------------------


@torch.library.custom_op("tessera::experts_of_fixed_shape", mutates_args=())
def _experts_of_fixed_shape(
    x: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: int,
    interleaved: bool,
    alpha: float,
    limit: float,
) -> Tensor:
    out: Tensor = _experts(
        x, ids, weights, gate_up, down, gate_up_bias, down_bias, activation, interleaved, alpha, limit
    )[0]
    return out


@_experts_of_fixed_shape.register_fake
def _(x: Tensor, *args: object) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("tessera::experts_of_fixed_shape_backward", mutates_args=())
def _experts_of_fixed_shape_backward(
    grad: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: int,
    interleaved: bool,
    alpha: float,
    limit: float,
    needs: Sequence[bool],
) -> list[Tensor]:
    grouping, pre = _first_product(x, ids, gate_up, gate_up_bias)
    found: list[Tensor] = _experts_backward(
        grad, x, ids, weights, gate_up, down, gate_up_bias, down_bias, pre, grouping.source, grouping.position,
        grouping.counts, activation, interleaved, alpha, limit, needs,
    )  # fmt: skip
    return found


_experts_of_fixed_shape_backward.register_fake(_empty_gradients)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.gate = inputs[7:]


def _backward_of_fixed_shape(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, lambda needs: _experts_of_fixed_shape_backward(grad, *ctx.saved_tensors, *ctx.gate, needs))


_experts_of_fixed_shape.register_autograd(_backward_of_fixed_shape, setup_context=_save_inputs)


# -- parts ------------------------------------------------------------------------------------------------------------


def _work(gate_up: Tensor) -> int:
    return gate_up.shape[1] * gate_up.shape[2]


def _first_product(x: Tensor, ids: Tensor, gate_up: Tensor, bias: Tensor | None) -> tuple[Grouping, Tensor]:
    """Where the choices go, and their rows [S, 2 I] of the first product."""
    grouping = group_choices(ids, gate_up.shape[0], _work(gate_up))
    return grouping, rows_product(_gather(x, grouping, ids.shape[1]), gate_up, grouping, bias)


def _gather(x: Tensor, grouping: Grouping, top_k: int, out: Tensor | None = None) -> Tensor:
    """x [T, H] -> the rows [S, H] of its choices; zero in rows that nobody fills."""
    with_zero = torch.cat([x, x.new_zeros(1, x.shape[1])])
    return torch.index_select(with_zero, 0, grouping.source // top_k, out=out)


def _row_weights(weights: Tensor, grouping: Grouping) -> Tensor:
    """weights [T, K] -> [S, 1], 0 in rows that nobody fills."""
    return torch.cat([weights.flatten(), weights.new_zeros(1)]).index_select(0, grouping.source).unsqueeze(1)


def _by_choice(of_rows: Tensor, grouping: Grouping) -> Tensor:
    """A value for each row [S] -> for each choice [T K], 0 for those not routed."""
    return torch.cat([of_rows, of_rows.new_zeros(1)]).index_select(0, grouping.position)


def _sum_choices(rows: Tensor, grouping: Grouping, shape: Sequence[int]) -> Tensor:
    """The sum of each token's rows over k in order, taken in fp32 and rounded once: [S, H] -> [T, H]."""
    tokens, top_k = shape
    if not grouping.total:
        return rows.new_zeros(tokens, rows.shape[1])
    if grouping.total == tokens * top_k:
        return functional.embedding_bag(grouping.position.view(tokens, top_k), rows, mode="sum")
    there = grouping.position < grouping.rows
    starts = there.view(tokens, top_k).sum(1).cumsum(0)
    starts = torch.cat([starts.new_zeros(1), starts])
    return functional.embedding_bag(grouping.position[there], rows, starts, mode="sum", include_last_offset=True)


def _mixture(ids: Tensor, weights: Tensor | None, bias: Tensor) -> Tensor:
    """[T, E]: how much of each expert's last bias a token gets."""
    experts = bias.shape[0]
    ids, there = ids.long(), (ids >= 0) & (ids < experts)
    share = there.to(bias.dtype) if weights is None else (weights * there).to(bias.dtype)
    return bias.new_zeros(ids.shape[0], experts).scatter_add_(1, ids.where(there, 0), share)


def _of_choices(of_experts: Tensor, ids: Tensor) -> Tensor:
    """of_experts [T, E] at each choice: [T, K], 0 for those not routed."""
    there = (ids >= 0) & (ids < of_experts.shape[1])
    return of_experts.gather(1, ids.long().where(there, 0)) * there


def _weight_gradient(grad: Tensor, rows: Tensor, grouping: Grouping, weight: Tensor) -> Tensor:
    """The gradient of ``weight`` [E, N, K] in its layout: dense, or the transpose of what is dense."""
    if _is_transposed(weight):
        return weight_gradient(rows, grad, grouping).mT
    return weight_gradient(grad, rows, grouping)


def _is_transposed(weight: Tensor) -> bool:
    return weight.dim() == 3 and not weight.is_contiguous() and weight.mT.is_contiguous()


def _empty_like(tensor: Tensor) -> Tensor:
    if _is_transposed(tensor):
        return tensor.mT.new_empty(tensor.mT.shape).mT
    return tensor.new_empty(tensor.shape)
