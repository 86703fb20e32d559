"""The shortest interleaving there is, with its proof.

A best-first search (A*) over partial schedules (``exact_states.py``). From each, the branches are those of *active*
schedules (Giffler and Thompson, 1960): of all available tasks take the one that could end first; only tasks of its
lane that could start before that end come next. No schedule in which some task could start earlier without delaying
another is looked at, and at least one of the others is optimal. States that another state with the same done tasks
dominates are dropped, and so are those whose lower bound reaches the incumbent:

- for each lane: when it is free or its first task can be ready, plus all it has left, plus the least that follows;
- for each task of the frontier: its ready time plus the longest chain behind it.

States leave the queue by their bound, so the smallest bound in it holds for every schedule: when it reaches the
incumbent, the incumbent is optimal, and when the search ends early, it is what is proven. Two chains with W tasks (for
which this is a dynamic program) and any other graph are treated alike.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tessera_rt.plan import Interleaving
from tessera_rt.scheduler.exact_states import Place, StateSpace, Times
from tessera_rt.scheduler.lane_graph import COMM, COMP, LaneGraph
from tessera_rt.scheduler.list_schedule import interleaving
from tessera_rt.tasks import TaskGraph

MAX_STATES = 200_000
"""States looked at before the search gives up: some ten seconds. Pairs of presets need hundreds to thousands."""

_Link = tuple["_Link | None", int]
"""The way to a state: the way before it, and the task that was added, or -1 - c for a leaf of duration class c."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What is known about an interleaving's length: nothing is shorter than ``lower_bound_ns``.

    ``optimal``: the interleaving has that length. ``states``: how many partial schedules were looked at.
    """

    optimal: bool
    lower_bound_ns: int
    states: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """An interleaving and its proof."""

    interleaving: Interleaving
    proof: Proof

    @property
    def gap(self) -> float:
        """Relative distance from the proven bound; 0 when optimal."""
        bound = self.proof.lower_bound_ns
        return self.interleaving.makespan_ns / bound - 1 if bound else 0.0


def improve(
    incumbent: Interleaving, graph: TaskGraph, *, max_states: int = MAX_STATES, time_limit_s: float | None = None
) -> Exact:
    """The optimum (method ``exact``), or ``incumbent`` itself when nothing is shorter or a limit comes first.

    ``incumbent``: any interleaving of ``graph``; a good one makes the search short. With ``time_limit_s`` (seconds) the
    result may depend on the machine, without it never.
    """
    lanes = LaneGraph.of(graph)
    upper, bound = incumbent.makespan_ns, lanes.bound()
    if upper == bound:
        return Exact(interleaving=incumbent, proof=Proof(optimal=True, lower_bound_ns=bound, states=0))
    found = _search(lanes, upper, max_states, time_limit_s)
    proof = Proof(optimal=found.proven, lower_bound_ns=max(bound, found.bound_ns), states=found.states)
    if found.order is None:
        return Exact(interleaving=incumbent, proof=proof)
    order = [lanes.names[i] for i in found.order]
    best = interleaving(order, graph, incumbent.key, method="exact", comm_sms=incumbent.comm_sms)
    assert best.makespan_ns == proof.lower_bound_ns < upper, "the order's length is the bound it was found with"
    return Exact(interleaving=best, proof=proof)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    proven: bool
    bound_ns: int
    states: int
    order: list[int] | None = None  # None: nothing shorter than the incumbent


def _search(lanes: LaneGraph, upper: int, max_states: int, time_limit_s: float | None) -> _Found:
    space = StateSpace(lanes)
    began = time.monotonic()
    leaf_total = sum(lanes.ns[i] for i in space.leaves)
    bits = len(lanes).bit_length()
    shift = [len(lanes) + bits * c for c in range(len(space.leaf_ns))]  # a state's key: done tasks, then leaf counts
    most = (1 << bits) - 1
    kept: dict[int, list[Times]] = {}  # by key: times that no others dominate
    # (bound, -tasks done without leaves, -number, key, place, times, ns of the leaves that are not done, way)
    queue: list[tuple[int, int, int, int, Place, Times, int, _Link | None]] = [
        (lanes.bound(), 0, 0, 0, space.place(0), (0, 0), leaf_total, None)
    ]
    number = states = 0
    while queue:
        bound, depth, _, key, place, times, leaf_left, way = heapq.heappop(queue)
        if place.done == space.full:
            return _Found(proven=True, bound_ns=bound, states=states, order=_order(space, way))
        if key in kept and times not in kept[key]:
            continue  # dominated since it was put in
        if states == max_states or (
            time_limit_s is not None and not states % 256 and time.monotonic() - began > time_limit_s
        ):
            return _Found(proven=False, bound_ns=bound, states=states)
        states += 1
        leaves = [c for c, count in enumerate(place.leaves) if count > (key >> shift[c] & most)]
        for task, next_place, next_times in _branches(space, place, times, leaves):
            if task >= 0:
                next_key, left = key | 1 << task, leaf_left
                free_leaf = any(count > (key >> shift[c] & most) for c, count in enumerate(next_place.leaves))
            else:
                next_key, left = key + (1 << shift[-1 - task]), leaf_left - space.leaf_ns[-1 - task]
                free_leaf = True
            least = max(bound, _bound(next_place, next_times, left, free_leaf))
            if least < upper and _keep(kept, next_key, now := tuple(next_times)):
                number += 1
                heapq.heappush(
                    queue, (least, depth - (task >= 0), -number, next_key, next_place, now, left, (way, task))
                )
    return _Found(proven=True, bound_ns=upper, states=states)


def _branches(
    space: StateSpace, place: Place, times: Times, leaves: list[int]
) -> Iterator[tuple[int, Place, list[int]]]:
    """(task, or -1 - c for a leaf of class c; next place; its times). ``leaves``: classes with one ready."""
    comp_free, comm_free = times[COMP], times[COMM]
    starts = []
    first_end, lane, first = -1, COMP, -1
    for task, on, ns, slot in place.available:
        start = times[on]
        if slot >= 0 and times[slot] > start:
            start = times[slot]
        starts.append(start)
        if first_end < 0 or start + ns < first_end:
            first_end, lane, first = start + ns, on, task
    if leaves and (first_end < 0 or comp_free + space.leaf_ns[leaves[-1]] < first_end):
        first_end, lane, first = comp_free + space.leaf_ns[leaves[-1]], COMP, -1 - leaves[-1]
    for (task, on, ns, _), start in zip(place.available, starts, strict=True):
        if on == lane and (start < first_end or task == first):
            move = space.move(place, task)
            end = start + ns
            free = (end, comm_free) if on == COMP else (comp_free, end)
            after = [*free]
            for slot, moved, next_lane in move.plan:
                ready = times[slot] if slot >= 0 else 0
                if moved and end > ready:
                    ready = end
                after.append(ready if ready > free[next_lane] else free[next_lane])
            yield task, move.place, after
    if lane == COMP:
        for c in leaves:
            end = comp_free + space.leaf_ns[c]
            if comp_free < first_end or first == -1 - c:
                after = [end, comm_free]
                after += [
                    ready if on == COMM or ready > end else end
                    for ready, on in zip(times[2:], place.lanes, strict=True)
                ]
                yield -1 - c, place, after


def _bound(place: Place, times: list[int], leaf_left: int, free_leaf: bool) -> int:
    """Least length of all schedules from here on. Raises a lane's free time to when its first task can be ready."""
    for lane in (COMM,) if free_leaf else (COMM, COMP):
        earliest = -1
        for head in place.heads[lane]:
            ready = 0
            for slot, ns in head:
                ready = max(ready, times[slot] + ns)
            if earliest < 0 or ready < earliest:
                earliest = ready
        times[lane] = max(times[lane], earliest)
    bound = max(
        times[COMP] + place.left[COMP] + leaf_left,
        times[COMM] + place.left[COMM] + place.comm_end,
        times[COMP] + place.source_tails[COMP],
        times[COMM] + place.source_tails[COMM],
    )
    for slot, tail in enumerate(place.tails, 2):
        bound = max(bound, times[slot] + tail)
    return bound


def _keep(kept: dict[int, list[Times]], key: int, times: Times) -> bool:
    """Whether no state with the same key dominates ``times``; those that it dominates are forgotten."""
    others = kept.get(key)
    if others is None:
        kept[key] = [times]
        return True
    for other in others:
        for theirs, ours in zip(other, times, strict=True):
            if theirs > ours:
                break
        else:
            return False
    others[:] = [other for other in others if any(ours > theirs for ours, theirs in zip(times, other, strict=True))]
    others.append(times)
    return True


def _order(space: StateSpace, way: _Link | None) -> list[int]:
    """The tasks along a way; leaves that it does not name come last."""
    lanes = space.lanes
    steps: list[int] = []
    while way is not None:
        way, step = way
        steps.append(step)
    order: list[int] = []
    done: set[int] = set()
    waiting = list(space.leaves)
    for step in reversed(steps):
        task = step
        if step < 0:
            ns = space.leaf_ns[-1 - step]
            task = next(i for i in waiting if lanes.ns[i] == ns and done.issuperset(lanes.deps[i]))
            waiting.remove(task)
        order.append(task)
        done.add(task)
    return order + waiting
