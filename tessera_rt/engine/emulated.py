"""The emulated device: real processes, messages and driver, but time is a virtual clock per lane.

Task durations come from a cost table; a stamp travels with every message, and the latest one is taken at each receive
and each collective. So a small machine runs a pipeline of many ranks without noise. The rules are in
``docs/timing.md``; the simulator implements them on its own. With contention, the stamps give the order of the work,
and the times are resolved from the gathered logs after the step (``contention.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tessera_rt.costs import CostTable
from tessera_rt.engine.contention import LinkRecord, RankLog, Record, Source, resolve
from tessera_rt.engine.device import DeviceSetup, Runtime
from tessera_rt.engine.events import Event, EventKind, EventLog, TaskRef
from tessera_rt.engine.lanes import Lanes
from tessera_rt.engine.loop import Mail
from tessera_rt.engine.mesh import Groups
from tessera_rt.engine.p2p import Mailbox
from tessera_rt.moe.steps import Pending
from tessera_rt.plan import Message, Plan
from tessera_rt.tasks import Pass, Resource, TaskGraph, TaskKind, chunk_tasks, parse_task_name
from tessera_rt.timeline import Span

T = TypeVar("T")
STAMP = torch.int64


@dataclass(frozen=True, slots=True)
class EmulatedDevice:
    """Virtual time from ``costs``; ``contention`` None takes the table's. Works with real models and ``StubModel``."""

    costs: CostTable
    contention: float | None = None
    source: str = "emulated"
    emulates: bool = True

    def set_up(self, setup: DeviceSetup) -> Runtime:
        return EmulatedRuntime(setup, self.costs, self.costs.contention if self.contention is None else self.contention)


class _Structure:
    """What each task of this rank waits for, from the plan's cuts and the task graphs alone."""

    def __init__(self, setup: DeviceSetup, costs: CostTable) -> None:
        self.plan: Plan = setup.plan
        self.rank = setup.groups.pp_i
        self.items = setup.spec.items
        self.costs = costs
        self.graph: Callable[[int, Pass], TaskGraph] = cache(self._graph)
        self.sinks: Callable[[int, Pass], tuple[str, ...]] = cache(self._sinks)

    def _graph(self, stage: int, pass_: Pass) -> TaskGraph:
        cut = self.plan.stages[stage]
        return self.costs.apply(chunk_tasks(self.items[cut.start : cut.stop], pass_))

    def _sinks(self, stage: int, pass_: Pass) -> tuple[str, ...]:
        tasks = [task for task in self.graph(stage, pass_).tasks if task.pass_ is pass_]
        read = {dep for task in tasks for dep in task.deps}
        return tuple(task.name for task in tasks if task.name not in read)

    def duration(self, task: TaskRef) -> int:
        return self.costs.tasks[task.name].ns

    def sources(self, task: TaskRef) -> tuple[Source, ...]:
        """Local tasks and messages that must have ended or arrived before ``task`` may start."""
        pass_ = parse_task_name(task.name)[0]
        graph = self.graph(task.stage, Pass.F if pass_ is Pass.F else Pass.B)
        deps = graph.by_name[task.name].deps
        if deps:
            return tuple(TaskRef(dep, task.stage, task.microbatch) for dep in deps)
        return self._input(pass_, task.stage, task.microbatch)

    def _input(self, pass_: Pass, stage: int, microbatch: int) -> tuple[Source, ...]:
        own = self.output(Pass.F, stage, microbatch) if pass_ is Pass.B else ()
        neighbour = stage + (-1 if pass_ is Pass.F else 1)
        if not 0 <= neighbour < len(self.plan.stages):
            return own
        source = self.plan.stages[neighbour].rank
        if source == self.rank:
            return own + self.output(pass_, neighbour, microbatch)
        return (*own, Message(source, self.rank, pass_, stage, microbatch))

    def output(self, pass_: Pass, stage: int, microbatch: int) -> tuple[Source, ...]:
        """What must be over before the output of a pass exists."""
        sinks = self.sinks(stage, pass_)
        if sinks:
            return tuple(TaskRef(name, stage, microbatch) for name in sinks)
        return self._input(pass_, stage, microbatch)

    def message_bytes(self, message: Message) -> int:
        """Size of what crosses the message's boundary: the output of the last item before it."""
        stop = self.plan.stages[min(message.from_stage, message.to_stage)].stop
        return self.costs.memory[self.items[stop - 1].label].output if stop else 0


class _Clock:
    """Virtual time of one rank: ends of tasks, arrivals of messages, and the log that explains them."""

    def __init__(self, structure: _Structure, groups: Groups, *, serial: bool) -> None:
        self.structure = structure
        self.groups = groups
        self.serial = serial
        self.log = EventLog(lambda: 0)
        self.reset()

    def reset(self) -> None:
        self.log.clear()
        self.ends: dict[TaskRef, int] = {}
        self.arrivals: dict[Message, int] = {}
        self.last: dict[bool, TaskRef] = {}
        self.edge_free: dict[int, int] = {}
        self.records: list[Record] = []
        self.links: list[LinkRecord] = []

    def ready(self, sources: Sequence[Source]) -> int:
        return max((self.arrivals[s] if isinstance(s, Message) else self.ends[s] for s in sources), default=0)

    def run(self, task: TaskRef) -> None:
        """Give the task its time on its lane."""
        kind = parse_task_name(task.name)[1]
        comm = kind.resource is Resource.COMM
        lane = comm and not self.serial
        sources = self.structure.sources(task)
        previous = self.last.get(lane)
        start = max(self.ready(sources), self.ends[previous] if previous else 0)
        ns = self.structure.duration(task)
        members: tuple[int, ...] = ()
        longest = ns
        if comm:
            group, members = self._members(kind)
            if len(members) > 1:
                latest = torch.tensor([start, ns], dtype=STAMP)
                dist.all_reduce(latest, dist.ReduceOp.MAX, group=group)
                start, longest = (int(x) for x in latest)
        self.last[lane] = task
        self.ends[task] = start + longest
        self.records.append(Record(task, comm, ns, previous, sources, members, start))
        self.log.record(EventKind.ISSUE if comm else EventKind.START, task, start)
        self.log.record(EventKind.DONE if comm else EventKind.END, task, start + longest)

    def _members(self, kind: TaskKind) -> tuple[dist.ProcessGroup | None, tuple[int, ...]]:
        mesh, groups = self.groups.mesh, self.groups
        if kind is TaskKind.COUNT:
            ranks = [mesh.rank(groups.pp_i, d, e) for d in range(mesh.dp) for e in range(mesh.ep)]
            return groups.data, tuple(ranks)
        return groups.ep, tuple(mesh.rank(groups.pp_i, groups.dp_i, e) for e in range(mesh.ep))

    def depart(self, message: Message) -> int:
        """Start a message; its arrival time."""
        link = self.structure.costs.link
        sources = self.structure.output(message.pass_, message.from_stage, message.microbatch)
        start = max(self.ready(sources), self.edge_free.get(message.target, 0))
        occupancy = link.occupancy_ns(self.structure.message_bytes(message))
        self.edge_free[message.target] = start + occupancy
        receiver = self.groups.global_rank(message.target)
        self.links.append(LinkRecord(message, receiver, sources, occupancy, link.latency_ns, start))
        return start + occupancy + link.latency_ns


class EmulatedLanes:
    """Runs a task's function (if it has real work) and gives it its virtual time."""

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock
        self.log = clock.log

    def compute(self, task: TaskRef, fn: Callable[[], T]) -> T:
        self._clock.run(task)
        return fn()

    def issue(self, task: TaskRef, fn: Callable[[], Pending]) -> Pending:
        self._clock.run(task)
        return fn()

    def wait(self, task: TaskRef, pending: Pending) -> Any:
        return pending.wait()


class EmulatedMail:
    """Messages with their arrival time packed before the payload."""

    def __init__(self, clock: _Clock, box: Mailbox, dtype: torch.dtype) -> None:
        self._clock = clock
        self._box = box
        self._dtype = dtype
        self.shapes: Sequence[tuple[int, ...]] = ()

    def send(self, message: Message, tensor: Tensor) -> None:
        stamp = torch.tensor([self._clock.depart(message)], dtype=STAMP).view(torch.uint8)
        self._box.send(message, torch.cat([stamp, tensor.contiguous().view(-1).view(torch.uint8)]))

    def receive(self, message: Message) -> Tensor:
        packed = self._box.receive(message)
        self._clock.arrivals[message] = int(packed[: STAMP.itemsize].view(STAMP))
        payload = packed[STAMP.itemsize :].clone().view(self._dtype)
        return payload.view(self.shapes[message.microbatch])


class EmulatedRuntime:
    """See ``Runtime``."""

    def __init__(self, setup: DeviceSetup, costs: CostTable, contention: float) -> None:
        self._groups = setup.groups
        self._dtype = setup.dtype
        self._contention = contention
        self._clock = _Clock(_Structure(setup, costs), setup.groups, serial=not setup.overlap)
        self._box = Mailbox(
            setup.plan,
            setup.groups,
            setup.reporter,
            dtype=torch.uint8,
            device=torch.device("cpu"),
            timeout_s=setup.timeout_s,
        )
        self._mail = EmulatedMail(self._clock, self._box, setup.dtype)
        self.mail: Mail = self._mail
        self.lanes: Lanes = EmulatedLanes(self._clock)

    def open_step(
        self,
        shapes: Sequence[tuple[int, ...]],
        outgoing: Sequence[Message],
        incoming: Mapping[int, Sequence[Message]],
    ) -> None:
        self._clock.reset()
        self._mail.shapes = shapes
        packed = [(STAMP.itemsize + torch.Size(shape).numel() * self._dtype.itemsize,) for shape in shapes]
        self._box.open_step(packed, tuple(outgoing), {source: tuple(queue) for source, queue in incoming.items()})

    def close_step(self) -> None:
        self._box.close_step()

    def events(self) -> tuple[Event, ...]:
        return self._clock.log.events

    def spans(self) -> tuple[Span, ...]:
        mesh = self._groups.mesh
        logs: list[RankLog | None] = [None] * mesh.world
        mine = RankLog(tuple(self._clock.records), tuple(self._clock.links))
        dist.all_gather_object(logs, mine, group=self._groups.world)
        gathered = {rank: log for rank, log in enumerate(logs) if log is not None}
        # Without contention the sweeps only confirm the stamps; one code path serves both.
        times, sent = resolve(gathered, self._contention)
        spans: list[Span] = []
        for pp_i in range(mesh.pp):
            rank = mesh.rank(pp_i, 0, 0)
            for record in gathered[rank].records:
                start, end = times[rank, record.task]
                lane = Resource.COMM if record.comm else Resource.COMP
                task = record.task
                spans.append(_span(pp_i, lane, task.name, task.stage, task.microbatch, start, end))
            for link in gathered[rank].links:
                start, end = sent[link.receiver, link.message]
                name = f"SEND_{link.message.pass_}"
                spans.append(_span(pp_i, "LINK", name, link.message.from_stage, link.message.microbatch, start, end))
        return tuple(spans)


def _span(rank: int, lane: str, name: str, stage: int, microbatch: int, start: int, end: int) -> Span:
    return Span(rank=rank, lane=lane, name=name, stage=stage, microbatch=microbatch, start_ns=start, end_ns=end)
