"""The peer transport's calls, held to their plain-torch reference with all ranks in one place."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tessera_rt.kernels import reference, transport_reference
from tessera_rt.kernels.transport import PeerTransport
from tessera_rt.kernels.transport_layout import Combine, Dispatch, Traffic
from tessera_rt.testing.kernel_checks import assert_near, poisoned_memory
from tessera_rt.testing.peer_ranks import RankInput, run_peers

FORMS = {
    "tokens-rows": (Dispatch.TOKENS, Combine.ROWS),
    "rows-rows": (Dispatch.ROWS, Combine.ROWS),
    "tokens-reduced": (Dispatch.TOKENS, Combine.REDUCED),
}


def traffic_of(form: str, world: int, tokens: int, **changes: Any) -> Traffic:
    """Traffic of a form by name, three experts a rank unless ``changes`` say otherwise."""
    dispatch, combine = FORMS[form]
    given: dict[str, Any] = {"experts": 3 * world, "top_k": 3, "hidden": 24, "dtype": torch.float32} | changes
    return Traffic(world=world, tokens=tokens, dispatch=dispatch, combine=combine, **given)


def expert_rows(ids: Tensor, x: Tensor, rank: int, traffic: Traffic, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Stand-in for the experts: expert e multiplies by e + 1. (rows in expert order, position [R, J])."""
    position, source, offsets = reference.place(ids, traffic.local_experts)
    limit = min(traffic.rows, position.numel())
    position, used = position.masked_fill(position >= limit, -1), min(int(offsets[-1]), limit)
    expert = torch.bucketize(torch.arange(used), offsets[1:].long(), right=True) + rank * traffic.local_experts
    y = torch.full((limit, x.shape[1]), torch.nan, dtype=dtype)
    y[:used] = x[source[:used].long() // ids.shape[1]].to(dtype) * (expert + 1).unsqueeze(1)
    return y, position


def run_calls(transport: PeerTransport, given: RankInput, rank: int) -> dict[str, Any]:
    """All calls of forward and backward once; what each returned."""
    traffic = transport.traffic
    placement = transport.exchange(given.ids).wait()
    received = transport.dispatch(given.x, given.weights, placement).wait()
    y, position = expert_rows(received.ids, received.x, rank, traffic, traffic.dtype)
    out = transport.combine(y, position, received).wait().out
    grad = transport.dispatch_gradient(given.grad, received).wait()
    partial = received.ids.float() * 2 + 1
    back = transport.combine(y, position, received, weighted=False, router_gradient=partial).wait()
    return {"placement": placement, "received": received, "out": out, "grad": grad, "back": back}


def assert_calls(traffic: Traffic, inputs: Sequence[RankInput], got: Sequence[dict[str, Any]]) -> None:
    """Every rank's results are those of the reference: integers and moved rows exactly, sums to rounding."""
    placements = transport_reference.exchange([one.ids for one in inputs], traffic)
    want = transport_reference.dispatch([one.x for one in inputs], [one.weights for one in inputs], placements, traffic)
    grads = transport_reference.dispatch_gradient([one.grad for one in inputs], placements, traffic)
    high, positions, partials = [], [], []
    for rank, (one, expected) in enumerate(zip(got, want, strict=True)):
        placement, received, count = one["placement"], one["received"], placements[rank].incoming
        for name in ("ids", "slots", "home", "counts"):
            assert torch.equal(getattr(placement, name), getattr(placements[rank], name)), (rank, name)
        assert int(placement.incoming) == count
        for name in ("ids", "weights", "origin"):
            assert torch.equal(getattr(received, name), getattr(expected, name)), (rank, name)
        assert torch.equal(received.x[:count], expected.x[:count]), rank
        assert torch.equal(one["grad"][:count], grads[rank][:count]), rank
        y, position = expert_rows(expected.ids, expected.x, rank, traffic, torch.float64)
        high.append(y)
        positions.append(position)
        partials.append(expected.ids.float() * 2 + 1)
    forward = transport_reference.combine(high, positions, want, traffic)
    backward = transport_reference.combine(high, positions, want, traffic, weighted=False, router_gradient=partials)
    for rank, one in enumerate(got):
        assert_near(f"out of rank {rank}", one["out"], forward[rank].out)
        assert_near(f"sum of rank {rank}", one["back"].out, backward[rank].out)
        gradient = backward[rank].router_gradient
        assert gradient is not None and torch.equal(one["back"].router_gradient, gradient), rank


def run_and_compare(traffic: Traffic, inputs: Sequence[RankInput], *, late: int | None = None) -> None:
    """All calls on ranks that are threads, in poisoned memory; rank ``late`` begins a tenth of a second later."""

    def of_rank(transport: PeerTransport, rank: int) -> dict[str, Any]:
        if rank == late:
            time.sleep(0.1)
        result = run_calls(transport, inputs[rank], rank)
        transport.check()
        return result

    with poisoned_memory():
        assert_calls(traffic, inputs, run_peers(traffic, of_rank))
