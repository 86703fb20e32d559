"""The peer transport against its plain-torch reference: interpreted kernels, ranks as threads."""

from __future__ import annotations

import mmap
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera_rt.errors import SpecError, TransportError
from tessera_rt.kernels import transport_reference
from tessera_rt.kernels.budget import SmBudget
from tessera_rt.kernels.operands import Run
from tessera_rt.kernels.peer_memory import NO_USE, PeerMemory, virtual_ranks
from tessera_rt.kernels.trace import Trace
from tessera_rt.kernels.transport import PeerTransport
from tessera_rt.kernels.transport_layout import Combine, Dispatch, Layout, Traffic
from tessera_rt.testing.interpreter import launches, run_ranks
from tessera_rt.testing.kernel_checks import assert_near, poisoned_memory, random_ids
from tessera_rt.testing.peer_calls import FORMS, assert_calls, expert_rows, run_and_compare, run_calls, traffic_of
from tessera_rt.testing.peer_ranks import ONE_PROGRAM, POLLS, RankInput, rank_inputs, run_peers

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize(
    ("form", "world", "tokens"),
    [
        ("tokens-rows", 2, (9, 4)),
        ("rows-rows", 4, (5, 0, 2, 7)),
        ("tokens-reduced", 4, (3, 6, 0, 1)),
        ("tokens-rows", 8, (2, 0, 1, 3, 2, 1, 0, 2)),
    ],
)
def test_every_call_is_that_of_the_reference(form: str, world: int, tokens: tuple[int, ...]) -> None:
    """Unequal tokens, ranks with none, dropped choices, poisoned memory, one rank late."""
    traffic = traffic_of(form, world, max(tokens))
    inputs = rank_inputs(traffic, tokens, torch.Generator().manual_seed(world), dropped=0.2)
    run_and_compare(traffic, inputs, late=world - 1)


@pytest.mark.parametrize("form", FORMS)
def test_all_tokens_to_one_rank(form: str) -> None:
    traffic = traffic_of(form, 2, 6)
    inputs = rank_inputs(traffic, (6, 6), torch.Generator().manual_seed(1))
    experts = torch.arange(3, 6, dtype=torch.int32)  # rank 1's
    run_and_compare(traffic, [replace(one, ids=experts.expand(6, 3)) for one in inputs])


def test_nothing_is_sent_at_all() -> None:
    traffic = traffic_of("tokens-rows", 2, 4)
    inputs = rank_inputs(traffic, (4, 0), torch.Generator().manual_seed(1), dropped=1.1)
    run_and_compare(traffic, inputs)


def test_rows_whose_size_is_no_multiple_of_16_bytes_and_16_bit_dtypes() -> None:
    for dtype, hidden in ((torch.bfloat16, 19), (torch.float16, 40)):
        traffic = traffic_of("tokens-reduced", 2, 5, dtype=dtype, hidden=hidden)
        run_and_compare(traffic, rank_inputs(traffic, (5, 3), torch.Generator().manual_seed(hidden)))


@pytest.mark.parametrize("form", ["tokens-rows", "rows-rows"])
def test_overflow_by_one_is_recorded_with_the_size_needed_and_stays_in_bounds(form: str) -> None:
    """Units and, where they differ, rows of choices: the reference with the same capacity; all ranks say the same."""
    wide = traffic_of(form, 2, 7)
    inputs = rank_inputs(wide, (7, 5), torch.Generator().manual_seed(3))
    units, choices = transport_reference.overflow([one.ids for one in inputs], wide)
    limits: list[dict[str, int]] = [{"capacity": units - 1, "row_capacity": choices}, {"capacity": units}]
    if form == "tokens-rows":
        limits += [{"capacity": units, "row_capacity": choices - 1}]
    for limit in limits:
        traffic = replace(wide, **limit)

        def of_rank(transport: PeerTransport, rank: int, traffic: Traffic = traffic) -> tuple[Any, str]:
            result, message = run_calls(transport, inputs[rank], rank), ""
            try:
                transport.check()
            except TransportError as error:
                message = str(error).partition("transport")[2]
            transport.clear_overflow()
            transport.check()
            return result, message

        with poisoned_memory():
            results = run_peers(traffic, of_rank)
        assert_calls(traffic, inputs, [result for result, _ in results])
        messages = {message for _, message in results}
        assert len(messages) == 1, "all ranks record the same"
        (message,) = messages
        over = [name for name in limit if limit[name] < {"capacity": units, "row_capacity": choices}[name]]
        assert [name for name in ("capacity", "row_capacity") if f"\n  {name} = " in message] == over
        for name in over:
            assert f"{name} = {limit[name]}: must be at least {limit[name] + 1}" in message


def test_epochs_wrap() -> None:
    """Counters preset to 2^31 - 3, then 8 calls, double-buffered across the wrap."""
    traffic = traffic_of("tokens-rows", 2, 3, top_k=2)
    generator = torch.Generator().manual_seed(8)
    rounds = [rank_inputs(traffic, (3, 2), generator) for _ in range(8)]
    allocators = virtual_ranks(2)
    transports = [PeerTransport(traffic, allocator, run=ONE_PROGRAM, polls=POLLS) for allocator in allocators]
    for transport in transports:
        transport.preset_epochs((1 << 31) - 3)

    def of_rank(rank: int) -> list[Tensor]:
        outs = []
        for inputs in rounds:
            given, transport = inputs[rank], transports[rank]
            placement = transport.exchange(given.ids).wait()
            received = transport.dispatch(given.x, given.weights, placement).wait()
            y, position = expert_rows(received.ids, received.x, rank, traffic, traffic.dtype)
            outs.append(transport.combine(y, position, received).wait().out)
            transport.check()
        return outs

    got = run_ranks(2, of_rank)
    for number, inputs in enumerate(rounds):
        for rank, one in enumerate(inputs):
            assert_near(f"call {number}, rank {rank}", got[rank][number], expected_out(one))
    assert transports[0]._counters[:, :2, 0].flatten().tolist() == [-(1 << 31) + 5] * 6


def expected_out(given: RankInput) -> Tensor:
    """The layer whose expert e multiplies by e + 1."""
    factor = (given.weights.double() * (given.ids + 1).clamp(min=0)).sum(1, keepdim=True)
    return given.x.double() * factor


@pytest.mark.parametrize("calls", [pytest.param(200, marks=pytest.mark.slow), 12])
def test_back_to_back_calls_with_changing_routing(calls: int) -> None:
    """Two combines under way at a time, ranks that pause now and then, poisoned at the start."""
    traffic = traffic_of("tokens-rows", 2, 4, top_k=2, hidden=16)
    generator = torch.Generator().manual_seed(calls)
    rounds = [
        rank_inputs(traffic, torch.randint(0, 5, (2,), generator=generator).tolist(), generator, dropped=0.2)
        for _ in range(calls)
    ]

    def of_rank(transport: PeerTransport, rank: int) -> list[Tensor]:
        outs: list[Tensor] = []
        pending: Any = None
        for number, inputs in enumerate(rounds):
            given = inputs[rank]
            if number % 7 == rank:
                time.sleep(0.002)
            placement = transport.exchange(given.ids).wait()
            received = transport.dispatch(given.x, given.weights, placement).wait()
            y, position = expert_rows(received.ids, received.x, rank, traffic, traffic.dtype)
            issued = transport.combine(y, position, received)
            if pending is not None:  # the combine of the call before is finished while this one is under way
                outs.append(pending.wait().out)
            pending = issued
        outs.append(pending.wait().out)
        transport.check()
        return outs

    got = run_peers(traffic, of_rank, timeout_s=280)
    for number, inputs in enumerate(rounds):
        for rank, one in enumerate(inputs):
            assert_near(f"call {number}, rank {rank}", got[rank][number], expected_out(one), ratio=1e-5)


def test_two_calls_may_be_under_way_in_order() -> None:
    traffic = traffic_of("tokens-rows", 1, 4)
    (given,) = rank_inputs(traffic, (4,), torch.Generator().manual_seed(2))
    transport = PeerTransport(traffic, virtual_ranks(1)[0], run=ONE_PROGRAM, polls=100)
    first, second = transport.exchange(given.ids), transport.exchange(given.ids)
    with pytest.raises(TransportError, match="2 calls of counts are under way already"):
        transport.exchange(given.ids)
    with pytest.raises(TransportError, match="call 2 of counts is waited for before call 1"):
        second.wait()
    placement = first.wait()
    assert first.wait() is placement
    assert torch.equal(second.wait().slots, placement.slots)
    sent = [transport.dispatch(x, given.weights, placement) for x in (given.x, -given.x)]
    one, other = (issued.wait().x[:4] for issued in sent)
    assert torch.equal(one, -other) and bool(one.any()), "each has memory of its own"
    transport.check()


def test_ranks_in_turn_in_one_thread() -> None:
    """What one GPU with virtual ranks does: all puts, then all waits."""
    traffic = traffic_of("tokens-reduced", 4, 4)
    inputs = rank_inputs(traffic, (4, 0, 3, 2), torch.Generator().manual_seed(4))
    transports = [PeerTransport(traffic, allocator, run=ONE_PROGRAM, polls=1) for allocator in virtual_ranks(4)]
    placed = [issued.wait() for issued in [t.exchange(one.ids) for t, one in zip(transports, inputs, strict=True)]]
    sent = [t.dispatch(i.x, i.weights, p) for t, i, p in zip(transports, inputs, placed, strict=True)]
    received = [issued.wait() for issued in sent]
    rows = [expert_rows(one.ids, one.x, r, traffic, traffic.dtype) for r, one in enumerate(received)]
    back = [t.combine(y, at, one) for t, (y, at), one in zip(transports, rows, received, strict=True)]
    for transport, issued, one in zip(transports, back, inputs, strict=True):
        assert_near("out", issued.wait().out, expected_out(one))
        transport.check()


def test_a_peer_that_never_signals_gives_a_named_error_in_bounded_time() -> None:
    """Rank 1 makes no call at all; ranks 0 and 2 say so, and hand out NaN."""
    traffic = traffic_of("tokens-rows", 3, 3)
    inputs = rank_inputs(traffic, (3, 3, 3), torch.Generator().manual_seed(6))

    def of_rank(transport: PeerTransport, rank: int) -> tuple[str, bool]:
        if rank == 1:
            return "", True
        with launches() as log:
            result = run_calls(transport, inputs[rank], rank)
        assert sum(launch.kernel == "wait_kernel" for launch in log) == 10  # none of which polled on after the first
        with pytest.raises(TransportError) as failure:
            transport.check()
        lost = all(bool(tensor.isnan().all()) for tensor in (result["out"], result["back"].out))
        return str(failure.value), lost

    results = run_peers(traffic, of_rank, polls=40)
    for rank in (0, 2):
        message, lost = results[rank]
        assert message == (
            f"rank {rank} waited for rank 1 to send its part of counts: after 40 polls its flag is at call 0, not 1"
        )
        assert lost, "outputs of a failed transport are NaN"


def test_a_peer_that_never_takes_is_named_too() -> None:
    """Rank 1 puts its dispatches and never takes them: the third finds its memory in use."""
    traffic = traffic_of("tokens-rows", 2, 3)
    inputs = rank_inputs(traffic, (3, 3), torch.Generator().manual_seed(6))
    transports = [PeerTransport(traffic, one, run=ONE_PROGRAM, polls=30) for one in virtual_ranks(2)]
    placed = [i.wait() for i in [t.exchange(one.ids) for t, one in zip(transports, inputs, strict=True)]]
    for call in range(3):
        if call < 2:
            transports[1].dispatch(inputs[1].x, inputs[1].weights, placed[1])
        before = transports[1]._memory.local.clone()
        issued = transports[0].dispatch(inputs[0].x, inputs[0].weights, placed[0])
        if call == 2:
            assert torch.equal(transports[1]._memory.local, before), "nothing is written into memory that is in use"
        issued.wait()
    with pytest.raises(TransportError, match="rank 0 waited for rank 1 to free its memory of dispatch: after 30 polls"):
        transports[0].check()


def test_grids_are_the_communication_sms_and_traced() -> None:
    traffic = traffic_of("tokens-rows", 1, 64, hidden=40)
    (given,) = rank_inputs(traffic, (64,), torch.Generator().manual_seed(2))
    trace = Trace()
    run = Run(SmBudget(132, communication=3), trace=trace)
    result = run_calls(PeerTransport(traffic, virtual_ranks(1)[0], run=run, polls=100), given, 0)
    assert_near("out", result["out"], expected_out(given))
    programs = {launch.kernel: launch.programs() for launch in trace.launches}
    for kernel in ("rows_put_kernel", "rows_take_kernel", "returns_put_kernel", "returns_take_kernel"):
        assert programs[kernel] == [0, 1, 2]
    assert programs["wait_kernel"] == [0]


def test_strided_inputs() -> None:
    """Ids, weights and rows that are transposed, and an expanded gradient, give the bits of contiguous ones."""
    traffic = traffic_of("tokens-reduced", 1, 5)
    (given,) = rank_inputs(traffic, (5,), torch.Generator().manual_seed(9))
    given = replace(given, grad=given.grad[:1].expand(5, -1).contiguous())
    strided = RankInput(
        given.x.mT.contiguous().mT, given.ids.long().mT.contiguous().mT, given.weights.mT.contiguous().mT,
        given.grad[:1].expand(5, -1),
    )  # fmt: skip
    assert not any(tensor.is_contiguous() for tensor in (strided.x, strided.ids, strided.weights, strided.grad))
    (want,), (got,) = (
        run_peers(traffic, lambda transport, rank, one=one: run_calls(transport, one, rank)) for one in (given, strided)
    )
    assert torch.equal(got["out"], want["out"]) and torch.equal(got["grad"][:5], want["grad"][:5])


class LazyMemory:
    """One rank's memory of which only touched pages are there."""

    rank, world = 0, 1

    def allocate(self, size: int, use: Mapping[str, str] = NO_USE) -> PeerMemory:
        local = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        return PeerMemory(0, 1, local, torch.tensor([local.data_ptr()]))


def test_addresses_behind_2_31_elements() -> None:
    """Slots around the first row whose offset overflows int32, and the last one."""
    first, hidden = (1 << 31) // 2048, 2048
    traffic = Traffic(
        world=1, experts=1, top_k=1, hidden=hidden, tokens=3, dispatch=Dispatch.ROWS, capacity=first + 8,
        dtype=torch.bfloat16,
    )  # fmt: skip
    transport = PeerTransport(traffic, LazyMemory(), run=ONE_PROGRAM, polls=100)
    slots = torch.tensor([[first - 1], [first], [first + 7]], dtype=torch.int32)
    x = torch.randn(3, hidden).bfloat16()
    placement = transport.exchange(torch.zeros(3, 1, dtype=torch.int32)).wait()
    transport.dispatch(x, torch.ones(3, 1), replace(placement, slots=slots))
    region = Layout.of(traffic).rows
    start = region.start + region.size  # the first call is number 1: the odd half
    for slot, row in zip(slots[:, 0].tolist(), x, strict=True):
        there = transport._memory.view(start + slot * hidden * 2, (hidden,), torch.bfloat16)
        assert torch.equal(there, row), slot
    transport.check()


def test_bad_arguments_are_named_before_anything_is_sent() -> None:
    with pytest.raises(SpecError, match=r"experts = 9: must be a multiple of the 2 ranks"):
        traffic_of("tokens-rows", 2, 4, experts=9)
    with pytest.raises(SpecError, match="combine = 'reduced': must be rows with dispatch = rows"):
        Traffic(world=1, experts=2, top_k=1, hidden=4, tokens=1, dispatch=Dispatch.ROWS, combine=Combine.REDUCED)
    with pytest.raises(SpecError, match=r"(?s)tokens = 0: must be at least 1.*dtype = 'torch.int32'"):
        traffic_of("tokens-rows", 2, 0, dtype=torch.int32)
    with pytest.raises(SpecError, match="below 2\\^31"):
        traffic_of("rows-rows", 2, 1 << 30)
    traffic = traffic_of("tokens-rows", 1, 4)
    with pytest.raises(SpecError, match="world = 1: must be 2, the allocator's"):
        PeerTransport(traffic, virtual_ranks(2)[0])
    with pytest.raises(SpecError, match=r"(?s)dtype = 'torch.float64'.*polls = -1"):
        PeerTransport(replace(traffic, dtype=torch.float64), virtual_ranks(1)[0], polls=-1)
    transport = PeerTransport(traffic, virtual_ranks(1)[0], run=ONE_PROGRAM)
    with pytest.raises(SpecError, match=r"ids\.shape = \(4, 2\)"):
        transport.exchange(random_ids(4, 3, 2, torch.Generator()))
    with pytest.raises(SpecError, match="tokens = 5: must be at most 4"):
        transport.exchange(random_ids(5, 3, 3, torch.Generator()))
    placement = transport.exchange(random_ids(4, 3, 3, torch.Generator())).wait()
    with pytest.raises(SpecError, match=r"(?s)weights\.dtype.*x\.shape"):
        transport.dispatch(torch.zeros(3, 24), torch.zeros(4, 3).double(), placement)
    assert int(transport._begun[1]) == 0
    for ids in (torch.ones(4, 3, dtype=torch.bool), torch.ones(4, 3, dtype=torch.uint64), torch.ones(4, 3)):
        with pytest.raises(SpecError, match=r"ids\.dtype"):
            transport.exchange(ids)
    received = transport.dispatch(torch.zeros(4, 24), torch.zeros(4, 3), placement).wait()
    y = torch.zeros(12, 24)
    with pytest.raises(SpecError, match=r"(?s)position\.dtype.*router_gradient\.dtype"):
        transport.combine(y, torch.zeros(4, 3), received, router_gradient=torch.zeros(4, 3).double())
    assert int(transport._begun[2]) == 0


def test_ranks_with_other_traffic_are_refused() -> None:
    """Their memory is as large and is read otherwise: two rows a token come back here, one from each rank there."""
    one, other = traffic_of("tokens-rows", 2, 4, top_k=2), traffic_of("tokens-reduced", 2, 4, top_k=2)
    assert Layout.of(one) == Layout.of(other)
    first, second = virtual_ranks(2)
    PeerTransport(one, first)
    with pytest.raises(SpecError, match=r"(?s)rank 1: 1 problem.*combine = 'reduced': must be rows, as on rank 0"):
        PeerTransport(other, second)


def test_a_placement_of_other_traffic_is_refused() -> None:
    """Its rows could lie behind this transport's memory."""
    wide = traffic_of("tokens-rows", 1, 64)
    (given,) = rank_inputs(wide, (64,), torch.Generator().manual_seed(2))
    large, small, again = (
        PeerTransport(traffic, virtual_ranks(1)[0], run=ONE_PROGRAM, polls=100)
        for traffic in (wide, replace(wide, capacity=2), wide)
    )
    placement = large.exchange(given.ids).wait()
    before = small._memory.local.clone()
    with pytest.raises(SpecError, match="capacity = '0': must be 2, this transport's"):
        small.dispatch(given.x, given.weights, placement)
    received = again.dispatch(given.x, given.weights, placement).wait()
    with pytest.raises(SpecError, match="capacity = '0': must be 2, this transport's"):
        small.dispatch_gradient(given.x, received)
    with pytest.raises(SpecError, match="capacity = '0': must be 2, this transport's"):
        small.combine(given.x, torch.zeros(2, 3, dtype=torch.int32), received)
    assert torch.equal(small._memory.local, before)


def test_ids_beyond_int32_are_not_sent() -> None:
    transport = PeerTransport(traffic_of("tokens-rows", 1, 2), virtual_ranks(1)[0], run=ONE_PROGRAM, polls=100)
    ids = torch.tensor([[1 << 32, (1 << 32) + 1, -(1 << 33)], [-(1 << 32) + 2, 2, 3]])
    placement = transport.exchange(ids).wait()
    assert placement.counts.tolist() == [[0, 0, 1]]
