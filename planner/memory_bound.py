"""How much memory the fullest rank needs at least, whatever the partition.

With one stage a rank a dynamic program gives the exact answer. With several, a rank's memory at one moment is a sum
over its stages. For any weights of the moments of all ranks that add up to 1, the weighted sum of their memory is at
most the largest of them; it belongs to the stages one by one, so a dynamic program finds its least value over all
partitions: a lower bound (Lagrange). A small linear program over the partitions met so far gives the weights to try
next (column generation, Dantzig and Wolfe 1960), until the bound no longer rises.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from tessera_rt.planner.candidates import Bounds, shortest_chunk
from tessera_rt.planner.chain_dp import chain_partition, least_sum
from tessera_rt.planner.memory import MemoryModel
from tessera_rt.planner.tables import Table

ROUNDS = 60
CLOSE = 1e-3
"""The bound is good enough when the linear program is not further away than this (relative)."""


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """``bound``: no partition has a smaller peak (bytes). ``bounds``: the best partition met; ``peak``: its peak."""

    bound: int
    bounds: Bounds
    peak: int


def memory_bound(memory: MemoryModel) -> MemoryBound:
    """Least possible peak of the fullest rank, and the best partition met. Exact with one stage a rank."""
    ranks = memory.template.stage_ranks
    alone = chain_partition(memory.stage_peaks(), len(ranks))
    assert alone is not None, "nothing is forbidden"
    best, bound = alone
    peak = max(memory.peaks(best))
    if len(set(ranks)) == len(ranks) or peak == 0:
        return MemoryBound(min(bound, peak), best, peak)
    tables = _stage_tables(memory)
    shortest = shortest_chunk(memory.items, len(ranks))
    # The first stage holds the embedding unless it may be empty: its rank certainly has the table.
    certain = memory.table_bytes if shortest else 0
    cuts = np.cumsum([len(states) for states in memory.states])[:-1]
    met = [_usage(memory, best)]
    for _ in range(ROUNDS):
        scale = peak
        weights, value = _weights(np.array(met) / scale)
        by_rank = np.split(weights, cuts)
        cost = np.stack([np.tensordot(by_rank[ranks[s]], table, axes=1) for s, table in enumerate(tables)])
        bounds, least = least_sum(cost, shortest=shortest)
        bound = max(bound, int((least + certain * by_rank[ranks[0]].sum()) * (1 - 1e-9)))
        met.append(_usage(memory, bounds))
        if met[-1].max() < peak:
            best, peak = bounds, int(met[-1].max())
        if bound >= value * scale * (1 - CLOSE):
            break
    return MemoryBound(min(bound, peak), best, peak)


def _usage(memory: MemoryModel, bounds: Bounds) -> Table:
    """[moments of all ranks]: bytes."""
    return np.concatenate([memory.moments(rank, bounds) for rank in range(memory.ranks)])


def _weights(usage: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], float]:
    """Weights of the moments that make the least weighted usage among the partitions met largest, and that usage."""
    partitions, moments = usage.shape
    result = linprog(
        np.r_[np.zeros(moments), -1.0],
        A_ub=np.c_[-usage, np.ones(partitions)],
        b_ub=np.zeros(partitions),
        A_eq=np.r_[np.ones(moments), 0.0][None],
        b_eq=[1.0],
        bounds=(0, None),
        method="highs",
    )
    assert result.x is not None and result.fun is not None, f"a bounded, feasible program: {result.message}"
    weights = np.maximum(result.x[:-1], 0.0)
    return weights / weights.sum(), -float(result.fun)


def _stage_tables(memory: MemoryModel) -> list[Table]:
    """Per stage [moments of its rank, n + 1, n + 1]: bytes with the items p to q - 1."""
    positions = np.arange(memory.items + 1)
    start, stop = np.meshgrid(positions, positions, indexing="ij")
    return [memory.stage_bytes(stage, start, stop) for stage in range(len(memory.template.stage_ranks))]
