"""Starting a training run: costs, then the plan, then the ranks, from one configuration.

On one machine (``run_training``) the ranks are started here. Under torchrun (``train_under_torchrun``) they exist, and
every one of them comes here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from tessera_rt.config import TrainConfig, run_folder
from tessera_rt.cost_sources.device import load_device
from tessera_rt.cost_sources.roofline import roofline_costs
from tessera_rt.costs import CostTable, Recompute
from tessera_rt.errors import CostError, Problem, TesseraError
from tessera_rt.files.cost_files import load_cost_table, save_cost_table
from tessera_rt.files.plan_files import load_plan
from tessera_rt.launch import init_from_torchrun, run_local
from tessera_rt.plan import Plan
from tessera_rt.profile import check_runnable, profile_costs, profile_on_ranks
from tessera_rt.train import TrainSummary, check_plan_fits, make_plan, train

COSTS_FILE = "costs.yaml"
LOGS = "logs"

Measure = Callable[[TrainConfig, Recompute], CostTable]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A plan and the costs it was made with (None for a plan from a file)."""

    plan: Plan
    costs: CostTable | None


def prepare(config: TrainConfig, *, measure: Measure = profile_costs, say: Say = lambda text: None) -> Prepared:
    """The plan that a configuration names or asks for. ``measure``: how ``plan.costs: measured`` is done.

    Raises the errors of cost files, devices, plan files and the planner.
    """
    section = config.plan
    if section.file:
        plan = load_plan(section.file, model=config.model)
        check_plan_fits(config, plan)
        return Prepared(plan=plan, costs=None)
    tables: dict[Recompute, CostTable] = {}

    def costs(policy: Recompute) -> CostTable:
        if policy not in tables:
            tables[policy] = costs_of(config, policy, measure=measure, say=say)
        return tables[policy]

    if section.costs in ("measured", "roofline"):
        costs(
            Recompute.NONE if section.recompute == "auto" else Recompute(section.recompute)
        )  # not within planning time
        plan = make_plan(config, costs)
        return Prepared(plan=plan, costs=costs(plan.workload.recompute))
    table = cost_file(config)
    return Prepared(plan=make_plan(config, table), costs=table)


def costs_of(
    config: TrainConfig, policy: Recompute, *, measure: Measure = profile_costs, say: Say = lambda text: None
) -> CostTable:
    """Costs under a recomputation policy, measured or computed, as the configuration says."""
    if config.plan.costs == "roofline":
        return roofline_costs(config.model, config.workload(policy), load_device(config.plan.device))
    say(f"measuring what every task takes on {config.mesh.world} local ranks (recomputation {policy})")
    return measure(config, policy)


def cost_file(config: TrainConfig) -> CostTable:
    """The cost table that the configuration names. Raises CostError if it is for another workload."""
    table = load_cost_table(config.plan.costs, model=config.model)
    wanted = config.workload(table.workload.recompute)
    problems = [
        Problem(f"workload.{name}", getattr(table.workload, name), f"{getattr(wanted, name)}, as configured", remedy)
        for name in ("tokens", "context", "dp", "ep", "dtype", "optimizer")
        for remedy in ["measure again with tessera profile"]
        if getattr(table.workload, name) != getattr(wanted, name)
    ]
    allowed = (table.workload.recompute, "auto")
    if config.plan.recompute not in allowed:
        problems.append(Problem("plan.recompute", config.plan.recompute, f"{allowed[0]}, as in the cost table"))
    if problems:
        raise CostError.of(config.plan.costs, problems)
    return table


def run_training(config: TrainConfig, prepared: Prepared, folder: Path | None = None) -> TrainSummary:
    """Train on new local ranks. ``folder``: of the run (default: the first that is free).

    It also gets the costs, and the output of all ranks but the first.
    """
    check_runnable(config)
    folder = folder or run_folder(config)
    _save_costs(prepared, folder)
    found = run_local(
        train,
        config.mesh.world,
        (config, prepared.plan, folder),
        timeout_s=config.run.timeout_s,
        log_dir=folder / LOGS,
    )
    return found[0]


def train_under_torchrun(config: TrainConfig) -> TrainSummary | None:
    """Train on the ranks that torchrun started; costs are measured on them, the first one plans for all.

    Returns the summary on the first rank, None on the others.
    """
    init_from_torchrun(timeout_s=config.run.timeout_s)
    measured = None
    if not config.plan.file and config.plan.costs == "measured":
        policies = list(Recompute) if config.plan.recompute == "auto" else [Recompute(config.plan.recompute)]
        measured = {policy: profile_on_ranks(config, policy) for policy in policies}
    told: list[Prepared | TesseraError | None] = [None]
    if dist.get_rank() == 0:
        try:
            told[0] = prepare(config, measure=lambda _, policy: (measured or {})[policy])
        except TesseraError as error:
            told[0] = error
    dist.broadcast_object_list(told, src=0)
    prepared = told[0]
    if isinstance(prepared, TesseraError):
        raise prepared
    assert prepared is not None
    names: list[str] = [str(run_folder(config)) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names, src=0)
    folder = Path(names[0])
    if dist.get_rank() == 0:
        _save_costs(prepared, folder)
    summary = train(config, prepared.plan, folder)
    first = dist.get_rank() == 0
    dist.destroy_process_group()
    return summary if first else None


def _save_costs(prepared: Prepared, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if prepared.costs is not None:
        save_cost_table(prepared.costs, folder / COSTS_FILE)
