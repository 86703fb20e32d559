"""Partitions with the least T_dom (largest edge cost), serial time of a stage, or peak memory.

``threshold`` and ``milp`` are exact among the candidates (the least memory is always ``milp``'s); ``chain-dp`` is exact
if all edges are self-loops, else it takes additive costs. T_dom and its bound are without contention.

Ties go to the partition whose heaviest rank has least to do, then to the least sum of squared stage times.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera_rt.planner.baselines import balanced, load_key, memory_balanced
from tessera_rt.planner.candidates import Bounds, Candidates, Range, candidates, ranges, shortest_chunk
from tessera_rt.planner.chain_dp import Key, chain_partition, improve
from tessera_rt.planner.edge_costs import EdgeCosts, edge_costs, prune, stage_costs
from tessera_rt.planner.memory_bound import memory_bound
from tessera_rt.planner.partition_milp import MinMax, Solver, partition_milp
from tessera_rt.planner.partition_threshold import partition_threshold
from tessera_rt.planner.setting import Setting

TIE_EVALUATIONS = 2_000
"""Partitions looked at to break ties: about a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to search; see ``build_plan``."""

    objective: str
    partitioner: str
    window: int | None
    time_limit_s: float
    solver: Solver
    evaluations: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A partition and how it was found. ``bound_ns``: no partition's T_dom is less. ``status``: as in ``SolverStatus``.

    ``alternatives``: (name, simulated step time in ns) of everything that was simulated. ``others``: met on the way,
    worth a look at their steps.
    """

    bounds: Bounds
    method: str
    status: str
    bound_ns: int
    alternatives: tuple[tuple[str, int], ...] = ()
    others: tuple[Bounds, ...] = ()


class Clock:
    """A time limit that begins to run when it is made."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds, negative once the time is up."""
        return self._end - time.monotonic()

    def is_up(self) -> bool:
        return self.left <= 0


def least_t_dom(setting: Setting, start: Bounds, options: Options) -> Found:
    """The least T_dom; the chain partition's when the solver runs out of time with nothing to show."""
    clock = Clock(options.time_limit_s)
    chain = _chain(setting, start)
    if options.partitioner == "chain-dp":
        return chain
    near = [start, chain.bounds]
    best = ties_broken(setting, min(near, key=setting.t_dom), Clock(clock.left / 2))
    if options.partitioner == "threshold" and setting.t_dom(best) <= chain.bound_ns:
        # No stage's own passes allow less: the search would have no threshold to test.
        return Found(bounds=best, method=f"{chain.method}, local search", status="optimal", bound_ns=chain.bound_ns)
    centers = [*near, best]
    cands = _near(setting, centers, options)
    result = _exact(setting, cands, centers, chain.bound_ns, options, clock)
    if result is not None and result.value < setting.t_dom(best):
        best = ties_broken(setting, result.bounds, clock)
    bound = _global_bound(setting, chain.bound_ns, result, cands)
    status = _status(setting.t_dom(best), bound, result)
    return Found(
        bounds=best,
        method=result.method if result else _fallback(options),
        status=status,
        bound_ns=bound,
        others=(result.bounds,) if result else (),
    )


def _global_bound(setting: Setting, known: int, result: MinMax | None, cands: Candidates) -> int:
    """A lower bound for every partition: ``known``, or the solver's if the candidates were all there are."""
    every = candidates(len(setting.model.items), setting.stages, window=None)
    complete = all(set(free) <= set(own) for free, own in zip(every.ranges, cands.ranges, strict=True))
    return max(known, result.bound) if result is not None and complete else known


def _status(value: float, bound: int, result: MinMax | None) -> str:
    """``SolverStatus.status`` of a partition with ``value`` when no partition at all has less than ``bound``."""
    if value <= bound:
        return "optimal"
    if result is None:
        return "heuristic"
    return "optimal-in-window" if result.status == "optimal" else result.status


def _fallback(options: Options) -> str:
    return f"chain-dp and local search ({options.partitioner} found nothing in {options.time_limit_s:g} s)"


def _exact(
    setting: Setting, cands: Candidates, centers: Sequence[Bounds], at_least: int, options: Options, clock: Clock
) -> MinMax | None:
    """The least T_dom among the candidates, which the centers are among; None if the time is up first."""
    known = min((c for c in centers if not setting.excess(c)), key=setting.t_dom)
    made = edge_costs(
        cands,
        setting.edges,
        setting.pairs,
        at_most=setting.t_dom(known),
        at_least=at_least,
        out_of_time=clock.is_up,
    )
    if made is None:
        return None
    cands, tables = made
    return _solved(setting, cands, tables, options, clock.left, known, at_least)


def _solved(
    setting: Setting,
    cands: Candidates,
    tables: Sequence[EdgeCosts],
    options: Options,
    time_limit_s: float,
    known: Bounds,
    at_least: int = 0,
) -> MinMax | None:
    if options.partitioner == "milp":
        return partition_milp(
            cands,
            tables,
            memory=setting.memory,
            limit=setting.limit,
            time_limit_s=time_limit_s,
            solver=options.solver,
        )
    return partition_threshold(
        cands,
        tables,
        memory=setting.memory,
        limit=setting.limit,
        known=known,
        at_least=at_least,
        time_limit_s=time_limit_s,
        solver=options.solver,
    )


def ties_broken(setting: Setting, bounds: Bounds, clock: Clock) -> Bounds:
    """Among partitions of the same T_dom nearby: least load of the heaviest rank, then least sum of squares."""
    t_dom = setting.t_dom(bounds)

    def key(moved: Bounds) -> Key:
        excess, least = setting.excess(moved), setting.pairs.largest_limit(setting.edges, moved)
        if excess or least > t_dom:  # worse already: no pair need be scheduled to know
            return (excess, least, 0, 0)
        return (excess, setting.t_dom(moved), max(setting.rank_loads(moved)), setting.squares(moved))

    return improve(bounds, key, shortest=shortest(setting), evaluations=TIE_EVALUATIONS, out_of_time=clock.is_up)


def _chain(setting: Setting, start: Bounds) -> Found:
    """By dynamic programming: exact for T_dom if all edges are self-loops, else by additive costs with overlap."""
    ranks = setting.template.stage_ranks
    if not setting.only_self_loops:
        quick = balanced(setting.quick, ranks, setting.memory, setting.limit) or start
        bounds = min((start, quick), key=setting.t_dom)
        bound = t_dom_bound(setting)
        return Found(
            bounds=bounds, method="chain-dp", status=_status(setting.t_dom(bounds), bound, None), bound_ns=bound
        )
    # Most ranges cost too much or too little to matter: they keep their lower bounds.
    table = np.zeros((setting.stages, *setting.serial.shape), dtype=np.int64)
    for edge in setting.edges:
        table[edge.forward] = np.maximum(table[edge.forward], setting.pairs.stage_limits(edge)[0])
    costed: set[tuple[int, Range]] = set()
    while True:
        bounds = balanced(table, ranks, setting.memory, setting.limit) or start
        new = [
            (edge, chunk)
            for edge in setting.edges
            if (edge.forward, chunk := ranges(bounds)[edge.forward]) not in costed
        ]
        if not new:
            break
        for edge, chunk in new:
            costed.add((edge.forward, chunk))
            table[(edge.forward, *chunk)] = max(table[(edge.forward, *chunk)], setting.pairs.edge(edge, chunk, chunk))
    t_dom = setting.t_dom(bounds)
    bound = t_dom if setting.one_stage_a_rank or not setting.limit else t_dom_bound(setting)
    return Found(bounds=bounds, method="chain-dp", status=_status(t_dom, bound, None), bound_ns=bound)


def t_dom_bound(setting: Setting) -> int:
    """A lower bound of T_dom (ns) for every partition: no stage's edges can be faster than its own passes allow."""
    size = len(setting.model.items) + 1
    table = np.zeros((setting.stages, size, size), dtype=np.int64)
    for edge in setting.edges:
        forward, backward = setting.pairs.stage_limits(edge)
        table[edge.forward] = np.maximum(table[edge.forward], forward)
        table[edge.backward] = np.maximum(table[edge.backward], backward)
    found = chain_partition(table, setting.stages)
    assert found is not None, "nothing is forbidden"
    return found[1]


# -- serial time and memory ------------------------------------------------------------------------


def least_serial(setting: Setting, start: Bounds, options: Options) -> Found:
    bound = t_dom_bound(setting)
    load = load_key(setting.serial, setting.template.stage_ranks)
    free = chain_partition(setting.serial, setting.stages)
    assert free is not None, "nothing is forbidden"
    exact = setting.one_stage_a_rank or not setting.limit
    least = int(load(start)[0]) if exact else free[1]
    if options.partitioner == "chain-dp":
        return Found(bounds=start, method="chain-dp", status=_status(load(start)[0], least, None), bound_ns=bound)
    cands = _near(setting, [start], options)
    left, tables = prune(cands, stage_costs(cands, setting.serial, at_most=int(load(start)[0])))
    result = _solved(setting, left, tables, options, options.time_limit_s, start)
    if result is None:
        status = _status(load(start)[0], least, None)
        return Found(bounds=start, method=_fallback(options), status=status, bound_ns=bound)
    bounds = improve(
        min((start, result.bounds), key=load),
        lambda moved: (setting.excess(moved), *load(moved)),
        shortest=shortest(setting),
        evaluations=TIE_EVALUATIONS,
    )
    status = _status(load(bounds)[0], _global_bound(setting, least, result, cands), result)
    return Found(bounds=bounds, method=result.method, status=status, bound_ns=bound)


def least_memory(setting: Setting, start: Bounds, options: Options) -> Found:
    bound = t_dom_bound(setting)
    balanced_memory = memory_balanced(setting.template.stage_ranks, setting.memory)
    status = "optimal" if setting.one_stage_a_rank else "heuristic"
    chain = Found(bounds=balanced_memory, method="chain-dp", status=status, bound_ns=bound)
    if options.partitioner == "chain-dp" or setting.one_stage_a_rank:
        return chain
    cands = _near(setting, [start, balanced_memory], options)
    result = partition_milp(cands, [], memory=setting.memory, time_limit_s=options.time_limit_s, solver=options.solver)
    if result is None:
        return Found(bounds=balanced_memory, method=_fallback(options), status=status, bound_ns=bound)
    bounds = min((balanced_memory, result.bounds), key=lambda found: max(setting.memory.peaks(found)))
    least = _global_bound(setting, memory_bound(setting.memory).bound, result, cands)
    status = _status(max(setting.memory.peaks(bounds)), least, result)
    return Found(bounds=bounds, method="milp", status=status, bound_ns=bound)


def _near(setting: Setting, centers: Sequence[Bounds], options: Options) -> Candidates:
    return candidates(len(setting.model.items), setting.stages, centers, window=options.window)


def shortest(setting: Setting) -> int:
    return shortest_chunk(len(setting.model.items), setting.stages)
