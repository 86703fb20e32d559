"""The MoE block: as a plain function, and as tasks on 1, 2 and 4 ranks, against one loop over tokens and experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from tessera_rt.errors import PlanError
from tessera_rt.kernels.options import Activation, Gate, RouterRule
from tessera_rt.model_spec import (
    Attention,
    AttentionKind,
    FeedForward,
    FeedForwardKind,
    Item,
    ItemKind,
    LayerSpec,
    Router,
)
from tessera_rt.moe.block import MoEBlock, moe_steps
from tessera_rt.moe.config import MoEConfig
from tessera_rt.moe.dispatch import Routing, row_layout
from tessera_rt.moe.steps import (
    CommStep,
    ComputeStep,
    Program,
    check_program,
)
from tessera_rt.moe.transport import LocalTransport, make_transport
from tessera_rt.plan import Mesh
from tessera_rt.tasks import Pass, chunk_tasks
from tessera_rt.testing.block_tasks import Sink, TogetherTransport, given_values, run_tasks
from tessera_rt.testing.late_transport import LateTransport
from tessera_rt.testing.worker_pool import RankContext, WorkerPool

HIDDEN, EXPERTS, TOP_K, AUX = 6, 4, 2, 0.05
SPEC = FeedForward(
    kind=FeedForwardKind.MOE,
    intermediate=5,
    experts=EXPERTS,
    top_k=TOP_K,
    shared_intermediate=3,
    shared_gated=True,
    router=Router(aux_coefficient=AUX),
)


def double(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_block(spec: FeedForward = SPEC, ep_rank: int = 0, ep_size: int = 1, **options: Any) -> MoEBlock:
    """The same weights whatever the expert parallelism."""
    config = MoEConfig.from_feed_forward(HIDDEN, spec)
    block = MoEBlock(config, ep_rank=ep_rank, ep_size=ep_size, dtype=torch.float64, **options)
    for i, (name, parameter) in enumerate(block.named_parameters()):
        whole = double(spec.experts, *parameter.shape[1:], seed=i) if "experts." in name else None
        ids = block.expert_ids
        parameter.data.copy_(double(*parameter.shape, seed=i) if whole is None else whole[ids.start : ids.stop])
    return block


def by_hand(block: MoEBlock, inputs: Sequence[Tensor], aux_scale: float) -> tuple[list[Tensor], Tensor]:
    """Outputs of each rank's tokens [T, H], and the balance loss over all of them; every token by itself."""
    counts, probability_sum, outputs = torch.zeros(EXPERTS), torch.zeros(EXPERTS, dtype=torch.float64), []
    for x in inputs:
        rows = []
        for token in x.reshape(-1, HIDDEN):
            hidden = token / (token.square().mean() + 1e-6).sqrt() * block.norm.weight
            probabilities = (block.router.weight @ hidden).softmax(0)
            best = probabilities.topk(TOP_K).indices
            counts[best] += 1
            probability_sum = probability_sum + probabilities
            out = token
            for e in best:
                gate, up = (block.experts.gate_up.weight[e] @ hidden).chunk(2)
                weight = probabilities[e] / probabilities[best].sum()
                out = out + weight * (block.experts.down.weight[e] @ (functional.silu(gate) * up))
            if block.shared is not None and block.shared.gate is not None:
                gate, up = (block.shared.gate_up.weight @ hidden).chunk(2)
                shared = block.shared.down.weight @ (functional.silu(gate) * up)
                out = out + shared * torch.sigmoid(block.shared.gate.weight @ hidden)
            rows.append(out)
        outputs.append(torch.stack(rows).view_as(x) if rows else x)
    tokens = max(float(counts.sum()) / TOP_K, 1.0)
    aux = AUX * aux_scale * EXPERTS * (counts.double() / (tokens * TOP_K) * probability_sum / tokens).sum()
    return outputs, aux


def close(actual: Tensor | None, expected: Tensor | None, tolerance: float = 1e-11) -> None:
    assert actual is not None and expected is not None
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def check_against_loop(
    blocks: Sequence[MoEBlock],
    sinks: Sequence[Sink],
    inputs: Sequence[Tensor],
    results: tuple[list[Tensor], list[Tensor], float],
    upstream: Sequence[Tensor],
    aux_scale: float,
) -> None:
    """Outputs, gradients of inputs and weights, and balance loss of all ranks equal those of the loop."""
    outputs, gradients, terms = results
    whole = make_block()
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected, aux = by_hand(whole, leaves, aux_scale)
    total = aux + sum((y * g).sum() for y, g in zip(expected, upstream, strict=True))
    total.backward()
    assert terms == pytest.approx(aux.item(), rel=1e-11, abs=1e-15)
    for y, y_expected, gradient, leaf in zip(outputs, expected, gradients, leaves, strict=True):
        close(y, y_expected.detach())
        close(gradient, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
    for name, parameter in whole.named_parameters():
        parts = []
        for block, sink in zip(blocks, sinks, strict=True):
            own = block.get_parameter(name)
            parts.append(sink.buffers.get(own, own.grad))
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if "experts." in name:
            close(torch.cat([part for part in parts if part is not None]), wanted)
        else:
            close(sum(part for part in parts if part is not None), wanted)  # type: ignore[arg-type]


SIZES = {  # tokens of each rank
    1: [(7,), (1,), (0,)],
    2: [(4, 3), (5, 0), (0, 0), (1, 1)],
    4: [(3, 1, 0, 2), (0, 0, 0, 1)],
}


@pytest.mark.parametrize(("ep", "tokens"), [(ep, tokens) for ep, all_tokens in SIZES.items() for tokens in all_tokens])
def test_tasks_on_any_number_of_ranks_equal_a_loop(ep: int, tokens: tuple[int, ...]) -> None:
    blocks = [make_block(ep_rank=rank, ep_size=ep) for rank in range(ep)]
    sinks = [Sink(block) for block in blocks]
    inputs = [double(1, count, HIDDEN, seed=50 + rank) for rank, count in enumerate(tokens)]
    upstream = [double(*x.shape, seed=80 + rank) for rank, x in enumerate(inputs)]
    steps = [moe_steps("L0", block, "x", "y") for block in blocks]
    shared: list[tuple[Tensor, tuple[int, ...]]] = []
    transports = [TogetherTransport(shared, rank, ep) for rank in range(ep)]
    results = run_tasks(steps, transports, [given_values(x, 0.5) for x in inputs], upstream)
    check_against_loop(blocks, sinks, inputs, results, upstream, 0.5)


def forced_to_first_experts(block: MoEBlock) -> None:
    """Every token chooses experts 0 and 1: rank 0's, when two ranks share four experts."""
    block.router.weight.data.zero_()


@pytest.mark.parametrize("tokens", [(4, 3), (4, 0), (0, 0)])
def test_a_rank_that_receives_no_row_takes_part_and_has_zero_gradients(tokens: tuple[int, int]) -> None:
    blocks = [make_block(ep_rank=rank, ep_size=2) for rank in range(2)]
    sinks = [Sink(block) for block in blocks]
    for block in blocks:
        forced_to_first_experts(block)
    inputs = [double(1, count, HIDDEN, seed=rank) for rank, count in enumerate(tokens)]
    shared: list[tuple[Tensor, tuple[int, ...]]] = []
    transports = [TogetherTransport(shared, rank, 2) for rank in range(2)]
    steps = [moe_steps("L0", block, "x", "y") for block in blocks]
    outputs, gradients, _ = run_tasks(steps, transports, [given_values(x, 1.0) for x in inputs], inputs)
    assert [y.shape for y in outputs] == [g.shape for g in gradients] == [x.shape for x in inputs]
    for sink, block in zip(sinks, blocks, strict=True):
        routed_here = block.expert_ids.start == 0 and sum(tokens) > 0
        for weight in (block.experts.gate_up.weight, block.experts.down.weight):
            assert bool((sink.buffers[weight] != 0).any()) == routed_here
    # And that is what one process computes.
    whole, x = make_block(), torch.cat(inputs, 1).requires_grad_()
    forced_to_first_experts(whole)
    y, aux = whole(x, aux_scale=1.0)
    ((y * x.detach()).sum() + aux).backward()
    close(torch.cat(outputs, 1), y.detach())
    close(torch.cat(gradients, 1), x.grad)


def over_gloo(ctx: RankContext, tokens: tuple[int, ...], late: bool) -> tuple[Any, ...]:
    ep = ctx.world
    group = dist.new_group(list(range(ep)))
    transport: Any = make_transport(group, group, Mesh(ep=ep), ctx.rank, timeout_s=30.0)
    transport = LateTransport(transport) if late else transport
    block = make_block(ep_rank=ctx.rank, ep_size=ep)
    sink = Sink(block)
    x = double(1, tokens[ctx.rank], HIDDEN, seed=50 + ctx.rank)
    upstream = double(*x.shape, seed=80 + ctx.rank)
    steps = moe_steps("L0", block, "x", "y")
    outputs, gradients, terms = run_tasks([steps], [transport], [given_values(x, 0.5)], [upstream])
    weights = {name: sink.buffers.get(p, p.grad) for name, p in block.named_parameters()}
    return outputs[0], gradients[0], terms, weights


@pytest.mark.parametrize(("tokens", "late"), [((4, 3), False), ((5, 0), True), ((3, 1, 0, 2), False)])
def test_tasks_over_gloo_equal_tasks_in_one_process_bit_for_bit(
    pool: WorkerPool, tokens: tuple[int, ...], late: bool
) -> None:
    ep = len(tokens)
    blocks = [make_block(ep_rank=rank, ep_size=ep) for rank in range(ep)]
    sinks = [Sink(block) for block in blocks]
    inputs = [double(1, count, HIDDEN, seed=50 + rank) for rank, count in enumerate(tokens)]
    upstream = [double(*x.shape, seed=80 + rank) for rank, x in enumerate(inputs)]
    shared: list[tuple[Tensor, tuple[int, ...]]] = []
    outputs, gradients, terms = run_tasks(
        [moe_steps("L0", block, "x", "y") for block in blocks],
        [TogetherTransport(shared, rank, ep) for rank in range(ep)],
        [given_values(x, 0.5) for x in inputs],
        upstream,
    )
    results = pool.run(over_gloo, ep, tokens, late)
    assert sum(result[2] for result in results) == pytest.approx(terms, rel=1e-13)
    for rank, (output, gradient, _, weights) in enumerate(results):
        assert torch.equal(output, outputs[rank]) and torch.equal(gradient, gradients[rank])
        for name, parameter in blocks[rank].named_parameters():
            buffers = sinks[rank].buffers
            assert torch.equal(weights[name], buffers.get(parameter, parameter.grad))


# -- every kind of layer as tasks -------------------------------------------------------------------------------------

KINDS = {
    "gpt-oss": MoEConfig(
        hidden=HIDDEN, intermediate=5, experts=8, router=RouterRule(top_k=2, softmax_after_topk=True),
        gate=Gate(activation=Activation.SWIGLU_OSS, interleaved=True, limit=0.7), router_bias=True, expert_bias=True,
        aux_coefficient=AUX,
    ),
    "deepseek-v3": MoEConfig(
        hidden=HIDDEN, intermediate=5, experts=8, choice_bias=True, shared_intermediate=3,
        router=RouterRule(top_k=2, score="sigmoid", renormalize=True, eps=1e-20, scale=2.5, groups=4, keep_groups=2),
        aux_coefficient=AUX, z_coefficient=0.02,
    ),
    "nemotron-h": MoEConfig(
        hidden=HIDDEN, intermediate=5, experts=8, gate=Gate(activation=Activation.RELU2), latent=4,
        shared_intermediate=3, router=RouterRule(top_k=3, score="sigmoid", renormalize=True, eps=1e-20),
    ),
}  # fmt: skip


def make_kind(kind: str, ep_rank: int = 0, ep_size: int = 1) -> MoEBlock:
    block = MoEBlock(KINDS[kind], ep_rank=ep_rank, ep_size=ep_size, dtype=torch.float64)
    ids = block.expert_ids
    for i, (name, tensor) in enumerate([*block.named_parameters(), *block.named_buffers()]):
        whole = double(8, *tensor.shape[1:], seed=i) if "experts." in name else double(*tensor.shape, seed=i)
        tensor.data.copy_(whole[ids.start : ids.stop] if "experts." in name else whole)
    return block


def parameter_gradients(blocks: Sequence[MoEBlock], sinks: Sequence[Sink]) -> dict[str, Tensor]:
    """By name, over all ranks: experts side by side, the others summed."""
    found = {}
    for name, _ in blocks[0].named_parameters():
        own = [block.get_parameter(name) for block in blocks]
        parts = [sink.buffers.get(p, p.grad) for sink, p in zip(sinks, own, strict=True)]
        there = [torch.zeros_like(p) if part is None else part for p, part in zip(own, parts, strict=True)]
        found[name] = torch.cat(there) if "experts." in name else torch.stack(there).sum(0)
    return found


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_tasks_of_every_kind_equal_the_block_as_a_function(kind: str, ep: int) -> None:
    blocks = [make_kind(kind, rank, ep) for rank in range(ep)]
    sinks = [Sink(block) for block in blocks]
    inputs = [double(1, 5 - rank, HIDDEN, seed=50 + rank) for rank in range(ep)]
    upstream = [double(*x.shape, seed=80 + rank) for rank, x in enumerate(inputs)]
    shared: list[tuple[Tensor, tuple[int, ...]]] = []
    outputs, gradients, terms = run_tasks(
        [moe_steps("L0", block, "x", "y") for block in blocks],
        [TogetherTransport(shared, rank, ep) for rank in range(ep)],
        [given_values(x, 0.5) for x in inputs],
        upstream,
    )
    whole, x = make_kind(kind), torch.cat(inputs, 1).requires_grad_()
    y, losses = whole(x, aux_scale=0.5)
    ((y * torch.cat(upstream, 1)).sum() + losses).backward()
    close(torch.cat(outputs, 1), y.detach())
    close(torch.cat(gradients, 1), x.grad)
    assert terms == pytest.approx(losses.item(), rel=1e-11, abs=1e-15)
    for name, gradient in parameter_gradients(blocks, sinks).items():  # the router's too, whatever the ranks
        close(gradient, whole.get_parameter(name).grad)


# -- the block as a function ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gated", [True, False])
def test_forward_equals_the_loop(gated: bool) -> None:
    block, x = (
        make_block(SPEC if gated else replace(SPEC, shared_intermediate=0, shared_gated=False)),
        double(2, 5, HIDDEN),
    )
    leaf, expected_leaf = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, aux = block(leaf, aux_scale=0.25)
    (expected,), expected_aux = by_hand(block, [expected_leaf], 0.25)
    close(y, expected)
    close(aux, expected_aux)
    gradients = torch.autograd.grad(y.square().sum() + aux, [leaf, *block.parameters()])
    wanted = torch.autograd.grad(expected.square().sum() + expected_aux, [expected_leaf, *block.parameters()])
    for gradient, of_loop in zip(gradients, wanted, strict=True):
        close(gradient, of_loop)


@pytest.mark.parametrize("reduce", ["sum", "cat", "transpose"])
def test_any_strides_in_and_out(reduce: str) -> None:
    def reduced(y: Tensor) -> Tensor:
        match reduce:
            case "sum":
                return y.sum()
            case "cat":
                return (torch.cat([y, y], -1) * torch.arange(2 * HIDDEN)).sum()
        return (y.transpose(0, 1) @ double(HIDDEN, 3)).sum()

    block, x = make_block(), double(3, 5, HIDDEN)
    results = []
    for view in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
        leaf = view.detach().requires_grad_()
        y, aux = block(leaf)
        results.append(torch.autograd.grad(reduced(y) + aux, [leaf, *block.parameters()]))
    (expected,), expected_aux = by_hand(block, [x.requires_grad_()], 1.0)
    wanted = torch.autograd.grad(reduced(expected) + expected_aux, [x, *block.parameters()])
    for gradients in results:
        for gradient, of_loop in zip(gradients, wanted, strict=True):
            close(gradient, of_loop)


def test_twenty_runs_have_the_same_bits_on_one_and_eight_threads() -> None:
    block, x = make_block(replace(SPEC, experts=8, top_k=4)), double(1, 64, HIDDEN)
    results = []
    try:
        for threads in (1, 8):
            torch.set_num_threads(threads)
            for _ in range(20):
                y, aux = block(x)
                results.append((y, aux, *torch.autograd.grad(y.square().sum() + aux, list(block.parameters()))))
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


def test_one_expert_per_token() -> None:
    with pytest.warns(UserWarning, match="learns nothing"):
        block = make_block(replace(SPEC, top_k=1, router=Router(renormalize=True)))
    y, _ = block(double(1, 5, HIDDEN))
    assert torch.count_nonzero(torch.autograd.grad(y.sum(), block.router.weight)[0]) == 0
    block = make_block(replace(SPEC, top_k=1, router=Router(renormalize=False)))
    y, _ = block(double(1, 5, HIDDEN))
    assert (torch.autograd.grad(y.sum(), block.router.weight)[0] != 0).any()


def test_broken_tokens_do_not_touch_others_and_stay_visible() -> None:
    block, x = make_block(), double(1, 4, HIDDEN)
    expected, _ = block(x)
    x[0, 1] = float("nan")
    y, _ = block(x)
    assert y[0, 1].isnan().all()
    close(y[0, [0, 2, 3]], expected[0, [0, 2, 3]])


def test_pad_tokens_are_not_routed_and_do_not_count() -> None:
    block, x = make_block(pad_token=0), double(2, 8, HIDDEN)
    tokens = torch.ones(2, 8, dtype=torch.int64)
    tokens[0, 5:] = tokens[1, 6:] = 0
    real = tokens != 0
    y, aux = block(x, tokens)
    alone, aux_alone = block(x[real].unsqueeze(0), tokens[real].unsqueeze(0))
    close(y[real], alone[0])
    close(aux, aux_alone)
    routed = block.route(x, tokens)
    assert len(routed.rows) == len(routed.order) == int(routed.counts.sum()) == 11 * TOP_K


def test_the_hook_before_the_residual_sees_the_whole_branch() -> None:
    keys = []

    def hook(branch: Tensor, random_key: int) -> Tensor:
        keys.append(random_key)
        return branch * 0

    x = double(2, 3, HIDDEN)
    y, _ = make_block(before_residual=hook)(x, random_key=7)
    assert torch.equal(y, x) and keys == [7]


# -- the steps' form --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [0, 3])
@pytest.mark.parametrize("aux", [0.0, AUX])
def test_steps_are_a_sound_program_in_the_order_of_the_task_graph(shared: int, aux: float) -> None:
    spec = replace(SPEC, shared_intermediate=shared, shared_gated=shared > 0, router=Router(aux_coefficient=aux))
    steps = moe_steps("L5", make_block(spec), "x", "y")
    check_program(Program(steps, "x", "y"))
    layer = LayerSpec(attention=Attention(kind=AttentionKind.NONE), feed_forward=spec)
    graph = chunk_tasks([Item(ItemKind.LAYER, 5, layer)], Pass.F)
    assert [step.kind for step in steps] == [task.kind for task in graph.tasks]
    assert all(step.label == "L5" for step in steps)
    seeds = [seed for step in steps if isinstance(step, ComputeStep) for seed in step.seeds]
    assert [seed.metric for seed in seeds] == (["aux_loss"] if aux else [])
    read = {name for step in steps for name in step.inputs} | {name for seed in seeds for name in seed.inputs} | {"y"}
    made = {name for step in steps for name in (step.outputs if isinstance(step, ComputeStep) else (step.output,))}
    assert made <= read  # nothing is made, and kept, for nobody


def test_local_transport_and_count_step_give_a_routing() -> None:
    count = moe_steps("L0", make_block(), "x", "y")[1]
    assert isinstance(count, CommStep) and count.issue_backward is None
    counts = torch.tensor([3, 0, 1, 2])
    routing = count.issue(LocalTransport(), counts).wait()
    assert isinstance(routing, Routing) and routing.layout == row_layout(counts.view(1, 1, 4), 0, 0)


def test_experts_must_divide_among_the_ranks() -> None:
    for ep_rank, ep_size in ((0, 3), (2, 2)):
        with pytest.raises(PlanError, match="ep_rank"):
            MoEBlock(MoEConfig.from_feed_forward(HIDDEN, SPEC), ep_rank=ep_rank, ep_size=ep_size)
