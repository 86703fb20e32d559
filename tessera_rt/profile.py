"""Measuring costs: what every task of a model takes on this machine, with the ranks that a training run would have.

The real engine runs a few steps of an equal-layer plan with overlap off, so that tasks are timed one by one; the
samples come from the ranks' event logs. The first step is dropped (it allocates and loads). Members of a collective
wait for the latest of them, so its duration is the shortest that any member saw.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from tessera_rt.config import TrainConfig
from tessera_rt.cost_sources.measured import measured_costs
from tessera_rt.costs import CostTable, Link, Recompute
from tessera_rt.data import Layout, open_data
from tessera_rt.engine.engine import Engine
from tessera_rt.engine.events import Event, EventKind
from tessera_rt.engine.mesh import Groups
from tessera_rt.errors import Problem, SpecError
from tessera_rt.launch import run_local
from tessera_rt.models.hybrid import HybridModel
from tessera_rt.plan import Mesh, Plan
from tessera_rt.planner.baselines import equal_layers
from tessera_rt.planner.build import plan_with
from tessera_rt.tasks import Pass, Resource, TaskKind, chunk_tasks, parse_task_name

STEPS = 5
"""Steps of a measurement; the first is dropped."""
_FEWEST_MICROBATCHES = 4
_SMALL_BYTES, _LARGE_BYTES = 8, 1 << 22
_REPEATS = 20

Run = tuple[int, str, int]
"""One run of a task: step, task name, micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSamples:
    """What one global rank measured. ``durations`` in ns; ``link`` where this rank measured the point-to-point link."""

    rank: int
    durations: Mapping[Run, int]
    link: Link | None


def profile_costs(
    config: TrainConfig,
    recompute: Recompute = Recompute.NONE,
    *,
    steps: int = STEPS,
) -> CostTable:
    """The costs of the configuration's model and mesh, measured by local ranks that are started for it.

    ``recompute``: B then includes what is done again. Contention between compute and communication is not measured: the
    table's is 0, and its notes say so. Raises SpecError for a configuration that cannot be run, TransportError when a
    rank fails.
    """
    _check_steps(steps)
    check_runnable(config)
    plan = profile_plan(config, recompute)
    found = run_local(profile_rank, plan.mesh.world, (config, plan, steps), timeout_s=config.run.timeout_s)
    return cost_table(config, plan, found, steps)


def profile_on_ranks(config: TrainConfig, recompute: Recompute = Recompute.NONE, *, steps: int = STEPS) -> CostTable:
    """The same measured by ranks that exist (under torchrun): collective, and equal on all of them."""
    plan = profile_plan(config, recompute)
    _check_steps(steps)
    found: list[RankSamples | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, profile_rank(config, plan, steps))
    return cost_table(config, plan, [samples for samples in found if samples is not None], steps)


def check_runnable(config: TrainConfig) -> None:
    """Raises SpecError for data or a model that ranks could not use, before any is started."""
    open_data(config.data, vocab=config.vocab, seed=config.run.seed)
    HybridModel(config.model, dropout=config.run.dropout)


def profile_plan(config: TrainConfig, recompute: Recompute = Recompute.NONE) -> Plan:
    """The plan that is run to measure: equal layers on every stage, and no more micro-batches than samples need.

    Only the times of tasks matter, so it has the plain order for the mesh: the configuration's own template may not
    allow so few micro-batches.
    """
    model = config.model
    names = [name for pass_ in (Pass.F, Pass.B) for name in chunk_tasks(model.items, pass_).names]
    unknown = measured_costs(
        model, config.workload(recompute), {name: [1.0] for name in names}, device="", versions="", link=Link()
    )
    return plan_with(
        equal_layers(model, config.mesh.stages),
        model,
        config.mesh,
        unknown,
        microbatches=min(config.data.microbatches, max(_FEWEST_MICROBATCHES, config.mesh.pp)),
    )


def profile_rank(config: TrainConfig, plan: Plan, steps: int) -> RankSamples:
    """What every rank runs: ``steps`` training steps with a learning rate of 0. Collective; the group must exist."""
    data = open_data(config.data, vocab=config.vocab, seed=config.run.seed)
    model = HybridModel(config.model, seed=config.run.seed, dropout=config.run.dropout)
    durations: dict[Run, int] = {}
    with Engine(model, plan, overlap=False, seed=config.run.seed, timeout_s=config.run.timeout_s) as engine:
        groups = engine.groups
        layout = Layout(
            rank=groups.dp_i * plan.mesh.ep + groups.ep_i,
            ranks=plan.mesh.dp * plan.mesh.ep,
            microbatches=plan.microbatches,
            rows=config.data.microbatch_size,
        )
        for step in range(steps):
            engine.step(data.batch(step * layout.rows_per_step, layout), lr=0.0)
            if step:
                durations |= {(step, *task): ns for task, ns in task_durations(engine.events()).items()}
        return RankSamples(rank=groups.rank, durations=durations, link=measure_link(groups))


def task_durations(events: Sequence[Event]) -> dict[tuple[str, int], int]:
    """(Task name, micro-batch) -> ns from START to END, or from ISSUE to DONE, of one rank's log of one step."""
    opened: dict[tuple[str, int], int] = {}
    durations: dict[tuple[str, int], int] = {}
    for event in events:
        task = (event.task.name, event.task.microbatch)
        if event.kind in (EventKind.START, EventKind.ISSUE):
            opened[task] = event.ns
        elif event.kind in (EventKind.END, EventKind.DONE):
            durations[task] = event.ns - opened.pop(task)
    return durations


def task_samples(found: Sequence[RankSamples], mesh: Mesh) -> dict[str, list[float]]:
    """Task name -> samples (ns) of all ranks: one per run of a compute task, one per collective."""
    samples: dict[str, list[float]] = {}
    collectives: dict[tuple[Run, int, int], int] = {}
    for of_rank in sorted(found, key=lambda samples: samples.rank):
        pp_i, dp_i, _ = mesh.coordinate(of_rank.rank)
        for run, ns in of_rank.durations.items():
            kind = parse_task_name(run[1])[1]
            if kind.resource is Resource.COMP:
                samples.setdefault(run[1], []).append(ns)
            else:  # COUNT runs over dp x ep, the others over ep
                key = (run, pp_i, -1 if kind is TaskKind.COUNT else dp_i)
                collectives[key] = min(ns, collectives.get(key, ns))
    for (run, _, _), ns in collectives.items():
        samples.setdefault(run[1], []).append(ns)
    return samples


def measure_link(groups: Groups) -> Link | None:
    """Latency and bandwidth between pipeline ranks 0 and 1 of the first column, while the other ranks wait.

    Latency: half of the median round trip of a small message. Bandwidth: from what a large one takes beyond it, or from
    all that it takes where the difference is no more than noise. None on ranks that only wait.
    """
    dist.barrier(group=groups.world)
    link = None
    if groups.mesh.pp > 1 and groups.pp_i < 2 and (groups.dp_i, groups.ep_i) == (0, 0):
        sizes = (_SMALL_BYTES, _LARGE_BYTES)
        trips = [[_round_trip_ns(groups, size) for size in sizes] for _ in range(_REPEATS + 1)]
        small, large = (median(times) / 2 for times in zip(*trips[1:], strict=True))  # the first pair warms up
        moving = large - small if large > 2 * small else large
        link = Link(latency_ns=round(small), bytes_per_s=round(_LARGE_BYTES * 1e9 / moving))
    dist.barrier(group=groups.world)
    return link


def cost_table(config: TrainConfig, plan: Plan, found: Sequence[RankSamples], steps: int) -> CostTable:
    """The table of what the ranks measured."""
    link = next((samples.link for samples in found if samples.link is not None), Link())
    cores = len(os.sched_getaffinity(0))
    world = plan.mesh.world
    notes = [
        f"{world} ranks with one thread each on {cores} cores, one task after the other; a task's time includes its "
        "wait for a core",
        f"{steps - 1} steps of {plan.microbatches} micro-batches after one that was dropped; the median counts",
        "a collective takes what its fastest member saw",
        "contention between compute and communication was not measured; it is taken as 0",
    ]
    if plan.mesh.pp == 1:
        notes.append("one pipeline rank: no link was measured")
    return measured_costs(
        config.model,
        plan.workload,
        task_samples(found, plan.mesh),
        device=cpu_model(),
        versions=f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}",
        link=link,
        warmup=0,
        notes=notes,
    )


def cpu_model() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _round_trip_ns(groups: Groups, size: int) -> int:
    """A message of ``size`` bytes from pipeline rank 0 to 1 and back. Both directions always exist: F and B."""
    there, back = groups.edges[0, 1], groups.edges[1, 0]
    content = torch.zeros(size, dtype=torch.uint8)
    started = time.perf_counter_ns()
    if groups.pp_i == 0:
        dist.send(content, dst=groups.global_rank(1), group=there)
        dist.recv(content, src=groups.global_rank(1), group=back)
    else:
        dist.recv(content, src=groups.global_rank(0), group=there)
        dist.send(content, dst=groups.global_rank(0), group=back)
    return time.perf_counter_ns() - started


def _check_steps(steps: int) -> None:
    if steps < 2:
        raise SpecError.of("profile", [Problem("steps", steps, "at least 2: the first is dropped")])
