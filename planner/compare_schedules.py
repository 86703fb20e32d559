"""All schedules people use, side by side: one simulated step of each, for one model, mesh and cost table.

Every schedule gets the partition that suits its number of stages best by the same simple rule (serial-balanced, unless
it says otherwise), and every template the number of stages a rank that it is made for. Nothing is tuned here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tessera_rt.costs import CostTable
from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.model_spec import ModelSpec
from tessera_rt.planner.baselines import equal_layers, serial_balanced
from tessera_rt.planner.candidates import Bounds, ranges
from tessera_rt.planner.memory import MemoryModel
from tessera_rt.planner.setting import Setting
from tessera_rt.scheduler.comparisons import dualpipe_template, simulate_chunked, simulate_dualpipe
from tessera_rt.scheduler.simulate import simulate_schedule
from tessera_rt.scheduler.templates import RULES, Template, build_template, held_chunks
from tessera_rt.tasks import Pass, Resource, chunk_tasks
from tessera_rt.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One line of a comparison.

    ``template``: of ``scheduler.templates``, or ``dualpipe`` or ``chunked``, which can only be simulated. ``joint``:
    overlap pairs. ``overlap`` off: one pass, and one task, after the other. ``method``: that orders the tasks of an
    action (``scheduler.interleave``). ``partition``: serial | equal.
    """

    name: str
    template: str
    joint: bool = True
    overlap: bool = True
    method: str = "align"
    partition: str = "serial"

    @property
    def simulate_only(self) -> bool:
        return self.template not in RULES


SCHEDULES = (
    Schedule(name="interleaved 1F1B, no overlap", template="interleaved-1f1b", joint=False, overlap=False),
    Schedule(name="the same, equal layers", template="interleaved-1f1b", joint=False, overlap=False, partition="equal"),
    Schedule(name="GPipe", template="gpipe", joint=False),
    Schedule(name="1F1B", template="1f1b", joint=False),
    Schedule(name="ZB-H1", template="zb-h1"),
    Schedule(name="ZB-H2", template="zb-h2"),
    Schedule(name="ZB-V", template="zb-v"),
    Schedule(name="interleaved zero bubble", template="interleaved-zb"),
    Schedule(name="chunks within a micro-batch", template="chunked", joint=False, overlap=False),
    Schedule(name="Megatron's fixed pair order", template="megatron-1f1b"),
    Schedule(name="DualPipe", template="dualpipe"),
    Schedule(name="DualPipeV, fixed pair order", template="dualpipe-v", method="megatron"),
    Schedule(name="DualPipeV, pairs in FIFO order", template="dualpipe-v", method="fifo"),
    Schedule(name="DualPipeV", template="dualpipe-v"),
    Schedule(name="DualPipeV, exact pair orders", template="dualpipe-v", method="exact"),
    Schedule(name="1F1B in pairs", template="1f1b"),
    Schedule(name="interleaved 1F1B in pairs, FIFO", template="interleaved-1f1b", method="fifo"),
    Schedule(name="interleaved 1F1B in pairs", template="interleaved-1f1b"),
    Schedule(name="interleaved 1F1B in exact pairs", template="interleaved-1f1b", method="exact"),
)
"""From what most people run to overlap pairs in a synthesized order."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One schedule's simulated step. Means over ranks come from ``timeline.mean_split()``.

    ``vpp``: stages a rank. ``held``: most micro-batches a rank holds for its backward, in micro-batches of the whole
    rank; one that only waits for its W counts half. ``peak_bytes``: memory of the fullest rank. ``flops``: executed
    on one rank of each stage in the step. ``tokens``: of the step on all data ranks.
    """

    schedule: Schedule
    vpp: int
    microbatches: int
    timeline: Timeline
    lower_bound_ns: int
    held: float
    peak_bytes: int
    flops: float
    tokens: int

    @property
    def ratio(self) -> float:
        """Step time over the lower bound, which nothing that does the same work can beat."""
        return self.timeline.step_ns / self.lower_bound_ns if self.lower_bound_ns else 1.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens * 1e9 / self.timeline.step_ns

    def mfu(self, peak_flops: float) -> float:
        """Share of the ranks' peak (flops per second each) that the step's executed work is."""
        return self.flops * 1e9 / (self.timeline.step_ns * self.timeline.ranks * peak_flops)


def compare(
    model: ModelSpec,
    costs: CostTable,
    *,
    pp: int,
    vpp: int,
    microbatches: int,
    schedules: Sequence[Schedule] = SCHEDULES,
    contention: float | None = None,
) -> Iterator[Compared]:
    """The schedules one by one, in their order. ``vpp``: stages a rank of the templates that leave it open.

    Schedules whose rules the sizes break are left out (``refusal`` says why). ``contention`` None: that of the costs.
    """
    for schedule in schedules:
        if refusal(schedule, pp=pp, vpp=vpp, microbatches=microbatches) is None:
            yield _compared(schedule, model, costs, pp, vpp, microbatches, contention)


def refusal(schedule: Schedule, *, pp: int, vpp: int, microbatches: int) -> str | None:
    """Why a schedule cannot have these sizes, None if it can. Raises ScheduleError for an unknown partition."""
    if schedule.partition not in ("serial", "equal"):
        raise ScheduleError.of("schedule", [Problem("partition", schedule.partition, "serial or equal")])
    try:
        _template(schedule, pp, vpp, microbatches)
    except ScheduleError as error:
        return "; ".join(map(str, error.problems))
    return None


def lower_bound(model: ModelSpec, costs: CostTable, *, pp: int, microbatches: int) -> int:
    """All compute of a step without contention, spread evenly over the ranks (ns)."""
    tasks = [task for pass_ in (Pass.F, Pass.B) for task in chunk_tasks(model.items, pass_).tasks]
    compute = sum(costs.tasks[task.name].ns for task in tasks if task.resource is Resource.COMP)
    return compute * microbatches // pp


def _template(schedule: Schedule, pp: int, vpp: int, microbatches: int) -> Template:
    if schedule.template == "dualpipe":
        return dualpipe_template(pp, microbatches, joint=schedule.joint)
    name = "interleaved-1f1b" if schedule.template == "chunked" else schedule.template
    least, most = RULES[name].vpp if name in RULES else (1, 1)
    stages = 1 if name == "gpipe" else int(max(least, min(most, vpp)))
    return build_template(name, pp=pp, vpp=stages, microbatches=microbatches, joint=schedule.joint)


def _compared(
    schedule: Schedule,
    model: ModelSpec,
    costs: CostTable,
    pp: int,
    vpp: int,
    microbatches: int,
    contention: float | None,
) -> Compared:
    template = _template(schedule, pp, vpp, microbatches)
    if schedule.template == "dualpipe":
        bounds = _bounds(schedule, model, costs, range(pp))
        timeline = simulate_dualpipe(
            model,
            costs,
            ranges(bounds),
            microbatches=microbatches,
            joint=schedule.joint,
            method=schedule.method,
            contention=contention,
        )
        peak, held = _two_copies_peak(model, costs, template, bounds), max(held_chunks(template))
    else:
        bounds = _bounds(schedule, model, costs, template.stage_ranks)
        peak = max(MemoryModel(model, costs, template).peaks(bounds))
        held = max(held_chunks(template)) / template.vpp
        if schedule.template == "chunked":
            timeline = simulate_chunked(template.stage_ranks, template.actions, ranges(bounds), model, costs)
        else:
            setting = Setting(model, costs, template, limit=0, method=template.interleaving or schedule.method)
            timeline = simulate_schedule(
                template.stage_ranks,
                template.actions,
                ranges(bounds),
                setting.interleavings(bounds) if schedule.overlap else {},
                model,
                costs,
                overlap=schedule.overlap,
                contention=contention,
                label=schedule.name,
            )
    workload = costs.workload
    return Compared(
        schedule=schedule,
        vpp=template.vpp,
        microbatches=microbatches,
        timeline=timeline,
        lower_bound_ns=lower_bound(model, costs, pp=pp, microbatches=microbatches),
        held=held,
        peak_bytes=peak,
        flops=float(sum(cost.flops for cost in costs.tasks.values()) * microbatches),
        tokens=workload.tokens * workload.dp * workload.ep * microbatches,
    )


def _bounds(schedule: Schedule, model: ModelSpec, costs: CostTable, stage_ranks: Sequence[int]) -> Bounds:
    if schedule.partition == "equal":
        return equal_layers(model, len(stage_ranks))
    bounds = serial_balanced(model, costs, stage_ranks)
    assert bounds is not None, "without a limit there is always a partition"
    return bounds


def _two_copies_peak(model: ModelSpec, costs: CostTable, template: Template, bounds: Bounds) -> int:
    """Bytes of the fullest rank when every rank holds one stage of either copy of the model."""
    memory = MemoryModel(model, costs, template)
    chunks = ranges(bounds) * 2
    peaks = []
    for rank in range(template.pp):
        held = [stage for stage, owner in enumerate(template.stage_ranks) if owner == rank]
        moments = sum(memory.stage_bytes(s, np.asarray(chunks[s][0]), np.asarray(chunks[s][1])) for s in held)
        table = memory.table_bytes * any(memory.uses_table(chunks[s]) for s in held)
        peaks.append(int(np.max(moments)) + table)
    return max(peaks)
