"""Which plans block under unbuffered sends, and what the report says."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tessera_rt.errors import PlanError
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Action, ActionKind, Plan, messages_from, output_of
from tessera_rt.plan_check import check_plan
from tessera_rt.rendezvous import find_stuck, pass_events
from tessera_rt.scheduler.templates import build_template
from tessera_rt.testing.plan_strategies import plans
from tessera_rt.testing.plans import simple_model, simple_plan


def actions(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


def runs_through(plan: Plan, overlap: bool) -> bool:
    """Independent answer: starts and ends of passes, tied by list order and data, have no cycle."""
    graph: nx.DiGraph[tuple[str, bool]] = nx.DiGraph()
    for rank in range(plan.mesh.pp):
        names = [(str(event.part), event.starts) for event in pass_events(plan, rank, overlap=overlap)]
        nx.add_path(graph, names)
    last = len(plan.stages) - 1
    for stage in range(last):
        for m in range(plan.microbatches):
            graph.add_edge((f"{stage}F{m}", False), (f"{stage + 1}F{m}", True))
            graph.add_edge((f"{stage + 1}B{m}", False), (f"{stage}B{m}", True))
    return nx.is_directed_acyclic_graph(graph)


@given(plans(split=False), st.data())
def test_stuck_plans_are_those_with_a_cycle(example: tuple[Plan, ModelSpec], data: st.DataObject) -> None:
    """Also for lists in disorder (F before B of each micro-batch kept, as check_plan has seen by then)."""
    plan, model = example
    lists = []
    for entries in plan.actions:
        order = list(entries)
        for _ in range(data.draw(st.integers(0, 3))):
            i = data.draw(st.integers(0, len(order) - 1))
            j = data.draw(st.integers(0, len(order) - 1))
            order[i], order[j] = order[j], order[i]
        first = {(p.stage, p.microbatch): i for i, a in enumerate(order) for p in a.passes if p.kind is ActionKind.F}
        for i, action in enumerate(order):
            assume(all(p.kind is ActionKind.F or first[p.stage, p.microbatch] < i for p in action.passes))
        lists.append(tuple(order))
    changed = replace(plan, actions=tuple(lists), stages=tuple(replace(s, slots=99) for s in plan.stages))
    for overlap in (True, False):
        stuck = find_stuck(changed, overlap=overlap)
        assert (not stuck) == runs_through(changed, overlap)
        assert all(entry.action == changed.actions[entry.rank][entry.index] for entry in stuck)
    if all(runs_through(changed, overlap) for overlap in (True, False)):
        check_plan(changed, model)
    else:
        with pytest.raises(PlanError, match="reached by its input"):
            check_plan(changed, model)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("template", ["gpipe", "interleaved-1f1b"])
def test_templates_never_block(template: str, joint: bool) -> None:
    """Two chunks a rank, where other engines had both ranks send before either received."""
    model = simple_model("dmsm")
    for pp, m in ((2, 4), (2, 3), (4, 1), (3, 7), (4, 5)):
        order = build_template(template, pp=pp, vpp=2, microbatches=m, joint=joint)
        plan = simple_plan(model, pp=pp, vpp=2, microbatches=m, actions=order.actions, placement=order.stage_ranks)
        assert find_stuck(plan, overlap=True) == find_stuck(plan, overlap=False) == ()
        check_plan(plan, model)


@given(plans(split=False))
def test_messages_are_offered_in_the_order_of_messages_from(example: tuple[Plan, ModelSpec]) -> None:
    plan, _ = example
    for overlap in (True, False):
        for rank in range(plan.mesh.pp):
            ends = [event.part for event in pass_events(plan, rank, overlap=overlap) if not event.starts]
            sent = [message for message in (output_of(plan, part) for part in ends) if message]
            assert tuple(sent) == messages_from(plan, rank, overlap=overlap)


def test_a_pass_starts_at_its_first_task_and_ends_at_its_last() -> None:
    """The order decides: with all of B ahead of F, B's output leaves before F needs its input."""
    plan = simple_plan(simple_model("dd"), pp=2, microbatches=3, joint=True)
    pair = next(action for action in plan.actions[1] if action.kind is ActionKind.OVERLAP)
    part_f, part_b = pair.passes
    entry = plan.interleavings[pair.key]
    backward_first = tuple(sorted(entry.order, key=lambda name: name.startswith("F_")))
    plan = replace(plan, interleavings={**plan.interleavings, pair.key: replace(entry, order=backward_first)})
    index = plan.actions[1].index(pair)
    events = [(e.part, e.starts) for e in pass_events(plan, 1) if e.index == index]
    assert events == [(part_b, True), (part_b, False), (part_f, True), (part_f, False)]
    events = [(e.part, e.starts) for e in pass_events(plan, 1, overlap=False) if e.index == index]
    assert events == [(part_f, True), (part_f, False), (part_b, True), (part_b, False)]


def test_overlap_decides_whether_a_plan_blocks() -> None:
    """Rank 1 pairs the F that rank 0 only sends after it got rank 1's B: fine if B is issued first, stuck otherwise."""
    model = simple_model("dd")
    lists = (actions("0F0 0B0 0F1 0B1"), actions("1F0 (1F1;1B0)OVERLAP_F_B 1B1"))
    plan = simple_plan(model, pp=2, microbatches=2, actions=lists)
    stuck = find_stuck(plan)
    assert [entry.rank for entry in stuck] == [0, 1]
    assert stuck[0].reason == "0B0 waits for 1SEND_B0 from rank 1, which itself waits in (1F1;1B0)OVERLAP_F_B"
    assert stuck[1].reason == "1F1 waits for 0SEND_F1 from rank 0, which itself waits in 0B0"
    entry = plan.interleavings["1F;1B"]
    order = tuple(sorted(entry.order, key=lambda name: name.startswith("F_")))
    backward_first = replace(plan, interleavings={**plan.interleavings, "1F;1B": replace(entry, order=order)})
    assert find_stuck(backward_first) == ()
    assert [entry.rank for entry in find_stuck(backward_first, overlap=False)] == [0, 1]


def test_stuck_on_the_own_rank() -> None:
    """V placement: stage 1 and 2 share rank 1, and its list asks for stage 2 first."""
    lists = (actions("0F0 3F0 3B0 0B0"), actions("2F0 1F0 2B0 1B0"))
    plan = simple_plan(simple_model("dd"), pp=2, microbatches=1, placement=(0, 1, 1, 0), actions=lists)
    reasons = [entry.reason for entry in find_stuck(plan)]
    assert reasons == [
        "3F0 waits for 2SEND_F0 from rank 1, which itself waits in 2F0",
        "2F0 waits for 1F0, which comes later on the same rank",
    ]
