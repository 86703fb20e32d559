"""Which item ranges a stage may hold: its boundaries moved around given partitions, or anywhere.

A partition is written as its *bounds*: ``stages + 1`` positions from 0 to the number of items, where stage s holds the
items [bounds[s], bounds[s + 1]).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tessera_rt.errors import PlanError, Problem

Bounds = tuple[int, ...]
Range = tuple[int, int]


def ranges(bounds: Sequence[int]) -> tuple[Range, ...]:
    """The item range of each stage."""
    return tuple(pairwise(bounds))


def shortest_chunk(items: int, stages: int) -> int:
    """Fewest items a planned stage holds: 1, or 0 when there are fewer items than stages."""
    return 0 if items < stages else 1


def check_bounds(bounds: Sequence[int], items: int, stages: int) -> Bounds:
    """The bounds as a tuple. Raises PlanError naming everything that keeps them from being a partition."""
    problems = []
    if len(bounds) != stages + 1:
        problems.append(Problem("bounds", tuple(bounds), f"{stages + 1} positions for {stages} stages"))
    if bounds and (bounds[0] != 0 or bounds[-1] != items):
        problems.append(Problem("bounds", tuple(bounds), f"from 0 to {items}, so that every item is placed"))
    problems += [
        Problem(f"bounds[{i + 1}]", b, f">= {a}", "put the boundaries in order")
        for i, (a, b) in enumerate(pairwise(bounds))
        if b < a
    ]
    if problems:
        raise PlanError.of("partition", problems)
    return tuple(bounds)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Positions each boundary may take (``positions[k]``, increasing) and the ranges each stage may hold.

    Only ranges that some complete partition uses are listed.
    """

    items: int
    positions: tuple[tuple[int, ...], ...]
    ranges: tuple[tuple[Range, ...], ...]

    @property
    def stages(self) -> int:
        return len(self.ranges)

    def allows(self, bounds: Sequence[int]) -> bool:
        """Whether a partition is made of these candidates."""
        return len(bounds) == self.stages + 1 and all(
            chosen in allowed for chosen, allowed in zip(ranges(bounds), self.ranges, strict=True)
        )

    def without(self, dropped: Iterable[tuple[int, Range]]) -> Candidates:
        """The candidates that are left without the given (stage, range)s, and without those that lead nowhere."""
        gone = set(dropped)
        left = [[r for r in allowed if (stage, r) not in gone] for stage, allowed in enumerate(self.ranges)]
        return _connected(self.items, left)


def candidates(items: int, stages: int, centers: Iterable[Sequence[int]] = (), *, window: int | None = 2) -> Candidates:
    """Boundaries at most ``window`` items away from those of one of the ``centers``; ``window`` None: anywhere.

    The centers themselves always stay possible, also where they have empty stages.
    """
    shortest = shortest_chunk(items, stages)
    allowed: list[set[int]] = [{0}, *(set() for _ in range(stages - 1)), {items}]
    chosen = [tuple(center) for center in centers]
    for k in range(1, stages):
        first, last = k * shortest, items - (stages - k) * shortest
        allowed[k] = {center[k] for center in chosen}
        if window is None:
            allowed[k] |= set(range(first, last + 1))
        else:
            for center in chosen:
                allowed[k] |= set(range(max(first, center[k] - window), min(last, center[k] + window) + 1))
    free = [
        [
            (p, q)
            for p in sorted(allowed[s])
            for q in sorted(allowed[s + 1])
            if q - p >= shortest or any((p, q) == center[s : s + 2] for center in chosen)
        ]
        for s in range(stages)
    ]
    return _connected(items, free)


def _connected(items: int, allowed: list[list[Range]]) -> Candidates:
    """Drops ranges that no path from 0 to ``items`` uses."""
    stages = len(allowed)
    reached = [{0}]
    for s in range(stages):
        reached.append({q for p, q in allowed[s] if p in reached[s]})
    leads: list[set[int]] = [set() for _ in range(stages)] + [{items}]
    for s in reversed(range(stages)):
        leads[s] = {p for p, q in allowed[s] if q in leads[s + 1]}
    kept = tuple(tuple((p, q) for p, q in allowed[s] if p in reached[s] and q in leads[s + 1]) for s in range(stages))
    positions = tuple(tuple(sorted(reached[k] & leads[k])) for k in range(stages + 1))
    return Candidates(items, positions, kept)
