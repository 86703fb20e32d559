"""Send order, row layouts and regrouping: every row goes where it belongs and comes back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tessera_rt.errors import TransportError
from tessera_rt.moe.dispatch import (
    expert_offsets,
    gather_rows,
    group_by_expert,
    group_by_source,
    row_layout,
    send_order,
    weighted_sum,
)


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
