"""The grid of a search and its frontier, with plans that only have a time and a size."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.errors import PlanError, Problem, ScheduleError
from tessera_rt.plan import Plan
from tessera_rt.planner.plan_grid import Choice, choices, search_grid
from tessera_rt.testing.costs import moe_model
from tessera_rt.testing.plans import simple_plan

DEFAULT = Choice(template="interleaved-1f1b", vpp=2, tokens=64, microbatches=8, recompute="auto")
PLAN = simple_plan(moe_model(4), pp=2)


def plan_of(step_ns: int, peak: int) -> Plan:
    memory = tuple(replace(rank, weights=peak, gradients=0, optimizer=0, activations=0) for rank in PLAN.memory)
    memory = tuple(replace(rank, pending_w=0, buffers=0) for rank in memory)
    return replace(PLAN, memory=memory, solver=replace(PLAN.solver, step_ns=step_ns))


def test_templates_bring_their_stages_and_tokens_their_micro_batches() -> None:
    axes = {"template": ["1f1b", "dualpipe-v", "interleaved-1f1b"], "vpp": [1, 2, 4], "tokens": [32, 128]}
    grid = choices(axes, tokens=64, microbatches=8, default=DEFAULT)
    assert len(grid) == len(set(grid)) == 2 * (1 + 1 + 3)
    assert {(c.template, c.vpp) for c in grid if c.template != "interleaved-1f1b"} == {("1f1b", 1), ("dualpipe-v", 2)}
    assert {(c.tokens, c.microbatches) for c in grid} == {(32, 16), (128, 4)}
    assert choices({}, tokens=64, microbatches=8, default=DEFAULT) == [DEFAULT]


def test_what_no_grid_can_be() -> None:
    with pytest.raises(PlanError) as caught:
        choices({"speed": [1], "vpp": [], "tokens": [100]}, tokens=64, microbatches=8, default=DEFAULT)
    assert [problem.field for problem in caught.value.problems] == ["axis", "vpp", "tokens"]


@given(st.lists(st.none() | st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12))
def test_the_frontier_is_what_no_other_plan_beats(points: list[tuple[int, int] | None]) -> None:
    grid = [replace(DEFAULT, vpp=1 + i) for i in range(len(points))]

    def build(choice: Choice) -> Plan:
        point = points[choice.vpp - 1]
        if point is None:
            raise ScheduleError.of("template", [Problem("vpp", choice.vpp, "something else")])
        return plan_of(*point)

    tried = search_grid(grid, build)
    assert {one.choice for one in tried} == set(grid)
    planned = [one for one in tried if one.plan is not None]
    assert tried[: len(planned)] == planned  # the others come last
    assert all("something else" in one.reason for one in tried[len(planned) :])
    found = [(one.step_ns, one.peak_bytes) for one in planned]
    assert found == sorted(found)
    best = {p for p in found if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in found)}
    assert {(one.step_ns, one.peak_bytes) for one in planned if one.frontier} == best
    assert sum(one.frontier for one in planned) == len(best)


def test_other_failures_are_not_hidden() -> None:
    def build(choice: Choice) -> Plan:
        raise RuntimeError("a fault of ours")

    with pytest.raises(RuntimeError, match="fault"):
        search_grid([DEFAULT], build)
