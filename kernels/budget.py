"""The SM budget: how many of a GPU's multiprocessors communication has, and how many are left for compute.

Every persistent kernel launches at most ``compute`` programs. A smaller grid alone reserves nothing, because another
kernel's block may fit beside ours on one SM; ``sharing.py`` says which configurations can share one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tessera_rt.errors import Problem, SpecError

INTERPRETED_SMS = 4  # a stand-in for the size of a GPU where kernels are interpreted


@dataclass(frozen=True, slots=True)
class SmBudget:
    """``total`` SMs, ``communication`` of them kept for communication. Raises SpecError for an impossible split."""

    total: int
    communication: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.total < 1:
            problems.append(Problem("total", self.total, "at least 1"))
        elif not 0 <= self.communication < self.total:
            problems.append(Problem("communication", self.communication, f"from 0 to {self.total - 1}"))
        if problems:
            raise SpecError.of("SM budget", problems)

    @property
    def compute(self) -> int:
        return self.total - self.communication

    def programs(self, tasks: int) -> int:
        """Grid of a persistent kernel with at most ``tasks`` tasks."""
        return max(1, min(self.compute, tasks))

    @contextmanager
    def library_gemms(self) -> Iterator[None]:
        """cuBLAS and CUTLASS products that torch launches in this context leave the communication SMs free.

        torch's carve-out is one setting for the whole process (experimental in torch); the former one is restored.
        """
        before = torch._C._get_sm_carveout_experimental()
        torch._C._set_sm_carveout_experimental(self.communication or None)
        try:
            yield
        finally:
            torch._C._set_sm_carveout_experimental(before)


def device_budget(device: torch.device, communication: int = 0) -> SmBudget:
    """The budget of a device with ``communication`` SMs set aside."""
    if device.type == "cuda":
        return SmBudget(torch.cuda.get_device_properties(device).multi_processor_count, communication)
    return SmBudget(INTERPRETED_SMS, communication)


def architecture(device: torch.device) -> str:
    """Name of the configuration table's architecture: sm90, sm100, ..., or ``interpreter`` for interpreted kernels.

    Raises SpecError for a device that kernels cannot run on.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return "sm100" if major == 10 else f"sm{major}{minor}"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreter"
    remedy = "use tessera_rt.kernels.reference there"
    raise SpecError.of("kernels", [Problem("device", str(device), "a CUDA device", remedy)])
