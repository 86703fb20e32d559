"""Plans with tapered ends: made as the comparison makes them, read back equal, held to their counts, only simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_rt.costs import CostTable, ItemMemory, Link, Workload
from tessera_rt.errors import PlanError, ScheduleError
from tessera_rt.files.plan_files import plan_from_yaml, plan_to_yaml
from tessera_rt.plan import TAPERED_ENDS, ActionKind, Mesh, Plan
from tessera_rt.plan_check import check_plan
from tessera_rt.planner.build import build_plan
from tessera_rt.planner.memory_timeline import memory_series, template_of
from tessera_rt.planner.sensitivity import sensitivity
from tessera_rt.scheduler.check_timeline import check_timeline
from tessera_rt.scheduler.chunked import MOE_HALVES
from tessera_rt.scheduler.replicas import prepare, simulate_replicas
from tessera_rt.scheduler.simulate import simulate, simulate_schedule
from tessera_rt.scheduler.templates import build_template
from tessera_rt.scheduler.torch_csv import plan_to_csv
from tessera_rt.scheduler.validate import validate_template
from tessera_rt.testing.costs import moe_model, uniform_costs
from tessera_rt.testing.random_costs import random_costs

MODEL = moe_model(8, shared=True)
EVEN = Workload(tokens=2, context=2)
MEMORY = ItemMemory(weights=100, activations=40, pending_w=20, output=5)


def hand_made(comm_ns: int = 60, contention: float = 0.1) -> CostTable:
    costs = uniform_costs(
        MODEL, (100, 110, 90), comm_ns=comm_ns, memory=MEMORY, link=Link(latency_ns=5), contention=contention
    )
    return replace(costs, workload=EVEN)


COSTS = hand_made()


def made(tapered: int = 2, microbatches: int = 6, **options: object) -> Plan:
    given = {"mesh": Mesh(pp=2, vpp=2), "costs": COSTS, "evaluations": 10, "method": "align", **options}
    return build_plan(MODEL, microbatches=microbatches, tapered=tapered, **given)  # type: ignore[arg-type]


PLAN = made()


def numbered(plan: Plan) -> list[int]:
    """Micro-batches of the F on stage 0, in order."""
    parts = (part for action in plan.actions[0] for part in action.passes)
    return [part.microbatch for part in parts if part.stage == 0 and part.kind is ActionKind.F]


# -- making -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["interleaved-1f1b", "dualpipe-v"])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("w_pool", [0, 400])
def test_the_step_is_the_comparisons(template: str, halves: bool, w_pool: int) -> None:
    plan = made(template=template, moe_halves=halves, w_pool=w_pool)
    assert (plan.microbatches, plan.tapered, plan.passes, numbered(plan)) == (6, 2, 8, list(range(8)))
    assert plan.simulate_only == ((MOE_HALVES,) if halves else ()) + (TAPERED_ENDS,)
    compared = simulate_schedule(
        [stage.rank for stage in plan.stages],
        plan.actions,
        [(stage.start, stage.stop) for stage in plan.stages],
        plan.interleavings,
        MODEL,
        COSTS,
        label=plan.template,
        halves=halves,
        tapered=2,
    )
    timeline = simulate(plan, MODEL, COSTS)
    assert timeline == compared and plan.solver.step_ns == compared.step_ns
    assert simulate_replicas(prepare(plan, MODEL, COSTS)).step_ns == compared.step_ns
    check_timeline(timeline, plan, MODEL, COSTS)
    unmarked = replace(plan, tapered=0, microbatches=8, simulate_only=plan.simulate_only[:-1])
    assert simulate(unmarked, MODEL, COSTS).step_ns > timeline.step_ns


def test_the_work_is_that_of_the_full_ones_and_the_overhead() -> None:
    """2 + 2 of half the tokens in place of 2 of 6; compute takes 5 % longer for a token of them."""
    costs = hand_made(comm_ns=0, contention=0.0)
    plain, tapered = made(0, costs=costs), made(costs=costs)
    work = []
    for plan in (plain, tapered):
        spans = [span for span in simulate(plan, MODEL, costs).spans if span.lane == "COMP"]
        work.append([sum(s.end_ns - s.start_ns for s in spans if s.microbatch == m) for m in range(plan.passes)])
    assert work[0] == [8 * 300] * 6
    assert work[1] == pytest.approx([8 * 157.5] * 2 + [8 * 300] * 4 + [8 * 157.5] * 2, rel=0.01)
    assert (plain.tapered, plain.passes, plain.simulate_only) == (0, 6, ())


def test_it_pays_where_warm_up_and_cool_down_are_long() -> None:
    options = {"mesh": Mesh(pp=4), "microbatches": 16, "costs": hand_made(comm_ns=0, contention=0.0)}
    plain, tapered = (made(count, **options).solver.step_ns for count in (0, 4))  # type: ignore[arg-type]
    assert tapered < 0.98 * plain


@settings(max_examples=12)
@given(st.data())
def test_plans_of_any_order_are_sound(data: st.DataObject) -> None:
    """Every simulator takes the same time, and the memory over the step is what the plan says."""
    template = data.draw(st.sampled_from(["1f1b", "interleaved-1f1b", "gpipe", "zb-v", "interleaved-zb", "dualpipe-v"]))
    microbatches = data.draw(st.integers(1, 7))
    tapered = data.draw(st.integers(0, microbatches))
    contention = data.draw(st.sampled_from([0.0, 0.2]))
    costs = replace(random_costs(MODEL, data.draw(st.integers(0, 10_000)), contention=contention), workload=EVEN)
    plan = made(
        tapered,
        microbatches,
        mesh=Mesh(pp=2, vpp=1 if template == "1f1b" else 2),
        costs=costs,
        template=template,
        pad=data.draw(st.sampled_from(["groups", "shadow"])),
        w_pool=data.draw(st.sampled_from([0, 100])),
        evaluations=2,
        partitioner="chain-dp",
    )
    check_plan(plan, MODEL)
    assert plan_from_yaml(plan_to_yaml(plan)) == plan
    timeline = simulate(plan, MODEL, costs)
    assert timeline.step_ns == plan.solver.step_ns == simulate_replicas(prepare(plan, MODEL, costs)).step_ns
    check_timeline(timeline, plan, MODEL, costs)
    series = memory_series(plan, MODEL, costs, timeline)
    assert [rank.peak_bytes for rank in series] == [rank.peak for rank in plan.memory]


def test_an_order_of_ones_own_counts_the_small_ones() -> None:
    order = build_template("interleaved-1f1b", pp=2, vpp=2, microbatches=8, joint=True)
    assert made(template=order).actions == PLAN.actions
    with pytest.raises(PlanError, match=r"microbatches \+ tapered = 7: must be 8, as in template"):
        made(1, template=order)


def test_sensitivity_starts_from_the_tapered_step() -> None:
    """All time of a dense or MoE layer lies on its MLP here, so that other kinds change nothing."""
    effects = {effect.kind: effect for effect in sensitivity(PLAN, MODEL, COSTS, error=0.2)}
    assert effects["HEAD"].step_ns == PLAN.solver.step_ns != effects["MLP"].step_ns


@pytest.mark.parametrize(
    ("tapered", "options", "words"),
    [
        (-1, {}, r"tapered = -1: must be an integer from 0 to microbatches \(6\); 2 x tapered small"),
        (7, {}, r"tapered = 7: must be an integer from 0 to microbatches \(6\)"),
        (True, {}, "tapered = True: must be an integer"),
        (1.5, {}, "tapered = 1.5: must be an integer"),
        (40_000, {"microbatches": 40_000}, r"microbatches \+ tapered = 80000: must be an integer from 1 to 65536"),
        (
            1,
            {"costs": replace(COSTS, workload=Workload(tokens=3, context=3))},
            r"tapered = 1: must be 0 with an odd number of tokens of a micro-batch \(3\).*; take an even",
        ),
        (
            1,
            {"template": "megatron-1f1b"},
            r"microbatches \+ tapered = 7: must be a multiple of pp \(2\) for template megatron-1f1b",
        ),
        (1, {"template": "dualpipe"}, "template = .?dualpipe.?: must be one of 1f1b.*can only be simulated"),
    ],
)
def test_what_cannot_be_is_refused(tapered: int, options: dict[str, object], words: str) -> None:
    with pytest.raises((PlanError, ScheduleError), match=words):
        made(tapered, **options)


# -- what a plan says of it -------------------------------------------------------------------------------------------


def test_round_trip() -> None:
    text = plan_to_yaml(PLAN)
    assert "microbatches: 6\n" in text and "tapered: 2\n" in text
    again = plan_from_yaml(text)
    assert again == PLAN and again.passes == 8
    validate_template(template_of(again))
    plain = made(0)
    older = plan_to_yaml(plain).replace("tapered: 0\n", "")
    assert plan_from_yaml(older) == plain
    with pytest.raises(PlanError, match="tapered"):
        plan_from_yaml(text.replace("tapered: 2\n", "tapered: -1\n"))


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        (lambda p: replace(p, tapered=1), "microbatches + tapered", "8, the micro-batches of every stage"),
        (lambda p: replace(p, tapered=3), "microbatches + tapered", "8, the micro-batches of every stage"),
        (lambda p: replace(p, microbatches=5), "microbatches + tapered", "8, the micro-batches of every stage"),
        (lambda p: replace(p, microbatches=10**12), "microbatches + tapered", "8, the micro-batches of every stage"),
        (lambda p: replace(p, tapered=5, microbatches=3), "tapered", "at most microbatches (3)"),
        (lambda p: replace(p, tapered=-2), "tapered", "at least 0"),
        (lambda p: replace(p, tapered=0), "tapered", "at least 1 with tapered-ends"),
        (lambda p: replace(p, tapered=0, microbatches=8), "tapered", "at least 1 with tapered-ends"),
        (lambda p: replace(p, simulate_only=()), "simulate_only", "a list with tapered-ends, since tapered is 2"),
        (
            lambda p: replace(p, workload=replace(p.workload, tokens=3)),
            "workload.tokens",
            "an even number with tapered ends",
        ),
        (
            lambda p: replace(p, actions=(p.actions[0][:-1], p.actions[1])),
            "actions[0]",
            "of every micro-batch",
        ),
        (lambda p: replace(p, actions=(p.actions[0][1:], p.actions[1])), "actions[0]", "exactly one F"),
    ],
)
def test_planted_faults(change: Callable[[Plan], Plan], field: str, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_plan(change(PLAN), MODEL)
    found = [problem for problem in caught.value.problems if problem.field == field]
    assert any(words in problem.allowed for problem in found), caught.value


def test_it_is_not_exported() -> None:
    with pytest.raises(PlanError, match="simulate_only = .?tapered-ends"):
        plan_to_csv(PLAN)
