"""Plans of every template in the real engine: split backwards, V placement, Megatron's fixed task order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera_rt.costs import CostTable, Link, Workload
from tessera_rt.engine.emulated import EmulatedDevice
from tessera_rt.engine.engine import Engine
from tessera_rt.engine.stub import StubModel
from tessera_rt.models.hybrid import HybridModel
from tessera_rt.moe.steps import Placement
from tessera_rt.plan import Mesh, Plan
from tessera_rt.planner.build import build_plan, plan_with
from tessera_rt.scheduler.orders_pooled import Pool, late_room, passes_of, pooled
from tessera_rt.scheduler.simulate import simulate
from tessera_rt.scheduler.templates import RULES, TEMPLATES, build_template
from tessera_rt.testing.hybrids import random_costs, tiny_hybrid, token_batch
from tessera_rt.testing.reference import reference_step
from tessera_rt.testing.worker import RankContext
from tessera_rt.testing.worker_pool import WorkerPool
from tessera_rt.timeline import Timeline

Batch = list[tuple[Tensor, Tensor]]
Gradients = list[tuple[float, dict[str, Tensor]]]  # with overlap, and without
SPEC = tiny_hybrid("gSds")
MODEL_SEED = 3
QUICK = [
    ("zb-h2", 2, 1, 1),
    ("zb-v", 2, 2, 1),
    ("dualpipe-v", 2, 2, 2),
    ("interleaved-zb", 2, 3, 1),
    ("megatron-1f1b", 2, 2, 1),
]  # template, pp, vpp, ep
SLOW = [
    ("zb-h1", 2, 1, 1),
    ("zb-h1", 4, 1, 1),
    ("zb-h2", 4, 1, 1),
    ("zb-v", 4, 2, 1),
    ("zb-v", 2, 2, 2),
    ("dualpipe-v", 4, 2, 1),
    ("dualpipe-v", 2, 2, 1),
    ("interleaved-zb", 4, 2, 1),
    ("interleaved-zb", 2, 3, 2),
    ("megatron-1f1b", 4, 2, 1),
    ("megatron-1f1b", 2, 3, 2),
]
LAYOUTS = [*QUICK, *(pytest.param(*layout, marks=pytest.mark.slow) for layout in SLOW)]


def make_plan(template: str, mesh: Mesh, microbatches: int, seed: int) -> tuple[Plan, CostTable]:
    """Random costs, hence random interleavings, and random cuts with stages without layers, or empty."""
    draw = random.Random(seed)
    items = len(SPEC.items)
    cuts = (0, *sorted(draw.randint(1, items - 1) for _ in range(mesh.stages - 1)), items)
    workload = Workload(tokens=16, context=16, dp=mesh.dp, ep=mesh.ep, dtype="fp64")
    link = Link(latency_ns=draw.choice((0, 300)), bytes_per_s=draw.choice((float("inf"), 1e9)))
    costs = random_costs(SPEC, workload, seed=seed, link=link)
    pad = "shadow" if RULES[template].whole_groups and microbatches % mesh.pp else "groups"
    return plan_with(cuts, SPEC, mesh, costs, microbatches=microbatches, template=template, pad=pad), costs


def both_ways(ctx: RankContext, runs: Sequence[tuple[Plan, list[Batch]]]) -> list[Gradients]:
    """On one rank: for each run, loss and gradients with overlap on and off."""
    results = []
    for plan, batches in runs:
        of_run = []
        for overlap in (True, False):
            _, _, ep_i = plan.mesh.coordinate(ctx.rank)
            with Engine(HybridModel(SPEC, seed=MODEL_SEED), plan, overlap=overlap, timeout_s=60) as engine:
                of_run.append(engine.forward_backward(batches[ep_i]))
        results.append(of_run)
    return results


def gathered(results: Sequence[list[Gradients]], run: int, way: int) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for of_rank in results:
        total |= of_rank[run][way][1]
    return total


@pytest.mark.parametrize(("template", "pp", "vpp", "ep"), LAYOUTS)
def test_equal_to_one_process_and_bit_equal_without_overlap(
    pool: WorkerPool, template: str, pp: int, vpp: int, ep: int
) -> None:
    """Also with fewer micro-batches than ranks, and micro-batches of different sizes."""
    mesh = Mesh(pp=pp, vpp=vpp, ep=ep)
    runs: list[tuple[Plan, list[Batch]]] = []
    for m in (1, 3, 2 * pp + 2):
        seed = 100 * pp + 10 * vpp + m
        draw = random.Random(seed)
        shapes = [(draw.randint(1, 3), draw.randint(2, 7)) for _ in range(m)]
        runs.append(
            (make_plan(template, mesh, m, seed)[0], [token_batch(SPEC, shapes, seed=seed + i) for i in range(ep)])
        )
    results: list[list[Gradients]] = pool.run(both_ways, mesh.world, runs, timeout_s=200)
    chunk = HybridModel(SPEC, seed=MODEL_SEED).build_chunk(SPEC.items, Placement(dtype=torch.float64))
    for i, (_, batches) in enumerate(runs):
        want = reference_step([chunk], [[of_part[k] for of_part in batches] for k in range(len(batches[0]))])
        losses = {of_rank[i][way][0] for of_rank in results for way in (0, 1)}
        assert len(losses) == 1, "losses differ between ranks, or with overlap off"
        assert losses.pop() == pytest.approx(want.total("loss"), rel=1e-11)
        on, off = gathered(results, i, 0), gathered(results, i, 1)
        assert set(on) == set(off) == set(want.gradients)
        for name, gradient in want.gradients.items():
            assert torch.equal(on[name], off[name]), name
            assert (on[name] - gradient).abs().max() <= 1e-11 * max(gradient.abs().max().item(), 1e-12), name


def execute(ctx: RankContext, runs: Sequence[tuple[Plan, CostTable, bool]], contention: float) -> list[Timeline]:
    timelines = []
    for plan, costs, overlap in runs:
        device = EmulatedDevice(costs, contention)
        with Engine(StubModel(SPEC), plan, device=device, overlap=overlap, timeout_s=60) as engine:
            engine.forward_backward(token_batch(SPEC, [(1, 4)] * plan.microbatches, seed=0))
            timelines.append(engine.timeline())
    return timelines


def sorted_spans(timeline: Timeline) -> list[Any]:
    return sorted((s.rank, s.lane, s.stage, s.microbatch, s.name, s.start_ns, s.end_ns) for s in timeline.spans)


@pytest.mark.parametrize("pp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_emulated_device_agrees_with_the_simulator(pool: WorkerPool, pp: int) -> None:
    """Every template, to the nanosecond without contention, within 0.1 % with it."""
    runs = []
    for i, template in enumerate(TEMPLATES):
        vpp = int(min(RULES[template].vpp[1], 2))
        for m, overlap in ((3, False), (2 * pp + 1, True)):
            plan, costs = make_plan(template, Mesh(pp=pp, vpp=vpp), m, 1000 * pp + 10 * i + m)
            runs.append((plan, costs, overlap))
    for contention in (0.0, 0.2):
        executed: list[Timeline] = pool.run(execute, pp, runs, contention, timeout_s=250)[0]
        for (plan, costs, overlap), got in zip(runs, executed, strict=True):
            want = simulate(plan, SPEC, costs, overlap=overlap, contention=contention)
            if contention:
                assert got.step_ns == pytest.approx(want.step_ns, rel=1e-3), plan.template
            else:
                assert sorted_spans(got) == sorted_spans(want), (plan.template, plan.microbatches, overlap)


@pytest.mark.parametrize("template", ["interleaved-1f1b", "dualpipe-v"])
def test_w_pools_run_and_change_no_bit(pool: WorkerPool, template: str) -> None:
    """W held back to the end, or beside later passes and in front of them, against the template's own order."""
    mesh, m = Mesh(pp=2, vpp=2), 6
    own, costs = make_plan(template, mesh, m, seed=7)
    order = build_template(template, pp=2, vpp=2, microbatches=m, joint=True)
    cuts = [*(stage.start for stage in own.stages), len(SPEC.items)]
    plans = [own]
    counts = [len(passes_of(row)) for row in order.actions]
    for pools in (
        [Pool(tuple(late_room(row, deferred))) for row, deferred in zip(order.actions, (3, 5), strict=True)],
        [Pool(tuple(i // 3 % 3 for i in range(count)), beside=True) for count in counts],
    ):
        rows = tuple(pooled(row, each) for row, each in zip(order.actions, pools, strict=True))
        plans.append(
            build_plan(SPEC, mesh, costs, microbatches=m, template=replace(order, actions=rows), fixed_bounds=cuts)
        )
    kinds = [{part.kind for row in plan.actions for action in row for part in action.passes} for plan in plans]
    assert "W" in kinds[1] and any(key.count(";") == 2 for key in plans[2].interleavings)
    assert any(key[-1] == "W" and key.count(";") == 0 for key in plans[2].interleavings)
    batch = token_batch(SPEC, [(2, 5)] * m, seed=1)
    results: list[list[Gradients]] = pool.run(both_ways, mesh.world, [(plan, [batch]) for plan in plans], timeout_s=200)
    first = gathered(results, 0, 0)
    for run in range(len(plans)):
        for way in (0, 1):
            assert all(torch.equal(gradient, first[name]) for name, gradient in gathered(results, run, way).items())
            assert results[0][run][way][0] == results[0][0][0][0]
