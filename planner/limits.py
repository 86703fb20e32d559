"""The memory limit: is there any partition that keeps it, and if not, what would help.

The dynamic program and local search come first, then a bound on memory alone. Where these do not decide (several
stages a rank), all partitions are searched for one that fits, and after NODES nodes without an answer the integer
program over memory looks near the leanest one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tessera_rt.costs import CostTable, Recompute
from tessera_rt.errors import PartitionInfeasible, Problem
from tessera_rt.model_spec import ModelSpec
from tessera_rt.planner.baselines import memory_balanced, serial_balanced
from tessera_rt.planner.candidates import Bounds, candidates, ranges
from tessera_rt.planner.memory import MemoryModel
from tessera_rt.planner.memory_bound import memory_bound
from tessera_rt.planner.partition_milp import Solver, partition_milp
from tessera_rt.planner.partition_threshold import threshold_search
from tessera_rt.planner.setting import Setting
from tessera_rt.scheduler.templates import Template

NODES = 500
"""Of the search of all partitions: some seconds where there are hundreds of ranges a stage."""
WINDOW = 2
"""How far the integer program over memory may move the boundaries of the leanest partition."""
MOVING = ("activations", "pending_w", "transient", "output")
"""Fields of ItemMemory that grow with the tokens of a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Outcome of looking for a partition within the limit.

    ``start``: a partition that keeps it, balanced in serial time as far as possible; None if none was found.
    ``leanest``: the partition with the least peak that was found; ``bound``: no partition has a lower one (bytes).
    """

    start: Bounds | None
    leanest: Bounds
    bound: int


def fit(setting: Setting, *, time_limit_s: float, solver: Solver) -> Fit:
    """Looks for a partition within the setting's limit; without a limit there always is one."""
    ranks, memory, limit = setting.template.stage_ranks, setting.memory, setting.limit
    start = serial_balanced(setting.model, setting.costs, ranks, memory, limit)
    if start is not None:
        return Fit(start=start, leanest=start, bound=0)
    least = memory_bound(memory)
    leanest = min((least.bounds, memory_balanced(ranks, memory)), key=_peak_of(memory))
    bound = least.bound
    if max(memory.peaks(leanest)) > limit >= bound:  # undecided: several stages a rank
        every = candidates(len(setting.model.items), setting.stages, window=None)
        found = threshold_search(every, (), memory=memory, limit=limit, node_limit=NODES)
        if found.bounds is not None:
            leanest = found.bounds
        else:
            bound = limit + 1 if found.proven else bound
            near = candidates(len(setting.model.items), setting.stages, [leanest], window=WINDOW)
            better = partition_milp(near, [], memory=memory, time_limit_s=time_limit_s, solver=solver)
            if better is not None:
                leanest = min((leanest, better.bounds), key=_peak_of(memory))
    fits = max(memory.peaks(leanest)) <= limit
    return Fit(start=leanest if fits else None, leanest=leanest, bound=bound)


def _peak_of(memory: MemoryModel) -> Callable[[Bounds], int]:
    return lambda bounds: max(memory.peaks(bounds))


def infeasible(
    tried: Sequence[tuple[Setting, Fit]],
    *,
    stronger: Callable[[Recompute], CostTable] | None = None,
) -> PartitionInfeasible:
    """The error for settings none of which fits; ``tried`` by rising strength of recomputation.

    ``stronger`` gives the costs of policies that were not tried, so that they can be named as a remedy.
    """
    setting, found = tried[-1]
    need = max(setting.memory.peaks(found.leanest))
    proven = found.bound > setting.limit
    problem = Problem(
        _where(setting, found.leanest),
        f"{_gib(need)}",
        f"at most the limit of {_gib(setting.limit)}",
        "smallest remedy: " + "; or ".join(_remedies(setting, need, stronger)),
    )
    claim = "no partition fits" if proven else f"no partition was found that fits (proven need {_gib(found.bound)})"
    policies = ", ".join(s.costs.workload.recompute for s, _ in tried)
    headline = f"partition of {setting.model.name}: {claim}, recomputation {policies} tried"
    return PartitionInfeasible(headline, [problem])


def over_limit(setting: Setting, bounds: Bounds) -> PartitionInfeasible:
    """The error for a given partition that breaks the limit."""
    problems = []
    for rank, peak in enumerate(setting.memory.peaks(bounds)):
        if peak > setting.limit:
            where = _where(setting, bounds, rank)
            remedy = f"smallest remedy: a limit of {_gib(peak)}, or another partition"
            problems.append(Problem(where, _gib(peak), f"at most the limit of {_gib(setting.limit)}", remedy))
    return PartitionInfeasible.of(f"partition of {setting.model.name}", problems)


def _where(setting: Setting, bounds: Bounds, rank: int | None = None) -> str:
    """Names the rank (the fullest one) and the stage on it that needs most."""
    peaks = setting.memory.peaks(bounds)
    if rank is None:
        rank = max(range(len(peaks)), key=lambda r: (peaks[r], -r))
    stages = [s for s, owner in enumerate(setting.template.stage_ranks) if owner == rank]
    chunks = ranges(bounds)
    stage = max(stages, key=lambda s: (setting.memory.stage_need(s, chunks[s]), -s))
    start, stop = chunks[stage]
    labels = [item.label for item in setting.model.items[start:stop]]
    held = "no items" if not labels else labels[0] if len(labels) == 1 else f"{labels[0]} to {labels[-1]}"
    return f"memory of rank {rank} (stage {stage}: {held})"


def _remedies(setting: Setting, need: int, stronger: Callable[[Recompute], CostTable] | None) -> list[str]:
    """What would make it fit, smallest change first."""
    found: list[str] = []
    if stronger is not None:
        policies = list(Recompute)
        for policy in policies[policies.index(setting.costs.workload.recompute) + 1 :]:
            memory = MemoryModel(setting.model, stronger(policy), setting.template)
            if _least_peak(memory) <= setting.limit:
                found.append(f"recomputation {policy}")
                break
    tokens = setting.costs.workload.tokens
    fewer = _fitting_tokens(setting.model, setting.costs, setting.template, setting.limit)
    if fewer:
        found.append(f"about {fewer} instead of {tokens} tokens per micro-batch on a rank")
    found.append(f"a limit of {_gib(need)}")
    if not fewer:
        found.append(
            "more pipeline stages or expert-parallel ranks: weights, gradients and optimizer state alone are too much"
        )
    return found


def _fitting_tokens(model: ModelSpec, costs: CostTable, template: Template, limit: int) -> int:
    """Most tokens per micro-batch (in steps of a 64th) for which a partition was found; 0 if none.

    Assumes that activations, pending W, working sets and messages are proportional to the tokens.
    """
    tokens = costs.workload.tokens
    few, many = 0, min(64, tokens)  # the largest count known to fit and the smallest known not to, in steps

    def fits(step: int) -> bool:
        return _least_peak(MemoryModel(model, _scaled(costs, step / min(64, tokens)), template)) <= limit

    while many - few > 1:
        middle = (few + many) // 2
        if fits(middle):
            few = middle
        else:
            many = middle
    return tokens * few // min(64, tokens)


def _scaled(costs: CostTable, share: float) -> CostTable:
    memory = {
        label: replace(item, **{field: round(getattr(item, field) * share) for field in MOVING})
        for label, item in costs.memory.items()
    }
    return replace(costs, memory=memory)


def _least_peak(memory: MemoryModel) -> int:
    """Peak of the best partition that the dynamic program and local search find."""
    return max(memory.peaks(memory_balanced(memory.template.stage_ranks, memory)))


def _gib(size: int) -> str:
    """Bytes, with GiB for people where that says something."""
    return f"{size} bytes" if size < 2**27 else f"{size} bytes ({size / 2**30:.2f} GiB)"
