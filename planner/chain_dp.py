"""Exact min-max partition of a chain by dynamic programming, for costs that depend on one stage at a time.

That covers every objective of 1F1B (whose only overlap edges are self-loops), serial time and memory with one stage a
rank, and, as the quick mode for interleaved templates, additive costs per item. With several stages a rank, the rank's
load is improved afterwards by local search (``improve``).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tessera_rt.costs import CostTable
from tessera_rt.model_spec import ModelSpec
from tessera_rt.planner.candidates import Bounds, shortest_chunk
from tessera_rt.planner.tables import FORBIDDEN, Table
from tessera_rt.scheduler.graphs import chunk_graph
from tessera_rt.tasks import Pass, Resource


def serial_times(model: ModelSpec, costs: CostTable) -> list[int]:
    """ns of each item's F, B and W tasks one after the other."""
    return [_total(model, costs, i, None) for i in range(len(model.items))]


def quick_times(model: ModelSpec, costs: CostTable) -> list[int]:
    """ns of each item when another micro-batch hides what it can: max(compute, communication).

    An item without communication has nothing to hide and counts in full.
    """
    lanes = (Resource.COMP, Resource.COMM)
    return [max(_total(model, costs, i, lane) for lane in lanes) for i in range(len(model.items))]


def _total(model: ModelSpec, costs: CostTable, item: int, lane: Resource | None) -> int:
    return sum(chunk_graph(model, costs, item, item + 1, pass_).total_ns(lane) for pass_ in (Pass.F, Pass.B))


def chain_partition(cost: Table, stages: int, *, shortest: int | None = None) -> tuple[Bounds, int] | None:
    """Bounds with the least maximal cost, among those the least sum of squared costs, and that maximum.

    ``cost``: [n + 1, n + 1] for all stages alike or [stages, n + 1, n + 1]; entry [p, q] is what the items p to q - 1
    cost in one stage, FORBIDDEN if a stage may not hold them. ``shortest``: fewest items a stage holds (default: 1, or
    0 if there are fewer items than stages). None if every partition is forbidden.
    """
    n = cost.shape[-1] - 1
    shortest = shortest_chunk(n, stages) if shortest is None else shortest
    table = np.where(_too_short(n, shortest), FORBIDDEN, np.broadcast_to(cost, (stages, n + 1, n + 1)))
    best = np.full(n + 1, FORBIDDEN, dtype=np.int64)
    best[0] = 0
    for s in range(stages):
        best = np.maximum(best[:, None], table[s]).min(axis=0)
    bottleneck = int(best[n])
    if bottleneck >= FORBIDDEN:
        return None
    scale = 1 / max(bottleneck, 1)
    squares = np.where(table <= bottleneck, (table * scale) ** 2, np.inf)
    total = np.full(n + 1, np.inf)
    total[0] = 0.0
    came_from = np.zeros((stages, n + 1), dtype=np.int64)
    for s in range(stages):
        sums = total[:, None] + squares[s]
        came_from[s] = sums.argmin(axis=0)
        total = sums.min(axis=0)
    return _traced(came_from), bottleneck


def least_sum(cost: npt.NDArray[np.float64], *, shortest: int) -> tuple[Bounds, float]:
    """Bounds with the least sum of costs, and that sum. ``cost``: [stages, n + 1, n + 1], finite."""
    stages, n = cost.shape[0], cost.shape[-1] - 1
    table = np.where(_too_short(n, shortest), np.inf, cost)
    total = np.full(n + 1, np.inf)
    total[0] = 0.0
    came_from = np.zeros((stages, n + 1), dtype=np.int64)
    for s in range(stages):
        sums = total[:, None] + table[s]
        came_from[s] = sums.argmin(axis=0)
        total = sums.min(axis=0)
    return _traced(came_from), float(total[n])


def _too_short(n: int, shortest: int) -> npt.NDArray[np.bool_]:
    """[n + 1, n + 1]: ranges [p, q) of fewer items."""
    return np.asarray(~np.tri(n + 1, k=-shortest, dtype=bool).T)


def _traced(came_from: npt.NDArray[np.int64]) -> Bounds:
    """Bounds from the start positions that led to each end position, stage by stage."""
    bounds = [came_from.shape[1] - 1]
    for row in came_from[::-1]:
        bounds.append(int(row[bounds[-1]]))
    return tuple(reversed(bounds))


Key = tuple[float, ...]


def improve(
    bounds: Bounds,
    key: Callable[[Bounds], Key],
    *,
    shortest: int,
    evaluations: int,
    out_of_time: Callable[[], bool] = lambda: False,
) -> Bounds:
    """Local search: moves one boundary, or a run of neighbouring ones, by one item while ``key`` falls.

    Moving a run carries an item over from one stage to another while all stages between keep their sizes. Stops at a
    local optimum or after so many evaluations of ``key`` (a count, so that results can be repeated), at the latest when
    it is ``out_of_time``.
    """
    best = key(bounds)
    left = evaluations
    improved = True
    while improved:
        improved = False
        for length in range(1, len(bounds) - 1):
            for first in range(1, len(bounds) - length):
                for step in (-1, 1):
                    moved = _shifted(bounds, first, length, step, shortest)
                    if moved is None:
                        continue
                    if left <= 0 or out_of_time():
                        return bounds
                    left -= 1
                    value = key(moved)
                    if value < best:
                        bounds, best, improved = moved, value, True
    return bounds


def _shifted(bounds: Bounds, first: int, length: int, step: int, shortest: int) -> Bounds | None:
    last = first + length - 1
    before, after = bounds[first] - bounds[first - 1] + step, bounds[last + 1] - bounds[last] - step
    # A partition that already has shorter stages keeps them, but none gets shorter.
    if (step < 0 and before < shortest) or (step > 0 and after < shortest):
        return None
    return (*bounds[:first], *(b + step for b in bounds[first : last + 1]), *bounds[last + 1 :])
