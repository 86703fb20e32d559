"""Sensitivity: an error that makes another partition better is found, and only then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tessera_rt.costs import TaskCost
from tessera_rt.errors import ScheduleError
from tessera_rt.plan import Mesh
from tessera_rt.planner import sensitivity as module
from tessera_rt.planner.build import plan_with
from tessera_rt.planner.pair_costs import PairCosts
from tessera_rt.planner.sensitivity import sensitivity
from tessera_rt.scheduler.simulate import simulate
from tessera_rt.testing.costs import dense_model, item_costs

MODEL = dense_model(5)  # EMBED L0 ... L4 HEAD


def test_a_heavier_head_moves_the_boundary() -> None:
    """Two ranks: three layers against two and the head, which is as long as one layer: a longer head asks for another
    layer on the first rank. Messages take no time, so an error in them changes nothing."""
    costs = item_costs(MODEL, {"HEAD": (100, 100, 100)}, default=(100, 100, 100))
    costs = replace(costs, tasks={**costs.tasks, "F_EMBED": TaskCost(ns=0), "B_EMBED": TaskCost(ns=0)})
    plan = plan_with((0, 4, 7), MODEL, Mesh(pp=2), costs, microbatches=8)
    effects = {(e.kind, e.error > 0): e for e in sensitivity(plan, MODEL, costs, error=0.9)}
    assert set(effects) == {(kind, up) for kind in ("EMBED", "ATTN", "MLP", "HEAD", "LINK") for up in (True, False)}
    for (kind, _), effect in effects.items():
        factor = 1 + effect.error
        tasks = {
            name: replace(cost, ns=round(cost.ns * factor)) if f"_{kind}" in name else cost
            for name, cost in costs.tasks.items()
        }
        assert effect.step_ns == simulate(plan, MODEL, replace(costs, tasks=tasks)).step_ns
        assert effect.best_ns <= effect.step_ns and effect.regret >= 0
        assert effect.regret <= 0.001 or effect.changes_at is not None
    longer = effects["HEAD", True]
    assert longer.best == "stage 1 begins later" and longer.regret > 0.01
    assert longer.changes_at is not None and 0 < longer.changes_at <= 0.9
    assert effects["LINK", True].regret == 0 and effects["LINK", True].best == "plan"


def test_partitions_over_the_limit_are_no_rivals() -> None:
    costs = item_costs(MODEL, {"HEAD": (100, 100, 100)}, default=(100, 100, 100))
    plan = plan_with((0, 4, 7), MODEL, Mesh(pp=2), costs, microbatches=8)
    tight = replace(plan, memory=tuple(replace(m, limit=1) for m in plan.memory))
    memory = {label: replace(m, weights=10) for label, m in costs.memory.items()}
    effects = sensitivity(tight, MODEL, replace(costs, memory=memory), error=0.9)
    assert {effect.best for effect in effects} == {"plan"}


@pytest.mark.parametrize(
    ("named", "method"), [("contended", "exact"), ("align", "exact"), ("fifo", "exact"), (None, "align")]
)
def test_rivals_have_orders_by_the_method_of_the_plan(
    named: str | None, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever one pair's order is called: the search for the optimum may have found nothing better than a weaker
    method's."""
    costs = item_costs(MODEL, {"HEAD": (100, 100, 100)}, default=(100, 100, 100))
    plan = plan_with((0, 4, 7), MODEL, Mesh(pp=2), costs, microbatches=8)
    first, *others = [key for key in plan.interleavings if ";" in key]
    assert others
    names = {first: named or "align"} | dict.fromkeys(others, "exact" if named else "align")
    changed = {key: replace(plan.interleavings[key], method=name) for key, name in names.items()}
    asked: list[str] = []

    def recorded(*args: Any, method: str) -> PairCosts:
        asked.append(method)
        return PairCosts(*args, method=method)

    monkeypatch.setattr(module, "PairCosts", recorded)
    sensitivity(replace(plan, interleavings={**plan.interleavings, **changed}), MODEL, costs)
    assert asked == [method]


def test_mistakes_are_named() -> None:
    costs = item_costs(MODEL, {}, default=(1, 1, 1))
    plan = plan_with((0, 7), MODEL, Mesh(), costs, microbatches=1)
    for error in (0.0, 1.0, float("nan")):
        with pytest.raises(ScheduleError, match="error.*between 0 and 1"):
            sensitivity(plan, MODEL, costs, error=error)
    with pytest.raises(ScheduleError, match="tolerance"):
        sensitivity(plan, MODEL, costs, tolerance=-1.0)
