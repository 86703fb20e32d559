"""Compiling kernels for a GPU that is not there, and reading what the compiler made of them.

A stand-in for the active driver lets Triton specialize and compile for a named target; the cubin is then disassembled
with the tools inside Triton's package. Works only in a process without TRITON_INTERPRET=1.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from tessera_rt.errors import Problem, SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A GPU to compile for, and the limits of one SM (CUDA C programming guide, compute capabilities)."""

    name: str
    capability: int
    sms: int
    shared_per_block: int  # bytes one block may ask for
    shared_per_sm: int
    registers_per_sm: int = 65536
    threads_per_sm: int = 2048
    blocks_per_sm: int = 32


TARGETS = {
    "sm90": Target(name="sm90", capability=90, sms=132, shared_per_block=232448, shared_per_sm=233472),
    "sm100": Target(name="sm100", capability=100, sms=148, shared_per_block=232448, shared_per_sm=233472),
}
RESERVED_SHARED = 1024  # bytes of shared memory the system takes per block


def target_named(name: str) -> Target:
    """The target ``name``; SpecError names the known ones."""
    if name not in TARGETS:
        raise SpecError.of("target", [Problem("target", name, "one of " + ", ".join(TARGETS))])
    return TARGETS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the compiler made of one kernel: resources and instruction counts of the machine code."""

    registers: int
    spills: int  # local loads and stores in the machine code, and a stack frame counts as one
    shared_bytes: int
    warps: int
    mma: str  # the tensor-core instruction: HGMMA (warp group, sm_90), UTCHMMA (tcgen05, sm_100), HMMA (warp), or none
    mma_count: int
    tma_loads: int
    tma_stores: int
    async_copies: int
    store_bytes: int  # width of the widest global store of one thread
    scalar_dot: bool  # a matrix product runs on the plain units
    ptx: str
    sass: str

    @property
    def threads(self) -> int:
        return 32 * self.warps


class _Utils:
    """What Triton asks the driver's helper module while compiling."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._target.shared_per_block,
            "multiprocessor_count": self._target.sms,
            "max_num_regs": self._target.registers_per_sm,
            "warpSize": 32,
        }


class OfflineDriver:
    """Says that a GPU of the target is active. Each target has its own device number: Triton caches by device."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.utils = _Utils(target)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._target.capability, 32)

    def get_current_device(self) -> int:
        return self._target.capability

    def get_current_stream(self, _device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_for(target: Target, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Compiled:
    """Compiles a @triton.jit kernel for ``args`` (CPU tensors, descriptors, integers) and reads the result."""
    triton.runtime.driver.set_active(OfflineDriver(target))
    args = tuple(triton.runtime.jit.MockTensor(a.dtype) if isinstance(a, torch.Tensor) else a for a in args)
    result = kernel.warmup(*args, grid=(1,), **options)
    asm, metadata = result.asm, result.metadata
    return read_compiled(asm["ttgir"], asm["ptx"], asm["cubin"], metadata.shared, metadata.num_warps)


def read_compiled(ttgir: str, ptx: str, cubin: bytes, shared: int, warps: int) -> Compiled:
    """Reads resources and instructions out of PTX and machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        sass = _tool("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, f"cuobjdump said: {usage}"
    count = Counter(name.partition(".")[0] for name in instructions(sass))
    mma = next((name for name in ("HGMMA", "UTCHMMA", "UTCQMMA", "HMMA") if count[name]), "")
    # Warp-specialized code may hold several widths; 2-CTA variants count as the same instruction.
    stores = [_store_bytes(name) for name in instructions(sass) if name.startswith("STG")]
    return Compiled(
        registers=int(found[1]),
        spills=count["STL"] + count["LDL"] + (int(found[2]) > 0),
        shared_bytes=shared,
        warps=warps,
        mma=mma,
        mma_count=count[mma] if mma else 0,
        tma_loads=count["UTMALDG"],
        tma_stores=count["UTMASTG"],
        async_copies=count["LDGSTS"],
        store_bytes=max(stores, default=0),
        scalar_dot=has_scalar_dot(ttgir),
        ptx=ptx,
        sass=sass,
    )


_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")


def instructions(sass: str) -> list[str]:
    """The instruction names of a disassembly, in order."""
    return [name for _, name, _ in _INSTRUCTION.findall(sass)]


def has_scalar_dot(ttgir: str) -> bool:
    """Whether a matrix product is done on the plain units: Triton leaves such a ``tt.dot`` in a blocked layout."""
    blocked = set(re.findall(r"^(#\w+) = #ttg\.blocked", ttgir, re.MULTILINE))
    dots = re.findall(r"= tt\.dot .*-> tensor<[^>]*, (#\w+)>", ttgir)
    return any(layout in blocked for layout in dots)


def _store_bytes(name: str) -> int:
    parts = name.split(".")
    widths = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    return next((widths[part] for part in parts if part in widths), 4)


def _tool(name: str, *args: str) -> str:
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    result = subprocess.run([program, *args], capture_output=True, text=True, check=True)
    return result.stdout + result.stderr
