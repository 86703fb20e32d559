"""Experts of one layer spread over the ranks of an expert-parallel group.

Rank r of n holds experts r E/n to (r + 1) E/n - 1. Tokens travel to their experts and back with exact splits. Every
rank calls every exchange, forward and backward, with no token as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tessera_rt.differentiable_once import differentiable_once
from tessera_rt.errors import Problem, SpecError
from tessera_rt.kernels.options import Gate
from tessera_rt.kernels.weights import ExpertWeights
from tessera_rt.moe.backends import grouped_experts
from tessera_rt.moe.dispatch import (
    Routing,
    RoutingPending,
    expert_offsets,
    gather_rows,
    group_by_expert,
    group_by_source,
    send_order,
    weighted_sum,
)
from tessera_rt.moe.steps import RowLayout, Transport
from tessera_rt.moe.transport import CollectiveTransport, WorkPending


@dataclass(frozen=True)
class ExpertShard:
    """This rank's part of a layer's ``count`` experts. Copies of a model share the group. ``average``: weights'
    gradients are divided by the group's size."""

    group: dist.ProcessGroup
    count: int
    average: bool = False
    timeout_s: float = 300.0

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def own(self) -> range:
        """Global ids of the experts here."""
        share, rank = self.count // self.size, dist.get_rank(self.group)
        return range(rank * share, (rank + 1) * share)

    def transport(self) -> Transport:
        return CollectiveTransport(
            ep_group=self.group,
            data_group=self.group,
            ep_rank=dist.get_rank(self.group),
            ep_size=self.size,
            timeout_s=self.timeout_s,
        )

    def gather(self, part: Tensor) -> Tensor:
        """[E / n, ...] of this rank -> [E, ...]; every rank calls it."""
        part = part.contiguous()
        whole = part.new_empty(self.size, *part.shape)
        work = dist.all_gather(list(whole.unbind(0)), part, group=self.group, async_op=True)
        return WorkPending(work, whole, part, self.group, self.timeout_s, "all-gather of experts").wait().flatten(0, 1)

    def __deepcopy__(self, memo: Any) -> ExpertShard:
        return self

    def __reduce__(self) -> Any:
        remedy = "call unswap_moe(model) on every rank first, or pickle inside `with gathered_experts(model):`"
        raise SpecError.of("pickle", [Problem("ep_group", "a process group", "absent", remedy)])


def sharded_experts(
    x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, gate: Gate, shard: ExpertShard
) -> Tensor:
    """x [T, H] of this rank, ids [T, K] over all experts, weights [T, K] -> [T, H]; ``experts`` are this rank's own.

    T may differ between ranks. A weight's gradient sums over all ranks' tokens, divided by the group's size if
    ``shard.average``. Raises WaitError when a rank is late.
    """
    if shard.average:
        experts = _divided_gradients(experts, shard.size)
    ids = torch.where((ids < 0) | (ids >= shard.count), shard.count, ids)
    order, counts = send_order(ids, shard.count)
    transport = shard.transport()
    routing: Routing = RoutingPending(transport.gather_counts(counts), 0, transport.ep_rank).wait()
    layout = routing.layout
    received = _exchanged(gather_rows(x, order, ids.shape[1]), transport, layout, back=False)
    rows = group_by_expert(received, layout)
    offsets = torch.tensor(expert_offsets(layout), device=x.device)
    processed = group_by_source(grouped_experts(rows, offsets, experts, gate), layout)
    return weighted_sum(_exchanged(processed, transport, layout, back=True), weights, order)


def _divided_gradients(experts: ExpertWeights, size: int) -> ExpertWeights:
    def divided(weight: Tensor | None) -> Any:
        return None if weight is None else _DividedGradient.apply(weight, size)  # type: ignore[no-untyped-call]

    return ExpertWeights(
        divided(experts.gate_up), divided(experts.down), divided(experts.gate_up_bias), divided(experts.down_bias)
    )


def _exchanged(rows: Tensor, transport: Transport, layout: RowLayout, *, back: bool) -> Tensor:
    out: Tensor = _Exchange.apply(rows, transport, layout, back)  # type: ignore[no-untyped-call]
    return out


class _DividedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, size: int) -> Tensor:
        ctx.size = size
        return weight.view_as(weight)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.size, None


class _Exchange(torch.autograd.Function):
    """Dispatch, or with ``back`` combine; its backward is the other one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, transport: Transport, layout: RowLayout, back: bool) -> Tensor:
        ctx.transport, ctx.layout, ctx.back = transport, layout, back
        out: Tensor = (transport.combine if back else transport.dispatch)(rows, layout).wait()
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        issue = ctx.transport.dispatch if ctx.back else ctx.transport.combine
        return issue(grad, ctx.layout).wait(), None, None, None
