"""The communication SM budget of a plan: more SMs move data faster and leave less of the GPU to compute.

Every budget has a cost table of its own (durations, contention). One is chosen for the whole plan, by the simulated
step of the serial-balanced partition with pairs in +Align's order. Ties go to the smaller budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tessera_rt.costs import CostTable, Recompute
from tessera_rt.errors import PlanError, Problem
from tessera_rt.model_spec import ModelSpec
from tessera_rt.planner.baselines import serial_balanced
from tessera_rt.planner.setting import Setting
from tessera_rt.scheduler.templates import Template

Costs = CostTable | Callable[..., CostTable]
"""A cost table, or a function that makes one: of a recomputation policy, and of a keyword ``comm_sms`` where there are
budgets to choose from."""


def best_budget(
    costs: Callable[..., CostTable],
    recompute: Recompute,
    budgets: Sequence[int],
    model: ModelSpec,
    template: Template,
    *,
    tapered: int = 0,
) -> CostTable:
    """The cost table of the best budget; its provenance notes the others. ``tapered``: as in ``Setting``.

    Raises PlanError for a budget below 1, CostError for one that the device does not have.
    """
    wrong = [budget for budget in budgets if not isinstance(budget, int) or budget < 1]
    if wrong:
        raise PlanError.of("plan request", [Problem("comm_sms", wrong[0], "a number of SMs of at least 1")])
    tables = [costs(recompute, comm_sms=budget) for budget in sorted(set(budgets))]
    steps = [_step_ns(table, model, template, tapered) for table in tables]
    best = min(range(len(tables)), key=steps.__getitem__)
    if len(tables) == 1:
        return tables[0]
    tried = ", ".join(f"{table.comm_sms}: {step / 1e6:.1f}" for table, step in zip(tables, steps, strict=True))
    note = f"communication SMs chosen by the simulated step (ms) of the serial-balanced partition, {tried}"
    chosen = tables[best]
    return replace(chosen, provenance=replace(chosen.provenance, notes=(*chosen.provenance.notes, note)))


def _step_ns(table: CostTable, model: ModelSpec, template: Template, tapered: int) -> int:
    bounds = serial_balanced(model, table, template.stage_ranks)
    assert bounds is not None, "without a limit there is always a partition"
    method = template.interleaving or "align"
    return Setting(model, table, template, limit=0, method=method, tapered=tapered).step_ns(bounds)
