"""What users see when ranks disagree, hang or die, without a launcher of ours: the true rank, in bounded time."""

from __future__ import annotations

import math
import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera_rt.costs import Workload
from tessera_rt.engine.engine import Engine
from tessera_rt.engine.optim import OptimizerConfig
from tessera_rt.errors import SpecError
from tessera_rt.model_spec import ModelSpec
from tessera_rt.models.hybrid import HybridModel
from tessera_rt.moe.steps import Chunk, Pending, Placement, RowLayout, TaskModel, Transport
from tessera_rt.plan import Mesh, Plan
from tessera_rt.planner.build import plan_with
from tessera_rt.split import SplitLinear
from tessera_rt.testing.hybrids import random_costs, tiny_hybrid, token_batch
from tessera_rt.testing.reference import reference_step
from tessera_rt.testing.worker import RankContext
from tessera_rt.testing.worker_pool import WorkerPool


def make_plan(spec: ModelSpec, mesh: Mesh, microbatches: int, dtype: str = "fp64") -> Plan:
    workload = Workload(tokens=8, context=8, dp=mesh.dp, ep=mesh.ep, dtype=dtype)
    items = len(spec.items)
    cuts = tuple(round(i * items / mesh.stages) for i in range(mesh.stages + 1))
    return plan_with(cuts, spec, mesh, random_costs(spec, workload, seed=2), microbatches=microbatches)


class FailingTransport:
    """In its n-th dispatch, the rank dies or hangs."""

    def __init__(self, inner: Transport, how: str, at: int) -> None:
        self.inner, self.how, self.left = inner, how, at
        self.dp_rank, self.ep_rank, self.ep_size = inner.dp_rank, inner.ep_rank, inner.ep_size

    def gather_counts(self, counts: Tensor) -> Pending:
        return self.inner.gather_counts(counts)

    def dispatch(self, rows: Tensor, layout: RowLayout) -> Pending:
        self.left -= 1
        if self.left == 0 and self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.left == 0:
            time.sleep(60)
        return self.inner.dispatch(rows, layout)

    def combine(self, rows: Tensor, layout: RowLayout) -> Pending:
        return self.inner.combine(rows, layout)


def step_in_which_rank_3_fails(ctx: RankContext, spec: ModelSpec, plan: Plan, how: str) -> None:
    def wrap(inner: Transport) -> Transport:
        return FailingTransport(inner, how, 5) if ctx.rank == 3 else inner

    with Engine(HybridModel(spec), plan, wrap_transport=wrap, timeout_s=10) as engine:
        engine.step(token_batch(spec, [(1, 4)] * plan.microbatches, seed=ctx.rank % 2))


@pytest.mark.parametrize("how", ["kill", "hang"])
def test_a_rank_that_fails_inside_a_collective_is_named(pool: WorkerPool, how: str) -> None:
    """pp 2 x ep 2: every other rank names rank 3, who waited for it in which task, and how (lost or timed out)."""
    spec = tiny_hybrid("gS")
    plan = make_plan(spec, Mesh(pp=2, ep=2), 4)
    results = pool.run(step_in_which_rank_3_fails, 4, spec, plan, how, expect_failure=True, timeout_s=40, grace_s=20)
    told = [result.failure for result in results[:3]]
    for failure in told:
        assert failure is not None and failure.type_name in ("WaitError", "TransportError"), failure
        assert "rank 3" in failure.message
        assert "pair.cc" not in failure.message
    neighbour = told[2]
    assert neighbour is not None
    assert "rank 2" in neighbour.message and "with ranks 3" in neighbour.message and "micro-batch" in neighbour.message
    assert ("waited 10 s" in neighbour.message) == (how == "hang")


def differing(ctx: RankContext, spec: ModelSpec, plan: Plan, what: str) -> str:
    odd = ctx.rank == 1
    options: dict[str, Any] = {
        "overlap": {"overlap": not odd},
        "seed": {"seed": int(odd)},
        "optimizer": {"optimizer": OptimizerConfig(clip=0.5 if odd else 1.0)},
    }[what]
    with Engine(HybridModel(spec), plan, timeout_s=20, **options) as engine, pytest.raises(SpecError) as caught:
        engine.step(token_batch(spec, [(1, 4)] * plan.microbatches, seed=0))
    return str(caught.value)


@pytest.mark.parametrize("what", ["overlap", "seed", "optimizer"])
@pytest.mark.parametrize("mesh", [Mesh(pp=2), Mesh(ep=2)])
def test_settings_that_differ_between_ranks_are_refused_before_the_step(
    pool: WorkerPool, mesh: Mesh, what: str
) -> None:
    spec = tiny_hybrid("gS")
    for text in pool.run(differing, 2, spec, make_plan(spec, mesh, 2), what):
        name = "optimizer.clip" if what == "optimizer" else what
        assert f"settings.{name}" in text and "on rank 0" in text and "on rank 1" in text
        assert text.count("\n") == 1, "only what differs is named"


class PartlyFrozen:
    """A HybridModel of which some parameters are not trained."""

    def __init__(self, spec: ModelSpec, frozen: tuple[str, ...]) -> None:
        self.model, self.frozen = HybridModel(spec, seed=1), frozen

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    def build_chunk(self, items: Any, placement: Placement) -> Chunk:
        chunk = self.model.build_chunk(items, placement)
        for info in chunk.parameter_infos():
            if info.name.startswith(self.frozen):
                info.parameter.requires_grad_(False)
        return chunk

    def boundary_shape(self, tokens_shape: tuple[int, int]) -> tuple[int, ...]:
        return self.model.boundary_shape(tokens_shape)


def frozen_gradients(ctx: RankContext, spec: ModelSpec, plan: Plan, frozen: tuple[str, ...]) -> Any:
    model: TaskModel = PartlyFrozen(spec, frozen)
    with Engine(model, plan, timeout_s=20) as engine:
        return engine.forward_backward(token_batch(spec, [(1, 4), (2, 3)], seed=ctx.rank % plan.mesh.ep))


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pp=2, ep=2)])
@pytest.mark.parametrize(
    "frozen", [("embed", "layers.0"), ("layers.0", "layers.1"), ("head",), ("embed", "layers.0", "layers.1.attention")]
)
def test_frozen_parameters(pool: WorkerPool, mesh: Mesh, frozen: tuple[str, ...]) -> None:
    """Frozen stages below and above trained ones: the gradients of the others are those of one process."""
    spec = tiny_hybrid("gSg")
    plan = make_plan(spec, mesh, 2)
    found: dict[str, Tensor] = {}
    for _, gradients in pool.run(frozen_gradients, mesh.world, spec, plan, frozen):
        found |= gradients
    chunk = HybridModel(spec, seed=1).build_chunk(spec.items, Placement(dtype=torch.float64))
    batches = [token_batch(spec, [(1, 4), (2, 3)], seed=part) for part in range(mesh.ep)]
    wanted = reference_step([chunk], [[batch[i] for batch in batches] for i in range(2)]).gradients
    trained = {name for name in wanted if not name.startswith(frozen)}
    assert set(found) == trained
    for name in trained:
        scale = max(wanted[name].abs().max().item(), 1e-12)
        assert (found[name] - wanted[name]).abs().max().item() <= 1e-11 * scale, name


class Adapter(nn.Module):
    """A linear map plus a trainable one of rank 2 beside it, as LoRA adds."""

    def __init__(self, base: SplitLinear, split: bool) -> None:
        super().__init__()
        kind = SplitLinear if split else nn.Linear
        dtype = base.weight.dtype
        self.base, draw = base, torch.Generator().manual_seed(5)
        self.down = kind(base.in_features, 2, bias=False, dtype=dtype)
        self.up = kind(2, base.out_features, bias=False, dtype=dtype)
        for linear in (self.down, self.up):  # not zero: then neither gradient is
            nn.init.normal_(linear.weight, std=0.3, generator=draw)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


class Adapted(PartlyFrozen):
    """All frozen but an adapter on the query of layer ``at``. ``split``: its weight gradients are W tasks."""

    def __init__(self, spec: ModelSpec, at: int, split: bool) -> None:
        super().__init__(spec, ("",))
        self.at, self.split = at, split

    def build_chunk(self, items: Any, placement: Placement) -> Chunk:
        chunk = super().build_chunk(items, placement)
        if any(item.label == f"L{self.at}" for item in items):
            attention = chunk.get_submodule(f"layers.{self.at}.attention")
            attention.query = Adapter(attention.get_submodule("query"), self.split)  # type: ignore[arg-type]
        return chunk


def adapter_training(ctx: RankContext, plan: Plan, model: TaskModel) -> Any:
    batch = token_batch(model.spec, [(1, 4), (2, 3)], seed=ctx.rank % plan.mesh.ep)
    sgd = OptimizerConfig(kind="sgd", lr=0.1, weight_decay=0.0, clip=0.0)
    with Engine(model, plan, optimizer=sgd, timeout_s=20) as engine:
        before = {name: tensor.clone() for name, tensor in engine.named_parameters().items()}
        _, gradients = engine.forward_backward(batch)
        result = engine.step(batch)
        changed = {n: t - before[n] for n, t in engine.named_parameters().items() if not torch.equal(t, before[n])}
        return gradients, result, changed


@pytest.mark.parametrize("mesh", [Mesh(pp=2), Mesh(pp=2, ep=2)])
@pytest.mark.parametrize(("at", "split"), [(0, True), (0, False), (2, True)])
def test_case_49c_all_frozen_but_an_adapter(pool: WorkerPool, mesh: Mesh, at: int, split: bool) -> None:
    """The adapter is on the stage that gets token ids, or on the last; the other stage has nothing to train."""
    spec = tiny_hybrid("gSd")
    model = Adapted(spec, at, split)
    results = pool.run(adapter_training, mesh.world, make_plan(spec, mesh, 2), model)
    chunk = model.build_chunk(spec.items, Placement(dtype=torch.float64)).requires_grad_()
    batches = [token_batch(spec, [(1, 4), (2, 3)], seed=part) for part in range(mesh.ep)]
    expected = reference_step([chunk], [[batch[i] for batch in batches] for i in range(2)])
    trained = [f"layers.{at}.attention.query.{part}.weight" for part in ("down", "up")]
    wanted = {name: expected.gradients[name] for name in trained}
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in wanted.values()))
    assert norm > 1e-3
    for rank, (gradients, result, changed) in enumerate(results):
        names = trained if (rank < mesh.world // 2) == (at == 0) else []
        assert sorted(gradients) == sorted(changed) == names
        assert result.grad_norm == pytest.approx(norm, rel=1e-11) and not result.skipped
        for name in names:
            torch.testing.assert_close(gradients[name], wanted[name], rtol=1e-10, atol=1e-13)
            torch.testing.assert_close(changed[name], -0.1 * wanted[name], rtol=1e-9, atol=1e-13)


def sends_kept_in_evaluation(ctx: RankContext, spec: ModelSpec, plan: Plan) -> int:
    with Engine(HybridModel(spec), plan, timeout_s=20) as engine:
        most = 0
        box = engine._runtime._box  # type: ignore[attr-defined]

        def watch(_: str) -> None:
            nonlocal most
            most = max(most, box.kept)

        engine._driver.note = watch
        engine.evaluate(token_batch(spec, [(1, 4)] * plan.microbatches, seed=0))
        return most


def test_evaluation_holds_no_more_activations_with_more_micro_batches(pool: WorkerPool) -> None:
    spec = tiny_hybrid("gS")
    kept = [pool.run(sends_kept_in_evaluation, 2, spec, make_plan(spec, Mesh(pp=2), m)) for m in (4, 32)]
    assert kept[0] == kept[1]
