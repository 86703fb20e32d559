"""The order of an action's tasks, by any method: from first come, first served to the proven optimum.

- ``fifo`` and ``align``: ``list_schedule.py``;
- ``defer``: ``align``, or the order of ``defer.py`` where it is shorter; under a millisecond for most pairs;
- ``exact``: the optimum of ``exact.py``, some milliseconds for a pair, or the best known when its limit is reached;
- ``megatron``: the fixed order of ``fixed_order.py``, for comparison.

Durations do not know of SM contention. With it, each method's orders and those before it are candidates, ``defer`` and
``exact`` also for compute that is slower throughout, and the candidate that is shortest under the rate model is taken.
"""

from __future__ import annotations

from dataclasses import replace

from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.plan import Interleaving
from tessera_rt.scheduler.contention import evaluate_contended
from tessera_rt.scheduler.defer import defer_order
from tessera_rt.scheduler.exact import MAX_STATES, Exact, Proof, improve
from tessera_rt.scheduler.lane_graph import LaneGraph
from tessera_rt.scheduler.list_schedule import METHODS as LISTED
from tessera_rt.scheduler.list_schedule import interleaving, list_schedule
from tessera_rt.tasks import Resource, TaskGraph

METHODS = (*LISTED, "defer", "exact")


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
    contention all the same. An order made for slower compute is called *contended*. ``exact`` also gives ``bound_ns``;
    its result is called *exact* if it is the proven optimum, *contended* if it is longer than that but shorter with
    contention, else, where ``max_states`` (the limit of the search) was reached, by the method whose order it is. Equal
    input gives equal output. Raises ScheduleError for another method.
    """
    if method not in METHODS:
        raise ScheduleError.of("interleaving", [Problem("method", method, f"one of {', '.join(METHODS)}")])
    if method in ("fifo", "megatron") or (method == "align" and not contention):
        return list_schedule(graph, key, method=method, comm_sms=comm_sms)
    aligned = list_schedule(graph, key, method="align", comm_sms=comm_sms)
    found = [aligned]
    proof: Proof | None = None
    if method != "align":
        found.append(_deferred(graph, aligned))
    if method == "exact":
        exact = improve(found[-1], graph, max_states=max_states)
        found.append(exact.interleaving)
        proof = exact.proof
    if contention:
        if aligned.method != "fifo":
            found.append(list_schedule(graph, key, method="fifo", comm_sms=comm_sms))
        if method != "align":
            found.append(_for_slower_compute(graph, 1 + contention, aligned, method, max_states))
        best = min(found, key=lambda made: (evaluate_contended(made.order, graph, contention)[1], made.makespan_ns))
    else:
        best = found[-1]
    return best if proof is None else _named(best, proof)


def prove(
    graph: TaskGraph,
    key: str,
    *,
    comm_sms: int = 0,
    max_states: int = MAX_STATES,
) -> Exact:
    """The optimum with its proof (without contention), or at a limit the best known with the bound that is proven."""
    aligned = list_schedule(graph, key, method="align", comm_sms=comm_sms)
    return improve(_deferred(graph, aligned), graph, max_states=max_states)


def _named(best: Interleaving, proof: Proof) -> Interleaving:
    """With its bound, and named by what is proven of it."""
    method = best.method
    if best.makespan_ns == proof.lower_bound_ns:
        method = "exact"
    elif proof.optimal:
        method = "contended"
    return replace(best, method=method, bound_ns=proof.lower_bound_ns)


def _deferred(graph: TaskGraph, aligned: Interleaving) -> Interleaving:
    """+Defer: ``aligned`` where nothing shorter is found."""
    lanes = LaneGraph.of(graph)
    if aligned.makespan_ns == lanes.bound():
        return aligned
    order = [lanes.names[i] for i in defer_order(lanes)]
    deferred = interleaving(order, graph, aligned.key, method="defer", comm_sms=aligned.comm_sms)
    return deferred if deferred.makespan_ns < aligned.makespan_ns else aligned


def _for_slower_compute(
    graph: TaskGraph, stretch: float, aligned: Interleaving, method: str, max_states: int
) -> Interleaving:
    """The order that suits compute at 1 / ``stretch`` of its speed, with the graph's own times."""
    slower = TaskGraph(
        tuple(
            replace(task, ns=round(task.ns * stretch)) if task.resource is Resource.COMP else task
            for task in graph.tasks
        )
    )
    made = _deferred(slower, interleaving(aligned.order, slower, aligned.key, method=aligned.method))
    if method == "exact":
        made = improve(made, slower, max_states=max_states).interleaving
    return interleaving(made.order, graph, aligned.key, method="contended", comm_sms=aligned.comm_sms)
