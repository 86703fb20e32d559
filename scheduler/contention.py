"""An action's order under SM contention: compute runs slower while communication of the same rank runs."""

from __future__ import annotations

from collections.abc import Sequence

from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.scheduler.lane_graph import COMM, COMP
from tessera_rt.scheduler.list_schedule import evaluate
from tessera_rt.tasks import Resource, TaskGraph


def evaluate_contended(order: Sequence[str], graph: TaskGraph, contention: float) -> tuple[dict[str, int], int]:
    """Start times (ns, from the action's start) and length of an order, by the simulator's rate model.

    COMP progresses at rate 1 / (1 + ``contention``) while a COMM task runs, COMM always at rate 1; ends are rounded to
    ns. Without contention this is ``evaluate``. Raises ScheduleError as ``evaluate`` does, and for a contention that is
    negative, infinite or NaN.
    """
    starts, ends = contended_times(order, graph, contention)
    return starts, max(ends.values(), default=0)


def contended_times(order: Sequence[str], graph: TaskGraph, contention: float) -> tuple[dict[str, int], dict[str, int]]:
    """The same, as start and end of each task."""
    if not 0 <= contention < float("inf"):
        raise ScheduleError.of("contention", [Problem("contention", contention, "a finite number of at least 0")])
    starts, _ = evaluate(order, graph)
    if not contention:
        return starts, {name: start + graph.by_name[name].ns for name, start in starts.items()}
    return _contended(order, graph, 1 + contention)


def _contended(order: Sequence[str], graph: TaskGraph, stretch: float) -> tuple[dict[str, int], dict[str, int]]:
    tasks = [graph.by_name[name] for name in order]
    queues = (
        [task for task in tasks if task.resource is Resource.COMP],
        [task for task in tasks if task.resource is Resource.COMM],
    )
    position = [0, 0]
    end: list[int | None] = [None, None]  # of the task that runs on each lane
    work, since = 0.0, 0  # what the running COMP task had left, in ns at full rate, when the rate last changed
    starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    now = 0

    def start(lane: int) -> bool:
        """Starts the lane's next task if the lane is idle and the task ready."""
        nonlocal work, since
        if end[lane] is not None or position[lane] == len(queues[lane]):
            return False
        task = queues[lane][position[lane]]
        if any(dep not in ends for dep in task.deps):
            return False
        position[lane] += 1
        starts[task.name] = now
        end[lane] = now + task.ns
        if lane == COMP:
            work, since = task.ns, now
            if end[COMM] is not None:
                end[COMP] = round(now + task.ns * stretch)
        return True

    def change_rate(contended: bool) -> None:
        """From now on COMM runs, or no longer does."""
        nonlocal work, since
        if end[COMP] is not None:
            work = max(0.0, work - (now - since) / (1.0 if contended else stretch))
            since = now
            end[COMP] = max(now, round(now + work * (stretch if contended else 1.0)))

    if start(COMM):
        change_rate(True)
    start(COMP)
    while running := [lane for lane in (COMP, COMM) if end[lane] is not None]:
        lane = min(running, key=lambda lane: (end[lane], lane))
        ended = end[lane]
        assert ended is not None
        now = ended
        end[lane] = None
        ends[queues[lane][position[lane] - 1].name] = now
        started = start(COMM)
        if started != (lane == COMM):
            change_rate(started)
        start(COMP)
    return starts, ends
