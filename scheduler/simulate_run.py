"""The simulator's event loop: time goes from one completion to the next over all ranks.

Events are the end of a task and the arrival of a message. Lanes are first in, first out, so nothing is decided here: a
lane starts its next task as soon as the task's dependencies have ended.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.scheduler.simulate_program import COMM, COMP, ActionRun, LaneTask, Program

_ARRIVAL = 2  # event codes: COMP and COMM for the end of that lane's task, and this


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message's way over an edge, [start_ns, end_ns), end = arrival."""

    source: int
    number: int  # pass whose output it carries
    start_ns: int
    end_ns: int


def run_program(program: Program, contention: float) -> tuple[int, list[Transfer]]:
    """Runs the program: fills the start and end times (ns) of its actions; returns the step's length and the transfers.

    ``contention`` c: a COMP task progresses at rate 1/(1+c) while a COMM task of its rank runs; its end is rounded to
    ns. Raises ScheduleError when ranks wait for each other for ever.
    """
    passes = program.passes
    ranks = len(program.runs)
    queues: list[tuple[list[tuple[ActionRun, LaneTask]], ...]] = [
        tuple([(run, task) for run in runs for task in run.shape.lanes[lane]] for lane in (COMP, COMM))
        for runs in program.runs
    ]
    position = [[0, 0] for _ in range(ranks)]
    end_of: list[list[int]] = [[-1, -1] for _ in range(ranks)]  # planned end of the running task; -1: the lane is idle
    work_left = [0.0] * ranks  # of the running COMP task at time ``work_seen``, in ns at full rate
    work_seen = [0] * ranks
    stretch = 1.0 + contention
    events: list[tuple[int, int, int]] = []
    push, pop = heapq.heappush, heapq.heappop
    # Inputs that a pass still waits for: the neighbour's output, and for a backward its own forward.
    signals = {number: number % 2 + (passes.previous(number) >= 0) for number in program.place}
    sinks_left = {number: run.shape.sinks[part] for number, (run, part) in program.place.items()}
    ready_at: dict[int, int] = {}  # finished passes with a message
    edge_next = [0] * len(program.edges)
    edge_free = [0] * len(program.edges)
    transfers: list[Transfer] = []

    def finish(number: int, now: int) -> None:
        """The output of a pass exists."""
        if not number % 2:
            signal(number + 1, now)  # its backward may use what it saved
        edge = program.edge_of.get(number)
        if edge is None:
            signal(passes.next(number), now)
            return
        ready_at[number] = now
        sends = program.edges[edge].sends
        while edge_next[edge] < len(sends) and sends[edge_next[edge]] in ready_at:
            sent = sends[edge_next[edge]]
            boundary = passes.stage(sent) - sent % 2
            start = max(ready_at[sent], edge_free[edge])
            edge_free[edge] = start + program.occupancy_ns[boundary]
            arrival = edge_free[edge] + program.latency_ns
            transfers.append(Transfer(program.edges[edge].source, sent, start, arrival))
            push(events, (arrival, _ARRIVAL, passes.next(sent)))
            edge_next[edge] += 1

    def signal(number: int, now: int) -> None:
        """One of the inputs of a pass is there."""
        if number not in signals:
            return  # there is no such pass
        signals[number] -= 1
        if signals[number] == 0:
            arrive(number, now)

    def arrive(number: int, now: int) -> None:
        run, part = program.place[number]
        run.ends[len(run.starts) + part] = now
        if not sinks_left[number]:
            finish(number, now)  # an empty chunk passes its input on

    def start(rank: int, lane: int, now: int) -> bool:
        """Starts the next task of an idle lane if it can."""
        queue = queues[rank][lane]
        if position[rank][lane] == len(queue):
            return False
        run, task = queue[position[rank][lane]]
        ends = run.ends
        for dep in task.deps:
            if ends[dep] < 0:
                return False
        position[rank][lane] += 1
        run.starts[task.index] = now
        end = now + task.ns
        if contention and lane == COMP:
            work_left[rank], work_seen[rank] = task.ns, now
            if end_of[rank][COMM] >= 0:
                end = round(now + task.ns * stretch)
        end_of[rank][lane] = end
        push(events, (end, lane, rank))
        return True

    def change_rate(rank: int, now: int, comm_runs: bool) -> None:
        """A COMM task begins to run beside the rank's COMP task, or no longer does."""
        if end_of[rank][COMP] < 0:
            return
        elapsed = now - work_seen[rank]
        work_left[rank] = max(0.0, work_left[rank] - (elapsed if comm_runs else elapsed / stretch))
        work_seen[rank] = now
        end_of[rank][COMP] = max(now, round(now + work_left[rank] * (stretch if comm_runs else 1.0)))
        push(events, (end_of[rank][COMP], COMP, rank))

    for number in [number for number, left in signals.items() if not left]:  # forwards of the first stage
        arrive(number, 0)
    for rank in range(ranks):
        start(rank, COMP, 0)
        if start(rank, COMM, 0) and contention:
            change_rate(rank, 0, True)
    length = 0
    while events:
        now, code, subject = pop(events)
        comm_ended = False
        if code == _ARRIVAL:
            length = now
            if subject not in program.place:
                continue
            signal(subject, now)
            rank = program.place[subject][0].rank
        else:
            rank = subject
            if end_of[rank][code] != now:
                continue  # its end was planned anew when the rate changed
            length = now
            end_of[rank][code] = -1
            comm_ended = code == COMM
            run, task = queues[rank][code][position[rank][code] - 1]
            run.ends[task.index] = now
            if task.sink >= 0:
                number = run.passes[task.sink]
                sinks_left[number] -= 1
                if not sinks_left[number]:
                    finish(number, now)
        lanes = end_of[rank]
        if lanes[COMM] < 0:
            comm_started = start(rank, COMM, now)
            if contention and comm_started != comm_ended:
                change_rate(rank, now, comm_started)
        if lanes[COMP] < 0:
            start(rank, COMP, now)
    problems = _stuck(program, queues, position, signals, sinks_left)
    if problems:
        raise ScheduleError("schedule: deadlock, ranks wait for each other for ever", problems)
    return length, transfers


def _stuck(
    program: Program,
    queues: list[tuple[list[tuple[ActionRun, LaneTask]], ...]],
    position: list[list[int]],
    signals: dict[int, int],
    sinks_left: dict[int, int],
) -> list[Problem]:
    """One problem per lane that did not come to its end, and per empty chunk that got no input: what it waits for."""

    def missing_input(number: int) -> str:
        """Which input of a pass is missing, and on whom it depends."""
        own_forward = number - 1 if number % 2 else -1
        neighbour = program.passes.previous(number)
        unfinished = [n for n in (own_forward, neighbour) if n >= 0 and (signals.get(n, 1) or sinks_left[n])]
        if not unfinished:
            return f"{program.passes.name(neighbour)}, whose message waits behind another one that was not sent"
        waited = unfinished[0]
        where = f" of rank {program.place[waited][0].rank}" if waited in program.place else ", which no rank runs"
        return program.passes.name(waited) + where

    problems: list[Problem] = []
    allowed = "able to start: it waits for {} for ever"
    for rank, lanes in enumerate(queues):
        for lane, queue in enumerate(lanes):
            if position[rank][lane] == len(queue):
                continue
            run, task = queue[position[rank][lane]]
            names = [t.name for t in run.shape.tasks]
            dep = next(dep for dep in task.deps if run.ends[dep] < 0)
            waited = names[dep] if dep < len(names) else missing_input(run.passes[dep - len(names)])
            field = f"rank {rank}, action {run.action}"
            problems.append(Problem(field, names[task.index], allowed.format(waited)))
    for number, (run, part) in program.place.items():
        if signals[number] and not run.shape.sinks[part]:
            field = f"rank {run.rank}, action {run.action}"
            problems.append(Problem(field, program.passes.name(number), allowed.format(missing_input(number))))
    return problems
