"""List scheduling: the order in which the tasks of one action go to a rank's two lanes.

Event driven over the two resources COMP and COMM: whenever a lane is idle and has ready tasks, one of them is chosen
and started; time then moves to the next completion. The methods (FIFO and +Align of Tessera, OSDI '26, algorithm 1)
differ in the choice:

- ``fifo``: the task that has been ready longest, ties by the graph's order;
- ``align``: backbone (not movable) tasks first; among them *gap-fit*, the task whose duration is closest to the time
  the other lane is still busy, or, with the other lane idle, the task with the longest remaining chain. Movable W tasks
  fill the lane when no backbone task is ready, chosen by the same fit (the largest with the other lane idle).

No choice looks ahead, so ``align`` alone could lose to ``fifo``; ``list_schedule`` returns the better one. A third
method, ``megatron``, chooses nothing: it takes the order of ``fixed_order.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.plan import Interleaving
from tessera_rt.scheduler.fixed_order import fixed_order
from tessera_rt.scheduler.graphs import tails
from tessera_rt.scheduler.validate import validate
from tessera_rt.tasks import Resource, TaskGraph

METHODS = ("fifo", "align", "megatron")

# Arguments: the ready tasks (by position in the graph), for how long the other lane is still busy (0: idle), and for
# every task since when it has been ready. Result: the one to start.
_Select = Callable[[Sequence[int], int, Sequence[int]], int]


def list_schedule(graph: TaskGraph, key: str, *, method: str = "align", comm_sms: int = 0) -> Interleaving:
    """The interleaving of ``graph`` by ``method`` (``fifo``, ``align`` or ``megatron``), checked by ``validate``.

    ``method="align"`` is never longer than ``"fifo"``: the result's ``method`` says which of the two it is. Equal input
    gives equal output. Raises ScheduleError for another method.
    """
    if method not in METHODS:
        raise ScheduleError.of("list schedule", [Problem("method", method, f"one of {', '.join(METHODS)}")])
    if method == "megatron":
        return interleaving(fixed_order(graph), graph, key, method="megatron", comm_sms=comm_sms)
    best = interleaving(_list(graph, _fifo), graph, key, method="fifo", comm_sms=comm_sms)
    if method == "align":
        aligned = interleaving(_list(graph, _align(graph)), graph, key, method="align", comm_sms=comm_sms)
        if aligned.makespan_ns <= best.makespan_ns:
            best = aligned
    return best


def interleaving(
    order: Sequence[str], graph: TaskGraph, key: str, *, method: str = "given", comm_sms: int = 0
) -> Interleaving:
    """An order of the graph's tasks as an Interleaving with predicted times, its tasks listed by start time.

    Within each lane the given order stays. Raises ScheduleError when the order is not a topological order of all tasks.
    """
    starts, makespan = evaluate(order, graph)
    place = {name: i for i, name in enumerate(order)}
    # At equal starts COMM comes first, unless it waits for a task of no duration that starts at the same moment.
    by_start = sorted(order, key=lambda name: (starts[name], place[name]))
    listed = _comm_first(by_start, graph, starts)
    result = Interleaving(
        key=key,
        order=tuple(listed),
        starts_ns=tuple(starts[name] for name in listed),
        makespan_ns=makespan,
        comm_sms=comm_sms,
        method=method,
    )
    validate(result, graph)
    return result


def canonical(graph: TaskGraph, key: str, *, comm_sms: int = 0) -> Interleaving:
    """The graph's own order with one task after another on one lane: what runs with overlap off (method ``serial``)."""
    starts, now = [], 0
    for task in graph.tasks:
        starts.append(now)
        now += task.ns
    result = Interleaving(
        key=key, order=graph.names, starts_ns=tuple(starts), makespan_ns=now, comm_sms=comm_sms, method="serial"
    )
    validate(result, graph)
    return result


def evaluate(order: Sequence[str], graph: TaskGraph) -> tuple[dict[str, int], int]:
    """Start times (ns, from the action's start) and length of an order: each lane runs its tasks first in, first out.

    A task starts as soon as its lane is free and its dependencies have ended; all inputs are there at time 0. Raises
    ScheduleError when the order is not a topological order of all the graph's tasks.
    """
    starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    free = {Resource.COMP: 0, Resource.COMM: 0}
    if len(order) != len(graph.tasks):
        raise ScheduleError.of(
            "order", [Problem("tasks", len(order), f"all {len(graph.tasks)} tasks of the graph, once")]
        )
    for name in order:
        task = graph.by_name.get(name)
        if task is None or name in starts:
            raise ScheduleError.of("order", [Problem("task", name, "a task of the graph, named once")])
        late = [dep for dep in task.deps if dep not in ends]
        if late:
            raise ScheduleError.of("order", [Problem(name, name, f"behind {', '.join(late)}, which it depends on")])
        start = max(free[task.resource], *(ends[dep] for dep in task.deps)) if task.deps else free[task.resource]
        starts[name] = start
        free[task.resource] = ends[name] = start + task.ns
    return starts, max(free.values())


def _comm_first(by_start: list[str], graph: TaskGraph, starts: dict[str, int]) -> list[str]:
    """Tasks by start time, COMM first among equals as far as dependencies between tasks of no duration allow."""
    listed: list[str] = []
    done: set[str] = set()
    first = 0
    while first < len(by_start):
        last = first
        while last < len(by_start) and starts[by_start[last]] == starts[by_start[first]]:
            last += 1
        lanes: dict[Resource, list[str]] = {Resource.COMM: [], Resource.COMP: []}
        for name in by_start[first:last]:
            lanes[graph.by_name[name].resource].append(name)
        while lanes[Resource.COMM] or lanes[Resource.COMP]:
            lane = next(
                queue for queue in lanes.values() if queue and all(d in done for d in graph.by_name[queue[0]].deps)
            )
            done.add(lane[0])
            listed.append(lane.pop(0))
        first = last
    return listed


def _fifo(ready: Sequence[int], window: int, since: Sequence[int]) -> int:
    return min(ready, key=lambda i: (since[i], i))


def _align(graph: TaskGraph) -> _Select:
    after = tails(graph)
    ns = [task.ns for task in graph.tasks]
    tail = [after[task.name] for task in graph.tasks]
    movable = [task.movable for task in graph.tasks]

    def select(ready: Sequence[int], window: int, since: Sequence[int]) -> int:
        backbone = [i for i in ready if not movable[i]]
        if window:
            return min(backbone or ready, key=lambda i: (ns[i] > 0, abs(ns[i] - window), -tail[i], i))
        return min(backbone or ready, key=lambda i: (-tail[i], i))

    return select


def _list(graph: TaskGraph, select: _Select) -> list[str]:
    """Tasks in the order in which event-driven list scheduling starts them."""
    tasks = graph.tasks
    index = {name: i for i, name in enumerate(graph.names)}
    followers: list[list[int]] = [[] for _ in tasks]
    missing = [len(task.deps) for task in tasks]
    for i, task in enumerate(tasks):
        for dep in task.deps:
            followers[index[dep]].append(i)
    lane_of = [0 if task.resource is Resource.COMM else 1 for task in tasks]
    ready: tuple[list[int], list[int]] = ([], [])
    since = [0] * len(tasks)
    for i in range(len(tasks)):
        if not missing[i]:
            ready[lane_of[i]].append(i)
    running: list[int | None] = [None, None]
    busy_until = [0, 0]
    now = 0
    started: list[str] = []

    def finish(lane: int) -> None:
        task = running[lane]
        assert task is not None
        running[lane] = None
        for follower in followers[task]:
            missing[follower] -= 1
            if not missing[follower]:
                ready[lane_of[follower]].append(follower)
                since[follower] = now

    while True:
        moved = True
        while moved:
            moved = False
            for lane in (0, 1):
                if running[lane] is not None or not ready[lane]:
                    continue
                window = busy_until[1 - lane] - now if running[1 - lane] is not None else 0
                chosen = select(ready[lane], window, since)
                ready[lane].remove(chosen)
                started.append(tasks[chosen].name)
                running[lane], busy_until[lane] = chosen, now + tasks[chosen].ns
                moved = True
                if not tasks[chosen].ns:
                    finish(lane)
        ends = [busy_until[lane] for lane in (0, 1) if running[lane] is not None]
        if not ends:
            break
        now = min(ends)
        for lane in (0, 1):
            if running[lane] is not None and busy_until[lane] == now:
                finish(lane)
    assert len(started) == len(tasks), "a task graph has no cycle"
    return started
