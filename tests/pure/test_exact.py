"""The exact search against brute force, two general solvers and its own bounds."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_rt.model_spec import ModelSpec
from tessera_rt.scheduler import exact
from tessera_rt.scheduler.exact import improve
from tessera_rt.scheduler.graphs import action_graph, to_networkx
from tessera_rt.scheduler.interleave import prove
from tessera_rt.scheduler.list_schedule import evaluate, interleaving, list_schedule
from tessera_rt.scheduler.validate import validate
from tessera_rt.tasks import Pass, Task, TaskGraph, TaskKind
from tessera_rt.testing.costs import moe_model
from tessera_rt.testing.pairs import random_graph, random_pair
from tessera_rt.testing.random_costs import random_costs
from tessera_rt.testing.schedule_oracles import cp_sat_makespan, milp_makespan


def proven(graph: TaskGraph) -> int:
    """The optimum, found from the worst incumbent there is, so that the search has all to do by itself."""
    serial = replace(interleaving(graph.names, graph, "0F;1B"), makespan_ns=10**12)
    made = improve(serial, graph)
    assert made.proof.optimal
    assert made.interleaving.makespan_ns == made.proof.lower_bound_ns
    validate(made.interleaving, graph)
    from_good = prove(graph, "0F;1B")
    assert from_good.proof.optimal and from_good.gap == 0
    assert from_good.interleaving.makespan_ns == made.interleaving.makespan_ns
    return made.interleaving.makespan_ns


def shrunk(graph: TaskGraph, total: int) -> TaskGraph:
    """The graph with durations so small that a time-indexed program can be written."""
    scale = max(1, graph.total_ns() // total)
    return TaskGraph(tuple(replace(task, ns=round(task.ns / scale)) for task in graph.tasks))


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.integers(0, 7), st.sampled_from((0.1, 0.25, 0.4)), st.sampled_from((2, 9)))
def test_the_optimum_is_the_best_of_all_topological_orders(seed: int, tasks: int, density: float, longest: int) -> None:
    graph = random_graph(seed, tasks=tasks, density=density, longest=longest)
    best = min(evaluate(order, graph)[1] for order in nx.all_topological_sorts(to_networkx(graph)))
    assert proven(graph) == best


@pytest.mark.parametrize("seed", range(6))
def test_the_optimum_of_a_chain_pair_is_the_mixed_integer_programs(seed: int) -> None:
    graph = shrunk(random_pair(seed, most_layers=2, shared=False), 50)
    assert milp_makespan(graph, list_schedule(graph, "0F;1B").makespan_ns) == proven(graph)


@pytest.mark.parametrize("seed", range(6))
def test_the_optimum_of_a_branched_pair_is_the_mixed_integer_programs(seed: int) -> None:
    graph = shrunk(random_pair(seed, most_layers=1), 40)
    assert milp_makespan(graph, list_schedule(graph, "0F;1B").makespan_ns) == proven(graph)


@pytest.mark.parametrize("seed", range(8))
def test_the_optimum_of_any_graph_is_the_mixed_integer_programs(seed: int) -> None:
    graph = random_graph(seed, tasks=12, density=0.15, longest=5)
    assert milp_makespan(graph, list_schedule(graph, "0F;1B").makespan_ns) == proven(graph)


@pytest.mark.parametrize("seed", range(20))
def test_the_optimum_is_that_of_constraint_programming(seed: int) -> None:
    """Graphs with many branches: a bound through a task that is done already would prune the optimum."""
    pytest.importorskip("ortools")
    graph = random_graph(seed, tasks=18, density=0.12, longest=30)
    assert cp_sat_makespan(graph, time_limit_s=20) in (None, proven(graph))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("shared", [False, True])
def test_the_optimum_of_larger_pairs_is_that_of_constraint_programming(seed: int, shared: bool) -> None:
    pytest.importorskip("ortools")
    graph = random_pair(1000 + seed, most_layers=3, shared=shared)
    assert cp_sat_makespan(graph, time_limit_s=20) in (None, proven(graph))


@given(st.integers(0, 10**6), st.booleans())
def test_the_optimum_is_within_its_bound_and_no_longer_than_any_method(seed: int, shared: bool) -> None:
    graph = random_pair(seed, most_layers=3, shared=shared)
    made = prove(graph, "0F;1B")
    assert made.proof.optimal
    assert made.interleaving.makespan_ns <= list_schedule(graph, "0F;1B").makespan_ns
    assert prove(graph, "0F;1B") == made


def test_multi_token_prediction_and_head_are_part_of_a_pair() -> None:
    model: ModelSpec = moe_model(3, mtp=1, shared=True)
    costs = random_costs(model, 7, longest=50)
    graph = action_graph("1F;1B", model, costs, ((0, 3), (3, len(model.items))))
    assert {"F_HEAD", "B_HEAD", "F_MTP:M0", "W_MTP:M0"} <= set(graph.names)
    serial = replace(interleaving(graph.names, graph, "1F;1B"), makespan_ns=10**12)
    made = improve(serial, graph)
    assert made.proof.optimal and made.interleaving.method == "exact"
    assert cp_sat_or(made.interleaving.makespan_ns, graph) == made.interleaving.makespan_ns


def cp_sat_or(known: int, graph: TaskGraph) -> int:
    pytest.importorskip("ortools")
    return cp_sat_makespan(graph, time_limit_s=30) or known


def test_a_limit_returns_the_incumbent_with_a_bound_that_holds() -> None:
    graph = next(g for seed in range(100) if prove(g := random_pair(seed), "0F;1B").proof.states > 50)
    best = prove(graph, "0F;1B")
    for states in (0, 1, 10, 40):
        limited = prove(graph, "0F;1B", max_states=states)
        assert not limited.proof.optimal and limited.proof.states == states
        assert limited.interleaving == prove(graph, "0F;1B", max_states=0).interleaving
        assert limited.proof.lower_bound_ns <= best.interleaving.makespan_ns < limited.interleaving.makespan_ns
        assert 0 < limited.gap == limited.interleaving.makespan_ns / limited.proof.lower_bound_ns - 1


def test_an_incumbent_that_meets_the_bound_needs_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = TaskGraph(
        (
            Task(kind=TaskKind.MLP, pass_=Pass.F, label="L0", ns=5),
            Task(kind=TaskKind.MLP, pass_=Pass.B, label="L1", ns=5),
        )
    )
    incumbent = list_schedule(graph, "0F;1B")
    monkeypatch.setattr(exact, "_search", None)
    made = improve(incumbent, graph)
    assert made.interleaving is incumbent
    assert (made.proof.optimal, made.proof.lower_bound_ns, made.proof.states) == (True, 10, 0)
