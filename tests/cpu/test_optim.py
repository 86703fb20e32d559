"""Sharded optimizer: torch.optim's results on 1, 2 and 4 ranks, clipping, tied weights, state in another layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera_rt.costs import Link, Workload
from tessera_rt.engine.grads import GradientBuffers, global_norm
from tessera_rt.engine.mesh import Groups, make_groups
from tessera_rt.engine.optim import OptimizerConfig, ShardedOptimizer, clip_scale
from tessera_rt.errors import SpecError
from tessera_rt.model_spec import Attention, AttentionKind, FeedForward, FeedForwardKind, LayerSpec, ModelSpec
from tessera_rt.moe.steps import ParameterInfo
from tessera_rt.plan import Action, CostAssumptions, Mesh, Plan, SolverStatus, Stage
from tessera_rt.testing.worker_pool import RankContext, WorkerPool

DOUBLE = torch.float64
LAYER = LayerSpec(
    attention=Attention(kind=AttentionKind.SOFTMAX, heads=2, kv_heads=2, head_dim=4),
    feed_forward=FeedForward(kind=FeedForwardKind.DENSE, intermediate=16),
)
ADAMW = OptimizerConfig(kind="adamw", lr=0.05, betas=(0.9, 0.95), weight_decay=0.1, clip=0.0)
SGD = OptimizerConfig(kind="sgd", lr=0.05, weight_decay=0.1, clip=0.0)
MOMENTUM = OptimizerConfig(kind="sgd", lr=0.05, momentum=0.9, weight_decay=0.1, clip=0.0)


def groups_of(mesh: Mesh, *, ranks: Sequence[int] = (), tied: bool = False) -> Groups:
    """Groups of a pipeline over a small model; stage s on ``ranks[s]`` (default: straight)."""
    spec = ModelSpec(name="small", hidden=8, vocab=17, layers=(LAYER,) * mesh.stages, tied=tied)
    placed = tuple(ranks) or tuple(range(mesh.stages))
    cuts = [round(s * len(spec.items) / mesh.stages) for s in range(mesh.stages + 1)]
    actions = tuple(
        tuple(Action.parse(f"{s}{letter}0") for letter in "FB" for s in range(mesh.stages) if placed[s] == rank)
        for rank in range(mesh.pp)
    )
    plan = Plan(
        model=spec.name,
        fingerprint=spec.fingerprint,
        mesh=mesh,
        template="given",
        microbatches=1,
        stages=tuple(
            Stage(index=s, rank=placed[s], start=cuts[s], stop=cuts[s + 1], slots=1) for s in range(mesh.stages)
        ),
        actions=actions,
        interleavings={},
        memory=(),
        workload=Workload(tokens=8, context=8, dtype="fp32"),
        assumptions=CostAssumptions(source="table", device="cpu", comm_sms=0, contention=0.0, link=Link()),
        solver=SolverStatus(objective="none", method="given", status="heuristic", t_dom_ns=0, bound_ns=0, step_ns=0),
    )
    return make_groups(plan, spec, timeout_s=20)


def rows(*shape: int, seed: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed)).to(dtype)


SHAPES = {"a.weight": (7, 5), "b.weight": (3, 4, 2), "norm.weight": (5,)}


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(rows(*shape, seed=i, dtype=dtype)) for i, (name, shape) in enumerate(SHAPES.items())}


def gradient(name: str, step: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Whole numbers, so that sums over ranks have no rounding."""
    seed = 1000 * step + 10 * rank + len(name)
    return torch.randint(-9, 10, SHAPES[name], generator=torch.Generator().manual_seed(seed)).to(dtype)


def torch_optimizer(config: OptimizerConfig, named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    plain = [parameter for name, parameter in named.items() if "norm" in name]
    decayed = [parameter for name, parameter in named.items() if "norm" not in name]
    kinds: list[dict[str, Any]] = [
        {"params": plain, "weight_decay": 0.0},
        {"params": decayed, "weight_decay": config.weight_decay},
    ]
    if config.kind == "adamw":
        return torch.optim.AdamW(kinds, lr=config.lr, betas=config.betas, eps=config.eps, foreach=False)
    return torch.optim.SGD(kinds, lr=config.lr, momentum=config.momentum, foreach=False)


def reference(config: OptimizerConfig, dtype: torch.dtype, world: int, steps: int) -> dict[str, Tensor]:
    named = parameters(dtype)
    optimizer = torch_optimizer(config, named)
    for step in range(steps):
        for name, parameter in named.items():
            parameter.grad = sum((gradient(name, step, rank, dtype) for rank in range(world)), torch.zeros(()))
        for group in optimizer.param_groups:
            group["lr"] = config.lr / (1 + step)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in named.items()}


class Trainer:
    """One data-parallel rank with the parameters above."""

    def __init__(self, groups: Groups, config: OptimizerConfig, dtype: torch.dtype) -> None:
        self.named = parameters(dtype)
        infos = [ParameterInfo(name=n, parameter=p, decay="norm" not in n) for n, p in self.named.items()]
        self.buffers = GradientBuffers(infos, groups)
        self.optimizer = ShardedOptimizer(self.buffers, config)
        self.rank, self.dtype = groups.rank, dtype

    def step(self, step: int, scale: float = 1.0) -> bool:
        self.buffers.zero()
        for name, parameter in self.named.items():
            (parameter * gradient(name, step, self.rank, self.dtype) * scale).sum().backward()
        self.buffers.reduce()
        return self.optimizer.step(global_norm(self.buffers), lr=self.optimizer.config.lr / (1 + step))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_equal_to_torch_optim(pool: WorkerPool, world: int) -> None:
    cases = [(config, dtype) for config in (ADAMW, SGD, MOMENTUM) for dtype in (DOUBLE, torch.float32)]

    def run(ctx: RankContext) -> list[dict[str, Tensor]]:
        groups = groups_of(Mesh(dp=world))
        found = []
        for config, dtype in cases:
            trainer = Trainer(groups, config, dtype)
            assert not any(trainer.step(step) for step in range(6))
            assert trainer.optimizer.applied == 6
            if world > 1:
                assert trainer.optimizer._states[0].master.numel() * world == trainer.buffers.buckets[0].size
            found.append({name: parameter.detach().clone() for name, parameter in trainer.named.items()})
        return found

    results = pool.run(run, world)
    for i, (config, dtype) in enumerate(cases):
        expected = reference(config, dtype, world, 6)
        for result in results:
            assert all(torch.equal(result[i][name], results[0][i][name]) for name in SHAPES), "ranks hold the same bits"
        for name, tensor in expected.items():
            assert not torch.equal(tensor, parameters(dtype)[name]), "the reference has moved"
            rtol = 1e-13 if dtype == DOUBLE else 2e-6
            torch.testing.assert_close(results[0][i][name], tensor, rtol=rtol, atol=rtol, msg=f"{config} {name}")


def test_low_precision_parameters_follow_an_fp32_master(pool: WorkerPool) -> None:
    """Steps of 1e-3 from 1.0 are lost in bf16 (spacing 2^-8 below 1, 2^-7 above), and add up in the master."""
    config = OptimizerConfig(kind="sgd", lr=1e-3, weight_decay=0.0, clip=0.0)

    def run(ctx: RankContext) -> tuple[float, float, torch.dtype]:
        parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        buffers = GradientBuffers([ParameterInfo(name="p", parameter=parameter)], groups_of(Mesh(dp=2)))
        optimizer = ShardedOptimizer(buffers, config)
        for _ in range(40):
            buffers.zero()
            (parameter * 0.5).sum().backward()
            buffers.reduce()
            optimizer.step(global_norm(buffers))
        master = optimizer.state_dict()["master/p"]
        optimizer.take_parameters()
        assert optimizer.state_dict()["master/p"][0] == parameter[0].float(), "masters can be reset to the parameters"
        return parameter[0].item(), master[0].item(), parameter.dtype

    for value, master, dtype in pool.run(run, 2):
        assert (master, dtype) == (pytest.approx(0.96, abs=1e-6), torch.bfloat16)
        assert value == torch.tensor(master).to(torch.bfloat16).item() != 1.0


def test_clipping_uses_the_global_norm(pool: WorkerPool) -> None:
    """Norms 3 and 4 on two stages, largest 1: all gradients times 0.2."""
    config = OptimizerConfig(kind="sgd", lr=1.0, weight_decay=0.0, clip=1.0)

    def run(ctx: RankContext) -> tuple[float, float, list[bool]]:
        groups = groups_of(Mesh(pp=2))
        parameter = nn.Parameter(torch.zeros(2, dtype=DOUBLE))
        buffers = GradientBuffers([ParameterInfo(name=f"p{ctx.rank}", parameter=parameter)], groups)
        optimizer = ShardedOptimizer(buffers, config)
        values, skipped = [], []
        for factor in (3.0 + ctx.rank, 0.06 + 0.02 * ctx.rank, float("nan") if ctx.rank else 1.0):
            buffers.zero()
            (parameter * torch.tensor([factor, 0.0], dtype=DOUBLE)).sum().backward()
            buffers.reduce()
            skipped.append(optimizer.step(global_norm(buffers)))
            values.append(parameter[0].item())
        assert values[2] == values[1], "a non-finite norm leaves parameters alone"
        assert optimizer.applied == 2
        return values[0], values[1] - values[0], skipped

    for rank, (clipped, unclipped, skipped) in enumerate(pool.run(run, 2)):
        assert clipped == pytest.approx(-(3 + rank) * 0.2, rel=1e-15)
        assert unclipped == pytest.approx(-(0.06 + 0.02 * rank), rel=1e-12), "norm 0.1 is below the limit"
        assert skipped == [False, False, True]


def test_scale_of_clipping() -> None:
    assert [clip_scale(5.0, largest) for largest in (0.0, 1.0, 5.0, 6.0)] == [1.0, 0.2, 1.0, 1.0]
    assert clip_scale(0.0, 1.0) == 1.0


@pytest.mark.parametrize("config", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("placement", ["straight", "v"])
def test_tied_embedding_and_head_stay_one_weight(pool: WorkerPool, config: OptimizerConfig, placement: str) -> None:
    """Vocabulary 17, hidden 8, three steps: embedding and head on two ranks, or both on rank 0 of a V."""
    tokens = torch.randint(17, (3, 6), generator=torch.Generator().manual_seed(5))
    labels = tokens.roll(1, 1).flatten()
    initial = rows(17, 8, seed=1)

    tied = nn.Parameter(initial.clone())
    plain = torch_optimizer(config, {"embed.weight": tied})
    for _ in range(3):
        plain.zero_grad()
        nn.functional.cross_entropy((tied[tokens].tanh() @ tied.T).flatten(0, 1), labels).backward()
        plain.step()

    def run(ctx: RankContext) -> list[Tensor]:
        mesh = Mesh(pp=2, vpp=2 if placement == "v" else 1)
        groups = groups_of(mesh, ranks=(0, 1, 1, 0) if placement == "v" else (), tied=True)
        held = {"embed.weight": True, "head.weight": True}
        if placement == "straight":
            held = {"embed.weight": ctx.rank == 0, "head.weight": ctx.rank == 1}
        elif ctx.rank == 1:
            held = {}
        own = {name: nn.Parameter(initial.clone()) for name, here in held.items() if here}
        buffers = GradientBuffers(
            [ParameterInfo(name=name, parameter=parameter, tied="embed.weight") for name, parameter in own.items()],
            groups,
        )
        optimizer = ShardedOptimizer(buffers, config)
        for _ in range(3):
            buffers.zero()
            # Every rank computes the whole model from its copies and keeps the gradient of the use that it holds.
            weight = next(iter(own.values())).detach() if own else initial
            embedding, head = own.get("embed.weight", weight), own.get("head.weight", weight)
            if own:
                nn.functional.cross_entropy((embedding[tokens].tanh() @ head.T).flatten(0, 1), labels).backward()
            buffers.reduce()
            optimizer.step(global_norm(buffers))
        return [parameter.detach() for parameter in own.values()]

    first, second = pool.run(run, 2)
    copies = first + second
    assert len(copies) == 2
    assert torch.equal(copies[0], copies[1]), "bitwise the same"
    torch.testing.assert_close(copies[0], tied.detach(), rtol=1e-12, atol=1e-13)


def test_a_tied_weight_keeps_its_bits_on_both_ranks_under_data_parallelism(pool: WorkerPool) -> None:
    """Other parameters shift the weight's place on one rank only; sums over four data ranks must not show it."""

    def run(ctx: RankContext) -> Tensor:
        groups = groups_of(Mesh(pp=2, dp=4), tied=True)
        weight = nn.Parameter(rows(17, 8, seed=1, dtype=torch.float32))
        other = nn.Parameter(torch.zeros(77))
        infos = [ParameterInfo(name=("embed", "head")[groups.pp_i], parameter=weight, tied="embed")]
        infos = [ParameterInfo(name=f"other{groups.pp_i}", parameter=other), *infos] if groups.pp_i else infos
        buffers = GradientBuffers(infos, groups)
        optimizer = ShardedOptimizer(buffers, ADAMW)
        for step in range(3):
            buffers.zero()
            (weight * rows(17, 8, seed=100 * step + ctx.rank, dtype=torch.float32)).sum().backward()
            buffers.reduce()
            optimizer.step(global_norm(buffers))
        return weight.detach()

    copies = pool.run(run, 8)
    assert all(torch.equal(copy, copies[0]) for copy in copies)


# -- state in another layout -------------------------------------------------------------------------------------------

EXPERTS = 4


class ExpertTrainer:
    """A norm and four stacked experts, spread over ep; data are spread over dp x ep in 4 fixed parts."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype, config: OptimizerConfig) -> None:
        self.groups = groups_of(mesh)
        local = EXPERTS // mesh.ep
        self.ids = range(self.groups.ep_i * local, (self.groups.ep_i + 1) * local)
        self.norm = nn.Parameter(rows(6, seed=1, dtype=dtype))
        self.experts = nn.Parameter(torch.stack([rows(3, 5, seed=10 + expert, dtype=dtype) for expert in self.ids]))
        self.frozen = nn.Parameter(rows(2, seed=3, dtype=dtype), requires_grad=False)
        self.buffers = GradientBuffers(
            [
                ParameterInfo(name="norm.weight", parameter=self.norm, decay=False),
                ParameterInfo(name="frozen", parameter=self.frozen),
                ParameterInfo(name="layers.3.experts.up", parameter=self.experts, experts=self.ids),
            ],
            self.groups,
        )
        self.optimizer = ShardedOptimizer(self.buffers, config)
        size = mesh.dp * mesh.ep
        column = self.groups.dp_i * mesh.ep + self.groups.ep_i
        self.parts = range(column * 4 // size, (column + 1) * 4 // size)  # of the data

    def step(self, step: int) -> None:
        self.buffers.zero()
        for part in self.parts:
            (self.norm * rows(6, seed=100 * step + part, dtype=self.norm.dtype)).sum().backward()
        # An expert sees the rows of all ep ranks of its dp rank, which dispatch brings to it.
        share = 4 // self.groups.mesh.dp
        for part in range(self.groups.dp_i * share, (self.groups.dp_i + 1) * share):
            for row, expert in enumerate(self.ids):
                seed = 1000 * step + 10 * part + expert
                (self.experts[row] * rows(3, 5, seed=seed, dtype=self.norm.dtype)).sum().backward()
        self.buffers.reduce()
        self.optimizer.step(global_norm(self.buffers))

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {"model": self.buffers.named_parameters(), "optimizer": self.optimizer.state_dict()}


def train(
    ctx: RankContext,
    mesh: Mesh,
    dtype: torch.dtype,
    config: OptimizerConfig,
    steps: range,
    state: dict[str, dict[str, Tensor]] | None = None,
) -> dict[str, dict[str, Tensor]]:
    trainer = ExpertTrainer(mesh, dtype, config)
    if state is not None:
        trainer.buffers.load_parameters(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
    for step in steps:
        trainer.step(step)
    return trainer.state()


def merged(states: list[dict[str, dict[str, Tensor]]]) -> dict[str, dict[str, Tensor]]:
    """What a checkpoint holds; ranks that hold the same name must hold the same bits."""
    whole: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    for state in states:
        for kind, tensors in state.items():
            for name, tensor in tensors.items():
                assert torch.equal(whole[kind].setdefault(name, tensor), tensor), name
    return whole


@pytest.mark.parametrize("dtype", [DOUBLE, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [ADAMW, MOMENTUM], ids=["adamw", "momentum"])
def test_state_resumes_in_other_layouts(pool: WorkerPool, dtype: torch.dtype, config: OptimizerConfig) -> None:
    straight = merged(pool.run(train, 1, Mesh(), dtype, config, range(5)))
    saved = merged(pool.run(train, 4, Mesh(dp=2, ep=2), dtype, config, range(3)))
    names = {"norm.weight", "frozen", *(f"layers.3.experts.{e}.up" for e in range(EXPERTS))}
    assert set(saved["model"]) == names
    trained = names - {"frozen"}
    kinds = [*config.moments, *(["master"] if dtype == torch.bfloat16 else [])]
    assert set(saved["optimizer"]) == {"applied_steps", *(f"{kind}/{name}" for kind in kinds for name in trained)}
    assert not torch.equal(saved["model"]["layers.3.experts.0.up"], saved["model"]["layers.3.experts.3.up"])
    for mesh in (Mesh(), Mesh(ep=2), Mesh(dp=2)):
        resumed = merged(pool.run(train, mesh.world, mesh, dtype, config, range(3, 5), saved))
        assert resumed["optimizer"]["applied_steps"] == 5
        for kind in ("model", "optimizer"):
            for name, tensor in straight[kind].items():
                low = tensor.dtype == torch.bfloat16
                rtol = 1e-12 if tensor.dtype == DOUBLE else 1e-2 if low else 1e-4
                torch.testing.assert_close(resumed[kind][name], tensor, rtol=rtol, atol=rtol / 10, msg=f"{mesh} {name}")


def test_state_that_does_not_fit_is_refused_with_all_its_faults(pool: WorkerPool) -> None:
    def run(ctx: RankContext) -> list[str]:
        trainer = ExpertTrainer(Mesh(), DOUBLE, ADAMW)
        state = trainer.state()
        del state["optimizer"]["exp_avg/norm.weight"]
        state["optimizer"]["exp_avg_sq/layers.3.experts.2.up"] = torch.zeros(3, 4)
        state["model"]["frozen"] = torch.zeros(3)
        told = []
        for load in (
            lambda: trainer.optimizer.load_state_dict(state["optimizer"]),
            lambda: trainer.buffers.load_parameters(state["model"]),
        ):
            try:
                load()
            except SpecError as error:
                told.append(str(error))
        return told

    optimizer, model = pool.run(run, 1)[0]
    assert "exp_avg/norm.weight = 'missing'" in optimizer
    assert "exp_avg_sq/layers.3.experts.2.up = (3, 4): must be a tensor of shape (3, 5)" in optimizer
    assert "frozen = (3,): must be a tensor of shape (2,)" in model


def test_configurations_out_of_range_are_refused_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        OptimizerConfig(kind="lion", lr=-1.0, betas=(0.9, 1.0), momentum=2.0, clip=float("nan"))
    text = str(caught.value)
    for name in ("kind", "lr", "betas[1]", "momentum", "clip"):
        assert f"optimizer.{name}" in text
