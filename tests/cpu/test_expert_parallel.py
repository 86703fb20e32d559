"""The expert-parallel layer: outputs and all gradients against float64 in one process, over both transports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tessera_rt
from tessera_rt.errors import SpecError, TransportError
from tessera_rt.kernels.expert_mlp import expert_mlp
from tessera_rt.kernels.options import Activation, Gate
from tessera_rt.kernels.peer_memory_mapped import MappedMemory
from tessera_rt.kernels.routing import route_rows
from tessera_rt.kernels.transport import PeerTransport
from tessera_rt.kernels.transport_layout import Traffic
from tessera_rt.kernels.weights import ExpertWeights, MainGrads
from tessera_rt.moe.expert_parallel import expert_parallel_mlp
from tessera_rt.moe.expert_parallel_collective import CollectiveExpertParallel
from tessera_rt.testing.graphs import StandInDevice
from tessera_rt.testing.interpreter import install, launches
from tessera_rt.testing.kernel_checks import assert_near, map_weights, poisoned_memory
from tessera_rt.testing.peer_calls import traffic_of
from tessera_rt.testing.peer_ranks import (
    ONE_PROGRAM,
    POLLS,
    RankInput,
    RankResult,
    all_experts,
    dense_result,
    own_experts,
    rank_inputs,
    redistribute,
    run_layer,
    run_peers,
    with_world,
)
from tessera_rt.testing.worker_pool import RankContext, WorkerPool

GATE = Gate()


def assert_layer(
    inputs: Sequence[RankInput], experts: ExpertWeights, gate: Gate, got: Sequence[RankResult], ratio: float = 1e-5
) -> None:
    want, weights = dense_result(inputs, experts, gate)
    for rank, (one, expected) in enumerate(zip(got, want, strict=True)):
        for name in ("out", "d_x", "d_weights"):
            assert_near(f"{name} of rank {rank}", getattr(one, name), getattr(expected, name), ratio=ratio)
    for number, expected_grad in enumerate(weights):
        together = torch.cat([one.experts[number] for one in got])
        assert_near(f"weights' gradient {number}", together, expected_grad, ratio=ratio)


def bits(results: Sequence[RankResult]) -> list[Tensor]:
    """All ranks' results as one process would have them."""
    fields = [torch.cat([getattr(one, name) for one in results]) for name in ("out", "d_x", "d_weights")]
    return fields + [torch.cat(parts) for parts in zip(*(one.experts for one in results), strict=True)]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("tokens-rows", {"recompute": True}),
        ("rows-rows", {}),
        ("tokens-reduced", {}),
        ("tokens-rows", {"compute": "torch"}),
        ("tokens-reduced", {"compute": "torch", "recompute": True}),
    ],
)
def test_outputs_and_gradients_over_peer_memory(form: str, options: dict[str, Any]) -> None:
    """Biases, interleaved gate, dropped choices, unequal tokens; the kernels run, not their reference."""
    gate = Gate(activation=Activation.SWIGLU_OSS, interleaved=True)
    traffic = traffic_of(form, 2, 6)
    generator = torch.Generator().manual_seed(11)
    inputs = rank_inputs(traffic, (6, 3), generator, dropped=0.15)
    experts = all_experts(traffic, 16, gate, generator, bias=True)
    given = {"compute": "triton"} | options
    with poisoned_memory(), launches() as log:
        got = run_peers(traffic, lambda t, rank: run_layer(t, inputs[rank], experts, gate, **given))
    assert any(launch.kernel.startswith("gate_backward_") for launch in log) == (given["compute"] == "triton")
    assert_layer(inputs, experts, gate, got)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("form", ["tokens-rows", "rows-rows"])
def test_combine_rows_has_the_same_bits_for_any_number_of_ranks(form: str) -> None:
    """EP 1, 2, 4, 8 in outputs and all gradients, and those of the layer without expert parallelism."""
    base = traffic_of(form, 8, 2, experts=8, top_k=2, hidden=16, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(12)
    inputs = rank_inputs(base, (2,) * 8, generator, dropped=0.1)
    experts = all_experts(base, 16, GATE, generator)
    found = []
    for world in (1, 2, 4, 8):
        traffic, parts = with_world(base, world), redistribute(inputs, world)
        results = run_peers(
            traffic,
            lambda t, rank, parts=parts: run_layer(t, parts[rank], experts, GATE, compute="triton"),
            timeout_s=280,
        )
        found.append(bits(results))
    for world, others in zip((2, 4, 8), found[1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(others, found[0], strict=True)), f"EP {world}"
    (whole,) = redistribute(inputs, 1)
    x, weights = whole.x.clone().requires_grad_(), whole.weights.clone().requires_grad_()
    own = map_weights(experts, lambda tensor: tensor.clone().requires_grad_())
    out = expert_mlp(x, own, route_rows(whole.ids, 8), weights, GATE)
    out.backward(whole.grad)
    alone = [out.detach(), x.grad, weights.grad, own.gate_up.grad, own.down.grad]
    assert all(a is not None and torch.equal(a, b) for a, b in zip(alone, found[0], strict=True))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("compute", ["triton", "torch"])
def test_main_gradients_are_added_to_and_unwanted_gradients_left_out(compute: str) -> None:
    traffic = traffic_of("tokens-rows", 1, 5)
    generator = torch.Generator().manual_seed(13)
    inputs = rank_inputs(traffic, (5,), generator)
    experts = all_experts(traffic, 16, GATE, generator)
    _, (gate_up, down) = dense_result(inputs, experts, GATE)

    def of_rank(transport: PeerTransport, _rank: int) -> None:
        own = own_experts(experts, traffic, 0)
        main = MainGrads(gate_up=torch.ones(own.gate_up.shape))
        weights = inputs[0].weights.clone().requires_grad_()
        out = expert_parallel_mlp(
            inputs[0].x, inputs[0].ids, weights, own, GATE, transport, main_grads=main, compute=compute
        )
        out.backward(inputs[0].grad)
        assert own.gate_up.grad is None and main.gate_up is not None and weights.grad is not None
        assert_near("main gradient", main.gate_up - 1, gate_up, ratio=1e-5)
        assert own.down.grad is not None
        assert_near("d down", own.down.grad, down, ratio=1e-5)

    run_peers(traffic, of_rank)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("compute", ["triton", "torch"])
@pytest.mark.parametrize("form", ["tokens-rows", "tokens-reduced"])
def test_ranks_may_want_other_gradients_of_their_tokens(form: str, compute: str) -> None:
    """Rank 0 wants those of x, rank 1 those of the router's weights, rank 2 both: nobody gets leftovers or zeros."""
    traffic = traffic_of(form, 3, 4)
    generator = torch.Generator().manual_seed(22)
    inputs = rank_inputs(traffic, (4, 3, 4), generator)
    experts = all_experts(traffic, 16, GATE, generator)
    want, _ = dense_result(inputs, experts, GATE)

    def of_rank(transport: PeerTransport, rank: int) -> tuple[Tensor | None, Tensor | None]:
        given = inputs[rank]
        x = given.x.clone().requires_grad_(rank != 1)
        weights = given.weights.clone().requires_grad_(rank != 0)
        own = own_experts(experts, traffic, rank)
        out = expert_parallel_mlp(x, given.ids, weights, own, GATE, transport, compute=compute)
        out.backward(given.grad)
        transport.check()
        return x.grad, weights.grad

    for rank, (d_x, d_weights) in enumerate(run_peers(traffic, of_rank)):
        assert (d_x is None, d_weights is None) == (rank == 1, rank == 0)
        for got, wanted in ((d_x, want[rank].d_x), (d_weights, want[rank].d_weights)):
            if got is not None:
                assert_near(f"gradient of rank {rank}", got, wanted, ratio=1e-5)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("form", "tokens", "repeats"),
    [pytest.param("tokens-rows", 32, 20, marks=pytest.mark.slow), ("tokens-reduced", 6, 4)],
)
def test_repeats_have_the_same_bits(form: str, tokens: int, repeats: int) -> None:
    """A combine that adds in the order of arrival differs from run to run (64 tokens, 8 experts, 4 each, 20 times, on
    one and eight threads)."""
    traffic = traffic_of(form, 2, tokens, experts=8, top_k=4, hidden=16, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(14)
    inputs = rank_inputs(traffic, (tokens, tokens), generator)
    experts = all_experts(traffic, 16, GATE, generator)

    def of_rank(transport: PeerTransport, rank: int) -> list[RankResult]:
        return [run_layer(transport, inputs[rank], experts, GATE, compute="torch") for _ in range(repeats)]

    found = []
    try:
        for threads in (1, 8):
            torch.set_num_threads(threads)
            results = run_peers(traffic, of_rank, timeout_s=280)
            found += [bits(repeat) for repeat in zip(*results, strict=True)]
    finally:
        torch.set_num_threads(1)
    first, *others = found
    assert len(found) == 2 * repeats
    for repeat in others:
        assert all(torch.equal(a, b) for a, b in zip(repeat, first, strict=True))


def process_layer(
    ctx: RankContext, kind: str, traffic: Traffic, inputs: Sequence[RankInput], experts: ExpertWeights, calls: int
) -> list[RankResult]:
    """The layer in a rank that is a process, over mapped memory or gloo."""
    group = dist.group.WORLD
    assert group is not None
    if kind == "mapped":
        install()
        transport: Any = PeerTransport(traffic, MappedMemory(group), run=ONE_PROGRAM, polls=POLLS)
        compute = "triton"
    else:
        capacity = traffic.tokens * traffic.units_per_token if kind == "padded" else 0
        transport = CollectiveExpertParallel(traffic, group, pair_capacity=capacity, timeout_s=30)
        compute = "torch"
    return [run_layer(transport, inputs[ctx.rank], experts, GATE, compute=compute) for _ in range(calls)]


@pytest.mark.parametrize(
    ("kind", "form", "tokens"),
    [
        ("mapped", "tokens-rows", (4, 0, 3, 1)),
        ("exact", "rows-rows", (4, 0, 3, 1)),
        ("exact", "tokens-reduced", (4, 0, 3, 1)),
        ("padded", "rows-rows", (4, 0, 3, 1)),
        ("padded", "tokens-reduced", (0, 5)),
    ],
)
def test_ranks_that_are_processes(pool: WorkerPool, kind: str, form: str, tokens: tuple[int, ...]) -> None:
    world = len(tokens)
    traffic = traffic_of(form, world, max(tokens))
    generator = torch.Generator().manual_seed(15)
    inputs = rank_inputs(traffic, tokens, generator, dropped=0.1)
    experts = all_experts(traffic, 16, GATE, generator)
    results = pool.run(process_layer, world, kind, traffic, inputs, experts, 2, timeout_s=240)
    for call in range(2):
        assert_layer(inputs, experts, GATE, [of_rank[call] for of_rank in results])


def no_token_rounds(ctx: RankContext, kind: str, traffic: Traffic, rounds: Sequence[Sequence[RankInput]]) -> list[int]:
    group = dist.group.WORLD
    assert group is not None
    if kind == "mapped":
        install()
        transport: Any = PeerTransport(traffic, MappedMemory(group), run=ONE_PROGRAM, polls=POLLS)
    else:
        transport = CollectiveExpertParallel(traffic, group, pair_capacity=8 if kind == "padded" else 0, timeout_s=30)
    experts = all_experts(traffic, 16, GATE, torch.Generator().manual_seed(0))
    seen = []
    for inputs in rounds:
        result = run_layer(transport, inputs[ctx.rank], experts, GATE, compute="torch")
        assert all(grad is not None for grad in result.experts)
        seen.append(int(sum(int(grad.count_nonzero()) for grad in result.experts) > 0))
    return seen


@pytest.mark.parametrize("kind", ["mapped", "exact", "padded"])
def test_ranks_without_tokens_take_part_in_forward_and_backward(pool: WorkerPool, kind: str) -> None:
    """All tokens to rank 0's experts; then rank 1 has no tokens; then nobody has any."""
    traffic = traffic_of("tokens-reduced", 2, 4)
    generator = torch.Generator().manual_seed(16)
    first = rank_inputs(traffic, (4, 4), generator)
    to_rank_0 = [replace(one, ids=torch.arange(3, dtype=torch.int32).expand(4, 3)) for one in first]
    rounds = [to_rank_0, rank_inputs(traffic, (4, 0), generator), rank_inputs(traffic, (0, 0), generator)]
    assert pool.run(no_token_rounds, 2, kind, traffic, rounds, timeout_s=120) == [[1, 1, 0], [0, 1, 0]]


def silent_peer(ctx: RankContext, kind: str, traffic: Traffic, inputs: Sequence[RankInput]) -> str:
    group = dist.group.WORLD
    assert group is not None
    if kind == "mapped":
        install()
        transport: Any = PeerTransport(traffic, MappedMemory(group), run=ONE_PROGRAM, polls=50)
    else:
        transport = CollectiveExpertParallel(traffic, group, timeout_s=0.5)
    if ctx.rank == 1:
        ctx.store.wait(["reported"])
        return ""
    try:
        transport.exchange(inputs[0].ids).wait()
        transport.check()
    except TransportError as error:
        return str(error)
    finally:
        ctx.store.set("reported", "yes")
    return "no error"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mapped", "rank 0 waited for rank 1 to send its part of counts: after 50 polls"),
        ("exact", "rank 0 waited 0.5 s for the all-gather of expert counts with ranks 1"),
    ],
)
def test_a_silent_process_is_named(pool: WorkerPool, kind: str, message: str) -> None:
    traffic = traffic_of("tokens-reduced", 2, 4)
    inputs = rank_inputs(traffic, (4, 4), torch.Generator().manual_seed(17))
    results = pool.run(silent_peer, 2, kind, traffic, inputs, timeout_s=60)
    assert results[0].startswith(message)


def padded_overflow(ctx: RankContext, traffic: Traffic, inputs: Sequence[RankInput], room: int) -> tuple[str, Tensor]:
    transport = CollectiveExpertParallel(traffic, dist.group.WORLD, pair_capacity=room, timeout_s=30)
    experts = own_experts(all_experts(traffic, 16, GATE, torch.Generator().manual_seed(0)), traffic, ctx.rank)
    one = inputs[ctx.rank]
    out = expert_parallel_mlp(one.x, one.ids, one.weights, experts, GATE, transport)
    try:
        transport.check()
    except TransportError as error:
        transport.clear_overflow()
        transport.check()
        return str(error), out.detach()
    return "", out.detach()


def test_overflow_of_the_padded_form_is_recorded_by_all_ranks(pool: WorkerPool) -> None:
    """Rank 0 has 4 tokens for rank 1, which has room for 3 of each source: the last one is left out."""
    traffic = traffic_of("rows-rows", 2, 4, top_k=1)
    inputs = rank_inputs(traffic, (4, 2), torch.Generator().manual_seed(18))
    inputs = [replace(one, ids=torch.full_like(one.ids, 4)) for one in inputs]
    exact = pool.run(padded_overflow, 2, traffic, inputs, 4)
    limited = pool.run(padded_overflow, 2, traffic, inputs, 3)
    assert [message for message, _ in exact] == ["", ""]
    for rank, (message, out) in enumerate(limited):
        assert f"rank {rank}: expert-parallel transport" in message
        assert "pair_capacity = 3: must be at least 4" in message
        assert torch.equal(out[:3], exact[rank][1][:3])
    assert bool((limited[0][1][3] == 0).all()) and bool((exact[0][1][3] != 0).any())


def test_overflow_of_the_padded_form_in_a_captured_graph() -> None:
    """Recorded by any replay, whichever follows, and again after it was forgotten."""
    traffic = traffic_of("tokens-reduced", 1, 4)
    transport = CollectiveExpertParallel(traffic, None, pair_capacity=3)
    few, many = torch.full((4, 3), -1, dtype=torch.int32), torch.zeros(4, 3, dtype=torch.int32)

    def count(ids: Tensor) -> Tensor:
        return transport.exchange(ids).wait().counts.clone()

    captured = tessera_rt.capture(count, (few,), device=StandInDevice())
    for _ in range(2):
        captured(few)
        transport.check()
        captured(many)
        captured(few)
        with pytest.raises(TransportError, match="pair_capacity = 3: must be at least 4"):
            transport.check()
        transport.clear_overflow()


def other_arguments(ctx: RankContext, traffics: Sequence[Traffic], rooms: Sequence[int]) -> str:
    try:
        CollectiveExpertParallel(traffics[ctx.rank], dist.group.WORLD, pair_capacity=rooms[ctx.rank])
    except SpecError as error:
        return str(error)
    return ""


def test_ranks_with_other_arguments_are_refused(pool: WorkerPool) -> None:
    one = traffic_of("rows-rows", 2, 4)
    for traffics, rooms, text in (
        ((one, replace(one, experts=12)), (0, 0), "experts = '6': must be 12, as on rank 1"),
        ((one, one), (12, 9), "pair_capacity = '12': must be 9, as on rank 1"),
    ):
        messages = pool.run(other_arguments, 2, traffics, rooms, timeout_s=60)
        assert text in messages[0] and "as on rank 0" in messages[1]


def test_float64_runs_in_float64() -> None:
    for form, room in (("rows-rows", 0), ("tokens-reduced", 5)):
        traffic = traffic_of(form, 1, 5, dtype=torch.float64)
        generator = torch.Generator().manual_seed(21)
        (given,) = rank_inputs(traffic, (5,), generator, dropped=0.2)
        given = replace(given, weights=given.weights.double() + 1e-9)
        experts = all_experts(traffic, 16, GATE, generator, bias=True)
        result = run_layer(CollectiveExpertParallel(traffic, None, pair_capacity=room), given, experts, GATE)
        assert_layer([given], experts, GATE, [result], ratio=1e-12)


def test_one_rank_without_a_group_and_fp32_input_over_a_bf16_transport() -> None:
    for form, capacity in (("rows-rows", 0), ("tokens-reduced", 6)):
        traffic = traffic_of(form, 1, 6, dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(19)
        inputs = [replace(one, x=one.x.float(), grad=one.grad.float()) for one in rank_inputs(traffic, (6,), generator)]
        experts = map_weights(all_experts(traffic, 16, GATE, generator), lambda tensor: tensor.float())
        transport = CollectiveExpertParallel(traffic, None, pair_capacity=capacity and 6)
        result = run_layer(transport, inputs[0], experts, GATE)
        assert result.out.dtype == result.d_x.dtype == result.experts[0].dtype == torch.float32
        assert_layer(inputs, experts, GATE, [result], ratio=2.5e-2)


def test_bad_arguments_are_named() -> None:
    traffic = traffic_of("rows-rows", 1, 4)
    with pytest.raises(SpecError, match="dispatch, combine = 'tokens, rows'"):
        CollectiveExpertParallel(traffic_of("tokens-rows", 1, 4), None)
    with pytest.raises(SpecError, match="give pair_capacity to the padded form"):
        CollectiveExpertParallel(replace(traffic, capacity=3), None)
    with pytest.raises(SpecError, match="world = 2: must be 1, the group's"):
        CollectiveExpertParallel(traffic_of("rows-rows", 2, 4), None)
    transport = CollectiveExpertParallel(traffic, None)
    generator = torch.Generator().manual_seed(20)
    (one,) = rank_inputs(traffic, (4,), generator)
    experts = all_experts(traffic, 16, GATE, generator)

    def call(x: Tensor = one.x, ids: Tensor = one.ids, experts: ExpertWeights = experts, **options: Any) -> None:
        expert_parallel_mlp(x, ids, one.weights, experts, GATE, transport, **options)

    with pytest.raises(SpecError, match=r"x\.shape = \(5, 24\): must be \[at most 4, 24\]"):
        call(torch.zeros(5, 24))
    with pytest.raises(SpecError, match=r"(?s)ids\.dtype.*down\.shape"):
        call(ids=one.ids.float(), experts=replace(experts, down=experts.down.mT))
    with pytest.raises(SpecError, match=r"main_grads\.gate_up"):
        call(main_grads=MainGrads(gate_up=torch.zeros(1)))
    with pytest.raises(SpecError, match="compute = 'numpy': must be torch or triton"):
        call(compute="numpy")


def test_bad_arguments_of_the_collective_calls_are_named() -> None:
    traffic = traffic_of("rows-rows", 1, 4)
    transport = CollectiveExpertParallel(traffic, None)
    (one,) = rank_inputs(traffic, (4,), torch.Generator().manual_seed(20))
    with pytest.raises(SpecError, match=r"(?s)ids\.shape = \(5, 3\): must be \[at most 4, 3\].*ids\.dtype"):
        transport.exchange(torch.zeros(5, 3))
    placement = transport.exchange(one.ids).wait()
    with pytest.raises(SpecError, match=r"(?s)x\.shape = \(3, 24\): must be \[4, 24\].*x\.dtype.*weights\.shape"):
        transport.dispatch(one.x[:3].half(), one.weights[:, :2], placement)
    received = transport.dispatch(one.x, one.weights, placement).wait()
    with pytest.raises(SpecError, match=r"grad\.shape"):
        transport.dispatch_gradient(one.grad[:, 1:], received)
    with pytest.raises(SpecError, match=r"(?s)y\.dtype.*position\.shape.*router_gradient\.shape"):
        transport.combine(one.x.double(), received.ids[1:], received, router_gradient=received.weights.T)
    other = CollectiveExpertParallel(replace(traffic, tokens=5), None)
    with pytest.raises(SpecError, match="tokens = '4': must be 5, this transport's"):
        other.dispatch(one.x, one.weights, placement)
