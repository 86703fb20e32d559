"""Checks and views of the grouped products' operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessera_rt.errors import Problem, SpecError
from tessera_rt.kernels.architecture import architecture
from tessera_rt.kernels.budget import SmBudget, device_budget
from tessera_rt.kernels.config_table import Config
from tessera_rt.kernels.descriptors import is_aligned
from tessera_rt.kernels.trace import Trace

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)
ID_DTYPES = (torch.int8, torch.uint8, torch.int16, *INDEX_DTYPES)


@dataclass(frozen=True, slots=True)
class Run:
    """How kernels are launched: all of it optional. ``config`` replaces the table's; ``trace`` receives the number and
    SM of each program of every launch."""

    budget: SmBudget | None = None
    config: Config | None = None
    trace: Trace | None = None

    def __post_init__(self) -> None:
        given: tuple[tuple[str, object, type], ...] = (
            ("budget", self.budget, SmBudget), ("config", self.config, Config), ("trace", self.trace, Trace)
        )  # fmt: skip
        problems = [
            Problem(name, value, f"a {kind.__name__} or None")
            for name, value, kind in given
            if not (value is None or isinstance(value, kind))
        ]
        if isinstance(self.config, Config):
            problems += [Problem(f"config.{p.field}", p.value, p.allowed) for p in self.config.problems()]
        if problems:
            raise SpecError.of("run", problems)

    def grid(self, kernel: Any, device: torch.device, tasks: int) -> tuple[tuple[int], Tensor | None]:
        """The grid of a launch of ``kernel``, at most the budget's SMs, and its part of the trace.

        Raises SpecError for a device that kernels cannot run on.
        """
        architecture(device)
        programs = (self.budget or device_budget(device)).programs(tasks)
        if self.trace is None:
            return (programs,), None
        return (programs,), self.trace.places(kernel.__name__, programs, device)


DEFAULT_RUN = Run()


def warp_options(warps: int) -> dict[str, Any]:
    """Compile options of every kernel. FP fusion is named because Triton's default for it changes in 3.10."""
    return {"num_warps": warps, "enable_fp_fusion": True}


def launch_options(config: Config) -> dict[str, Any]:
    """Compile options of a configuration."""
    return {**warp_options(config.warps), "num_stages": config.stages}


def readable(tensor: Tensor, *, gathered: bool = False) -> Tensor:
    """The tensor [R, C], or a contiguous copy if TMA cannot read it, or if it is gathered and 16-byte loads cannot.

    Triton compiles 16-byte loads only for row strides that are multiples of 16 elements; with others a gathered product
    loads element by element and spills.
    """
    fits = is_aligned(tensor) and (not gathered or tensor.stride(0) % 16 == 0)
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def weight_view(weight: Tensor) -> tuple[Tensor, bool]:
    """``weight`` [E, N, K] as stored: itself and True, or [E, K, N] and False; a copy if neither is readable by TMA."""
    if is_aligned(weight):
        return weight, True
    if is_aligned(weight.mT):
        return weight.mT, False
    return weight.clone(memory_format=torch.contiguous_format), True


def check_tensors(where: str, problems: list[Problem], first: Tensor, name: str = "x", **others: Tensor | None) -> None:
    """Raises SpecError with ``problems`` and, if any, those of dtypes and devices: ``others`` must be like the first
    operand, which is called ``name``."""
    problems = problems + dtype_problem(name, first, DTYPES)
    for other, tensor in others.items():
        if tensor is None:
            continue
        if tensor.dtype != first.dtype:
            problems.append(Problem(f"{other}.dtype", str(tensor.dtype), f"{first.dtype} like {name}"))
        if tensor.device != first.device:
            problems.append(Problem(f"{other}.device", str(tensor.device), f"{first.device} like {name}"))
    refuse(where, problems)


def refuse(where: str, problems: list[Problem]) -> None:
    """Raises SpecError if there are problems."""
    if problems:
        raise SpecError.of(where, problems)


def dtype_problem(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> list[Problem]:
    """A problem if the tensor has none of these dtypes."""
    if tensor.dtype in dtypes:
        return []
    wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return [Problem(f"{name}.dtype", str(tensor.dtype), f"one of {wanted}")]


def tensor_problems(
    name: str, tensor: Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> list[Problem]:
    """Problems of shape (None: any size), dtype and device."""
    problems = shape_problem(name, tensor, *shape) + dtype_problem(name, tensor, dtypes)
    if tensor.device != device:
        problems.append(Problem(f"{name}.device", str(tensor.device), f"{device} like the other operands"))
    return problems


def negation_problems(name: str, out: Tensor) -> list[Problem]:
    """A problem if a destination has torch's lazy negation: kernels write to its storage."""
    return [Problem(name, "a lazily negated view", "a tensor that holds its values", "write to a copy")] * out.is_neg()


def index_problems(index: Tensor | None, divisor: int, rows: int, device: torch.device) -> list[Problem]:
    """Problems of what rows are gathered by: ``index`` [rows] (None: not gathered), read divided by ``divisor``."""
    problems = [] if index is None else tensor_problems("index", index, (rows,), INDEX_DTYPES, device)
    if divisor < 1:
        problems.append(Problem("divisor", divisor, "at least 1"))
    return problems


def shape_problem(name: str, tensor: Tensor, *allowed: int | None) -> list[Problem]:
    """A problem if the tensor's shape is not ``allowed`` (None: any size)."""
    fits = tensor.dim() == len(allowed) and all(
        want is None or want == have for want, have in zip(allowed, tensor.shape, strict=True)
    )
    wanted = ", ".join("any" if want is None else str(want) for want in allowed)
    return [] if fits else [Problem(f"{name}.shape", tuple(tensor.shape), f"[{wanted}]")]
