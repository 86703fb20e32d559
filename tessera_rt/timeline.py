"""Timeline: who did what when, planned or executed, and how a step's time splits.

The simulator, the emulated device and the real engine all produce this word, so one drawing module and one accounting
serve them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from tessera_rt.tasks import Pass, Resource


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One task (or ``LINK`` transfer) of one rank: [start_ns, end_ns) from the start of the step."""

    rank: int  # pipeline rank
    lane: str  # COMP | COMM | LINK
    name: str  # task name, or SEND_F / SEND_B for a transfer
    stage: int
    microbatch: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSplit:
    """One rank's step time: step = compute + exposed + bubble; bubble = warmup + imbalance + cooldown (ns).

    ``exposed``: compute idle while a collective of this rank runs. Bubble: all other idle time. Warm-up is before the
    rank's first backward, cool-down after its last forward, imbalance between.
    """

    compute_ns: int
    exposed_ns: int
    warmup_ns: int
    imbalance_ns: int
    cooldown_ns: int

    @property
    def bubble_ns(self) -> int:
        return self.warmup_ns + self.imbalance_ns + self.cooldown_ns


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All spans of one step. ``source``: simulated | emulated | measured; ``label`` is for people."""

    label: str
    source: str
    ranks: int
    spans: tuple[Span, ...]

    @cached_property
    def step_ns(self) -> int:
        """End of the last task (transfers included)."""
        return max((span.end_ns for span in self.spans), default=0)

    def of(self, rank: int, lane: str | None = None) -> tuple[Span, ...]:
        """Spans of one rank (and lane) by start time."""
        chosen = (s for s in self.spans if s.rank == rank and (lane is None or s.lane == lane))
        return tuple(sorted(chosen, key=lambda s: (s.start_ns, s.end_ns)))

    def split(self, rank: int) -> StepSplit:
        """How the step's time divides on one rank."""
        compute = self.of(rank, Resource.COMP)
        busy = _union((s.start_ns, s.end_ns) for s in compute)
        active = _union((s.start_ns, s.end_ns) for s in (*compute, *self.of(rank, Resource.COMM)))
        exposed = _length(active) - _length(busy)
        idle = _complement(active, self.step_ns)
        first_backward = min((s.start_ns for s in compute if s.name[0] == Pass.B), default=self.step_ns)
        last_forward = max((s.end_ns for s in compute if s.name[0] == Pass.F), default=0)
        edges = (0, first_backward, max(first_backward, last_forward), self.step_ns)
        bubbles = [_length(_clip(idle, start, end)) for start, end in pairwise(edges)]
        return StepSplit(
            compute_ns=_length(busy),
            exposed_ns=exposed,
            warmup_ns=bubbles[0],
            imbalance_ns=bubbles[1],
            cooldown_ns=bubbles[2],
        )

    def mean_split(self) -> StepSplit:
        """Mean over ranks of every part, rounded to ns."""
        splits = [self.split(rank) for rank in range(self.ranks)]

        def mean(name: str) -> int:
            return round(sum(int(getattr(s, name)) for s in splits) / len(splits))

        return StepSplit(
            compute_ns=mean("compute_ns"),
            exposed_ns=mean("exposed_ns"),
            warmup_ns=mean("warmup_ns"),
            imbalance_ns=mean("imbalance_ns"),
            cooldown_ns=mean("cooldown_ns"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySeries:
    """Bytes on one rank over a step: ``bytes[i]`` from ``starts_ns[i]`` on, by named part (weights, gradients, ...)."""

    rank: int
    starts_ns: tuple[int, ...]
    parts: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def bytes(self) -> tuple[int, ...]:
        """All parts together."""
        return tuple(map(sum, zip(*(values for _, values in self.parts), strict=True)))

    @property
    def peak_bytes(self) -> int:
        return max(self.bytes, default=0)


Interval = tuple[int, int]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _complement(intervals: list[Interval], end: int) -> list[Interval]:
    edges = [0, *(x for interval in intervals for x in interval), end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]


def _clip(intervals: list[Interval], start: int, end: int) -> list[Interval]:
    return [(max(a, start), min(b, end)) for a, b in intervals if max(a, start) < min(b, end)]


def _length(intervals: list[Interval]) -> int:
    return sum(b - a for a, b in intervals)
