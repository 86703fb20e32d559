"""Dropout's keys: which masks differ and which are alike, and a whole step with dropout against one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tessera_rt.costs import Workload
from tessera_rt.engine.batch import Batch
from tessera_rt.engine.engine import Engine, StepResult
from tessera_rt.engine.optim import OptimizerConfig
from tessera_rt.model_spec import ModelSpec
from tessera_rt.models.hybrid import HybridModel
from tessera_rt.moe.steps import Placement
from tessera_rt.plan import Mesh, Plan
from tessera_rt.planner.build import plan_with
from tessera_rt.testing.hybrids import random_costs, tiny_hybrid, token_batch
from tessera_rt.testing.reference import reference_step
from tessera_rt.testing.worker import RankContext
from tessera_rt.testing.worker_pool import WorkerPool

DROPOUT, MODEL_SEED = 0.2, 3
FROZEN = OptimizerConfig(kind="sgd", lr=0.0, weight_decay=0.0, clip=0.0)
Step = tuple[StepResult, list[int], dict[str, Tensor]]  # result, keys of all micro-batches, gradients


def make_plan(spec: ModelSpec, mesh: Mesh, microbatches: int) -> Plan:
    workload = Workload(tokens=16, context=16, dp=mesh.dp, ep=mesh.ep, dtype="fp64")
    items = len(spec.items)
    cuts = tuple(round(i * items / mesh.stages) for i in range(mesh.stages + 1))
    return plan_with(cuts, spec, mesh, random_costs(spec, workload, seed=1), microbatches=microbatches)


def batch_of(spec: ModelSpec, part: int, microbatches: int) -> list[tuple[Tensor, Tensor]]:
    return token_batch(spec, [(2, 3 + i) for i in range(microbatches)], seed=part)


def steps_with_dropout(ctx: RankContext, spec: ModelSpec, plan: Plan, steps: int, rounds: int, seed: int) -> list[Step]:
    """Steps that leave the parameters as they are, with the random keys that the driver was given."""
    _, dp_i, ep_i = plan.mesh.coordinate(ctx.rank)
    batch: Batch = [*batch_of(spec, dp_i * plan.mesh.ep + ep_i, rounds * plan.microbatches)]
    found: list[Step] = []
    model = HybridModel(spec, seed=MODEL_SEED, dropout=DROPOUT)
    with Engine(model, plan, optimizer=FROZEN, seed=seed, timeout_s=60) as engine:
        train = engine._driver.train
        keys: list[int] = []

        def watch(given: Sequence[Mapping[str, Any]]) -> None:
            keys.extend(values["random_key"] for values in given)
            train(given)

        engine._driver.train = watch  # type: ignore[method-assign]
        for _ in range(steps):
            keys.clear()
            result = engine.step(batch, rounds=rounds)
            found.append((result, list(keys), engine.gradients.named_gradients()))
    return found


def key_of(keys: Sequence[Sequence[int]], microbatch: int, part: int) -> int:
    return keys[part][microbatch]


def test_masks_differ_by_step_data_rank_and_micro_batch_and_are_alike_along_the_pipeline(pool: WorkerPool) -> None:
    """Also over rounds, and with another seed."""
    spec = tiny_hybrid("gS")
    mesh = Mesh(pp=2, dp=2, ep=2)
    plan = make_plan(spec, mesh, 2)
    seen: dict[int, tuple[int, int, int, int]] = {}
    for seed in (0, 1):
        for rank, steps in enumerate(pool.run(steps_with_dropout, 8, spec, plan, 2, 2, seed, timeout_s=100)):
            _, dp_i, ep_i = mesh.coordinate(rank)
            for step, (_, keys, _) in enumerate(steps):
                assert len(keys) == 2 * plan.microbatches
                for microbatch, key in enumerate(keys):
                    place = (2 * seed + step, dp_i, ep_i, microbatch)
                    assert seen.setdefault(key, place) == place
    assert len(seen) == 2 * 2 * mesh.dp * mesh.ep * 2 * plan.microbatches, "the pipeline ranks of a column differ"


def test_steps_with_dropout_equal_one_process(pool: WorkerPool) -> None:
    """Loss, balance loss and all gradients of two steps, on dp x ep = 4, with the same masks in one process."""
    spec = tiny_hybrid("gSd")
    mesh = Mesh(pp=2, dp=2, ep=2)
    plan = make_plan(spec, mesh, 3)
    results = pool.run(steps_with_dropout, 8, spec, plan, 2, 1, 5, timeout_s=100)
    model = HybridModel(spec, seed=MODEL_SEED, dropout=DROPOUT)
    chunk = model.build_chunk(spec.items, Placement(dtype=torch.float64))
    batches = [batch_of(spec, part, 3) for part in range(4)]
    losses = []
    for step in range(2):
        keys = [results[part][step][1] for part in range(4)]  # ranks of the first stage, in the order of dp x ep
        want = reference_step(
            [chunk],
            [[of_part[i] for of_part in batches] for i in range(3)],
            random_key=partial(key_of, keys),
        )
        got: dict[str, Tensor] = {}
        for of_rank in results:
            result, _, gradients = of_rank[step]
            assert abs(result.loss - want.total("loss")) <= 1e-11 * want.total("loss")
            assert abs(result.aux_loss - want.total("aux_loss")) <= 1e-11 * want.total("aux_loss")
            got |= gradients
        assert set(got) == set(want.gradients)
        for name, gradient in want.gradients.items():
            assert (got[name] - gradient).abs().max() <= 1e-11 * max(gradient.abs().max().item(), 1e-12), name
        losses.append(want.total("loss"))
    assert losses[0] != losses[1]
