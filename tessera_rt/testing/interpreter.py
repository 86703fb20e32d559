"""Triton's interpreter, corrected: right bf16, launches from several threads, any order of programs, a launch log.

``install()`` must run in a process started with TRITON_INTERPRET=1 (tests/cpu/conftest.py sets it), before the first
launch. Such a process cannot compile kernels; compiled checks run in processes of their own (kernels/inspection.py).

What the stock interpreter (Triton 3.6 to 3.9) does differently, and is corrected here:

- bf16 is computed on its bit pattern as an integer and casts truncate. Here arithmetic is done in fp32 and rounded to
  the nearest even, as the GPU does.
- The running program's index is global, and every launch patches and restores ``triton.language``. Here the index is
  per thread and the language is patched once, so ranks can be threads.
- Whole storages are copied in and out around each launch, which overwrites what other ranks write meanwhile. Here CPU
  tensors are used in place.
- ``device_assert`` and the check of 32-bit integer overflow are off. Here they are on.
- Inline assembly is refused. Here the instructions our kernels use are emulated.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import random
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock

T = TypeVar("T")
Handle = Any  # stock.TensorHandle: a numpy array `data` and a Triton type `dtype`
_POLL_PAUSE_S = 50e-6  # a polling thread lets the thread it waits for run


class ProgramOrder(StrEnum):
    """In which order the programs of a grid run. A kernel's result must be the same in all of them."""

    SEQUENTIAL = "sequential"
    REVERSED = "reversed"
    SHUFFLED = "shuffled"
    PARALLEL = "parallel"  # one thread per program, so that programs may wait for each other


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """One launch of an interpreted kernel."""

    kernel: str
    grid: tuple[int, int, int]


_order: ContextVar[tuple[ProgramOrder, int]] = ContextVar("order", default=(ProgramOrder.SEQUENTIAL, 0))
_only: ContextVar[tuple[int, ...] | None] = ContextVar("only", default=None)
_log: ContextVar[list[Launch] | None] = ContextVar("log", default=None)
LaunchHandler = Callable[[str, Callable[..., None], tuple[Any, ...], dict[str, Any]], None]
_handler: ContextVar[LaunchHandler | None] = ContextVar("handler", default=None)


@contextmanager
def program_order(order: ProgramOrder | str, seed: int = 0) -> Iterator[None]:
    """Launches in this context run their programs in ``order``; ``seed`` is for the shuffled one."""
    token = _order.set((ProgramOrder(order), seed))
    try:
        yield
    finally:
        _order.reset(token)


@contextmanager
def only_programs(*numbers: int) -> Iterator[None]:
    """Launches in this context run these programs of their grid only (-1 is the last one): the far end of a tensor that
    is too large to compute whole."""
    token = _only.set(numbers)
    try:
        yield
    finally:
        _only.reset(token)


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """The kernels launched in this context, in order: shows that a kernel ran, and not its reference."""
    log: list[Launch] = []
    token = _log.set(log)
    try:
        yield log
    finally:
        _log.reset(token)


@contextmanager
def handled_launches(handler: LaunchHandler) -> Iterator[None]:
    """Launches in this context go to ``handler(kernel, launch, args, kwargs)``, which runs ``launch(*args, **kwargs)``
    itself, as often as it wants: how a stand-in for graphs records them."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def bf16_to_float(bits: np.ndarray) -> np.ndarray:
    """bf16 bit patterns (uint16) to fp32, exactly."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def float_to_bf16(values: np.ndarray) -> np.ndarray:
    """fp32 to bf16 bit patterns (uint16), rounded to nearest even; every NaN becomes the same quiet NaN."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def install() -> None:
    """Corrects the interpreter of this process; calling it again does nothing.

    Raises RuntimeError when Triton was imported without TRITON_INTERPRET=1.
    """
    if not isinstance(tl.sum, stock.InterpretedFunction):
        raise RuntimeError("Triton was imported without TRITON_INTERPRET=1: set it before the process starts")
    if isinstance(stock.interpreter_builder, CorrectedBuilder):
        return
    # The instance is referred to by closures of the stock module, so it changes its class instead of being replaced.
    stock.interpreter_builder.__class__ = CorrectedBuilder
    stock.interpreter_builder.options = dataclasses.replace(stock.interpreter_builder.options, debug=True)
    stock.InterpreterBuilder = CorrectedBuilder
    stock._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    tl.tensor.__index__ = _index
    stock._patch_lang = lambda fn: _NothingToRestore()
    stock.GridExecutor.__call__ = _run_grid
    stock.InterpretedFunction.rewrite = _RewriteOnce(stock.InterpretedFunction.rewrite).bound()


class CorrectedBuilder(stock.InterpreterBuilder):  # type: ignore[misc]
    """The operations of the interpreter, with bf16 by way of fp32 and the program's index per thread."""

    _thread = threading.local()

    @property
    def grid_idx(self) -> tuple[int, int, int] | None:
        return getattr(self._thread, "index", None)

    @grid_idx.setter
    def grid_idx(self, index: tuple[int, int, int]) -> None:
        self._thread.index = index

    @property
    def grid_dim(self) -> tuple[int, int, int]:
        return self._thread.size  # type: ignore[no-any-return]

    @grid_dim.setter
    def grid_dim(self, size: tuple[int, int, int]) -> None:
        self._thread.size = size

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
        native = (tl.float16, tl.float32, tl.float64, tl.bfloat16)
        if src.dtype.scalar in native and dst_type.scalar in native:
            return self.cast_impl(src, dst_type)
        return super().create_fp_to_fp(src, dst_type, rounding_mode)

    def binary_op(self, lhs: Handle, rhs: Handle, op: Callable[..., np.ndarray]) -> Handle:
        if not (_is_bf16(lhs) and _is_bf16(rhs)):
            return super().binary_op(lhs, rhs, op)
        result = op(bf16_to_float(lhs.data), bf16_to_float(rhs.data))
        return stock.TensorHandle(result, tl.int1) if result.dtype == np.bool_ else _bf16(result)

    def unary_op(self, arg: Handle, op: Callable[..., np.ndarray]) -> Handle:
        return _bf16(op(bf16_to_float(arg.data))) if _is_bf16(arg) else super().unary_op(arg, op)

    def create_fma(self, x: Handle, y: Handle, z: Handle) -> Handle:
        if not _is_bf16(z):
            return super().create_fma(x, y, z)
        return _bf16(bf16_to_float(x.data) * bf16_to_float(y.data) + bf16_to_float(z.data))

    def create_dot(self, a: Handle, b: Handle, d: Handle, input_precision: Any, max_num_imprecise_acc: Any) -> Handle:
        # fp16 goes by way of fp32 too: exact, as a tensor core does, and many times faster in numpy.
        return super().create_dot(_widened(a), _widened(b), d, input_precision, max_num_imprecise_acc)

    def get_bf16(self, value: float) -> Handle:
        return _bf16(np.array([value], dtype=np.float32))

    def create_atomic_rmw(self, rmw_op: Any, ptr: Handle, val: Handle, mask: Handle, sem: Any, scope: Any) -> Handle:
        result = super().create_atomic_rmw(rmw_op, ptr, val, mask, sem, scope)
        if ptr.data.size == 1 and not np.any(val.data):
            time.sleep(_POLL_PAUSE_S)  # adding zero is how a kernel polls a flag
        return result

    def create_load(self, ptr: Handle, *policy_and_volatile: Any) -> Handle:
        if policy_and_volatile[-1] and ptr.data.size == 1:
            time.sleep(_POLL_PAUSE_S)
        return super().create_load(ptr, *policy_and_volatile)

    def create_inline_asm(
        self, text: str, constraints: str, values: Sequence[Handle], dtype: Any, is_pure: bool, pack: int
    ) -> Any:
        if text != "mov.u32 $0, %smid;":
            return super().create_inline_asm(text, constraints, values, dtype, is_pure, pack)
        # Stands for a device with one program per SM.
        return _InlineResult(self.create_get_program_id(0))


class _InlineResult:
    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def get_result(self, _index: int) -> Handle:
        return self._handle


class _NothingToRestore:
    def restore(self) -> None:
        """The language stays patched."""


class _RewriteOnce:
    """Kernels are rewritten at their first launch, which two threads may do at once."""

    def __init__(self, rewrite: Callable[[Any], Any]) -> None:
        self._rewrite, self._lock = rewrite, threading.Lock()

    def bound(self) -> Callable[[Any], Any]:
        def rewrite(function: Any) -> Any:
            with self._lock:
                return self._rewrite(function)

        return rewrite


def _run_grid(executor: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces GridExecutor.__call__: arguments in place, programs in the order asked for."""
    handler = _handler.get()
    if handler is None:
        _launch(executor, *args, **kwargs)
    else:
        handler(executor.fn.__name__, partial(_launch, executor), args, kwargs)


def _launch(executor: Any, *args: Any, **kwargs: Any) -> None:
    function = executor.fn
    known = inspect.getfullargspec(function)
    kwargs = {name: value for name, value in kwargs.items() if name in known.args or name in known.kwonlyargs}
    bound = inspect.getcallargs(function, *args, **kwargs)
    arguments = {
        name: value if name in executor.constexprs else stock._implicit_cvt(value) for name, value in bound.items()
    }
    sizes = tuple(executor.grid(arguments) if callable(executor.grid) else executor.grid)
    grid: tuple[int, int, int] = (*sizes, 1, 1)[:3]
    log = _log.get()
    if log is not None:
        log.append(Launch(function.__name__, grid))

    def run(program: tuple[int, int, int]) -> None:
        stock.interpreter_builder.grid_dim = grid
        stock.interpreter_builder.grid_idx = program
        with np.errstate(all="ignore"):  # infinities and NaN are values here, as on the GPU
            function(**arguments)

    order, seed = _order.get()
    programs = list(itertools.product(range(grid[0]), range(grid[1]), range(grid[2])))
    only = _only.get()
    if only is not None:
        programs = [programs[number] for number in only]
    if order is ProgramOrder.REVERSED:
        programs.reverse()
    elif order is ProgramOrder.SHUFFLED:
        random.Random(seed).shuffle(programs)
    try:
        if order is ProgramOrder.PARALLEL:
            run_threads([lambda program=program: run(program) for program in programs])  # type: ignore[misc]
        else:
            for program in programs:
                run(program)
    except stock.InterpreterError:
        raise
    except Exception as error:
        raise stock.InterpreterError(f"{function.__name__}: {error!r}") from error


def run_threads(functions: Sequence[Callable[[], T]], *, timeout_s: float = 120.0) -> list[T]:
    """Runs the functions at the same time, each in a thread with a copy of the caller's context; their results.

    The first failure is raised once all have ended. Raises TimeoutError naming the threads still running after
    ``timeout_s`` (they are daemons, so that the process can end).
    """
    results: list[Any] = [None] * len(functions)
    failures: list[BaseException] = []

    def call(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=copy_context().run, args=(call, index), name=str(index), daemon=True)
        for index in range(len(functions))
    ]
    end = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if failures:
        raise failures[0]
    late = [thread.name for thread in threads if thread.is_alive()]
    if late:
        raise TimeoutError(f"threads {', '.join(late)} still run after {timeout_s:g} s")
    return results


def run_ranks(world: int, function: Callable[[int], T], *, timeout_s: float = 120.0) -> list[T]:
    """``function(rank)`` for every rank of ``world`` as a thread; results by rank. Errors as in ``run_threads``."""
    return run_threads([lambda rank=rank: function(rank) for rank in range(world)], timeout_s=timeout_s)  # type: ignore[misc]


def _index(tensor: Any) -> int:
    return int(np.asarray(tensor.handle.data).reshape(-1)[0])


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
    return handle
