"""Devices: what executes tasks and carries messages. ``CpuDevice`` is real; the emulated one is in ``emulated.py``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tessera_rt.engine.events import Event, EventKind, EventLog, TaskRef, to_spans
from tessera_rt.engine.lanes import CpuLanes, Lanes
from tessera_rt.engine.loop import Mail
from tessera_rt.engine.mesh import Groups
from tessera_rt.engine.p2p import Mailbox
from tessera_rt.engine.watchdog import FailureReporter
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Message, Plan
from tessera_rt.timeline import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSetup:
    """What an engine hands to its device once. ``dtype``: of the values between stages."""

    plan: Plan
    spec: ModelSpec
    groups: Groups
    reporter: FailureReporter
    dtype: torch.dtype
    overlap: bool
    timeout_s: float


class Runtime(Protocol):
    """A device set up for one engine. Between ``open_step`` and ``close_step`` its lanes and mail may be used."""

    lanes: Lanes
    mail: Mail

    def open_step(
        self,
        shapes: Sequence[tuple[int, ...]],
        outgoing: Sequence[Message],
        incoming: Mapping[int, Sequence[Message]],
    ) -> None:
        """``shapes[m]``: shape of micro-batch m's value between stages; the messages of this rank in edge order."""
        ...

    def close_step(self) -> None:
        """Wait until every message is delivered."""
        ...

    def spans(self) -> tuple[Span, ...]:
        """What all pipeline ranks of the first column did in the last step (a collective call)."""
        ...

    def events(self) -> tuple[Event, ...]:
        """This rank's event log of the last step."""
        ...


class Device(Protocol):
    """``source`` names the origin of timelines (measured | emulated).

    ``emulates``: nothing is really computed, so plans with features that can only be simulated are welcome.
    """

    @property
    def source(self) -> str: ...

    @property
    def emulates(self) -> bool: ...

    def set_up(self, setup: DeviceSetup) -> Runtime: ...


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """gloo and plain torch; times are those of the machine's clock (comparable between processes of one host)."""

    source: str = "measured"
    emulates: bool = False

    def set_up(self, setup: DeviceSetup) -> Runtime:
        return CpuRuntime(setup)


class CpuRuntime:
    """Runs tasks where they are; see ``Runtime``."""

    def __init__(self, setup: DeviceSetup) -> None:
        self._groups = setup.groups
        self._log = EventLog(time.perf_counter_ns)
        self._box = Mailbox(
            setup.plan,
            setup.groups,
            setup.reporter,
            dtype=setup.dtype,
            device=torch.device("cpu"),
            timeout_s=setup.timeout_s,
        )
        self.lanes: Lanes = CpuLanes(self._log, serial=not setup.overlap)
        self.mail: Mail = LoggedMail(self._box, self._log)

    def open_step(
        self,
        shapes: Sequence[tuple[int, ...]],
        outgoing: Sequence[Message],
        incoming: Mapping[int, Sequence[Message]],
    ) -> None:
        self._log.clear()
        self._box.open_step(shapes, tuple(outgoing), {source: tuple(queue) for source, queue in incoming.items()})

    def close_step(self) -> None:
        self._box.close_step()

    def events(self) -> tuple[Event, ...]:
        return self._log.events

    def spans(self) -> tuple[Span, ...]:
        logs = first_column(self._groups, self._log.events)
        origin = min((event.ns for log in logs for event in log), default=0)
        spans = [span for rank, log in enumerate(logs) for span in to_spans(log, rank, origin_ns=origin)]
        return tuple(spans + _link_spans(logs, origin))


class LoggedMail:
    """A mailbox whose traffic is in the event log."""

    def __init__(self, box: Mailbox, log: EventLog) -> None:
        self._box = box
        self._log = log

    def send(self, message: Message, tensor: Tensor) -> None:
        self._log.record(EventKind.SEND, message_ref(message))
        self._box.send(message, tensor)

    def receive(self, message: Message) -> Tensor:
        tensor = self._box.receive(message)
        self._log.record(EventKind.RECEIVED, message_ref(message))
        return tensor


def message_ref(message: Message) -> TaskRef:
    """``SEND_F`` or ``SEND_B`` of the stage that sends."""
    return TaskRef(f"SEND_{message.pass_}", message.from_stage, message.microbatch)


def first_column(groups: Groups, mine: tuple[Event, ...]) -> list[tuple[Event, ...]]:
    """The logs of the ranks with dp_i = ep_i = 0, by pipeline rank (a collective call over the world)."""
    logs: list[tuple[Event, ...]] = [()] * groups.mesh.world
    dist.all_gather_object(logs, mine if (groups.dp_i, groups.ep_i) == (0, 0) else (), group=groups.world)
    return [logs[groups.mesh.rank(pp_i, 0, 0)] for pp_i in range(groups.mesh.pp)]


def _link_spans(logs: Sequence[Sequence[Event]], origin: int) -> list[Span]:
    received = {e.task: e.ns for log in logs for e in log if e.kind is EventKind.RECEIVED}
    return [
        Span(
            rank=rank,
            lane="LINK",
            name=event.task.name,
            stage=event.task.stage,
            microbatch=event.task.microbatch,
            start_ns=event.ns - origin,
            end_ns=received[event.task] - origin,
        )
        for rank, log in enumerate(logs)
        for event in log
        if event.kind is EventKind.SEND and event.task in received
    ]
