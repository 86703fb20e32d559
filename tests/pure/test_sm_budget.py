"""The communication SM budget: costs as functions of it, chosen by simulation, noted in the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tessera_rt.cost_sources.device import load_device
from tessera_rt.cost_sources.roofline import roofline_costs
from tessera_rt.costs import CostTable, Recompute, Workload
from tessera_rt.errors import CostError, PlanError
from tessera_rt.plan import Mesh
from tessera_rt.planner.build import build_plan
from tessera_rt.planner.sm_budget import best_budget
from tessera_rt.scheduler.templates import build_template
from tessera_rt.testing.costs import moe_model

H800 = load_device("h800")
MODEL = moe_model(6)
WORKLOAD = Workload(tokens=4096, context=4096, ep=4)
TEMPLATE = build_template("1f1b", pp=2, vpp=1, microbatches=4, joint=True)


def costs(policy: Recompute, comm_sms: int | None = None) -> CostTable:
    """A thousand times those of this small model, so that notes in ms tell steps apart."""
    table = roofline_costs(MODEL, replace(WORKLOAD, recompute=policy), H800, comm_sms=comm_sms)
    return replace(table, tasks={name: replace(cost, ns=1000 * cost.ns) for name, cost in table.tasks.items()})


def steps(budgets: tuple[int, ...], made: object = costs, tapered: int = 0) -> dict[int, int]:
    """Simulated step of the serial-balanced plan with +Align for every budget."""
    return {
        sms: build_plan(
            MODEL,
            Mesh(pp=2, ep=4),
            made(Recompute.NONE, comm_sms=sms),  # type: ignore[operator]
            microbatches=4,
            tapered=tapered,
            objective="serial",
            method="align",
        ).solver.step_ns
        for sms in budgets
    }


@pytest.mark.parametrize("tapered", [0, 2])
def test_the_fastest_budget_is_taken_and_the_plan_says_so(tapered: int) -> None:
    budgets = (2, 8, 20, 60)
    request = {"microbatches": 4, "tapered": tapered, "recompute": "none", "comm_sms": budgets}
    plan = build_plan(MODEL, Mesh(pp=2, ep=4), costs, **request)  # type: ignore[arg-type]
    found = steps(budgets, tapered=tapered)
    best = min(found, key=found.__getitem__)
    assert plan.assumptions.comm_sms == best
    assert plan.assumptions.contention == H800.contention_at(best)
    assert {entry.comm_sms for entry in plan.interleavings.values()} == {best}
    (note,) = [note for note in plan.assumptions.notes if "chosen by the simulated step" in note]
    assert all(f"{sms}: {step / 1e6:.1f}" in note for sms, step in found.items()), note


def test_the_choice_follows_what_communication_costs() -> None:
    """Few SMs when compute pays for each of them, many when only they make communication fast."""

    def greedy(policy: Recompute, comm_sms: int) -> CostTable:
        return replace(costs(policy, comm_sms), contention=comm_sms / 10)

    def hungry(policy: Recompute, comm_sms: int) -> CostTable:
        table = costs(policy, 2)
        slow = {
            n: replace(c, ns=c.ns * 40 // comm_sms if "DISP" in n or "COMB" in n else c.ns)
            for n, c in table.tasks.items()
        }
        return replace(table, tasks=slow, comm_sms=comm_sms, contention=0.0)

    assert best_budget(greedy, Recompute.NONE, (8, 24, 60), MODEL, TEMPLATE).comm_sms == 8
    assert best_budget(hungry, Recompute.NONE, (60, 8, 24), MODEL, TEMPLATE).comm_sms == 60
    same = best_budget(
        lambda policy, comm_sms: replace(costs(policy), comm_sms=comm_sms), Recompute.NONE, (9, 3), MODEL, TEMPLATE
    )
    assert same.comm_sms == 3, "ties go to the smaller budget"


def test_budgets_that_cannot_be() -> None:
    request = {"microbatches": 4, "recompute": "none"}
    with pytest.raises(PlanError, match="comm_sms"):
        build_plan(MODEL, Mesh(pp=2, ep=4), costs(Recompute.NONE), comm_sms=(8, 16), **request)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="at least 1"):
        build_plan(MODEL, Mesh(pp=2, ep=4), costs, comm_sms=(0, 16), **request)  # type: ignore[arg-type]
    with pytest.raises(CostError, match="comm_sms"):
        build_plan(MODEL, Mesh(pp=2, ep=4), costs, comm_sms=(132,), **request)  # type: ignore[arg-type]


def test_devices_name_their_candidates() -> None:
    for name in ("h800", "h200"):
        device = load_device(name)
        assert device.comm_sms in device.comm_sms_candidates
        assert list(device.comm_sms_candidates) == sorted(set(device.comm_sms_candidates))
    assert replace(H800, comm_sms_candidates=()).comm_sms_candidates == (H800.comm_sms,)
