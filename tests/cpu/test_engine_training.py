"""Whole training steps against torch's optimizers in one process, and the loop around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera_rt.costs import Workload
from tessera_rt.engine.batch import Batch as EngineBatch
from tessera_rt.engine.batch import Pair
from tessera_rt.engine.engine import Engine, StepResult
from tessera_rt.engine.optim import OptimizerConfig
from tessera_rt.errors import SpecError
from tessera_rt.model_spec import FeedForwardKind, ModelSpec
from tessera_rt.models.hybrid import HybridModel
from tessera_rt.moe.steps import Chunk, Placement, expert_name
from tessera_rt.plan import Mesh, Plan
from tessera_rt.planner.build import plan_with
from tessera_rt.testing.hybrids import random_costs, tiny_hybrid, token_batch
from tessera_rt.testing.plans import simple_plan
from tessera_rt.testing.reference import reference_step
from tessera_rt.testing.worker import RankContext
from tessera_rt.testing.worker_pool import WorkerPool

Batch = list[tuple[Tensor, Tensor]]


def make_plan(spec: ModelSpec, mesh: Mesh, microbatches: int, cuts: Sequence[int] | None = None) -> Plan:
    costs = random_costs(spec, Workload(tokens=8, context=8, dp=mesh.dp, ep=mesh.ep, dtype="fp64"), seed=mesh.stages)
    items = len(spec.items)
    even = tuple(round(i * items / mesh.stages) for i in range(mesh.stages + 1))
    return plan_with(cuts or even, spec, mesh, costs, microbatches=microbatches)


def trained(
    ctx: RankContext,
    spec: ModelSpec,
    plan: Plan,
    config: OptimizerConfig,
    batches: Sequence[Sequence[Batch]],
    rounds: int,
) -> tuple[list[StepResult], dict[str, Tensor]]:
    """``batches[step][part]``. Results of all steps and this rank's parameters afterwards."""
    _, dp_i, ep_i = plan.mesh.coordinate(ctx.rank)
    with Engine(HybridModel(spec, seed=1), plan, optimizer=config, timeout_s=60) as engine:
        results = [engine.step([*of_step[dp_i * plan.mesh.ep + ep_i]], rounds=rounds) for of_step in batches]
        return results, engine.named_parameters()


def names_of(name: str, experts: range) -> list[str]:
    return [expert_name(name, expert) for expert in experts]


def one_process(
    spec: ModelSpec, config: OptimizerConfig, batches: Sequence[Sequence[Batch]]
) -> tuple[list[float], list[float], list[float], dict[str, Tensor]]:
    """Losses, balance losses, gradient norms and final parameters with torch's own optimizer and clipping."""
    chunk = HybridModel(spec, seed=1).build_chunk(spec.items, Placement(dtype=torch.float64))
    infos = {id(info.parameter): info for info in reversed(chunk.parameter_infos())}.values()
    groups = [
        {"params": [i.parameter for i in infos if i.decay], "weight_decay": config.weight_decay},
        {"params": [i.parameter for i in infos if not i.decay], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer
    if config.kind == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    else:
        optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    losses, aux_losses, norms = [], [], []
    for of_step in batches:
        result = reference_step([chunk], [[of_part[i] for of_part in of_step] for i in range(len(of_step[0]))])
        losses.append(result.total("loss"))
        aux_losses.append(result.total("aux_loss"))
        for info in infos:
            if info.experts is None:
                info.parameter.grad = result.gradients[info.name].clone()
            else:
                info.parameter.grad = torch.stack([result.gradients[n] for n in names_of(info.name, info.experts)])
        parameters = [info.parameter for info in infos]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).item()
        norms.append(norm)
        if 0 < config.clip < norm:  # exactly: torch's own clipping adds 1e-6 to the norm
            nn.utils.clip_grads_with_norm_(parameters, config.clip, torch.tensor(norm - 1e-6, dtype=torch.float64))
        optimizer.step()
    final: dict[str, Tensor] = {}
    for info in infos:
        if info.experts is None:
            final[info.name] = info.parameter.detach()
        else:
            final |= dict(zip(names_of(info.name, info.experts), info.parameter.detach(), strict=True))
    return losses, aux_losses, norms, final


def assert_trains_alike(
    pool: WorkerPool,
    spec: ModelSpec,
    plan: Plan,
    config: OptimizerConfig,
    batches: Sequence[Sequence[Batch]],
    rounds: int = 1,
) -> None:
    results = pool.run(trained, plan.mesh.world, spec, plan, config, batches, rounds, timeout_s=100)
    losses, aux_losses, norms, final = one_process(spec, config, batches)
    assert all(aux_losses) == any(layer.feed_forward.kind is FeedForwardKind.MOE for layer in spec.layers)
    for of_rank, _ in results:
        assert [r.loss for r in of_rank] == pytest.approx(losses, rel=1e-10)
        assert [r.aux_loss for r in of_rank] == pytest.approx(aux_losses, rel=1e-10)
        assert [r.grad_norm for r in of_rank] == pytest.approx(norms, rel=1e-10)
        assert not any(r.skipped for r in of_rank)
    found: dict[str, Tensor] = {}
    for _, parameters in results:
        for name, value in parameters.items():
            assert name not in found or torch.equal(found[name], value), f"{name} differs between ranks"
            found[name] = value
    assert set(found) == set(final)
    for name, value in final.items():
        assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12), name


def batches_for(spec: ModelSpec, mesh: Mesh, shapes: Sequence[Sequence[tuple[int, int]]]) -> list[list[Batch]]:
    """``shapes[step]``: of every micro-batch of that step."""
    return [
        [token_batch(spec, of_step, seed=100 * i + part, ignored=0.3) for part in range(mesh.dp * mesh.ep)]
        for i, of_step in enumerate(shapes)
    ]


OPTIMIZERS = [
    # A large eps: with a small one, Adam's first steps turn rounding errors of tiny gradients into whole steps.
    OptimizerConfig(kind="adamw", lr=0.01, eps=1e-3, weight_decay=0.1, clip=0.5),
    OptimizerConfig(kind="sgd", lr=0.1, momentum=0.9, weight_decay=0.0, clip=0.0),
]


@pytest.mark.parametrize("config", OPTIMIZERS, ids=lambda config: config.kind)
@pytest.mark.parametrize(
    ("mesh", "tied"),
    [
        (Mesh(pp=2, vpp=2, ep=2), True),
        (Mesh(dp=2, ep=2), False),
        pytest.param(Mesh(pp=2, dp=2), True, marks=pytest.mark.slow),
        pytest.param(Mesh(pp=4), True, marks=pytest.mark.slow),
    ],
)
def test_three_steps_equal_torchs_optimizer(pool: WorkerPool, mesh: Mesh, tied: bool, config: OptimizerConfig) -> None:
    """Cases 24, 40, 41, 43: lengths change within and between steps, tied weights, one global norm, valid tokens.

    The balance losses are those of all data ranks' tokens together.
    """
    spec = tiny_hybrid("gSd", tied=tied, vocab=17, hidden=16)
    shapes = [[(2, 5), (2, 9), (1, 3), (2, 16)], [(1, 17)] * 4, [(3, 4), (1, 1), (2, 2), (1, 8)]]
    assert_trains_alike(pool, spec, make_plan(spec, mesh, 4), config, batches_for(spec, mesh, shapes))


@pytest.mark.parametrize("shape", ["straight", "v"])
def test_tied_weights_stay_one(pool: WorkerPool, shape: str) -> None:
    """Case 40: after three steps both copies are what one weight would be, on two ranks or on one."""
    spec = tiny_hybrid("gd", tied=True, vocab=17, hidden=8)
    mesh = Mesh(pp=2, vpp=1 if shape == "straight" else 2)
    placement = None if shape == "straight" else (0, 1, 1, 0)
    plan = in_float64(simple_plan(spec, pp=2, vpp=mesh.vpp, microbatches=3, placement=placement, order="gpipe"))
    batches = batches_for(spec, mesh, [[(1, 4)] * 3] * 3)
    for config in OPTIMIZERS:
        assert_trains_alike(pool, spec, plan, config, batches)


def test_six_items_with_a_head_of_its_own_stage(pool: WorkerPool) -> None:
    """Case 4: [embedding + 2 layers, 2, 2, head] runs and equals the reference."""
    spec = tiny_hybrid("dgSdgs")
    plan = make_plan(spec, Mesh(pp=4), 3, cuts=(0, 3, 5, 7, 8))
    assert_trains_alike(pool, spec, plan, OPTIMIZERS[0], batches_for(spec, plan.mesh, [[(1, 5)] * 3] * 2))


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_fewer_micro_batches_than_stages(pool: WorkerPool, microbatches: int) -> None:
    """Case 20: m < pp trains like one process."""
    spec = tiny_hybrid("gSd")
    plan = make_plan(spec, Mesh(pp=4), microbatches)
    batches = batches_for(spec, plan.mesh, [[(1, 6)] * microbatches])
    assert_trains_alike(pool, spec, plan, OPTIMIZERS[1], batches)


def test_two_rounds_scale_once(pool: WorkerPool) -> None:
    """Case 42: m = 8 twice on pp 2: loss, balance loss and gradient are those of sixteen micro-batches."""
    spec = tiny_hybrid("gS")
    plan = make_plan(spec, Mesh(pp=2), 8)
    assert_trains_alike(pool, spec, plan, OPTIMIZERS[1], batches_for(spec, plan.mesh, [[(1, 3)] * 16] * 2), rounds=2)


def test_loss_is_the_mean_over_valid_tokens(pool: WorkerPool) -> None:
    """Case 43: valid tokens per micro-batch [7, 1, 0, 8]."""
    spec = tiny_hybrid("gd")
    batch = token_batch(spec, [(1, 8)] * 4, seed=3, ignored=0.0)
    for (_, labels), valid in zip(batch, (7, 1, 0, 8), strict=True):
        labels[0, valid:] = -100
    plan = make_plan(spec, Mesh(pp=2), 4)
    assert_trains_alike(pool, spec, plan, OPTIMIZERS[1], [[batch]])


def in_float64(plan: Plan) -> Plan:
    return replace(plan, workload=replace(plan.workload, dtype="fp64"))


def mixed(
    ctx: RankContext, spec: ModelSpec, plan: Plan, batches: Sequence[Batch], order: str
) -> tuple[list[float], Any]:
    """``order``: e = evaluate, t = train. Losses in that order, and the parameters afterwards."""
    steps = iter(batches)
    with Engine(HybridModel(spec, seed=1, dropout=0.2), plan, optimizer=OPTIMIZERS[0], timeout_s=60) as engine:
        state = torch.random.get_rng_state()
        losses = [engine.evaluate([*batches[0]]) if what == "e" else engine.step([*next(steps)]).loss for what in order]
        assert torch.equal(state, torch.random.get_rng_state()), "the global generator was used"
        return losses, engine.named_parameters()


def parameters_of(chunk: Chunk, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of ``chunk`` from parameters by global name."""
    infos = {id(info.parameter): info for info in chunk.parameter_infos()}
    state = {}
    for name, parameter in chunk.named_parameters(remove_duplicate=False):
        info = infos[id(parameter)]
        if info.experts is None:
            state[name] = named[info.name]
        else:
            state[name] = torch.stack([named[n] for n in names_of(info.name, info.experts)])
    return state


def test_evaluation_in_any_order(pool: WorkerPool) -> None:
    """Case 31: evaluating before, between and after leaves training as it is; no dropout when evaluating."""
    spec = tiny_hybrid("gS")
    plan = make_plan(spec, Mesh(pp=2, vpp=2), 3)
    batches = [token_batch(spec, [(2, 6)] * 3, seed=i) for i in range(2)]
    plain = pool.run(mixed, 2, spec, plan, batches, "tt")
    woven = pool.run(mixed, 2, spec, plan, batches, "eeteetee")
    for (plain_losses, plain_parameters), (woven_losses, parameters) in zip(plain, woven, strict=True):
        assert [woven_losses[2], woven_losses[5]] == plain_losses
        assert all(woven_losses[i] == woven_losses[i + 1] for i in (0, 3, 6))
        for name, value in plain_parameters.items():
            assert torch.equal(parameters[name], value), name
    chunk = HybridModel(spec, seed=1).build_chunk(spec.items, Placement(dtype=torch.float64))
    evaluated = {
        0: chunk.state_dict(),
        6: parameters_of(chunk, {k: v for _, of_rank in woven for k, v in of_rank.items()}),
    }
    for i, state in evaluated.items():
        chunk.load_state_dict(state)
        undropped = reference_step([chunk], [[pair] for pair in batches[0]]).total("loss")
        assert woven[0][0][i] == pytest.approx(undropped, rel=1e-11), f"evaluation {i}"
    assert woven[0][0][6] != pytest.approx(woven[0][0][0], rel=1e-3), "training changed nothing"


def bad_batches(ctx: RankContext, spec: ModelSpec, plan: Plan) -> list[str]:
    texts = []
    good: list[Pair] = [*token_batch(spec, [(1, 4)] * 3, seed=0)]
    wrong: list[tuple[EngineBatch, int]] = [(good[:2], 1), (good, 2), (good, 0), (good[0], 1)]
    with Engine(HybridModel(spec), plan, timeout_s=60) as engine:
        for batch, rounds in wrong:
            with pytest.raises(SpecError) as caught:
                engine.step(batch, rounds=rounds)
            texts.append(str(caught.value))
        engine.step(good)
    return texts


def test_a_bad_batch_is_refused_before_anything_is_sent(pool: WorkerPool) -> None:
    spec = tiny_hybrid("gS")
    texts = pool.run(bad_batches, 2, spec, make_plan(spec, Mesh(pp=2), 3))[0]
    assert "batch entries = 2" in texts[0] and "batch entries = 3" in texts[1]
    assert "rounds = 0" in texts[2] and "batch rows = 1" in texts[3]
