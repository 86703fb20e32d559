"""Executing plans on the emulated device: real processes, messages and engine, stub tensors, virtual time.

All dp x ep ranks of a pipeline rank do the same at the same times when their costs are alike, so by default one process
stands for them: a plan for 256 accelerators with 8 pipeline ranks takes 8 processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from tessera_rt.costs import CostTable
from tessera_rt.engine.emulated import EmulatedDevice
from tessera_rt.engine.engine import Engine
from tessera_rt.engine.stub import StubModel
from tessera_rt.errors import PlanError, Problem
from tessera_rt.launch import run_local
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Plan
from tessera_rt.plan_check import check_plan
from tessera_rt.timeline import Timeline

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """One step to execute. ``label`` names its timeline (default: the plan's template)."""

    plan: Plan
    overlap: bool = True
    label: str = ""


def emulate(
    plan: Plan,
    model: ModelSpec,
    costs: CostTable,
    *,
    overlap: bool = True,
    contention: float | None = None,
    timeout_s: float = TIMEOUT_S,
    all_ranks: bool = False,
    label: str = "",
) -> Timeline:
    """The timeline of one step of ``plan``, executed in virtual time; see ``emulate_many``."""
    run = Emulation(plan=plan, overlap=overlap, label=label)
    return emulate_many([run], model, costs, contention=contention, timeout_s=timeout_s, all_ranks=all_ranks)[0]


def emulate_many(
    runs: Sequence[Emulation],
    model: ModelSpec,
    costs: CostTable,
    *,
    contention: float | None = None,
    timeout_s: float = TIMEOUT_S,
    all_ranks: bool = False,
) -> tuple[Timeline, ...]:
    """The timelines of several steps, one after the other on the same ranks, since starting ranks is slow.

    ``contention`` None: that of the cost table. ``all_ranks``: a process for every rank of the mesh instead of one per
    pipeline rank. ``timeout_s``: of every wait. Raises PlanError for plans of different numbers of ranks or that the
    engine cannot run, TransportError when a rank fails.
    """
    if not runs:
        return ()
    plans = [run.plan if all_ranks else one_column(run.plan) for run in runs]
    worlds = sorted({plan.mesh.world for plan in plans})
    if len(worlds) > 1:
        allowed = f"{plans[0].mesh.world} ranks, as in the first plan"
        raise PlanError.of("emulation", [Problem("plans", f"for {worlds} ranks", allowed, "emulate them one by one")])
    for plan in plans:
        check_plan(plan, model)
    given = [replace(run, plan=plan) for run, plan in zip(runs, plans, strict=True)]
    args = (given, model, costs, contention, timeout_s)
    return run_local(emulate_rank, worlds[0], args, timeout_s=timeout_s)[0]


def one_column(plan: Plan) -> Plan:
    """The same plan for one rank of each dp x ep x tp group. Durations stay those of the whole mesh."""
    return replace(
        plan,
        mesh=replace(plan.mesh, dp=1, ep=1, tp=1),
        workload=replace(plan.workload, dp=1, ep=1, tp=1),
        simulate_only=tuple(feature for feature in plan.simulate_only if feature != "tp"),
    )


def emulate_rank(
    runs: Sequence[Emulation], model: ModelSpec, costs: CostTable, contention: float | None, timeout_s: float
) -> tuple[Timeline, ...]:
    """What every rank runs. The timelines are returned by the first rank, the others return none."""
    timelines: list[Timeline] = []
    device = EmulatedDevice(costs, contention)
    for run in runs:
        tokens = torch.zeros(run.plan.microbatches, 1, dtype=torch.int64)
        with Engine(StubModel(model), run.plan, device=device, overlap=run.overlap, timeout_s=timeout_s) as engine:
            engine.step((tokens, tokens))
            timelines.append(engine.timeline(run.label or run.plan.template))
    return tuple(timelines) if dist.get_rank() == 0 else ()
