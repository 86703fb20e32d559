"""One step of thousands of accelerators: every data-parallel replica of a plan at once, with noise, jitter and filling.

``simulate.py`` lets one rank stand for all ranks of its data- and expert-parallel groups. Here they differ: uneven
routing makes experts' ranks slower or faster, and every collective waits for the last of its group. The rules of timing
are the same, and without noise so are all times, to the nanosecond; nothing is shared but the program that both run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tessera_rt.costs import CostTable
from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Action, Interleaving, Plan
from tessera_rt.scheduler import replica_state as words
from tessera_rt.scheduler.bubble_filling import BubbleFilling
from tessera_rt.scheduler.chunked import MOE_HALVES
from tessera_rt.scheduler.graphs import Bounds
from tessera_rt.scheduler.noise import Floats, Jitter, Rows
from tessera_rt.scheduler.part_costs import part_costs
from tessera_rt.scheduler.replica_kernel import run_replicas
from tessera_rt.scheduler.replica_program import KINDS, ReplicaProgram, replica_program
from tessera_rt.scheduler.replica_state import COMP_OP, OUTPUT_OP, C, Ints
from tessera_rt.scheduler.simulate import contention_rate
from tessera_rt.scheduler.simulate_program import build_program
from tessera_rt.timeline import Span, StepSplit, Timeline

MOST_REPLICAS = 65_536
_NO_LIMIT = np.iinfo(np.int64).max // 4  # bytes


@dataclass(frozen=True, kw_only=True)
class ReplicaRun:
    """One simulated step of all replicas. A replica is one expert-parallel group of every pipeline rank.

    ``steps_ns`` [replicas]. ``statistics`` [replicas, ranks, ep, ``replica_state.STATISTICS``]; ``collectives_ns``
    [replicas, ranks]: how long collectives ran. ``timeline``: of the accelerators that were to be recorded.
    """

    steps_ns: Ints
    statistics: Ints
    collectives_ns: Ints
    timeline: Timeline | None = None

    @property
    def step_ns(self) -> int:
        """The slowest replica's: all join in the gradient reduction behind it."""
        return int(self.steps_ns.max())

    @property
    def pool_peak_bytes(self) -> int:
        """Most bytes that deferred W tasks held on an accelerator."""
        return int(self.statistics[..., words.POOL_PEAK].max())

    @property
    def filled(self) -> float:
        """Share of the W tasks that might move which ran in a slot."""
        moved = self.statistics[..., words.FILLED].sum() + self.statistics[..., words.FORCED].sum()
        total = moved + self.statistics[..., words.INLINE].sum() + self.statistics[..., words.DRAINED].sum()
        return float(moved / total) if total else 0.0

    def split(self, replica: int, rank: int, lane: int) -> StepSplit:
        """How one accelerator spends its replica's step."""
        row = self.statistics[replica, rank, lane]
        step, busy = int(self.steps_ns[replica]), int(row[words.BUSY])
        exposed = int(self.collectives_ns[replica, rank] - row[words.OVERLAPPED])
        warmup, cooldown = int(row[words.WARMUP]), int(row[words.COOLDOWN])
        return StepSplit(
            compute_ns=busy,
            exposed_ns=exposed,
            warmup_ns=warmup,
            imbalance_ns=step - busy - exposed - warmup - cooldown,
            cooldown_ns=cooldown,
        )

    def mean_split(self) -> StepSplit:
        """Mean over all accelerators (ns), each against its own replica's step."""
        means = self.statistics.mean(axis=(0, 1, 2))
        exposed = float(self.collectives_ns.mean() - means[words.OVERLAPPED])
        busy, warmup, cooldown = (float(means[i]) for i in (words.BUSY, words.WARMUP, words.COOLDOWN))
        rest = float(self.steps_ns.mean()) - busy - exposed - warmup - cooldown
        return StepSplit(
            compute_ns=round(busy),
            exposed_ns=round(exposed),
            warmup_ns=round(warmup),
            imbalance_ns=round(rest),
            cooldown_ns=round(cooldown),
        )


def prepare(
    plan: Plan, model: ModelSpec, costs: CostTable, *, overlap: bool = True, contention: float | None = None
) -> ReplicaProgram:
    """A plan's step, ready to be run many times; raises as ``simulate`` does."""
    return prepare_schedule(
        [stage.rank for stage in plan.stages],
        plan.actions,
        [(stage.start, stage.stop) for stage in plan.stages],
        plan.interleavings,
        model,
        costs,
        overlap=overlap,
        contention=contention,
        halves=MOE_HALVES in plan.simulate_only,
        tapered=plan.tapered,
    )


def prepare_schedule(
    stage_ranks: Sequence[int],
    actions: Sequence[Sequence[Action]],
    bounds: Bounds,
    interleavings: Mapping[str, Interleaving],
    model: ModelSpec,
    costs: CostTable,
    *,
    overlap: bool = True,
    contention: float | None = None,
    copies: int = 1,
    halves: bool = False,
    tapered: int = 0,
) -> ReplicaProgram:
    """The same before there is a Plan; arguments as ``simulate_schedule``."""
    rate = contention_rate(costs, contention)
    program = build_program(
        stage_ranks,
        actions,
        bounds,
        interleavings,
        model,
        costs,
        overlap=overlap,
        copies=copies,
        part_costs=part_costs(actions, model, costs, halves=halves, tapered=tapered),
    )
    return _with_planned_gaps(replica_program(program, model, costs, rate))


def simulate_replicas(
    program: ReplicaProgram,
    *,
    replicas: int = 1,
    ep: int = 1,
    rows: Rows | None = None,
    jitter: Jitter | None = None,
    filling: BubbleFilling | None = None,
    scales: Floats | None = None,
    deadline_ns: int | None = None,
    seed: int = 0,
    record: tuple[int, int] | None = None,
    label: str = "",
) -> ReplicaRun:
    """One step of ``replicas`` replicas with ``ep`` ranks each; ``rows`` says both if given.

    ``filling``: W tasks go to idle slots (``bubble_filling.py``); ``deadline_ns``: when the step is expected to end
    (None: as planned; the mean of the last steps is better where noise makes them longer). ``scales`` [replicas,
    kinds]: factors on the durations by kind (``replica_program.KINDS``). ``record`` (replica, ep rank): whose timeline
    to return; a collective stands there from when it starts.

    Raises ScheduleError for numbers that do not fit together.
    """
    replicas, ep = (rows.replicas, rows.ep) if rows is not None else (replicas, ep)
    _check(program, replicas, ep, rows, scales, record)
    ops = program.ops
    statistics = np.zeros((replicas, program.sizes.ranks, ep, words.STATISTICS), dtype=np.int64)
    steps = np.zeros(replicas, dtype=np.int64)
    collectives = np.zeros((replicas, program.sizes.ranks), dtype=np.int64)
    starts, ends = (np.zeros(len(ops), dtype=np.int64) for _ in range(2))
    late = np.zeros(program.sizes.ranks, dtype=np.int64)
    none = np.empty((0, 0, 0))
    chosen = filling or BubbleFilling(pool_tasks=0)
    run_replicas(
        ops,
        program.deps,
        program.sizes,
        1.0 + program.contention,
        np.ones((replicas, len(KINDS))) if scales is None else np.ascontiguousarray(scales, dtype=np.float64),
        none if rows is None else rows.compute.reshape(replicas, -1, ep),
        none if rows is None else rows.traffic.reshape(replicas, -1, ep),
        words.Noise(np.empty(0) if jitter is None else jitter.factors(), seed),
        words.Filling(
            filling is not None,
            float(chosen.fit),
            chosen.pool_tasks,
            _NO_LIMIT if chosen.pool_bytes is None else chosen.pool_bytes,
            program.planned_ns if deadline_ns is None else deadline_ns,
        ),
        words.Record(*((-1, -1) if record is None else record), starts, ends),
        steps,
        statistics,
        collectives,
        late,
    )
    if late.any() and program.contention:
        remedy = "set contention to 0, or simulate without noise, jitter and filling"
        allowed = "0 where collectives that begin a pass run beside compute tasks of other passes"
        raise ScheduleError.of("replicas", [Problem("contention", program.contention, allowed, remedy)])
    timeline = None if record is None else _timeline(program, starts, ends, label)
    return ReplicaRun(steps_ns=steps, statistics=statistics, collectives_ns=collectives, timeline=timeline)


def _check(
    program: ReplicaProgram,
    replicas: int,
    ep: int,
    rows: Rows | None,
    scales: Floats | None,
    record: tuple[int, int] | None,
) -> None:
    problems = [Problem(name, value, "at least 1") for name, value in (("replicas", replicas), ("ep", ep)) if value < 1]
    if replicas > MOST_REPLICAS:
        problems.append(Problem("replicas", replicas, f"at most {MOST_REPLICAS}"))
    if rows is not None:
        wanted = (replicas, program.layers, program.microbatches, ep)
        for name in ("compute", "traffic"):
            array: npt.NDArray[np.float64] = getattr(rows, name)
            if array.shape != wanted:
                problems.append(Problem(f"rows.{name}", array.shape, f"of shape {wanted}, as the schedule says"))
            elif not (np.isfinite(array).all() and array.min(initial=0.0) >= 0):
                problems.append(Problem(f"rows.{name}", "a negative or non-finite share", "at least 0"))
    if scales is not None:
        if scales.shape != (replicas, len(KINDS)):
            problems.append(Problem("scales", scales.shape, f"of shape {(replicas, len(KINDS))}"))
        elif not (np.isfinite(scales).all() and scales.min() >= 0):
            problems.append(Problem("scales", "a negative or non-finite factor", "at least 0"))
    if record is not None and not (0 <= record[0] < replicas and 0 <= record[1] < ep):
        problems.append(Problem("record", record, f"a replica below {replicas} and an ep rank below {ep}"))
    if problems:
        raise ScheduleError.of("replicas", problems)


def _with_planned_gaps(program: ReplicaProgram) -> ReplicaProgram:
    """The program knowing its own step without noise: idle time behind each compute task, and compute still to come."""
    planned = replace(program, planned_ns=0)
    steps, starts, ends = _planned_times(planned)
    ops = program.ops.copy()
    for rank in range(program.sizes.ranks):
        mine = np.flatnonzero((ops[:, C.RANK] == rank) & (ops[:, C.KIND] == COMP_OP))
        for op, following in pairwise(mine):
            ops[op, C.GAP] = max(0, starts[following] - ends[op])
        ops[mine, C.LEFT] = np.cumsum(ops[mine, C.NS][::-1])[::-1]
    return replace(program, ops=ops, planned_ns=steps)


def _planned_times(program: ReplicaProgram) -> tuple[int, Ints, Ints]:
    run = simulate_replicas(program, record=(0, 0))
    assert run.timeline is not None
    starts, ends = (np.zeros(len(program.ops), dtype=np.int64) for _ in range(2))
    for op, span in zip(_recorded(program), run.timeline.spans, strict=True):
        starts[op], ends[op] = span.start_ns, span.end_ns
    return run.step_ns, starts, ends


def _recorded(program: ReplicaProgram) -> list[int]:
    """Operations that have a span: tasks, and messages between ranks."""
    return [int(op) for op in np.flatnonzero(program.ops[:, C.KIND] != OUTPUT_OP)]


def _timeline(program: ReplicaProgram, starts: Ints, ends: Ints, label: str) -> Timeline:
    passes = program.program.passes
    spans: list[Span] = []
    for op in _recorded(program):
        place = program.runs[op]
        if place is None:
            number = int(program.ops[op, C.PASS_OUT])
            lane, name = "LINK", "SEND_B" if number % 2 else "SEND_F"
            stage, microbatch = passes.stage(number), passes.microbatch(number)
        else:
            run, index = place
            task, part = run.shape.tasks[index], run.action.passes[run.shape.part_of[index]]
            lane, name, stage, microbatch = str(task.resource), task.name, part.stage, part.microbatch
        spans.append(
            Span(
                rank=int(program.ops[op, C.RANK]),
                lane=lane,
                name=name,
                stage=stage,
                microbatch=microbatch,
                start_ns=int(starts[op]),
                end_ns=int(ends[op]),
            )
        )
    return Timeline(label=label, source="simulated", ranks=program.sizes.ranks, spans=tuple(spans))
