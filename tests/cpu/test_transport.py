"""Transports: in one process and over gloo."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tessera_rt.errors import PlanError, TransportError
from tessera_rt.moe.dispatch import (
    RoutingPending,
    row_layout,
)
from tessera_rt.moe.steps import RowLayout
from tessera_rt.moe.transport import CollectiveTransport, LocalTransport, make_transport
from tessera_rt.plan import Mesh
from tessera_rt.testing.late_transport import LateTransport
from tessera_rt.testing.worker_pool import RankContext, WorkerPool


def double(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_local_transport_returns_what_it_is_given() -> None:
    transport, counts = LocalTransport(), torch.tensor([2, 1])
    routing = RoutingPending(transport.gather_counts(counts), 0, 0).wait()
    assert torch.equal(routing.counts, counts.view(1, 1, 2)) and routing.layout == RowLayout((3,), (3,), ((2, 1),))
    rows = double(3, 4).requires_grad_()
    assert transport.dispatch(rows, routing.layout).wait() is rows
    assert transport.combine(rows, routing.layout).wait() is rows
    for call in (transport.dispatch, transport.combine):
        with pytest.raises(TransportError, match="rows"):
            call(rows[:2], routing.layout)


def test_make_transport_follows_the_mesh() -> None:
    assert isinstance(make_transport(None, None, Mesh(pp=4), 2), LocalTransport)
    with pytest.raises(PlanError, match="data_group"):
        make_transport(None, None, Mesh(dp=2), 1)
    with pytest.raises(PlanError, match="ep_group"):
        make_transport(None, None, Mesh(ep=2), 1)


def groups(dp: int, ep: int, rank: int) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """(ep group, data group) of a rank in a dp x ep mesh; every rank makes all groups."""
    ep_groups = [dist.new_group(list(range(d * ep, (d + 1) * ep))) for d in range(dp)]
    return ep_groups[rank // ep] if ep > 1 else None, dist.new_group(list(range(dp * ep)))


def rank_counts(rank: int, experts: int, empty: tuple[int, ...]) -> Tensor:
    counts = torch.arange(experts) * (rank + 1) % 3
    return torch.zeros_like(counts) if rank in empty else counts


def labelled_rows(rank: int, counts: Tensor) -> Tensor:
    """Each row says where it comes from, which expert it goes to, and which of these rows it is."""
    rows = [[rank, e, i] for e, n in enumerate(counts.tolist()) for i in range(n)]
    return torch.tensor(rows, dtype=torch.float64).view(-1, 3)


def round_trip(ctx: RankContext, dp: int, ep: int, local: int, empty: tuple[int, ...], late: bool) -> None:
    inner = make_transport(*groups(dp, ep, ctx.rank), Mesh(dp=dp, ep=ep), ctx.rank, timeout_s=30.0)
    transport: Any = LateTransport(inner) if late else inner
    d, e = divmod(ctx.rank, ep)
    assert (transport.dp_rank, transport.ep_rank, transport.ep_size) == (d, e, ep)
    counts = rank_counts(ctx.rank, ep * local, empty)
    rows = labelled_rows(ctx.rank, counts)
    routing = RoutingPending(transport.gather_counts(counts), d, e).wait()
    expected = torch.stack([rank_counts(r, ep * local, empty) for r in range(dp * ep)]).view(dp, ep, -1)
    assert torch.equal(routing.counts, expected)
    first = transport.dispatch(rows.requires_grad_(), routing.layout)
    second = transport.dispatch(rows * 2, routing.layout)  # two at once, as in an overlap pair
    received = first.wait()
    assert not received.requires_grad and first.wait() is received
    mine = range(e * local, (e + 1) * local)
    wanted = [
        [source, expert, i]
        for source in range(d * ep, (d + 1) * ep)
        for expert in mine
        for i in range(int(rank_counts(source, ep * local, empty)[expert]))
    ]
    assert received.tolist() == wanted
    assert torch.equal(second.wait(), received * 2)
    home = transport.combine(received + 1, routing.layout).wait()
    assert torch.equal(home, rows + 1)


@pytest.mark.parametrize(
    ("dp", "ep", "local", "empty"),
    [(1, 2, 3, ()), (1, 2, 1, (1,)), (1, 2, 2, (0, 1)), (2, 1, 3, ()), (2, 2, 2, (3,))],
    ids=["ep2", "no rows on rank 1", "no rows at all", "dp2", "dp2 x ep2"],
)
@pytest.mark.parametrize("late", [False, True], ids=["real", "late"])
def test_rows_arrive_at_their_experts_and_return(
    pool: WorkerPool, dp: int, ep: int, local: int, empty: tuple[int, ...], late: bool
) -> None:
    pool.run(round_trip, dp * ep, dp, ep, local, empty, late)


def late_outputs(ctx: RankContext) -> None:
    transport = LateTransport(make_transport(*groups(1, 2, ctx.rank), Mesh(ep=2), ctx.rank, timeout_s=30.0))
    counts = torch.tensor([1, 1])
    count = transport.gather_counts(counts)
    dist.barrier()
    assert (count.output == -1).all()
    layout = row_layout(count.wait(), 0, ctx.rank)
    pending = transport.dispatch(torch.ones(2, 3), layout)
    dist.barrier()  # by now the rows have long arrived
    output = pending.output
    assert output.isnan().all()
    assert pending.wait() is output and torch.equal(output, torch.ones(2, 3))


def test_late_transport_delivers_only_at_the_wait(pool: WorkerPool) -> None:
    pool.run(late_outputs, 2)


def wait_for_an_absent_peer(ctx: RankContext) -> str:
    ep_group, data_group = groups(1, 2, ctx.rank)
    transport = make_transport(ep_group, data_group, Mesh(ep=2), ctx.rank, timeout_s=0.5)
    if ctx.rank == 1:
        ctx.store.wait(["done"])
        return ""
    try:
        transport.dispatch(torch.ones(2, 3), RowLayout((1, 1), (1, 1), ((1,), (1,)))).wait()
    except TransportError as error:
        return str(error)
    finally:
        ctx.store.set("done", "")
    return "no error"


def test_a_peer_that_does_not_take_part_is_reported(pool: WorkerPool) -> None:
    message = pool.run(wait_for_an_absent_peer, 2)[0]
    for part in ("rank 0", "dispatch", "with ranks 1", "waited 0.5 s"):
        assert part in message


def die_instead(ctx: RankContext) -> None:
    transport = make_transport(*groups(1, 2, ctx.rank), Mesh(ep=2), ctx.rank, timeout_s=20.0)
    if ctx.rank == 1:
        os._exit(3)
    transport.dispatch(torch.ones(2, 3), RowLayout((1, 1), (1, 1), ((1,), (1,)))).wait()


def test_a_dead_peer_is_a_transport_error(pool: WorkerPool) -> None:
    result = pool.run(die_instead, 2, expect_failure=True)[0]
    assert result.failure is not None and result.failure.type_name == "WaitError"


def wrong_coordinates(ctx: RankContext) -> None:
    ep_group, data_group = groups(1, 2, ctx.rank)
    with pytest.raises(PlanError, match="ep_group"):
        CollectiveTransport(ep_group=ep_group, data_group=data_group, ep_rank=1 - ctx.rank, ep_size=2)


def test_groups_that_contradict_the_coordinates_are_refused(pool: WorkerPool) -> None:
    pool.run(wrong_coordinates, 2)
