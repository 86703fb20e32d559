"""Starting a training run: costs, then the plan, then the ranks, from one configuration.

On one machine (``run_training``) the ranks are started here. Under torchrun (``train_under_torchrun``) they exist, and
every one of them comes here.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from tessera_rt.checkpoint import find_checkpoint
from tessera_rt.config import TrainConfig, run_folder
from tessera_rt.cost_sources.device import load_device
from tessera_rt.cost_sources.roofline import roofline_costs
from tessera_rt.costs import CostTable, Recompute
from tessera_rt.data import open_data
from tessera_rt.errors import CostError, Problem, SpecError, TesseraError
from tessera_rt.files.cost_files import load_cost_table, save_cost_table
from tessera_rt.files.plan_files import load_plan
from tessera_rt.launch import init_from_torchrun, run_local
from tessera_rt.plan import Plan
from tessera_rt.profile import check_runnable, profile_costs, profile_on_ranks
from tessera_rt.train import METRICS, TrainSummary, check_plan_fits, make_plan, resumed_checkpoint, train

COSTS_FILE = "costs.yaml"
LOGS = "logs"

Measure = Callable[[TrainConfig, Recompute], CostTable]
Say = Callable[[str], None]
_Made = TypeVar("_Made")


def _silent(text: str) -> None:
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A plan and the costs it was made with (None for a plan from a file)."""

    plan: Plan
    costs: CostTable | None


def prepare(config: TrainConfig, *, measure: Measure = profile_costs, say: Say = _silent) -> Prepared:
    """The plan that a configuration names or asks for. ``measure``: how ``plan.costs: measured`` is done.

    Raises the errors of ``check_start``, cost files, devices, plan files and the planner.
    """
    check_start(config)
    prepared = _prepare(config, measure, say)
    empty = [str(stage.index) for stage in prepared.plan.stages if stage.start == stage.stop]
    if config.mesh.stages > len(config.model.items):
        say(
            f"warning: {len(empty)} of {len(prepared.plan.stages)} stages are empty ({', '.join(empty)}): "
            f"the model has {len(config.model.items)} items; less mesh.pp or mesh.vpp would do"
        )
    return prepared


def check_start(config: TrainConfig) -> None:
    """What a run needs beside its configuration: data, the checkpoint it goes on with, a folder that can be written.

    Raises SpecError. It comes before anything is measured, planned or started; nothing is left behind.
    """
    data = open_data(config.data, vocab=config.vocab, seed=config.run.seed)
    data.check_ids()
    try:
        folder = run_folder(config)
        _try_folder(folder)
    except OSError as fault:
        named = config.run.folder or f"runs/{config.name}"
        allowed = f"a folder that can be made and written ({fault.strerror}: {fault.filename})"
        raise SpecError.of("run", [Problem("run.folder", named, allowed)]) from None
    resumed_checkpoint(config, folder, tokens=len(data.train.tokens))


def _prepare(config: TrainConfig, measure: Measure, say: Say) -> Prepared:
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
    config: TrainConfig, policy: Recompute, *, measure: Measure = profile_costs, say: Say = _silent
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
        for name in ("tokens", "context", "dp", "ep", "dtype", "optimizer", "momentum")
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
        stopped_at=lambda: how_to_go_on(folder),
    )
    return found[0]


def how_to_go_on(folder: Path) -> str:
    """For a run that was stopped: the step it had done, and how to resume it."""
    try:
        last = (folder / METRICS).read_text(encoding="utf-8").splitlines()[-1]
        at = f"at step {int(json.loads(last)['step'])}"
    except (OSError, IndexError, ValueError, KeyError, TypeError):
        at = "before its first step"  # or in the middle of writing the line of it
    try:
        checkpoint = find_checkpoint(folder)
    except SpecError:
        checkpoint = None
    if checkpoint is None:
        return f"{at}; there is no checkpoint to resume from (run.save_every sets how often one is saved)"
    return f"{at}; resume with run.resume=latest run.folder={folder} (last checkpoint: {checkpoint})"


def train_under_torchrun(config: TrainConfig) -> TrainSummary | None:
    """Train on the ranks that torchrun started; costs are measured on them, the first one plans for all.

    Returns the summary on the first rank, None on the others.
    """
    init_from_torchrun(timeout_s=config.run.timeout_s)
    _on_first_rank(lambda: check_start(config))
    measured = None
    if not config.plan.file and config.plan.costs == "measured":
        policies = list(Recompute) if config.plan.recompute == "auto" else [Recompute(config.plan.recompute)]
        measured = {policy: profile_on_ranks(config, policy) for policy in policies}
    prepared = _on_first_rank(lambda: _prepare(config, lambda _, policy: (measured or {})[policy], _silent))
    folder = _on_first_rank(lambda: run_folder(config))
    if dist.get_rank() == 0:
        _save_costs(prepared, folder)
    summary = train(config, prepared.plan, folder)
    first = dist.get_rank() == 0
    dist.destroy_process_group()
    return summary if first else None


def _on_first_rank(make: Callable[[], _Made]) -> _Made:
    """What the first rank makes, on all ranks; an error of ours that it raises is raised on all of them."""
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            told[0] = make()
        except TesseraError as error:
            told[0] = error
    dist.broadcast_object_list(told, src=0)
    if isinstance(told[0], TesseraError):
        raise told[0]
    made: _Made = told[0]
    return made


def _try_folder(folder: Path) -> None:
    """Make the folder, write a file in it, and take away what was made. Raises OSError."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".tessera-"):
            pass
    finally:
        for path in made:
            if path.is_dir():
                path.rmdir()


def _save_costs(prepared: Prepared, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if prepared.costs is not None:
        save_cost_table(prepared.costs, folder / COSTS_FILE)
