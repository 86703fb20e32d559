"""The corrected interpreter: bf16 and fp8, and what it refuses. Threads and orders: test_kernels_threads.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tessera_rt.testing.interpreter import inline_assembly, install, launches, program_order

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
def sm_kernel(out):
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(out + tl.program_id(0), sm)


@triton.jit
def asm_kernel(out):
    tl.store(out, tl.inline_asm_elementwise("trap;", "=r", [], dtype=tl.int32, is_pure=True, pack=1))


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


def test_program_sees_its_sm() -> None:
    out = torch.full((5,), -1, dtype=torch.int32)
    sm_kernel[(5,)](out)
    assert out.tolist() == list(range(5))


@triton.jit
def reductions_kernel(x, out, places, N: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i)
    tl.store(out, tl.sum(value, axis=0))
    tl.store(out + 1, tl.max(value, axis=0))
    tl.store(out + 2, tl.min(value, axis=0))
    tl.store(places, tl.argmax(value, axis=0))
    tl.store(places + 1, tl.argmin(value, axis=0))
    tl.store(out + 3 + i, tl.cumsum(value, axis=0))
    tl.store(out + 3 + N + i, tl.cumsum(value, axis=0, reverse=True))


@triton.jit
def clamp_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i)
    low, high = tl.full((N,), -1.5, value.dtype), tl.full((N,), 1.5, value.dtype)
    tl.store(out + i, tl.clamp(value, low, high, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def fma_kernel(x, y, z, out):
    tl.store(out, tl.fma(tl.load(x), tl.load(y), tl.load(z)))


@triton.jit
def truncating_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty, fp_downcast_rounding="rtz"))


@triton.jit
def arithmetic_kernel(out, a, b, KIND: tl.constexpr):
    if KIND == "add":
        tl.store(out, a + b)
    elif KIND == "sub":
        tl.store(out, a - b)
    else:
        tl.store(out, a * b)


@triton.jit
def range_kernel(out, start, end, bound):
    count = 0
    for i in range(start, end):
        count += i
    for _ in tl.range(0, tl.load(bound), 2):
        count += 100
    tl.store(out, count)


@triton.jit
def positive(x):
    tl.device_assert(x > 0, "not positive")
    return x


@triton.jit
def assert_kernel(x, out):
    place = tl.program_id(0)
    tl.store(out + place, positive(tl.load(x + place)))


@triton.jit
def atomic_kernel(out, x, EXCHANGE: tl.constexpr):
    if EXCHANGE:
        tl.atomic_xchg(out, tl.load(x))
    else:
        tl.atomic_add(out, tl.load(x))


def test_every_kind_of_fp32_is_cast_as_torch_casts_it() -> None:
    """Random bit patterns hold NaN, denormals and numbers that round to infinity; then halves between two bf16."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (4096,), generator=generator).int()
    special = [
        0x7F800000,
        0x7F800001,
        0x7FFFFFFF,
        0x7F7FFFFF,
        0x7F7F8000,
        0x7F7F7FFF,
        1,
        0x7FFF,
        0x8000,
        0x8001,
        0x18000,
    ]
    bits[: len(special)] = torch.tensor(special, dtype=torch.int64).int()
    bits[2048:3072] = (bits[2048:3072] & ~0xFFFF) | 0x8000
    for sign in (0, -(1 << 31)):
        wide, out = (bits ^ sign).view(torch.float32), torch.empty(4096, dtype=torch.bfloat16)
        cast_kernel[(1,)](wide, out, 4096, BLOCK=4096)
        number = ~wide.isnan()
        assert torch.equal(out[number].view(torch.int16), wide[number].bfloat16().view(torch.int16))
        assert out[~number].isnan().all() and not number.all()
        assert out[number].isinf().sum() > wide.isinf().sum(), "some overflow"


def test_a_cast_that_shall_truncate_does() -> None:
    x, out = torch.tensor([1.0078124, -1.0078124, 3.0, 1e30]), torch.empty(4, dtype=torch.bfloat16)
    truncating_kernel[(1,)](x, out, N=4)
    assert out.tolist() == [
        1.0,
        -1.0,
        3.0,
        torch.tensor(1e30).view(torch.int32).bitwise_and(-65536).view(torch.float32),
    ]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_rounds_and_saturates(dtype: torch.dtype) -> None:
    """The stock casts lose a carry (7.9 becomes 4) and wrap beyond the largest number."""
    generator, largest = torch.Generator().manual_seed(0), torch.finfo(dtype).max
    wide = torch.randn(512, generator=generator) * torch.tensor([1e-3, 1.0, 30.0, 1e4]).repeat(128)
    wide[:6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 7.9, largest * 4, 0.0])
    for source in (torch.float32, torch.bfloat16, torch.float16):
        x, out = wide.to(source), torch.empty(512, dtype=dtype)
        cast_kernel[(1,)](x, out, 512, BLOCK=512)
        want = x.float().clamp(-largest, largest).to(dtype)
        assert torch.equal(out.float().nan_to_num(-1.0), want.float().nan_to_num(-1.0)) and out[0].isnan()
    everything, back = torch.arange(256, dtype=torch.uint8).view(dtype), torch.empty(256)
    cast_kernel[(1,)](everything, back, 256, BLOCK=256)
    torch.testing.assert_close(back, everything.float(), rtol=0, atol=0, equal_nan=True)


def test_reductions_of_bf16_are_those_of_its_numbers() -> None:
    """The stock interpreter adds bit patterns, and takes a negative number for the largest (3.9)."""
    x = torch.tensor([-3.0, -0.5, 0.5, 3.0, 1.25, 0.0, -1.0, 1.0]).bfloat16()
    out, places = torch.empty(19, dtype=torch.bfloat16), torch.empty(2, dtype=torch.int32)
    reductions_kernel[(1,)](x, out, places, N=8)
    assert out[:3].tolist() == [1.25, 3.0, -3.0] and places.tolist() == [3, 0]
    assert torch.equal(out[3:11], x.cumsum(0)) and torch.equal(out[11:], x.flip(0).cumsum(0).flip(0))


def test_clamps_of_bf16_keep_nan() -> None:
    x, out = torch.tensor([-3.0, -1.0, 0.0, torch.nan, 1.5, 2.0, torch.inf, 1.0]).bfloat16(), torch.empty(8).bfloat16()
    clamp_kernel[(1,)](x, out, N=8)
    torch.testing.assert_close(out, x.clamp(-1.5, 1.5), rtol=0, atol=0, equal_nan=True)


def test_a_fused_multiply_add_of_bf16_rounds_once() -> None:
    """The product lies half-way between two bf16; what is added is lost in fp32, but decides."""
    x, y = torch.tensor([1.15625]).bfloat16(), torch.tensor([0.875]).bfloat16()
    for added, want in [(-(2.0**-40), 1.0078125), (0.0, 1.015625), (2.0**-40, 1.015625)]:
        out = torch.empty(1, dtype=torch.bfloat16)
        fma_kernel[(1,)](x, y, torch.tensor([added]).bfloat16(), out)
        assert out.item() == want


@pytest.mark.parametrize(
    ("kind", "a", "b"), [("add", 1 << 30, 1 << 30), ("sub", -(1 << 31), 1), ("mul", 1 << 20, 1 << 20)]
)
def test_integer_overflow_is_an_error(kind: str, a: int, b: int) -> None:
    out = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(
        Exception, match=rf"arithmetic_kernel, program 0: .*int32 overflow detected for operation {kind}"
    ):
        arithmetic_kernel[(1,)](out, a, b, KIND=kind)
    arithmetic_kernel[(1,)](out, 7, 3, KIND=kind)
    assert out.item() == {"add": 10, "sub": 4, "mul": 21}[kind]


def test_ranges_with_bounds_that_are_known_at_run_time() -> None:
    """Triton 3.6 fails here with numpy 2.4."""
    out = torch.zeros(1, dtype=torch.int32)
    range_kernel[(1,)](out, 2, 5, torch.tensor([7]))
    assert out.item() == 2 + 3 + 4 + 400


def test_assertions_of_kernels_hold_and_name_the_program() -> None:
    x, out = torch.tensor([3.0, 2.0, -1.0]), torch.zeros(3)
    assert_kernel[(2,)](x, out)
    with pytest.raises(Exception, match=r"^assert_kernel, program 2: AssertionError\('not positive'\)$"):
        assert_kernel[(3,)](x, out)
    with pytest.raises(Exception, match=r"^assert_kernel, program \(0, 0, 0\): "):
        assert_kernel[(1, 2)](-x, out)


@pytest.mark.parametrize("exchange", [False, True])
def test_atomics_of_bf16_are_refused(exchange: bool) -> None:
    x = torch.ones(1, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="bf16"):
        atomic_kernel[(1,)](x, x, EXCHANGE=exchange)


def test_inline_assembly_is_emulated_when_told_how() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(Exception, match=r"inline_asm not supported here: 'trap;'"):
        asm_kernel[(1,)](out)
    with inline_assembly({"trap;": lambda: np.array([7])}):
        asm_kernel[(1,)](out)
    assert out.item() == 7
    with pytest.raises(Exception, match="inline_asm"):
        asm_kernel[(1,)](out)


def test_what_would_crash_or_be_ignored_is_refused() -> None:
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="add_kernel: y is on meta"):
        add_kernel[(1,)](x, x.to("meta"), x, 4, BLOCK=4)
    with pytest.raises(ValueError, match="at most three dimensions"):
        add_kernel[(1, 1, 1, 1)](x, x, x, 4, BLOCK=4)


def test_hooks_before_a_launch_run() -> None:
    @triton.jit
    def kernel(out):
        tl.store(out, tl.load(out) + 1)

    seen: list[Any] = []
    kernel.add_pre_run_hook(lambda *args, **kwargs: seen.append(args))
    out = torch.zeros(1)
    kernel[(1,)](out)
    assert len(seen) == 1 and out.item() == 1


def test_a_launch_leaves_the_language_as_it_was() -> None:
    """Also one that fails, and one in parallel; and installing again changes nothing."""

    def state() -> list[dict[str, object]]:
        return [dict(vars(part)) for part in (tl, tl.core, tl.math, tl.tensor, tl.dtype)]

    before, x = state(), torch.zeros(3)
    add_kernel[(1,)](x, x, x, 3, BLOCK=4)
    for order in ("sequential", "parallel"):
        with program_order(order), pytest.raises(Exception, match="not positive"):
            assert_kernel[(3,)](-x, x)
    install()
    assert state() == before
    with launches() as log:
        add_kernel[(1,)](x, x, x, 3, BLOCK=4)
    assert len(log) == 1


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    """In a process of its own, from a file: kernels are made from their source."""
    text = (Path(__file__).parents[2] / "kernels" / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    file = tmp_path / "example.py"
    file.write_text(example, encoding="utf-8")
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
