"""Segments of neighbouring experts, and the places of rows in them."""

from __future__ import annotations

from itertools import combinations, pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.moe import grouping
from tessera_rt.moe.grouping import Grouping, bias_gradient, group_choices, rows_product, segments, weight_gradient
from tessera_rt.moe.host_memory import large_empty

COUNTS = st.lists(st.integers(0, 3) | st.integers(0, 60) | st.integers(100, 160), min_size=1, max_size=9)
WORK = 262_144  # multiply-adds of a row: 512 x 512


def cost_of(counts: list[int], bounds: tuple[int, ...]) -> int:
    total = 0
    for first, last in pairwise((0, *bounds, len(counts))):
        height = max(counts[first:last])
        if height:
            total += grouping.segment_rows(WORK) + (last - first) * max(height, grouping._WEIGHT_ROWS)
    return total


@given(counts=COUNTS)
def test_segments_cover_all_experts_and_cost_the_least(counts: list[int]) -> None:
    found = segments(counts, WORK)
    assert found[0].first == 0 and found[-1].last == len(counts)
    assert all(a.last == b.first and a.rows.stop == b.start for a, b in pairwise(found))
    assert all(part.height == max(counts[part.experts]) for part in found)
    inner = range(1, len(counts))
    least = min(cost_of(counts, cut) for size in range(len(counts)) for cut in combinations(inner, size))
    assert cost_of(counts, tuple(part.first for part in found[1:])) == least


def test_no_expert_and_no_row() -> None:
    assert segments([], WORK) == ()
    assert [part.height for part in segments([0, 0], WORK)] == [0]
    empty = group_choices(torch.zeros(0, 2, dtype=torch.int64), 3, WORK)
    assert empty.rows == empty.total == 0 and empty.position.numel() == 0


def test_even_loads_are_one_product_and_one_crowded_expert_stands_alone() -> None:
    assert len(segments([8, 12, 7, 9] * 16, WORK)) == 1
    assert [(part.first, part.last) for part in segments([1, 1, 500, 1, 1], WORK)] == [(0, 2), (2, 3), (3, 5)]
    assert (
        sum(part.height > 0 for part in segments([0] * 60 + [1] + [0] * 60 + [1], WORK)) == 2
    )  # a token reads two weights


@given(experts=st.integers(1, 7), tokens=st.integers(0, 40), top_k=st.integers(1, 3), seed=st.integers(0, 99))
def test_choices_find_their_rows_in_token_order(experts: int, tokens: int, top_k: int, seed: int) -> None:
    ids = torch.randint(-1, experts + 2, (tokens, top_k), generator=torch.Generator().manual_seed(seed))
    found = group_choices(ids.to(torch.int32), experts, WORK)
    taken = []
    for choice, expert in enumerate(ids.flatten().tolist()):
        row = int(found.position[choice])
        if not 0 <= expert < experts:
            assert row == found.rows
            continue
        (part,) = (p for p in found.segments if p.first <= expert < p.last)
        of_expert = part.start + (expert - part.first) * part.height
        rank = sum(e == expert for e in ids.flatten().tolist()[:choice])  # places in an expert follow the choices
        assert row == of_expert + rank and int(found.source[row]) == choice
        taken.append(row)
    assert len(set(taken)) == len(taken) == found.total == int(found.counts.sum())
    free = set(range(found.rows)) - set(taken)
    assert all(int(found.source[row]) == tokens * top_k for row in free)
    again = Grouping.restored(found.source, found.position, found.counts, WORK)
    assert again.segments == found.segments and again.total == found.total


@given(counts=COUNTS, seed=st.integers(0, 99))
def test_products_equal_one_product_per_expert(counts: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).unsqueeze(1)
    found = group_choices(ids[torch.randperm(len(ids), generator=generator)], len(counts), WORK)
    weight = torch.randn(len(counts), 3, 5, generator=generator, dtype=torch.float64)
    bias = torch.randn(len(counts), 3, generator=generator, dtype=torch.float64)
    rows = torch.randn(found.rows, 5, generator=generator, dtype=torch.float64)
    rows[found.source == ids.numel()] = 0.0
    grad = torch.randn(found.rows, 3, generator=generator, dtype=torch.float64)
    grad[found.source == ids.numel()] = 0.0
    expert_of = [e for p in found.segments for e in range(p.first, p.last) for _ in range(p.height)]
    out = rows_product(rows, weight, found, bias)
    d_weight, d_bias = weight_gradient(grad, rows, found), bias_gradient(grad, found)
    expected, d_expected, b_expected = torch.zeros_like(out), torch.zeros_like(weight), torch.zeros_like(bias)
    for row, e in enumerate(expert_of):
        expected[row] = weight[e] @ rows[row] + bias[e]
        d_expected[e] += torch.outer(grad[row], rows[row])
        b_expected[e] += grad[row]
    for actual, wanted in ((out, expected), (d_weight, d_expected), (d_bias, b_expected)):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)
    assert all((d_weight[e] == 0).all() for e, count in enumerate(counts) if count == 0)


def test_large_buffers_are_ordinary_tensors() -> None:
    for shape in ((2, 3), (3, 1024, 1024)):
        large = large_empty(torch.Size(shape), torch.float32, torch.device("cpu"))
        assert large.shape == shape and large.is_contiguous() and large.dtype == torch.float32
        large.fill_(2.0)
        assert large.sum() == 2.0 * large.numel()
        view = large[0]
        del large
        assert (view == 2.0).all()
    assert large_empty(torch.Size((0, 4)), torch.bfloat16, torch.device("cpu")).shape == (0, 4)


def test_groups_are_made_on_the_device_of_the_ids() -> None:
    """Whatever torch makes by default: what is made without a device would meet tensors of another."""
    ids = torch.tensor([[0, 2], [2, 3], [-1, 0]])
    with torch.device("meta"):
        found = group_choices(ids, 4, 1000)
    expected = group_choices(ids, 4, 1000)
    assert torch.equal(found.source, expected.source) and torch.equal(found.position, expected.position)
