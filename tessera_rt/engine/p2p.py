"""Mailbox: activations and gradients between pipeline ranks. Per directed edge, first in first out, without tags.

Both ends know the order of an edge's messages from the plan. A send returns at once and moves its bytes when the
receiver has posted the receive; receives are posted ahead, up to ``window`` per edge. A sent tensor is kept until the
plan proves it received: a message that the receiver sent from a later action than the one that read it has come back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from tessera_rt.engine.mesh import Groups
from tessera_rt.engine.watchdog import FailureReporter
from tessera_rt.errors import Problem, ScheduleError, TransportError
from tessera_rt.plan import ActionKind, Message, Plan
from tessera_rt.tasks import Pass
from tessera_rt.waits import WaitError, wait


@dataclass(frozen=True, slots=True)
class _Sent:
    message: Message
    tensor: Tensor
    work: dist.Work


@dataclass(slots=True)
class _Outgoing:
    """An edge to ``target``: messages still to be sent, in order, and those not yet known to be received."""

    target: int
    group: dist.ProcessGroup
    unsent: deque[Message]
    kept: list[_Sent] = field(default_factory=list)


@dataclass(slots=True)
class _Incoming:
    """An edge from ``source``: messages without a posted receive, posted ones, and ones read before their turn."""

    source: int
    group: dist.ProcessGroup
    unposted: deque[Message]
    posted: deque[tuple[Message, Tensor, dist.Work]] = field(default_factory=deque)
    arrived: dict[Message, Tensor] = field(default_factory=dict)

    def unread(self) -> list[Message]:
        return [*self.arrived, *(posted[0] for posted in self.posted), *self.unposted]


class Mailbox:
    """Messages of one rank within a step: ``open_step``, any ``send`` and ``receive``, ``close_step``.

    ``dtype``, ``device``: of all messages. ``window``: receives posted ahead per edge. Waits end within ``timeout_s``
    with a TransportError that names this rank, the message, the other end and the first cause of the failure.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Groups,
        reporter: FailureReporter,
        *,
        dtype: torch.dtype,
        device: torch.device,
        timeout_s: float,
        window: int = 2,
    ) -> None:
        if window < 1:
            raise ScheduleError.of("mailbox", [Problem("window", window, "at least 1 receive posted ahead")])
        self._groups = groups
        self._reporter = reporter
        self._dtype, self._device = dtype, device
        self._timeout_s = timeout_s
        self._window = window
        self._action_at = _action_indices(plan)
        self._shapes: tuple[tuple[int, ...], ...] = ()
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[int, _Incoming] = {}

    def open_step(
        self,
        shapes: Sequence[tuple[int, ...]],
        outgoing: Sequence[Message],
        incoming: Mapping[int, Sequence[Message]],
    ) -> None:
        """Posts the first receives. ``shapes[m]``: of micro-batch m's messages, both ways.

        ``outgoing``: this rank's messages in the order sent. ``incoming[source]``: those of pipeline rank ``source`` to
        this rank, in the order sent.
        """
        self._shapes = tuple(tuple(shape) for shape in shapes)
        self._outgoing, self._incoming = {}, {}
        me = self._groups.pp_i
        for message in outgoing:
            if message.target not in self._outgoing:
                group = self._groups.edges[me, message.target]
                self._outgoing[message.target] = _Outgoing(message.target, group, deque())
            self._outgoing[message.target].unsent.append(message)
        for source, messages in sorted(incoming.items()):
            if messages:
                self._incoming[source] = _Incoming(source, self._groups.edges[source, me], deque(messages))
        for edge in self._incoming.values():
            for _ in range(self._window):
                self._post(edge)

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start sending; returns at once. The tensor must not be changed any more.

        Raises ScheduleError for a message out of its edge's order (the receiver would take it for another one), and for
        a tensor of another shape or dtype than the receiver expects.
        """
        edge = self._outgoing.get(message.target)
        expected = edge.unsent[0] if edge and edge.unsent else None
        problems: list[Problem] = []
        if edge is None or message != expected:
            allowed = f"the edge's next message, {_name(expected)}" if expected else "one of the step's messages"
            problems.append(Problem("message", _name(message), allowed))
        else:
            shape = self._shapes[message.microbatch]
            if tuple(tensor.shape) != shape or tensor.dtype != self._dtype:
                given = f"{tuple(tensor.shape)} {tensor.dtype}"
                problems.append(Problem(f"tensor of {_name(message)}", given, f"{shape} {self._dtype}"))
        if problems or edge is None:
            raise ScheduleError.of(f"send on {self._groups.name}", problems)
        edge.unsent.popleft()
        tensor = tensor.detach().contiguous()
        target = self._groups.global_rank(message.target)
        started = time.monotonic()
        try:
            work = dist.isend(tensor, dst=target, group=edge.group)
        except RuntimeError as error:
            raise self._lost(error, self._sending(message), target, started) from error
        assert work is not None
        edge.kept.append(_Sent(message, tensor, work))

    def receive(self, message: Message) -> Tensor:
        """The message's tensor, once it is there. Earlier messages of its edge that nobody read yet are kept for later.

        Raises ScheduleError for a message that does not come in this step or was read before.
        """
        edge = self._incoming.get(message.source)
        if edge is None or message not in edge.unread():
            problem = Problem("message", _name(message), "a message of the step that was not read yet")
            raise ScheduleError.of(f"receive on {self._groups.name}", [problem])
        while message not in edge.arrived:
            self._take(edge)
        return edge.arrived.pop(message)

    def close_step(self) -> None:
        """Wait until all that was sent is received. Raises ScheduleError if a message was not sent or not read."""
        problems = [
            Problem("not sent", _name(message), "sent within the step")
            for out in self._outgoing.values()
            for message in out.unsent
        ]
        problems += [
            Problem("not read", _name(message), "read within the step")
            for edge in self._incoming.values()
            for message in edge.unread()
        ]
        if problems:
            raise ScheduleError.of(f"end of step on {self._groups.name}", problems)
        for out in self._outgoing.values():
            while out.kept:
                self._release(out.kept[0])
                del out.kept[0]

    @property
    def kept(self) -> int:
        """Sent tensors that are still held."""
        return sum(len(edge.kept) for edge in self._outgoing.values())

    def _post(self, edge: _Incoming) -> None:
        """Post the receive of the edge's next message, if there is one."""
        if not edge.unposted:
            return
        message = edge.unposted.popleft()
        buffer = torch.empty(self._shapes[message.microbatch], dtype=self._dtype, device=self._device)
        source = self._groups.global_rank(edge.source)
        started = time.monotonic()
        try:
            work = dist.irecv(buffer, src=source, group=edge.group)
        except RuntimeError as error:
            raise self._lost(error, self._awaited(message), source, started) from error
        assert work is not None
        edge.posted.append((message, buffer, work))

    def _take(self, edge: _Incoming) -> None:
        """Wait for the edge's next message, and post another receive."""
        message, buffer, work = edge.posted.popleft()
        self._wait(work, self._awaited(message), self._groups.global_rank(edge.source))
        edge.arrived[message] = buffer
        self._post(edge)
        self._drop_received(message)

    def _drop_received(self, answer: Message) -> None:
        """``answer`` left its rank in a later action than the ones which read these messages: let go of them."""
        edge = self._outgoing.get(answer.source)
        if edge is None:
            return
        now = self._action_at[_sender_pass(answer)]
        for sent in [sent for sent in edge.kept if self._action_at[_reader_pass(sent.message)] < now]:
            self._release(sent)
            edge.kept.remove(sent)

    def _release(self, sent: _Sent) -> None:
        self._wait(sent.work, self._sending(sent.message), self._groups.global_rank(sent.message.target))

    def _wait(self, work: dist.Work, what: str, peer: int) -> None:
        try:
            wait(work, self._groups.name, what, (peer,), timeout_s=self._timeout_s)
        except WaitError as error:
            raise self._reporter.explained(error) from error.__cause__

    def _lost(self, error: RuntimeError, what: str, peer: int, started: float) -> TransportError:
        failed = WaitError.after(error, self._groups.name, what, (peer,), started=started, timeout_s=self._timeout_s)
        return self._reporter.explained(failed)

    def _awaited(self, message: Message) -> str:
        return f"{_name(message)} from {self._groups.name_of(message.source)}"

    def _sending(self, message: Message) -> str:
        return f"the receipt of {_name(message)} by {self._groups.name_of(message.target)}"


PassKey = tuple[Pass, int, int]  # F or B, stage, micro-batch


def _name(message: Message) -> str:
    return f"{message.pass_} of micro-batch {message.microbatch} for stage {message.to_stage}"


def _reader_pass(message: Message) -> PassKey:
    return message.pass_, message.to_stage, message.microbatch


def _sender_pass(message: Message) -> PassKey:
    return message.pass_, message.to_stage + (-1 if message.pass_ is Pass.F else 1), message.microbatch


def _action_indices(plan: Plan) -> dict[PassKey, int]:
    """For each F and B pass, the index of its action in its rank's list."""
    return {
        (Pass.F if part.kind is ActionKind.F else Pass.B, part.stage, part.microbatch): index
        for actions in plan.actions
        for index, action in enumerate(actions)
        for part in action.passes
        if part.kind in (ActionKind.F, ActionKind.B, ActionKind.I)
    }
