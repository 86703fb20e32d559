"""Orders of programs, ranks as threads, races, and what the error says when something waits in vain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tessera_rt.testing import interpreter_builder
from tessera_rt.testing.interpreter import (
    Launch,
    independent_programs,
    launches,
    only_programs,
    program_order,
    run_ranks,
    run_threads,
)

pytestmark = pytest.mark.usefixtures("interpreted")
ORDERS = ("sequential", "reversed", "shuffled", "parallel")


@triton.jit
def double_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def order_kernel(log, count):
    place = tl.atomic_add(count, 1)
    tl.store(log + place, tl.program_id(0))


@triton.jit
def barrier_kernel(arrived, out, programs):
    tl.atomic_add(arrived, 1, sem="release")
    while tl.atomic_add(arrived, 0, sem="acquire") < programs:
        pass
    tl.store(out + tl.program_id(0), tl.load(arrived))


@triton.jit
def exchange_kernel(flags, rank, world, out):
    """Signals all ranks, then waits for all: works only if the ranks run at the same time."""
    for peer in range(world):
        tl.atomic_xchg(flags + peer * world + rank, 1, sem="release", scope="sys")
    total = 0
    for peer in range(world):
        while tl.atomic_add(flags + rank * world + peer, 0, sem="acquire", scope="sys") < 1:
            pass
        total += 1
    tl.store(out + rank, total)


@triton.jit
def wait_kernel(flags, place, VOLATILE: tl.constexpr):
    if VOLATILE:
        while tl.load(flags + place, volatile=True) == 0:
            pass
    else:
        while tl.atomic_cas(flags + place, 1, 2) == 0:
            pass


@triton.jit
def failing_kernel(x):
    """The last program fails; the others wait for it."""
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.device_assert(tl.load(x) > 0, "planted")
    while tl.atomic_add(x, 0) == 0:
        pass


@triton.jit
def lost_update_kernel(x):
    """Every program adds 1: right in any order of whole programs."""
    tl.store(x, tl.load(x) + 1)


@triton.jit
def foreign_read_kernel(x, out):
    """Reads what the next program has written, or has not yet."""
    program = tl.program_id(0)
    tl.store(x + program, program + 1)
    tl.store(out + program, tl.load(x + (program + 1) % tl.num_programs(0)))


@triton.jit
def same_store_kernel(x):
    """All write the same value to one place: harmless here, and still no single writer."""
    tl.store(x, 5)


@triton.jit
def overlapping_bytes_kernel(x, y):
    """int16 at byte 2 of what another program writes as int32: ``y`` is the same memory."""
    if tl.program_id(0) == 0:
        tl.store(x, 70000)
    else:
        tl.store(x + 1, tl.load(y + 1).to(tl.int32))


@triton.jit
def overlapping_tiles_kernel(x, BLOCK: tl.constexpr):
    """Tiles of BLOCK rows that begin BLOCK - 1 rows apart, stored by descriptor."""
    x.store([tl.program_id(0) * (BLOCK - 1), 0], tl.full((BLOCK, 16), 1.0, tl.float32))


def _programs(order: str, seed: int = 0) -> list[int]:
    log, count = torch.full((16,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with program_order(order, seed):
        order_kernel[(16,)](log, count)
    return log.tolist()


def test_orders_of_programs() -> None:
    assert _programs("sequential") == list(range(16))
    assert _programs("reversed") == list(range(15, -1, -1))
    for order in ("shuffled", "parallel"):
        drawn = _programs(order, 3)
        assert drawn != list(range(16)) and drawn == _programs(order, 3) != _programs(order, 4)
        assert sorted(drawn) == list(range(16))


def test_orders_and_logs_end_with_their_context() -> None:
    """Also when it is left by an exception; an inner one wins meanwhile."""
    x = torch.zeros(1)
    with launches() as log, program_order("reversed"):
        with pytest.raises(KeyError), launches() as inner, program_order("shuffled", 3):
            assert _programs("parallel", 1) != list(range(16))
            raise KeyError
        log_of_outer = torch.full((16,), -1, dtype=torch.int32)
        order_kernel[(16,)](log_of_outer, torch.zeros(1, dtype=torch.int32))
        assert log_of_outer.tolist() == list(range(15, -1, -1))
    double_kernel[(1,)](x, x, 1, BLOCK=1)
    assert [launch.kernel for launch in log] == [launch.kernel for launch in inner] == ["order_kernel"]
    assert _programs_without_context() == list(range(16))


def _programs_without_context() -> list[int]:
    log = torch.full((16,), -1, dtype=torch.int32)
    order_kernel[(16,)](log, torch.zeros(1, dtype=torch.int32))
    return log.tolist()


@pytest.mark.parametrize("order", ORDERS)
def test_some_programs_of_a_grid(order: str) -> None:
    with only_programs(2, -1):
        assert sorted(_programs(order)) == [*[-1] * 14, 2, 15]
    assert sorted(_programs(order)) == list(range(16))


@pytest.mark.parametrize("seed", range(3))
def test_parallel_programs_pass_a_grid_barrier(seed: int) -> None:
    arrived, out = torch.zeros(1, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    with program_order("parallel", seed):
        barrier_kernel[(6,)](arrived, out, 6)
    assert out.tolist() == [6] * 6


def test_parallel_shows_a_race_that_no_order_of_whole_programs_shows() -> None:
    results: dict[str, list[int]] = {}
    for order in ORDERS:
        for seed in range(4):
            x = torch.zeros(1, dtype=torch.int32)
            with program_order(order, seed):
                lost_update_kernel[(7,)](x)
            results.setdefault(order, []).append(int(x))
    for order in ORDERS[:3]:
        assert results[order] == [7] * 4
    assert all(total < 7 for total in results["parallel"]), results["parallel"]


def _overlapping_bytes() -> None:
    x = torch.zeros(2, dtype=torch.int32)
    overlapping_bytes_kernel[(2,)](x, x.view(torch.int16))


def _overlapping_tiles() -> None:
    tiles = TensorDescriptor.from_tensor(torch.zeros(32, 16), [8, 16])
    overlapping_tiles_kernel[(3,)](tiles, BLOCK=8)


# What two programs share, and kernels whose programs do
PLANTED: dict[str, tuple[str, Callable[[], object]]] = {
    "lost update": (r"x \+ 0 bytes", lambda: lost_update_kernel[(3,)](torch.zeros(1, dtype=torch.int32))),
    "foreign read": (r"x \+ \d bytes", lambda: foreign_read_kernel[(3,)](torch.zeros(3), torch.zeros(3))),
    "same value": (r"x \+ 0 bytes", lambda: same_store_kernel[(2,)](torch.zeros(1))),
    "atomics": (r"count \+ 0 bytes", lambda: order_kernel[(2,)](torch.zeros(2), torch.zeros(1, dtype=torch.int32))),
    "bytes": (r"x \+ 2 bytes", _overlapping_bytes),
    "tiles": (r"x \+ 448 bytes", _overlapping_tiles),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", PLANTED)
def test_programs_that_share_memory_are_found_in_any_order(name: str, order: str) -> None:
    where, launch = PLANTED[name]
    message = rf"programs \(\d, 0, 0\) and \(\d, 0, 0\) both touch {where}, and the first writes it"
    with program_order(order), independent_programs(), pytest.raises(Exception, match=message):
        launch()
    launch()


@pytest.mark.parametrize("order", ORDERS)
def test_programs_that_share_nothing_pass(order: str) -> None:
    """All read the same x; each writes its part. In place too: each reads only what it writes itself."""
    x, out = torch.arange(100.0), torch.zeros(100)
    with program_order(order), independent_programs():
        double_kernel[(7,)](x, out, 100, BLOCK=16)
        double_kernel[(7,)](x, x, 100, BLOCK=16)
    assert torch.equal(out, torch.arange(100.0) * 2) and torch.equal(x, out)


def test_ranks_are_threads_that_signal_each_other() -> None:
    world = 4
    for order in ORDERS:
        flags, out = torch.zeros(world, world, dtype=torch.int32), torch.zeros(world, dtype=torch.int32)
        with program_order(order):
            run_ranks(world, lambda rank, flags=flags, out=out: exchange_kernel[(1,)](flags, rank, world, out))  # type: ignore[misc]
        assert out.tolist() == [world] * world


def test_a_kernel_that_is_new_may_be_launched_by_several_threads_at_once() -> None:
    @triton.jit
    def kernel(x, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x + i, tl.load(x + i) + tl.num_programs(0))

    x = torch.zeros(8, 64)
    run_threads([lambda row=row: kernel[(row + 1,)](x[row], BLOCK=8) for row in range(8)])  # type: ignore[misc]
    assert [row.sum() for row in x] == [8 * (row + 1) ** 2 for row in range(8)]


def test_launches_are_logged_per_context_and_from_all_its_threads() -> None:
    x = torch.zeros(4)
    with launches() as log:
        double_kernel[(2, 1)](x, x, 4, BLOCK=2)
        run_threads([lambda: double_kernel[(1,)](x, x, 4, BLOCK=4)] * 2)
    double_kernel[(1,)](x, x, 4, BLOCK=4)
    assert log == [Launch("double_kernel", (2, 1, 1)), *[Launch("double_kernel", (1, 1, 1))] * 2]


def test_a_failing_thread_is_reported_and_a_late_one_named() -> None:
    def fail() -> Tensor:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_threads([fail, lambda: torch.zeros(1)])
    release = threading.Event()
    with pytest.raises(TimeoutError, match=r"after 0\.1 s these still run: thread 1$"):
        run_threads([lambda: True, release.wait], timeout_s=0.1)
    release.set()


def _check_threads(before: int) -> None:
    """No thread polls on; one that has just given its result may be about to end."""
    for _ in range(1000):
        if threading.active_count() <= before:
            return
        time.sleep(0.005)
    raise AssertionError([thread.name for thread in threading.enumerate()])


@pytest.mark.parametrize("volatile", [False, True])
def test_a_time_out_says_who_waits_for_what_and_ends_the_waiting(volatile: bool) -> None:
    flags, before = torch.tensor([1, 0], dtype=torch.int32), threading.active_count()
    message = r"still run: rank 1 \(wait_kernel, program [01] waits at flags \+ 4 bytes, which has been 0 for \d"
    with pytest.raises(TimeoutError, match=message):
        run_ranks(2, lambda rank: wait_kernel[(1,)](flags, rank, VOLATILE=volatile), timeout_s=0.3)
    with program_order("parallel"), pytest.raises(TimeoutError, match=message):
        run_ranks(2, lambda rank: wait_kernel[(2,)](flags, rank, VOLATILE=volatile), timeout_s=0.3)
    _check_threads(before)


@pytest.mark.parametrize("programs", [1, 4])
def test_a_failing_rank_ends_the_others_that_wait_for_it(programs: int) -> None:
    """Its own error is raised at once: with a time-out there would be another error."""
    flags, before = torch.zeros(2, dtype=torch.int32), threading.active_count()

    def of_rank(rank: int) -> None:
        if rank == 1:
            raise ValueError("rank 1 broke")
        wait_kernel[(programs,)](flags, 0, VOLATILE=False)

    for order in ("sequential", "parallel"):
        with program_order(order), pytest.raises(ValueError, match="rank 1 broke"):
            run_ranks(2, of_rank, timeout_s=100.0)
    _check_threads(before)


def test_a_failing_program_ends_the_others_that_wait_for_it() -> None:
    before = threading.active_count()
    with program_order("parallel"), pytest.raises(Exception, match=r"failing_kernel, program 4: .*planted"):
        failing_kernel[(5,)](torch.zeros(1, dtype=torch.int32))
    _check_threads(before)


def test_a_program_that_waits_in_vain_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another, the first one waits for the others for ever; the error says what would help."""
    monkeypatch.setattr(interpreter_builder, "POLL_LIMIT_S", 0.05)
    arrived, out = torch.zeros(1, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    with pytest.raises(
        Exception, match=r"program 0 waits at arrived \+ 0 bytes, .* been 1 .*program_order\('parallel'\)"
    ):
        barrier_kernel[(6,)](arrived, out, 6)
    with (
        program_order("parallel"),
        pytest.raises(Exception, match=r"arrived \+ 0 bytes, which has been 6 for \d+\.\d s'"),
    ):
        barrier_kernel[(6,)](arrived.zero_(), out, 7)
