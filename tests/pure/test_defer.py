"""+Defer: valid orders, never worse than +Align, and a case in which only deferring a W helps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.scheduler.defer import defer_order
from tessera_rt.scheduler.graphs import lower_bound
from tessera_rt.scheduler.interleave import interleave
from tessera_rt.scheduler.lane_graph import LaneGraph
from tessera_rt.scheduler.list_schedule import evaluate, list_schedule
from tessera_rt.tasks import Pass, Task, TaskGraph, TaskKind
from tessera_rt.testing.pairs import random_graph, random_pair


def length(graph: TaskGraph) -> int:
    return evaluate([graph.names[i] for i in defer_order(LaneGraph.of(graph))], graph)[1]


@given(st.integers(0, 10**6), st.integers(0, 14))
def test_orders_of_any_graph_are_complete_and_bounded(seed: int, tasks: int) -> None:
    graph = random_graph(seed, tasks=tasks)
    order = defer_order(LaneGraph.of(graph))  # evaluate refuses an order that is incomplete or not topological
    assert LaneGraph.of(graph).bound() <= evaluate([graph.names[i] for i in order], graph)[1] <= graph.total_ns()


@given(st.integers(0, 10**6), st.booleans())
def test_defer_is_never_longer_than_align(seed: int, shared: bool) -> None:
    graph = random_pair(seed, shared=shared)
    align = list_schedule(graph, "0F;1B")
    defer = interleave(graph, "0F;1B", method="defer")
    assert defer.makespan_ns <= min(align.makespan_ns, length(graph))
    assert defer.method in ("fifo", "align", "defer")
    assert interleave(graph, "0F;1B", method="defer") == defer


@given(st.integers(0, 10**6), st.integers(1, 14))
def test_the_sharper_bound_lies_between_the_plain_one_and_any_schedule(seed: int, tasks: int) -> None:
    graph = random_graph(seed, tasks=tasks)
    assert lower_bound(graph) <= LaneGraph.of(graph).bound() <= list_schedule(graph, "0F").makespan_ns


def blocked() -> TaskGraph:
    """W (9) is ready when COMP falls idle at 2, one moment before the backbone's chain through MLP:L1 comes back."""
    return TaskGraph(
        (
            Task(kind=TaskKind.MLP, pass_=Pass.B, label="L0", ns=2),
            Task(kind=TaskKind.MLP, pass_=Pass.W, label="L0", ns=9, deps=("B_MLP:L0",), movable=True),
            Task(kind=TaskKind.DISP, pass_=Pass.B, label="L0", ns=1, deps=("B_MLP:L0",)),
            Task(kind=TaskKind.MLP, pass_=Pass.B, label="L1", ns=2, deps=("B_DISP:L0",)),
            Task(kind=TaskKind.DISP, pass_=Pass.B, label="L1", ns=20, deps=("B_MLP:L1",)),
        )
    )


def test_a_weight_gradient_that_delays_the_chain_is_put_behind_it() -> None:
    graph = blocked()
    assert list_schedule(graph, "0B").makespan_ns == 2 + 9 + 2 + 20
    defer = interleave(graph, "0B", method="defer")
    assert (defer.makespan_ns, defer.method) == (2 + 1 + 2 + 20, "defer")
    start = dict(zip(defer.order, defer.starts_ns, strict=True))
    assert (start["B_MLP:L1"], start["W_MLP:L0"]) == (3, 5)


@pytest.mark.parametrize(("shared", "most"), [(False, 0.025), (True, 0.007)])
def test_the_mean_gap_to_the_optimum_is_small(shared: bool, most: float) -> None:
    """+Align leaves 3.9 % and 1.0 % on these pairs: losing the flips or one of the ranks shows here."""
    gaps = []
    for seed in range(60):
        graph = random_pair(seed, most_layers=3, shared=shared)
        best = interleave(graph, "0F;1B", method="exact").makespan_ns
        gaps.append(interleave(graph, "0F;1B", method="defer").makespan_ns / best - 1)
    assert sum(gaps) / len(gaps) < most
