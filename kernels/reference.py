"""Plain torch for every kernel, under the same name: what the kernels are held to, and what runs where Triton does not.

Shapes: T tokens, K choices per token, E experts, R rows (a row is one chosen token), H hidden, I intermediate. Rows are
ordered by expert: those of expert e are offsets[e] to offsets[e + 1], with offsets [E + 1]. Everything works in the
dtype of the inputs (float64 for tests); integer results have the kernels' dtypes. Rows behind offsets[E] are zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from tessera_rt.kernels.options import NO_GATE, Activation, Gate, RouterRule


def topk(
    logits: Tensor, rule: RouterRule, *, bias: Tensor | None = None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Chosen experts [T, K] int32, distinct in each row, best first, and their weights [T, K].

    ``bias`` [E] is added to the scores for the choice only. Tokens whose ``mask`` [T] is False get ids -1 and weights
    0. The order is that of a stable descending sort: NaN first, ties by the lower id. Differentiable in ``logits``.
    """
    precision = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(precision)
    scores = logits.sigmoid() if rule.score == "sigmoid" else logits.softmax(-1)
    choice = logits if rule.chooses_by_logits(bias is not None) else scores
    choice = choice.detach()
    if bias is not None:
        choice = choice + bias.to(precision)
    if rule.groups > 1:
        grouped = choice.reshape(*choice.shape[:-1], rule.groups, choice.shape[-1] // rule.groups)
        best = grouped.sort(dim=-1, descending=True, stable=True).values
        of_group = best[..., :2].sum(-1) if rule.group_score == "top2" else best[..., 0]
        kept = of_group.sort(dim=-1, descending=True, stable=True).indices[:, : rule.keep_groups]
        closed = torch.ones_like(of_group, dtype=torch.bool).scatter_(-1, kept, False)
        choice = grouped.masked_fill(closed.unsqueeze(-1), -torch.inf).flatten(-2)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k]
    if rule.softmax_after_topk:
        weights = logits.gather(-1, ids).softmax(-1)
    else:
        weights = scores.gather(-1, ids)
    if rule.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + rule.eps)
    weights = weights * rule.scale
    if mask is not None:
        ids = ids.masked_fill(~mask.unsqueeze(-1), -1)
        weights = weights.masked_fill(~mask.unsqueeze(-1), 0.0)
    return ids.to(torch.int32), weights


def topk_backward(grad: Tensor, logits: Tensor, ids: Tensor, rule: RouterRule) -> Tensor:
    """Gradient [T, E] of the logits for that of the weights ``grad`` [T, K], the choice being fixed.

    ``ids`` are those that ``topk`` returned: choices that were dropped later keep theirs and have a zero in ``grad``.
    An id outside 0 .. E - 1 is no choice: the weights are those of the token's others. Tokens without any get zeros.
    """
    present = (ids >= 0) & (ids < logits.shape[1])
    with torch.enable_grad():
        leaf = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).requires_grad_()
        safe = ids.where(present, 0).long()
        if rule.softmax_after_topk:
            weights = leaf.gather(-1, safe).masked_fill(~present, -torch.inf).softmax(-1)
        else:
            scores = leaf.sigmoid() if rule.score == "sigmoid" else leaf.softmax(-1)
            weights = scores.gather(-1, safe).masked_fill(~present, 0.0)
        if rule.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + rule.eps)
        weights = (weights * rule.scale).masked_fill(~present, 0.0)
        (out,) = torch.autograd.grad(weights, leaf, grad.to(weights.dtype))
    return out.masked_fill(~present.any(-1, keepdim=True), 0.0).to(logits.dtype)


def place(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """position [T, K], source [T K] and offsets [E + 1], all int32, of choices ``ids`` [T, K].

    Choice t K + k (in this order within an expert) goes to row position[t, k], and source[row] = t K + k. Ids outside
    0 .. E - 1 are dropped: position -1. Rows behind the last one have source -1.
    """
    flat = ids.flatten().long()
    valid = (flat >= 0) & (flat < experts)
    order = torch.where(valid, flat, experts).argsort(stable=True)
    counts = flat[valid].bincount(minlength=experts)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    total = int(offsets[-1])
    source = torch.full_like(flat, -1)
    source[:total] = order[:total]
    position = torch.full_like(flat, -1)
    position[order[:total]] = torch.arange(total, device=ids.device)
    return position.view(ids.shape).int(), source.int(), offsets.int()


def tile_table(offsets: Tensor, block_m: int) -> Tensor:
    """Entries expert << 16 | number of every tile of ``block_m`` rows, experts in order, int32."""
    counts = offsets.diff().tolist()
    entries = [e << 16 | tile for e, count in enumerate(counts) for tile in range(-(-count // block_m))]
    return torch.tensor(entries, dtype=torch.int32, device=offsets.device)


def activate(pre: Tensor, gate: Gate) -> Tensor:
    """The activation of the first product ``pre`` [R, 2 I] or [R, I] -> [R, I]."""
    kind = gate.activation
    if kind is Activation.NONE:
        return pre
    if kind is Activation.RELU2:
        return functional.relu(pre).square()
    g, u = (pre[:, ::2], pre[:, 1::2]) if gate.interleaved else pre.chunk(2, dim=-1)
    if kind is Activation.GEGLU:
        return functional.gelu(g) * u
    if kind is Activation.GEGLU_TANH:
        return functional.gelu(g, approximate="tanh") * u
    if kind in (Activation.SWIGLU_CLAMPED, Activation.SWIGLU_OSS):
        g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
    if kind is Activation.SWIGLU_OSS:
        return g * torch.sigmoid(gate.alpha * g) * (u + 1)
    return functional.silu(g) * u


def rows_gemm(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    rows: int,
    *,
    index: Tensor | None = None,
    divisor: int = 1,
    bias: Tensor | None = None,
    gate: Gate = NO_GATE,
) -> tuple[Tensor, Tensor]:
    """(activation, product) of x[row] weight[e]^T + bias[e]: ``weight`` [E, N, K], ``bias`` [E, N], ``rows`` = R.

    Row r reads x[index[r] // divisor], or x[r] without ``index``. The input gradient is the same function with
    ``weight.mT``.
    """
    pre = x.new_zeros(rows, weight.shape[1])
    for e, span in _spans(offsets):
        part = _rows_of(x, span, index, divisor) @ weight[e].mT
        pre[span] = part if bias is None else part + bias[e]
    out = torch.zeros_like(pre[:, : gate.width(pre.shape[1])])
    total = int(offsets[-1])
    out[:total] = activate(pre[:total], gate)
    return out, pre


def gate_backward(
    grad: Tensor,
    weight: Tensor,
    pre: Tensor,
    offsets: Tensor,
    *,
    gate: Gate,
    index: Tensor | None = None,
    divisor: int = 1,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(d pre, activation, row partials [R]) behind the second product ``weight`` [E, I, H] (the input-gradient view).

    d act = grad[row] weight[e]^T; with ``scale`` (flat router weights, read at index[r]) both d act and the returned
    activation are multiplied by it. The partials are <activation, d act> before scaling: the gradient of the scale.
    """
    d_pre, act = torch.zeros_like(pre), pre.new_zeros(pre.shape[0], gate.width(pre.shape[1]))
    partials = pre.new_zeros(pre.shape[0])
    for e, span in _spans(offsets):
        d_act = _rows_of(grad, span, index, divisor) @ weight[e].mT
        with torch.enable_grad():
            leaf = pre[span].detach().requires_grad_()
            value = activate(leaf, gate)
        factor = torch.ones_like(d_act[:, :1])
        if scale is not None:
            assert index is not None
            factor = scale.flatten()[index[span].long()].to(d_act.dtype).unsqueeze(-1)
        (d_pre[span],) = torch.autograd.grad(value, leaf, d_act * factor)
        value = value.detach()
        partials[span] = (value * d_act).sum(-1)
        act[span] = value * factor
    return d_pre, act, partials


def wgrad(
    grad: Tensor,
    x: Tensor,
    offsets: Tensor,
    *,
    index: Tensor | None = None,
    divisor: int = 1,
    gather_grad: bool = False,
    gather_x: bool = False,
) -> Tensor:
    """[E, N, K]: for each expert the sum over its rows of grad[r]^T x[r]; exact zeros for experts without rows."""
    out = grad.new_zeros(offsets.numel() - 1, grad.shape[1], x.shape[1])
    for e, span in _spans(offsets):
        left = _rows_of(grad, span, index if gather_grad else None, divisor)
        out[e] = left.mT @ _rows_of(x, span, index if gather_x else None, divisor)
    return out


def bias_gradient(grad: Tensor, offsets: Tensor) -> Tensor:
    """[E, N]: for each expert the sum of its rows of ``grad`` [R, N]."""
    out = grad.new_zeros(offsets.numel() - 1, grad.shape[1])
    for e, span in _spans(offsets):
        out[e] = grad[span].sum(0)
    return out


def gather_sum(y: Tensor, position: Tensor, weights: Tensor | None = None) -> Tensor:
    """out[t] = sum over k of weights[t, k] y[position[t, k]], k ascending; position -1 counts as nothing."""
    out = y.new_zeros(position.shape[0], y.shape[1])
    for k in range(position.shape[1]):
        there = position[:, k] >= 0
        term = y[position[there, k].long()]
        out[there] += term if weights is None else term * weights[there, k, None].to(y.dtype)
    return out


def gather_sum_backward(
    grad: Tensor, y: Tensor, source: Tensor, offsets: Tensor, position: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """(d y [R, H], d weights [T, K]) of ``gather_sum`` for ``grad`` [T, H]."""
    top_k, total = position.shape[1], int(offsets[-1])
    flat = source[:total].long()
    d_y = torch.zeros_like(y)
    d_y[:total] = grad[flat // top_k] * weights.flatten()[flat, None].to(grad.dtype)
    d_weights = torch.zeros_like(weights)
    there = position >= 0
    tokens = there.nonzero()[:, 0]
    d_weights[there] = (y[position[there].long()] * grad[tokens]).sum(-1).to(weights.dtype)
    return d_y, d_weights


def router_weight_gradient(partials: Tensor, position: Tensor) -> Tensor:
    """d weights [T, K] out of row partials [R, tiles], summed over the tiles in order; 0 for dropped choices."""
    rows = partials.sum(-1)
    return rows[position.clamp(min=0).long()].masked_fill(position < 0, 0.0)


def _spans(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, with their rows."""
    return ((e, slice(a, b)) for e, (a, b) in enumerate(pairwise(offsets.tolist())) if a < b)


def _rows_of(x: Tensor, span: slice, index: Tensor | None, divisor: int) -> Tensor:
    return x[span] if index is None else x[index[span].long() // divisor]
