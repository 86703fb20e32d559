"""A program (``simulate_program.py``) put in an order in which times can be computed one after the other.

Lanes and links are first in, first out, so without looking at a clock one can say what a task's start depends on: the
task before it on its lane, its inputs, nothing else. Operations listed so that these come first (a *topological order*)
can be timed for thousands of data-parallel replicas at once. Contention fits in as well, because every collective
depends on compute tasks of its own rank only: when those before a compute task are timed, all collectives that can run
beside it are timed too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera_rt.costs import CostTable
from tessera_rt.model_spec import ModelSpec
from tessera_rt.scheduler.noise import moe_items
from tessera_rt.scheduler.replica_state import (
    BOTH,
    COLUMNS,
    COMM_OP,
    COMP_OP,
    FIRST_BACKWARD,
    LAST_FORWARD,
    NO_ROWS,
    OTHER,
    OUTPUT_OP,
    SEND_OP,
    TRAFFIC,
    WORK,
    C,
    Ints,
    Sizes,
)
from tessera_rt.scheduler.simulate_program import COMM, COMP, ActionRun, LaneTask, Program
from tessera_rt.scheduler.simulate_run import run_program
from tessera_rt.tasks import Pass, Resource, Task, TaskKind

LINK = "LINK"
KINDS: tuple[str, ...] = (*map(str, TaskKind), LINK)
"""What durations can be scaled by: kinds of task, and messages between ranks."""


@dataclass(frozen=True, kw_only=True)
class ReplicaProgram:
    """``ops`` [operations, columns] in topological order; ``deps``: numbers of operations whose ends they need.

    ``runs[i]``: (action, position in it) of operation i, or None for an output or a message
    (its pass is in the operation). ``layers``: number of MoE layers.
    """

    program: Program
    ops: Ints
    deps: Ints
    runs: tuple[tuple[ActionRun, int] | None, ...]
    sizes: Sizes
    layers: int
    contention: float
    planned_ns: int = 0  # step without noise, once ``replicas.prepare`` has put planned gaps in

    @property
    def microbatches(self) -> int:
        return self.program.passes.microbatches

    def task(self, op: int) -> Task | None:
        """The task of an operation, None for a message."""
        place = self.runs[op]
        return None if place is None else place[0].shape.tasks[place[1]]


def replica_program(program: Program, model: ModelSpec, costs: CostTable, contention: float) -> ReplicaProgram:
    """The operations of a program in order. Raises ScheduleError for a deadlock, as the event loop does."""
    builder = _Builder(program, model, costs)
    if not builder.run():
        run_program(program, 0.0)  # says who waits for whom
        raise AssertionError("the event loop finds every deadlock")
    ops = np.array(builder.ops, dtype=np.int64).reshape(-1, COLUMNS)
    _mark_phases(ops, builder.runs)
    collectives = np.bincount(ops[np.isin(ops[:, C.KIND], (COMM_OP, BOTH)), C.RANK], minlength=len(program.runs))
    return ReplicaProgram(
        program=program,
        ops=ops,
        deps=np.array(builder.deps, dtype=np.int64),
        runs=tuple(builder.runs),
        sizes=Sizes(
            ranks=len(program.runs),
            passes=2 * program.passes.stages * program.passes.microbatches,
            edges=len(program.edges),
            collectives=int(collectives.max(initial=0)),
            latency_ns=program.latency_ns,
        ),
        layers=len(builder.layers),
        contention=contention,
    )


def _mark_phases(ops: Ints, runs: list[tuple[ActionRun, int] | None]) -> None:
    """The first compute task of a backward and the last one of a forward on every rank."""
    ops[:, C.PHASE] = OTHER
    seen: set[int] = set()
    last: dict[int, int] = {}
    for op, place in enumerate(runs):
        if place is None or ops[op, C.KIND] != COMP_OP:
            continue
        rank, pass_ = int(ops[op, C.RANK]), place[0].shape.tasks[place[1]].pass_
        if pass_ is Pass.B and rank not in seen:
            seen.add(rank)
            ops[op, C.PHASE] = FIRST_BACKWARD
        elif pass_ is Pass.F:
            last[rank] = op
    ops[list(last.values()), C.PHASE] = LAST_FORWARD


class _Builder:
    def __init__(self, program: Program, model: ModelSpec, costs: CostTable) -> None:
        self.program = program
        self.ops: list[list[int]] = []
        self.deps: list[int] = []
        self.runs: list[tuple[ActionRun, int] | None] = []
        self.layers = {item.label: i for i, item in enumerate(moe_items(model))}
        self.queues = [
            tuple([(run, task) for run in runs for task in run.shape.lanes[lane]] for lane in (COMP, COMM))
            for runs in program.runs
        ]
        self.position = [[0, 0] for _ in program.runs]
        passes = program.passes
        self.signals = {number: number % 2 + (passes.previous(number) >= 0) for number in program.place}
        self.sinks_left = {number: run.shape.sinks[part] for number, (run, part) in program.place.items()}
        self.arrived: set[int] = set()
        self.finished: set[int] = set()
        self.edge_next = [0] * len(program.edges)
        self.op_of = {id(run): [-1] * len(run.shape.tasks) for runs in program.runs for run in runs}
        self.params: dict[str, int] = {}
        self.pending = _pending_bytes(model, costs)
        self.kinds = {kind: i for i, kind in enumerate(KINDS)}
        self.columns: dict[tuple[str, int], list[int]] = {}

    def run(self) -> bool:
        """Lists all operations; False if some can never start."""
        for number in [number for number, left in self.signals.items() if not left]:
            self._arrive(number)
        ranks = range(len(self.queues))
        moved = True
        while moved:
            moved = False
            for rank in ranks:
                while self._next(rank, COMM) or self._next(rank, COMP, behind_collectives=True):
                    moved = True
            # Only what waits for a collective that waits for a message is left: some rank must go first.
            moved = moved or any(self._next(rank, COMP) for rank in ranks)
        lanes = [(rank, lane) for rank in range(len(self.queues)) for lane in (COMP, COMM)]
        done = all(self.position[rank][lane] == len(self.queues[rank][lane]) for rank, lane in lanes)
        return done and not any(self.signals.values())

    def _next(self, rank: int, lane: int, *, behind_collectives: bool = False) -> bool:
        """Lists the next task of a lane if all it needs is listed.

        ``behind_collectives``: not before a collective of the rank that only waits for a message, since that one may
        run beside it.
        """
        if behind_collectives and self._waits_for_message(rank):
            return False
        queue, at = self.queues[rank][lane], self.position[rank][lane]
        if at == len(queue):
            return False
        run, task = queue[at]
        known, size = self.op_of[id(run)], len(run.shape.tasks)
        for dep in task.deps:
            if (known[dep] < 0) if dep < size else (run.passes[dep - size] not in self.arrived):
                return False
        self.position[rank][lane] += 1
        known[task.index] = len(self.ops)
        self.ops.append(self._columns(rank, lane, run, task))
        self.runs.append((run, task.index))
        if task.sink >= 0:
            number = run.passes[task.sink]
            self.sinks_left[number] -= 1
            if not self.sinks_left[number]:
                self._finish(number, empty=False)
        return True

    def _waits_for_message(self, rank: int) -> bool:
        queue, at = self.queues[rank][COMM], self.position[rank][COMM]
        if at == len(queue):
            return False
        run, task = queue[at]
        known, size = self.op_of[id(run)], len(run.shape.tasks)
        return any(dep >= size for dep in task.deps) and all(known[dep] >= 0 for dep in task.deps if dep < size)

    def _columns(self, rank: int, lane: int, run: ActionRun, task: LaneTask) -> list[int]:
        what, size = run.shape.tasks[task.index], len(run.shape.tasks)
        known = self.op_of[id(run)]
        row = [0] * COLUMNS
        collective = what.resource is Resource.COMM
        row[C.KIND] = COMM_OP if lane == COMM else BOTH if collective else COMP_OP
        row[C.RANK], row[C.NS] = rank, task.ns
        row[C.DEP_START] = len(self.deps)
        for dep in task.deps:
            # A compute task's compute tasks come before it on its lane; only ends of collectives matter to it.
            if dep < size and (lane == COMM or collective or run.shape.tasks[dep].resource is Resource.COMM):
                self.deps.append(known[dep])
        row[C.DEP_STOP] = len(self.deps)
        row[C.SLOT] = int(not collective and row[C.DEP_STOP] > row[C.DEP_START])
        arrivals = [run.passes[dep - size] for dep in task.deps if dep >= size]
        row[C.PASS_IN] = arrivals[0] if arrivals else -1
        row[C.REMOTE] = int(bool(arrivals) and self.program.passes.previous(arrivals[0]) in self.program.edge_of)
        row[C.PASS_OUT] = run.passes[task.sink] if task.sink >= 0 else -1
        row[C.SCALE] = self.kinds[str(what.kind)]
        row[C.ROWS], row[C.USE] = -1, NO_ROWS
        part = run.action.passes[run.shape.part_of[task.index]]
        if what.label in self.layers and what.kind in (TaskKind.MLP, TaskKind.DISP, TaskKind.COMB):
            row[C.ROWS] = self.layers[what.label] * self.program.passes.microbatches + part.microbatch
            row[C.USE] = WORK if what.kind is TaskKind.MLP else TRAFFIC
        row[C.PARAM] = -1
        if what.pass_ is Pass.W and task.ns:  # one without duration gains nothing by waiting
            row[C.PARAM] = self.params.setdefault(what.name, len(self.params))
            row[C.BYTES] = self.pending.get(what.name, 0)
        return row

    # -- passes and messages, in the order in which the event loop sends them -----------------------------------------

    def _arrive(self, number: int) -> None:
        self.arrived.add(number)
        if not self.sinks_left[number]:
            self._finish(number, empty=True)

    def _signal(self, number: int) -> None:
        if number not in self.signals:
            return
        self.signals[number] -= 1
        if not self.signals[number]:
            self._arrive(number)

    def _finish(self, number: int, *, empty: bool) -> None:
        passes = self.program.passes
        edge = self.program.edge_of.get(number)
        self.finished.add(number)
        self._output(number, stays=edge is None, empty=empty)
        if not number % 2:
            self._signal(number + 1)
        if edge is None:
            self._signal(passes.next(number))
            return
        sends = self.program.edges[edge].sends
        while self.edge_next[edge] < len(sends) and sends[self.edge_next[edge]] in self.finished:
            sent = sends[self.edge_next[edge]]
            self.edge_next[edge] += 1
            self._message(sent, edge)
            self._signal(passes.next(sent))

    def _output(self, number: int, *, stays: bool, empty: bool) -> None:
        """The output of a pass exists: what stays on the rank is there at once."""
        row = [0] * COLUMNS
        target = self.program.passes.next(number)
        row[C.KIND] = OUTPUT_OP
        row[C.RANK] = self.program.place[number][0].rank
        row[C.PASS_OUT] = number
        row[C.PASS_IN] = target if stays and target in self.program.place else -1
        row[C.OWN] = number + 1 if not number % 2 and number + 1 in self.program.place else -1
        row[C.EMPTY] = int(empty)
        self._append(row)

    def _message(self, number: int, edge: int) -> None:
        passes = self.program.passes
        row = [0] * COLUMNS
        target = passes.next(number)
        row[C.KIND] = SEND_OP
        row[C.RANK] = self.program.edges[edge].source
        row[C.PASS_OUT] = number
        row[C.PASS_IN] = target if target in self.program.place else -1
        row[C.EDGE] = edge
        row[C.NS] = self.program.occupancy_ns[passes.stage(number) - number % 2]
        self._append(row)

    def _append(self, row: list[int]) -> None:
        row[C.SCALE] = self.kinds[LINK]
        row[C.ROWS] = row[C.PARAM] = -1
        self.ops.append(row)
        self.runs.append(None)


def _pending_bytes(model: ModelSpec, costs: CostTable) -> dict[str, int]:
    """Bytes that each deferred W task holds: its item's, divided by how long the item's W tasks take."""
    tasks: dict[str, list[str]] = {}
    for name in costs.tasks:
        if name[0] == Pass.W:
            label = name.partition(":")[2] or name.partition("_")[2]
            tasks.setdefault(label, []).append(name)
    found: dict[str, int] = {}
    for label, names in tasks.items():
        total = sum(costs.tasks[name].ns for name in names)
        held = costs.memory[label].pending_w if label in costs.memory else 0
        for name in names:
            found[name] = held * costs.tasks[name].ns // total if total else held // len(names)
    return found
