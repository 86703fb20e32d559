"""The operations of Triton's interpreter, corrected (interpreter.py says in what); and a program that runs in it."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter as stock
from triton.tools.tensor_descriptor import TensorDescriptor

from tessera_rt.testing.accesses import Accesses
from tessera_rt.testing.narrow_floats import (
    FP8_NAMES,
    bf16_to_float,
    float_to_bf16,
    float_to_fp8,
    fp8_to_float,
    rounded_to_odd,
)
from tessera_rt.testing.threads import Turns, set_wait, stop_if_told

Handle = Any  # stock.TensorHandle: a numpy array `data` and a Triton type `dtype`
Emulation = Callable[..., np.ndarray | tuple[np.ndarray, ...]]
POLL_LIMIT_S = 240.0  # a flag that keeps its value for so long is waited for in vain
_POLL_PAUSE_S = 50e-6  # a polling thread lets the thread it waits for run

assembly: ContextVar[Mapping[str, Emulation]] = ContextVar("assembly")
"""Emulations of inline assembly by its text (``interpreter.inline_assembly``)."""


@dataclasses.dataclass(slots=True)
class Program:
    """A program that runs: what it is part of, and the flag that it last polled."""

    kernel: str
    grid: tuple[int, int, int]
    index: tuple[int, int, int]
    number: int
    arguments: Mapping[str, Any]
    turns: Turns | None
    accesses: Accesses | None
    polled: tuple[int, Any] | None = None  # address and value
    since: float = 0.0

    def __str__(self) -> str:
        return f"{self.kernel}, program {self.index[0] if self.grid[1:] == (1, 1) else self.index}"

    def waiting(self) -> str:
        """What it waits for, or did last."""
        assert self.polled is not None
        address, value = self.polled
        where, seconds = place_of(address, self.arguments), time.monotonic() - self.since
        return f"{self} waits at {where}, which has been {value} for {seconds:.1f} s"


class CorrectedBuilder(stock.InterpreterBuilder):  # type: ignore[misc]
    """The operations of the interpreter, with bf16 by way of fp32 and the program's index per thread."""

    corrected = True  # kernels.architecture asks for it
    thread = threading.local()  # .program: the Program that runs in this thread

    @property
    def grid_idx(self) -> tuple[int, int, int]:
        return self.thread.program.index  # type: ignore[no-any-return]

    @property
    def grid_dim(self) -> tuple[int, int, int]:
        return self.thread.program.grid  # type: ignore[no-any-return]

    def cast_impl(self, src: Handle, dst_type: Any) -> Handle:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target:
            return src
        if source == tl.bfloat16:
            return super().cast_impl(_widened(src), dst_type) if target != tl.float32 else _widened(src)
        if target == tl.bfloat16:
            return _bf16(src.data)
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src: Handle, dst_type: Any, rounding_mode: Any) -> Handle:
        target = dst_type.scalar
        if rounding_mode == stock._ir.ROUNDING_MODE.RTZ:
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        if src.dtype.scalar.name in FP8_NAMES:
            src = _widened(src)
        if target.name in FP8_NAMES:
            return stock.TensorHandle(float_to_fp8(self.cast_impl(src, tl.float32).data, target.name), target)
        native = (tl.float16, tl.float32, tl.float64, tl.bfloat16)
        if src.dtype.scalar in native and target in native:
            return self.cast_impl(src, dst_type)
        return super().create_fp_to_fp(src, dst_type, rounding_mode)

    def binary_op(self, lhs: Handle, rhs: Handle, op: Callable[..., np.ndarray]) -> Handle:
        if not (_is_bf16(lhs) and _is_bf16(rhs)):
            return super().binary_op(lhs, rhs, op)
        result = op(bf16_to_float(lhs.data), bf16_to_float(rhs.data))
        return stock.TensorHandle(result, tl.int1) if result.dtype == np.bool_ else _bf16(result)

    def unary_op(self, arg: Handle, op: Callable[..., np.ndarray]) -> Handle:
        return _bf16(op(bf16_to_float(arg.data))) if _is_bf16(arg) else super().unary_op(arg, op)

    def create_clampf(self, arg: Handle, lo: Handle, hi: Handle, propagate_nans: Any) -> Handle:
        if not _is_bf16(arg):
            return super().create_clampf(arg, lo, hi, propagate_nans)
        return _bf16(super().create_clampf(_widened(arg), _widened(lo), _widened(hi), propagate_nans).data)

    def create_fma(self, x: Handle, y: Handle, z: Handle) -> Handle:
        if not _is_bf16(z):
            return super().create_fma(x, y, z)
        x64, y64, z64 = (bf16_to_float(handle.data).astype(np.float64) for handle in (x, y, z))
        return _bf16(rounded_to_odd(x64 * y64 + z64))

    def create_dot(self, a: Handle, b: Handle, d: Handle, input_precision: Any, max_num_imprecise_acc: Any) -> Handle:
        # fp16 goes by way of fp32 too: exact, as a tensor core does, and many times faster in numpy.
        return super().create_dot(_widened(a), _widened(b), d, input_precision, max_num_imprecise_acc)

    def get_bf16(self, value: float) -> Handle:
        return _bf16(np.array([value], dtype=np.float32))

    def create_masked_load(self, ptrs: Handle, mask: Handle, *rest: Any, **policy: Any) -> Handle:
        self._before_access(ptrs, mask, writes=False)
        return super().create_masked_load(ptrs, mask, *rest, **policy)

    def create_masked_store(self, ptrs: Handle, value: Handle, mask: Handle, *rest: Any, **policy: Any) -> Handle:
        self._before_access(ptrs, mask, writes=True)
        return super().create_masked_store(ptrs, value, mask, *rest, **policy)

    def create_load(self, ptr: Handle, *policy_and_volatile: Any) -> Handle:
        result = super().create_load(ptr, *policy_and_volatile)
        return self._polled(ptr, result) if policy_and_volatile[-1] and ptr.data.size == 1 else result

    def create_atomic_load(self, ptr: Handle, *rest: Any) -> Handle:
        result = super().create_atomic_load(ptr, *rest)
        return self._polled(ptr, result) if ptr.data.size == 1 else result

    def create_atomic_rmw(self, rmw_op: Any, ptr: Handle, val: Handle, mask: Handle, sem: Any, scope: Any) -> Handle:
        if _is_bf16(val):
            raise NotImplementedError("atomics of bf16 are not emulated: use float32, or a fixed order of sums")
        self._before_access(ptr, mask, writes=True)
        result = super().create_atomic_rmw(rmw_op, ptr, val, mask, sem, scope)
        # Adding zero is how a kernel polls a flag.
        return result if ptr.data.size > 1 or np.any(val.data) else self._polled(ptr, result)

    def create_atomic_cas(self, ptr: Handle, cmp: Handle, val: Handle, sem: Any, scope: Any) -> Handle:
        self._before_access(ptr, None, writes=True)
        result = super().create_atomic_cas(ptr, cmp, val, sem, scope)
        changed = ptr.data.size > 1 or np.array_equal(result.data, cmp.data)
        return result if changed else self._polled(ptr, result)

    def create_inline_asm(
        self, text: str, constraints: str, values: Sequence[Handle], dtypes: Any, is_pure: bool, pack: int
    ) -> Any:
        # Stands for a device with one program per SM.
        known: dict[str, Emulation] = {"mov.u32 $0, %smid;": lambda: np.array([self.grid_idx[0]], dtype=np.int32)}
        emulate = (known | dict(assembly.get({}))).get(text)
        if emulate is None:
            raise NotImplementedError(
                f"inline_asm not supported here: {text!r}; emulate it with inline_assembly({{text: function}})"
            )
        results = emulate(*(handle.data for handle in values))
        arrays = results if isinstance(results, tuple) else (results,)
        types_of = dtypes if isinstance(dtypes, (list, tuple)) else (dtypes,)
        return _Results(
            [
                stock.TensorHandle(np.asarray(array).astype(stock._get_np_dtype(dtype.scalar)), dtype.scalar)
                for array, dtype in zip(arrays, types_of, strict=True)
            ]
        )

    def _before_access(self, ptrs: Handle, mask: Handle | None, *, writes: bool) -> None:
        program: Program = self.thread.program
        if program.accesses is not None:
            element = ptrs.get_element_ty()
            touched = ptrs.data if mask is None else ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]
            size = max(1, element.primitive_bitwidth // 8)
            program.accesses.note(program.number, touched, size, writes=writes)
        if program.turns is not None:
            program.turns.pass_on(program.number)
        stop_if_told()

    def _polled(self, ptr: Handle, result: Handle) -> Handle:
        """Records that the program has seen the flag ``result``, and lets others run."""
        program: Program = self.thread.program
        seen, now = (int(ptr.data.reshape(-1)[0]), result.data.reshape(-1)[0]), time.monotonic()
        if program.polled != seen:
            program.polled, program.since = seen, now
        elif now - program.since > POLL_LIMIT_S:
            alone = "; one that waits for another one of its launch needs program_order('parallel')"
            raise TimeoutError(program.waiting() + (alone if program.turns is None else ""))
        set_wait(program.waiting)
        time.sleep(_POLL_PAUSE_S)
        return result


class _Results:
    """What inline assembly returns."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def get_result(self, index: int) -> Handle:
        return self._handles[index]


class Reduction(stock.ReduceOps):  # type: ignore[misc]
    """Sums, extremes and their places of bf16, by way of fp32."""

    def sum(self, input: Any) -> Any:
        return _tensor_in_bf16(super().sum(_tensor_in_fp32(input)), input)

    def min_max(self, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        values = input[0] if isinstance(input, tuple) else input
        found = super().min_max(_tensor_in_fp32(values), val_reduce_op, idx_reduce_op)
        if isinstance(found, tuple):
            return _tensor_in_bf16(found[0], values), found[1]
        return _tensor_in_bf16(found, values)


class Scan(stock.ScanOps):  # type: ignore[misc]
    """Running sums and products of bf16, by way of fp32."""

    def cumsum(self, input: Any) -> Any:
        return [_tensor_in_bf16(each, input) for each in super().cumsum(_tensor_in_fp32(input))]

    def cumprod(self, input: Any) -> Any:
        return [_tensor_in_bf16(each, input) for each in super().cumprod(_tensor_in_fp32(input))]


def tensors_of(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among a kernel's arguments, by name; those of descriptors and tuples too."""
    for name, value in arguments.items():
        for each in value if isinstance(value, tuple) else (value,):
            base = each.base if isinstance(each, TensorDescriptor) else each
            if isinstance(base, Tensor):
                yield name, base


def place_of(address: int, arguments: Mapping[str, Any]) -> str:
    """The argument that an address lies in, and where."""
    for name, tensor in tensors_of(arguments):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        offset = address - tensor.data_ptr()
        if tensor.numel() and 0 <= offset < (last + 1) * tensor.element_size():
            return f"{name} + {offset} bytes"
    return f"address {address:#x}"


def _is_bf16(handle: Handle) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)


def _bf16(values: np.ndarray) -> Handle:
    return stock.TensorHandle(float_to_bf16(values), tl.bfloat16)


def _widened(handle: Handle) -> Handle:
    scalar = handle.dtype.scalar
    if scalar == tl.bfloat16:
        return stock.TensorHandle(bf16_to_float(handle.data), tl.float32)
    if scalar == tl.float16:
        return stock.TensorHandle(handle.data.astype(np.float32), tl.float32)
    if scalar.name in FP8_NAMES:
        return stock.TensorHandle(fp8_to_float(handle.data, scalar.name), tl.float32)
    return handle


def _tensor_in_fp32(tensor: Any) -> Any:
    """A bf16 tensor in fp32; any other one as it is."""
    return _tensor_of(_widened(tensor.handle)) if _is_bf16(tensor.handle) else tensor


def _tensor_in_bf16(result: Any, like: Any) -> Any:
    """The fp32 tensor made from a bf16 one, back in bf16; any other one as it is."""
    return _tensor_of(_bf16(result.handle.data), result) if _is_bf16(like.handle) else result


def _tensor_of(handle: Handle, like: Any = None) -> Any:
    shape = handle.data.shape if like is None else like.shape
    return tl.tensor(handle, tl.block_type(handle.dtype, [int(size) for size in shape]) if shape else handle.dtype)
