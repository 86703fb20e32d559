"""The engine against one process: losses and all gradients, for many layouts, with overlap on and off."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera_rt.costs import Recompute, Workload
from tessera_rt.engine.engine import Engine
from tessera_rt.model_spec import ModelSpec
from tessera_rt.models.hybrid import HybridModel
from tessera_rt.moe.steps import Placement
from tessera_rt.plan import Mesh, Plan
from tessera_rt.planner.build import plan_with
from tessera_rt.testing.hybrids import random_costs, tiny_hybrid, token_batch
from tessera_rt.testing.reference import ReferenceResult, reference_step
from tessera_rt.testing.worker import RankContext
from tessera_rt.testing.worker_pool import WorkerPool

Batches = list[list[tuple[Tensor, Tensor]]]  # by data coordinate, by micro-batch
QUICK = [(1, 1, 2, 2), (1, 2, 2, 1), (2, 1, 1, 1), (2, 1, 2, 2), (2, 2, 1, 2), (4, 1, 1, 2)]  # pp, dp, ep, vpp
SLOW = [
    *((1, 1, 1, 1), (1, 1, 1, 2), (1, 1, 2, 1), (1, 2, 1, 1), (1, 2, 1, 2)),
    *((1, 2, 2, 2), (2, 1, 1, 2), (2, 1, 2, 1), (2, 2, 1, 1), (4, 1, 1, 1)),
]
LAYOUTS = [*QUICK, *(pytest.param(*layout, marks=pytest.mark.slow) for layout in SLOW)]
MICROBATCHES = (1, 3, 5, 8)
MODEL_SEED = 3


def random_cuts(items: int, stages: int, seed: int) -> tuple[int, ...]:
    """Unequal cuts; equal neighbours are empty stages, at the ends of the model too."""
    inner = sorted(random.Random(seed).randint(0, items) for _ in range(stages - 1))
    return (0, *inner, items)


def make_plan(
    spec: ModelSpec, mesh: Mesh, microbatches: int, *, seed: int, dtype: str = "fp64", **options: Any
) -> Plan:
    """A plan with random costs, hence random interleavings, and random cuts."""
    recompute = options.pop("recompute", Recompute.NONE)
    workload = Workload(tokens=16, context=16, dp=mesh.dp, ep=mesh.ep, dtype=dtype, recompute=recompute)
    cuts = options.pop("cuts", None) or random_cuts(len(spec.items), mesh.stages, seed)
    costs = random_costs(spec, workload, seed=seed)
    return plan_with(cuts, spec, mesh, costs, microbatches=microbatches, **options)


def make_batches(spec: ModelSpec, mesh: Mesh, microbatches: int, *, seed: int) -> Batches:
    """Micro-batches of different sizes and lengths, other tokens on every data coordinate."""
    draw = random.Random(seed)
    shapes = [(draw.randint(1, 3), draw.randint(2, 9)) for _ in range(microbatches)]
    return [token_batch(spec, shapes, seed=seed + part) for part in range(mesh.dp * mesh.ep)]


def gradients_of(
    ctx: RankContext,
    spec: ModelSpec,
    runs: Sequence[tuple[Plan, Batches]],
    overlaps: Sequence[bool],
    dropout: float = 0.0,
) -> list[list[tuple[float, dict[str, Tensor]]]]:
    """On one rank: for each run and each overlap setting, the loss and this rank's gradients."""
    results = []
    for plan, batches in runs:
        of_run = []
        for overlap in overlaps:
            model = HybridModel(spec, seed=MODEL_SEED, dropout=dropout)
            _, dp_i, ep_i = plan.mesh.coordinate(ctx.rank)
            with Engine(model, plan, overlap=overlap, timeout_s=60) as engine:
                of_run.append(engine.forward_backward(batches[dp_i * plan.mesh.ep + ep_i]))
        results.append(of_run)
    return results


def reference(spec: ModelSpec, batches: Batches) -> ReferenceResult:
    chunk = HybridModel(spec, seed=MODEL_SEED).build_chunk(spec.items, Placement(dtype=torch.float64))
    parts = [[of_part[i] for of_part in batches] for i in range(len(batches[0]))]
    result = reference_step([chunk], parts)
    if spec.tied:  # one weight under two names; the engine lists it once
        assert torch.equal(result.gradients.pop("head.weight"), result.gradients["embed.weight"])
    return result


def merged(results: Sequence[Any], run: int, overlap: int) -> dict[str, Tensor]:
    """The gradients of all ranks of one run by name; ranks that hold the same name must agree to the bit."""
    total: dict[str, Tensor] = {}
    for of_rank in results:
        for name, gradient in of_rank[run][overlap][1].items():
            assert name not in total or torch.equal(total[name], gradient), name
            total[name] = gradient
    return total


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    assert set(got) == set(want)
    for name, gradient in want.items():
        worst = (got[name] - gradient).abs().max().item()
        assert worst <= tolerance * max(gradient.abs().max().item(), 1e-12), (name, worst)


@pytest.mark.parametrize(("pp", "dp", "ep", "vpp"), LAYOUTS)
def test_equal_to_one_process_and_bit_equal_without_overlap(
    pool: WorkerPool, pp: int, dp: int, ep: int, vpp: int
) -> None:
    """Unequal splits (with stages without a layer, or empty), micro-batches of any number and size."""
    mesh = Mesh(pp=pp, vpp=vpp, dp=dp, ep=ep)
    spec = tiny_hybrid("gSds", tied=(pp + vpp + ep) % 2 == 0)
    runs = []
    for i, m in enumerate(MICROBATCHES):
        seed = 1000 * pp + 100 * dp + 10 * ep + vpp + 7 * i
        runs.append((make_plan(spec, mesh, m, seed=seed), make_batches(spec, mesh, m, seed=seed)))
    results = pool.run(gradients_of, mesh.world, spec, runs, (True, False), timeout_s=200)
    for i, (_, batches) in enumerate(runs):
        want = reference(spec, batches)
        on, off = merged(results, i, 0), merged(results, i, 1)
        losses = {of_rank[i][k][0] for of_rank in results for k in (0, 1)}
        assert len(losses) == 1, "losses differ between ranks, or with overlap off"
        assert losses.pop() == pytest.approx(want.total("loss"), rel=1e-11)
        assert_close(on, want.gradients, 1e-11)
        for name, gradient in on.items():
            assert torch.equal(gradient, off[name]), name


@pytest.mark.parametrize(
    ("pp", "vpp", "dp", "ep", "options"),
    [
        pytest.param(2, 1, 1, 2, {"dtype": "fp32"}, marks=pytest.mark.slow),
        (2, 2, 1, 2, {"dtype": "fp32", "recompute": Recompute.FULL}),
        (2, 2, 2, 1, {"dtype": "bf16", "recompute": Recompute.SELECTIVE}),
        pytest.param(1, 1, 2, 2, {"dtype": "bf16"}, marks=pytest.mark.slow),
        (4, 1, 1, 1, {"dtype": "fp32", "pad": "shadow"}),
        (2, 2, 1, 1, {"dtype": "fp32", "template": "gpipe"}),
        (2, 1, 1, 1, {"dtype": "fp32", "joint": False}),
    ],
)
def test_overlap_does_not_change_a_bit_in_low_precision(
    pool: WorkerPool, pp: int, vpp: int, dp: int, ep: int, options: dict[str, Any]
) -> None:
    mesh = Mesh(pp=pp, vpp=vpp, dp=dp, ep=ep)
    spec = tiny_hybrid("GsdSg")
    plan = make_plan(spec, mesh, 5, seed=pp + vpp, **options)
    batches = make_batches(spec, mesh, 5, seed=5)
    results = pool.run(gradients_of, mesh.world, spec, [(plan, batches)], (True, False), dropout=0.1)
    on, off = merged(results, 0, 0), merged(results, 0, 1)
    assert {of_rank[0][0][0] for of_rank in results} == {of_rank[0][1][0] for of_rank in results}
    assert set(on) == set(off)
    for name, gradient in on.items():
        assert gradient.dtype == torch.float32  # main gradients
        assert torch.equal(gradient, off[name]), name


@pytest.mark.parametrize(("pp", "vpp", "m"), [(4, 2, 10), (4, 2, 5), (2, 3, 7), (3, 2, 1)])
def test_shadow_padding_and_groups_equal_the_reference(pool: WorkerPool, pp: int, vpp: int, m: int) -> None:
    """Case 21: padded micro-batches leave no trace, and the plan says how many there were."""
    mesh = Mesh(pp=pp, vpp=vpp)
    spec = tiny_hybrid("gSdsg")
    batches = make_batches(spec, mesh, m, seed=m)
    plans = {pad: make_plan(spec, mesh, m, seed=m, pad=pad) for pad in ("groups", "shadow")}
    assert plans["shadow"].shadows == -m % pp
    assert plans["groups"].shadows == 0
    results = pool.run(gradients_of, mesh.world, spec, [(plan, batches) for plan in plans.values()], (True,))
    want = reference(spec, batches)
    for run in (0, 1):
        assert results[0][run][0][0] == pytest.approx(want.total("loss"), rel=1e-11)
        assert_close(merged(results, run, 0), want.gradients, 1e-11)


def v_shaped(spec: ModelSpec, microbatches: int) -> Plan:
    """Stages 0 and 3 on rank 0, 1 and 2 on rank 1."""
    from tessera_rt.testing.plans import simple_plan

    plan = simple_plan(spec, pp=2, vpp=2, microbatches=microbatches, placement=(0, 1, 1, 0), order="gpipe")
    return replace(plan, workload=replace(plan.workload, dtype="fp64"))


@pytest.mark.parametrize("shape", ["straight", "v"])
def test_tied_weights_on_two_ranks_and_on_one(pool: WorkerPool, shape: str) -> None:
    """Case 40: the tied weight's gradient is the sum of both uses, wherever they are."""
    spec = tiny_hybrid("gd", tied=True, vocab=17, hidden=8)
    mesh = Mesh(pp=2, vpp=1 if shape == "straight" else 2)
    plan = make_plan(spec, mesh, 3, seed=0, cuts=(0, 2, 4)) if shape == "straight" else v_shaped(spec, 3)
    batches = make_batches(spec, mesh, 3, seed=2)
    results = pool.run(gradients_of, 2, spec, [(plan, batches)], (True,))
    assert_close(merged(results, 0, 0), reference(spec, batches).gradients, 1e-11)


@pytest.mark.parametrize("recompute", [Recompute.SELECTIVE, Recompute.FULL])
def test_recomputation_draws_the_same_dropout(pool: WorkerPool, recompute: Recompute) -> None:
    """Case 47: checkpointing on or off, the same masks and so the same gradients, to the bit."""
    spec = tiny_hybrid("gSds")
    mesh = Mesh(pp=2, ep=2)
    batches = make_batches(spec, mesh, 3, seed=9)
    plans = [make_plan(spec, mesh, 3, seed=4, recompute=r) for r in (Recompute.NONE, recompute)]
    results = pool.run(gradients_of, 4, spec, [(plan, batches) for plan in plans], (True,), dropout=0.1)
    kept, again = merged(results, 0, 0), merged(results, 1, 0)
    assert results[0][0][0][0] == results[0][1][0][0]
    for name, gradient in kept.items():
        assert torch.equal(gradient, again[name]), name


def test_dropout_does_not_depend_on_the_pipeline(pool: WorkerPool) -> None:
    """Case 47: pp 1, 2, 4 draw the same masks."""
    spec = tiny_hybrid("gSds")
    runs = []
    for pp in (1, 2, 4):
        mesh = Mesh(pp=pp)
        runs.append((make_plan(spec, mesh, 2, seed=pp), make_batches(spec, mesh, 2, seed=1)))
    gradients = []
    for run in runs:
        results = pool.run(gradients_of, run[0].mesh.world, spec, [run], (True,), dropout=0.1)
        gradients.append(merged(results, 0, 0))
    for other in gradients[1:]:
        assert_close(other, gradients[0], 1e-11)
