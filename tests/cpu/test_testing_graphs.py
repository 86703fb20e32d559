"""The stand-in for graphs: what a graph can do it does, and every planted fault is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce

from tessera_rt.testing.graphs import Pool, StandInDevice, StandInGraph
from tessera_rt.testing.graphs_memory import TensorRef
from tessera_rt.testing.streams import CaptureRuleError


@pytest.fixture
def device() -> StandInDevice:
    return StandInDevice()


def record(
    device: StandInDevice, function: Callable[[], Any], pool: Pool | None = None, **kwargs: Any
) -> tuple[StandInGraph, Any]:
    with device.capture(pool or device.new_pool(), device.new_stream(), **kwargs) as graph:
        result = function()
    return graph, result


def test_a_replay_does_the_work_and_a_capture_does_none(device: StandInDevice) -> None:
    x, total = torch.randn(4), torch.zeros(4)
    state = torch.get_rng_state()

    def work() -> Tensor:
        total.add_(x)
        return (x * 2 + torch.rand(4)).exp()

    graph, y = record(device, work)
    assert not total.any() and y.isnan().all(), "nothing has run yet"
    assert torch.equal(torch.get_rng_state(), state)
    for count in range(1, 4):
        x.fill_(count)
        graph.replay()
        now = torch.get_rng_state()
        torch.set_rng_state(state)
        assert torch.equal(y, (x * 2 + torch.rand(4)).exp())
        state = now
        torch.set_rng_state(state)
    assert torch.equal(total, torch.full((4,), 6.0)) and graph.replays == 3
    assert graph.names() == [
        "aten.add_.Tensor", "aten.mul.Tensor", "aten.rand.default", "aten.add.Tensor", "aten.exp.default"
    ]  # fmt: skip


def test_addresses_stay(device: StandInDevice) -> None:
    x = torch.randn(3, requires_grad=True)
    graph, (y, grad) = record(device, lambda: ((y := x.square()), torch.autograd.grad(y.sum(), x)[0]))
    places = y.data_ptr(), grad.data_ptr()
    for _ in range(3):
        with torch.no_grad():
            x.normal_()
        graph.replay()
        assert (y.data_ptr(), grad.data_ptr()) == places
        assert torch.equal(y, x.square()) and torch.equal(grad, 2 * x)


def test_forward_and_backward_are_two_graphs(device: StandInDevice) -> None:
    w, x, dy = torch.randn(3, 3, requires_grad=True), torch.randn(2, 3), torch.randn(2, 3)
    pool = device.new_pool()
    forward, y = record(device, lambda: (x @ w).tanh().exp(), pool)
    backward, (dw,) = record(device, lambda: torch.autograd.grad(y, w, dy), pool)
    for _ in range(3):
        x.normal_()
        dy.normal_()
        forward.replay()
        backward.replay()
        (expected,) = torch.autograd.grad((x @ w).tanh().exp(), w, dy)
        assert torch.equal(dw, expected)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_stale_memory_is_nan(device: StandInDevice) -> None:
    """Scratch that is not written before it is read, and sums that start from what the last replay left."""
    x, scratch = torch.ones(3), None

    def work() -> Tensor:
        nonlocal scratch
        scratch = torch.empty(3)
        return scratch + x

    graph, y = record(device, work)
    graph.replay()
    assert scratch is not None and y.isnan().all()
    scratch.zero_()
    graph.replay()
    assert y.isnan().all(), "what was put there from outside is gone"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.int32])
def test_poison_has_the_dtype_of_the_memory(device: StandInDevice, dtype: torch.dtype) -> None:
    graph, (scratch, y) = record(device, lambda: ((s := torch.empty(3, dtype=dtype)), s * 1))
    graph.replay()
    assert y.isnan().all() if dtype.is_floating_point else (scratch == torch.iinfo(dtype).min).all()


def test_two_slots_must_not_share_a_pool(device: StandInDevice) -> None:
    """The second forward was captured when the first one's activations were free, so it may overwrite them."""
    w, x, dy = torch.randn(3, 3, requires_grad=True), torch.randn(2, 3), torch.ones(2, 3)

    def slot(pool: Pool) -> tuple[StandInGraph, StandInGraph, Tensor]:
        forward, y = record(device, lambda: (x @ w).tanh().square(), pool)
        backward, (dw,) = record(device, lambda: torch.autograd.grad(y, w, dy), pool)
        return forward, backward, dw

    for shared in (True, False):
        pool = device.new_pool()
        first, second = slot(pool), slot(pool if shared else device.new_pool())
        for graph in (first[0], second[0], first[1], second[1]):
            graph.replay()
        assert bool(first[2].isnan().any()) == shared
        assert torch.equal(second[2], torch.autograd.grad((x @ w).tanh().square(), w, dy)[0])


def test_a_second_backward_finds_nothing(device: StandInDevice) -> None:
    """Capturing the backward freed the activations: whatever the end of its replay writes may lie there."""
    w, x, dy, pool = torch.randn(3, 3, requires_grad=True), torch.randn(2, 3), torch.ones(2, 3), device.new_pool()
    forward, y = record(device, lambda: (x @ w).tanh().square(), pool)
    backward, (dw,) = record(device, lambda: torch.autograd.grad(y, w, dy), pool)
    forward.replay()
    backward.replay()
    assert not dw.isnan().any()
    backward.replay()
    assert dw.isnan().any()


def test_results_that_nobody_holds_may_be_overwritten(device: StandInDevice) -> None:
    x, pool = torch.ones(3), device.new_pool()
    first, (y, held) = record(device, lambda: (x * 2, x * 5), pool)
    (memory,) = [memory for memory in first.own if memory.pointer == y.data_ptr()]
    place = TensorRef.of(y, memory)
    before, _ = record(device, lambda: x * 3, pool)
    del y
    after, _ = record(device, lambda: x * 4, pool)
    first.replay()
    before.replay()
    assert (place.tensor() == 2).all(), "it was held when this one was captured"
    after.replay()
    assert place.tensor().isnan().all() and (held == 5).all()


def test_freed_and_moved_memory_is_found(device: StandInDevice) -> None:
    weight = torch.nn.Parameter(torch.randn(3))
    graph, _ = record(device, lambda: weight.detach() * 2)
    graph.replay()
    weight.data = torch.randn(3)
    with pytest.raises(
        CaptureRuleError, match=r"freed after the capture: 12 bytes, float32, first used by aten\.detach"
    ):
        graph.replay()
    x = torch.randn(4)
    graph, _ = record(device, lambda: x * 2)
    x.untyped_storage().resize_(4096)
    with pytest.raises(CaptureRuleError, match="moved since the capture: 16 bytes"):
        graph.replay()


def test_memory_from_outside_the_pool_is_found(device: StandInDevice) -> None:
    import numpy as np

    view = torch._C._from_dlpack  # makes tensors without a dispatched operation, and is not torch.from_numpy
    x = torch.ones(3)
    with pytest.raises(CaptureRuleError, match=r"aten\.add\.Tensor uses memory outside the pool that is gone"):
        record(device, lambda: x + view(np.ones(3, dtype=np.float32).__dlpack__()))


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda x: x.clone().resize_(8), r"aten\.resize_\.default changes the size or place"),
        (lambda x: x.clone().set_(torch.zeros(3).untyped_storage()), r"aten\.set_.* changes the size or place"),
        (lambda x: torch.from_numpy(x), r"torch\.from_numpy copies from the host"),  # noqa: PLW0108
        (lambda x: x.tolist(), r"Tensor\.tolist reads values on the host \(test_testing_graphs\.py:\d+\)"),
        (lambda x: x.sum().item(), r"_local_scalar_dense.* reads a value on the host"),
        (lambda x: x.nonzero(), r"nonzero.* has a shape that depends on values"),
    ],
)
def test_what_no_graph_can_hold(device: StandInDevice, work: Callable[[Tensor], Any], message: str) -> None:
    x = torch.randn(3)
    with pytest.raises(CaptureRuleError, match=message):
        record(device, lambda: work(x))
    assert x.tolist() == x.cpu().numpy().tolist() and torch.tensor([1]).item() == 1, "allowed again after the capture"


@pytest.mark.parametrize("functional", [False, True])
def test_collectives_are_refused_and_not_dropped(device: StandInDevice, functional: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = torch.ones(3)
        with pytest.raises(CaptureRuleError, match=r"c10d.*all_?reduce.* is a collective.*test_testing_graphs"):
            record(device, lambda: all_reduce(x, "sum", dist.group.WORLD) if functional else dist.all_reduce(x))
    finally:
        dist.destroy_process_group()


def test_a_replay_of_what_was_not_captured(device: StandInDevice) -> None:
    with device.capture(device.new_pool(), device.new_stream()) as graph:
        with pytest.raises(CaptureRuleError, match="whose capture has not ended"):
            graph.replay()


# -- streams -----------------------------------------------------------------------------------------------------------


def test_two_streams_with_events(device: StandInDevice) -> None:
    x, parts = torch.randn(4, 8), [torch.zeros(8) for _ in range(4)]
    out = [torch.zeros(8) for _ in range(4)]
    comm = device.new_stream()

    def pipeline() -> None:
        origin = device.current_stream()
        comm.wait_stream(origin)
        for i in range(4):
            with device.on(comm):
                parts[i].copy_(x[i])
                arrived = comm.record_event()
            origin.wait_event(arrived)
            out[i].copy_(parts[i] * 2)
        origin.wait_stream(comm)

    graph, _ = record(device, pipeline)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(torch.stack(out), x * 2)


def forget_the_fork(device: StandInDevice, x: Tensor) -> None:
    with device.on(device.new_stream()):
        x.add_(1)


def forget_the_join(device: StandInDevice, x: Tensor) -> None:
    side = device.new_stream()
    side.wait_stream(device.current_stream())
    with device.on(side):
        x.add_(1)


def forget_an_event(device: StandInDevice, x: Tensor) -> None:
    side = device.new_stream()
    side.wait_stream(device.current_stream())
    with device.on(side):
        x.add_(1)
    x.mul_(2)
    device.current_stream().wait_stream(side)


def wait_for_the_outside(device: StandInDevice, x: Tensor) -> None:
    other = device.new_stream()
    device.current_stream().wait_event(other.record_event())


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (forget_the_fork, r"stream 2 was not forked from the capturing stream"),
        (forget_the_join, r"stream 2 was not joined: nothing waits for its aten\.add_\.Tensor"),
        (forget_an_event, r"mul_.* on stream 1 overwrites what aten\.add_\.Tensor writes on stream 2, and no event"),
        (wait_for_the_outside, "waits for an event from outside the capture"),
        (lambda device, x: device.synchronize(), "synchronize of the device is not permitted"),
        (lambda device, x: device.current_stream().synchronize(), "synchronize of stream 1 is not permitted"),
        (lambda device, x: device.current_stream().query(), "query of stream 1 is not permitted"),
        (lambda device, x: device.current_stream().record_event().synchronize(), "synchronize of an event"),
        (lambda device, x: device.new_event().query(), "query of an event is not permitted"),
        (lambda device, x: record(device, x.clone), "a capture is under way already"),
    ],
)
def test_rules_of_streams(device: StandInDevice, work: Callable[[StandInDevice, Tensor], Any], message: str) -> None:
    x = torch.zeros(3)
    with pytest.raises(CaptureRuleError, match=message):
        record(device, lambda: work(device, x))
    assert not x.any(), "what was written is undone"
    graph, _ = record(device, lambda: x.add_(1))  # and the device is usable again
    graph.replay()
    assert x.all()


STREAMS, BUFFERS, EVENTS = 3, 3, 2
STREAM, BUFFER, EVENT = (st.integers(0, count - 1) for count in (STREAMS, BUFFERS, EVENTS))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), STREAM, BUFFER, BUFFER),
        st.tuples(st.just("join"), STREAM, STREAM, st.none()),
        st.tuples(st.just("record"), STREAM, EVENT, st.none()),
        st.tuples(st.just("wait"), STREAM, EVENT, st.none()),
    ),
    max_size=10,
)


def has_race(steps: list[tuple[str, int, int, Any]]) -> bool:
    """By a graph of the order: two uses of a buffer, one of them a write, that no path connects."""
    order: nx.DiGraph[int] = nx.DiGraph()
    last: dict[int, int] = {}
    recorded: dict[int, int] = {}
    uses: list[tuple[int, int, int]] = []
    for position, (what, stream, other, target) in enumerate(steps):
        order.add_node(position)
        before = [last.get(stream)]
        if what == "join":
            before.append(last.get(other))
        elif what == "wait":
            before.append(recorded.get(other))
        elif what == "record":
            recorded[other] = position
        else:
            uses.append((position, other, target))
        order.add_edges_from((one, position) for one in before if one is not None)
        last[stream] = position
    paths = nx.transitive_closure_dag(order)
    return any(
        not paths.has_edge(a, b) and (written in (other_read, other_written) or other_written == read)
        for i, (a, read, written) in enumerate(uses)
        for b, other_read, other_written in uses[i + 1 :]
    )


@settings(max_examples=200)
@example(steps=[("add", 0, 0, 1), ("add", 1, 2, 0)])  # written after it was read elsewhere
@example(steps=[("record", 0, 0, None), ("add", 0, 0, 1), ("wait", 1, 0, None), ("add", 1, 1, 2)])  # too early
@given(steps=STEPS)
def test_missing_events_are_found_exactly(steps: list[tuple[str, int, int, Any]]) -> None:
    device, buffers = StandInDevice(), [torch.randn(2) for _ in range(BUFFERS)]
    start = [buffer.clone() for buffer in buffers]

    def run(streams: list[Any]) -> None:
        events = [device.new_event() for _ in range(EVENTS)]
        for what, stream, other, target in steps:
            if what == "join":
                streams[stream].wait_stream(streams[other])
            elif what == "record":
                streams[stream].record_event(events[other])
            elif what == "wait":
                streams[stream].wait_event(events[other])
            else:
                with device.on(streams[stream]):
                    buffers[target].add_(buffers[other])

    def work() -> None:
        origin = device.current_stream()
        streams = [device.new_stream() for _ in range(STREAMS)]
        for stream in streams:
            stream.wait_stream(origin)
        run(streams)
        for stream in streams:
            origin.wait_stream(stream)

    if has_race(steps):
        with pytest.raises(CaptureRuleError, match="no event orders them"):
            record(device, work)
        return
    graph, _ = record(device, work)
    graph.replay()
    replayed = [buffer.clone() for buffer in buffers]
    for buffer, values in zip(buffers, start, strict=True):
        buffer.copy_(values)
    run([device.new_stream() for _ in range(STREAMS)])
    assert all(torch.equal(a, b) for a, b in zip(buffers, replayed, strict=True))


def test_a_graph_may_launch_graphs(device: StandInDevice) -> None:
    x, y = torch.zeros(2), torch.zeros(2)
    inner, _ = record(device, lambda: y.add_(x))
    outer, _ = record(device, lambda: (x.add_(1), inner.replay(), y.mul_(2)))
    assert outer.names() == ["aten.add_.Tensor", "graph", "aten.mul_.Tensor"] and not y.any()
    for expected in (2.0, 8.0, 22.0):
        outer.replay()
        assert (y == expected).all()


# -- Triton ------------------------------------------------------------------------------------------------------------


@triton.jit
def scale_kernel(x, y, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


def test_launches_of_kernels_are_recorded(device: StandInDevice, interpreted: None) -> None:
    x = torch.randn(10)

    def work() -> Tensor:
        y = torch.empty(10)
        scale_kernel[(3,)](x, y, 10, 2.0, BLOCK=4)
        return y + 1

    graph, y = record(device, work)
    assert graph.names() == ["aten.empty.memory_format", "triton.scale_kernel", "aten.add.Tensor"] and y.isnan().all()
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(y, x * 2 + 1)
    side = device.new_stream()

    def race() -> None:
        side.wait_stream(device.current_stream())
        y = torch.empty(10)
        scale_kernel[(3,)](x, y, 10, 2.0, BLOCK=4)
        with device.on(side):
            y.add_(1)

    with pytest.raises(CaptureRuleError, match=r"overwrites what (aten\.empty|triton\.scale_kernel)"):
        record(device, race)
