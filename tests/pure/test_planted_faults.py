"""Twenty kinds of fault, planted in plans, schedules and timelines that are right: each is found and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_rt.costs import CostTable, ItemMemory, Link
from tessera_rt.errors import CostError, PlanError, ScheduleError
from tessera_rt.plan import Action, Mesh, Plan
from tessera_rt.plan_check import check_plan
from tessera_rt.planner.build import plan_with
from tessera_rt.scheduler.bubble_filling import BubbleFilling
from tessera_rt.scheduler.check_timeline import check_timeline
from tessera_rt.scheduler.replicas import prepare, simulate_replicas
from tessera_rt.scheduler.simulate import simulate
from tessera_rt.testing.costs import item_costs, moe_model
from tessera_rt.timeline import Span, Timeline

MODEL = moe_model(4, dense_first=1, shared=True)  # EMBED L0 ... L3 HEAD
COSTS = item_costs(
    MODEL,
    {"HEAD": (9, 9, 5), "EMBED": (1, 1, 0)},
    {item.label: ItemMemory(weights=10, activations=5, pending_w=3, output=40) for item in MODEL.items},
    default=(30, 40, 20),
    comm_ns=12,
    count_ns=1,
    link=Link(latency_ns=3, bytes_per_s=1e10),
    contention=0.25,
)


def built(template: str = "interleaved-1f1b", vpp: int = 2) -> Plan:
    cuts = (0, 2, 3, 4, 6) if vpp == 2 else (0, 3, 6)
    return plan_with(cuts, MODEL, Mesh(pp=2, vpp=vpp), COSTS, microbatches=4, template=template)


PLAN = built()
SPLIT = built("zb-h1", 1)


def with_row(plan: Plan, rank: int, change: Callable[[list[Action]], list[Action]]) -> Plan:
    rows = [change(list(row)) if r == rank else list(row) for r, row in enumerate(plan.actions)]
    return replace(plan, actions=tuple(map(tuple, rows)))


def moved_to_front(text: str) -> Callable[[list[Action]], list[Action]]:
    def change(row: list[Action]) -> list[Action]:
        action = Action.parse(text)
        assert action in row
        return [action, *(other for other in row if other != action)]

    return change


def stage(plan: Plan, number: int, **changes: int) -> Plan:
    return replace(plan, stages=tuple(replace(s, **changes) if s.index == number else s for s in plan.stages))


def reordered(plan: Plan, key: str, order: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Plan:
    entry = plan.interleavings[key]
    return replace(plan, interleavings={**plan.interleavings, key: replace(entry, order=order(entry.order))})


PLAN_FAULTS: dict[str, tuple[Plan, str]] = {
    "a layer in no stage": (stage(PLAN, 1, stop=2), "stages"),
    "a layer in two stages": (stage(PLAN, 1, stop=4), "stages"),
    "a stage on a rank that is not there": (stage(PLAN, 2, rank=2), "stages[2].rank"),
    "too few slots for what is in flight": (stage(PLAN, 0, slots=1), "stages[0].slots"),
    "a forward left out": (with_row(PLAN, 1, lambda row: row[1:]), "actions[1]"),
    "a backward before its forward": (with_row(SPLIT, 0, moved_to_front("0I0")), "actions[0]"),
    "a weight gradient before its backward": (with_row(SPLIT, 1, moved_to_front("1W0")), "actions[1]"),
    "ranks that wait for each other": (with_row(SPLIT, 1, moved_to_front("1F3")), "actions[0]"),
    "an order that names a task twice": (reordered(PLAN, "0F", lambda o: (*o, o[0])), "interleavings.0F.order"),
    "an order against the data": (reordered(PLAN, "0F", lambda o: o[::-1]), "interleavings.0F.order"),
}


@pytest.mark.parametrize("name", PLAN_FAULTS)
def test_check_plan_finds(name: str) -> None:
    check_plan(PLAN, MODEL)
    check_plan(SPLIT, MODEL)
    plan, field = PLAN_FAULTS[name]
    with pytest.raises(PlanError) as caught:
        check_plan(plan, MODEL)
    assert any(problem.field.startswith(field) for problem in caught.value.problems), str(caught.value)


def without_task(costs: CostTable, name: str) -> CostTable:
    return replace(costs, tasks={other: cost for other, cost in costs.tasks.items() if other != name})


SCHEDULE_FAULTS: dict[str, tuple[Plan, CostTable, str]] = {
    "a backward before its forward": (with_row(SPLIT, 0, moved_to_front("0I0")), COSTS, "rank 0, action 0I0"),
    "ranks that wait for each other": (with_row(SPLIT, 1, moved_to_front("1F3")), COSTS, "rank 1, action 1F3"),
    "a weight gradient before its backward": (with_row(SPLIT, 1, moved_to_front("1W0")), COSTS, "actions[1]"),
    "an order against the data": (reordered(PLAN, "0F", lambda o: o[::-1]), COSTS, "rank 0, action 0F0"),
    "an order without a task": (reordered(PLAN, "0F", lambda o: o[1:]), COSTS, "interleavings.0F"),
    "an action on another rank": (with_row(PLAN, 1, lambda row: [Action.parse("0F3"), *row]), COSTS, "actions[1]"),
    "a pass run twice": (with_row(PLAN, 0, lambda row: [*row, Action.parse("0F0")]), COSTS, "actions[0]"),
    "costs without a task": (PLAN, without_task(COSTS, "F_MLP:L1"), "tasks.F_MLP:L1"),
}


@pytest.mark.parametrize("name", SCHEDULE_FAULTS)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_simulators_find(name: str, compiled: bool) -> None:
    plan, costs, field = SCHEDULE_FAULTS[name]
    with pytest.raises((ScheduleError, CostError)) as caught:
        if compiled:
            prepare(plan, MODEL, costs)
        else:
            simulate(plan, MODEL, costs)
    assert any(problem.field.startswith(field) for problem in caught.value.problems), str(caught.value)


TIMELINE = simulate(PLAN, MODEL, COSTS)


def changed(
    name: str, microbatch: int, change: Callable[[Span], Span | None], timeline: Timeline = TIMELINE
) -> Timeline:
    hit = [s for s in timeline.spans if s.name == name and s.microbatch == microbatch]
    assert hit
    spans = [change(s) if s == hit[0] else s for s in timeline.spans]
    return replace(timeline, spans=tuple(span for span in spans if span is not None))


def shifted(ns: int) -> Callable[[Span], Span]:
    return lambda s: replace(s, start_ns=s.start_ns + ns, end_ns=s.end_ns + ns)


TIMELINE_FAULTS: dict[str, tuple[Timeline, str]] = {
    "a task left out": (changed("F_MLP:L1", 2, lambda _: None), "rank 1, F_MLP:L1 of stage 1, micro-batch 2"),
    "a task run twice": (replace(TIMELINE, spans=(*TIMELINE.spans, TIMELINE.spans[0])), "rank 0, F_EMBED"),
    "a task on another rank": (changed("F_MLP:L1", 2, lambda s: replace(s, rank=0)), "rank 0, F_MLP:L1"),
    "a collective on the compute lane": (
        changed("F_DISP:L2", 0, lambda s: replace(s, lane="COMP")),
        "rank 0, F_DISP:L2",
    ),
    "time that runs backwards": (
        changed("F_POST:L2", 0, lambda s: replace(s, end_ns=s.start_ns - 1)),
        "rank 0, F_POST:L2",
    ),
    "a task before what it needs": (changed("F_COMB:L1", 0, shifted(-40)), "rank 1, F_COMB:L1"),
    "two tasks at once on a lane": (changed("F_MLP:L1", 1, shifted(-25)), "rank 1"),
    "a task that takes too long": (
        changed("B_MLP:L3", 3, lambda s: replace(s, end_ns=s.end_ns + 60)),
        "rank 1, B_MLP:L3",
    ),
    "a task that takes too little": (
        changed("B_MLP:L3", 3, lambda s: replace(s, end_ns=s.end_ns - 30)),
        "rank 1, B_MLP:L3",
    ),
    "a pass before its message": (changed("SEND_F", 0, shifted(30)), "rank 1, F_ATTN:L1"),
    "a message that is missing": (changed("SEND_F", 1, lambda _: None), "rank 1, F_ATTN:L1"),
    "a message faster than its link": (
        changed("SEND_B", 0, lambda s: replace(s, end_ns=s.end_ns - 2)),
        "rank 1, SEND_B",
    ),
    "a message before its pass has ended": (changed("SEND_F", 3, shifted(-5)), "rank 0, SEND_F"),
    "a backward before its forward": (changed("B_HEAD", 0, shifted(-300)), "rank 1, B_HEAD"),
    "a weight gradient before its backward": (changed("W_MLP:L3", 3, shifted(-200)), "rank 1, W_MLP:L3"),
}


@pytest.mark.parametrize("name", TIMELINE_FAULTS)
def test_check_timeline_finds(name: str) -> None:
    timeline, field = TIMELINE_FAULTS[name]
    with pytest.raises(ScheduleError) as caught:
        check_timeline(timeline, PLAN, MODEL, COSTS, most=1000)
    assert any(problem.field.startswith(field) for problem in caught.value.problems), str(caught.value)


def test_there_are_twenty_kinds() -> None:
    assert len({*PLAN_FAULTS, *SCHEDULE_FAULTS, *TIMELINE_FAULTS}) >= 20


@settings(max_examples=25)
@given(
    st.sampled_from((("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("zb-v", 2))),
    st.integers(1, 5),
    st.sampled_from((0.0, 0.25)),
    st.sampled_from((None, BubbleFilling(pool_tasks=3, fit=2.0))),
)
def test_what_the_simulators_make_passes(
    template: tuple[str, int], microbatches: int, contention: float, filling: BubbleFilling | None
) -> None:
    name, vpp = template
    costs = replace(COSTS, contention=contention)
    cuts = (0, 2, 2, 4, 6) if vpp == 2 else (0, 3, 6)
    plan = plan_with(cuts, MODEL, Mesh(pp=2, vpp=vpp), costs, microbatches=microbatches, template=name)
    check_timeline(simulate(plan, MODEL, costs), plan, MODEL, costs)
    run = simulate_replicas(prepare(plan, MODEL, costs), filling=filling, record=(0, 0))
    assert run.timeline is not None
    check_timeline(run.timeline, plan, MODEL, costs)
