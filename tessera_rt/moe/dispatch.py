"""Bringing rows to their experts and back: send order, row layouts, regrouping, weighted sum.

A token's row is sent once per chosen expert. Rows leave in the order of their expert ids, ties by token, so each
destination's rows are contiguous and ordered by its local experts; they arrive ordered by (source, local expert), are
regrouped by (local expert, source) for the experts, and go back the same way. The weighted sum at home runs over k in
its order, so its bits do not depend on how many ranks share the experts.

Shapes: T tokens, K experts per token, E experts, H hidden, R rows that a rank sends or receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tessera_rt.differentiable_once import differentiable_once
from tessera_rt.errors import Problem, TransportError
from tessera_rt.moe.steps import Pending, RowLayout


@dataclass(frozen=True, slots=True)
class Routing:
    """What all ranks know of a dispatch: ``counts`` [dp, ep, E] int64 on the host, and this rank's ``layout``."""

    counts: Tensor
    layout: RowLayout


def send_order(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """``ids`` [T, K] -> (order [R], counts [E]), int64: the flat indices t K + k in the order in which rows leave.

    Ids outside 0 .. E - 1 mark choices that are not sent.
    """
    flat = ids.reshape(-1)
    flat = torch.where((flat < 0) | (flat >= experts), experts, flat)
    counts = torch.bincount(flat, minlength=experts + 1)
    order = flat.argsort(stable=True)
    return order[: flat.numel() - int(counts[experts])], counts[:experts]


def gather_rows(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """``x`` [T, H] -> the rows to send [R, H]. Backward sums a token's rows over k in order."""
    rows: Tensor = _GatherRows.apply(x, order, top_k)  # type: ignore[no-untyped-call]
    return rows


def weighted_sum(rows: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """Returned ``rows`` [R, H] in send order, ``weights`` [T, K] -> [T, H]: over k in order, in the weights' precision.

    Choices that were not sent contribute zero. The result has the rows' dtype.
    """
    tokens, top_k = weights.shape
    returned: Tensor = _ScatterRows.apply(rows, order, tokens * top_k)  # type: ignore[no-untyped-call]
    total = rows.new_zeros((tokens, rows.shape[1]), dtype=weights.dtype)
    choices = returned.view(tokens, top_k, rows.shape[1]).unbind(1)
    for row, weight in zip(choices, weights.unbind(1), strict=True):
        total = total + row.to(weights.dtype) * weight.unsqueeze(-1)
    return total.to(rows.dtype)


def row_layout(counts: Tensor, dp_rank: int, ep_rank: int) -> RowLayout:
    """The splits of one rank from all ranks' per-expert counts [dp, ep, E]; experts are spread evenly, in order.

    Raises TransportError for counts that cannot be right: they come over the network.
    """
    ep_size, experts = counts.shape[1:]
    if experts % ep_size or bool((counts < 0).any()):
        problem = Problem("counts", counts.tolist(), f"at least 0, for a number of experts divisible by {ep_size}")
        raise TransportError.of("row counts", [problem])
    local = experts // ep_size
    by_owner = counts[dp_rank].view(ep_size, ep_size, local)  # [source, owner, local expert]
    received = by_owner[:, ep_rank]
    return RowLayout(
        send=tuple(by_owner[ep_rank].sum(-1).tolist()),
        receive=tuple(received.sum(-1).tolist()),
        experts=tuple(map(tuple, received.tolist())),
    )


def expert_offsets(layout: RowLayout) -> tuple[int, ...]:
    """Where each local expert's rows start once they are regrouped, and the total: E_local + 1 integers."""
    return (0, *accumulate(sum(of_expert) for of_expert in zip(*layout.experts, strict=True)))


def group_by_expert(rows: Tensor, layout: RowLayout) -> Tensor:
    """Received rows, ordered by (source, expert), to the order (expert, source)."""
    return _permuted(rows, layout, back=False)


def group_by_source(rows: Tensor, layout: RowLayout) -> Tensor:
    """The inverse of ``group_by_expert``."""
    return _permuted(rows, layout, back=True)


class RoutingPending:
    """Gathered counts with the layout that follows from them: what a COUNT step returns."""

    def __init__(self, counts: Pending, dp_rank: int, ep_rank: int) -> None:
        self._counts, self._dp_rank, self._ep_rank = counts, dp_rank, ep_rank

    @property
    def output(self) -> Routing:
        return self._routing(self._counts.output)

    def wait(self) -> Routing:
        return self._routing(self._counts.wait())

    def _routing(self, counts: Tensor) -> Routing:
        return Routing(counts, row_layout(counts, self._dp_rank, self._ep_rank))


def _permuted(rows: Tensor, layout: RowLayout, *, back: bool) -> Tensor:
    if len(layout.experts) == 1 or len(layout.experts[0]) == 1:
        return rows  # one source or one expert: both orders are the same
    lengths = torch.tensor(layout.experts, device=rows.device)
    starts = (lengths.flatten().cumsum(0) - lengths.flatten()).view_as(lengths)
    blocks, block_starts = lengths.mT.flatten(), starts.mT.flatten()
    shift = block_starts - (blocks.cumsum(0) - blocks)  # from a row's place by expert to its place by source
    forth = shift.repeat_interleave(blocks) + torch.arange(rows.shape[0], device=rows.device)
    inverse = torch.empty_like(forth)
    inverse[forth] = torch.arange(forth.numel(), device=rows.device)
    permuted: Tensor = _Permute.apply(rows, *((inverse, forth) if back else (forth, inverse)))  # type: ignore[no-untyped-call]
    return permuted


class _Permute(torch.autograd.Function):
    """rows[index], whose backward is a gather too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape = (x.shape[0], top_k, x.shape[1])
        return x.index_select(0, order // top_k)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        tokens, top_k, hidden = ctx.shape
        precision = torch.promote_types(grad.dtype, torch.float32)
        choices = _scattered(grad, order, tokens * top_k).view(tokens, top_k, hidden).unbind(1)
        total = choices[0].to(precision)
        for choice in choices[1:]:
            total = total + choice.to(precision)
        return total.to(grad.dtype), None, None


class _ScatterRows(torch.autograd.Function):
    """Rows in send order to flat (token, k) order [size, H]; places that were not sent hold zero."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(order)
        return _scattered(rows, order, size)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order), None, None


def _scattered(rows: Tensor, order: Tensor, size: int) -> Tensor:
    return rows.new_zeros(size, rows.shape[1]).index_copy_(0, order, rows)
