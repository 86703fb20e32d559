"""The rate model: against the simulator and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.errors import ScheduleError
from tessera_rt.plan import Action
from tessera_rt.scheduler.contention import evaluate_contended
from tessera_rt.scheduler.graphs import action_graph
from tessera_rt.scheduler.list_schedule import evaluate, list_schedule
from tessera_rt.tasks import Pass, Task, TaskGraph, TaskKind
from tessera_rt.testing.costs import moe_model
from tessera_rt.testing.pairs import random_graph
from tessera_rt.testing.random_costs import random_costs
from tessera_rt.testing.schedules import Case, orders


@given(st.integers(0, 10**6), st.integers(0, 12))
def test_without_contention_it_is_evaluate(seed: int, tasks: int) -> None:
    graph = random_graph(seed, tasks=tasks)
    order = list_schedule(graph, "0F").order
    assert evaluate_contended(order, graph, 0.0) == evaluate(order, graph)


@given(st.integers(0, 10**6), st.integers(0, 12), st.floats(0.01, 2))
def test_contention_only_delays_and_at_most_by_its_full_rate(seed: int, tasks: int, contention: float) -> None:
    graph = random_graph(seed, tasks=tasks, longest=1000)
    order = list_schedule(graph, "0F").order
    free, contended = evaluate(order, graph)[1], evaluate_contended(order, graph, contention)[1]
    assert free <= contended <= free * (1 + contention) + len(graph.tasks)  # every end is rounded


@given(st.integers(0, 10**6), st.sampled_from((0.15, 0.5, 1.0)))
def test_it_agrees_with_the_simulator(seed: int, contention: float) -> None:
    """One rank, a forward, then its backward: as one graph, the backward's first tasks wait for the whole forward."""
    model = moe_model(2, shared=True)
    costs = random_costs(model, seed, longest=200)
    bounds = ((0, len(model.items)),)
    actions = [[Action.parse("0F0"), Action.parse("0B0")]]
    made = orders(actions, model, costs, bounds)
    line = Case((0,), actions, bounds, made, model, costs).timeline(contention=contention)
    forward, backward = (action_graph(key, model, costs, bounds) for key in ("0F", "0B"))
    joined = forward.tasks + tuple(task if task.deps else replace(task, deps=forward.names) for task in backward.tasks)
    order = (*made["0F"].order, *made["0B"].order)
    starts, makespan = evaluate_contended(order, TaskGraph(joined), contention)
    simulated = {span.name: span.start_ns for span in line.spans if span.lane != "LINK"}
    assert (simulated, line.step_ns) == (starts, makespan)


def test_compute_is_slower_while_communication_runs() -> None:
    """COMP 10 beside COMM 6: at half speed it has done 3 by then, and the other 7 take 7 more."""
    graph = TaskGraph(
        (
            Task(kind=TaskKind.MLP, pass_=Pass.F, label="L0", ns=10),
            Task(kind=TaskKind.DISP, pass_=Pass.B, label="L1", ns=6),
            Task(kind=TaskKind.COMB, pass_=Pass.F, label="L0", ns=1, deps=("F_MLP:L0",)),
        )
    )
    starts, makespan = evaluate_contended(graph.names, graph, 1.0)
    assert (starts["F_COMB:L0"], makespan) == (13, 14)


@pytest.mark.parametrize("wrong", [-0.1, float("nan"), float("inf")])
def test_impossible_contention_is_refused(wrong: float) -> None:
    with pytest.raises(ScheduleError, match="contention"):
        evaluate_contended((), TaskGraph(()), wrong)
