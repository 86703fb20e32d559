"""Replicas: the compiled loop against the event loop, and against the slow reference where ranks of a group differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_rt.cost_sources.device import load_device
from tessera_rt.cost_sources.roofline import roofline_costs
from tessera_rt.costs import TaskCost, Workload
from tessera_rt.errors import ScheduleError
from tessera_rt.files.model_files import load_model
from tessera_rt.plan import Action, Mesh
from tessera_rt.planner.build import plan_with
from tessera_rt.scheduler.chunked import MOE_HALVES
from tessera_rt.scheduler.noise import Jitter, Rows, moe_items
from tessera_rt.scheduler.replica_program import KINDS, ReplicaProgram
from tessera_rt.scheduler.replicas import prepare, prepare_schedule, simulate_replicas
from tessera_rt.scheduler.simulate import simulate
from tessera_rt.tasks import TaskKind, parse_task_name
from tessera_rt.testing.costs import dense_model, item_costs, moe_model, uniform_costs
from tessera_rt.testing.schedule_cases import cases
from tessera_rt.testing.schedules import Case, orders
from tessera_rt.testing.timing_reference import group_nodes, reference_ends, reference_nodes
from tessera_rt.timeline import Span, Timeline


def prepared(case: Case, *, overlap: bool = True, contention: float = 0.0) -> ReplicaProgram:
    return prepare_schedule(
        case.stage_ranks,
        case.actions,
        case.bounds,
        case.interleavings,
        case.model,
        case.costs,
        overlap=overlap,
        contention=contention,
    )


def random_rows(program: ReplicaProgram, case: Case, *, replicas: int, ep: int, seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    shape = (replicas, program.layers, program.microbatches, ep)
    layers = {item.label: i for i, item in enumerate(moe_items(case.model))}
    return Rows(layers, rng.uniform(0.2, 2.0, shape), rng.uniform(1.0, 2.0, shape))


def ends_of(timeline: Timeline) -> dict[str, int]:
    return {
        f"{s.stage}.{s.microbatch} {f'{s.name[-1]} sent' if s.lane == 'LINK' else s.name}": s.end_ns
        for s in timeline.spans
    }


def by_place(timeline: Timeline) -> list[Span]:
    return sorted(timeline.spans, key=lambda s: (s.rank, s.lane, s.stage, s.microbatch, s.name))


@settings(max_examples=40)
@given(cases(scale=100), st.booleans(), st.sampled_from((0.0, 0.15, 1.0)))
def test_alike_replicas_equal_the_event_loop(case: Case, overlap: bool, contention: float) -> None:
    """Every start, end and message to the nanosecond, and every part of the step."""
    timeline = case.timeline(overlap=overlap, contention=contention)
    run = simulate_replicas(
        prepared(case, overlap=overlap, contention=contention), replicas=2, ep=3, record=(1, 2), label=timeline.label
    )
    assert run.timeline is not None
    assert by_place(run.timeline) == by_place(timeline)
    assert run.steps_ns.tolist() == [timeline.step_ns] * 2
    for rank in range(timeline.ranks):
        assert run.split(0, rank, 1) == run.split(1, rank, 0) == timeline.split(rank)
    mean, expected = run.mean_split(), timeline.mean_split()
    assert abs(mean.compute_ns - expected.compute_ns) <= 1 and abs(mean.bubble_ns - expected.bubble_ns) <= 3


def lane_ns(case: Case, rows: Rows, replica: int) -> Mapping[str, tuple[int, ...]]:
    """Durations on every rank of a group, by the reference's names."""
    found: dict[str, tuple[int, ...]] = {}
    for name, cost in case.costs.tasks.items():
        _, kind, label = parse_task_name(name)
        if label not in rows.layers or kind not in (TaskKind.MLP, TaskKind.DISP, TaskKind.COMB):
            continue
        shares = (rows.compute if kind is TaskKind.MLP else rows.traffic)[replica, rows.layers[label]]
        stage = next(s for s, (start, stop) in enumerate(case.bounds) if label in labels(case, start, stop))
        for microbatch, row in enumerate(shares):
            found[f"{stage}.{microbatch} {name}"] = tuple(int(np.rint(cost.ns * share)) for share in row)
    return found


def labels(case: Case, start: int, stop: int) -> list[str]:
    return [item.label for item in case.model.items[start:stop]]


@settings(max_examples=20)
@given(cases(scale=10), st.booleans(), st.integers(0, 10**6))
def test_uneven_groups_equal_the_reference(case: Case, overlap: bool, seed: int) -> None:
    """Collectives wait for the slowest rank and last as long as it needs; replicas do not wait for one another."""
    program = prepared(case, overlap=overlap)
    rows = random_rows(program, case, replicas=2, ep=3, seed=seed)
    nodes = reference_nodes(case, overlap=overlap)
    for replica in range(2):
        expected = reference_ends(group_nodes(nodes, lane_ns(case, rows, replica), 3))
        for lane in range(3):
            run = simulate_replicas(program, rows=rows, record=(replica, lane))
            assert run.timeline is not None
            for name, end in ends_of(run.timeline).items():
                assert end == expected[name if name in expected else f"{lane}/{name}"], name
        assert run.steps_ns[replica] == max(expected.values())


@settings(max_examples=10)
@given(cases(scale=10**6), st.sampled_from(("0.15", "1", "2.5")), st.integers(0, 10**6))
def test_uneven_groups_under_contention(case: Case, contention: str, seed: int) -> None:
    program = prepared(case, contention=float(contention))
    rows = random_rows(program, case, replicas=1, ep=2, seed=seed)
    expected = reference_ends(
        group_nodes(reference_nodes(case, overlap=True), lane_ns(case, rows, 0), 2), Fraction(contention)
    )
    for lane in range(2):
        run = simulate_replicas(program, rows=rows, record=(0, lane))
        assert run.timeline is not None
        slack = 1 + 4 * len(run.timeline.spans)  # roundings, against tasks of a million
        assert slack < 10_000
        for name, end in ends_of(run.timeline).items():
            assert abs(end - expected[name if name in expected else f"{lane}/{name}"]) <= slack, name
            assert run.timeline.step_ns <= run.steps_ns[0]


@settings(max_examples=40)
@given(cases(scale=100), st.sampled_from(KINDS), st.sampled_from((0.0, 0.8, 1.25)))
def test_scales_equal_scaled_costs(case: Case, kind: str, factor: float) -> None:
    """One run of all scalings is the same as one simulation of each scaled cost table."""
    program = prepared(case)
    scales = np.ones((2, len(KINDS)))
    scales[1, KINDS.index(kind)] = factor
    steps = simulate_replicas(program, replicas=2, scales=scales).steps_ns
    tasks = {
        name: TaskCost(ns=int(np.rint(cost.ns * factor))) if parse_task_name(name)[1] == kind else cost
        for name, cost in case.costs.tasks.items()
    }
    assert steps[0] == case.timeline(contention=0.0).step_ns
    if kind != "LINK":
        scaled = replace(case, costs=replace(case.costs, tasks=tasks))
        assert steps[1] == scaled.timeline(contention=0.0).step_ns


@settings(max_examples=40)
@given(cases(scale=1000), st.integers(0, 2**40), st.floats(0.0, 0.9), st.sampled_from((1, 3)))
def test_jitter_keeps_its_bounds_and_its_seed(case: Case, seed: int, amount: float, ep: int) -> None:
    program = prepared(case)
    jitter = Jitter(amount=amount, kind="uniform")
    steps = [
        simulate_replicas(program, replicas=4, ep=ep, jitter=jitter, seed=s).steps_ns for s in (seed, seed, seed + 1)
    ]
    assert steps[0].tolist() == steps[1].tolist()
    planned, messages = program.planned_ns, 2 * len(case.bounds) * 1000 * 20
    assert (steps[0] >= (1 - amount) * planned - messages).all() and (
        steps[0] <= (1 + amount) * planned + messages
    ).all()
    if amount > 0.3 and planned > 20_000:
        assert len({*steps[0].tolist(), *steps[2].tolist()}) > 1


@pytest.mark.parametrize("kind", ["lognormal", "uniform"])
def test_jitter_factors_have_mean_one(kind: str) -> None:
    factors = Jitter(amount=0.3, kind=kind).factors()
    assert factors.mean() == pytest.approx(1.0, abs=1e-9)
    spread = np.log(factors).std() if kind == "lognormal" else factors.std() * 3**0.5
    assert spread == pytest.approx(0.3, rel=0.01)
    # over many tasks: one task of 1,000,000 ns on each of many replicas
    model = dense_model(1)
    costs = uniform_costs(model, (1_000_000, 0, 0))
    row = (Action.parse("0F0"), Action.parse("0B0"))
    case = Case((0,), (row,), ((0, 3),), orders([row], model, costs, ((0, 3),)), model, costs)
    run = simulate_replicas(prepared(case), replicas=20_000, jitter=Jitter(amount=0.3, kind=kind), seed=5)
    assert run.steps_ns.mean() == pytest.approx(1_000_000, rel=0.01)
    assert run.steps_ns.std() == pytest.approx(factors.std() * 1_000_000, rel=0.03)


def test_mistakes_are_named() -> None:
    model = dense_model(1)
    costs = uniform_costs(model, (10, 10, 10))
    row = (Action.parse("0F0"), Action.parse("0B0"))
    case = Case((0,), (row,), ((0, 3),), orders([row], model, costs, ((0, 3),)), model, costs)
    program = prepared(case)
    with pytest.raises(ScheduleError, match=r"replicas = 0.*at least 1"):
        simulate_replicas(program, replicas=0)
    with pytest.raises(ScheduleError, match=r"record.*replica below 2 and an ep rank below 3"):
        simulate_replicas(program, replicas=2, ep=3, record=(2, 0))
    with pytest.raises(ScheduleError, match="scales"):
        simulate_replicas(program, scales=np.ones((1, 2)))
    with pytest.raises(ScheduleError, match=r"rows\.compute.*of shape"):
        simulate_replicas(program, rows=Rows({}, np.ones((1, 2, 1, 1)), np.ones((1, 2, 1, 1))))
    with pytest.raises(ScheduleError, match=r"jitter\.amount"):
        Jitter(amount=1.5, kind="uniform")
    with pytest.raises(ScheduleError, match=r"jitter\.kind"):
        Jitter(amount=0.1, kind="normal")
    with pytest.raises(ScheduleError, match="contention"):
        prepared(case, contention=-1.0)
    rows = ((Action.parse("0B0"), Action.parse("0F0")),)
    with pytest.raises(ScheduleError, match="rank 0, action 0B0.*waits for 0F0"):
        prepared(replace(case, actions=rows))


@pytest.mark.parametrize("template", ["1f1b", "interleaved-1f1b"])
def test_tensor_parallel_collectives(template: str) -> None:
    """A pass may begin with a collective there. Without contention all times are equal; with it, either they are, or
    a collective came beside a task that was timed before it, and that is refused rather than told wrong."""
    model = load_model("qwen3-30b-a3b")
    model = replace(model, layers=model.layers[:6])
    costs = roofline_costs(model, Workload(tokens=512, context=512, ep=2, tp=2), load_device("h800"))
    mesh = Mesh(pp=2, vpp=1 if template == "1f1b" else 2, ep=2, tp=2)
    bounds = (0, 4, 8) if mesh.vpp == 1 else (0, 2, 4, 6, 8)
    plan = plan_with(bounds, model, mesh, costs, microbatches=6, template=template)
    for contention in (0.0, 0.15):
        timeline = simulate(plan, model, costs, contention=contention)
        try:
            run = simulate_replicas(prepare(plan, model, costs, contention=contention), ep=2, record=(0, 1))
        except ScheduleError as error:
            assert contention and "collectives that begin a pass" in str(error)
            continue
        assert run.timeline is not None
        assert by_place(run.timeline) == by_place(timeline)


def test_plans_with_moe_layers_in_halves() -> None:
    """What a plan is marked with is simulated by both."""
    model = moe_model(6, shared=True)
    costs = item_costs(model, {}, default=(300, 400, 200), comm_ns=170)
    plan = plan_with((0, 3, 4, 6, 8), model, Mesh(pp=2, vpp=2), costs, microbatches=6)
    halved = replace(plan, simulate_only=(MOE_HALVES,))
    steps = [simulate(one, model, costs).step_ns for one in (plan, halved)]
    assert steps[0] != steps[1]
    assert [simulate_replicas(prepare(one, model, costs)).step_ns for one in (plan, halved)] == steps
