"""The simulator against a slow reference written from the rules, over random schedules."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_rt.costs import ItemMemory, Link, TaskCost
from tessera_rt.plan import messages_from
from tessera_rt.scheduler.simulate import simulate, step_time
from tessera_rt.tasks import Resource
from tessera_rt.testing.costs import item_costs
from tessera_rt.testing.plans import simple_model, simple_plan
from tessera_rt.testing.schedule_cases import cases
from tessera_rt.testing.schedules import Case
from tessera_rt.testing.timing_reference import reference_ends, reference_nodes
from tessera_rt.timeline import Span, Timeline

# --- random schedules against slow references -----------------------------------------------------------------------


def simulated_ends(timeline: Timeline) -> dict[str, int]:
    ends = {}
    for span in timeline.spans:
        name = f"{span.name[-1]} sent" if span.lane == "LINK" else span.name
        ends[f"{span.stage}.{span.microbatch} {name}"] = span.end_ns
    return ends


@given(cases(), st.booleans())
def test_every_task_and_message_ends_exactly_when_the_rules_say(case: Case, overlap: bool) -> None:
    timeline = case.timeline(overlap=overlap, contention=0.0)
    expected = reference_ends(reference_nodes(case, overlap=overlap))
    ends = simulated_ends(timeline)
    assert ends == {name: expected[name] for name in ends}
    assert timeline.step_ns == max(expected.values())
    messages = [name for name in expected if name.endswith("left")]
    tasks = [name for name, node in reference_nodes(case, overlap=overlap).items() if node.lane]
    assert len(ends) == len(timeline.spans) == len(tasks) + len(messages)


@settings(max_examples=30)
@given(cases(scale=10**6), st.sampled_from(("0.15", "1", "2.5")))
def test_contention_slows_compute_as_the_rules_say(case: Case, contention: str) -> None:
    timeline = case.timeline(contention=float(contention))
    expected = reference_ends(reference_nodes(case, overlap=True), Fraction(contention))
    # each compute task's end is rounded to ns, and that can change by as much again what runs beside what
    slack = 1 + 2 * sum(span.lane == Resource.COMP for span in timeline.spans)
    assert slack < 10_000  # against tasks of a million
    for name, end in simulated_ends(timeline).items():
        assert abs(end - expected[name]) <= slack


@given(cases(), st.booleans(), st.sampled_from((0.0, 0.3)))
def test_work_is_conserved_and_lanes_never_overlap(case: Case, overlap: bool, contention: float) -> None:
    timeline = case.timeline(overlap=overlap, contention=contention)
    graphs = case.graphs()
    expected = [
        (rank, name) for rank, row in enumerate(case.actions) for action in row for name in sorted(graphs[action.key])
    ]
    assert sorted((s.rank, s.name) for s in timeline.spans if s.lane != "LINK") == sorted(expected)
    for rank in range(timeline.ranks):
        lanes: dict[str, list[Span]] = {}
        for span in timeline.of(rank):
            assert 0 <= span.start_ns <= span.end_ns
            if span.lane != "LINK":
                full = case.costs.tasks[span.name].ns
                length = span.end_ns - span.start_ns
                if contention == 0 or span.lane == Resource.COMM or not overlap:
                    assert length == full
                else:
                    assert full <= length <= round(full * (1 + contention)) + 1
                lanes.setdefault(span.lane if overlap else "one", []).append(span)
        for spans in lanes.values():
            assert all(a.end_ns <= b.start_ns for a, b in pairwise(spans))
    args = (case.stage_ranks, case.actions, case.bounds, case.interleavings, case.model, case.costs)
    assert step_time(*args, overlap=overlap, contention=contention) == timeline.step_ns
    for rank in range(timeline.ranks):
        split = timeline.split(rank)
        assert split.compute_ns + split.exposed_ns + split.bubble_ns == timeline.step_ns


@given(cases())
def test_overlap_off_on_one_rank_is_the_sum_of_all_work(case: Case) -> None:
    timeline = case.timeline(overlap=False, contention=0.7)
    if timeline.ranks == 1:
        assert timeline.step_ns == sum(case.costs.tasks[span.name].ns for span in timeline.spans)
    assert timeline == case.timeline(overlap=False, contention=0.0)  # nothing runs side by side
    other = replace(case, interleavings={})  # and no interleaving is looked at
    assert other.timeline(overlap=False, contention=0.0) == timeline


@settings(max_examples=40)
@given(cases(), st.integers(0, 10**6), st.integers(1, 20), st.booleans())
def test_no_task_that_takes_longer_makes_the_step_shorter(case: Case, which: int, more: int, overlap: bool) -> None:
    """Without contention; with it a longer collective can slow what would otherwise run beside a later one."""
    names = sorted(case.costs.tasks)
    name = names[which % len(names)]
    longer = {**case.costs.tasks, name: TaskCost(ns=case.costs.tasks[name].ns + more)}
    before = case.timeline(overlap=overlap, contention=0.0)
    after = replace(case, costs=replace(case.costs, tasks=longer)).timeline(overlap=overlap, contention=0.0)
    assert after.step_ns >= before.step_ns
    ends = simulated_ends(before)
    assert all(end >= ends[key] for key, end in simulated_ends(after).items())


# --- plans ----------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 5), st.booleans(), st.booleans(), st.booleans())
def test_messages_of_a_plan_leave_in_its_order(
    pp: int, vpp: int, m: int, joint: bool, split_w: bool, overlap: bool
) -> None:
    """``simulate`` sends what ``messages_from`` lists, on every edge in that order."""
    model = simple_model("dmsmd")
    plan = simple_plan(model, pp=pp, vpp=vpp, microbatches=m, joint=joint, split_w=split_w)
    costs = item_costs(
        model, {}, default=(3, 4, 2), comm_ns=2, link=Link(latency_ns=1), memory={"L0": ItemMemory(output=3)}
    )
    timeline = simulate(plan, model, costs, overlap=overlap)
    assert timeline.label == plan.template
    assert simulate(plan, model, costs, label="mine").label == "mine"
    for rank in range(pp):
        expected = [
            (f"SEND_{message.pass_}", message.microbatch, message.to_stage, message.target)
            for message in messages_from(plan, rank, overlap=overlap)
        ]
        sent = []
        for span in timeline.spans:
            if span.lane == "LINK" and span.rank == rank:
                to_stage = span.stage + (1 if span.name == "SEND_F" else -1)
                sent.append((span.name, span.microbatch, to_stage, plan.stages[to_stage].rank))
        for target in range(pp):
            assert [s for s in sent if s[3] == target] == [e for e in expected if e[3] == target]
