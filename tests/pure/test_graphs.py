"""Graphs of chunks and actions: tasks, durations, and what is read off them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.errors import CostError, ScheduleError
from tessera_rt.scheduler.graphs import action_graph, chunk_graph, critical_path, lower_bound, tails, to_networkx
from tessera_rt.tasks import Pass, Resource, TaskGraph, chunk_tasks
from tessera_rt.testing.costs import item_costs, moe_model

MODEL = moe_model(4, dense_first=1, shared=True, mtp=1)
COSTS = item_costs(
    MODEL, {"L0": (3, 4, 5), "HEAD": (7, 8, 9)}, default=(20, 30, 10), comm_ns=6, count_ns=1, comm_bytes=64
)
BOUNDS = ((0, 2), (2, 4), (4, 4), (4, 7))


def test_a_chunk_has_its_tasks_with_durations_and_payloads() -> None:
    graph = chunk_graph(MODEL, COSTS, 1, 3, Pass.F)
    assert graph.names == chunk_tasks(MODEL.items[1:3], Pass.F).names
    assert graph.by_name["F_MLP:L0"].ns == 3
    assert graph.by_name["F_MLP:L1"].ns == 20
    assert (graph.by_name["F_DISP:L1"].ns, graph.by_name["F_DISP:L1"].bytes) == (6, 64)
    assert graph.total_ns(Resource.COMM) == 13
    assert chunk_graph(MODEL, COSTS, 3, 3, Pass.B).tasks == ()
    with_w, without = (chunk_graph(MODEL, COSTS, 1, 3, Pass.B, with_w=w) for w in (True, False))
    assert [name for name in with_w.names if name[0] == "B"] == list(without.names)


def test_action_keys() -> None:
    def names(key: str) -> list[str]:
        return list(action_graph(key, MODEL, COSTS, BOUNDS).names)

    assert names("1F") == list(chunk_tasks(MODEL.items[2:4], Pass.F).names)
    assert names("1B") == list(chunk_tasks(MODEL.items[2:4], Pass.B).names)
    assert names("1I") == [name for name in names("1B") if name[0] == "B"]
    assert names("1W") == [name for name in names("1B") if name[0] == "W"]
    assert names("0F;3B") == names("0F") + names("3B")
    assert names("2F") == names("2B;2F") == []
    merged = action_graph("0F;3B", MODEL, COSTS, BOUNDS)
    assert merged.total_ns() == sum(action_graph(key, MODEL, COSTS, BOUNDS).total_ns() for key in ("0F", "3B"))
    assert not nx.has_path(to_networkx(merged), "F_EMBED", "B_MLP:L3")  # the passes share no edge


@pytest.mark.parametrize("key", ["4F", "F", "0F3", "0F;", "0F,1B", "0SEND_F", ""])
def test_other_keys_are_refused(key: str) -> None:
    with pytest.raises(ScheduleError, match="stages below 4"):
        action_graph(key, MODEL, COSTS, BOUNDS)


def test_a_task_without_cost_is_named() -> None:
    costs = replace(COSTS, tasks={name: cost for name, cost in COSTS.tasks.items() if name != "W_ATTN:L2"})
    with pytest.raises(CostError, match="W_ATTN:L2"):
        action_graph("1B", MODEL, costs, BOUNDS)


@given(st.integers(0, 7), st.integers(0, 7), st.sampled_from(list(Pass)), st.randoms(use_true_random=False))
def test_paths_and_bounds_agree_with_networkx(a: int, b: int, pass_: Pass, random: Random) -> None:
    labels = [item.label for item in MODEL.items]
    times = {label: (random.randint(0, 9), random.randint(0, 9), random.randint(0, 9)) for label in labels}
    graph = chunk_graph(MODEL, item_costs(MODEL, times, comm_ns=4), min(a, b), max(a, b), pass_)
    digraph = to_networkx(graph)
    assert nx.is_directed_acyclic_graph(digraph)
    assert set(digraph.edges) == {(dep, task.name) for task in graph.tasks for dep in task.deps}
    longest = max(
        (sum(digraph.nodes[n]["ns"] for n in path) for path in _paths(digraph)),
        default=0,
    )
    length, path = critical_path(graph)
    assert length == longest == sum(graph.by_name[name].ns for name in path)
    assert nx.is_path(digraph, path) if len(path) > 1 else True
    assert max(tails(graph).values(), default=0) == length
    assert lower_bound(graph) == max(length, graph.total_ns(Resource.COMP), graph.total_ns(Resource.COMM))


def _paths(digraph: nx.DiGraph) -> list[list[str]]:  # type: ignore[type-arg]
    """All maximal paths."""
    sources = [n for n in digraph if digraph.in_degree(n) == 0]
    ends = {n for n in digraph if digraph.out_degree(n) == 0}
    found = [[n] for n in sources if n in ends]
    for source in sources:
        found += nx.all_simple_paths(digraph, source, ends - {source})
    return found


def test_networkx_nodes_carry_the_task() -> None:
    digraph = to_networkx(chunk_graph(MODEL, COSTS, 1, 3, Pass.B))
    assert digraph.nodes["W_MLP:L1"] == {"ns": 10, "resource": Resource.COMP, "pass_": Pass.W, "movable": True}
    assert digraph.nodes["B_DISP:L1"]["resource"] is Resource.COMM


def test_the_empty_graph() -> None:
    assert critical_path(TaskGraph(())) == (0, ())
    assert lower_bound(TaskGraph(())) == 0
