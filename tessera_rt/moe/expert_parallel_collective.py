"""Expert parallelism by torch.distributed's all-to-all (NCCL, gloo), behind the interface of the peer transport.

*Exact*: the counts are read on the host, and only rows that are needed travel. *Padded* (``pair_capacity``): every rank
sends equally many units to every other, with holes; nothing waits for the host, as capture demands, and what finds no
room is left out and recorded. One row returns per unit, so combine ``rows`` goes with dispatch ``rows``, and
``reduced`` with ``tokens``. Padded on NCCL under capture has not been run yet, for want of GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tessera_rt.errors import Problem, SpecError, TransportError
from tessera_rt.kernels.transport_calls import Combined, Issued, Received
from tessera_rt.kernels.transport_layout import Combine, Dispatch, Traffic
from tessera_rt.waits import wait


@dataclass(frozen=True, slots=True)
class CollectivePlacement:
    """``counts`` [W, E] int32: choices per source and expert. ``order`` [S] int64: units in the order they leave, -1
    for holes; ``at`` [U, W] int64: a unit's place in it for each rank, or -1. Splits by rank: ``send``, ``receive``."""

    tokens: int
    ids: Tensor
    counts: Tensor
    order: Tensor
    at: Tensor
    send: tuple[int, ...]
    receive: tuple[int, ...]


class CollectiveExpertParallel:
    """One rank's end over ``group`` (None: this rank alone). ``timeout_s`` bounds each wait of the exact form; the
    padded one waits on the device, and the group's own time-out bounds it.

    ``pair_capacity``: units from one rank to one other in the padded form, 0 for the exact form. Raises SpecError for
    forms that need the peer transport.
    """

    def __init__(
        self, traffic: Traffic, group: dist.ProcessGroup | None, *, pair_capacity: int = 0, timeout_s: float = 300.0
    ) -> None:
        self.rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        problems = []
        if world != traffic.world:
            problems.append(Problem("world", traffic.world, f"{world}, the group's"))
        if (traffic.dispatch is Dispatch.ROWS) != (traffic.combine is Combine.ROWS):
            given = f"{traffic.dispatch}, {traffic.combine}"
            problems.append(
                Problem("dispatch, combine", given, "rows, rows or tokens, reduced", "or use PeerTransport")
            )
        if traffic.capacity or traffic.row_capacity:
            capacities = (traffic.capacity, traffic.row_capacity)
            problems.append(Problem("capacity, row_capacity", capacities, "0", "give pair_capacity to the padded form"))
        if pair_capacity < 0:
            problems.append(Problem("pair_capacity", pair_capacity, "at least 0"))
        if problems:
            raise SpecError.of("collective transport", problems)
        self.traffic, self._group = traffic, group
        self._capacity, self._timeout_s = pair_capacity, timeout_s
        self._needed: Tensor | None = None

    @property
    def rows_limit(self) -> int:
        """No more than the units have choices."""
        return (1 << 31) - 1

    def exchange(self, ids: Tensor) -> Issued[CollectivePlacement]:
        traffic, tokens = self.traffic, ids.shape[0]
        if ids.dim() != 2 or ids.shape[1] != traffic.top_k or tokens > traffic.tokens:
            wanted = f"[at most {traffic.tokens}, {traffic.top_k}]"
            raise SpecError.of("exchange", [Problem("ids.shape", tuple(ids.shape), wanted)])
        units = ids.long().reshape(tokens * traffic.units_per_token, traffic.choices)
        sent = (units >= 0) & (units < traffic.experts)
        owners = torch.where(sent, units.clamp(0, traffic.experts - 1) // traffic.local_experts, traffic.world)
        hit = (owners.unsqueeze(-1) == torch.arange(traffic.world, device=ids.device)).any(1)  # [U, W]
        of_experts = torch.zeros(traffic.experts + 1, dtype=torch.int64, device=ids.device)
        flat = torch.where(sent, units, traffic.experts).flatten()
        of_experts.scatter_add_(0, flat, torch.ones_like(flat))
        mine = torch.cat([of_experts[:-1], hit.sum(0)])
        gathered = mine.new_empty(traffic.world, mine.numel())
        works = [self._gather(gathered, mine)] if self._group is not None else []
        if self._group is None:
            gathered.copy_(mine)
        place = self._padded if self._capacity else self._exact

        def finish() -> CollectivePlacement:
            self._finish(works, "all-gather of expert counts")
            counts = gathered[:, : traffic.experts].int()
            return place(tokens, units, hit, counts, gathered[:, traffic.experts :])

        return Issued(finish)

    def dispatch(
        self, x: Tensor, weights: Tensor, placement: CollectivePlacement
    ) -> Issued[Received[CollectivePlacement]]:
        traffic = self.traffic
        rows, row_works = self._send_rows(x, placement)
        hole = (placement.order < 0).unsqueeze(-1)
        ids = _pick(placement.ids, placement.order).masked_fill(hole, -1).int()
        weights = weights.to(traffic.weight_dtype)
        sent = _pick(weights.reshape(-1, traffic.choices), placement.order)
        meta = torch.cat([ids, sent.view(torch.int32)], dim=1)
        came = meta.new_empty(sum(placement.receive), meta.shape[1])
        works = self._all_to_all(came, meta, placement.receive, placement.send)

        def finish() -> Received[CollectivePlacement]:
            self._finish(row_works, "all-to-all of tokens (dispatch)")
            self._finish(works, "all-to-all of ids and weights (dispatch)")
            local = came[:, : traffic.choices] - self.rank * traffic.local_experts
            mine = (came[:, : traffic.choices] >= 0) & (local >= 0) & (local < traffic.local_experts)
            scales = came[:, traffic.choices :].contiguous().view(weights.dtype).masked_fill(~mine, 0.0)
            return Received(placement, rows, local.masked_fill(~mine, -1), scales, weights)

        return Issued(finish)

    def dispatch_gradient(self, grad: Tensor, received: Received[CollectivePlacement]) -> Issued[Tensor]:
        rows, works = self._send_rows(grad, received.placement)

        def finish() -> Tensor:
            self._finish(works, "all-to-all of gradients (dispatch)")
            return rows

        return Issued(finish)

    def combine(
        self,
        y: Tensor,
        position: Tensor,
        received: Received[CollectivePlacement],
        *,
        weighted: bool = True,
        router_gradient: Tensor | None = None,
    ) -> Issued[Combined]:
        traffic, placement = self.traffic, received.placement
        reduced = traffic.combine is Combine.REDUCED
        rows = _sum_rows(y, position, received.weights if weighted and reduced else None)
        back = rows.new_empty(len(placement.order), traffic.hidden)
        works = self._all_to_all(back, rows, placement.send, placement.receive)
        gradients = None
        if router_gradient is not None:
            gradients = router_gradient.new_empty(len(placement.order), traffic.choices)
            works += self._all_to_all(gradients, router_gradient.contiguous(), placement.send, placement.receive)

        def finish() -> Combined:
            self._finish(works, "all-to-all of rows (combine)")
            home = self._home(placement)
            parts = placement.at if reduced else home
            out = _sum_rows(back, parts, received.sent_weights if weighted and not reduced else None)
            if gradients is None:
                return Combined(out)
            k = torch.arange(traffic.top_k, device=home.device) if reduced else torch.zeros_like(home)
            if gradients.shape[0] == 0:
                return Combined(out, gradients.new_zeros(home.shape))
            return Combined(out, gradients[home.clamp(min=0), k].masked_fill(home < 0, 0.0))

        return Issued(finish)

    def check(self) -> None:
        """Raises TransportError when units of the padded form found no room, with the capacity that any rank needs: all
        ranks raise alike."""
        if self._needed is not None and int(self._needed) > self._capacity:
            remedy = "some were left out: run the step again with more"
            problem = Problem("pair_capacity", self._capacity, f"at least {int(self._needed)}", remedy)
            raise TransportError.of(f"rank {self.rank}: expert-parallel transport", [problem])

    def clear_overflow(self) -> None:
        """Forgets recorded overflows."""
        self._needed = None

    def _exact(self, tokens: int, ids: Tensor, hit: Tensor, counts: Tensor, units: Tensor) -> CollectivePlacement:
        host = units.tolist()
        owner, order = hit.mT.nonzero(as_tuple=True)
        at = torch.full(hit.shape, -1, dtype=torch.int64, device=hit.device)
        at[order, owner] = torch.arange(order.numel(), device=hit.device)
        receive = tuple(row[self.rank] for row in host)
        return CollectivePlacement(tokens, ids, counts, order, at, tuple(host[self.rank]), receive)

    def _padded(self, tokens: int, ids: Tensor, hit: Tensor, counts: Tensor, units: Tensor) -> CollectivePlacement:
        world, room = self.traffic.world, self._capacity
        most = units.max()
        self._needed = most if self._needed is None else torch.maximum(self._needed, most)
        slot = hit.long().cumsum(0) - 1
        kept = hit & (slot < room)
        at = torch.where(kept, slot + room * torch.arange(world, device=hit.device), -1)
        order = torch.full((world * room + 1,), -1, dtype=torch.int64, device=hit.device)
        number = torch.arange(hit.shape[0], device=hit.device).unsqueeze(1).expand_as(at)
        order.scatter_(0, torch.where(kept, at, world * room).flatten(), number.flatten())
        return CollectivePlacement(tokens, ids, counts, order[:-1], at, (room,) * world, (room,) * world)

    def _home(self, placement: CollectivePlacement) -> Tensor:
        """[T, K]: where each choice's unit is in the send order, -1 for choices that are not sent."""
        traffic = self.traffic
        sent = (placement.ids >= 0) & (placement.ids < traffic.experts)
        owner = placement.ids.clamp(0, traffic.experts - 1) // traffic.local_experts
        return placement.at.gather(1, owner).masked_fill(~sent, -1).view(placement.tokens, traffic.top_k)

    def _send_rows(self, x: Tensor, placement: CollectivePlacement) -> tuple[Tensor, list[_Work]]:
        per_token = self.traffic.units_per_token
        rows = _pick(x, torch.div(placement.order, per_token, rounding_mode="floor"))
        came = rows.new_empty(sum(placement.receive), x.shape[1])
        return came, self._all_to_all(came, rows, placement.receive, placement.send)

    def _gather(self, out: Tensor, mine: Tensor) -> _Work:
        work = dist.all_gather_into_tensor(out.view(-1), mine, group=self._group, async_op=True)
        return _Work(work, (out, mine))

    def _all_to_all(self, out: Tensor, rows: Tensor, receive: Sequence[int], send: Sequence[int]) -> list[_Work]:
        if self._group is None:
            out.copy_(rows)
            return []
        work = dist.all_to_all_single(out, rows, list(receive), list(send), group=self._group, async_op=True)
        return [_Work(work, (out, rows))]

    def _finish(self, works: list[_Work], what: str) -> None:
        for one in works:
            if self._capacity and one.tensors[0].is_cuda:
                one.work.wait()  # orders the stream; a wait with a time-out would block the host
                continue
            assert self._group is not None
            others = [rank for rank in dist.get_process_group_ranks(self._group) if rank != dist.get_rank()]
            text = f"the {what} with ranks {', '.join(map(str, others))}"
            wait(one.work, f"rank {dist.get_rank()}", text, others, timeout_s=self._timeout_s)


@dataclass(frozen=True, slots=True)
class _Work:
    """A collective under way, with the tensors that must live until it is done."""

    work: dist.Work
    tensors: tuple[Tensor, ...]


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """Rows of ``x``; any row for negative indices, and zeros if there are none at all."""
    return x[index.clamp(min=0)] if x.shape[0] else x.new_zeros(len(index), *x.shape[1:])


def _sum_rows(y: Tensor, position: Tensor, weights: Tensor | None) -> Tensor:
    """out[u] = sum over j of weights[u, j] y[position[u, j]], j in order, in fp32 (float64 for float64), rounded once;
    position -1 counts as nothing."""
    precision = torch.promote_types(y.dtype, torch.float32)
    out = torch.zeros(position.shape[0], y.shape[1], dtype=precision, device=y.device)
    if y.shape[0] == 0:
        return out.to(y.dtype)
    for j in range(position.shape[1]):
        place = position[:, j]
        term = y[place.clamp(min=0).long()].to(precision).masked_fill((place < 0).unsqueeze(-1), 0.0)
        out += term if weights is None else term * weights[:, j, None].to(precision)
    return out.to(y.dtype)
