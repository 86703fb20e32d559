"""How much memory the fullest rank needs at least, whatever the partition.

With one stage a rank a dynamic program gives the exact answer. With several, a rank's memory is a sum over its stages, and
the bound is Lagrange's: for any weights of the moments of all ranks that add up to 1, the weighted sum of their memory is at
most the largest of them. That sum belongs to stages one by one, so the dynamic program minimises it over all
partitions. Multiplicative weights move the weights to the fullest moments; the partitions met on the way are good ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera_rt.planner.candidates import Bounds, shortest_chunk
from tessera_rt.planner.chain_dp import Table, chain_partition, least_sum
from tessera_rt.planner.memory import MemoryModel

ROUNDS = 200


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """``bound``: no partition has a smaller peak (bytes). ``bounds``: the best partition met; ``peak``: its peak."""

    bound: int
    bounds: Bounds
    peak: int


def memory_bound(memory: MemoryModel, *, rounds: int = ROUNDS) -> MemoryBound:
    """Least possible peak of the fullest rank, and a partition near it. Exact with one stage a rank."""
    ranks = memory.template.stage_ranks
    alone = chain_partition(memory.stage_peaks(), len(ranks))
    assert alone is not None, "nothing is forbidden"
    best, bound = alone
    peak = max(memory.peaks(best))
    if len(set(ranks)) == len(ranks):
        return MemoryBound(bound, best, peak)
    tables = _stage_tables(memory)
    shortest = shortest_chunk(memory.items, len(ranks))
    # The first stage holds the embedding unless it may be empty: its rank certainly has the table.
    certain = memory.table_bytes if shortest else 0
    logs = [np.zeros(len(states)) for states in memory.states]
    for round_ in range(rounds):
        total = sum(float(np.exp(log).sum()) for log in logs)
        weights = [np.exp(log) / total for log in logs]
        cost = np.stack([np.tensordot(weights[ranks[s]], table, axes=1) for s, table in enumerate(tables)])
        bounds, value = least_sum(cost, shortest=shortest)
        value += certain * float(weights[ranks[0]].sum())
        bound = max(bound, int(value * (1 - 1e-9)))
        moments = [memory.moments(rank, bounds) for rank in range(memory.ranks)]
        fullest = max(int(m.max()) for m in moments)
        if fullest < peak:
            best, peak = bounds, fullest
        step = 8.0 / (1 + round_) ** 0.5
        logs = [log + step * (m / fullest - 1) for log, m in zip(logs, moments, strict=True)]
    return MemoryBound(min(bound, peak), best, peak)


def _stage_tables(memory: MemoryModel) -> list[Table]:
    """Per stage [moments of its rank, n + 1, n + 1]: bytes with the items p to q - 1."""
    positions = np.arange(memory.items + 1)
    start, stop = np.meshgrid(positions, positions, indexing="ij")
    return [memory.stage_bytes(stage, start, stop) for stage in range(len(memory.template.stage_ranks))]
