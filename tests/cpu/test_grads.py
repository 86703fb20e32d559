"""Gradient buffers: accumulation in order, tied and shared weights, reduction, one norm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tessera_rt.costs import Link, Workload
from tessera_rt.engine.grads import GradientBuffers, global_norm, refuse_wrapped
from tessera_rt.engine.mesh import Groups, make_groups
from tessera_rt.errors import PlanError, ScheduleError, TesseraError
from tessera_rt.model_spec import Attention, AttentionKind, FeedForward, FeedForwardKind, LayerSpec, ModelSpec
from tessera_rt.moe.steps import ParameterInfo
from tessera_rt.plan import Action, CostAssumptions, Mesh, Plan, SolverStatus, Stage
from tessera_rt.split import GroupedLinear, SplitLinear
from tessera_rt.testing.worker_pool import RankContext, WorkerPool

LAYER = LayerSpec(
    attention=Attention(kind=AttentionKind.SOFTMAX, heads=2, kv_heads=2, head_dim=4),
    feed_forward=FeedForward(kind=FeedForwardKind.DENSE, intermediate=16),
)
DOUBLE = torch.float64


def groups_of(mesh: Mesh, *, tied: bool = False) -> Groups:
    """Groups of a straight pipeline over a small model."""
    spec = ModelSpec(name="small", hidden=8, vocab=17, layers=(LAYER,) * mesh.pp, tied=tied)
    cuts = [round(s * len(spec.items) / mesh.pp) for s in range(mesh.pp + 1)]
    plan = Plan(
        model=spec.name,
        fingerprint=spec.fingerprint,
        mesh=mesh,
        template="given",
        microbatches=1,
        stages=tuple(Stage(index=s, rank=s, start=cuts[s], stop=cuts[s + 1], slots=1) for s in range(mesh.pp)),
        actions=tuple((Action.parse(f"{rank}F0"), Action.parse(f"{rank}B0")) for rank in range(mesh.pp)),
        interleavings={},
        memory=(),
        workload=Workload(tokens=8, context=8, dtype="fp32"),
        assumptions=CostAssumptions(source="table", device="cpu", comm_sms=0, contention=0.0, link=Link()),
        solver=SolverStatus(objective="none", method="given", status="heuristic", t_dom_ns=0, bound_ns=0, step_ns=0),
    )
    return make_groups(plan, spec, timeout_s=20)


def alone(pool: WorkerPool, fn: Callable[[Groups], object]) -> object:
    """``fn`` on one rank."""
    return pool.run(lambda ctx: fn(groups_of(Mesh())), 1)[0]


def rows(*shape: int, seed: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def filled(parameter: nn.Parameter, seed: int) -> nn.Parameter:
    with torch.no_grad():
        parameter.copy_(rows(*parameter.shape, seed=seed) / 4)
    return parameter


def split(features: int, seed: int, buffers_sink: object = None) -> SplitLinear:
    layer = SplitLinear(features, features, dtype=DOUBLE)
    filled(layer.weight, seed)
    filled(layer.bias, seed + 1)
    layer.sink = buffers_sink  # type: ignore[assignment]
    return layer


def infos_of(layer: nn.Module, prefix: str, *, tied: bool = False) -> list[ParameterInfo]:
    return [
        ParameterInfo(name=f"{prefix}.{name}", parameter=parameter, tied=f"shared.{name}" if tied else "")
        for name, parameter in layer.named_parameters()
    ]


# -- accumulation ---------------------------------------------------------------------------------------------------


def test_a_weight_used_twice_in_a_task_is_counted_once_each(pool: WorkerPool) -> None:
    """Linear(8, 8) applied twice with GELU between; backward for inputs, then W."""

    def run(groups: Groups) -> None:
        reference, layer = split(8, seed=1), split(8, seed=1)
        nn.functional.gelu(reference(nn.functional.gelu(reference(rows(5, 8, seed=3))))).sum().backward()
        buffers = GradientBuffers(infos_of(layer, "linear"), groups)
        layer.sink = buffers.queue
        loss = nn.functional.gelu(layer(nn.functional.gelu(layer(rows(5, 8, seed=3))))).sum()
        buffers.queue.set_current(0, "W_MLP:L0")
        loss.backward()
        assert buffers.queue.pending_count == 2
        assert layer.weight.grad is None and layer.bias.grad is None
        buffers.queue.run(0, "W_MLP:L0")
        buffers.reduce()
        found = buffers.named_gradients()
        torch.testing.assert_close(found["linear.weight"], reference.weight.grad, rtol=1e-13, atol=0)
        torch.testing.assert_close(found["linear.bias"], reference.bias.grad, rtol=1e-13, atol=0)

    alone(pool, run)


def test_shared_weight_and_preset_grad_are_added_never_overwritten(pool: WorkerPool) -> None:
    """Two Linear(16, 16) sharing weight and bias; ``.grad`` preset to ones; two micro-batches: 1 + g1 + g2."""

    def run(groups: Groups) -> None:
        first, second = split(16, seed=1), split(16, seed=1)
        second.weight, second.bias = first.weight, first.bias
        reference = split(16, seed=1)
        reference.weight.grad, reference.bias.grad = torch.ones(16, 16, dtype=DOUBLE), torch.ones(16, dtype=DOUBLE)
        infos = infos_of(first, "first", tied=True) + infos_of(second, "second", tied=True)
        buffers = GradientBuffers(infos, groups)
        first.sink = second.sink = buffers.queue
        buffers.zero()
        first.weight.grad, first.bias.grad = torch.ones(16, 16, dtype=DOUBLE), torch.ones(16, dtype=DOUBLE)
        for microbatch in range(2):
            x = rows(2, 16, seed=5 + microbatch)
            reference(reference(x).tanh()).square().sum().backward()
            hidden = first(x).tanh()
            leaf = hidden.detach().requires_grad_()
            buffers.queue.set_current(microbatch, "W_MLP:L1")
            second(leaf).square().sum().backward()
            buffers.queue.set_current(microbatch, "W_MLP:L0")
            hidden.backward(leaf.grad)
        for microbatch, task in itertools.product(range(2), ("W_MLP:L0", "W_MLP:L1")):
            buffers.queue.run(microbatch, task)
        buffers.reduce()
        found = buffers.named_gradients()
        assert set(found) == {"shared.weight", "shared.bias"}
        torch.testing.assert_close(found["shared.weight"], reference.weight.grad, rtol=1e-13, atol=0)
        torch.testing.assert_close(found["shared.bias"], reference.bias.grad, rtol=1e-13, atol=0)

    alone(pool, run)


def run_microbatches(groups: Groups, order: str) -> tuple[Tensor, Tensor]:
    """B and W of two layers and three micro-batches in ``order``: words like B0 (both layers), W0a, W0b."""
    layers = {"a": split(8, seed=1), "b": split(8, seed=3)}
    buffers = GradientBuffers(infos_of(layers["a"], "a") + infos_of(layers["b"], "b"), groups)
    for layer in layers.values():
        layer.sink = buffers.queue
    for word in order.split():
        microbatch = int(word[1])
        if word[0] == "B":
            hidden = layers["a"](rows(3, 8, seed=10 + microbatch) * 10.0 ** (3 * microbatch)).tanh()
            leaf = hidden.detach().requires_grad_()
            buffers.queue.set_current(microbatch, "W_b")
            layers["b"](leaf).square().sum().backward()
            buffers.queue.set_current(microbatch, "W_a")
            hidden.backward(leaf.grad)
        else:
            buffers.queue.run(microbatch, f"W_{word[2]}")
    buffers.reduce()
    found = buffers.named_gradients()
    assert (buffers.queue.pending_bytes, buffers.queue.pending_count) == (0, 0)
    return found["a.weight"], found["b.weight"]


def test_bits_do_not_depend_on_when_w_runs(pool: WorkerPool) -> None:
    def run(groups: Groups) -> None:
        at_once = run_microbatches(groups, "B0 W0b W0a B1 W1b W1a B2 W2b W2a")
        for order in (
            "B0 B1 B2 W0a W1a W2a W0b W1b W2b",
            "B0 B1 W0b B2 W1b W2b W0a W1a W2a",
            "B0 B1 W0a W0b W1b B2 W1a W2a W2b",
        ):
            for expected, found in zip(at_once, run_microbatches(groups, order), strict=True):
                assert torch.equal(expected, found)

    alone(pool, run)


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ("B0 B1 W1a", "W_a = 'micro-batch 1': must be after W_a of micro-batch 0, which is older"),
        ("W0a", "must be after its B task and once per step"),
        ("B0 W0a W0a", "must be after its B task and once per step"),
        ("B0 B0", "must be its B task runs once per step"),
        ("B0 W0a", "W_b = 'micro-batch 0': must be done by a W task of the plan"),
    ],
)
def test_orders_that_are_refused(pool: WorkerPool, order: str, text: str) -> None:
    def run(groups: Groups) -> str:
        try:
            run_microbatches(groups, order)
        except ScheduleError as error:
            return str(error)
        return "nothing"

    assert text in str(alone(pool, run))


def test_a_second_use_that_is_not_listed_is_refused(pool: WorkerPool) -> None:
    def run(groups: Groups) -> str:
        layer = split(4, seed=1)
        buffers = GradientBuffers(infos_of(layer, "linear"), groups)
        layer.sink = buffers.queue
        x = rows(2, 4, seed=1)
        try:
            for task in ("W_MLP:L0", "W_MLP:L1"):
                buffers.queue.set_current(0, task)
                layer(x).sum().backward()
        except PlanError as error:
            return str(error)
        return "nothing"

    text = str(alone(pool, run))
    assert "uses of linear." in text and "W_MLP:L0" in text and "W_MLP:L1" in text and "list it once per use" in text


def test_pending_memory_is_counted_by_storage(pool: WorkerPool) -> None:
    def run(groups: Groups) -> list[int]:
        layers = [split(8, seed=1), split(8, seed=3)]
        buffers = GradientBuffers(infos_of(layers[0], "a") + infos_of(layers[1], "b"), groups)
        for layer in layers:
            layer.sink = buffers.queue
        seen = []
        for microbatch in range(3):
            x = rows(4, 8, seed=microbatch)
            buffers.queue.set_current(microbatch, "W_ATTN:L0")
            torch.autograd.backward([layer(x) for layer in layers], [rows(4, 8, seed=7), rows(4, 8, seed=8)])
            seen.append(buffers.queue.pending_bytes)
        for microbatch in range(3):
            buffers.queue.run(microbatch, "W_ATTN:L0")
            seen.append(buffers.queue.pending_bytes)
        return [*seen, buffers.queue.peak_bytes]

    one = 3 * 4 * 8 * 8  # x once, two gradients: 4 x 8 float64 each
    assert alone(pool, run) == [one, 2 * one, 3 * one, 2 * one, one, 0, 3 * one]


def test_low_precision_parameters_have_fp32_gradients(pool: WorkerPool) -> None:
    def run(groups: Groups) -> None:
        parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        buffers = GradientBuffers([ParameterInfo(name="scale", parameter=parameter)], groups)
        for _ in range(300):  # in bf16 the sum would stop at 256
            parameter.sum().backward()
        assert parameter.grad is None
        buffers.reduce()
        gradient = buffers.named_gradients()["scale"]
        assert gradient.dtype == torch.float32 and gradient.item() == 300

    alone(pool, run)


# -- reduction ------------------------------------------------------------------------------------------------------


def test_dense_gradients_sum_over_dp_and_ep_and_expert_gradients_over_dp(pool: WorkerPool) -> None:
    def run(ctx: RankContext) -> dict[str, list[float]]:
        groups = groups_of(Mesh(dp=2, ep=2))
        norm = nn.Parameter(torch.zeros(3, dtype=DOUBLE))
        experts = GroupedLinear(2, 2, 1, dtype=DOUBLE)
        filled(experts.weight, seed=1)
        ids = range(2 * groups.ep_i, 2 * groups.ep_i + 2)
        buffers = GradientBuffers(
            [
                ParameterInfo(name="norm.weight", parameter=norm, decay=False),
                ParameterInfo(name="experts.up", parameter=experts.weight, experts=ids),
            ],
            groups,
        )
        experts.sink = buffers.queue
        (norm * 10.0**ctx.rank).sum().backward()
        buffers.queue.set_current(0, "W_MLP:L0")
        experts(torch.full((3, 2), 10.0**ctx.rank, dtype=DOUBLE), (0, 1, 3)).sum().backward()
        buffers.queue.run(0, "W_MLP:L0")
        buffers.reduce()
        norm_squared = round(global_norm(buffers) ** 2)
        assert norm_squared == 3 * 1111**2 + 2 * (101**2 + 202**2 + 1010**2 + 2020**2), "every weight once"
        return {name: gradient.flatten().tolist() for name, gradient in buffers.named_gradients().items()}

    results = pool.run(run, 4)
    for rank, found in enumerate(results):
        scale = 1.0 if rank % 2 == 0 else 10.0
        first = 2 * (rank % 2)
        assert found == {
            "norm.weight": [1111.0] * 3,
            f"experts.{first}.up": [101.0 * scale] * 2,
            f"experts.{first + 1}.up": [202.0 * scale] * 2,
        }


def test_a_rank_without_parameters_takes_part(pool: WorkerPool) -> None:
    def run(ctx: RankContext) -> tuple[float, list[str]]:
        groups = groups_of(Mesh(pp=2, dp=2))
        parameter = nn.Parameter(torch.zeros(2, dtype=DOUBLE))
        infos = [ParameterInfo(name="p", parameter=parameter)] if groups.pp_i == 0 else []
        buffers = GradientBuffers(infos, groups)
        buffers.zero()
        if infos:
            (parameter * torch.tensor([3.0, 4.0], dtype=DOUBLE)).sum().backward()
        buffers.reduce()
        return global_norm(buffers), list(buffers.named_gradients())

    assert pool.run(run, 4) == [(10.0, ["p"]), (10.0, ["p"]), (10.0, []), (10.0, [])]


def tied_infos(
    ctx: RankContext, *, value: float = 0.0, decay: bool = True, tied: str = "embed.weight"
) -> list[ParameterInfo]:
    weight = nn.Parameter(torch.full((5, 3), value, dtype=DOUBLE))
    own = nn.Parameter(torch.zeros(1, dtype=DOUBLE))
    name = ("embed.weight", "head.weight")[ctx.rank % 2]
    return [
        ParameterInfo(name=f"own{ctx.rank}", parameter=own),
        ParameterInfo(name=name, parameter=weight, tied=tied, decay=decay),
    ]


def test_a_weight_tied_over_two_ranks_is_summed_once_and_counted_once(pool: WorkerPool) -> None:
    def run(ctx: RankContext) -> tuple[Tensor, float]:
        buffers = GradientBuffers(infos := tied_infos(ctx), groups_of(Mesh(pp=2), tied=True))
        (infos[1].parameter * (1.0 + ctx.rank)).sum().backward()
        (infos[0].parameter * (3.0 + 3.0 * ctx.rank)).sum().backward()
        buffers.reduce()
        return buffers.named_gradients()["embed.weight"], global_norm(buffers)

    (embedding, norm), (head, other) = pool.run(run, 2)
    assert torch.equal(embedding, torch.full((5, 3), 3.0, dtype=DOUBLE)) and torch.equal(embedding, head)
    assert norm == other == pytest.approx(math.sqrt(15 * 9 + 9 + 36), rel=1e-15)


@pytest.mark.parametrize(
    ("difference", "text"),
    [
        ({"value": 1.0}, "initial embed.weight on ranks (0, 1) = 'different'"),
        ({"decay": False}, "embed.weight on ranks (0, 1)"),
        ({"tied": ""}, "embedding and head on ranks (0, 1) = 'not tied'"),
    ],
)
def test_tied_weights_that_do_not_match_are_refused_on_both_ranks(
    pool: WorkerPool, difference: dict[str, object], text: str
) -> None:
    def run(ctx: RankContext) -> str:
        groups = groups_of(Mesh(pp=2), tied=True)
        try:
            GradientBuffers(tied_infos(ctx, **(difference if ctx.rank else {})), groups)  # type: ignore[arg-type]
        except PlanError as error:
            return str(error)
        return "nothing"

    assert all(text in told for told in pool.run(run, 2))


def test_two_copies_on_one_rank_become_one(pool: WorkerPool) -> None:
    def run(groups: Groups) -> None:
        embedding, head = (nn.Parameter(torch.ones(4, 2, dtype=DOUBLE)) for _ in range(2))
        infos = [
            ParameterInfo(name="embed.weight", parameter=embedding, tied="embed.weight"),
            ParameterInfo(name="head.weight", parameter=head, tied="embed.weight"),
        ]
        buffers = GradientBuffers(infos, groups)
        assert embedding.data_ptr() == head.data_ptr()
        (embedding * 2.0 + head * 5.0).sum().backward()
        buffers.reduce()
        assert list(buffers.named_gradients()) == list(buffers.named_parameters()) == ["embed.weight"]
        assert torch.equal(buffers.named_gradients()["embed.weight"], torch.full((4, 2), 7.0, dtype=DOUBLE))
        with pytest.raises(ScheduleError, match="one after each zero"):
            buffers.reduce()

    alone(pool, run)


def test_one_norm_over_two_stages_and_non_finite_is_seen_everywhere(pool: WorkerPool) -> None:
    def run(ctx: RankContext) -> list[float]:
        groups = groups_of(Mesh(pp=2))
        parameter = nn.Parameter(torch.zeros(1, dtype=torch.float32))
        buffers = GradientBuffers([ParameterInfo(name=f"p{ctx.rank}", parameter=parameter)], groups)
        norms = []
        for bad in (1.0, float("inf"), float("nan"), 1e38):
            buffers.zero()
            (parameter * (bad if ctx.rank == 0 and bad != 1.0 else 3.0 + ctx.rank)).sum().backward()
            buffers.reduce()
            norms.append(global_norm(buffers))
        return norms

    first, second = pool.run(run, 2)
    assert first[0] == second[0] == 5.0
    assert first[1] == second[1] == float("inf")
    assert math.isnan(first[2]) and math.isnan(second[2])
    assert first[3] == second[3] == pytest.approx(1e38), "no overflow in the squares"


# -- what is refused --------------------------------------------------------------------------------------------------


def test_contradicting_parameters_are_all_told(pool: WorkerPool) -> None:
    def run(groups: Groups) -> str:
        one, two = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(4, 3))
        integers = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
        infos = [
            ParameterInfo(name="a", parameter=one),
            ParameterInfo(name="a", parameter=two),
            ParameterInfo(name="b", parameter=one),
            ParameterInfo(name="c", parameter=nn.Parameter(torch.zeros(4, 2)), tied="t"),
            ParameterInfo(name="d", parameter=nn.Parameter(torch.zeros(4, 3)), tied="t"),
            ParameterInfo(name="e", parameter=nn.Parameter(torch.zeros(3, 2)), experts=range(4, 8)),
            ParameterInfo(name="f", parameter=integers),
        ]
        try:
            GradientBuffers(infos, groups)
        except TesseraError as error:
            return str(error)
        return "nothing"

    text = str(alone(pool, run))
    assert "parameter name = 'a': must be unique" in text
    assert "parameter = 'b': must be listed under one name; it is also a" in text
    assert "uses of t" in text and "uses of a" in text
    assert "e.shape = (3, 2): must be 4 along dimension 0" in text
    assert "f.dtype = 'torch.int64'" in text


def test_wrapped_modules_are_refused(pool: WorkerPool) -> None:
    def run(ctx: RankContext) -> list[str]:
        class Model:
            def __init__(self, inner: nn.Module) -> None:
                self.inner = inner

        told = []
        sharded = nn.Sequential(nn.Linear(2, 2))
        fully_shard(sharded[0])
        wrapped = nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)))
        for model in (wrapped, Model(wrapped), sharded, nn.Linear(2, 2), Model(nn.Linear(2, 2))):
            try:
                refuse_wrapped(model)
                told.append("")
            except PlanError as error:
                told.append(str(error))
        try:
            groups = groups_of(Mesh())
            GradientBuffers([ParameterInfo(name="w", parameter=sharded[0].weight)], groups)
        except PlanError as error:
            told.append(str(error))
        return told

    ddp, inside, fsdp, plain, plain_inside, sharded = pool.run(run, 1)[0]
    assert "module 0 = 'DistributedDataParallel': must be not wrapped" in ddp
    assert "DistributedDataParallel" in inside and "FSDPModule" in fsdp
    assert (plain, plain_inside) == ("", "")
    assert "w = 'a DTensor'" in sharded
