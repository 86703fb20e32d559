"""The partition written as a mixed-integer linear program.

Variables
    T              the objective: largest edge cost, stage cost or rank memory,
    y[s, c]        1 if stage s holds candidate c,
    z[s, t, c, d]  1 if stage s holds c and stage t holds d, for each two stages that an edge connects,
    u[r]           1 if rank r uses the embedding table.
Constraints
    The y are a unit flow over the positions of the boundaries: what ends at a position as stage s begins there as stage
        s + 1. Written without this, neighbouring stages choose ranges that do not meet, and the bound is far too low.
    z has the y of both its stages as marginals, so only y need be integer. Self-loops use y itself.
    T >= sum of cost * z over the pairs of every edge.
    The memory of every rank, linear in y, is at most the limit (or at most T) at every moment of its order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from tessera_rt.planner.candidates import Candidates, Range
from tessera_rt.planner.edge_costs import EdgeCosts
from tessera_rt.planner.memory import MemoryModel
from tessera_rt.planner.tables import FORBIDDEN, Table

Vector = npt.NDArray[np.float64]

UNITS = 1000.0
"""Typical size of costs after scaling: HiGHS's absolute tolerances (1e-6) are then below one part in 1e8."""


@dataclass(frozen=True, kw_only=True)
class MilpProblem:
    """minimise x[0] with row_lower <= matrix @ x <= row_upper, lower <= x <= upper, x[integer] integer.

    ``columns``: (stage, range) -> index of its y. ``scale``: ns or bytes per unit of x[0].
    """

    matrix: csr_array
    row_lower: Vector
    row_upper: Vector
    lower: Vector
    upper: Vector
    integer: npt.NDArray[np.bool_]
    columns: Mapping[tuple[int, Range], int]
    scale: float


def milp_problem(
    cands: Candidates,
    costs: Sequence[EdgeCosts],
    *,
    memory: MemoryModel | None = None,
    limit: int = 0,
) -> MilpProblem:
    """The program for the least largest cost; without ``costs``, for the least largest rank memory.

    ``memory`` with a ``limit`` (bytes) bounds every rank. Every candidate must have a finite cost on each of its edges
    (``edge_costs.prune``).
    """
    build = _Builder(cands)
    if costs:
        build.add_edges(costs)
        if memory is not None and limit > 0:
            build.add_memory(memory, limit)
    else:
        assert memory is not None, "nothing to minimise"
        build.add_memory(memory, 0)
    return build.problem()


class _Builder:
    """Collects columns and rows. Column 0 is T, then come the y, then the continuous rest."""

    def __init__(self, cands: Candidates) -> None:
        self.cands = cands
        self.first: list[int] = []  # column of each stage's first y
        count = 1
        for own in cands.ranges:
            self.first.append(count)
            count += len(own)
        self.integers = self.count = count
        self.scale = 1.0
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._add_flow()

    def problem(self) -> MilpProblem:
        upper = np.ones(self.count)
        upper[0] = np.inf
        integer = np.zeros(self.count, dtype=bool)
        integer[1 : self.integers] = True
        shape = (len(self._lower), self.count)
        return MilpProblem(
            matrix=csr_array((self._values, (self._rows, self._columns)), shape=shape, dtype=np.float64),
            row_lower=np.array(self._lower),
            row_upper=np.array(self._upper),
            lower=np.zeros(self.count),
            upper=upper,
            integer=integer,
            columns={
                (s, chunk): self.first[s] + i for s, own in enumerate(self.cands.ranges) for i, chunk in enumerate(own)
            },
            scale=self.scale,
        )

    def _row(self, terms: Iterable[tuple[int, float]], lower: float, upper: float) -> None:
        for column, value in terms:
            self._rows.append(len(self._lower))
            self._columns.append(int(column))
            self._values.append(float(value))
        self._lower.append(lower)
        self._upper.append(upper)

    def _stage(self, stage: int) -> range:
        """Columns of a stage's y."""
        return range(self.first[stage], self.first[stage] + len(self.cands.ranges[stage]))

    def _add_flow(self) -> None:
        for s, own in enumerate(self.cands.ranges):
            self._row(((y, 1.0) for y in self._stage(s)), 1.0, 1.0)
            if s == 0:
                continue
            for position in self.cands.positions[s]:
                ends = [
                    (y, 1.0)
                    for y, c in zip(self._stage(s - 1), self.cands.ranges[s - 1], strict=True)
                    if c[1] == position
                ]
                begins = [(y, -1.0) for y, c in zip(self._stage(s), own, strict=True) if c[0] == position]
                self._row(ends + begins, 0.0, 0.0)

    def add_edges(self, costs: Sequence[EdgeCosts]) -> None:
        largest = max((int(t.cost[t.cost < FORBIDDEN].max(initial=0)) for t in costs), default=0)
        self.scale = max(1.0, largest) / UNITS
        between: dict[tuple[int, int], list[Table]] = {}
        for table in costs:
            f, b = table.edge.forward, table.edge.backward
            if f == b:
                terms = zip(self._stage(f), table.cost.diagonal() / self.scale, strict=True)
                self._row([*terms, (0, -1.0)], -np.inf, 0.0)
            else:
                between.setdefault((min(f, b), max(f, b)), []).append(table.cost if f < b else table.cost.T)
        for (s, t), tables in between.items():
            self._add_pairs(s, t, tables)

    def _add_pairs(self, s: int, t: int, tables: Sequence[Table]) -> None:
        """z of two stages, shared by the edges between them. ``tables``: cost[candidate of s, candidate of t] each."""
        allowed = np.all([table < FORBIDDEN for table in tables], axis=0)
        pairs = np.argwhere(allowed)
        z = np.arange(self.count, self.count + len(pairs))
        self.count += len(pairs)
        for side, stage in enumerate((s, t)):
            for i, y in enumerate(self._stage(stage)):
                self._row([*((column, 1.0) for column in z[pairs[:, side] == i]), (y, -1.0)], 0.0, 0.0)
        for table in tables:
            terms = zip(z.tolist(), (table[allowed] / self.scale).tolist(), strict=True)
            self._row([*terms, (0, -1.0)], -np.inf, 0.0)

    def add_memory(self, memory: MemoryModel, limit: int) -> None:
        """Bytes of every rank at every moment <= limit; <= T if ``limit`` is 0."""
        tables: dict[int, Table] = {}
        for s, own in enumerate(self.cands.ranges):
            start, stop = np.array(own, dtype=np.int64).reshape(-1, 2).T
            tables[s] = memory.stage_bytes(s, start, stop)
        if not limit:
            self.scale = max(1.0, *(float(t.max(initial=0)) for t in tables.values())) / UNITS
        unit = limit / UNITS if limit else self.scale
        for rank, states in enumerate(memory.states):
            stages = [s for s, owner in enumerate(memory.template.stage_ranks) if owner == rank]
            table = self._add_table_use(memory, stages) if memory.table_bytes else None
            for moment in range(len(states)):
                terms = [
                    (y, value)
                    for s in stages
                    for y, value in zip(self._stage(s), tables[s][moment] / unit, strict=True)
                    if value
                ]
                if table is not None:
                    terms.append((table, memory.table_bytes / unit))
                self._row([*terms, (0, -1.0)] if not limit else terms, -np.inf, 0.0 if not limit else UNITS)

    def _add_table_use(self, memory: MemoryModel, stages: Sequence[int]) -> int:
        """u of a rank: at least 1 as soon as one of its stages uses the embedding table."""
        u = self.count
        self.count += 1
        for s in stages:
            using = [
                (y, 1.0)
                for y, chunk in zip(self._stage(s), self.cands.ranges[s], strict=True)
                if memory.uses_table(chunk)
            ]
            if using:
                self._row([*using, (u, -1.0)], -np.inf, 0.0)
        return u
