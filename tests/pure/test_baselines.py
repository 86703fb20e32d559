"""Baselines against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.costs import ItemMemory
from tessera_rt.planner.baselines import equal_layers, memory_balanced, parameter_balanced, serial_balanced
from tessera_rt.planner.candidates import Bounds, ranges
from tessera_rt.planner.chain_dp import serial_times
from tessera_rt.planner.memory import MemoryModel
from tessera_rt.scheduler.templates import build_template
from tessera_rt.testing.costs import dense_model, item_costs, moe_model
from tessera_rt.testing.partitions import all_bounds
from tessera_rt.testing.random_costs import random_costs

SEEDS = st.integers(0, 10_000)


@pytest.mark.parametrize(("layers", "stages", "most"), [(30, 4, 8), (10, 3, 4), (7, 2, 4), (61, 16, 4)])
def test_equal_layers_places_every_layer(layers: int, stages: int, most: int) -> None:
    """Case 1."""
    bounds = equal_layers(dense_model(layers), stages)
    assert bounds[0] == 0 and bounds[-1] == layers + 2
    sizes = [q - p for p, q in ranges(bounds)]
    sizes[0] -= 1  # the embedding
    sizes[-1] -= 1  # the head
    assert sum(sizes) == layers and max(sizes) == most and max(sizes) - min(sizes) <= 1


def test_equal_layers_keeps_mtp_with_the_head_and_fills_all_stages_if_it_can() -> None:
    assert equal_layers(dense_model(8, mtp=1), 4) == (0, 3, 5, 7, 11)
    assert all(q > p for p, q in ranges(equal_layers(dense_model(2), 4)))
    assert len(ranges(equal_layers(dense_model(1), 5))) == 5


@given(SEEDS, st.integers(1, 5))
def test_parameter_balanced(seed: int, stages: int) -> None:
    model = dense_model(5)
    costs = random_costs(model, seed)
    weights = [costs.memory[item.label].weights for item in model.items]

    def most(b: Bounds) -> int:
        return max(sum(weights[p:q]) for p, q in ranges(b))

    assert most(parameter_balanced(model, costs, stages)) == min(map(most, all_bounds(7, stages)))


@given(SEEDS, st.integers(1, 4), st.integers(1, 2), st.booleans())
def test_serial_balanced(seed: int, pp: int, vpp: int, limited: bool) -> None:
    """One stage a rank: exact also under a limit. Several: exact in the slowest stage without one."""
    model = moe_model(5)
    costs = random_costs(model, seed)
    made = build_template("1f1b" if vpp == 1 else "interleaved-1f1b", pp=pp, vpp=vpp, microbatches=4, joint=True)
    memory = MemoryModel(model, costs, made)
    times = serial_times(model, costs)
    every = all_bounds(len(model.items), pp * vpp)
    peaks = sorted(max(memory.peaks(b)) for b in every)
    limit = peaks[seed % len(peaks)] if limited else 0

    def key(b: Bounds) -> tuple[int, int]:
        chunks = [sum(times[p:q]) for p, q in ranges(b)]
        return max(chunks), sum(chunk**2 for chunk in chunks)

    fitting = [b for b in every if not limit or max(memory.peaks(b)) <= limit]
    found = serial_balanced(model, costs, made.stage_ranks, memory, limit)
    if vpp == 1:
        assert found is not None and found in fitting
        assert key(found) == min(map(key, fitting))
    elif not limited:
        assert found in fitting and key(found)[0] == min(map(key, fitting))[0]
    else:
        assert found is None or found in fitting
    if vpp == 1 and limited and limit > 1:
        too_low = serial_balanced(model, costs, made.stage_ranks, memory, peaks[0] - 1)
        assert too_low is None


def test_the_busiest_rank_is_second() -> None:
    """35 equal layers over 8 chunks: three chunks have five, on three different ranks (case 8)."""
    model = dense_model(35)
    costs = item_costs(model, dict.fromkeys([f"L{i}" for i in range(35)], (1, 1, 1)))
    made = build_template("interleaved-1f1b", pp=4, vpp=2, microbatches=8, joint=True)
    bounds = serial_balanced(model, costs, made.stage_ranks)
    assert bounds is not None
    times = serial_times(model, costs)
    chunks = [sum(times[p:q]) // 3 for p, q in ranges(bounds)]
    assert sorted(chunks) == [4] * 5 + [5] * 3
    assert max(chunks[r] + chunks[r + 4] for r in range(4)) == 9


@given(SEEDS, st.integers(1, 4), st.integers(1, 2))
def test_memory_balanced(seed: int, pp: int, vpp: int) -> None:
    model = dense_model(5, tied=True)
    made = build_template("1f1b" if vpp == 1 else "interleaved-1f1b", pp=pp, vpp=vpp, microbatches=4, joint=True)
    memory = MemoryModel(model, random_costs(model, seed), made)
    every = all_bounds(len(model.items), pp * vpp)
    found = memory_balanced(made.stage_ranks, memory)
    least = min(max(memory.peaks(b)) for b in every)
    assert found in every
    assert max(memory.peaks(found)) == least if vpp == 1 else max(memory.peaks(found)) >= least


def test_memory_balanced_counts_embedding_and_head() -> None:
    """Case 5, memory objective: 12 layers of 1, embedding 2, head 2 over 4 ranks."""
    model = dense_model(12)
    sizes = {f"L{i}": ItemMemory(weights=1) for i in range(12)} | dict.fromkeys(
        ("EMBED", "HEAD"), ItemMemory(weights=2)
    )
    made = build_template("1f1b", pp=4, vpp=1, microbatches=8, joint=True)
    memory = MemoryModel(model, item_costs(model, {}, sizes), made)
    bounds = memory_balanced(made.stage_ranks, memory)
    assert bounds == (0, 3, 7, 11, 14)
    assert memory.peaks(bounds) == (4, 4, 4, 4)
