"""Costs of all candidate pairs of every edge, and which candidates no better partition can use.

A known partition gives an upper bound T: pairs that cost more are left out, then candidates without a partner on some
edge, then candidates that no path of boundaries reaches any more, and so on until nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tessera_rt.planner.candidates import Bounds, Candidates
from tessera_rt.planner.overlap_graph import Edge
from tessera_rt.planner.pair_costs import PairCosts
from tessera_rt.planner.tables import FORBIDDEN, Table


@dataclass(frozen=True, slots=True)
class EdgeCosts:
    """``cost[i, j]`` (ns): the edge's forward stage holds its i-th candidate, its backward stage its j-th.

    FORBIDDEN where the pair was left out, and off the diagonal of a self-loop.
    """

    edge: Edge
    cost: Table


def edge_costs(
    cands: Candidates,
    edges: Sequence[Edge],
    pair_costs: PairCosts,
    *,
    at_most: int,
    at_least: int = 0,
    out_of_time: Callable[[], bool] = lambda: False,
) -> tuple[Candidates, tuple[EdgeCosts, ...]] | None:
    """Cost tables of all edges, and the candidates that are left. None once ``out_of_time`` says so.

    ``at_most``: T of a known partition; pairs above it are FORBIDDEN. ``at_least``: a lower bound of every partition's
    T; pairs that cannot exceed it are entered with the most they may cost: that saves costing them and changes no
    maximum.
    """
    tables: list[EdgeCosts] = []
    cands = _short_enough(cands, edges, pair_costs, at_most)
    for edge in edges:
        least, most = pair_costs.limits(edge, cands.ranges[edge.forward], cands.ranges[edge.backward])
        possible = _compatible(cands, edge) & (least <= at_most)
        # Negative: not costed yet.
        tables.append(EdgeCosts(edge, np.where(possible, np.where(most <= at_least, most, -1), FORBIDDEN)))
    cands, tables = prune(cands, tables)
    for table in tables:
        if not _fill(table, cands, pair_costs, at_most, out_of_time):
            return None
    cands, tables = prune(cands, tables)
    return cands, tuple(tables)


def _short_enough(cands: Candidates, edges: Sequence[Edge], pair_costs: PairCosts, at_most: int) -> Candidates:
    """Without ranges that are too long for an edge of their stage whatever the other stage holds."""
    dropped: set[tuple[int, tuple[int, int]]] = set()
    for edge in edges:
        for stage, least in zip((edge.forward, edge.backward), pair_costs.stage_limits(edge), strict=True):
            dropped |= {(stage, chunk) for chunk in cands.ranges[stage] if least[chunk] > at_most}
    return cands.without(dropped) if dropped else cands


def _fill(
    table: EdgeCosts, cands: Candidates, pair_costs: PairCosts, at_most: int, out_of_time: Callable[[], bool]
) -> bool:
    """Enters what is not costed yet (negative), equal pairs once; False when the time is up first."""
    forward, backward = cands.ranges[table.edge.forward], cands.ranges[table.edge.backward]
    rows, columns = np.nonzero(table.cost < 0)
    kinds_f, kinds_b = pair_costs.kinds(forward), pair_costs.kinds(backward)
    kinds = np.stack([kinds_f[rows], kinds_b[columns]], axis=1)
    _, first, which = np.unique(kinds, axis=0, return_index=True, return_inverse=True)
    found = np.empty(len(first), dtype=np.int64)
    for k, place in enumerate(first.tolist()):
        if out_of_time():
            return False
        found[k] = pair_costs.edge(table.edge, forward[rows[place]], backward[columns[place]])
    table.cost[rows, columns] = np.where(found > at_most, FORBIDDEN, found)[which.ravel()]
    return True


def stage_costs(cands: Candidates, cost: Table, *, at_most: int | None = None) -> tuple[EdgeCosts, ...]:
    """The same for costs of single stages: ``cost[p, q]`` is that of a stage with the items p to q - 1."""
    tables: list[EdgeCosts] = []
    for stage, chunks in enumerate(cands.ranges):
        edge = Edge(key=f"{stage}", rank=0, forward=stage, backward=stage, count=1, overlapped=False)
        table = np.full((len(chunks), len(chunks)), FORBIDDEN, dtype=np.int64)
        values = np.array([cost[chunk] for chunk in chunks], dtype=np.int64)
        np.fill_diagonal(table, values)
        if at_most is not None:
            table[table > at_most] = FORBIDDEN
        tables.append(EdgeCosts(edge, table))
    return tuple(tables)


def _compatible(cands: Candidates, edge: Edge) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Which ranges two stages can hold at once: the earlier stage's ends where the later one's begins, or before."""
    forward = np.array(cands.ranges[edge.forward]).reshape(-1, 2)
    backward = np.array(cands.ranges[edge.backward]).reshape(-1, 2)
    if edge.forward == edge.backward:
        return np.eye(len(forward), dtype=bool)
    if edge.forward < edge.backward:
        between = backward[None, :, 0] - forward[:, None, 1]
    else:
        between = forward[:, None, 0] - backward[None, :, 1]
    neighbours = abs(edge.forward - edge.backward) == 1
    return np.asarray(between == 0 if neighbours else between >= 0)


def prune(cands: Candidates, tables: Sequence[EdgeCosts]) -> tuple[Candidates, list[EdgeCosts]]:
    """Drops candidates without a partner on an edge of theirs, until every one left has a partner and a path."""
    while True:
        dropped: set[tuple[int, tuple[int, int]]] = set()
        for table in tables:
            allowed = table.cost < FORBIDDEN
            for stage, alive in ((table.edge.forward, allowed.any(axis=1)), (table.edge.backward, allowed.any(axis=0))):
                dropped |= {(stage, cands.ranges[stage][i]) for i in np.flatnonzero(~alive)}
        left = cands.without(dropped)
        if left == cands:
            return cands, list(tables)
        tables = [_restricted(table, cands, left) for table in tables]
        cands = left


def _restricted(table: EdgeCosts, before: Candidates, after: Candidates) -> EdgeCosts:
    def kept(stage: int) -> list[int]:
        left = set(after.ranges[stage])
        return [i for i, chunk in enumerate(before.ranges[stage]) if chunk in left]

    rows, columns = kept(table.edge.forward), kept(table.edge.backward)
    return EdgeCosts(table.edge, table.cost[np.ix_(rows, columns)])


def largest_cost(edges: Sequence[Edge], pair_costs: PairCosts, bounds: Bounds) -> tuple[int, Edge | None]:
    """T_dom of a partition (ns) and the first edge that costs that much."""
    worst, where = -1, None
    for edge in edges:
        cost = pair_costs.edge(
            edge,
            (bounds[edge.forward], bounds[edge.forward + 1]),
            (bounds[edge.backward], bounds[edge.backward + 1]),
        )
        if cost > worst:
            worst, where = cost, edge
    return max(worst, 0), where
