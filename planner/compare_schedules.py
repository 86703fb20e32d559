"""All schedules people use, side by side: one simulated step of each, for one model, mesh and cost table.

Every schedule gets a serial-balanced partition unless its name says otherwise (Megatron's a tuned one as well, as ours
have), and every template the number of stages a rank that it is made for. Ours come with one ingredient after the
other: exact pairs, the partition tuned to the simulated step, W pools, MoE layers in halves, smaller micro-batches at
the ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tessera_rt.costs import CostTable
from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.model_spec import ModelSpec
from tessera_rt.planner.baselines import balanced, equal_layers, serial_balanced
from tessera_rt.planner.candidates import Bounds, ranges
from tessera_rt.planner.memory import MemoryModel
from tessera_rt.planner.pair_costs import PairCosts
from tessera_rt.planner.search import step_tuned
from tessera_rt.planner.setting import Setting
from tessera_rt.planner.weight_pool import with_pools
from tessera_rt.scheduler.comparisons import dualpipe_template, simulate_chunked, simulate_dualpipe
from tessera_rt.scheduler.simulate import contention_rate, simulate_schedule
from tessera_rt.scheduler.templates import RULES, Template, build_template, held_chunks
from tessera_rt.tasks import Pass, Resource, chunk_tasks
from tessera_rt.timeline import Timeline

EVALUATIONS = 400
"""Partitions that tuning looks at for a line."""
MOST_HELD = 1.25
"""W pools take what a rank may hold: at most so many times what a rank holds under interleaved 1F1B in pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One line of a comparison.

    ``template``: of ``scheduler.templates``, or ``dualpipe`` or ``chunked``, which can only be simulated. ``joint``:
    overlap pairs. ``overlap`` off: one pass, and one task, after the other. ``method``: that orders the tasks of an
    action (``scheduler.interleave``). ``partition``: serial | equal | tuned. ``w_pool``: weight gradients are held back
    (``weight_pool.py``). ``halves``: MoE layers of passes that run alone go in two halves. ``tapered``: as many
    half-size micro-batches as ranks at either end, in place of half as many full ones.
    """

    name: str
    template: str
    joint: bool = True
    overlap: bool = True
    method: str = "align"
    partition: str = "serial"
    w_pool: bool = False
    halves: bool = False
    tapered: bool = False

    @property
    def simulate_only(self) -> bool:
        return self.halves or self.tapered or self.template not in RULES


def _ours(title: str, template: str) -> tuple[Schedule, ...]:
    """Exact pairs, tuned, by ingredients. What runs comes last: it starts from the partitions of the lines before."""
    base = Schedule(name=f"{title}, tuned", template=template, method="exact", partition="tuned")
    return (
        replace(base, name=f"{title}, tuned, MoE halves", halves=True),
        replace(base, name=f"{title}, tuned, W pool, MoE halves", w_pool=True, halves=True),
        replace(base, name=f"{title}, tuned, W pool, MoE halves, tapered", w_pool=True, halves=True, tapered=True),
        base,
        replace(base, name=f"{title}, tuned, W pool", w_pool=True),
    )


OUR_TITLES = {"interleaved 1F1B": "interleaved-1f1b", "DualPipeV": "dualpipe-v"}
"""What the names of our lines begin with, and their template."""
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
    Schedule(name="Megatron's fixed pair order, tuned", template="megatron-1f1b", partition="tuned"),
    Schedule(name="DualPipe", template="dualpipe"),
    Schedule(name="DualPipeV, fixed pair order", template="dualpipe-v", method="megatron"),
    Schedule(name="DualPipeV, pairs in FIFO order", template="dualpipe-v", method="fifo"),
    Schedule(name="DualPipeV", template="dualpipe-v"),
    Schedule(name="DualPipeV, exact pair orders", template="dualpipe-v", method="exact"),
    Schedule(name="1F1B in pairs", template="1f1b"),
    Schedule(name="interleaved 1F1B in pairs, FIFO", template="interleaved-1f1b", method="fifo"),
    Schedule(name="interleaved 1F1B in pairs", template="interleaved-1f1b"),
    Schedule(name="interleaved 1F1B in exact pairs", template="interleaved-1f1b", method="exact"),
    *(line for title, template in OUR_TITLES.items() for line in _ours(title, template)),
)
"""From what most people run to overlap pairs in a synthesized order, tuned to the step."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One schedule's simulated step. Means over ranks come from ``timeline.mean_split()``.

    ``vpp``: stages a rank. ``held``: most micro-batches a rank holds for its backward, in micro-batches of the whole
    rank; one that only waits for its W counts half. ``peak_bytes``: memory of the fullest rank. ``activation_bytes``:
    most that a rank holds of it for backwards and W to come. ``bounds``: the partition.
    """

    schedule: Schedule
    vpp: int
    microbatches: int
    timeline: Timeline
    lower_bound_ns: int
    held: float
    peak_bytes: int
    activation_bytes: int
    bounds: Bounds

    @property
    def ratio(self) -> float:
        """Step time over the lower bound, which nothing that does the same work can beat."""
        return self.timeline.step_ns / self.lower_bound_ns if self.lower_bound_ns else 1.0


@dataclass(frozen=True, slots=True)
class Known:
    """What comparisons of one model under one cost table share: orders of pairs by method, tuned partitions."""

    pairs: dict[str, PairCosts] = field(default_factory=dict)
    alone_pairs: dict[str, PairCosts] = field(default_factory=dict)
    starts: dict[str, list[Bounds]] = field(default_factory=dict)


def compare(
    model: ModelSpec,
    costs: CostTable,
    *,
    pp: int,
    vpp: int,
    microbatches: int,
    schedules: Sequence[Schedule] = SCHEDULES,
    contention: float | None = None,
    evaluations: int = EVALUATIONS,
    seeds: int = 1,
    known: Known | None = None,
) -> Iterator[Compared]:
    """The schedules one by one, in their order. ``vpp``: stages a rank of the templates that leave it open.

    Schedules whose rules the sizes break are left out (``refusal`` says why). ``contention`` None: that of the costs.
    ``evaluations``: partitions that tuning looks at for a line, with each of so many ``seeds``; it also starts from
    those of the lines before.
    ``known``: of a comparison of the same model and costs with another number of micro-batches.
    """
    costs = replace(costs, contention=contention_rate(costs, contention))
    known = known or Known()
    usual = _template(Schedule(name="", template="interleaved-1f1b"), pp, vpp, microbatches)
    bounds = serial_balanced(model, costs, usual.stage_ranks)
    assert bounds is not None, "without a limit there is always a partition"
    most_held = round(MOST_HELD * _held(MemoryModel(model, costs, usual), bounds))
    for schedule in schedules:
        if refusal(schedule, pp=pp, vpp=vpp, microbatches=microbatches) is None:
            template = _template(schedule, pp, vpp, microbatches)
            starts = known.starts.setdefault(template.name, [])
            setting = _setting(schedule, template, model, costs, known)
            compared = _compared(schedule, setting, microbatches, starts, most_held, evaluations, seeds)
            if schedule.partition == "tuned":
                starts.append(compared.bounds)
            yield compared


def refusal(schedule: Schedule, *, pp: int, vpp: int, microbatches: int) -> str | None:
    """Why a schedule cannot have these sizes, None if it can. Raises ScheduleError for an unknown partition."""
    if schedule.partition not in ("serial", "equal", "tuned"):
        raise ScheduleError.of("schedule", [Problem("partition", schedule.partition, "serial, equal or tuned")])
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
    if schedule.tapered and microbatches < pp:
        problem = Problem("microbatches", microbatches, f"at least pp ({pp})", "pp / 2 full ones go at either end")
        raise ScheduleError.of("tapered ends", [problem])
    # Two small micro-batches for a full one, at both ends.
    passes = microbatches + pp if schedule.tapered else microbatches
    return build_template(name, pp=pp, vpp=stages, microbatches=passes, joint=schedule.joint)


def _setting(schedule: Schedule, template: Template, model: ModelSpec, costs: CostTable, known: Known) -> Setting:
    method = template.interleaving or schedule.method
    if method not in known.pairs:
        known.pairs[method] = PairCosts(model, costs, method=method)
    setting = Setting(model, costs, template, limit=0, method=method, pairs=known.pairs[method])
    if schedule.halves:
        setting = setting.with_halves(known.alone_pairs.get(method))
        assert setting.alone_pairs is not None
        known.alone_pairs[method] = setting.alone_pairs
    return setting.with_tapered_ends(template.pp) if schedule.tapered else setting


def _compared(
    schedule: Schedule,
    setting: Setting,
    microbatches: int,
    starts: Sequence[Bounds],
    most_held: int,
    evaluations: int,
    seeds: int,
) -> Compared:
    template, model, costs = setting.template, setting.model, setting.costs
    if schedule.template == "dualpipe":
        bounds = _bounds(schedule, model, costs, range(template.pp))
        timeline = simulate_dualpipe(
            model,
            costs,
            ranges(bounds),
            microbatches=template.microbatches,
            joint=schedule.joint,
            method=schedule.method,
        )
        peak, activations = _two_copies(setting.memory, template, bounds)
        held = max(held_chunks(template))
    else:
        if schedule.partition == "tuned":
            # A pool comes after the partition: a line before may have tuned that already.
            bounds = _tuned(setting, starts, 0 if schedule.w_pool and starts else evaluations, seeds)
        else:
            bounds = _bounds(schedule, model, costs, template.stage_ranks)
        if schedule.w_pool:
            setting, bounds = _pooled(setting, bounds, most_held, evaluations)
        memory = setting.memory.of(bounds)
        peak, activations = (max(rank.peak for rank in memory), _held(setting.memory, bounds))
        held = max(held_chunks(setting.template)) / template.vpp
        if schedule.template == "chunked":
            timeline = simulate_chunked(template.stage_ranks, template.actions, ranges(bounds), model, costs)
        else:
            timeline = simulate_schedule(
                template.stage_ranks,
                setting.template.actions,
                ranges(bounds),
                setting.interleavings(bounds) if schedule.overlap else {},
                model,
                costs,
                overlap=schedule.overlap,
                label=schedule.name,
                halves=schedule.halves,
                tapered=setting.tapered,
            )
    return Compared(
        schedule=schedule,
        vpp=template.vpp,
        microbatches=microbatches,
        timeline=timeline,
        lower_bound_ns=lower_bound(model, costs, pp=template.pp, microbatches=microbatches),
        held=held,
        peak_bytes=peak,
        activation_bytes=activations,
        bounds=bounds,
    )


def _pooled(setting: Setting, bounds: Bounds, most_held: int, evaluations: int) -> tuple[Setting, Bounds]:
    """The setting with W pools, and a partition that is tuned to such pools if that is faster."""
    first = _with_pools(setting, bounds, most_held, evaluations // 2)
    tuned = step_tuned(first, [bounds], evaluations // 4)
    second = _with_pools(setting, tuned, most_held, evaluations // 2)
    return min(((first, bounds), (second, tuned)), key=lambda found: found[0].step_ns(found[1]))


def _with_pools(setting: Setting, bounds: Bounds, most_held: int, simulations: int) -> Setting:
    size = max(0, most_held - _held(setting.memory, bounds))
    return setting.with_template(with_pools(setting, bounds, size, simulations=simulations).template)


def _tuned(setting: Setting, starts: Sequence[Bounds], evaluations: int, seeds: int) -> Bounds:
    """The fastest partition found, not slower than the balanced ones and ``starts``."""
    ranks = setting.template.stage_ranks
    named = [
        *starts,
        equal_layers(setting.model, len(ranks)),
        serial_balanced(setting.model, setting.costs, ranks),
        balanced(setting.quick, ranks),
    ]
    return step_tuned(setting, [bounds for bounds in named if bounds is not None], evaluations, seeds=seeds)


def _held(memory: MemoryModel, bounds: Bounds) -> int:
    """Most bytes of activations and pending W that a rank holds at once (at its moment with most of these)."""
    chunks = ranges(bounds)
    return max(memory.held_bytes(rank, chunks) for rank in range(memory.ranks))


def _bounds(schedule: Schedule, model: ModelSpec, costs: CostTable, stage_ranks: Sequence[int]) -> Bounds:
    if schedule.partition == "equal":
        return equal_layers(model, len(stage_ranks))
    bounds = serial_balanced(model, costs, stage_ranks)
    assert bounds is not None, "without a limit there is always a partition"
    return bounds


def _two_copies(memory: MemoryModel, template: Template, bounds: Bounds) -> tuple[int, int]:
    """Bytes of the fullest rank when every rank holds one stage of either copy of the model: all, and held ones."""
    chunks = ranges(bounds) * 2
    peaks, activations = [], []
    for rank in range(template.pp):
        held = [stage for stage, owner in enumerate(template.stage_ranks) if owner == rank]
        moments = sum(memory.stage_bytes(s, np.asarray(chunks[s][0]), np.asarray(chunks[s][1])) for s in held)
        table = memory.table_bytes * any(memory.uses_table(chunks[s]) for s in held)
        peaks.append(int(np.max(moments)) + table)
        activations.append(memory.held_bytes(rank, chunks))
    return max(peaks), max(activations)
