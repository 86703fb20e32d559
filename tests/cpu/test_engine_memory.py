"""The weights, gradients and optimizer state that are planned are those the engine holds, up to its padding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
from torch import Tensor

from tessera_rt.cost_sources.sizes import item_memory
from tessera_rt.cost_sources.work import DTYPE_BYTES, state_bytes
from tessera_rt.costs import Workload
from tessera_rt.engine.buckets import ALIGN
from tessera_rt.engine.engine import Engine
from tessera_rt.engine.optim import OptimizerConfig
from tessera_rt.model_spec import ModelSpec
from tessera_rt.models.hybrid import HybridModel
from tessera_rt.plan import Mesh, Plan
from tessera_rt.planner.build import plan_with
from tessera_rt.testing.hybrids import random_costs, tiny_hybrid
from tessera_rt.testing.worker import RankContext
from tessera_rt.testing.worker_pool import WorkerPool

OPTIMIZERS = {
    "adamw": OptimizerConfig(),
    "sgd": OptimizerConfig(kind="sgd"),
    "sgd with momentum": OptimizerConfig(kind="sgd", momentum=0.9),
}


@dataclass(frozen=True)
class Padded:
    """Of one bucket: elements of its weights, and with padding; number of its weights and of its shards."""

    elements: int
    size: int
    weights: int
    parts: int

    @property
    def padding(self) -> int:
        return self.size - self.elements


@dataclass(frozen=True)
class Held:
    """Bytes a rank's engine holds."""

    weights: int
    gradients: int
    optimizer: int
    buckets: tuple[Padded, ...]


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of every memory block behind the tensors, each once."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}


def holds(ctx: RankContext, spec: ModelSpec, plan: Plan, config: OptimizerConfig) -> Held:
    with Engine(HybridModel(spec), plan, optimizer=config, timeout_s=60) as engine:
        buffers, states = engine.gradients, engine.optimizer._states
        uses = [use for bucket in buffers.buckets for entry in bucket.entries for use in entry.weight.uses]
        weights = storages(use.parameter.data for use in uses)
        later = [buffer for _, buffer in buffers._later_uses]
        updating = storages(
            tensor for state in states for tensor in (state.flat, state.master, *state.moments.values())
        )
        return Held(
            weights=sum(weights.values()),
            gradients=sum(storages([*buffers._flat, *later, *buffers.shards]).values()),
            optimizer=sum(size for block, size in updating.items() if block not in weights),
            buckets=tuple(
                Padded(
                    elements=sum(entry.weight.shape.numel() for entry in bucket.entries),
                    size=bucket.size,
                    weights=len(bucket.entries),
                    parts=bucket.parts,
                )
                for bucket in buffers.buckets
            ),
        )


def planned(spec: ModelSpec, mesh: Mesh, dtype: str, config: OptimizerConfig) -> Plan:
    workload = Workload(
        tokens=8,
        context=8,
        dp=mesh.dp,
        ep=mesh.ep,
        dtype=dtype,
        optimizer=config.kind,
        momentum=config.momentum > 0,
    )
    memory = {item.label: item_memory(spec, item, workload) for item in spec.items}
    costs = replace(random_costs(spec, workload), memory=memory)
    items = len(spec.items)
    cuts = [round(i * items / mesh.stages) for i in range(mesh.stages + 1)]
    return plan_with(cuts, spec, mesh, costs, microbatches=2)


def check(plan: Plan, rank: int, held: Held, moments: int) -> None:
    """Equal, but for the elements that buckets are padded with."""
    dtype, memory = plan.workload.dtype, plan.memory[rank]
    element, state = DTYPE_BYTES[dtype], state_bytes(dtype)
    for bucket in held.buckets:
        # Each weight starts at a multiple of ALIGN, each shard too.
        assert 0 <= bucket.padding <= (ALIGN - 1) * bucket.weights + ALIGN * (bucket.parts - 1)
    whole = sum(bucket.padding for bucket in held.buckets)
    # All sizes of these models are even, so two ranks' shards need no rounding.
    sharded = sum(bucket.padding / bucket.parts for bucket in held.buckets)
    reduced = sum(bucket.padding / bucket.parts for bucket in held.buckets if bucket.parts > 1)
    states = moments + (element != state)
    assert held.weights == memory.weights + element * whole
    assert held.gradients == memory.gradients + state * (whole + reduced)
    assert held.optimizer == memory.optimizer + states * state * sharded


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize(("dp", "ep"), [(1, 1), (2, 1), (1, 2)])
def test_planned_bytes_are_those_held(pool: WorkerPool, dp: int, ep: int, dtype: str, kind: str) -> None:
    spec, config = tiny_hybrid("gSd"), OPTIMIZERS[kind]
    plan = planned(spec, Mesh(dp=dp, ep=ep), dtype, config)
    items = [item_memory(spec, item, plan.workload) for item in spec.items]
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(plan.memory[0], name) == sum(getattr(memory, name) for memory in items)
    for held in pool.run(holds, dp * ep, spec, plan, config):
        check(plan, 0, held, len(config.moments))


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2), Mesh(pp=2, ep=2)], ids=str)
def test_a_tied_weight_is_planned_as_it_is_held(pool: WorkerPool, mesh: Mesh) -> None:
    spec, config = tiny_hybrid("gSd", tied=True, vocab=24), OPTIMIZERS["adamw"]
    plan = planned(spec, mesh, "bf16", config)
    for rank, held in enumerate(pool.run(holds, mesh.world, spec, plan, config)):
        check(plan, mesh.coordinate(rank)[0], held, len(config.moments))
