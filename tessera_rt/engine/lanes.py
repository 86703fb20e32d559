"""Lanes: where a task runs. On the CPU, COMP is the driver's own thread and COMM the outstanding collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from tessera_rt.engine.events import EventKind, EventLog, TaskRef
from tessera_rt.moe.steps import Pending, ReadyPending
from tessera_rt.waits import WaitError

T = TypeVar("T")


class Lanes(Protocol):
    """What a stage asks of a device. ``wait`` is called exactly once per issued collective, by its first consumer."""

    log: EventLog

    def compute(self, task: TaskRef, fn: Callable[[], T]) -> T:
        """Run a compute task."""
        ...

    def issue(self, task: TaskRef, fn: Callable[[], Pending]) -> Pending:
        """Start a collective."""
        ...

    def wait(self, task: TaskRef, pending: Pending) -> Any:
        """The collective's output, once it is there."""
        ...


class CpuLanes:
    """Real tasks on the CPU. ``serial`` (overlap off): every collective is waited for at once."""

    def __init__(self, log: EventLog, *, serial: bool) -> None:
        self.log = log
        self.serial = serial

    def compute(self, task: TaskRef, fn: Callable[[], T]) -> T:
        self.log.record(EventKind.START, task)
        result = fn()
        self.log.record(EventKind.END, task)
        return result

    def issue(self, task: TaskRef, fn: Callable[[], Pending]) -> Pending:
        self.log.record(EventKind.ISSUE, task)
        pending = fn()
        return _Waited(self.wait(task, pending)) if self.serial else pending

    def wait(self, task: TaskRef, pending: Pending) -> Any:
        if isinstance(pending, _Waited):
            return pending.output
        self.log.record(EventKind.WAIT, task)
        try:
            value = pending.wait()
        except WaitError as error:
            raise error.within(task) from error.__cause__
        self.log.record(EventKind.DONE, task)
        return value


class _Waited(ReadyPending):
    """A collective whose wait is in the log."""
