"""The order of an action's tasks, by any method: from first come, first served to the proven optimum.

- ``fifo`` and ``align``: ``list_schedule.py``;
- ``defer``: ``align``, or the order of ``defer.py`` where it is shorter; under a millisecond for most pairs;
- ``exact``: the optimum of ``exact.py``, some milliseconds for a pair, or the best known when its limit is reached;
- ``megatron``: the fixed order of ``fixed_order.py``, for comparison.

Durations do not know of SM contention. With it, each method's orders and those before it are candidates, ``exact`` adds
the optima for compute that is slower throughout, and the candidate that is shortest under the rate model is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.plan import Interleaving
from tessera_rt.scheduler.contention import evaluate_contended
from tessera_rt.scheduler.defer import defer_order
from tessera_rt.scheduler.exact import MAX_STATES, Exact, improve
from tessera_rt.scheduler.lane_graph import LaneGraph
from tessera_rt.scheduler.list_schedule import METHODS as LISTED
from tessera_rt.scheduler.list_schedule import interleaving, list_schedule
from tessera_rt.tasks import Resource, TaskGraph

METHODS = (*LISTED, "defer", "exact")

_STRETCHES = (0.5, 1.0)
"""Parts of the full contention by which ``exact`` tries slower compute: it rarely lasts for all of a task."""


def interleave(
    graph: TaskGraph,
    key: str,
    *,
    method: str = "exact",
    comm_sms: int = 0,
    contention: float = 0.0,
    max_states: int = MAX_STATES,
) -> Interleaving:
    """The interleaving of ``graph`` by ``method``, one of METHODS. Its ``method`` says whose order it is.

    Without ``contention``: ``exact`` is never longer than ``defer``, that never longer than ``align``, that never
    longer than ``fifo``. With it the same holds under ``evaluate_contended``; times and makespan are given without
    contention all the same. ``max_states`` limits the exact search. Equal input gives equal output. Raises
    ScheduleError for another method.
    """
    if method not in METHODS:
        raise ScheduleError.of("interleaving", [Problem("method", method, f"one of {', '.join(METHODS)}")])
    if not contention:
        if method == "exact":
            return prove(graph, key, comm_sms=comm_sms, max_states=max_states).interleaving
        return _deferred(graph, key, comm_sms) if method == "defer" else _listed(graph, key, method, comm_sms)
    candidates = list(_candidates(graph, key, method, comm_sms, contention, max_states))
    return min(candidates, key=lambda made: (evaluate_contended(made.order, graph, contention)[1], made.makespan_ns))


def prove(
    graph: TaskGraph,
    key: str,
    *,
    comm_sms: int = 0,
    max_states: int = MAX_STATES,
    time_limit_s: float | None = None,
) -> Exact:
    """The optimum with its proof (without contention), or at a limit the best known with the bound that is proven."""
    return improve(_deferred(graph, key, comm_sms), graph, max_states=max_states, time_limit_s=time_limit_s)


def _listed(graph: TaskGraph, key: str, method: str, comm_sms: int) -> Interleaving:
    return list_schedule(graph, key, method=method, comm_sms=comm_sms)


def _deferred(graph: TaskGraph, key: str, comm_sms: int) -> Interleaving:
    lanes = LaneGraph.of(graph)
    aligned = _listed(graph, key, "align", comm_sms)
    if aligned.makespan_ns == lanes.bound():
        return aligned
    order = [lanes.names[i] for i in defer_order(lanes)]
    deferred = interleaving(order, graph, key, method="defer", comm_sms=comm_sms)
    return deferred if deferred.makespan_ns < aligned.makespan_ns else aligned


def _candidates(
    graph: TaskGraph, key: str, method: str, comm_sms: int, contention: float, max_states: int
) -> Iterator[Interleaving]:
    """Orders of ``graph`` by the method and those before it, with compute at its own and at slower speeds."""
    if method in ("fifo", "megatron"):
        yield _listed(graph, key, method, comm_sms)
        return
    yield _listed(graph, key, "fifo", comm_sms)
    yield _listed(graph, key, "align", comm_sms)
    if method == "align":
        return
    for stretch in (0.0, *_STRETCHES):
        slower = _slower(graph, 1 + stretch * contention)
        made = [_deferred(slower, key, comm_sms)]
        if method == "exact":
            made.append(improve(made[0], slower, max_states=max_states).interleaving)
        yield from (interleaving(each.order, graph, key, method=each.method, comm_sms=comm_sms) for each in made)


def _slower(graph: TaskGraph, stretch: float) -> TaskGraph:
    """The graph with its compute slower throughout."""
    return TaskGraph(
        tuple(
            replace(task, ns=round(task.ns * stretch)) if task.resource is Resource.COMP else task
            for task in graph.tasks
        )
    )
