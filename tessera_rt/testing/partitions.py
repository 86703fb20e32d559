"""All partitions of a few items, to compare planning algorithms with brute force."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement, pairwise


def all_bounds(items: int, stages: int, *, shortest: int | None = None) -> list[tuple[int, ...]]:
    """Every partition whose stages hold at least ``shortest`` items (default: 1, or 0 with fewer items than stages)."""
    least = (0 if items < stages else 1) if shortest is None else shortest
    return [bounds for bounds in _cuts(items, stages) if all(b - a >= least for a, b in pairwise(bounds))]


def _cuts(items: int, stages: int) -> Iterator[tuple[int, ...]]:
    return ((0, *inner, items) for inner in combinations_with_replacement(range(items + 1), stages - 1))
