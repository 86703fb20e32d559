"""Kernels with faults that only compiled text shows, for test_kernels_offline.py; compiled in a process of its own."""

from __future__ import annotations

import json
import sys

import torch
import triton
import triton.language as tl

from tessera_rt.kernels.offline import compile_for, target_named
from tessera_rt.kernels.ptx_checks import plain_loads_in_wait_loops, releases_without_barrier, waits_without_acquire


@triton.jit
def wait_plain(flag, n):
    while tl.load(flag) < n:
        pass


@triton.jit
def wait_plain_variable(flag, n):
    value = tl.load(flag)
    while value < n:
        value = tl.load(flag)


@triton.jit
def walk_list(following, place):
    """Loads in a loop that is no wait: the address comes from the last load."""
    while place >= 0:
        place = tl.load(following + place)


@triton.jit
def wait_acquire(flag, n):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < n:
        pass


@triton.jit
def wait_volatile(flag, n):
    while tl.load(flag, volatile=True) < n:
        pass


@triton.jit
def sum_loop(x, out, n):
    """Loads in a loop that is no wait: the address moves."""
    total = tl.zeros((128,), tl.float32)
    for i in range(0, n, 128):
        total += tl.load(x + i + tl.arange(0, 128))
    tl.store(out + tl.arange(0, 128), total)


@triton.jit
def signal_bare(x, flag, n):
    tl.store(x + tl.arange(0, 256), n)
    tl.atomic_xchg(flag, n, sem="release", scope="sys")


@triton.jit
def signal_after_barrier(x, flag, n):
    tl.store(x + tl.arange(0, 256), n)
    tl.debug_barrier()
    tl.atomic_xchg(flag, n, sem="release", scope="sys")


@triton.jit
def dot_scalar(a, out, N: tl.constexpr):
    """There is no tensor-core product of fp32 in full precision: done on the plain units."""
    i = tl.arange(0, N)
    x = tl.load(a + i[:, None] * N + i[None, :])
    tl.store(out + i[:, None] * N + i[None, :], tl.dot(x, x, input_precision="ieee"))


@triton.jit
def dot_tensor(a, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(a + i[:, None] * N + i[None, :])
    tl.store(out + i[:, None] * N + i[None, :], tl.dot(x, x))


@triton.jit
def spilling(a, b, out, K, M: tl.constexpr, N: tl.constexpr):
    """A tile far too large for one warp group."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, 64)
    acc = tl.zeros((M, N), tl.float32)
    for _ in range(0, K, 64):
        acc = tl.dot(tl.load(a + m[:, None] * 64 + k[None, :]), tl.load(b + k[:, None] * N + n[None, :]), acc)
    tl.store(out + m[:, None] * N + n[None, :], acc)


def main() -> None:
    """Prints what the checks say of each kernel, as JSON."""
    target = target_named(sys.argv[1])
    ints, floats, halves = torch.empty(1, dtype=torch.int32), torch.empty(1), torch.empty(1, dtype=torch.bfloat16)
    plans = [
        (wait_plain, (ints, 5), {}),
        (wait_acquire, (ints, 5), {}),
        (wait_volatile, (ints, 5), {}),
        (sum_loop, (floats, floats, 512), {}),
        (signal_bare, (ints, ints, 5), {}),
        (signal_after_barrier, (ints, ints, 5), {}),
        (dot_scalar, (floats, floats), {"N": 64}),
        (dot_tensor, (halves, floats), {"N": 64}),
        (spilling, (halves, halves, floats, 640), {"M": 128, "N": 256, "num_warps": 4}),
    ]
    found = {}
    for kernel, args, options in plans:
        compiled = compile_for(target, kernel, args, options)
        found[kernel.__name__] = {
            "releases": releases_without_barrier(compiled.ptx),
            "waits": plain_loads_in_wait_loops(compiled.ptx),
            "relaxed": waits_without_acquire(compiled.ptx),
            "scalar": compiled.scalar_dot,
            "mma": compiled.mma,
            "spills": compiled.spills,
        }
    print(json.dumps({"triton": triton.__version__, "kernels": found}))


if __name__ == "__main__":
    main()
