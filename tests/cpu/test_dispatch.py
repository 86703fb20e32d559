"""Send order, row layouts, regrouping and the transports: every row goes where it belongs and comes back."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tessera_rt.errors import PlanError, TransportError
from tessera_rt.moe.dispatch import (
    CollectiveTransport,
    LocalTransport,
    RoutingPending,
    expert_offsets,
    gather_rows,
    group_by_expert,
    group_by_source,
    make_transport,
    row_layout,
    send_order,
    weighted_sum,
)
from tessera_rt.moe.steps import RowLayout
from tessera_rt.plan import Mesh
from tessera_rt.testing.late_transport import LateTransport
from tessera_rt.testing.worker_pool import RankContext, WorkerPool


def double(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_ids(tokens: int, top_k: int, experts: int, seed: int = 0) -> Tensor:
    """[T, K], distinct in each row."""
    return double(tokens, experts, seed=seed).argsort(-1)[:, :top_k]


# -- orders ---------------------------------------------------------------


@given(tokens=st.integers(0, 9), experts=st.integers(1, 6), data=st.data())
def test_send_order_is_by_expert_then_token_and_leaves_out_the_unrouted(
    tokens: int, experts: int, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, experts))
    ids = random_ids(tokens, top_k, experts, seed=data.draw(st.integers(0, 99)))
    unrouted = data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    ids[torch.tensor(unrouted, dtype=torch.bool)] = experts
    order, counts = send_order(ids, experts)
    flat = ids.flatten().tolist()
    assert order.tolist() == [i for _, i in sorted((e, i) for i, e in enumerate(flat) if e < experts)]
    assert counts.tolist() == [flat.count(e) for e in range(experts)]


@given(tokens=st.integers(0, 5), top_k=st.integers(1, 3), drop=st.booleans())
def test_gather_and_weighted_sum_equal_loops_and_are_exact_duals(tokens: int, top_k: int, drop: bool) -> None:
    ids = random_ids(tokens, top_k, 4)
    if drop and tokens:
        ids[0] = 4
    order, _ = send_order(ids, 4)
    x, weights = double(tokens, 3).requires_grad_(), double(tokens, top_k, seed=1).requires_grad_()
    rows = gather_rows(x, order, top_k)
    assert torch.equal(rows, x[order // top_k])
    returned = double(len(order), 3, seed=2).requires_grad_()
    expected = torch.zeros(tokens, 3, dtype=torch.float64)
    for place, i in enumerate(order.tolist()):
        expected[i // top_k] += weights[i // top_k, i % top_k].detach() * returned[place].detach()
    torch.testing.assert_close(weighted_sum(returned, weights, order), expected, rtol=1e-13, atol=1e-14)
    if tokens:
        assert torch.autograd.gradcheck(lambda x: gather_rows(x, order, top_k), (x,))
        assert torch.autograd.gradcheck(lambda r, w: weighted_sum(r, w, order), (returned, weights))


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257])
def test_identity_experts_with_equal_weights_give_the_input(tokens: int) -> None:
    x, ids = double(tokens, 5), random_ids(tokens, 2, 8)
    order, counts = send_order(ids, 8)
    assert int(counts.sum()) == 2 * tokens
    weights = torch.full((tokens, 2), 0.5, dtype=torch.float64)
    assert torch.equal(weighted_sum(gather_rows(x, order, 2), weights, order), x)


def test_weighted_sum_has_the_same_bits_every_time_and_for_every_thread_count() -> None:
    ids = random_ids(64, 4, 8)
    order, _ = send_order(ids, 8)
    generator = torch.Generator().manual_seed(0)
    rows, weights = torch.randn(256, 33, generator=generator), torch.rand(64, 4, generator=generator)
    upstream = torch.randn(64, 33, generator=generator)
    results = []
    try:
        for threads in (1, 8):
            torch.set_num_threads(threads)
            for _ in range(20):
                x, w = torch.ones(64, 33, requires_grad=True), weights.clone().requires_grad_()
                out = weighted_sum(rows * gather_rows(x, order, 4), w, order)
                out.backward(upstream)
                results.append((out, x.grad, w.grad))
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


def test_low_precision_rows_are_summed_in_the_weights_precision() -> None:
    order, _ = send_order(torch.tensor([[0, 1, 2]]), 3)
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)  # 256 + 1 is 256 in bf16
    assert weighted_sum(rows, torch.ones(1, 3), order).item() == 258.0
    x = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    gather_rows(x, order, 3).backward(rows)
    assert x.grad is not None and x.grad.item() == 258.0


# -- layouts and regrouping, all ranks in one process ---------------------------------------------------------------

layouts = st.integers(1, 4).flatmap(
    lambda ep: st.tuples(st.integers(1, 2), st.just(ep), st.integers(1, 3)).flatmap(
        lambda sizes: st.tuples(
            st.just(sizes),
            st.lists(
                st.integers(0, 3),
                min_size=sizes[0] * ep * ep * sizes[2],
                max_size=sizes[0] * ep * ep * sizes[2],
            ),
        )
    )
)


def counts_of(drawn: tuple[tuple[int, int, int], list[int]]) -> Tensor:
    (dp, ep, local), values = drawn
    return torch.tensor(values).view(dp, ep, ep * local)


@given(drawn=layouts)
def test_row_layouts_of_all_ranks_agree(drawn: tuple[tuple[int, int, int], list[int]]) -> None:
    counts = counts_of(drawn)
    dp, ep, experts = counts.shape
    for d in range(dp):
        ranks = [row_layout(counts, d, e) for e in range(ep)]
        for source in range(ep):
            assert sum(ranks[source].send) == int(counts[d, source].sum())
            for target in range(ep):
                assert ranks[source].send[target] == ranks[target].receive[source]
        for e, layout in enumerate(ranks):
            local = experts // ep
            held = counts[d, :, e * local : (e + 1) * local]
            assert layout.experts == tuple(map(tuple, held.tolist()))
            assert expert_offsets(layout) == (0, *held.sum(0).cumsum(0).tolist())


@given(drawn=layouts)
def test_regrouping_orders_rows_by_expert_and_back(drawn: tuple[tuple[int, int, int], list[int]]) -> None:
    layout = row_layout(counts_of(drawn), 0, 0)
    named = [(e, s, i) for s, of_source in enumerate(layout.experts) for e, n in enumerate(of_source) for i in range(n)]
    received = torch.tensor(named, dtype=torch.float64).view(-1, 3).requires_grad_()
    grouped = group_by_expert(received, layout)
    assert [tuple(map(int, row)) for row in grouped.tolist()] == sorted(named)
    assert torch.equal(group_by_source(grouped, layout), received)
    if named:
        assert torch.autograd.gradcheck(lambda rows: group_by_expert(rows, layout), (received,))
        assert torch.autograd.gradcheck(lambda rows: group_by_source(rows, layout), (received,))


@pytest.mark.parametrize("counts", [torch.full((1, 2, 4), -1), torch.zeros(1, 2, 3, dtype=torch.int64)])
def test_impossible_counts_are_refused(counts: Tensor) -> None:
    with pytest.raises(TransportError, match="counts"):
        row_layout(counts, 0, 0)


# -- transports ---------------------------------------------------------------


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
    for part in ("rank 0", "dispatch", "ranks [0, 1]", "0.5 s"):
        assert part in message


def die_instead(ctx: RankContext) -> None:
    transport = make_transport(*groups(1, 2, ctx.rank), Mesh(ep=2), ctx.rank, timeout_s=20.0)
    if ctx.rank == 1:
        os._exit(3)
    transport.dispatch(torch.ones(2, 3), RowLayout((1, 1), (1, 1), ((1,), (1,)))).wait()


def test_a_dead_peer_is_a_transport_error(pool: WorkerPool) -> None:
    result = pool.run(die_instead, 2, expect_failure=True)[0]
    assert result.failure is not None and result.failure.type_name == "TransportError"


def wrong_coordinates(ctx: RankContext) -> None:
    ep_group, data_group = groups(1, 2, ctx.rank)
    with pytest.raises(PlanError, match="ep_group"):
        CollectiveTransport(ep_group=ep_group, data_group=data_group, ep_rank=1 - ctx.rank, ep_size=2)


def test_groups_that_contradict_the_coordinates_are_refused(pool: WorkerPool) -> None:
    pool.run(wrong_coordinates, 2)
