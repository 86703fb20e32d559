"""The chain dynamic program against brute force."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.planner.candidates import Bounds, ranges
from tessera_rt.planner.chain_dp import chain_partition, improve, least_sum, quick_times, serial_times
from tessera_rt.planner.tables import FORBIDDEN, Table, range_sums
from tessera_rt.testing.costs import item_costs, moe_model
from tessera_rt.testing.partitions import all_bounds

SEEDS = st.integers(0, 10_000)


def random_table(seed: int, items: int, stages: int, *, forbidden: float = 0.0) -> Table:
    """[stages, n + 1, n + 1] of arbitrary costs, some FORBIDDEN."""
    draw = np.random.default_rng(seed)
    table = draw.integers(0, 20, size=(stages, items + 1, items + 1))
    table[draw.random(table.shape) < forbidden] = FORBIDDEN
    return np.asarray(table, dtype=np.int64)


def costs_of(table: Table, bounds: Bounds) -> list[int]:
    return [int(table[s][chunk]) for s, chunk in enumerate(ranges(bounds))]


@given(SEEDS, st.integers(1, 8), st.integers(1, 5), st.sampled_from([0.0, 0.3, 0.6]))
def test_least_maximum_then_least_sum_of_squares(seed: int, items: int, stages: int, forbidden: float) -> None:
    table = random_table(seed, items, stages, forbidden=forbidden)
    allowed = [b for b in all_bounds(items, stages) if max(costs_of(table, b)) < FORBIDDEN]
    found = chain_partition(table, stages)
    if not allowed:
        assert found is None
        return
    assert found is not None
    bounds, bottleneck = found
    assert bounds in allowed and max(costs_of(table, bounds)) == bottleneck

    def key(b: Bounds) -> tuple[int, int]:
        return max(costs_of(table, b)), sum(cost**2 for cost in costs_of(table, b))

    assert key(bounds) == min(map(key, allowed))


@given(SEEDS, st.integers(1, 8), st.integers(1, 5), st.integers(0, 1))
def test_least_sum(seed: int, items: int, stages: int, shortest: int) -> None:
    allowed = all_bounds(items, stages, shortest=shortest)
    if not allowed:
        return
    table = random_table(seed, items, stages)
    bounds, total = least_sum(table.astype(np.float64), shortest=shortest)
    assert bounds in allowed
    assert sum(costs_of(table, bounds)) == total == min(sum(costs_of(table, b)) for b in allowed)


def test_128_layers_over_64_stages() -> None:
    draw = random.Random(1)
    times = [draw.randint(1, 10**9) for _ in range(130)]
    found = chain_partition(range_sums(times), 64)
    assert found is not None
    bounds, bottleneck = found
    assert len(bounds) == 65 and bounds[0] == 0 and bounds[-1] == 130
    assert max(sum(times[p:q]) for p, q in ranges(bounds)) == bottleneck
    # No better bottleneck exists: filling stages greedily below it needs more of them.
    stages, held = 1, 0
    for time in times:
        if held + time >= bottleneck:
            stages, held = stages + 1, 0
        held += time
    assert stages > 64


def test_fewer_items_than_stages_leave_stages_empty() -> None:
    found = chain_partition(range_sums([3, 5]), 4)
    assert found is not None and found[1] == 5
    assert sorted(q - p for p, q in ranges(found[0])) == [0, 0, 1, 1]


@given(SEEDS, st.integers(2, 8), st.integers(1, 5))
def test_local_search_never_makes_it_worse_and_ends_at_a_local_optimum(seed: int, items: int, stages: int) -> None:
    table = random_table(seed, items, stages)
    start = random.Random(seed).choice(all_bounds(items, stages))
    shortest = 0 if items < stages else 1

    def key(b: Bounds) -> tuple[float, ...]:
        return (max(costs_of(table, b)), sum(costs_of(table, b)))

    found = improve(start, key, shortest=shortest, evaluations=100_000)
    assert found in all_bounds(items, stages)
    assert key(found) <= key(start)
    for k in range(1, stages):
        for step in (-1, 1):
            moved = (*found[:k], found[k] + step, *found[k + 1 :])
            assert moved not in all_bounds(items, stages) or key(moved) >= key(found)


def test_local_search_stops_at_its_limit() -> None:
    seen: list[Bounds] = []

    def key(b: Bounds) -> tuple[float, ...]:
        seen.append(b)
        return (-b[1],)

    assert 1 < improve((0, 1, 50), key, shortest=1, evaluations=5)[1] < 50
    assert len(seen) == 1 + 5, "the start and five moves"


def test_serial_and_quick_times() -> None:
    model = moe_model(2, dense_first=1)
    costs = item_costs(model, {"L0": (1, 2, 3), "L1": (1, 2, 3), "HEAD": (4, 5, 6)}, comm_ns=10)
    # L1 has a dispatch and a combine in each direction, the dense L0 has none.
    assert serial_times(model, costs) == [0, 6, 46, 15]
    assert quick_times(model, costs) == [0, 6, 40, 15]


@pytest.mark.parametrize("values", [[], [5], [1, 2, 3]])
def test_range_sums(values: list[int]) -> None:
    table = range_sums(values)
    for p in range(len(values) + 1):
        for q in range(len(values) + 1):
            assert table[p, q] == (sum(values[p:q]) if q >= p else FORBIDDEN)
