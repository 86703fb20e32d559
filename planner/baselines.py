"""Partitions a plan is compared with: equal layers, balanced parameters, balanced serial time, balanced memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tessera_rt.costs import CostTable
from tessera_rt.model_spec import ItemKind, ModelSpec
from tessera_rt.planner.candidates import Bounds, shortest_chunk
from tessera_rt.planner.chain_dp import chain_partition, improve, serial_times
from tessera_rt.planner.memory import MemoryModel
from tessera_rt.planner.tables import FORBIDDEN, Table, range_sums

SEARCH_EVALUATIONS = 20_000
"""Limit of the local searches over ranks' loads: some tenths of a second."""


def equal_layers(model: ModelSpec, stages: int) -> Bounds:
    """Decoder layers spread as evenly as possible; embedding with the first, MTP blocks and head with the last.

    With fewer layers than stages the items themselves are spread, so that no stage is empty if there are enough.
    """
    items = model.items
    layers = sum(item.kind is ItemKind.LAYER for item in items)
    first = next((i for i, item in enumerate(items) if item.kind is ItemKind.LAYER), 0)
    if layers < stages:
        return tuple(k * len(items) // stages for k in range(stages + 1))
    return (0, *(first + k * layers // stages for k in range(1, stages)), len(items))


def parameter_balanced(model: ModelSpec, costs: CostTable, stages: int) -> Bounds:
    """Least bytes of weights on the fullest stage."""
    return _unlimited(range_sums([costs.memory[item.label].weights for item in model.items]), stages)


def serial_balanced(
    model: ModelSpec,
    costs: CostTable,
    stage_ranks: Sequence[int],
    memory: MemoryModel | None = None,
    limit: int = 0,
) -> Bounds | None:
    """Least time (all tasks one after the other) of the slowest stage, then of the busiest rank, then sum of squares.

    With a ``limit`` (bytes per rank) only partitions that keep it count; None if none was found. One stage a rank:
    exact. Several: the slowest stage is exact unless the limit binds, the rest is found by local search.
    """
    return balanced(range_sums(serial_times(model, costs)), stage_ranks, memory, limit)


def memory_balanced(stage_ranks: Sequence[int], memory: MemoryModel) -> Bounds:
    """Least peak bytes on the fullest rank. One stage a rank: exact; several: by local search from balanced stages."""
    table = memory.stage_peaks()
    found = chain_partition(table, len(stage_ranks))
    assert found is not None, "without a limit every partition is allowed"
    bounds, _ = found
    if _one_stage_a_rank(stage_ranks):
        return bounds

    def key(moved: Bounds) -> tuple[float, ...]:
        peaks = memory.peaks(moved)
        return (max(peaks), sum(peak**2 for peak in peaks))

    return improve(bounds, key, shortest=_shortest(table, stage_ranks), evaluations=SEARCH_EVALUATIONS)


def balanced(
    cost: Table, stage_ranks: Sequence[int], memory: MemoryModel | None = None, limit: int = 0
) -> Bounds | None:
    """Least cost of the costliest stage, then rank, then sum of squares; see ``serial_balanced``.

    ``cost``: [n + 1, n + 1] for all stages alike, or [stages, n + 1, n + 1].
    """
    stages = len(stage_ranks)
    limited = memory is not None and limit > 0
    table = cost
    if memory is not None and limited:
        # A stage that breaks the limit by itself can be in no partition.
        table = np.where(memory.stage_peaks() > limit, FORBIDDEN, cost)
    found = chain_partition(table, stages)
    if found is None:
        return None
    bounds, _ = found
    if _one_stage_a_rank(stage_ranks):
        return bounds
    load = load_key(cost, stage_ranks)
    excess = _excess(memory, limit) if memory is not None and limited else _nothing

    def key(moved: Bounds) -> tuple[float, ...]:
        return (excess(moved), *load(moved))

    shortest = _shortest(cost, stage_ranks)
    if excess(bounds):  # first reach the limit at all; an improving path to it may make loads worse
        bounds = improve(bounds, lambda moved: (excess(moved),), shortest=shortest, evaluations=SEARCH_EVALUATIONS)
    bounds = improve(bounds, key, shortest=shortest, evaluations=SEARCH_EVALUATIONS)
    return None if excess(bounds) else bounds


def load_key(cost: Table, stage_ranks: Sequence[int]) -> Callable[[Bounds], tuple[float, float, float]]:
    """Function of bounds: (costliest stage, costliest rank, sum of squares); ``cost`` as in ``balanced``."""
    ranks = np.asarray(stage_ranks)
    table = np.broadcast_to(cost, (len(ranks), *cost.shape[-2:]))
    every = np.arange(len(ranks))

    def key(bounds: Bounds) -> tuple[float, float, float]:
        positions = np.asarray(bounds)
        stage = table[every, positions[:-1], positions[1:]].astype(np.float64)
        return float(stage.max()), float(np.bincount(ranks, weights=stage).max()), float((stage**2).sum())

    return key


def _excess(memory: MemoryModel, limit: int) -> Callable[[Bounds], float]:
    return lambda bounds: float(sum(max(0, peak - limit) for peak in memory.peaks(bounds)))


def _nothing(bounds: Bounds) -> float:
    return 0.0


def _unlimited(cost: Table, stages: int) -> Bounds:
    found = chain_partition(cost, stages)
    assert found is not None, "without a limit every partition is allowed"
    return found[0]


def _one_stage_a_rank(stage_ranks: Sequence[int]) -> bool:
    return len(set(stage_ranks)) == len(stage_ranks)


def _shortest(cost: Table, stage_ranks: Sequence[int]) -> int:
    return shortest_chunk(cost.shape[-1] - 1, len(stage_ranks))
