"""Shortest makespans by general solvers, to check our own exact search with; they share no code with it."""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from tessera_rt.tasks import Resource, TaskGraph


def milp_makespan(graph: TaskGraph, horizon: int, *, time_limit_s: float = 60.0) -> int | None:
    """The least makespan by a time-indexed mixed-integer program; None when HiGHS does not prove it within the limit.

    One binary per task and possible start, so durations must be small: ``horizon``, a makespan that is known to be
    possible, should be below about 100 ns.
    """
    tasks = graph.tasks
    index = {name: i for i, name in enumerate(graph.names)}
    times = horizon + 1
    last = len(tasks) * times  # column of the makespan
    rows: list[dict[int, int]] = []
    least: list[int] = []
    most: list[int] = []

    def add(row: dict[int, int], at_least: int, at_most: int) -> None:
        rows.append(row)
        least.append(at_least)
        most.append(at_most)

    for i, task in enumerate(tasks):
        add({i * times + t: 1 for t in range(times)}, 1, 1)
        add({last: 1} | {i * times + t: -t for t in range(times)}, task.ns, horizon)
        for dep in task.deps:
            first = index[dep]
            for t in range(times):  # it has started by t only if the other one had by t - its duration
                started = {i * times + s: 1 for s in range(t + 1)}
                ended = {first * times + s: -1 for s in range(t + 1 - tasks[first].ns)}
                add(started | ended, -1, 0)
    for lane in Resource:
        for t in range(times):
            running = {
                i * times + s: 1
                for i, task in enumerate(tasks)
                if task.resource is lane
                for s in range(max(0, t + 1 - task.ns), t + 1)
            }
            if len(running) > 1:
                add(running, 0, 1)
    entries = [(r, column, value) for r, row in enumerate(rows) for column, value in row.items()]
    placed = np.array(entries, dtype=np.int64).reshape(-1, 3).T
    matrix = csr_array((placed[2].astype(float), (placed[0], placed[1])), shape=(len(rows), last + 1))
    upper = np.ones(last + 1)
    upper[last] = horizon
    integrality = np.ones(last + 1, dtype=np.int64)
    integrality[last] = 0
    objective = np.zeros(last + 1)
    objective[last] = 1
    solved = milp(
        objective,
        constraints=LinearConstraint(matrix, lb=np.array(least), ub=np.array(most)),
        bounds=Bounds(np.zeros(last + 1), upper),
        integrality=integrality,
        options={"time_limit": time_limit_s},
    )
    return round(solved.fun) if solved.status == 0 else None


def cp_sat_makespan(graph: TaskGraph, *, time_limit_s: float = 60.0) -> int | None:
    """The same by OR-tools' CP-SAT on one thread, for durations of any size; None when it is not proven in time.

    Raises ImportError without the package ``ortools``.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    horizon = graph.total_ns()
    makespan = model.new_int_var(0, horizon, "makespan")
    ends = {}
    lanes: dict[str, list[cp_model.IntervalVar]] = {}
    for task in graph.tasks:
        start = model.new_int_var(0, horizon, task.name)
        ends[task.name] = start + task.ns
        if task.ns:
            lanes.setdefault(task.resource, []).append(model.new_fixed_size_interval_var(start, task.ns, task.name))
        for dep in task.deps:
            model.add(start >= ends[dep])
        model.add(makespan >= ends[task.name])
    for intervals in lanes.values():
        model.add_no_overlap(intervals)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = 1
    return round(solver.objective_value) if solver.solve(model) == cp_model.OPTIMAL else None
