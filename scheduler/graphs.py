"""Task graphs of chunks and actions with durations, and what can be read off a graph alone.

The graphs come from ``tasks.chunk_tasks``, the durations from a ``CostTable``. For graph algorithms beyond the few
here, ``to_networkx`` gives a ``networkx.DiGraph``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import networkx as nx

from tessera_rt.costs import CostTable
from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.model_spec import ModelSpec
from tessera_rt.tasks import Pass, Resource, TaskGraph, chunk_tasks

Bounds = Sequence[tuple[int, int]]
"""Items [start, stop) of every stage."""

_KEY_PART = re.compile(r"(\d+)([FBIW])")


def chunk_graph(
    model: ModelSpec, costs: CostTable, start: int, stop: int, pass_: Pass, *, with_w: bool = True
) -> TaskGraph:
    """One pass over items [start, stop), with durations (ns) and payloads (bytes).

    ``with_w``: whether a backward has its W tasks. Raises CostError when the table lacks a task.
    """
    return costs.apply(chunk_tasks(model.items[start:stop], pass_, with_w=with_w, tp=costs.workload.tp))


def action_graph(key: str, model: ModelSpec, costs: CostTable, bounds: Bounds) -> TaskGraph:
    """The graph of an action by its key (``Action.key``): ``0F``, ``3B``, ``3I``, ``3W`` or a pair such as ``0F;3B``.

    ``B`` is the full backward with its W tasks, ``I`` the backward without them, ``W`` they alone. The passes of a pair
    stand side by side in the order of the key. Raises ScheduleError for another key, CostError when a task has no cost.
    """
    graph = TaskGraph(())
    for stage, kind in key_parts(key, len(bounds)):
        start, stop = bounds[stage]
        pass_ = Pass.B if kind == "I" else Pass(kind)
        graph = graph.merged(chunk_graph(model, costs, start, stop, pass_, with_w=kind != "I"))
    return graph


def key_parts(key: str, stages: int) -> list[tuple[int, str]]:
    """(stage, letter) of each pass of an action's key. Raises ScheduleError for anything that is not one."""
    parts = []
    for text in key.split(";"):
        match = _KEY_PART.fullmatch(text)
        if match is None or int(match[1]) >= stages:
            allowed = f"passes such as 0F, 3B, 3I, 3W or 0F;3B with stages below {stages}"
            raise ScheduleError.of("action", [Problem("key", key, allowed)])
        parts.append((int(match[1]), match[2]))
    return parts


def to_networkx(graph: TaskGraph) -> nx.DiGraph[str]:
    """The same graph with task names as nodes; node attributes ``ns``, ``resource``, ``pass_``, ``movable``."""
    digraph: nx.DiGraph[str] = nx.DiGraph()
    for task in graph.tasks:
        digraph.add_node(task.name, ns=task.ns, resource=task.resource, pass_=task.pass_, movable=task.movable)
    for task in graph.tasks:
        digraph.add_edges_from((dep, task.name) for dep in task.deps)
    return digraph


def tails(graph: TaskGraph) -> dict[str, int]:
    """Task name -> length (ns) of the longest chain of dependencies that begins with it, itself included."""
    after = dict.fromkeys(graph.names, 0)
    for task in reversed(graph.tasks):
        after[task.name] += task.ns
        for dep in task.deps:
            after[dep] = max(after[dep], after[task.name])
    return after


def critical_path(graph: TaskGraph) -> tuple[int, tuple[str, ...]]:
    """Length (ns) of the longest chain of dependencies, and its tasks (the first such chain in the graph's order)."""
    after = tails(graph)
    if not after:
        return 0, ()
    following: dict[str, list[str]] = {name: [] for name in graph.names}
    for task in graph.tasks:
        for dep in task.deps:
            following[dep].append(task.name)
    starts = [task.name for task in graph.tasks if not task.deps]
    path = [max(starts, key=after.__getitem__)]
    while following[path[-1]]:
        path.append(max(following[path[-1]], key=after.__getitem__))
    return after[path[0]], tuple(path)


def lower_bound(graph: TaskGraph) -> int:
    """No order of the graph on two lanes takes less (ns): the load of each lane and the critical path."""
    return max(graph.total_ns(Resource.COMP), graph.total_ns(Resource.COMM), critical_path(graph)[0])
