"""What a person reads about a plan."""

from __future__ import annotations

import json
from dataclasses import replace

from rich.console import Console

from tessera_rt.costs import ItemMemory
from tessera_rt.plan import Mesh
from tessera_rt.planner.build import build_plan
from tessera_rt.planner.explain import (
    alternative_rows,
    explain,
    interleaving_line,
    item_names,
    memory_rows,
    stage_rows,
)
from tessera_rt.testing.costs import dense_model, moe_model, uniform_costs


def test_rows_hold_the_plan_in_plain_data() -> None:
    model = moe_model(6, mtp=1)
    costs = uniform_costs(model, (10, 20, 30), comm_ns=4, memory=ItemMemory(weights=7, activations=5))
    plan = build_plan(model, Mesh(pp=2, vpp=2), costs, microbatches=8, memory_limit=10_000)
    stages = stage_rows(plan, model, costs)
    # Each of seven blocks: 10 + 2 * 4 forward, 20 + 2 * 4 backward, 30 weights.
    assert [sum(row[name] for row in stages) for name in ("f_ns", "b_ns", "w_ns")] == [7 * 18, 7 * 28, 7 * 30]
    assert [row["in_flight"] for row in stages] == [stage.slots for stage in plan.stages]
    assert all(row["limit_bytes"] == 10_000 for row in stages)
    memory = memory_rows(plan)
    for row in memory:
        parts = [size for name, size in row.items() if name not in ("rank", "peak_bytes", "limit_bytes")]
        assert sum(parts) == row["peak_bytes"]
    alternatives = alternative_rows(plan)
    assert alternatives[0]["step_ns"] == plan.solver.step_ns and alternatives[0]["relative"] == 1.0
    assert [row["step_ns"] for row in alternatives] == sorted(plan.solver.alternatives.values())
    json.dumps([stages, memory, alternatives])


def test_the_text_names_what_matters() -> None:
    model = moe_model(6, mtp=1)
    costs = uniform_costs(model, comm_ns=4)
    plan = build_plan(model, Mesh(pp=2, vpp=2), costs, microbatches=8)
    console = Console(width=160)
    with console.capture() as capture:
        console.print(explain(plan, model, costs))
    text = capture.get()
    for expected in (
        "EMBED",
        "HEAD",
        f"({plan.solver.bottleneck}) takes T_dom",
        "no partition has less than",
        "with contention 0; T_dom and the makespans of pairs are without contention",
        "objective step",
        f"interleavings: {sum(bool(entry.order) for entry in plan.interleavings.values())} exact (proven shortest)",
        "serial-balanced",
        "can be simulated, not run yet: mtp",
        "made by hand for a test",
    ):
        assert expected in text


def test_interleavings_that_are_not_proven_are_stated_with_their_gap() -> None:
    model = moe_model(6)
    plan = build_plan(model, Mesh(pp=2), uniform_costs(model, comm_ns=4), microbatches=4, method="align")
    (key, entry), *others = ((k, e) for k, e in plan.interleavings.items() if e.order)
    assert interleaving_line(plan) == f"{1 + len(others)} by +Align"
    bounded = replace(entry, method="defer", bound_ns=entry.makespan_ns * 4 // 5)
    limited = replace(plan, interleavings={**plan.interleavings, key: bounded})
    gap = bounded.makespan_ns / bounded.bound_ns - 1
    assert interleaving_line(limited) == (
        f"{len(others)} by +Align, 1 by +Defer, without contention at most {gap:.1%} longer than the proven bound"
    )


def test_item_names() -> None:
    model = dense_model(4, mtp=2)
    assert item_names(model, 0, 3) == "EMBED, L0-L1"
    assert item_names(model, 4, 8) == "L3, M0-M1, HEAD"
    assert item_names(model, 2, 2) == "(empty)"
