"""Min-max partition by ``scipy.optimize.milp`` (HiGHS); the program itself is in ``milp_problem.py``.

A solver's answer is never trusted: it is rounded, decoded and checked against every constraint it should satisfy, and
its value is computed anew from the partition in integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.optimize import Bounds as VariableBounds
from scipy.optimize import LinearConstraint, milp

from tessera_rt.errors import PartitionInfeasible, PlanError, Problem
from tessera_rt.planner.candidates import Bounds, Candidates, Range
from tessera_rt.planner.edge_costs import EdgeCosts
from tessera_rt.planner.memory import MemoryModel
from tessera_rt.planner.milp_problem import MilpProblem, Vector, milp_problem

TOLERANCE = 1e-5
"""How far a solver's point may be from integers, bounds and, relative to a row's largest terms, rows."""


@dataclass(frozen=True, kw_only=True)
class MilpAnswer:
    """``x``: the best point found, or None. ``status``: optimal | limit | infeasible | failed.

    ``bound``: proven lower bound of x[0], or None. ``message``: the solver's own words.
    """

    x: Vector | None
    status: str
    bound: float | None = None
    message: str = ""


Solver = Callable[[MilpProblem, float], MilpAnswer]
"""Function of the problem and a time limit in seconds."""


def scipy_solver(problem: MilpProblem, time_limit_s: float) -> MilpAnswer:
    """``scipy.optimize.milp`` (HiGHS), asked for a proven optimum."""
    objective = np.zeros(len(problem.lower))
    objective[0] = 1.0
    result = milp(
        objective,
        integrality=problem.integer.astype(np.int64),
        bounds=VariableBounds(problem.lower, problem.upper),
        constraints=LinearConstraint(problem.matrix, problem.row_lower, problem.row_upper),
        options={"time_limit": max(time_limit_s, 0.0), "mip_rel_gap": 0.0},
    )
    bound = getattr(result, "mip_dual_bound", None)
    return MilpAnswer(
        x=None if result.x is None else np.asarray(result.x, dtype=np.float64),
        status={0: "optimal", 1: "limit", 2: "infeasible"}.get(int(result.status), "failed"),
        bound=float(bound) if bound is not None and np.isfinite(bound) else None,
        message=str(result.message),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MinMax:
    """``value``: largest cost (ns) or memory (bytes) of the partition; none of the candidates' is below ``bound``.

    ``status``: optimal | incumbent (a limit came first). ``method``: what found and proved it.
    """

    bounds: Bounds
    value: int
    bound: int
    status: str
    method: str = "milp"


def partition_milp(
    cands: Candidates,
    costs: Sequence[EdgeCosts],
    *,
    memory: MemoryModel | None = None,
    limit: int = 0,
    time_limit_s: float = 60.0,
    solver: Solver = scipy_solver,
) -> MinMax | None:
    """The partition among the candidates with the least largest cost, or without ``costs`` the least largest memory.

    ``limit``: bytes per rank, 0 for none. None if the time is up before the solver has found anything. Raises
    PartitionInfeasible if no partition keeps the limit or the solver's answer breaks it, PlanError if the answer is no
    partition or breaks another constraint.
    """
    if not all(cands.ranges):
        raise PartitionInfeasible("no partition of the candidates is left")
    problem = milp_problem(cands, costs, memory=memory, limit=limit)
    answer = solver(problem, time_limit_s)
    if answer.status == "infeasible":
        raise PartitionInfeasible("no partition of the candidates keeps the memory limit")
    if answer.x is None:
        if answer.status == "limit":
            return None
        raise PlanError(f"the partition solver failed: {answer.message}")
    bounds = _decode(cands, problem, answer.x)
    if memory is not None and limit > 0:
        _check_memory(memory, bounds, limit)
    _check_rows(problem, answer.x)
    value = max((_cost(cands, table, bounds) for table in costs), default=0)
    if not costs and memory is not None:
        value = max(memory.peaks(bounds))
    if answer.status == "optimal":
        return MinMax(bounds=bounds, value=value, bound=value, status="optimal")
    proven = 0 if answer.bound is None else int(answer.bound * problem.scale * (1 - 1e-8))  # a float, so a little less
    return MinMax(bounds=bounds, value=value, bound=max(0, min(value, proven)), status="incumbent")


def _cost(cands: Candidates, table: EdgeCosts, bounds: Bounds) -> int:
    f, b = table.edge.forward, table.edge.backward
    i = cands.ranges[f].index((bounds[f], bounds[f + 1]))
    j = cands.ranges[b].index((bounds[b], bounds[b + 1]))
    return int(table.cost[i, j])


def _decode(cands: Candidates, problem: MilpProblem, x: Vector) -> Bounds:
    """The partition a point stands for. Raises PlanError naming all stages and items not placed exactly once."""
    problems: list[Problem] = []
    chosen: list[Range] = []
    for s, own in enumerate(cands.ranges):
        values = {chunk: float(x[problem.columns[s, chunk]]) for chunk in own}
        problems += [
            Problem(f"solver: stage {s} holds items {p}-{q - 1}", value, "0 or 1")
            for (p, q), value in values.items()
            if not min(abs(value), abs(value - 1)) <= TOLERANCE  # also catches NaN
        ]
        held = [chunk for chunk, value in values.items() if value > 0.5]
        if len(held) != 1:
            problems.append(Problem(f"solver: ranges of stage {s}", held, "exactly one"))
        chosen += held
    for item in range(cands.items):
        times = sum(p <= item < q for p, q in chosen)
        if times != 1:
            problems.append(Problem(f"solver: stages with item {item}", times, "exactly one"))
    if not problems and any(before[1] != after[0] for before, after in pairwise(chosen)):
        problems.append(Problem("solver: stages", chosen, "contiguous and in order"))
    if problems:
        raise PlanError.of("answer of the partition solver", problems)
    return (0, *(stop for _, stop in chosen))


def _check_memory(memory: MemoryModel, bounds: Bounds, limit: int) -> None:
    over = [
        Problem(f"solver: memory of rank {rank}", f"{peak} bytes", f"at most {limit} bytes")
        for rank, peak in enumerate(memory.peaks(bounds))
        if peak > limit
    ]
    if over:
        raise PartitionInfeasible.of("answer of the partition solver", over)


def _check_rows(problem: MilpProblem, x: Vector) -> None:
    """Raises PlanError if the point breaks a row or a bound by more than the tolerance."""
    values = problem.matrix @ x
    slack = TOLERANCE * np.maximum(1.0, abs(problem.matrix) @ np.abs(x))
    rows = ~((values >= problem.row_lower - slack) & (values <= problem.row_upper + slack))
    outside = ~((x >= problem.lower - TOLERANCE) & (x <= problem.upper + TOLERANCE))
    problems = [
        Problem(f"solver: row {i}", float(values[i]), f"from {problem.row_lower[i]} to {problem.row_upper[i]}")
        for i in np.flatnonzero(rows)[:5]
    ]
    problems += [
        Problem(f"solver: x[{i}]", float(x[i]), f"from {problem.lower[i]} to {problem.upper[i]}")
        for i in np.flatnonzero(outside)[:5]
    ]
    if problems:
        raise PlanError.of("answer of the partition solver", problems)
