"""The optional record of where the programs of each launch ran, with which tests read the real grid back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TracedLaunch:
    """``places`` [programs, 2] int32 of one launch: each program's number and the SM it ran on."""

    kernel: str
    places: Tensor

    def programs(self) -> list[int]:
        """The programs that ran, by number (waits for the device)."""
        return sorted(number for number in self.places[:, 0].tolist() if number >= 0)

    def sms(self) -> set[int]:
        """The SMs that they ran on (waits for the device)."""
        return set(self.places[self.places[:, 0] >= 0, 1].tolist())


class Trace:
    """Give one to the functions that launch kernels; ``launches`` then has an entry per launch, in order."""

    def __init__(self) -> None:
        self.launches: list[TracedLaunch] = []

    def places(self, kernel: str, programs: int, device: torch.device) -> Tensor:
        """A new entry for a launch of ``programs`` programs; the kernel writes into its tensor, -1 before."""
        launch = TracedLaunch(kernel, torch.full((programs, 2), -1, dtype=torch.int32, device=device))
        self.launches.append(launch)
        return launch.places
