"""Min-max partition by threshold search: binary search over the distinct costs, each test a constraint problem.

Whether any partition has all its costs at or below T is a problem of binary constraints (neighbouring stages meet,
pairs cost at most T) and of bytes per rank, solved by ``csp_kernel.py``. Milliseconds where the integer program takes
seconds; only limits of memory that can hardly be kept make its search long. Then, after ``NODES`` nodes, the integer
program (``partition_milp.py``) looks at what is left between the proven bound and the best partition found.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tessera_rt.errors import PartitionInfeasible, Problem
from tessera_rt.planner.candidates import Bounds, Candidates, ranges
from tessera_rt.planner.csp_kernel import SATISFIED, UNDECIDED, UNSATISFIABLE, allow, solve
from tessera_rt.planner.edge_costs import EdgeCosts
from tessera_rt.planner.memory import MemoryModel
from tessera_rt.planner.memory_bound import memory_bound
from tessera_rt.planner.partition_milp import MinMax, Solver, partition_milp, scipy_solver
from tessera_rt.planner.tables import FORBIDDEN, Table

NODES = 20_000
"""Nodes of one test: under a second. Without memory limits, tests of released models need fewer than a thousand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """Outcome of the tests alone. ``bounds``: the best partition found, its largest cost ``value``; None if none was.

    No partition of the candidates has less than ``bound``. ``proven``: it has exactly that, or there is no partition.
    ``tests`` and ``nodes``: what it took.
    """

    bounds: Bounds | None
    value: int
    bound: int
    proven: bool
    tests: int
    nodes: int


def partition_threshold(
    cands: Candidates,
    costs: Sequence[EdgeCosts],
    *,
    memory: MemoryModel | None = None,
    limit: int = 0,
    known: Bounds | None = None,
    at_least: int = 0,
    time_limit_s: float = 60.0,
    solver: Solver = scipy_solver,
    node_limit: int = NODES,
) -> MinMax | None:
    """The partition among the candidates with the least largest cost.

    ``limit``: bytes per rank, 0 for none. ``known``: a partition of the candidates that keeps it. ``at_least``: no
    partition costs less. Where the tests do not decide, ``solver`` has the rest of ``time_limit_s``. None if the time
    is up and no partition is known. Raises PartitionInfeasible if no partition keeps the limit, and what
    ``partition_milp`` raises for a wrong answer of the solver.
    """
    began = time.monotonic()
    if not all(cands.ranges):
        raise PartitionInfeasible("no partition of the candidates is left")
    if memory is not None and limit and known is None:
        least = memory_bound(memory).bound
        if least > limit:
            problem = Problem("memory of the fullest rank", f"{least} bytes at least", f"at most {limit} bytes")
            raise PartitionInfeasible.of("partition", [problem])
    found = threshold_search(
        cands, costs, memory=memory, limit=limit, known=known, at_least=at_least, node_limit=node_limit
    )
    if found.proven and found.bounds is None:
        raise PartitionInfeasible("no partition of the candidates keeps the memory limit")
    if found.proven and found.bounds is not None:
        return MinMax(bounds=found.bounds, value=found.value, bound=found.value, status="optimal", method="threshold")
    left = time_limit_s - (time.monotonic() - began)
    solved = None
    if left > 0:
        solved = partition_milp(cands, costs, memory=memory, limit=limit, time_limit_s=left, solver=solver)
    if solved is not None and (found.bounds is None or solved.value < found.value or solved.status == "optimal"):
        bound = max(found.bound, solved.bound)
        return MinMax(
            bounds=solved.bounds,
            value=solved.value,
            bound=min(bound, solved.value),
            status="optimal" if bound >= solved.value else solved.status,
            method="threshold and milp",
        )
    if found.bounds is None:
        return None
    bound = min(found.value, max(found.bound, solved.bound if solved is not None else 0))
    return MinMax(
        bounds=found.bounds,
        value=found.value,
        bound=bound,
        status="optimal" if bound == found.value else "incumbent",
        method="threshold" if solved is None else "threshold and milp",
    )


def threshold_search(
    cands: Candidates,
    costs: Sequence[EdgeCosts],
    *,
    memory: MemoryModel | None = None,
    limit: int = 0,
    known: Bounds | None = None,
    at_least: int = 0,
    node_limit: int = NODES,
) -> Threshold:
    """The tests alone, each of at most ``node_limit`` nodes."""
    problem = _Problem.of(cands, costs, memory if limit else None, limit)
    best, value = known, FORBIDDEN - 1
    if known is not None:
        value = problem.value(known)
    thresholds = problem.thresholds(at_least, value)
    low, high = 0, len(thresholds) - 1  # the least threshold that can be met is one of [low, high]
    tests = nodes = 0
    decided = True
    first = known is None  # whether anything can be met at all is not known yet
    while low < high or first:
        middle = high if first else (low + high) // 2
        answer, spent, bounds = problem.test(int(thresholds[middle]), node_limit)
        tests, nodes = tests + 1, nodes + spent
        if answer == UNSATISFIABLE:
            if first:
                return Threshold(bounds=None, value=0, bound=0, proven=True, tests=tests, nodes=nodes)
            low = middle + 1
        elif answer == SATISFIED:
            assert bounds is not None
            best, value = bounds, problem.value(bounds)
            high = min(middle, int(np.searchsorted(thresholds, value)))
        else:
            assert answer == UNDECIDED
            decided = False
            break
        first = False
    bound = int(thresholds[low]) if len(thresholds) else at_least
    return Threshold(
        bounds=best,
        value=value if best is not None else 0,
        bound=bound if not decided else value,
        proven=decided,
        tests=tests,
        nodes=nodes,
    )


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """The arrays that the kernel works on, and what they were made from."""

    cands: Candidates
    pairs: Table
    costs: Table
    offsets: Table
    sizes: Table
    unary: tuple[Table, ...]
    memory: MemoryModel | None
    limit: int
    arrays: dict[str, npt.NDArray[np.generic]]

    @classmethod
    def of(cls, cands: Candidates, costs: Sequence[EdgeCosts], memory: MemoryModel | None, limit: int) -> _Problem:
        unary = [np.zeros(len(own), dtype=np.int64) for own in cands.ranges]
        between: dict[tuple[int, int], Table] = {}
        for s in range(cands.stages - 1):
            stops = np.array([stop for _, stop in cands.ranges[s]])
            starts = np.array([start for start, _ in cands.ranges[s + 1]])
            between[s, s + 1] = np.where(stops[:, None] == starts[None, :], 0, FORBIDDEN)
        for table in costs:
            f, b = table.edge.forward, table.edge.backward
            if f == b:
                unary[f] = np.maximum(unary[f], table.cost.diagonal())
                continue
            cost, key = (table.cost, (f, b)) if f < b else (table.cost.T, (b, f))
            between[key] = np.maximum(between[key], cost) if key in between else cost
        pairs = np.array(list(between), dtype=np.int64).reshape(-1, 2)
        lengths = [matrix.size for matrix in between.values()]
        of_stage = [[c for c, pair in enumerate(between) if s in pair] for s in range(cands.stages)]
        arrays: dict[str, npt.NDArray[np.generic]] = {
            "of_stage": np.array([c for own in of_stage for c in own], dtype=np.int64),
            "of_first": np.cumsum([0, *map(len, of_stage)]),
            "weights": np.ones(len(between)),
        }
        arrays |= _memory_arrays(cands, memory)
        return cls(
            cands=cands,
            pairs=pairs,
            costs=np.concatenate([np.zeros(0, np.int64), *(matrix.ravel() for matrix in between.values())]),
            offsets=np.cumsum([0, *lengths])[:-1],
            sizes=np.array([len(own) for own in cands.ranges], dtype=np.int64),
            unary=tuple(unary),
            memory=memory,
            limit=limit,
            arrays=arrays,
        )

    def thresholds(self, at_least: int, at_most: int) -> Table:
        """Distinct costs within [at_least, at_most], rising; the first stands for everything below, too."""
        every = np.unique(np.concatenate([self.costs, *self.unary]))
        inside = every[(every >= at_least) & (every <= at_most)]
        return inside if len(inside) else np.array([max(at_least, 0)], dtype=np.int64)

    def value(self, bounds: Bounds) -> int:
        """Largest cost of a partition of the candidates."""
        chosen = [own.index(r) for own, r in zip(self.cands.ranges, ranges(bounds), strict=True)]
        worst = max((int(own[i]) for own, i in zip(self.unary, chosen, strict=True)), default=0)
        for (s, t), offset in zip(self.pairs.tolist(), self.offsets.tolist(), strict=True):
            worst = max(worst, int(self.costs[offset + chosen[s] * int(self.sizes[t]) + chosen[t]]))
        return worst

    def test(self, at_most: int, node_limit: int) -> tuple[int, int, Bounds | None]:
        """(answer, nodes, a partition with all costs at most ``at_most`` if there is one)."""
        widest = int(self.sizes.max())
        words = (widest + 63) // 64
        start = np.zeros((self.cands.stages, words), dtype=np.uint64)
        for s, own in enumerate(self.unary):
            bits = np.zeros(64 * words, dtype=np.uint8)
            bits[: len(own)] = own <= at_most
            start[s] = np.packbits(bits, bitorder="little").view(np.uint64)
        forward = np.empty((len(self.pairs), widest, words), dtype=np.uint64)
        backward = np.empty_like(forward)
        allow(self.pairs, self.costs, self.offsets, self.sizes, words, at_most, forward, backward)
        chosen = np.zeros(self.cands.stages, dtype=np.int64)
        a = self.arrays
        answer, nodes = solve(
            start,
            self.pairs,
            a["of_stage"],
            a["of_first"],
            forward,
            backward,
            a["weights"],
            a["rank_weights"],
            a["rank_of"],
            a["stage_first"],
            a["stage_of"],
            self.memory.table_bytes if self.memory is not None else 0,
            self.limit if self.memory is not None else 0,
            a["moments"],
            a["bytes_of"],
            a["bytes_first"],
            a["uses"],
            node_limit,
            chosen,
        )
        if answer != SATISFIED:
            return int(answer), int(nodes), None
        held = [own[i] for own, i in zip(self.cands.ranges, chosen.tolist(), strict=True)]
        bounds = (0, *(stop for _, stop in held))
        assert ranges(bounds) == tuple(held), "neighbouring stages meet"
        assert self.memory is None or max(self.memory.peaks(bounds)) <= self.limit, "every rank keeps its limit"
        return int(answer), int(nodes), bounds


def _memory_arrays(cands: Candidates, memory: MemoryModel | None) -> dict[str, npt.NDArray[np.generic]]:
    """Bytes of every range at every moment of its rank, as the kernel wants them; without a limit nothing."""
    widest = max(len(own) for own in cands.ranges)
    uses = np.zeros((cands.stages, widest), dtype=np.bool_)
    if memory is None:
        none = np.zeros(0, dtype=np.int64)
        return {
            "rank_weights": np.zeros(1),
            "rank_of": np.zeros(cands.stages, dtype=np.int64),
            "stage_first": np.zeros(2, dtype=np.int64),
            "stage_of": none,
            "moments": none,
            "bytes_of": none,
            "bytes_first": none,
            "uses": uses,
        }
    ranks = memory.template.stage_ranks
    tables = []
    for s, own in enumerate(cands.ranges):
        start, stop = np.array(own, dtype=np.int64).reshape(-1, 2).T
        tables.append(np.ascontiguousarray(memory.stage_bytes(s, start, stop).T))  # [values, moments]
        uses[s, : len(own)] = [memory.uses_table(chunk) for chunk in own]
    on = [[s for s, owner in enumerate(ranks) if owner == rank] for rank in range(memory.ranks)]
    return {
        "rank_weights": np.zeros(memory.ranks),
        "rank_of": np.array(ranks, dtype=np.int64),
        "stage_first": np.cumsum([0, *map(len, on)]),
        "stage_of": np.array([s for stages in on for s in stages], dtype=np.int64),
        "moments": np.array([len(states) for states in memory.states], dtype=np.int64),
        "bytes_of": np.concatenate([table.ravel() for table in tables]),
        "bytes_first": np.cumsum([0, *(table.size for table in tables)])[:-1],
        "uses": uses,
    }
