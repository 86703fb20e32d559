"""The SM budget: how many of a GPU's multiprocessors communication has, and how many are left for compute.

Every persistent kernel launches at most ``compute`` programs. A smaller grid alone reserves nothing, because another
kernel's block may fit beside ours on one SM; ``sharing.py`` says which configurations can share one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tessera_rt.errors import Problem, SpecError

INTERPRETED_SMS = 4  # a stand-in for the size of a GPU where kernels are interpreted


@dataclass(frozen=True, slots=True)
class SmBudget:
    """``total`` SMs, ``communication`` of them kept for communication; a ``total`` beyond the device's only makes
    programs queue. Raises SpecError for an impossible split."""

    total: int
    communication: int = 0

    def __post_init__(self) -> None:
        problems = []
        if not _is_integer(self.total) or self.total < 1:
            problems.append(Problem("total", self.total, "an integer, at least 1"))
        elif not _is_integer(self.communication) or not 0 <= self.communication < self.total:
            problems.append(Problem("communication", self.communication, f"an integer from 0 to {self.total - 1}"))
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


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def device_budget(device: torch.device, communication: int = 0) -> SmBudget:
    """The budget of a device with ``communication`` SMs set aside."""
    if device.type == "cuda":
        return SmBudget(torch.cuda.get_device_properties(device).multi_processor_count, communication)
    return SmBudget(INTERPRETED_SMS, communication)
