"""Costs from measured samples: durations as timed, memory and flops as computed (``sizes.py``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from statistics import median

from tessera_rt.cost_sources.sizes import check_workload, item_memory, task_flops
from tessera_rt.cost_sources.work import comm_payload
from tessera_rt.costs import RECOMPUTED, CostTable, Link, Provenance, TaskCost, Workload
from tessera_rt.errors import CostError, Problem
from tessera_rt.model_spec import Item, ModelSpec
from tessera_rt.tasks import Pass, Task, chunk_tasks, task_name

MEMORY_NOTE = (
    "memory is computed, not measured: activations are those of fused kernels, and the plain-torch model on a CPU was "
    "seen to keep 2.1 (gated delta net), 1.37 (softmax attention) and 1.26 (head) times as much"
)
"""What ``measured_costs`` notes of its memory; the ratios are of a small fp32 model."""


def robust_cost(samples: Sequence[float], *, warmup: int = 1) -> TaskCost:
    """The median of the samples (ns) after the first ``warmup``, and the distance of the quartiles relative to it.

    The first calls compile and load, so they are dropped; the last sample never is. ``TaskCost.samples`` counts those
    used: a cost that rests on one sample shows it, and ``measured_costs`` notes it. Raises CostError when there is no
    sample, or one is negative, infinite or no number.
    """
    problems = _sample_problems("samples", samples)
    if problems:
        raise CostError.of("samples", problems)
    return _cost(samples, warmup)


def measured_costs(
    model: ModelSpec,
    workload: Workload,
    samples: Mapping[str, Sequence[float]],
    *,
    device: str,
    versions: str,
    link: Link,
    contention: float = 0.0,
    comm_sms: int = 0,
    warmup: int = 1,
    notes: Iterable[str] = (),
) -> CostTable:
    """A cost table of measured durations. ``samples``: task name -> ns, of every task of the model.

    Durations are without contention; with recomputation, samples of B include it. Payloads are those of rows that
    travel one by one, as the engine sends them. Memory is computed, as ``MEMORY_NOTE`` in the notes says. Raises
    CostError with every task that is missing (naming an equal layer that has it), unknown, or without usable samples;
    SpecError for a workload that cannot be.
    """
    check_workload(model, workload)
    if workload.tp > 1:
        problem = Problem("workload.tp", workload.tp, "1", "costs with tensor parallelism can only be computed")
        raise CostError.of("measured costs", [problem])
    tasks_of = {item.label: _tasks(item) for item in model.items}
    names = {task.name for tasks in tasks_of.values() for task in tasks}
    problems = [
        Problem(f"samples.{name}", name, f"a task of {model.name}", "see the names in tasks.py")
        for name in samples
        if name not in names
    ]
    for item in model.items:
        for task in tasks_of[item.label]:
            if task.name in samples:
                problems += _sample_problems(f"samples.{task.name}", samples[task.name])
            else:
                problems.append(Problem(f"samples.{task.name}", None, "measured", _twin(model, item, task, samples)))
    if not (isfinite(contention) and contention >= 0):
        problems.append(Problem("contention", contention, "a finite number of at least 0"))
    if problems:
        raise CostError.of(f"measured costs of {model.name}", problems)
    costs: dict[str, TaskCost] = {}
    for item in model.items:
        flops, payload = _executed_flops(model, item, workload), comm_payload(model, item, workload)
        for task in tasks_of[item.label]:
            cost = _cost(samples[task.name], warmup)
            costs[task.name] = replace(cost, flops=flops.get(task.name, 0), bytes=payload.get(task.kind, 0))
    single = [name for name, cost in costs.items() if cost.samples == 1]
    flags = (f"only one sample, spread unknown: {', '.join(single)}",) if single else ()
    return CostTable(
        fingerprint=model.fingerprint,
        workload=workload,
        provenance=Provenance(source="measured", device=device, versions=versions, notes=(*notes, MEMORY_NOTE, *flags)),
        tasks=costs,
        memory={item.label: item_memory(model, item, workload) for item in model.items},
        link=link,
        contention=contention,
        comm_sms=comm_sms,
    )


def _cost(samples: Sequence[float], warmup: int) -> TaskCost:
    used = sorted(samples[min(warmup, len(samples) - 1) :])
    middle = median(used)
    # A task that takes no time has no relative spread.
    spread = (_quantile(used, 0.75) - _quantile(used, 0.25)) / middle if middle else 0.0
    return TaskCost(ns=round(middle), spread=spread, samples=len(used))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the closest ranks."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def _sample_problems(field: str, samples: Sequence[float]) -> list[Problem]:
    if not samples:
        return [Problem(field, list(samples), "at least one sample in ns")]
    return [
        Problem(f"{field}[{index}]", sample, "a finite number of ns, at least 0")
        for index, sample in enumerate(samples)
        if not (isfinite(sample) and sample >= 0)
    ]


def _tasks(item: Item) -> tuple[Task, ...]:
    return (*chunk_tasks([item], Pass.F).tasks, *chunk_tasks([item], Pass.B).tasks)


def _twin(model: ModelSpec, item: Item, task: Task, samples: Mapping[str, Sequence[float]]) -> str:
    """What to say of a missing task: an equal item that has it, if there is one."""
    for other in model.items:
        if other is not item and (other.kind, other.layer) == (item.kind, item.layer):
            if task_name(task.pass_, task.kind, other.label) in samples:
                return f"measure it again: {other.label}, an equal layer, has it"
    return "measure it, or compute the costs with a roofline"


def _executed_flops(model: ModelSpec, item: Item, workload: Workload) -> dict[str, int]:
    """``task_flops``, with the forward's added to the B of recomputed tasks."""
    flops = task_flops(model, item, workload)
    for kind in RECOMPUTED[workload.recompute]:
        again = task_name(Pass.B, kind, item.label)
        if again in flops:
            flops[again] += flops[task_name(Pass.F, kind, item.label)]
    return flops
