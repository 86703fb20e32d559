"""Batches that are cut unevenly, padded, or run in rounds: the same loss and gradients as in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tessera_rt.costs import Workload
from tessera_rt.engine.batch import Batch
from tessera_rt.engine.engine import Engine, StepResult
from tessera_rt.model_spec import ModelSpec
from tessera_rt.models.hybrid import HybridModel
from tessera_rt.moe.steps import Placement
from tessera_rt.plan import Mesh, Plan
from tessera_rt.planner.build import plan_with
from tessera_rt.testing.hybrids import random_costs, tiny_hybrid, token_batch
from tessera_rt.testing.reference import ReferenceResult, reference_step
from tessera_rt.testing.worker import RankContext
from tessera_rt.testing.worker_pool import WorkerPool

MODEL_SEED = 1
Pairs = list[tuple[Tensor, Tensor]]


def make_plan(spec: ModelSpec, mesh: Mesh, microbatches: int, *, pad: str = "groups") -> Plan:
    costs = random_costs(spec, Workload(tokens=8, context=8, dtype="fp64"), seed=mesh.stages)
    items = len(spec.items)
    cuts = tuple(round(i * items / mesh.stages) for i in range(mesh.stages + 1))
    return plan_with(cuts, spec, mesh, costs, microbatches=microbatches, pad=pad)


def stepped(
    ctx: RankContext, spec: ModelSpec, plan: Plan, batch: Batch, rounds: int, dropout: float
) -> tuple[StepResult, dict[str, Tensor], list[Tensor]]:
    """A step's result, this rank's gradients, and the state of torch's generator before and after."""
    states = [torch.random.get_rng_state()]
    with Engine(HybridModel(spec, seed=MODEL_SEED, dropout=dropout), plan, timeout_s=60) as engine:
        result = engine.step(batch, rounds=rounds)
        states.append(torch.random.get_rng_state())
        return result, engine.gradients.named_gradients(), states


def reference(spec: ModelSpec, pairs: Pairs) -> ReferenceResult:
    chunk = HybridModel(spec, seed=MODEL_SEED).build_chunk(spec.items, Placement(dtype=torch.float64))
    return reference_step([chunk], [[pair] for pair in pairs])


def assert_equal_to_one_process(
    pool: WorkerPool, spec: ModelSpec, plan: Plan, batch: Batch, pairs: Pairs, rounds: int = 1
) -> None:
    """Loss, balance loss and every gradient of every stage; ``pairs``: the micro-batches that ``batch`` becomes."""
    want = reference(spec, pairs)
    seen: set[str] = set()
    for result, gradients, _ in pool.run(stepped, plan.mesh.world, spec, plan, batch, rounds, 0.0):
        assert result.loss == pytest.approx(want.total("loss"), rel=1e-11)
        assert result.aux_loss == pytest.approx(want.total("aux_loss"), rel=1e-11)
        assert gradients, "a rank without parameters shows nothing"
        for name, gradient in gradients.items():
            worst = (gradient - want.gradients[name]).abs().max()
            assert worst <= 1e-11 * max(want.gradients[name].abs().max().item(), 1e-12), name
        assert any(gradient.any() for gradient in gradients.values())
        seen |= set(gradients)
    assert seen == set(want.gradients)


def test_rows_that_do_not_divide(pool: WorkerPool) -> None:
    """Case 23: batch 8 in 3 micro-batches (3, 3, 2) on three stages."""
    spec = tiny_hybrid("gd")
    [(tokens, labels)] = token_batch(spec, [(8, 5)], seed=4)
    pairs = [(tokens[a:b], labels[a:b]) for a, b in ((0, 3), (3, 6), (6, 8))]
    assert_equal_to_one_process(pool, spec, make_plan(spec, Mesh(pp=3), 3), (tokens, labels), pairs)


@pytest.mark.parametrize("layers", ["dd", "gS"])
def test_two_rounds_of_ones_scale_once(pool: WorkerPool, layers: str) -> None:
    """Case 42: pp 2, m = 8, two accumulation rounds, all tokens and labels 1."""
    spec = tiny_hybrid(layers)
    ones = torch.ones(1, 3, dtype=torch.int64)
    pairs = [(ones, ones)] * 16
    assert_equal_to_one_process(pool, spec, make_plan(spec, Mesh(pp=2), 8), [*pairs], pairs, rounds=2)


@pytest.mark.parametrize(("pp", "vpp", "m"), [(4, 2, 10), (2, 3, 7), (3, 2, 1)])
def test_padding_leaves_no_trace(pool: WorkerPool, pp: int, vpp: int, m: int) -> None:
    """Case 21: shadows draw no random numbers and count nowhere: loss, balance loss, tokens, norm, dropout masks."""
    spec = tiny_hybrid("gSdsg")
    mesh = Mesh(pp=pp, vpp=vpp)
    batch = token_batch(spec, [(1, 3 + i % 3) for i in range(m)], seed=m)
    plans = [make_plan(spec, mesh, m, pad=pad) for pad in ("groups", "shadow")]
    assert [plan.shadows for plan in plans] == [0, -m % pp]
    plain, padded = (pool.run(stepped, pp, spec, plan, batch, 1, 0.1) for plan in plans)
    for (result, gradients, states), (padded_result, padded_gradients, padded_states) in zip(
        plain, padded, strict=True
    ):
        for state in (states[1], *padded_states):
            assert torch.equal(state, states[0]), "the global generator was used"
        assert padded_result.tokens == result.tokens == sum(int((labels != -100).sum()) for _, labels in batch)
        for name in ("loss", "aux_loss", "grad_norm"):
            assert getattr(padded_result, name) == pytest.approx(getattr(result, name), rel=1e-11), name
        assert result.aux_loss > 0
        for name, gradient in gradients.items():
            assert torch.allclose(padded_gradients[name], gradient, rtol=1e-9, atol=1e-13), name
