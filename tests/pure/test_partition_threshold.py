"""The threshold search against brute force, the integer program and a dynamic program over frontiers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_rt.errors import PartitionInfeasible
from tessera_rt.planner.candidates import Bounds, Candidates, candidates, ranges
from tessera_rt.planner.edge_costs import EdgeCosts, edge_costs, stage_costs
from tessera_rt.planner.least import t_dom_bound
from tessera_rt.planner.partition_milp import partition_milp
from tessera_rt.planner.partition_threshold import partition_threshold, threshold_search
from tessera_rt.planner.setting import Setting
from tessera_rt.planner.tables import FORBIDDEN
from tessera_rt.scheduler.templates import build_template
from tessera_rt.testing.costs import moe_model
from tessera_rt.testing.partitions import all_bounds
from tessera_rt.testing.random_costs import random_costs

SEEDS = st.integers(0, 10_000)


def make_setting(seed: int, pp: int, vpp: int, *, layers: int = 5, limit: int = 0) -> Setting:
    model = moe_model(layers, dense_first=1, tied=bool(seed % 2))
    name = "1f1b" if vpp == 1 else "interleaved-1f1b"
    template = build_template(name, pp=pp, vpp=vpp, microbatches=6, joint=True)
    return Setting(model, random_costs(model, seed), template, limit=limit, method="align")


def made(setting: Setting, centers: list[Bounds], window: int | None, at_most: int, at_least: int = 0):  # type: ignore[no-untyped-def]
    cands = candidates(len(setting.model.items), setting.stages, centers, window=window)
    found = edge_costs(cands, setting.edges, setting.pairs, at_most=at_most, at_least=at_least)
    assert found is not None
    return found


@settings(max_examples=30)
@given(SEEDS, st.sampled_from([(2, 1), (4, 1), (2, 2), (3, 2), (2, 3)]), st.booleans(), st.booleans())
def test_the_optimum_is_that_of_brute_force(seed: int, mesh: tuple[int, int], limited: bool, near: bool) -> None:
    setting = make_setting(seed, *mesh)
    every = all_bounds(len(setting.model.items), setting.stages)
    if limited:
        peaks = sorted(max(setting.memory.peaks(b)) for b in every)
        setting.limit = peaks[seed % len(peaks)]
    fitting = [b for b in every if not setting.excess(b)]
    center = fitting[seed % len(fitting)]
    cands, tables = made(setting, [center], 1 if near else None, setting.t_dom(center))
    allowed = candidates(len(setting.model.items), setting.stages, [center], window=1 if near else None)
    least = min(setting.t_dom(b) for b in fitting if allowed.allows(b))
    for known in (None, center):
        found = partition_threshold(cands, tables, memory=setting.memory, limit=setting.limit, known=known)
        assert found is not None and (found.status, found.method) == ("optimal", "threshold")
        assert found.value == found.bound == setting.t_dom(found.bounds) == least
        assert found.bounds in fitting and allowed.allows(found.bounds)
    lazy = partition_threshold(
        *made(setting, [center], 1 if near else None, setting.t_dom(center), at_least=t_dom_bound(setting)),
        memory=setting.memory,
        limit=setting.limit,
        known=center,
        at_least=t_dom_bound(setting),
    )
    assert lazy is not None and lazy.value == least == setting.t_dom(lazy.bounds)


@settings(max_examples=8)
@given(SEEDS, st.sampled_from([(3, 2), (4, 2), (3, 3)]), st.booleans())
def test_it_agrees_with_the_integer_program(seed: int, mesh: tuple[int, int], limited: bool) -> None:
    setting = make_setting(seed, *mesh, layers=16)
    items, stages = len(setting.model.items), setting.stages
    center = tuple(k * items // stages for k in range(stages + 1))
    if limited:
        setting.limit = max(setting.memory.peaks(center))
    cands, tables = made(setting, [center], 2, setting.t_dom(center))
    ours = partition_threshold(cands, tables, memory=setting.memory, limit=setting.limit, known=center)
    milp = partition_milp(cands, tables, memory=setting.memory, limit=setting.limit)
    assert ours is not None and milp is not None
    assert ours.value == milp.value
    assert setting.t_dom(ours.bounds) == ours.value and not setting.excess(ours.bounds)


def frontier_optimum(cands: Candidates, tables: tuple[EdgeCosts, ...]) -> int:
    """Least largest cost by brute force over stages, one after the other, keeping all stages' ranges as the state."""
    cost = {
        (t.edge.forward, t.edge.backward, i, j): int(t.cost[i, j]) for t in tables for i, j in np.ndindex(t.cost.shape)
    }
    edges = {(t.edge.forward, t.edge.backward) for t in tables}
    states: dict[tuple[int, ...], int] = {(): 0}
    for s in range(cands.stages):
        following: dict[tuple[int, ...], int] = {}
        for chosen, worst in states.items():
            for i, (p, _) in enumerate(cands.ranges[s]):
                if chosen and cands.ranges[s - 1][chosen[-1]][1] != p:
                    continue
                now = (*chosen, i)
                paid = [cost[f, b, now[f], now[b]] for f, b in edges if max(f, b) == s]
                value = max([worst, *paid])
                if value < FORBIDDEN:
                    following[now] = value
        states = following
    return min(states.values())


@settings(max_examples=12)
@given(SEEDS, st.sampled_from([(2, 2), (3, 2)]))
def test_free_boundaries_agree_with_a_search_stage_by_stage(seed: int, mesh: tuple[int, int]) -> None:
    setting = make_setting(seed, *mesh, layers=6)
    cands, tables = made(setting, [], None, FORBIDDEN - 1)
    found = partition_threshold(cands, tables)
    assert found is not None and found.value == frontier_optimum(cands, tables)


def test_serial_stages_and_a_single_stage() -> None:
    setting = make_setting(8, 4, 1, layers=9)
    cands = candidates(len(setting.model.items), 4, window=None)
    found = partition_threshold(cands, stage_costs(cands, setting.serial))
    every = all_bounds(len(setting.model.items), 4)
    assert found is not None
    assert found.value == min(max(int(setting.serial[c]) for c in ranges(b)) for b in every)
    alone = candidates(len(setting.model.items), 1, window=None)
    one = partition_threshold(alone, stage_costs(alone, setting.serial))
    assert one is not None and one.bounds == (0, len(setting.model.items))


def test_without_nodes_the_integer_program_decides_and_without_time_the_known_partition_stays() -> None:
    setting = make_setting(17, 4, 2, layers=16)
    items, stages = len(setting.model.items), setting.stages
    center = tuple(k * items // stages for k in range(stages + 1))
    setting.limit = max(setting.memory.peaks(center))
    cands, tables = made(setting, [center], 2, setting.t_dom(center))
    options = {"memory": setting.memory, "limit": setting.limit, "known": center}
    best = partition_threshold(cands, tables, **options)
    assert best is not None and best.value < setting.t_dom(center)
    stuck = threshold_search(cands, tables, node_limit=0, **options)
    assert not stuck.proven and stuck.bounds == center and stuck.bound <= best.value
    handed = partition_threshold(cands, tables, node_limit=0, **options)
    assert handed is not None and (handed.value, handed.method) == (best.value, "threshold and milp")
    late = partition_threshold(cands, tables, node_limit=0, time_limit_s=0.0, **options)
    assert late is not None and (late.bounds, late.status) == (center, "incumbent")
    assert late.bound <= best.value <= late.value
    nothing = partition_threshold(
        cands, tables, memory=setting.memory, limit=setting.limit, node_limit=0, time_limit_s=0.0
    )
    assert nothing is None


def test_a_limit_below_the_memory_bound_is_refused_before_any_search(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = make_setting(5, 3, 2, layers=8)
    cands, tables = made(setting, [], None, FORBIDDEN - 1)

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("the bound on memory comes first")

    monkeypatch.setattr("tessera_rt.planner.partition_threshold.threshold_search", never)
    with pytest.raises(PartitionInfeasible, match="bytes at least"):
        partition_threshold(cands, tables, memory=setting.memory, limit=1)


def test_a_limit_that_no_partition_keeps_is_proven() -> None:
    setting = make_setting(5, 3, 1, layers=8)
    cands = candidates(len(setting.model.items), 3, window=None)
    costs = stage_costs(cands, setting.serial)
    least = min(max(setting.memory.peaks(b)) for b in all_bounds(len(setting.model.items), 3))
    found = partition_threshold(cands, costs, memory=setting.memory, limit=least)
    assert found is not None and max(setting.memory.peaks(found.bounds)) == least
    proof = threshold_search(cands, costs, memory=setting.memory, limit=least - 1)
    assert proof.proven and proof.bounds is None
    with pytest.raises(PartitionInfeasible):
        partition_threshold(cands, costs, memory=setting.memory, limit=least - 1)
    with pytest.raises(PartitionInfeasible, match="left"):
        partition_threshold(replace(cands, ranges=((), *cands.ranges[1:])), costs)
