"""Times under contention, resolved after a step from the gathered logs of all ranks.

How long a compute task takes depends on which collectives of its rank run beside it, and those on other tasks. The
times are the fixed point of one sweep that recomputes every start and end from the last estimates. Causality makes
it unique, and sweeps converge because each one settles at least the next event in time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from tessera_rt.engine.events import TaskRef
from tessera_rt.errors import ScheduleError
from tessera_rt.plan import Message

Source = TaskRef | Message
MAX_SWEEPS = 10_000
_GRID = 1024  # steps per ns


@dataclass(frozen=True, slots=True)
class Record:
    """One task as logged: its duration alone, what it waits for, and (collectives) the global ranks that take part.

    ``previous``: the task before it on its lane (on its rank, without overlap). ``virtual_start_ns``: uncontended.
    """

    task: TaskRef
    comm: bool
    ns: int
    previous: TaskRef | None
    sources: tuple[Source, ...]
    members: tuple[int, ...]
    virtual_start_ns: int


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """One message as logged by its sender: what it waits for and how long the edge and the way take."""

    message: Message
    receiver: int  # global rank
    sources: tuple[Source, ...]
    occupancy_ns: int
    latency_ns: int
    virtual_start_ns: int


@dataclass(frozen=True, slots=True)
class RankLog:
    """What one global rank logged in a step, in order."""

    records: tuple[Record, ...]
    links: tuple[LinkRecord, ...]


class _Resolver:
    def __init__(self, logs: Mapping[int, RankLog], contention: float) -> None:
        self.logs = logs
        self.slowdown = 1.0 + contention
        self.times: dict[tuple[int, TaskRef], tuple[float, float]] = {}
        self.ready: dict[tuple[int, TaskRef], float] = {}
        self.sent: dict[tuple[int, Message], tuple[float, float]] = {}  # by receiver: start, arrival
        self.ns = {(rank, r.task): r.ns for rank, log in logs.items() for r in log.records}
        items: list[tuple[int, Record | LinkRecord]] = []
        for rank, log in logs.items():
            items += ((rank, record) for record in log.records)
            items += ((rank, link) for link in log.links)
        # A stable sort keeps each rank's own order among items that start at the same time.
        self.order = sorted(items, key=lambda entry: entry[1].virtual_start_ns)

    def sweep(self) -> bool:
        """Recompute everything once; whether anything changed."""
        busy = self._collective_intervals()
        edge_free: dict[tuple[int, int], float] = {}
        changed = False
        for rank, item in self.order:
            ready = max((self._time(rank, source) for source in item.sources), default=0.0)
            if isinstance(item, LinkRecord):
                edge = (rank, item.receiver)
                start = max(ready, edge_free.get(edge, 0.0))
                edge_free[edge] = start + item.occupancy_ns
                new = (start, start + item.occupancy_ns + item.latency_ns)
                changed |= self.sent.get((item.receiver, item.message)) != new
                self.sent[item.receiver, item.message] = new
                continue
            if item.previous is not None:
                ready = max(ready, self._end(rank, item.previous))
            key = (rank, item.task)
            if item.comm:
                self.ready[key] = ready
                start = max(self.ready.get((member, item.task), 0.0) for member in item.members)
                new = (start, start + max(self.ns[member, item.task] for member in item.members))
            else:
                new = (ready, _on_grid(self._end_of_work(ready, item.ns, *busy[rank])))
            changed |= self.times.get(key) != new
            self.times[key] = new
        return changed

    def _time(self, rank: int, source: Source) -> float:
        if isinstance(source, Message):
            return self.sent.get((rank, source), (0.0, 0.0))[1]
        return self._end(rank, source)

    def _end(self, rank: int, task: TaskRef) -> float:
        return self.times.get((rank, task), (0.0, 0.0))[1]

    def _collective_intervals(self) -> dict[int, tuple[list[float], list[float]]]:
        """Starts and ends of the collectives of each rank, sorted, from the last estimates."""
        intervals: dict[int, tuple[list[float], list[float]]] = {}
        for rank, log in self.logs.items():
            spans = sorted(self.times[rank, r.task] for r in log.records if r.comm and (rank, r.task) in self.times)
            intervals[rank] = ([start for start, _ in spans], [end for _, end in spans])
        return intervals

    def _end_of_work(self, start: float, work: float, starts: Sequence[float], ends: Sequence[float]) -> float:
        """When ``work`` ns of compute that begin at ``start`` are done, slowed inside the given intervals."""
        now, i = start, max(bisect_right(starts, start) - 1, 0)
        while work > 0.0:
            while i < len(starts) and ends[i] <= now:
                i += 1
            if i == len(starts):
                return now + work
            if starts[i] > now:
                free = min(work, starts[i] - now)
                now, work = now + free, work - free
            else:
                needed = work * self.slowdown
                if needed <= ends[i] - now:
                    return now + needed
                work -= (ends[i] - now) / self.slowdown
                now = ends[i]
        return now


def _on_grid(ns: float) -> float:
    """The next multiple of 1/1024 ns: a task that begins when another ends must never seem to begin before that."""
    return ceil(ns * _GRID) / _GRID


def resolve(
    logs: Mapping[int, RankLog], contention: float
) -> tuple[dict[tuple[int, TaskRef], tuple[int, int]], dict[tuple[int, Message], tuple[int, int]]]:
    """Start and end (ns) of every (global rank, task), and start and arrival of every (receiver, message).

    Raises ScheduleError if the sweeps do not settle (a log that contradicts itself).
    """
    resolver = _Resolver(logs, contention)
    for _ in range(MAX_SWEEPS):
        if not resolver.sweep():
            break
    else:
        raise ScheduleError(f"contention: times did not settle in {MAX_SWEEPS} sweeps")
    times = {key: (round(start), round(end)) for key, (start, end) in resolver.times.items()}
    sent = {key: (round(start), round(end)) for key, (start, end) in resolver.sent.items()}
    return times, sent
