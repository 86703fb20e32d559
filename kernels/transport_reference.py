"""Plain torch for the expert-parallel transport, all ranks at once: what each rank's calls must return.

Lists have one entry per rank. Everything works in the dtype of the inputs (float64 for tests).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera_rt.kernels.transport_calls import Combined, Received
from tessera_rt.kernels.transport_layout import Combine, Traffic


@dataclass(frozen=True, slots=True)
class Placement:
    """As ``transport.Placement``."""

    tokens: int
    ids: Tensor
    slots: Tensor
    home: Tensor
    counts: Tensor
    incoming: int


def exchange(ids: Sequence[Tensor], traffic: Traffic) -> list[Placement]:
    """Chosen experts [T, K] of every rank -> where each rank's units go. Units have their place behind those of lower
    ranks, in order, as far as the capacity goes."""
    units = [one.long().view(-1, traffic.choices) for one in ids]
    ranks = torch.arange(traffic.world)
    owners = [_owners(one, traffic) for one in units]
    hits = [(one.unsqueeze(-1) == ranks).any(1) for one in owners]
    counts = torch.stack([_valid(one, traffic).bincount(minlength=traffic.experts) for one in units]).int()
    start = torch.zeros(traffic.world, dtype=torch.int64)
    placed = []
    for rank, hit in enumerate(hits):
        slot = start + hit.long().cumsum(0) - 1
        slots = slot.masked_fill(~hit | (slot >= traffic.units_received), -1)
        start = start + hit.sum(0)
        sent = (owners[rank] >= 0) & (slots.gather(1, owners[rank].clamp(min=0)) >= 0)
        number = torch.arange(sent.numel()).view_as(sent)
        home = number.masked_fill(~sent, -1).view(ids[rank].shape)
        placed.append((ids[rank].shape[0], units[rank].int(), slots.int(), home.int(), counts))
    incoming = start.clamp(max=traffic.units_received).tolist()
    return [Placement(*one, came) for one, came in zip(placed, incoming, strict=True)]


def overflow(ids: Sequence[Tensor], traffic: Traffic) -> tuple[int, int]:
    """The most units and the most choices that go to one rank."""
    owners = [_owners(one.long().view(-1, traffic.choices), traffic) for one in ids]
    ranks = torch.arange(traffic.world)
    here = [one.unsqueeze(-1) == ranks for one in owners]
    units = torch.stack([one.any(1).sum(0) for one in here]).sum(0)
    choices = torch.stack([one.sum((0, 1)) for one in here]).sum(0)
    return int(units.max()), int(choices.max())


def dispatch(
    x: Sequence[Tensor], weights: Sequence[Tensor], placements: Sequence[Placement], traffic: Traffic
) -> list[Received[Placement]]:
    """x [T, H] and router weights [T, K] of every rank -> what every rank receives; unfilled rows are zero."""
    rows = dispatch_gradient(x, placements, traffic)
    received = []
    for rank, placement in enumerate(placements):
        ids = torch.full((traffic.units_received, traffic.choices), -1, dtype=torch.int32)
        scales = torch.zeros(ids.shape, dtype=weights[rank].dtype)
        origin = torch.full((traffic.units_received, 2), -1, dtype=torch.int32)
        for source, other in enumerate(placements):
            slot, unit = _sent(other, rank)
            local = other.ids[unit] - rank * traffic.local_experts
            mine = (local >= 0) & (local < traffic.local_experts)
            ids[slot] = local.masked_fill(~mine, -1)
            scales[slot] = weights[source].view(-1, traffic.choices)[unit].masked_fill(~mine, 0.0)
            origin[slot] = torch.stack([torch.full_like(unit, source), unit], dim=1).int()
        received.append(Received(placement, rows[rank], ids, scales, weights[rank], origin))
    return received


def dispatch_gradient(grad: Sequence[Tensor], placements: Sequence[Placement], traffic: Traffic) -> list[Tensor]:
    """Rows [T, H] of every rank -> [R, H] where its units went."""
    out = [one.new_zeros(traffic.units_received, one.shape[1]) for one in grad]
    for source, placement in enumerate(placements):
        for rank in range(traffic.world):
            slot, unit = _sent(placement, rank)
            out[rank][slot] = grad[source][unit // traffic.units_per_token]
    return out


def combine(
    y: Sequence[Tensor],
    position: Sequence[Tensor],
    received: Sequence[Received[Placement]],
    traffic: Traffic,
    *,
    weighted: bool = True,
    router_gradient: Sequence[Tensor] | None = None,
) -> list[Combined]:
    """The experts' rows of every rank -> the sums at home."""
    results = []
    for rank, mine in enumerate(received):
        tokens, top_k = mine.placement.tokens, traffic.top_k
        per_token = traffic.units_per_token
        returned = y[rank].new_zeros(tokens, traffic.parts, traffic.hidden)
        gradient = mine.sent_weights.new_zeros(tokens * top_k)
        for other, there in enumerate(received):
            origin = there.origin
            assert origin is not None
            for slot in ((origin[:, 0] == rank) & (there.ids >= 0).any(1)).nonzero()[:, 0].tolist():
                unit = int(origin[slot, 1])
                for j in range(traffic.choices):
                    if there.ids[slot, j] < 0:
                        continue
                    row, choice = int(position[other][slot, j]), unit * traffic.choices + j
                    value = y[other][row] if row >= 0 else torch.zeros_like(returned[0, 0])
                    if weighted:
                        value = value * there.weights[slot, j].to(value.dtype)
                    part = choice % top_k if traffic.combine is Combine.ROWS else other
                    returned[unit // per_token, part] += value
                    if router_gradient is not None:
                        gradient[choice] = router_gradient[other][slot, j]
        results.append(Combined(returned.sum(1), gradient.view(tokens, top_k) if router_gradient is not None else None))
    return results


def _owners(units: Tensor, traffic: Traffic) -> Tensor:
    sent = (units >= 0) & (units < traffic.experts)
    return (units // traffic.local_experts).masked_fill(~sent, -1)


def _valid(units: Tensor, traffic: Traffic) -> Tensor:
    return units[(units >= 0) & (units < traffic.experts)]


def _sent(placement: Placement, rank: int) -> tuple[Tensor, Tensor]:
    """(slots, units) of what goes to ``rank``."""
    unit = (placement.slots[:, rank] >= 0).nonzero()[:, 0]
    return placement.slots[unit, rank].long(), unit
