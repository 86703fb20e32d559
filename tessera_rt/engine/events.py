"""The event log: what the driver did, in sequence, and its conversion to a timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tessera_rt.tasks import Resource, parse_task_name
from tessera_rt.timeline import Span


class EventKind(StrEnum):
    """Compute tasks START and END; collectives are ISSUEd, WAITed for, and DONE when that wait returns.

    SEND and RECEIVED are messages between stages (task is then ``SEND_F``, ``RECV_B``, ...).
    """

    START = "start"
    END = "end"
    ISSUE = "issue"
    WAIT = "wait"
    DONE = "done"
    SEND = "send"
    RECEIVED = "received"


@dataclass(frozen=True, slots=True)
class TaskRef:
    """One task of one pass: name, virtual stage, micro-batch."""

    name: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.name} (stage {self.stage}, micro-batch {self.microbatch})"


@dataclass(frozen=True, slots=True)
class Event:
    """``ns`` is on the clock of the log; ``seq`` is the order in which the driver's thread acted."""

    seq: int
    kind: EventKind
    task: TaskRef
    ns: int


class EventLog:
    """Events of one step on one rank. ``clock`` returns ns (``time.perf_counter_ns``, or a virtual clock)."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        self._events: list[Event] = []

    def record(self, kind: EventKind, task: TaskRef, ns: int | None = None) -> None:
        self._events.append(Event(len(self._events), kind, task, self.clock() if ns is None else ns))

    def clear(self) -> None:
        self._events = []

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(self._events)


def to_spans(events: Iterable[Event], rank: int, *, origin_ns: int = 0) -> tuple[Span, ...]:
    """Spans of pipeline rank ``rank``: compute START to END, collectives ISSUE to DONE, times minus origin."""
    opened: dict[TaskRef, int] = {}
    spans: list[Span] = []
    for event in events:
        if event.kind in (EventKind.START, EventKind.ISSUE):
            opened[event.task] = event.ns
        elif event.kind in (EventKind.END, EventKind.DONE):
            spans.append(
                Span(
                    rank=rank,
                    lane=parse_task_name(event.task.name)[1].resource,
                    name=event.task.name,
                    stage=event.task.stage,
                    microbatch=event.task.microbatch,
                    start_ns=opened.pop(event.task) - origin_ns,
                    end_ns=event.ns - origin_ns,
                )
            )
    return tuple(spans)


def overlapped_collectives(events: Sequence[Event]) -> dict[TaskRef, tuple[TaskRef, ...]]:
    """For every collective: the compute tasks that started between its issue and the return of its wait."""
    found: dict[TaskRef, tuple[TaskRef, ...]] = {}
    issued: dict[TaskRef, list[TaskRef]] = {}
    for event in events:
        if event.kind is EventKind.ISSUE:
            issued[event.task] = []
        elif event.kind is EventKind.START:
            for tasks in issued.values():
                tasks.append(event.task)
        elif event.kind is EventKind.DONE:
            found[event.task] = tuple(issued.pop(event.task))
    return found


def comm_tasks(events: Iterable[Event]) -> tuple[TaskRef, ...]:
    """The collectives of a log in the order of their issue (must be equal on all ranks of a group)."""
    return tuple(
        e.task
        for e in events
        if e.kind is EventKind.ISSUE and parse_task_name(e.task.name)[1].resource is Resource.COMM
    )
