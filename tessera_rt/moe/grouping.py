"""Bringing chosen tokens into expert order on the host, and products of rows that are grouped by expert.

Neighbouring experts with nearly as many rows form a *segment*: each of them gets the height of the fullest one (rows
that nobody fills are zero), and a product over the segment is one batched product, so one parallel region. Where loads
are even there is one segment, where they differ there are several; ``segments`` finds those of least cost. Any dtype
and any sizes.

Shapes: T tokens, K choices per token, E experts, S rows with padding, N and K columns of a product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera_rt.moe.host_memory import large_empty

# Costs in rows. A product of few rows waits for its weight, so rows below this number cost nothing more.
_WEIGHT_ROWS = 32
_SEGMENT_WORK = 3_000_000  # multiply-adds in the time that another batched product takes to start and to end
_LONGEST = 16  # experts of a segment that the search looks back over


@dataclass(frozen=True, slots=True)
class Segment:
    """Experts ``first`` to ``last`` - 1, each with ``height`` rows, from row ``start`` on."""

    first: int
    last: int
    start: int
    height: int

    @property
    def experts(self) -> slice:
        return slice(self.first, self.last)

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + (self.last - self.first) * self.height)

    def of(self, rows: Tensor) -> Tensor:
        """This segment's rows of [S, N] as [experts, height, N]."""
        return rows[self.rows].view(self.last - self.first, self.height, rows.shape[1])


@dataclass(frozen=True, slots=True)
class Grouping:
    """Where the choices of a batch went.

    ``source`` [S] int64: the flat choice t K + k in each row, T K in rows that nobody fills. ``position`` [T K] int64:
    the row of each choice, S for those not routed. ``counts`` [E] int64: rows of each expert without padding.
    """

    source: Tensor
    position: Tensor
    counts: Tensor
    segments: tuple[Segment, ...]
    total: int

    @classmethod
    def restored(cls, source: Tensor, position: Tensor, counts: Tensor, work: int) -> Grouping:
        """The grouping of which these are the tensors; ``work`` as it was."""
        of_expert = counts.tolist()
        return cls(source, position, counts, segments(of_expert, work), sum(of_expert))

    @property
    def rows(self) -> int:
        return self.source.numel()


def group_choices(ids: Tensor, experts: int, work: int) -> Grouping:
    """``ids`` [T, K] of any integer type -> their grouping; ids outside 0 .. E - 1 are not routed. Reads the counts.

    ``work``: multiply-adds of one row in the larger product.
    """
    flat = ids.reshape(-1).long()
    flat = torch.where((flat < 0) | (flat >= experts), experts, flat)
    counts = torch.bincount(flat, minlength=experts + 1)[:experts]
    of_expert = counts.tolist()
    total, found = sum(of_expert), segments(of_expert, work)
    by_expert, order = flat.sort(stable=True)
    by_expert, order = by_expert[:total], order[:total]
    starts = [segment.start + i * segment.height for segment in found for i in range(segment.last - segment.first)]
    # From packed to padded rows.
    shift = torch.tensor(starts, dtype=torch.int64, device=flat.device) - (counts.cumsum(0) - counts)
    rows = torch.arange(total, device=flat.device) + shift[by_expert]
    size = found[-1].rows.stop if found else 0
    source = flat.new_full((size,), flat.numel()).index_copy_(0, rows, order)
    position = flat.new_full((flat.numel(),), size).index_copy_(0, order, rows)
    return Grouping(source, position, counts, found, total)


def segments(counts: Sequence[int], work: int) -> tuple[Segment, ...]:
    """The segments of least cost for these ``counts`` [E]; a dynamic program over the last segment's start.

    Cost in rows of ``work`` multiply-adds: of a segment, its experts times its height, and what a product costs at all.
    """
    if not counts:
        return ()
    extra = segment_rows(work)
    if min(counts) > 0 and max(counts) <= _WEIGHT_ROWS:
        return (Segment(0, len(counts), 0, max(counts)),)
    best, begin = [0] * (len(counts) + 1), [0] * (len(counts) + 1)
    for last in range(1, len(counts) + 1):
        height, least = 0, None
        for first in range(last - 1, max(last - _LONGEST, 0) - 1, -1):
            height = max(height, counts[first])
            cost = best[first]
            if height:
                cost += extra + (last - first) * max(height, _WEIGHT_ROWS)
            if least is None or cost <= least:
                least, begin[last] = cost, first
        best[last] = least or 0
    bounds = [len(counts)]
    while bounds[-1]:
        bounds.append(begin[bounds[-1]])
    found, start = [], 0
    for last, first in zip(bounds[-2::-1], bounds[:0:-1], strict=True):
        found.append(Segment(first, last, start, max(counts[first:last])))
        start = found[-1].rows.stop
    return tuple(found)


def segment_rows(work: int) -> int:
    """How many rows of ``work`` multiply-adds the start of another product is worth."""
    return 1 + _SEGMENT_WORK // max(work, 1)


def rows_product(
    rows: Tensor, weight: Tensor, grouping: Grouping, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Rows [S, K] of expert e times weight[e] [N, K] transposed, plus bias[e] [N] -> ``out`` [S, N]."""
    if out is None:
        out = rows.new_empty(rows.shape[0], weight.shape[1])
    for part in _filled(grouping):
        torch.bmm(part.of(rows), weight[part.experts].mT, out=part.of(out))
        if bias is not None:
            part.of(out).add_(bias[part.experts].unsqueeze(1))
    return out


def weight_gradient(grad: Tensor, rows: Tensor, grouping: Grouping) -> Tensor:
    """For each expert the sum over its rows of grad[r]^T rows[r]: [S, N], [S, K] -> [E, N, K]."""
    shape = torch.Size((grouping.counts.numel(), grad.shape[1], rows.shape[1]))
    out = large_empty(shape, grad.dtype, grad.device)
    for part in grouping.segments:
        if part.height:
            torch.bmm(part.of(grad).mT, part.of(rows), out=out[part.experts])
        else:
            out[part.experts].zero_()
    return out


def bias_gradient(grad: Tensor, grouping: Grouping) -> Tensor:
    """For each expert the sum of its rows of ``grad`` [S, N] -> [E, N]."""
    out = grad.new_zeros(grouping.counts.numel(), grad.shape[1])
    for part in _filled(grouping):
        torch.sum(part.of(grad), 1, out=out[part.experts])
    return out


def _filled(grouping: Grouping) -> Iterator[Segment]:
    return (segment for segment in grouping.segments if segment.height)
