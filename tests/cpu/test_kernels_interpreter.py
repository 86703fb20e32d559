"""The corrected interpreter: bf16, ranks as threads, orders of programs, and what it refuses."""

from __future__ import annotations

import threading

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tessera_rt.testing.interpreter import Launch, launches, only_programs, program_order, run_ranks, run_threads

pytestmark = pytest.mark.usefixtures("interpreted")


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


@triton.jit
def dot_kernel(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    product = tl.dot(tl.load(a + m[:, None] * K + k[None, :]), tl.load(b + k[:, None] * N + n[None, :]))
    tl.store(out + m[:, None] * N + n[None, :], product)


@triton.jit
def cast_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n).to(out.dtype.element_ty), mask=i < n)


@triton.jit
def product_kernel(x, out, n):
    tl.store(out, n * n)


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
def sm_kernel(out):
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(out + tl.program_id(0), sm)


@triton.jit
def asm_kernel(out):
    tl.store(out, tl.inline_asm_elementwise("trap;", "=r", [], dtype=tl.int32, is_pure=True, pack=1))


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


def test_bf16_dot_of_small_integers_is_exact() -> None:
    """Case 80: the stock interpreter multiplies bit patterns (an error of 4e10)."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-8, 9, (16, 32), generator=generator)
    b = torch.randint(-8, 9, (32, 16), generator=generator)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        out = torch.full((16, 16), torch.nan)
        dot_kernel[(1,)](a.to(dtype), b.to(dtype), out, M=16, N=16, K=32)
        assert torch.equal(out, (a @ b).float()), dtype


def test_bf16_sums_and_casts_are_bit_equal_to_torch() -> None:
    x, y = torch.randn(2, 1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = torch.empty_like(x)
    add_kernel[(8,)](x, y, out, 1000, BLOCK=128)
    assert torch.equal(out, x + y)
    wide = torch.randn(1000, generator=torch.Generator().manual_seed(2)) * 1e3
    wide[:4] = torch.tensor([torch.inf, -torch.inf, 3.4e38, 1e-40])
    for dtype in (torch.bfloat16, torch.float16):
        narrow, back = torch.empty(1000, dtype=dtype), torch.empty(1000)
        cast_kernel[(1,)](wide, narrow, 1000, BLOCK=1024)
        assert torch.equal(narrow, wide.to(dtype))
        cast_kernel[(1,)](narrow, back, 1000, BLOCK=1024)
        assert torch.equal(back, narrow.float())


def test_bf16_cast_keeps_nan() -> None:
    out = torch.zeros(1, dtype=torch.bfloat16)
    cast_kernel[(1,)](torch.tensor([torch.nan]), out, 1, BLOCK=1)
    assert out.isnan().all()


def _programs(order: str, seed: int = 0) -> list[int]:
    log, count = torch.full((16,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with program_order(order, seed):
        order_kernel[(16,)](log, count)
    return log.tolist()


def test_orders_of_programs() -> None:
    assert _programs("sequential") == list(range(16))
    assert _programs("reversed") == list(range(15, -1, -1))
    shuffled = _programs("shuffled", 3)
    assert shuffled != list(range(16)) and shuffled == _programs("shuffled", 3) != _programs("shuffled", 4)
    assert sorted(shuffled) == sorted(_programs("parallel")) == list(range(16))


def test_some_programs_of_a_grid() -> None:
    with only_programs(2, -1):
        assert sorted(_programs("sequential")) == [*[-1] * 14, 2, 15]
    assert _programs("sequential") == list(range(16))


def test_parallel_programs_pass_a_grid_barrier() -> None:
    arrived, out = torch.zeros(1, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    with program_order("parallel"):
        barrier_kernel[(6,)](arrived, out, 6)
    assert out.tolist() == [6] * 6


def test_ranks_are_threads_that_signal_each_other() -> None:
    world = 4
    flags, out = torch.zeros(world, world, dtype=torch.int32), torch.zeros(world, dtype=torch.int32)
    run_ranks(world, lambda rank: exchange_kernel[(1,)](flags, rank, world, out))
    assert out.tolist() == [world] * world


def test_launches_are_logged_per_context() -> None:
    x = torch.zeros(4)
    with launches() as log:
        add_kernel[(2, 1)](x, x, x, 4, BLOCK=2)
    add_kernel[(1,)](x, x, x, 4, BLOCK=4)
    assert log == [Launch("add_kernel", (2, 1, 1))]


def test_integer_overflow_is_an_error() -> None:
    with pytest.raises(Exception, match="int32 overflow"):
        product_kernel[(1,)](torch.zeros(1), torch.zeros(1, dtype=torch.int64), 1 << 20)


def test_program_sees_its_sm() -> None:
    out = torch.full((5,), -1, dtype=torch.int32)
    sm_kernel[(5,)](out)
    assert out.tolist() == list(range(5))


def test_other_inline_assembly_is_refused() -> None:
    with pytest.raises(Exception, match="inline_asm not supported"):
        asm_kernel[(1,)](torch.zeros(1, dtype=torch.int32))


def test_a_failing_thread_is_reported_and_a_late_one_named() -> None:
    def fail() -> Tensor:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_threads([fail, lambda: torch.zeros(1)])
    release = threading.Event()
    with pytest.raises(TimeoutError, match="threads 1 still run"):
        run_threads([lambda: True, release.wait], timeout_s=0.1)
    release.set()
