"""Triton's interpreter, corrected: right bf16, launches from several threads, any order of programs, a launch log.

How to test a kernel without a GPU (kernels/README.md has an example)::

    # conftest.py: before anything imports triton
    os.environ["TRITON_INTERPRET"] = "1"
    from tessera_rt.testing.interpreter import independent_programs, install, launches, program_order, run_ranks
    install()

    # a test: CPU tensors; it must give the same bits in any order, and nothing but the kernel must have made them
    with launches() as log, program_order("parallel", seed=3), independent_programs():
        kernel[(7,)](x, out, BLOCK=64)
    assert log == [Launch("kernel", (7, 1, 1))]

``install()`` must run before the first launch and holds until the process ends. Such a process cannot compile kernels;
compiled checks run in processes of their own (kernels/inspection.py).

What the stock interpreter (Triton 3.6 to 3.9) does differently, and is corrected here:

- bf16 is computed on its bit pattern as an integer and casts truncate. Here arithmetic is done in fp32 and rounded to
  the nearest even, as the GPU does. A sum of bf16 is rounded once; where a GPU rounds between is not defined.
- Casts to fp8 (e4m3, e5m2) lose carries. Here they round to the nearest even and saturate, as on NVIDIA GPUs.
- The running program's index is global, and every launch patches and restores ``triton.language``. Here the index is
  per thread and the language is patched once, so ranks can be threads.
- Whole storages are copied in and out around each launch, which overwrites what other ranks write meanwhile. Here CPU
  tensors are used in place; those of other devices are refused.
- ``device_assert`` and the check of 32-bit integer overflow are off. Here they are on.
- Inline assembly is refused. Here ``%smid`` is emulated, and what ``inline_assembly`` is given.
- A program that waits in vain hangs. Here it is ended, and the error names the flag.

What it cannot show: missing fences (a CPU orders its memory accesses strictly, and so does this), block layouts, and
speed. bf16 atomics are refused.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import random
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock

from tessera_rt.testing.accesses import Accesses
from tessera_rt.testing.interpreter_builder import (
    CorrectedBuilder,
    Emulation,
    Program,
    Reduction,
    Scan,
    assembly,
    place_of,
    tensors_of,
)
from tessera_rt.testing.threads import Turns, run_ranks, run_threads, set_wait, stop_if_told

__all__ = [
    "Launch",
    "ProgramOrder",
    "handled_launches",
    "independent_programs",
    "inline_assembly",
    "install",
    "launches",
    "only_programs",
    "program_order",
    "run_ranks",
    "run_threads",
]

_LAUNCH_LIMIT_S = 3600.0  # of programs in parallel; what waits in vain ends much sooner


class ProgramOrder(StrEnum):
    """In which order the programs of a grid run. A kernel's result must be the same in all of them."""

    SEQUENTIAL = "sequential"
    REVERSED = "reversed"
    SHUFFLED = "shuffled"
    PARALLEL = "parallel"  # all at once, so that programs may wait for each other: see program_order


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """One launch of an interpreted kernel."""

    kernel: str
    grid: tuple[int, int, int]


_order: ContextVar[tuple[ProgramOrder, int]] = ContextVar("order", default=(ProgramOrder.SEQUENTIAL, 0))
_only: ContextVar[tuple[int, ...] | None] = ContextVar("only", default=None)
_log: ContextVar[list[Launch] | None] = ContextVar("log", default=None)
_independent: ContextVar[bool] = ContextVar("independent", default=False)
LaunchHandler = Callable[[str, Callable[..., None], tuple[Any, ...], dict[str, Any]], None]
_handler: ContextVar[LaunchHandler | None] = ContextVar("handler", default=None)


@contextmanager
def _value(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def program_order(order: ProgramOrder | str, seed: int = 0) -> Iterator[None]:
    """Launches in this context run their programs in ``order``.

    Shuffled: one after another in an order drawn from ``seed``. Parallel: each program has a thread, and before every
    access to memory the next one to go on is drawn from ``seed``, so that a race shows, again and again.
    """
    with _value(_order, (ProgramOrder(order), seed)):
        yield


@contextmanager
def independent_programs() -> Iterator[None]:
    """Launches in this context fail if one of their programs writes memory, atomically or not, that another one reads
    or writes. A kernel that passes gives the same result in every order of its programs, not only in those tried."""
    with _value(_independent, True):
        yield


@contextmanager
def only_programs(*numbers: int) -> Iterator[None]:
    """Launches in this context run these programs of their grid only (-1 is the last one): the far end of a tensor that
    is too large to compute whole."""
    with _value(_only, numbers):
        yield


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """The kernels launched in this context, in order: shows that a kernel ran, and not its reference."""
    log: list[Launch] = []
    with _value(_log, log):
        yield log


@contextmanager
def inline_assembly(emulations: Mapping[str, Emulation]) -> Iterator[None]:
    """Kernels launched in this context may use the inline assembly texts that are the keys. A function gets the
    operands as numpy arrays (bf16 as uint16) and returns the result, or a tuple of results."""
    with _value(assembly, {**assembly.get({}), **emulations}):
        yield


@contextmanager
def handled_launches(handler: LaunchHandler) -> Iterator[None]:
    """Launches in this context go to ``handler(kernel, launch, args, kwargs)``, which runs ``launch(*args, **kwargs)``
    itself, as often as it wants: how a stand-in for graphs records them."""
    with _value(_handler, handler):
        yield


def install() -> None:
    """Corrects the interpreter of this process for good; calling it again does nothing.

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
    stock.ReduceOps, stock.ScanOps = Reduction, Scan
    stock._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    tl.tensor.__index__ = _index
    stock._patch_lang = lambda fn: _NothingToRestore()
    stock.GridExecutor.__call__ = _run_grid
    stock.InterpretedFunction.rewrite = _RewriteOnce(stock.InterpretedFunction.rewrite).bound()


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
    function, name = executor.fn, executor.fn.__name__
    known = inspect.getfullargspec(function)
    kwargs = {key: value for key, value in kwargs.items() if key in known.args or key in known.kwonlyargs}
    for hook in executor.pre_run_hooks:
        hook(*args, **kwargs)
    bound = inspect.getcallargs(function, *args, **kwargs)
    for key, tensor in tensors_of(bound):
        if tensor.device.type != "cpu":
            raise ValueError(f"{name}: {key} is on {tensor.device}; interpreted kernels take tensors of the CPU")
    arguments = {
        key: value if key in executor.constexprs else stock._implicit_cvt(value) for key, value in bound.items()
    }
    sizes = tuple(executor.grid(arguments) if callable(executor.grid) else executor.grid)
    if len(sizes) > 3:
        raise ValueError(f"{name}: a grid has at most three dimensions, not {sizes}")
    grid: tuple[int, int, int] = (*sizes, 1, 1)[:3]
    log = _log.get()
    if log is not None:
        log.append(Launch(name, grid))
    order, seed = _order.get()
    indices = list(itertools.product(range(grid[0]), range(grid[1]), range(grid[2])))
    only = _only.get()
    if only is not None:
        if outside := [number for number in only if not -len(indices) <= number < len(indices)]:
            raise ValueError(f"{name}: only_programs({outside[0]}) of a grid of {len(indices)} programs")
        indices = [indices[number] for number in only]
    parallel = order is ProgramOrder.PARALLEL and indices
    turns = Turns(len(indices), seed) if parallel else None
    accesses = Accesses() if _independent.get() else None
    programs = [Program(name, grid, index, number, bound, turns, accesses) for number, index in enumerate(indices)]
    if order is ProgramOrder.REVERSED:
        programs.reverse()
    elif order is ProgramOrder.SHUFFLED:
        random.Random(seed).shuffle(programs)
    if parallel:
        calls = [partial(_run_in_turns, program, function, arguments) for program in programs]
        run_threads(calls, names=[str(program) for program in programs], timeout_s=_LAUNCH_LIMIT_S)
    else:
        for program in programs:
            _run(program, function, arguments)
    if accesses is not None and (conflict := accesses.conflict()) is not None:
        writer, other = (indices[number] for number in (conflict.writer, conflict.other))
        raise stock.InterpreterError(
            f"{name}: programs {writer} and {other} both touch {place_of(conflict.address, bound)}, and the first "
            "writes it: what comes out may depend on the order of programs"
        )


def _run_in_turns(program: Program, function: Callable[..., None], arguments: Mapping[str, Any]) -> None:
    assert program.turns is not None
    program.turns.enter(program.number)
    try:
        stop_if_told()
        _run(program, function, arguments)
    finally:
        program.turns.leave(program.number)


def _run(program: Program, function: Callable[..., None], arguments: Mapping[str, Any]) -> None:
    CorrectedBuilder.thread.program = program
    try:
        with np.errstate(all="ignore"):  # infinities and NaN are values here, as on the GPU
            function(**arguments)
    except Exception as error:
        cause: BaseException = error
        while isinstance(cause, stock.InterpreterError) and cause.__cause__ is not None:
            cause = cause.__cause__  # each call of a device function wraps it once more
        raise stock.InterpreterError(f"{program}: {cause!r}") from error
    finally:
        del CorrectedBuilder.thread.program
        set_wait(None)


def _index(tensor: Any) -> int:
    return int(np.asarray(tensor.handle.data).reshape(-1)[0])
