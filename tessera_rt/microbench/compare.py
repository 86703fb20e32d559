"""Several ways to do the same work, timed against each other: one sample of each in turn, compared round by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tessera_rt.errors import Problem, SpecError
from tessera_rt.microbench.machine import ClockReader, Clocks
from tessera_rt.microbench.timing import Launch, Timing, slowest_rank, stopwatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """``launch`` does the problem's work once: ``flops`` useful operations, ``bytes`` that it has to move."""

    name: str
    launch: Launch
    flops: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    """``ratio``: median over the rounds of this contender's time over the first one's (below 1: it is faster).
    ``clocks``: before, between and after the rounds that count; none without a GPU."""

    problem: str
    name: str
    time: Timing
    ratio: float
    flops: int
    bytes: int
    clocks: tuple[Clocks, ...]

    def as_row(self) -> dict[str, Any]:
        """For tables and JSON; rates per second."""
        seconds = max(self.time.ns, 1) / 1e9
        return {
            "problem": self.problem,
            "name": self.name,
            "duration_ns": self.time.ns,
            "spread": self.time.spread,
            "samples": self.time.samples,
            "ratio": self.ratio,
            "flops_per_s": self.flops / seconds,
            "bytes_per_s": self.bytes / seconds,
            "clocks": [asdict(clocks) for clocks in self.clocks],
        }


def compare(
    problem: str,
    contenders: Sequence[Contender],
    *,
    device: torch.device,
    samples: int = 20,
    warmup: int = 3,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = 60.0,
) -> tuple[ComparedRow, ...]:
    """Time the contenders; the first is the one that the others are compared with. Collective over ``group``.

    Raises SpecError without contenders or samples, TransportError where one does not finish within ``timeout_s``.
    """
    problems = [] if samples >= 1 else [Problem("samples", samples, "at least 1")]
    if not contenders:
        problems.append(Problem("contenders", [], "at least one"))
    if problems:
        raise SpecError.of(problem, problems)
    reader = ClockReader(device)
    clocks: list[Clocks] = []
    taken: list[list[int]] = [[] for _ in contenders]
    with stopwatch(device, group, timeout_s=timeout_s) as watch:
        for round_ in range(warmup + samples):
            if round_ >= warmup:
                clocks += reader.read()
            for times, contender in zip(taken, contenders, strict=True):
                sample = watch.alone(contender.launch)
                if round_ >= warmup:
                    times.append(sample)
    slowest = [slowest_rank(times, group) for times in taken]
    clocks += reader.read()
    return tuple(
        ComparedRow(
            problem=problem,
            name=contender.name,
            time=Timing.of(times),
            ratio=median(ours / max(first, 1) for ours, first in zip(times, slowest[0], strict=True)),
            flops=contender.flops,
            bytes=contender.bytes,
            clocks=tuple(clocks),
        )
        for contender, times in zip(contenders, slowest, strict=True)
    )
