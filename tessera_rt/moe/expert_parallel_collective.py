"""Expert parallelism by torch.distributed's all-to-all (NCCL, gloo), behind the interface of the peer transport.

*Exact*: the counts are read on the host, and only rows that are needed travel. *Padded* (``pair_capacity``): every rank
sends equally many units to every other, with holes; nothing waits for the host, as capture demands, and what finds no
room is left out and recorded. One row returns per unit, so combine ``rows`` goes with dispatch ``rows``, and
``reduced`` with ``tokens``. Padded on NCCL under capture has not been run yet, for want of GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tessera_rt.errors import Problem, SpecError, TransportError
from tessera_rt.kernels.transport_calls import Combined, Issued, Received
from tessera_rt.kernels.transport_layout import Combine, Dispatch, Traffic, differences
from tessera_rt.waits import wait


@dataclass(frozen=True, slots=True)
class CollectivePlacement:
    """``counts`` [W, E] int32: choices per source and expert. ``order`` [S] int64: units in the order they leave, -1
    for holes; ``at`` [U, W] int64: a unit's place in it for each rank, or -1. Splits by rank: ``send``, ``receive``."""

    traffic: Traffic
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

    ``pair_capacity``: units from one rank to one other in the padded form, 0 for the exact form. ``device``: of the
    tokens, in the padded form. ``overflow`` [1] int32 on it: the ``pair_capacity`` that some rank needs, 0 while all
    units find room; the same on all ranks. The constructor is a
    collective call: raises SpecError for forms that need the peer transport, and where ranks are not given the same.
    """

    def __init__(
        self,
        traffic: Traffic,
        group: dist.ProcessGroup | None,
        *,
        pair_capacity: int = 0,
        timeout_s: float = 300.0,
        device: torch.device | str = "cpu",
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
        if group is not None:
            problems += _other_arguments(group, {**traffic.values(), "pair_capacity": str(pair_capacity)})
        if problems:
            raise SpecError.of("collective transport", problems)
        self.traffic, self._group = traffic, group
        self._capacity, self._timeout_s = pair_capacity, timeout_s
        self.overflow = torch.zeros(1, dtype=torch.int32, device=device)  # made once: captured graphs write to it

    @property
    def rows_limit(self) -> int:
        """No more than the units have choices."""
        return (1 << 31) - 1

    def exchange(self, ids: Tensor) -> Issued[CollectivePlacement]:
        traffic, tokens = self.traffic, ids.shape[0] if ids.dim() else 0
        problems = []
        if ids.dim() != 2 or ids.shape[1] != traffic.top_k or tokens > traffic.tokens:
            wanted = f"[at most {traffic.tokens}, {traffic.top_k}]"
            problems.append(Problem("ids.shape", tuple(ids.shape), wanted))
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            problems.append(Problem("ids.dtype", str(ids.dtype), "an integer type"))
        if self._capacity and ids.device != self.overflow.device:
            remedy = "give the transport the device of the tokens"
            problems.append(Problem("ids.device", str(ids.device), str(self.overflow.device), remedy))
        if problems:
            raise SpecError.of("exchange", problems)
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
        shape = (placement.tokens, traffic.top_k)
        self._check("dispatch", placement, x=(x, (placement.tokens, traffic.hidden)), weights=(weights, shape))
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
            # A copy: of one row the part is contiguous as it is, and may begin at half of a float64.
            scales = came[:, traffic.choices :].clone(memory_format=torch.contiguous_format).view(weights.dtype)
            scales = scales.masked_fill(~mine, 0.0)
            return Received(placement, rows, local.masked_fill(~mine, -1), scales, weights)

        return Issued(finish)

    def dispatch_gradient(self, grad: Tensor, received: Received[CollectivePlacement]) -> Issued[Tensor]:
        placement = received.placement
        self._check("dispatch_gradient", placement, grad=(grad, (placement.tokens, self.traffic.hidden)))
        rows, works = self._send_rows(grad, placement)

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
        shape = tuple(received.ids.shape)
        given = {} if router_gradient is None else {"router_gradient": (router_gradient, shape)}
        self._check("combine", placement, y=(y, (None, traffic.hidden)), position=(position, shape), **given)
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
        if needed := int(self.overflow):
            remedy = "some were left out: run the step again with more"
            problem = Problem("pair_capacity", self._capacity, f"at least {needed}", remedy)
            raise TransportError.of(f"rank {self.rank}: expert-parallel transport", [problem])

    def clear_overflow(self) -> None:
        """Forgets recorded overflows."""
        self.overflow.zero_()

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Inside, calls have the exact form: a step that overflowed is done again so. All ranks enter and leave."""
        before, self._capacity = self._capacity, 0
        try:
            yield
        finally:
            self._capacity = before

    def __deepcopy__(self, memo: Any) -> CollectiveExpertParallel:
        """Copies of a layer share its transport."""
        return self

    def _check(
        self, where: str, placement: CollectivePlacement, **given: tuple[Tensor, tuple[int | None, ...]]
    ) -> None:
        """Raises SpecError for a placement of other traffic, and for tensors of another shape or (rows) dtype."""
        remedy = "the placement is of other traffic: exchange the ids with this transport"
        problems = differences(placement.traffic.values(), self.traffic.values(), "this transport's", remedy)
        for name, (tensor, shape) in given.items():
            fits = tensor.dim() == len(shape)
            fits = fits and all(want in (None, have) for want, have in zip(shape, tensor.shape, strict=True))
            if not fits:
                wanted = ", ".join("any" if want is None else str(want) for want in shape)
                problems.append(Problem(f"{name}.shape", tuple(tensor.shape), f"[{wanted}]"))
            if name in ("x", "grad", "y") and tensor.dtype != self.traffic.dtype:
                problems.append(Problem(f"{name}.dtype", str(tensor.dtype), f"{self.traffic.dtype}, the traffic's"))
        if problems:
            raise SpecError.of(where, problems)

    def _exact(self, tokens: int, ids: Tensor, hit: Tensor, counts: Tensor, units: Tensor) -> CollectivePlacement:
        host = units.tolist()
        owner, order = hit.mT.nonzero(as_tuple=True)
        at = torch.full(hit.shape, -1, dtype=torch.int64, device=hit.device)
        at[order, owner] = torch.arange(order.numel(), device=hit.device)
        receive = tuple(row[self.rank] for row in host)
        send = tuple(host[self.rank])
        return CollectivePlacement(self.traffic, tokens, ids, counts, order, at, send, receive)

    def _padded(self, tokens: int, ids: Tensor, hit: Tensor, counts: Tensor, units: Tensor) -> CollectivePlacement:
        world, room = self.traffic.world, self._capacity
        most = units.max()
        torch.maximum(self.overflow, torch.where(most > room, most, 0).int(), out=self.overflow)
        slot = hit.long().cumsum(0) - 1
        kept = hit & (slot < room)
        at = torch.where(kept, slot + room * torch.arange(world, device=hit.device), -1)
        order = torch.full((world * room + 1,), -1, dtype=torch.int64, device=hit.device)
        number = torch.arange(hit.shape[0], device=hit.device).unsqueeze(1).expand_as(at)
        order.scatter_(0, torch.where(kept, at, world * room).flatten(), number.flatten())
        splits = (room,) * world
        return CollectivePlacement(self.traffic, tokens, ids, counts, order[:-1], at, splits, splits)

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
        # torch 2.13 renamed the function; the old name warns there, the new one is absent before.
        start = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = start(out.view(-1), mine, group=self._group, async_op=True)
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


def _other_arguments(group: dist.ProcessGroup, mine: dict[str, str]) -> list[Problem]:
    """What other ranks of ``group`` were given differently. Collective."""
    given: list[dict[str, str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(given, mine, group=group)
    return [
        problem
        for rank, other in enumerate(given)
        for problem in differences(mine, other, f"as on rank {rank}", "give all ranks the same")
    ]


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
