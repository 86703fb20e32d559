"""Small inputs that broke other planners, with the right numbers (checked by brute force or event simulation)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from tessera_rt.costs import CostTable, ItemMemory
from tessera_rt.errors import PartitionInfeasible, PlanError, TesseraError
from tessera_rt.files.plan_files import load_plan, save_plan
from tessera_rt.model_spec import ItemKind, ModelSpec
from tessera_rt.plan import Mesh, Plan
from tessera_rt.plan_check import check_plan
from tessera_rt.planner.build import build_plan
from tessera_rt.planner.candidates import Range
from tessera_rt.planner.least import t_dom_bound
from tessera_rt.planner.milp_problem import MilpProblem
from tessera_rt.planner.partition_milp import MilpAnswer, scipy_solver
from tessera_rt.planner.setting import Setting
from tessera_rt.scheduler.templates import build_template
from tessera_rt.testing.costs import dense_model, item_costs, moe_model, uniform_costs
from tessera_rt.testing.random_costs import random_costs

OBJECTIVES = ("step", "t_dom", "serial")
LONG = 1000.0  # seconds that no solver needs here, on however busy a machine


def sizes(plan: Plan) -> list[int]:
    """Items of every stage."""
    return [stage.stop - stage.start for stage in plan.stages]


def layers(plan: Plan, model: ModelSpec) -> list[int]:
    """Decoder layers of every stage."""
    return [sum(item.kind is ItemKind.LAYER for item in model.items[stage.start : stage.stop]) for stage in plan.stages]


def stage_times(plan: Plan, model: ModelSpec, times: dict[str, int]) -> list[int]:
    return [sum(times.get(item.label, 0) for item in model.items[s.start : s.stop]) for s in plan.stages]


def assert_all_placed(plan: Plan, model: ModelSpec) -> None:
    assert [i for s in plan.stages for i in range(s.start, s.stop)] == list(range(len(model.items)))


def costs_of(model: ModelSpec, times: dict[str, int], memory: dict[str, int] | None = None) -> CostTable:
    """Forward, input gradient and weight gradient of an item each take its time; memory is weights."""
    return item_costs(
        model,
        {label: (time, time, time) for label, time in times.items()},
        {label: ItemMemory(weights=size) for label, size in (memory or {}).items()},
    )


def layer_times(count: int, time: int = 1) -> dict[str, int]:
    return {f"L{i}": time for i in range(count)}


@pytest.mark.parametrize(("count", "pp", "most"), [(30, 4, 8), (10, 3, 4), (7, 2, 4), (61, 16, 4)])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_case_1_layers_that_stages_do_not_divide(count: int, pp: int, most: int, objective: str) -> None:
    model = dense_model(count)
    plan = build_plan(model, Mesh(pp=pp), costs_of(model, layer_times(count)), microbatches=2 * pp, objective=objective)
    assert_all_placed(plan, model)
    assert sum(layers(plan, model)) == count
    assert max(layers(plan, model)) == most


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("partitioner", ["threshold", "milp", "chain-dp"])
def test_case_4_a_stage_with_the_head_alone(objective: str, partitioner: str) -> None:
    model = dense_model(6)
    times = layer_times(6, 4) | {"EMBED": 1, "HEAD": 8}
    plan = build_plan(
        model, Mesh(pp=4), costs_of(model, times), microbatches=8, objective=objective, partitioner=partitioner
    )
    assert layers(plan, model) == [2, 2, 2, 0]
    assert stage_times(plan, model, times) == [9, 8, 8, 8]
    assert plan.stages[-1].start == plan.stages[-1].stop - 1
    assert plan.solver.t_dom_ns == 3 * 9 and plan.solver.bottleneck == "0F;0B"


def test_case_5_embedding_and_head_have_time_and_memory_of_their_own() -> None:
    model = dense_model(12)
    times = layer_times(12) | {"EMBED": 0, "HEAD": 2}
    costs = costs_of(model, times, layer_times(12) | {"EMBED": 2, "HEAD": 2})
    lean = build_plan(model, Mesh(pp=4), costs, microbatches=8, objective="memory")
    assert layers(lean, model) == [2, 4, 4, 2]
    assert max(memory.peak for memory in lean.memory) == 4
    for objective in OBJECTIVES:
        fast = build_plan(model, Mesh(pp=4), costs, microbatches=8, objective=objective)
        assert max(stage_times(fast, model, times)) == 4
        assert layers(fast, model)[-1] <= 2


def test_case_8_any_layer_count_with_any_vpp() -> None:
    model = dense_model(35)
    costs = costs_of(model, layer_times(35))
    plans = {
        objective: build_plan(model, Mesh(pp=4, vpp=2), costs, microbatches=8, objective=objective)
        for objective in OBJECTIVES
    }
    held = layers(plans["serial"], model)
    assert sorted(held) == [4] * 5 + [5] * 3
    assert max(sum(held[s.index] for s in stages) for stages in plans["serial"].stages_of) == 9
    for plan in plans.values():
        assert_all_placed(plan, model)
        assert plan.solver.t_dom_ns >= plans["t_dom"].solver.t_dom_ns
        assert plan.solver.step_ns >= plans["step"].solver.step_ns


def test_case_9_mtp_is_an_item_of_its_own() -> None:
    model = dense_model(10, mtp=1)
    times = layer_times(10, 10) | {"EMBED": 2, "M0": 14, "HEAD": 12}
    plans = [
        build_plan(model, Mesh(pp=4), costs_of(model, times), microbatches=8, objective=objective)
        for objective in OBJECTIVES
    ]
    for plan in plans[1:]:
        assert max(stage_times(plan, model, times)) == 36
        last = plan.stages[-1]
        assert [item.label for item in model.items[last.start : last.stop]] == ["L9", "M0", "HEAD"]
    assert plans[0].solver.step_ns <= min(plan.solver.step_ns for plan in plans)
    assert all(plan.simulate_only == ("mtp",) for plan in plans)


# 3 dense layers (time 0.4, memory 0.5), then 58 MoE layers (time 1.0, memory 8): here in tenths.
def case_10() -> tuple[ModelSpec, CostTable]:
    model = moe_model(61, dense_first=3)
    dense, moe = [f"L{i}" for i in range(3)], [f"L{i}" for i in range(3, 61)]
    times = dict.fromkeys(dense, 4) | dict.fromkeys(moe, 10)
    memory = dict.fromkeys(dense, 5) | dict.fromkeys(moe, 80)
    return model, costs_of(model, times, memory)


@pytest.mark.parametrize("objective", [*OBJECTIVES, "memory"])
def test_case_10_the_least_possible_limit_gives_a_plan(objective: str) -> None:
    model, costs = case_10()
    plan = build_plan(model, Mesh(pp=16), costs, microbatches=32, objective=objective, memory_limit=320)
    assert_all_placed(plan, model)
    assert max(memory.peak for memory in plan.memory) <= 320
    if objective in ("t_dom", "serial"):
        assert plan.solver.t_dom_ns == 3 * 40


def test_case_10_a_limit_below_the_minimum_is_refused_with_the_reason() -> None:
    model, costs = case_10()
    assert max(m.peak for m in build_plan(model, Mesh(pp=16), costs, microbatches=32, objective="memory").memory) == 320
    with pytest.raises(PartitionInfeasible, match="no partition fits") as caught:
        build_plan(model, Mesh(pp=16), costs, microbatches=32, memory_limit=310)
    (problem,) = caught.value.problems
    assert "stage" in problem.field and "rank" in problem.field
    assert problem.value == "320 bytes" and "310 bytes" in problem.allowed
    assert "a limit of 320 bytes" in problem.remedy


def partitions_of(problem: MilpProblem, stages: int) -> list[list[Range]]:
    """Every choice of one range per stage that the program has variables for."""
    own = [[chunk for s, chunk in problem.columns if s == stage] for stage in range(stages)]
    return [list(chosen) for chosen in product(*own)]


def broken(wrong: Callable[[list[Range]], bool], stages: int) -> Callable[[MilpProblem, float], MilpAnswer]:
    """A solver that calls the first choice of ranges that is ``wrong`` an optimum."""

    def solver(problem: MilpProblem, time_limit_s: float) -> MilpAnswer:
        found = scipy_solver(problem, time_limit_s)
        assert found.x is not None
        x = found.x.copy()
        x[list(problem.columns.values())] = 0.0
        for stage, chunk in enumerate(next(c for c in partitions_of(problem, stages) if wrong(c))):
            x[problem.columns[stage, chunk]] = 1.0
        return replace(found, x=x)

    return solver


def times_held(chosen: list[Range], items: int) -> list[int]:
    return [sum(p <= item < q for p, q in chosen) for item in range(items)]


def two_stages(chosen: list[Range]) -> bool:
    return sorted(times_held(chosen, 10))[-1] == 2 and 0 not in times_held(chosen, 10)


def no_stage(chosen: list[Range]) -> bool:
    return times_held(chosen, 10).count(0) == 1 and 2 not in times_held(chosen, 10)


def over_memory(chosen: list[Range]) -> bool:
    """Rank 0 has stages 0 and 2; each layer holds 10 bytes."""
    layers_of_rank_0 = sum(0 < item < 9 for p, q in (chosen[0], chosen[2]) for item in range(p, q))
    return times_held(chosen, 10) == [1] * 10 and chosen == sorted(chosen) and layers_of_rank_0 == 5


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (two_stages, PlanError, "stages with item . = 2"),
        (no_stage, PlanError, "stages with item . = 0"),
        (over_memory, PartitionInfeasible, "memory of rank 0 = '50 bytes': must be at most 45 bytes"),
    ],
)
@pytest.mark.parametrize("objective", ["t_dom", "step"])
def test_case_12_a_solver_that_lies_is_caught_and_nothing_is_written(
    wrong: Callable[[list[Range]], bool], error: type[TesseraError], message: str, objective: str, tmp_path: Path
) -> None:
    # The head takes longest, so that the other boundaries are free and the program has choices.
    model = dense_model(8)
    costs = costs_of(model, layer_times(8) | {"HEAD": 9}, layer_times(8, 10))
    path = tmp_path / "plan.yaml"
    with pytest.raises(error, match=message):
        plan = build_plan(
            model,
            Mesh(pp=2, vpp=2),
            costs,
            microbatches=4,
            objective=objective,
            partitioner="milp",
            memory_limit=45,
            solver=broken(wrong, stages=4),
        )
        save_plan(plan, path)
    assert not path.exists()


def random_cost_model() -> tuple[ModelSpec, CostTable]:
    model = moe_model(96)
    draw = random.Random(13)
    times = {f"L{i}": (draw.randint(1, 100), draw.randint(1, 100), draw.randint(1, 100)) for i in range(96)}
    return model, item_costs(model, times | {"HEAD": (50, 50, 50)}, comm_ns=40)


@pytest.mark.parametrize("partitioner", ["threshold", "milp"])
def test_case_13_no_time_for_the_solver_gives_the_chain_partition(partitioner: str) -> None:
    model, costs = random_cost_model()
    plan = build_plan(
        model,
        Mesh(pp=32, vpp=2),
        costs,
        microbatches=64,
        objective="t_dom",
        partitioner=partitioner,
        time_limit_s=0.0,
    )
    assert_all_placed(plan, model)
    assert min(sizes(plan)) >= 1
    assert "chain-dp" in plan.solver.method and f"{partitioner} found nothing in 0 s" in plan.solver.method
    assert plan.solver.status == "heuristic"
    assert 0 < plan.solver.bound_ns <= plan.solver.t_dom_ns and 0 <= plan.solver.gap < 1
    check_plan(plan, model)


def test_case_13_a_short_time_limit_states_the_gap() -> None:
    """However far the search comes in its second."""
    model, costs = random_cost_model()
    plan = build_plan(model, Mesh(pp=32, vpp=2), costs, microbatches=64, objective="t_dom", time_limit_s=1.0)
    assert_all_placed(plan, model)
    check_plan(plan, model)
    solver = plan.solver
    assert 0 < solver.bound_ns <= solver.t_dom_ns
    assert solver.gap == pytest.approx(1 - solver.bound_ns / solver.t_dom_ns, abs=1e-12) and solver.gap >= 0
    assert (solver.status == "optimal") == (solver.gap == 0)
    assert (solver.method in ("threshold", "threshold and milp")) == (
        solver.status in ("optimal-in-window", "incumbent")
    ) or solver.gap == 0
    none = build_plan(model, Mesh(pp=32, vpp=2), costs, microbatches=64, objective="t_dom", time_limit_s=0.0)
    assert plan.solver.t_dom_ns <= none.solver.t_dom_ns


@pytest.mark.parametrize(("window", "share"), [(2, 0.0), (None, 0.9)])
def test_case_13_an_incumbent_is_used_with_its_gap(window: int | None, share: float) -> None:
    """The time limit is reached with a point in hand. The solver's bound counts if it looked at all partitions."""
    model = moe_model(7)
    costs = random_costs(model, 3)

    def stopped(problem: MilpProblem, time_limit_s: float) -> MilpAnswer:
        found = scipy_solver(problem, time_limit_s)
        assert found.bound is not None
        return replace(found, status="limit", bound=0.9 * found.bound)

    plan = build_plan(
        model,
        Mesh(pp=2, vpp=2),
        costs,
        microbatches=4,
        objective="t_dom",
        partitioner="milp",
        method="align",
        window=window,
        time_limit_s=LONG,
        solver=stopped,
    )
    assert plan.solver.method == "milp" and plan.solver.status == "incumbent"
    setting = Setting(
        model,
        costs,
        build_template("interleaved-1f1b", pp=2, vpp=2, microbatches=4, joint=True),
        limit=0,
        method="align",
    )
    solved = int(share * plan.solver.t_dom_ns * (1 - 1e-8))
    assert plan.solver.bound_ns == max(t_dom_bound(setting), solved) < plan.solver.t_dom_ns


def test_case_86_buffer_slots_follow_the_schedule(tmp_path: Path) -> None:
    model = dense_model(8)
    costs = uniform_costs(model)
    classic = build_plan(model, Mesh(pp=4), costs, microbatches=8, joint=False)
    assert [stage.slots for stage in classic.stages] == [4, 3, 2, 1]
    joint = build_plan(model, Mesh(pp=4), costs, microbatches=8)
    assert [stage.slots for stage in joint.stages] == [8, 6, 4, 2]
    longer = build_plan(model, Mesh(pp=4), costs, microbatches=80)
    assert [stage.slots for stage in longer.stages] == [8, 6, 4, 2]
    save_plan(classic, tmp_path / "plan.yaml")
    assert load_plan(tmp_path / "plan.yaml") == classic
