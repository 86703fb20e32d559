"""+Defer: list scheduling in which every W that gets in the way of a backbone task is tried elsewhere.

Tessera (OSDI '26, algorithm 1) defers a movable task that would extend the pair's makespan and back-fills it later.
Whether one would is found by scheduling again: a W that delays a backbone task is taken out, the rest is listed anew,
the W goes into the best-fitting idle time behind its parent (else to the end), and the deferral stays if the makespan
falls. Deferring whenever a W delays any backbone task, without that test, is worse than not deferring at all.

Beyond the paper, the same test decides whether a communication task waits for one that has more behind it; and two
orders of the backbone are listed, of which the shorter one is kept: *feed* first starts what soonest gives the other
lane work, *tail* what has the longest chain behind it. W tasks fill the lane when no backbone task is ready, largest
first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tessera_rt.scheduler.lane_graph import COMM, COMP, LaneGraph

WORK = 280
"""Tasks that may be listed in changes of one graph: with two orders to begin with, about a millisecond."""


def defer_order(lanes: LaneGraph, *, work: int = WORK) -> list[int]:
    """Positions of all tasks in order.

    Two list schedulings, and one more for every change that is tried: at most ``work`` tasks are listed for these, or
    one change for a graph that is larger than that.
    """
    bound = lanes.bound()
    bits = [False] * len(lanes)
    best: list[int] = []
    makespan = -1
    for candidate in (_feed_rank(lanes), _tail_rank(lanes)):
        order, length = _placed(lanes, candidate, bits)
        if makespan < 0 or length < makespan:
            best, makespan, rank = order, length, candidate
        if makespan == bound:
            return best
    held = lanes
    tried: set[tuple[int, int]] = set()
    while makespan > bound and work > 0:
        change = next((change for change in _changes(held, best, bits) if change not in tried), None)
        if change is None:
            break
        tried.add(change)
        work -= len(lanes)
        task, behind = change
        moved, trial = list(bits), held
        if behind < 0:
            moved[task] = not moved[task]
        else:
            trial = _behind(held, task, behind)
        order, length = _placed(trial, rank, moved)
        if length < makespan:
            best, makespan, bits, held = order, length, moved, trial
    return best


def _feed_rank(lanes: LaneGraph) -> list[int]:
    feeds = [0] * len(lanes)  # from the task's start until the other lane gets work from it; its tail if it never does
    for i in reversed(range(len(lanes))):
        others = (0 if lanes.lane[j] != lanes.lane[i] else feeds[j] for j in lanes.followers[i])
        feeds[i] = lanes.ns[i] + min(others, default=lanes.tail[i])
    return _rank(lanes, [(feeds[i], -lanes.tail[i]) for i in range(len(lanes))])


def _tail_rank(lanes: LaneGraph) -> list[int]:
    return _rank(lanes, [(-tail, 0) for tail in lanes.tail])


def _rank(lanes: LaneGraph, keys: Sequence[tuple[int, int]]) -> list[int]:
    """Each task's rank: backbone by key, then movable tasks from the largest to the smallest."""

    def key(i: int) -> tuple[bool, tuple[int, int], int]:
        return (lanes.movable[i], (-lanes.ns[i], 0) if lanes.movable[i] else keys[i], i)

    rank = [0] * len(lanes)
    for place, i in enumerate(sorted(range(len(lanes)), key=key)):
        rank[i] = place
    return rank


def _changes(lanes: LaneGraph, order: Sequence[int], deferred: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """What may shorten the order: (W, -1) to change the bit of a W, (x, y) to let the COMM task x wait for y.

    W that are deferred, and those that run while the next backbone task waits for the lane; COMM tasks that run while
    the next one, which has more behind it, waits. A movable task that others wait for belongs to their chain.
    """
    ends = [0] * len(lanes)
    free = [0, 0]
    since: list[int] = []  # W that were started behind the last backbone task on COMP
    before = -1  # on COMM
    for i in order:
        lane = lanes.lane[i]
        ready = max((ends[dep] for dep in lanes.deps[i]), default=0)
        ends[i] = free[lane] = max(ready, free[lane]) + lanes.ns[i]
        if lane == COMM:
            if before >= 0 and ends[before] > ready and lanes.tail[i] > lanes.tail[before]:
                yield before, i
            before = i
        elif lanes.movable[i] and not lanes.followers[i]:
            since.append(i)
            if deferred[i]:
                yield i, -1
        else:
            yield from ((w, -1) for w in since if ends[w] > ready and not deferred[w])
            since.clear()


def _behind(lanes: LaneGraph, task: int, other: int) -> LaneGraph:
    """The graph in which ``task`` also waits for ``other``."""
    deps, followers = list(lanes.deps), list(lanes.followers)
    deps[task] = (*deps[task], other)
    followers[other] = (*followers[other], task)
    return replace(lanes, deps=tuple(deps), followers=tuple(followers))


def _placed(lanes: LaneGraph, rank: Sequence[int], deferred: Sequence[bool]) -> tuple[list[int], int]:
    """Order and makespan with the deferred tasks back-filled, the one that is ready last first."""
    order, start, end = _listed(lanes, rank, deferred)
    late = [i for i in range(len(lanes)) if deferred[i]]
    if late:
        on_comp = [i for i in order if lanes.lane[i] == COMP]
        ready = {i: max((end[dep] for dep in lanes.deps[i]), default=0) for i in late}
        for i in sorted(late, key=lambda i: (-ready[i], -lanes.ns[i], i)):
            place, start[i] = _best_gap(on_comp, start, end, ready[i], lanes.ns[i])
            end[i] = start[i] + lanes.ns[i]
            on_comp.insert(place, i)
        # Tasks of no duration start and end at once: they must stand before what starts when they end.
        order = sorted(order + late, key=lambda i: (start[i], end[i], i))
    return order, max(end, default=0)


def _best_gap(on_comp: Sequence[int], start: Sequence[int], end: Sequence[int], ready: int, ns: int) -> tuple[int, int]:
    """(place in the lane, start) of the smallest idle time that holds ``ns`` from ``ready`` on, else of the end."""
    best: tuple[int, int, int] | None = None
    free = 0
    for place, i in enumerate(on_comp):
        begin = max(free, ready)
        room = start[i] - begin
        if room >= ns and (best is None or room < best[0]):
            best = (room, place, begin)
        free = end[i]
    return (len(on_comp), max(free, ready)) if best is None else best[1:]


def _listed(lanes: LaneGraph, rank: Sequence[int], deferred: Sequence[bool]) -> tuple[list[int], list[int], list[int]]:
    """(order, starts, ends) of event-driven list scheduling by rank, deferred tasks left out (their times stay 0)."""
    ns, lane_of, followers, key = lanes.ns, lanes.lane, lanes.followers, rank.__getitem__
    missing = [len(deps) for deps in lanes.deps]
    start, end = [0] * len(ns), [0] * len(ns)
    ready: tuple[list[int], list[int]] = ([], [])
    for i, count in enumerate(missing):
        if not count and not deferred[i]:
            ready[lane_of[i]].append(i)
    running = [-1, -1]
    busy_until = [0, 0]
    now = 0
    order: list[int] = []

    def finish(lane: int) -> None:
        for i in followers[running[lane]]:
            missing[i] -= 1
            if not missing[i] and not deferred[i]:
                ready[lane_of[i]].append(i)
        running[lane] = -1

    while True:
        started = True
        while started:
            started = False
            for lane in (COMM, COMP):
                if running[lane] < 0 and ready[lane]:
                    chosen = min(ready[lane], key=key)
                    ready[lane].remove(chosen)
                    order.append(chosen)
                    start[chosen] = now
                    end[chosen] = busy_until[lane] = now + ns[chosen]
                    running[lane] = chosen
                    started = True
                    if not ns[chosen]:
                        finish(lane)
        if running[COMP] < 0 and running[COMM] < 0:
            return order, start, end
        now = min(busy_until[lane] for lane in (COMP, COMM) if running[lane] >= 0)
        for lane in (COMM, COMP):
            if running[lane] >= 0 and busy_until[lane] == now:
                finish(lane)
