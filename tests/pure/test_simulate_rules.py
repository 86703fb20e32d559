"""The simulator against a slow reference written from the rules, over random schedules."""

from __future__ import annotations

import random as random_module
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_rt.costs import ItemMemory, Link, TaskCost
from tessera_rt.plan import Action, ActionKind, messages_from
from tessera_rt.scheduler.graphs import action_graph, chunk_graph, to_networkx
from tessera_rt.scheduler.list_schedule import interleaving
from tessera_rt.scheduler.simulate import simulate, step_time
from tessera_rt.scheduler.templates import build_template
from tessera_rt.tasks import Pass, Resource
from tessera_rt.testing.costs import item_costs, moe_model
from tessera_rt.testing.plans import simple_model, simple_plan
from tessera_rt.testing.schedules import Case
from tessera_rt.timeline import Span, Timeline

# --- random schedules against slow references -----------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn, scale: int = 1) -> Case:
    """Any template over random cuts (empty stages included), random orders in actions, tasks of 0 to 9 * scale ns."""
    name = draw(st.sampled_from(("gpipe", "1f1b", "interleaved-1f1b")))
    pp = draw(st.integers(1, 3))
    vpp = 1 if name == "1f1b" else draw(st.integers(1, 3))
    template = build_template(
        name,
        pp=pp,
        vpp=vpp,
        microbatches=draw(st.integers(1, 5)),
        joint=draw(st.booleans()),
        placement=draw(st.sampled_from(("loop", "v"))) if name == "gpipe" else "loop",
    )
    model = moe_model(draw(st.integers(1, 4)), dense_first=draw(st.integers(0, 1)), shared=draw(st.booleans()))
    random = random_module.Random(draw(st.integers(0, 10**6)))
    cuts = sorted(random.choices(range(len(model.items) + 1), k=pp * vpp - 1))
    bounds = list(zip([0, *cuts], [*cuts, len(model.items)], strict=True))
    base = item_costs(
        model,
        {},
        {item.label: ItemMemory(output=random.randint(0, 9)) for item in model.items},
        link=Link(latency_ns=random.randint(0, 5) * scale, bytes_per_s=random.choice((1e9, 3e8, float("inf"))) / scale),
    )
    costs = replace(base, tasks={name: TaskCost(ns=random.randint(0, 9) * scale) for name in base.tasks})
    actions = list(template.actions)
    if draw(st.booleans()):
        actions = [tuple(_split_w(row)) for row in actions]
    interleavings = {}
    for key in {action.key for row in actions for action in row}:
        graph = action_graph(key, model, costs, bounds)
        interleavings[key] = interleaving(_random_order(graph.names, to_networkx(graph), random), graph, key)
    return Case(template.stage_ranks, actions, bounds, interleavings, model, costs)


def _split_w(row: Sequence[Action]) -> list[Action]:
    """Every single B as I, its W behind the next action."""
    result: list[Action] = []
    waiting: list[Action] = []
    for action in row:
        late, waiting = waiting, []
        if action.kind is ActionKind.B:
            waiting.append(Action(ActionKind.W, action.stage, action.microbatch))
            action = Action(ActionKind.I, action.stage, action.microbatch)
        result += [action, *late]
    return result + waiting


def _random_order(names: Sequence[str], digraph: nx.DiGraph, random: random_module.Random) -> list[str]:  # type: ignore[type-arg]
    rank = {name: random.random() for name in names}
    return list(nx.lexicographical_topological_sort(digraph, key=rank.__getitem__))


@dataclass(frozen=True)
class Step:
    """A node of the reference: a task, a pass's input or output, or a message."""

    preds: tuple[str, ...]
    ns: int = 0
    lane: str = ""
    rank: int = 0


def reference_nodes(case: Case, *, overlap: bool) -> dict[str, Step]:
    """The whole step as one graph of names, written straight from the timing rules."""
    nodes: dict[str, Step] = {}
    last = len(case.stage_ranks) - 1
    edge_last: dict[tuple[int, int], str] = {}
    for rank, row in enumerate(case.actions):
        before: dict[str, str] = {}
        for action in row:
            part_of: dict[str, Action] = {}
            canonical: list[str] = []
            by_name = {}
            for part in action.passes:
                pass_ = {"F": Pass.F, "W": Pass.W}.get(str(part.kind), Pass.B)
                graph = chunk_graph(
                    case.model, case.costs, *case.bounds[part.stage], pass_, with_w=part.kind is not ActionKind.I
                )
                canonical += graph.names
                by_name.update(graph.by_name)
                part_of.update(dict.fromkeys(graph.names, part))
            order = case.interleavings[action.key].order if overlap else canonical
            for name in order:
                part, task = part_of[name], by_name[name]
                where = f"{part.stage}.{part.microbatch}"
                preds = [f"{where} {dep}" for dep in task.deps]
                if task.pass_ is Pass.W:
                    preds = [f"{where} B{name[1:]}"]
                elif not preds:
                    preds = [f"{where} {task.pass_} in"]
                lane = str(task.resource) if overlap else "COMP"
                if lane in before:
                    preds.append(before[lane])
                nodes[f"{where} {name}"] = Step(tuple(preds), task.ns, str(task.resource), rank)
                before[lane] = f"{where} {name}"
            for part in action.passes:
                if part.kind is ActionKind.W:
                    continue
                pass_ = Pass.F if part.kind is ActionKind.F else Pass.B
                where = f"{part.stage}.{part.microbatch}"
                neighbour = part.stage + (-1 if pass_ is Pass.F else 1)
                inputs = [f"{neighbour}.{part.microbatch} {pass_} sent"] if 0 <= neighbour <= last else []
                if pass_ is Pass.B:
                    inputs.append(f"{where} F out")
                nodes[f"{where} {pass_} in"] = Step(tuple(inputs))
                mine = [f"{where} {n}" for n in order if part_of[n] is part and n[0] == pass_]
                nodes[f"{where} {pass_} out"] = Step((f"{where} {pass_} in", *mine))
            sending = [p for p in action.passes if p.kind is not ActionKind.W]
            if overlap:
                sending.sort(
                    key=lambda p: max((i for i, n in enumerate(order) if part_of[n] is p and n[0] != "W"), default=-1)
                )
            for part in sending:
                pass_ = Pass.F if part.kind is ActionKind.F else Pass.B
                where = f"{part.stage}.{part.microbatch} {pass_}"
                to_stage = part.stage + (1 if pass_ is Pass.F else -1)
                if not 0 <= to_stage <= last:
                    continue
                target = case.stage_ranks[to_stage]
                if target == rank:
                    nodes[f"{where} sent"] = Step((f"{where} out",))
                    continue
                boundary = min(part.stage, to_stage)
                filled = [stop for start, stop in case.bounds[: boundary + 1] if stop > start]
                size = case.costs.memory[case.model.items[filled[-1] - 1].label].output if filled else 0
                leave = [edge_last[rank, target]] if (rank, target) in edge_last else []
                nodes[f"{where} left"] = Step((f"{where} out", *leave), case.costs.link.occupancy_ns(size))
                nodes[f"{where} sent"] = Step((f"{where} left",), case.costs.link.latency_ns)
                edge_last[rank, target] = f"{where} left"
    return nodes


def reference_ends(case: Case, *, overlap: bool, contention: Fraction = Fraction(0)) -> dict[str, Fraction]:
    """End times. All nodes whose predecessors have ended run; time moves to the next end, rates are looked up anew."""
    nodes = reference_nodes(case, overlap=overlap)
    ends: dict[str, Fraction] = {}
    running: dict[str, Fraction] = {}  # work left
    waiting = dict(nodes)
    now = Fraction(0)
    while waiting or running:
        for name in [n for n, node in waiting.items() if all(p in ends for p in node.preds)]:
            running[name] = Fraction(waiting.pop(name).ns)
        assert running, f"the reference is stuck: {sorted(waiting)[:5]}"
        busy = {nodes[n].rank for n in running if nodes[n].lane == "COMM" and running[n] > 0}
        rate = {
            n: 1 / (1 + contention) if nodes[n].lane == "COMP" and nodes[n].rank in busy else Fraction(1)
            for n in running
        }
        step = min(left / rate[n] for n, left in running.items())
        now += step
        for name in list(running):
            running[name] -= step * rate[name]
            if running[name] == 0:
                ends[name] = now
                del running[name]
    return ends


def simulated_ends(timeline: Timeline) -> dict[str, int]:
    ends = {}
    for span in timeline.spans:
        name = f"{span.name[-1]} sent" if span.lane == "LINK" else span.name
        ends[f"{span.stage}.{span.microbatch} {name}"] = span.end_ns
    return ends


@given(cases(), st.booleans())
def test_every_task_and_message_ends_exactly_when_the_rules_say(case: Case, overlap: bool) -> None:
    timeline = case.timeline(overlap=overlap, contention=0.0)
    expected = reference_ends(case, overlap=overlap)
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
    expected = reference_ends(case, overlap=True, contention=Fraction(contention))
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
