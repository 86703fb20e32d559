"""The integer program against brute force, and what happens to a solver's wrong answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_rt.errors import PartitionInfeasible, PlanError
from tessera_rt.planner.candidates import Bounds, candidates, ranges
from tessera_rt.planner.edge_costs import edge_costs, stage_costs
from tessera_rt.planner.least import t_dom_bound
from tessera_rt.planner.milp_problem import MilpProblem
from tessera_rt.planner.partition_milp import MilpAnswer, MinMax, Solver, partition_milp, scipy_solver
from tessera_rt.planner.setting import Setting
from tessera_rt.planner.tables import FORBIDDEN
from tessera_rt.scheduler.templates import build_template
from tessera_rt.testing.costs import moe_model
from tessera_rt.testing.partitions import all_bounds
from tessera_rt.testing.random_costs import random_costs

SEEDS = st.integers(0, 10_000)


def make_setting(seed: int, pp: int, vpp: int, *, layers: int = 5, microbatches: int = 6, limit: int = 0) -> Setting:
    model = moe_model(layers, dense_first=1, tied=bool(seed % 2))
    name = "1f1b" if vpp == 1 else "interleaved-1f1b"
    template = build_template(name, pp=pp, vpp=vpp, microbatches=microbatches, joint=True)
    return Setting(model, random_costs(model, seed), template, limit=limit, method="align")


def solve(
    setting: Setting, centers: list[Bounds], window: int | None, at_most: int, at_least: int = 0
) -> MinMax | None:
    cands = candidates(len(setting.model.items), setting.stages, centers, window=window)
    made = edge_costs(cands, setting.edges, setting.pairs, at_most=at_most, at_least=at_least)
    assert made is not None
    return partition_milp(*made, memory=setting.memory, limit=setting.limit)


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
    window = 1 if near else None
    cands = candidates(len(setting.model.items), setting.stages, [center], window=window)
    known = setting.t_dom(center)
    least = min(setting.t_dom(b) for b in fitting if cands.allows(b))
    found = solve(setting, [center], window, known)
    assert found is not None and found.status == "optimal"
    assert found.value == found.bound == setting.t_dom(found.bounds) == least
    assert cands.allows(found.bounds) and found.bounds in fitting
    # Leaving pairs uncosted that a lower bound makes irrelevant changes nothing.
    bound = t_dom_bound(setting)
    assert bound <= min(map(setting.t_dom, every))
    lazy = solve(setting, [center], window, known, at_least=bound)
    assert lazy is not None and lazy.value == least == setting.t_dom(lazy.bounds)


@settings(max_examples=30)
@given(SEEDS, st.sampled_from([(2, 1), (2, 2), (3, 2)]))
def test_least_memory_is_that_of_brute_force(seed: int, mesh: tuple[int, int]) -> None:
    setting = make_setting(seed, *mesh)
    cands = candidates(len(setting.model.items), setting.stages, window=None)
    found = partition_milp(cands, [], memory=setting.memory)
    least = min(max(setting.memory.peaks(b)) for b in all_bounds(len(setting.model.items), setting.stages))
    assert found is not None and found.value == max(setting.memory.peaks(found.bounds)) == least
    with pytest.raises(PartitionInfeasible):
        partition_milp(cands, stage_costs(cands, setting.serial), memory=setting.memory, limit=least - 1)


@settings(max_examples=20)
@given(SEEDS, st.integers(1, 5))
def test_least_serial_stage_is_that_of_brute_force(seed: int, stages: int) -> None:
    setting = make_setting(seed, stages, 1)
    cands = candidates(len(setting.model.items), stages, window=None)
    found = partition_milp(cands, stage_costs(cands, setting.serial))
    every = all_bounds(len(setting.model.items), stages)
    assert found is not None
    assert found.value == min(max(int(setting.serial[c]) for c in ranges(b)) for b in every)


def test_boundaries_are_shared_by_neighbouring_stages() -> None:
    """Without the seam each stage would choose a cheap range of its own; with it the flow rows make them meet."""
    setting = make_setting(3, 4, 1)
    cands = candidates(len(setting.model.items), 4, window=None)
    problems: list[MilpProblem] = []

    def keep(problem: MilpProblem, time_limit_s: float) -> MilpAnswer:
        problems.append(problem)
        return scipy_solver(problem, time_limit_s)

    partition_milp(cands, stage_costs(cands, setting.serial), solver=keep)
    (problem,) = problems
    gap = np.zeros(len(problem.lower))
    for s, chunk in enumerate([(0, 1), (2, 3), (3, 5), (5, 7)]):  # item 1 in no stage
        gap[problem.columns[s, chunk]] = 1.0
    gap[0] = 1e9
    rows = problem.matrix @ gap
    assert ((rows < problem.row_lower) | (rows > problem.row_upper)).any()


def changed(setting: Setting, change: dict[tuple[int, tuple[int, int]], float], **answer: object) -> Solver:
    """A solver that returns scipy's point with some y changed."""

    def solver(problem: MilpProblem, time_limit_s: float) -> MilpAnswer:
        found = scipy_solver(problem, time_limit_s)
        assert found.x is not None
        x = found.x.copy()
        for (stage, chunk), value in change.items():
            x[problem.columns[stage, chunk]] = value
        return replace(found, x=x, **answer)  # type: ignore[arg-type]

    return solver


def break_it(kind: str) -> tuple[Setting, Solver]:
    setting = make_setting(5, 3, 1)
    cands = candidates(len(setting.model.items), 3, window=None)
    good = partition_milp(cands, stage_costs(cands, setting.serial))
    assert good is not None
    first, second, third = ranges(good.bounds)
    longer = (second[0], second[1] + 1)
    match kind:
        case "item in two stages":
            change = {(1, second): 0.0, (1, longer): 1.0}
        case "item in no stage":
            change = {(1, second): 0.0, (1, (second[0] + 1, second[1] + 1)): 1.0, (2, third): 0.0, (2, longer): 0.0}
            change |= {(2, (third[0] + 1, third[1])): 1.0}
            del change[2, longer]
        case "no range":
            change = {(0, first): 0.0}
        case "half a range":
            change = {(0, first): 0.6}
        case "not a number":
            change = {(0, first): float("nan")}
        case _:
            raise AssertionError(kind)
    return setting, changed(setting, change)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("item in two stages", "stages with item . = 2"),
        ("item in no stage", "stages with item . = 0"),
        ("no range", "ranges of stage 0"),
        ("half a range", "must be 0 or 1"),
        ("not a number", "must be 0 or 1"),
    ],
)
def test_a_point_that_is_no_partition_is_rejected(kind: str, message: str) -> None:
    setting, solver = break_it(kind)
    cands = candidates(len(setting.model.items), 3, window=None)
    with pytest.raises(PlanError, match=message):
        partition_milp(cands, stage_costs(cands, setting.serial), solver=solver)


def test_a_partition_over_the_memory_limit_is_rejected() -> None:
    setting = make_setting(5, 3, 1)
    cands = candidates(len(setting.model.items), 3, window=None)
    worst = max(all_bounds(len(setting.model.items), 3), key=lambda b: max(setting.memory.peaks(b)))

    def solver(problem: MilpProblem, time_limit_s: float) -> MilpAnswer:
        x = np.zeros(len(problem.lower))
        x[0] = 1e9
        for s, chunk in enumerate(ranges(worst)):
            x[problem.columns[s, chunk]] = 1.0
        x[1 + len(problem.columns) :] = 1.0  # every rank may use the embedding table
        return MilpAnswer(x=x, status="optimal", bound=0.0)

    costs = stage_costs(cands, setting.serial)
    limit = max(setting.memory.peaks(worst)) - 1
    with pytest.raises(PartitionInfeasible, match="must be at most"):
        partition_milp(cands, costs, memory=setting.memory, limit=limit, solver=solver)
    found = partition_milp(cands, costs, memory=setting.memory, limit=limit + 1, solver=solver)
    assert found is not None and found.bounds == worst


def test_a_value_below_the_costs_of_its_own_partition_is_rejected() -> None:
    setting = make_setting(5, 3, 1)
    cands = candidates(len(setting.model.items), 3, window=None)

    def solver(problem: MilpProblem, time_limit_s: float) -> MilpAnswer:
        found = scipy_solver(problem, time_limit_s)
        assert found.x is not None
        return replace(found, x=np.concatenate([[found.x[0] / 2], found.x[1:]]))

    with pytest.raises(PlanError, match="solver: row"):
        partition_milp(cands, stage_costs(cands, setting.serial), solver=solver)


def test_statuses() -> None:
    setting = make_setting(5, 3, 1)
    cands = candidates(len(setting.model.items), 3, window=None)
    costs = stage_costs(cands, setting.serial)
    assert partition_milp(cands, costs, time_limit_s=0.0) is None, "scipy gives no point at 0 s"
    incumbent = partition_milp(cands, costs, solver=changed(setting, {}, status="limit", bound=1.0))
    assert incumbent is not None and incumbent.status == "incumbent" and incumbent.bound < incumbent.value
    without_bound = partition_milp(cands, costs, solver=changed(setting, {}, status="limit", bound=None))
    assert without_bound is not None and without_bound.bound == 0
    for status, error in (("infeasible", PartitionInfeasible), ("failed", PlanError)):
        answer = MilpAnswer(x=None, status=status, message="no reason")
        with pytest.raises(error):
            partition_milp(cands, costs, solver=lambda *_, answer=answer: answer)


def test_pruning_drops_what_no_better_partition_uses() -> None:
    setting = make_setting(11, 4, 2, layers=12)
    center = (0, 2, 4, 6, 8, 10, 12, 13, 14)
    known = setting.t_dom(center)
    cands = candidates(14, 8, [center], window=2)
    made = edge_costs(cands, setting.edges, setting.pairs, at_most=known)
    assert made is not None
    left, tables = made
    assert left.allows(center)
    assert sum(map(len, left.ranges)) < sum(map(len, cands.ranges))
    for table in tables:
        costed = table.cost[table.cost < FORBIDDEN]
        assert costed.min() >= 0 and costed.max() <= known
        assert (table.cost < FORBIDDEN).any(axis=1).all() and (table.cost < FORBIDDEN).any(axis=0).all()
    out_of_time = edge_costs(cands, setting.edges, setting.pairs, at_most=known, out_of_time=lambda: True)
    assert out_of_time is None
