"""Checks and views of the grouped products' operands."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tessera_rt.errors import Problem, SpecError
from tessera_rt.kernels.budget import SmBudget, device_budget
from tessera_rt.kernels.config_table import Config
from tessera_rt.kernels.descriptors import is_aligned

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class Run:
    """How a product is launched: all of it optional. ``config`` replaces the table's; ``trace`` [programs, 2] int32
    receives each program's number and SM."""

    budget: SmBudget | None = None
    config: Config | None = None
    trace: Tensor | None = None

    def programs(self, device: torch.device, tasks: int) -> int:
        """The grid: at most the budget's SMs. Raises SpecError for a trace with fewer rows than programs."""
        count = (self.budget or device_budget(device)).programs(tasks)
        if self.trace is not None and (self.trace.shape[0] < count or self.trace.dtype != torch.int32):
            given = (tuple(self.trace.shape), str(self.trace.dtype))
            raise SpecError.of("trace", [Problem("trace", given, f"int32 [{count} or more, 2]")])
        return count


DEFAULT_RUN = Run()


def launch_options(config: Config) -> dict[str, object]:
    """Compile options of a configuration. FP fusion is named because Triton's default for it changes in 3.10."""
    return {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}


def readable(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy if TMA (or 16-byte loads) cannot read it."""
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def weight_view(weight: Tensor) -> tuple[Tensor, bool]:
    """``weight`` [E, N, K] as stored: itself and True, or [E, K, N] and False; a copy if neither is readable by TMA."""
    if is_aligned(weight):
        return weight, True
    if is_aligned(weight.mT):
        return weight.mT, False
    return weight.clone(memory_format=torch.contiguous_format), True


def check_tensors(where: str, problems: list[Problem], first: Tensor, *others: Tensor | None) -> None:
    """Raises SpecError with ``problems`` and, if any, those of dtypes and devices."""
    if first.dtype not in DTYPES:
        problems.append(Problem("dtype", str(first.dtype), "bfloat16, float16 or float32"))
    for other in others:
        if other is None:
            continue
        if other.dtype != first.dtype:
            problems.append(Problem("dtype", str(other.dtype), f"{first.dtype} like the first operand"))
        if other.device != first.device:
            problems.append(Problem("device", str(other.device), f"{first.device} like the first operand"))
    if problems:
        raise SpecError.of(where, problems)


def shape_problem(name: str, tensor: Tensor, *allowed: int | None) -> list[Problem]:
    """A problem if the tensor's shape is not ``allowed`` (None: any size)."""
    fits = tensor.dim() == len(allowed) and all(
        want is None or want == have for want, have in zip(allowed, tensor.shape, strict=True)
    )
    wanted = ", ".join("any" if want is None else str(want) for want in allowed)
    return [] if fits else [Problem(f"{name}.shape", tuple(tensor.shape), f"[{wanted}]")]
