"""+Defer: +Align, and every W that gets in the way of a backbone task is tried elsewhere.

Tessera (OSDI '26, algorithm 1) defers a movable task that would extend the pair's makespan and back-fills it later.
Whether one would is found by scheduling again: a W that delays a backbone task is taken out, the rest is listed anew, the
W goes into the best-fitting idle time behind its parent (else to the end), and the deferral stays if the makespan falls.
Deferring whenever a W delays any backbone task, without that test, was tried and is worse than not deferring at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from tessera_rt.scheduler.lane_graph import COMM, COMP, LaneGraph


def defer_order(lanes: LaneGraph, *, passes: int = 2) -> list[int]:
    """Positions of the tasks in order. ``passes``: how often all W are looked at (it ends when none helps).

    The work is about one list scheduling per W that delays a backbone task: well under a millisecond for a pair of
    four layers each.
    """
    deferred = [False] * len(lanes)
    best, makespan = _placed(lanes, deferred)
    bound = lanes.bound()
    for _ in range(passes):
        improved = False
        tried: set[int] = set()
        while makespan > bound:
            task = next((i for i in _delaying(lanes, best, deferred) if i not in tried), None)
            if task is None:
                break
            tried.add(task)
            deferred[task] = not deferred[task]
            order, length = _placed(lanes, deferred)
            if length < makespan:
                best, makespan, improved = order, length, True
            else:
                deferred[task] = not deferred[task]
        if not improved:
            break
    return best


def _delaying(lanes: LaneGraph, order: Sequence[int], deferred: Sequence[bool]) -> list[int]:
    """W tasks whose bit may matter: deferred ones, and those that run while the next backbone task waits for the lane."""
    ends = [0] * len(lanes)
    free = [0, 0]
    waiting: list[int] = []  # W tasks since the last backbone task on COMP
    found: list[int] = []
    for i in order:
        lane = lanes.lane[i]
        ready = max((ends[dep] for dep in lanes.deps[i]), default=0)
        start = max(ready, free[lane])
        ends[i] = free[lane] = start + lanes.ns[i]
        if lane == COMM:
            continue
        if lanes.movable[i]:
            waiting.append(i)
            if deferred[i]:
                found.append(i)
        else:
            found += [w for w in waiting if ends[w] > ready and not deferred[w]]
            waiting.clear()
    return found


def _placed(lanes: LaneGraph, deferred: Sequence[bool]) -> tuple[list[int], int]:
    """Order and makespan with the deferred tasks back-filled."""
    order, start, end = list_aligned(lanes, deferred)
    late = [i for i in range(len(lanes)) if deferred[i]]
    if late:
        on_comp = [i for i in order if lanes.lane[i] == COMP]
        ready = {i: max((end[dep] for dep in lanes.deps[i]), default=0) for i in late}
        for i in sorted(late, key=lambda i: (-ready[i], -lanes.ns[i], i)):
            place, start[i] = _best_gap(on_comp, start, end, ready[i], lanes.ns[i])
            end[i] = start[i] + lanes.ns[i]
            on_comp.insert(place, i)
        order += late
        order.sort(key=lambda i: (start[i], end[i], i))
    return order, max(end, default=0)


def _best_gap(
    on_comp: Sequence[int], start: Sequence[int], end: Sequence[int], ready: int, ns: int
) -> tuple[int, int]:
    """(place in the lane, start) of the smallest idle time that holds a task of ``ns`` from ``ready`` on, else the end."""
    best = None
    free = 0
    for place, i in enumerate(on_comp):
        begin = max(free, ready)
        room = start[i] - begin
        if room >= ns and (best is None or room < best[0]):
            best = (room, place, begin)
        free = end[i]
    return (len(on_comp), max(free, ready)) if best is None else best[1:]


def list_aligned(lanes: LaneGraph, deferred: Sequence[bool]) -> tuple[list[int], list[int], list[int]]:
    """(order, starts, ends) of +Align with the largest W first, without the deferred tasks (their times stay 0)."""
    ns, lane_of, movable, tail, followers = lanes.ns, lanes.lane, lanes.movable, lanes.tail, lanes.followers
    count = len(ns)
    missing = [len(deps) for deps in lanes.deps]
    start, end = [0] * count, [0] * count
    backbone: tuple[list[int], list[int]] = ([], [])  # ready tasks of each lane
    weights: tuple[list[int], list[int]] = ([], [])
    for i in range(count):
        if not missing[i] and not deferred[i]:
            (weights if movable[i] else backbone)[lane_of[i]].append(i)
    running = [-1, -1]
    busy_until = [0, 0]
    now = 0
    order: list[int] = []
    while True:
        started = True
        while started:
            started = False
            for lane in (COMM, COMP):
                ready = backbone[lane] or weights[lane]
                if running[lane] >= 0 or not ready:
                    continue
                if len(ready) == 1:
                    chosen = ready.pop()
                else:
                    window = busy_until[1 - lane] - now if running[1 - lane] >= 0 else 0
                    chosen = _chosen(ready, window, lanes)
                    ready.remove(chosen)
                order.append(chosen)
                start[chosen] = now
                end[chosen] = busy_until[lane] = now + ns[chosen]
                running[lane] = chosen
                started = True
                if not ns[chosen]:
                    _release(chosen, followers, missing, deferred, weights, backbone, movable, lane_of)
                    running[lane] = -1
        if running[COMP] < 0 and running[COMM] < 0:
            return order, start, end
        now = min(busy_until[lane] for lane in (COMP, COMM) if running[lane] >= 0)
        for lane in (COMM, COMP):
            if running[lane] >= 0 and busy_until[lane] == now:
                _release(running[lane], followers, missing, deferred, weights, backbone, movable, lane_of)
                running[lane] = -1


def _chosen(ready: Sequence[int], window: int, lanes: LaneGraph) -> int:
    """Backbone by gap-fit (longest remaining chain with the other lane idle); W by size."""
    ns, tail = lanes.ns, lanes.tail
    if lanes.movable[ready[0]]:
        return min(ready, key=lambda i: (-ns[i], i))
    if window:
        return min(ready, key=lambda i: (ns[i] > 0, abs(ns[i] - window), -tail[i], i))
    return min(ready, key=lambda i: (-tail[i], i))


def _release(
    done: int,
    followers: Sequence[Sequence[int]],
    missing: list[int],
    deferred: Sequence[bool],
    weights: tuple[list[int], list[int]],
    backbone: tuple[list[int], list[int]],
    movable: Sequence[bool],
    lane_of: Sequence[int],
) -> None:
    for i in followers[done]:
        missing[i] -= 1
        if not missing[i] and not deferred[i]:
            (weights if movable[i] else backbone)[lane_of[i]].append(i)
