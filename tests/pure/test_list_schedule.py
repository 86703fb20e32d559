"""List scheduling against brute force, against its own bound, and by hand."""

from __future__ import annotations

from random import Random

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_rt.errors import ScheduleError
from tessera_rt.scheduler.graphs import action_graph, lower_bound, to_networkx
from tessera_rt.scheduler.list_schedule import canonical, evaluate, interleaving, list_schedule
from tessera_rt.scheduler.validate import validate
from tessera_rt.tasks import Pass, Resource, Task, TaskGraph, TaskKind
from tessera_rt.testing.costs import item_costs, moe_model


@st.composite
def graphs(draw: st.DrawFn, most: int = 12) -> TaskGraph:
    """Any acyclic graph of COMP, COMM and movable tasks, durations of 0 included."""
    tasks: list[Task] = []
    for i in range(draw(st.integers(0, most))):
        resource = draw(st.sampled_from(("comp", "comm", "w")))
        deps = tuple(task.name for task in tasks if draw(st.integers(0, 3)) == 0)
        tasks.append(
            Task(
                kind=TaskKind.DISP if resource == "comm" else TaskKind.MLP,
                pass_=Pass.W if resource == "w" else Pass.B,
                label=f"L{i}",
                deps=deps,
                ns=draw(st.integers(0, 9)),
                movable=resource == "w",
            )
        )
    return TaskGraph(tuple(tasks))


def pair(f: tuple[int, int, int], b: tuple[int, int, int], comm: int) -> TaskGraph:
    """F of a MoE layer with B of another one: (F, B, W) ns of compute, ``comm`` ns per all-to-all."""
    model = moe_model(2, shared=True)
    costs = item_costs(model, {"L0": f, "L1": b}, comm_ns=comm)
    return action_graph("0F;1B", model, costs, ((0, 2), (2, 4)))


@given(graphs())
def test_schedules_are_valid_bounded_and_deterministic(graph: TaskGraph) -> None:
    fifo = list_schedule(graph, "0F;1B", method="fifo", comm_sms=4)
    align = list_schedule(graph, "0F;1B", comm_sms=4)
    for made in (fifo, align):
        validate(made, graph)
        assert lower_bound(graph) <= made.makespan_ns <= graph.total_ns()
        assert (made.key, made.comm_sms) == ("0F;1B", 4)
        starts, makespan = evaluate(made.order, graph)
        assert tuple(starts[name] for name in made.order) == made.starts_ns
        assert makespan == made.makespan_ns
        assert list(made.starts_ns) == sorted(made.starts_ns)
        seen: set[str] = set()
        for name in made.order:
            assert seen.issuperset(graph.by_name[name].deps)
            seen.add(name)
    assert fifo.method == "fifo"
    assert align.makespan_ns <= fifo.makespan_ns
    assert align.method in ("align", "fifo")
    assert list_schedule(graph, "0F;1B", comm_sms=4) == align


@settings(max_examples=40)
@given(graphs(most=6))
def test_no_order_beats_the_best_of_all_topological_orders(graph: TaskGraph) -> None:
    best = min(evaluate(order, graph)[1] for order in nx.all_topological_sorts(to_networkx(graph)))
    assert lower_bound(graph) <= best <= list_schedule(graph, "0F").makespan_ns


@given(graphs(), st.randoms(use_true_random=False))
def test_evaluate_is_the_earliest_start_of_every_task_in_lane_order(graph: TaskGraph, random: Random) -> None:
    place = {name: random.random() for name in graph.names}
    order = list(nx.lexicographical_topological_sort(to_networkx(graph), key=place.__getitem__))
    starts, makespan = evaluate(order, graph)
    end = {name: starts[name] + graph.by_name[name].ns for name in order}
    assert makespan == max(end.values(), default=0)
    before: dict[Resource, str] = {}
    for name in order:
        task = graph.by_name[name]
        lane = [before[task.resource]] if task.resource in before else []
        assert starts[name] == max((end[other] for other in (*task.deps, *lane)), default=0)
        before[task.resource] = name


@given(graphs(), st.randoms(use_true_random=False))
def test_given_orders_keep_their_lanes(graph: TaskGraph, random: Random) -> None:
    place = {name: random.random() for name in graph.names}
    order = list(nx.lexicographical_topological_sort(to_networkx(graph), key=place.__getitem__))
    made = interleaving(order, graph, "0F")
    assert made.method == "given"
    assert sorted(made.order) == sorted(order)
    for resource in Resource:
        assert [n for n in made.order if graph.by_name[n].resource is resource] == [
            n for n in order if graph.by_name[n].resource is resource
        ]


@given(graphs())
def test_canonical_is_serial(graph: TaskGraph) -> None:
    made = canonical(graph, "0B")
    assert made.order == graph.names
    assert made.makespan_ns == graph.total_ns()
    assert made.method == "serial"
    assert list(made.starts_ns) == [sum(task.ns for task in graph.tasks[:i]) for i in range(len(graph.tasks))]


def test_comm_comes_first_among_equal_starts_unless_it_waits() -> None:
    free = TaskGraph(
        (
            Task(kind=TaskKind.MLP, pass_=Pass.F, label="L0", ns=2),
            Task(kind=TaskKind.DISP, pass_=Pass.F, label="L1", ns=2),
        )
    )
    assert list_schedule(free, "0F").order == ("F_DISP:L1", "F_MLP:L0")
    waiting = TaskGraph(
        (
            Task(kind=TaskKind.MLP, pass_=Pass.F, label="L0", ns=0),
            Task(kind=TaskKind.DISP, pass_=Pass.F, label="L1", deps=("F_MLP:L0",), ns=2),
            Task(kind=TaskKind.MLP, pass_=Pass.F, label="L2", deps=("F_MLP:L0",), ns=2),
        )
    )
    assert list_schedule(waiting, "0F").order == ("F_MLP:L0", "F_DISP:L1", "F_MLP:L2")


def test_communication_of_one_pass_hides_behind_compute_of_the_other() -> None:
    graph = pair((10, 0, 0), (0, 10, 10), comm=5)
    made = list_schedule(graph, "0F;1B")
    # COMP: F 10, B 10, W 10. COMM: 4 all-to-alls of 5. Dispatch, MLP, combine in each chain: 5 + 10 + 5.
    assert lower_bound(graph) == 30
    assert made.makespan_ns == 35  # nothing can run while the first all-to-all does
    assert canonical(graph, "0F;1B").makespan_ns == 50


def test_align_takes_the_task_that_fits_the_window() -> None:
    """While COMM is busy for 6, of two ready compute tasks the one of 6 is taken, not the first one of 2."""
    graph = TaskGraph(
        (
            Task(kind=TaskKind.DISP, pass_=Pass.F, label="L0", ns=6),
            Task(kind=TaskKind.MLP, pass_=Pass.F, label="L1", ns=2),
            Task(kind=TaskKind.MLP, pass_=Pass.F, label="L2", ns=6),
            Task(kind=TaskKind.MLP, pass_=Pass.F, label="L3", deps=("F_DISP:L0",), ns=1),
            Task(kind=TaskKind.COMB, pass_=Pass.F, label="L3", deps=("F_MLP:L3",), ns=9),
        )
    )
    fifo, align = list_schedule(graph, "0F", method="fifo"), list_schedule(graph, "0F")
    assert fifo.order[:3] == ("F_DISP:L0", "F_MLP:L1", "F_MLP:L2")
    assert fifo.makespan_ns == 18  # the last exchange starts at 2 + 6 + 1
    assert align.order[:2] == ("F_DISP:L0", "F_MLP:L2")
    assert (align.method, align.makespan_ns) == ("align", 16)


def test_align_takes_backbone_before_movable_tasks() -> None:
    graph = TaskGraph(
        (
            Task(kind=TaskKind.HEAD, pass_=Pass.B, label="HEAD", ns=3),
            Task(kind=TaskKind.HEAD, pass_=Pass.W, label="HEAD", deps=("B_HEAD",), ns=8, movable=True),
            Task(kind=TaskKind.POST, pass_=Pass.B, label="L0", deps=("B_HEAD",), ns=1),
            Task(kind=TaskKind.COMB, pass_=Pass.B, label="L0", deps=("B_POST:L0",), ns=8),
        )
    )
    align = list_schedule(graph, "0B")
    assert align.order == ("B_HEAD", "B_POST:L0", "B_COMB:L0", "W_HEAD")
    assert align.makespan_ns == 12
    assert list_schedule(graph, "0B", method="fifo").makespan_ns == 20


def test_fifo_is_kept_when_align_loses() -> None:
    """Backbone first starts the B task and leaves the exchange waiting for W; in turn they overlap."""
    graph = TaskGraph(
        (
            Task(kind=TaskKind.MLP, pass_=Pass.W, label="L0", ns=6, movable=True),
            Task(kind=TaskKind.MLP, pass_=Pass.B, label="L1", ns=3),
            Task(kind=TaskKind.DISP, pass_=Pass.B, label="L2", deps=("W_MLP:L0",), ns=1),
        )
    )
    made = list_schedule(graph, "0B")
    assert (made.method, made.makespan_ns) == ("fifo", 9)  # backbone first would take 3 + 6 + 1
    assert made == list_schedule(graph, "0B", method="fifo")


def test_an_empty_action_has_an_empty_order() -> None:
    empty = TaskGraph(())
    assert list_schedule(empty, "0F").order == canonical(empty, "0F").order == ()
    assert list_schedule(empty, "0F").makespan_ns == 0


def test_wrong_methods_and_orders_are_refused() -> None:
    graph = pair((1, 1, 1), (1, 1, 1), comm=1)
    with pytest.raises(ScheduleError, match="one of fifo, align"):
        list_schedule(graph, "0F;1B", method="best")
    with pytest.raises(ScheduleError, match="depends on"):
        evaluate(graph.names[::-1], graph)
    with pytest.raises(ScheduleError, match="once"):
        evaluate(graph.names[:-1], graph)
    with pytest.raises(ScheduleError, match="named once"):
        evaluate((*graph.names[:-1], graph.names[0]), graph)
