"""The emulated device against the simulator, closed forms, and itself with real modules."""

from __future__ import annotations

import ast
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tessera_rt.costs import CostTable, Link, Workload
from tessera_rt.engine.emulated import EmulatedDevice
from tessera_rt.engine.engine import Engine
from tessera_rt.engine.stub import StubModel
from tessera_rt.model_spec import ModelSpec
from tessera_rt.models.hybrid import HybridModel
from tessera_rt.moe.steps import TaskModel
from tessera_rt.plan import Mesh, Plan
from tessera_rt.planner.build import plan_with
from tessera_rt.scheduler.closed_forms import interleaved_time, one_f_one_b_time
from tessera_rt.scheduler.simulate import simulate
from tessera_rt.testing.costs import dense_model, item_costs
from tessera_rt.testing.hybrids import random_costs, tiny_hybrid, token_batch
from tessera_rt.testing.plans import simple_plan
from tessera_rt.testing.worker import RankContext
from tessera_rt.testing.worker_pool import WorkerPool
from tessera_rt.timeline import Span, Timeline

ROOT = Path(__file__).resolve().parents[2]
Run = tuple[ModelSpec, Plan, CostTable, bool]  # with overlap?


def execute(ctx: RankContext, runs: Sequence[Run], contentions: Sequence[float], real: bool = False) -> list[Timeline]:
    """Executed timelines of all runs under each contention, in virtual time."""
    timelines = []
    for spec, plan, costs, overlap in runs:
        model: TaskModel = HybridModel(spec) if real else StubModel(spec)
        shapes = [(1, 4)] * plan.microbatches
        for contention in contentions:
            device = EmulatedDevice(costs, contention)
            with Engine(model, plan, device=device, overlap=overlap, timeout_s=60) as engine:
                engine.forward_backward(token_batch(spec, shapes, seed=0))
                timelines.append(engine.timeline())
    return timelines


def sorted_spans(timeline: Timeline) -> list[tuple[object, ...]]:
    def key(s: Span) -> tuple[object, ...]:
        return s.rank, s.lane, s.stage, s.microbatch, s.name, s.start_ns, s.end_ns

    return sorted(map(key, timeline.spans))  # type: ignore[type-var]


def random_run(pp: int, seed: int) -> Run:
    """Random layers, cuts (empty stages too), micro-batches, template, interleavings, link; durations up to 1 ms."""
    draw = random.Random(seed)
    spec = tiny_hybrid("".join(draw.choices("gGsSd", k=draw.randint(1, 5))))
    spec = replace(spec, mtp=spec.layers[:1]) if draw.random() < 0.2 else spec
    mesh = Mesh(pp=pp, vpp=draw.choice((1, 2, 3)))
    link = Link(latency_ns=draw.choice((0, 30_000)), bytes_per_s=draw.choice((float("inf"), 1e6)))
    costs = random_costs(spec, Workload(tokens=4, context=4), seed=seed, link=link, zero_share=0.1, scale=1000)
    items = len(spec.items)
    cuts = (0, *sorted(draw.randint(0, items) for _ in range(mesh.stages - 1)), items)
    m = draw.randint(1, 7)
    if draw.random() < 0.25:
        plan = simple_plan(
            spec, pp=pp, vpp=mesh.vpp, microbatches=m, cuts=cuts, joint=draw.random() < 0.5, split_w=True
        )
    else:
        template = "gpipe" if draw.random() < 0.2 else None
        pad = draw.choice(("groups", "shadow"))
        joint = draw.random() < 0.8
        plan = plan_with(cuts, spec, mesh, costs, microbatches=m, template=template, pad=pad, joint=joint)
    return spec, plan, costs, draw.random() < 0.75


@pytest.mark.parametrize(
    ("pp", "seeds"),
    [
        (1, range(10)),
        (2, range(10, 20)),
        (4, range(20, 30)),
        pytest.param(2, range(30, 38), marks=pytest.mark.slow),
        pytest.param(3, range(38, 50), marks=pytest.mark.slow),
    ],
)
def test_fifty_random_plans_agree_with_the_simulator(pool: WorkerPool, pp: int, seeds: range) -> None:
    """To the nanosecond without contention; within 0.1 % with it, and every span within that of the step."""
    runs = [random_run(pp, seed) for seed in seeds]
    contentions = (0.0, 0.15, 1.0)
    executed = pool.run(execute, pp, runs, contentions, timeout_s=250)[0]
    for i, (spec, plan, costs, overlap) in enumerate(runs):
        for k, contention in enumerate(contentions):
            got = executed[i * len(contentions) + k]
            want = simulate(plan, spec, costs, overlap=overlap, contention=contention)
            ours, theirs = sorted_spans(got), sorted_spans(want)
            if contention == 0.0:
                assert ours == theirs, f"seed {seeds[i]}"
                continue
            assert got.step_ns == pytest.approx(want.step_ns, rel=1e-3), f"seed {seeds[i]}"
            assert len(ours) == len(theirs)
            ends = {(s.rank, s.lane, s.stage, s.microbatch, s.name): s.end_ns for s in want.spans}
            for span in got.spans:
                end = ends[span.rank, span.lane, span.stage, span.microbatch, span.name]
                assert abs(span.end_ns - end) <= 1e-3 * want.step_ns, (f"seed {seeds[i]}", span, end)


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize("joint", [False, True])
def test_closed_forms(pool: WorkerPool, vpp: int, joint: bool) -> None:
    """Both devices of prediction give the paper formula of (interleaved) 1F1B."""
    pp, forward, backward = 4, 600, 1200
    stages = pp * vpp
    spec = dense_model(stages)
    per_layer = (forward // vpp, backward // vpp, 0)
    costs = item_costs(spec, {f"L{i}": per_layer for i in range(stages)})
    cuts = (0, *range(2, stages + 1), stages + 2)
    runs, wanted = [], []
    for m in (4, 5, 8, 11):
        runs.append(
            (spec, plan_with(cuts, spec, Mesh(pp=pp, vpp=vpp), costs, microbatches=m, joint=joint), costs, True)
        )
        single = one_f_one_b_time(pp, m, forward, backward)
        wanted.append(single if vpp == 1 else interleaved_time(pp, vpp, m, forward, backward))
    executed = pool.run(execute, pp, runs, (0.0,), timeout_s=100)[0]
    assert [timeline.step_ns for timeline in executed] == wanted
    assert [simulate(plan, spec, costs).step_ns for _, plan, _, _ in runs] == wanted


def test_real_modules_have_the_timeline_of_stubs(pool: WorkerPool) -> None:
    """And expert-parallel ranks that are alike have the timeline of one."""
    spec = tiny_hybrid("gSds")
    costs = random_costs(spec, Workload(tokens=4, context=4, ep=2), seed=7, link=Link(latency_ns=50, bytes_per_s=1e9))
    mesh = Mesh(pp=2, vpp=2, ep=2)
    plan = plan_with((0, 2, 3, 4, 6), spec, mesh, costs, microbatches=5)
    stubs, modules = (
        pool.run(execute, 4, [(spec, plan, costs, True)], (0.0, 0.3), real=real) for real in (False, True)
    )
    for of_stub, of_module in zip(stubs, modules, strict=True):
        assert [sorted_spans(t) for t in of_stub] == [sorted_spans(t) for t in of_module]
    assert sorted_spans(stubs[0][0]) == sorted_spans(simulate(plan, spec, costs))


def late_rank(ctx: RankContext, spec: ModelSpec, plan: Plan, tables: Sequence[CostTable]) -> Timeline:
    """Each ep rank has costs of its own, as under uneven routing."""
    with Engine(StubModel(spec), plan, device=EmulatedDevice(tables[ctx.rank]), timeout_s=60) as engine:
        engine.forward_backward([(torch.zeros(1, 1, dtype=torch.int64),) * 2] * plan.microbatches)
        return engine.timeline()


@pytest.mark.parametrize("contention", [0.0, 1e-9])
def test_a_collective_starts_with_its_last_member_and_lasts_as_its_longest(pool: WorkerPool, contention: float) -> None:
    """By hand, with the clock's stamps and with times resolved after the step."""
    spec = tiny_hybrid("s")
    zero = random_costs(spec, Workload(tokens=4, context=4, ep=2), seed=1)
    tasks = {name: replace(cost, ns=0) for name, cost in zero.tasks.items()}
    slow = {"F_ROUTE:L0": 100, "F_COUNT:L0": 5, "F_DISP:L0": 10, "F_MLP:L0": 7}
    fast = {"F_ROUTE:L0": 30, "F_COUNT:L0": 5, "F_DISP:L0": 40, "F_MLP:L0": 70}
    tables = [
        replace(zero, contention=contention, tasks=tasks | {n: replace(tasks[n], ns=ns) for n, ns in of_rank.items()})
        for of_rank in (slow, fast)
    ]
    plan = plan_with((0, 3), spec, Mesh(ep=2), tables[0], microbatches=1)
    timeline = pool.run(late_rank, 2, spec, plan, tables)[0]
    found = {span.name: (span.start_ns, span.end_ns) for span in timeline.spans}
    assert found["F_COUNT:L0"] == (100, 105)
    assert found["F_DISP:L0"] == (105, 145)
    assert found["F_MLP:L0"] == (145, 152)
    assert found["F_COMB:L0"] == (215, 215)


def imported(module: str) -> set[str]:
    """All of our modules that a module needs, found by reading sources."""
    found: set[str] = set()
    ahead = [module]
    while ahead:
        name = ahead.pop()
        path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
        if name in found or not path.is_file():
            continue
        found.add(name)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tessera_rt"):
                ahead += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                ahead += [alias.name for alias in node.names if alias.name.startswith("tessera_rt")]
    return found


def test_simulator_and_emulated_device_share_words_only() -> None:
    simulator, device = imported("tessera_rt.scheduler.simulate"), imported("tessera_rt.engine.emulated")
    assert {"tessera_rt.scheduler.simulate_run", "tessera_rt.scheduler.simulate_program"} <= simulator
    assert {"tessera_rt.engine.contention", "tessera_rt.engine.loop"} <= device
    words = {"costs", "errors", "model_spec", "plan", "tasks", "timeline"}
    assert simulator & device == {f"tessera_rt.{word}" for word in words}
