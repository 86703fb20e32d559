"""build_plan with every template, and with orders read from files of torch.distributed.pipelining."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_rt.costs import ItemMemory, Link
from tessera_rt.errors import PlanError, ScheduleError
from tessera_rt.files.exports import bounds_from_megatron, megatron_layout
from tessera_rt.files.plan_files import plan_from_yaml, plan_to_yaml
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Action, Mesh, Plan
from tessera_rt.plan_check import check_plan
from tessera_rt.planner.build import build_plan, plan_with
from tessera_rt.rendezvous import find_stuck
from tessera_rt.scheduler.chunked import MOE_HALVES
from tessera_rt.scheduler.simulate import simulate
from tessera_rt.scheduler.templates import PADS, RULES, TEMPLATES, build_template, in_flight
from tessera_rt.scheduler.torch_csv import plan_to_csv, template_from_csv
from tessera_rt.tasks import Pass, chunk_tasks
from tessera_rt.testing.costs import moe_model, uniform_costs
from tessera_rt.testing.random_costs import random_costs
from tessera_rt.testing.strategies import model_specs

MODEL = moe_model(6, dense_first=1, shared=True)
COSTS = uniform_costs(
    MODEL,
    (100, 90, 80),
    comm_ns=70,
    memory=ItemMemory(weights=100, activations=10, pending_w=5, output=8),
    link=Link(latency_ns=3, bytes_per_s=4e9),
    contention=0.1,
)


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_is_planned_simulated_and_saved(name: str) -> None:
    """With the whole search: the plan is sound, and its step is never longer than that of the balanced partition."""
    vpp = int(min(RULES[name].vpp[1], 2))
    plan = build_plan(MODEL, Mesh(pp=2, vpp=vpp), COSTS, microbatches=6, template=name, time_limit_s=2)
    check_plan(plan, MODEL)
    order = build_template(name, pp=2, vpp=vpp, microbatches=6, joint=True)
    assert plan.actions == order.actions
    assert tuple(stage.slots for stage in plan.stages) == in_flight(order)
    assert tuple(stage.rank for stage in plan.stages) == order.stage_ranks
    assert plan.solver.step_ns == simulate(plan, MODEL, COSTS).step_ns <= plan.solver.alternatives["serial-balanced"]
    assert plan_from_yaml(plan_to_yaml(plan), name) == plan
    assert plan.simulate_only == ()


@settings(max_examples=60)
@given(model_specs(max_layers=6), st.integers(0, 10_000), st.data())
def test_any_model_and_partition_under_every_template(model: ModelSpec, seed: int, data: st.DataObject) -> None:
    """check_plan accepts it, no order of messages blocks, and each task runs once; empty stages included."""
    name = data.draw(st.sampled_from(TEMPLATES), "template")
    least, most = RULES[name].vpp
    mesh = Mesh(pp=data.draw(st.integers(1, 4), "pp"), vpp=data.draw(st.integers(int(least), int(min(most, 3))), "vpp"))
    items = len(model.items)
    inner = data.draw(st.lists(st.integers(0, items), min_size=mesh.stages - 1, max_size=mesh.stages - 1), "cuts")
    costs = random_costs(model, seed, kinds=0, link=Link(latency_ns=data.draw(st.integers(0, 50), "latency")))
    m = data.draw(st.integers(1, 9), "microbatches")
    plan = plan_with(
        (0, *sorted(inner), items),
        model,
        mesh,
        costs,
        microbatches=m,
        template=name,
        joint=data.draw(st.booleans(), "joint") or RULES[name].joint_only,
        pad="shadow" if RULES[name].whole_groups else data.draw(st.sampled_from(PADS), "pad"),
        method=data.draw(st.sampled_from(("align", "fifo", "megatron")), "method"),
    )
    tasks = sum(len(chunk_tasks(model.items, pass_).tasks) for pass_ in (Pass.F, Pass.B))
    for overlap in (True, False):
        timeline = simulate(plan, model, costs, overlap=overlap)
        assert sum(span.lane != "LINK" for span in timeline.spans) == m * tasks
    assert find_stuck(plan) == ()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_plan_travels_as_csv_and_comes_back(name: str) -> None:
    """Its order read from torch's format, planned on the same partition, gives the same step."""
    vpp = int(min(RULES[name].vpp[1], 2))
    mesh = Mesh(pp=2, vpp=vpp)
    bounds = (0, 4, 8) if vpp == 1 else (0, 2, 4, 6, 8)
    plan = build_plan(MODEL, mesh, COSTS, microbatches=4, template=name, fixed_bounds=bounds)
    for comms in (False, True):
        order = replace(
            template_from_csv(plan_to_csv(plan, comms=comms), "mine"), interleaving=RULES[name].interleaving
        )
        again = build_plan(MODEL, mesh, COSTS, microbatches=4, template=order, fixed_bounds=bounds)
        solver = replace(again.solver, seconds=plan.solver.seconds)
        assert replace(again, template=name, solver=solver) == plan


def test_a_partition_travels_as_a_megatron_layout_and_comes_back() -> None:
    mesh = Mesh(pp=2, vpp=2)
    plan = build_plan(MODEL, mesh, COSTS, microbatches=4, template="megatron-1f1b", time_limit_s=2)
    bounds = bounds_from_megatron(megatron_layout(plan, MODEL), MODEL, pp=2)
    again = build_plan(MODEL, mesh, COSTS, microbatches=4, template="megatron-1f1b", fixed_bounds=bounds)
    assert again.stages == plan.stages


def test_an_order_for_other_sizes_is_refused() -> None:
    order = build_template("zb-v", pp=2, vpp=2, microbatches=4, joint=True)
    with pytest.raises(PlanError) as caught:
        build_plan(MODEL, Mesh(pp=3, vpp=1), COSTS, microbatches=5, template=order)
    assert [problem.field for problem in caught.value.problems] == ["mesh.pp", "mesh.vpp", "microbatches"]


def test_an_order_that_cannot_run_is_refused() -> None:
    order = build_template("1f1b", pp=2, vpp=1, microbatches=1, joint=False)
    swapped = tuple(map(Action.parse, ("0B0", "0F0")))
    with pytest.raises(ScheduleError, match="for ever"):
        build_plan(
            MODEL, Mesh(pp=2), COSTS, microbatches=1, template=replace(order, actions=(swapped, order.actions[1]))
        )


def test_options_of_the_step_are_checked_first() -> None:
    model = moe_model(4)
    costs = uniform_costs(model)

    def request(**options: Any) -> Plan:
        return build_plan(model, Mesh(pp=2, vpp=2), costs, microbatches=4, method="align", **options)

    with pytest.raises(PlanError) as caught:
        request(w_pool=-1, evaluations=-1)
    assert [problem.field for problem in caught.value.problems] == ["w_pool", "evaluations"]
    with pytest.raises(PlanError, match="moe_halves.*take an order of joint pairs"):
        request(moe_halves=True, joint=False)
    with pytest.raises(ScheduleError, match="group"):
        request(group=1)
    halved = request(moe_halves=True, evaluations=3)
    assert halved.simulate_only == (MOE_HALVES,)
    assert halved.solver.step_ns == simulate(halved, model, costs).step_ns
    grouped = request(group=4, evaluations=3)
    assert sum(stage.slots for stage in grouped.stages) > sum(stage.slots for stage in request(evaluations=3).stages)
