"""Which error of the costs would have led to another partition.

The plan's partition and its rivals (serial-balanced, equal layers, and those that move one boundary by one item) are
simulated with the durations of one kind of task, or of the messages, longer or shorter by a given error; every rival
with the task orders it would have had. All errors of one partition are one compiled run (``scheduler.replicas``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tessera_rt.costs import CostTable
from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Action, Interleaving, Plan
from tessera_rt.planner.baselines import equal_layers, serial_balanced
from tessera_rt.planner.candidates import Bounds, ranges
from tessera_rt.planner.chain_dp import serial_times
from tessera_rt.planner.memory import MemoryModel
from tessera_rt.planner.memory_timeline import template_of
from tessera_rt.planner.pair_costs import PairCosts
from tessera_rt.planner.tables import range_sums
from tessera_rt.scheduler.chunked import MOE_HALVES
from tessera_rt.scheduler.replica_program import KINDS
from tessera_rt.scheduler.replicas import prepare_schedule, simulate_replicas

STEPS = (0.25, 0.5, 1.0)
"""Parts of the error that are looked at, to say from which one on the choice changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorEffect:
    """If tasks of ``kind`` took ``1 + error`` times as long: the plan's step, the best partition's, and which it is.

    ``changes_at``: least error looked at, of this sign, with which a rival is faster than the plan by more than
    ``tolerance``; None if none is.
    """

    kind: str
    error: float
    step_ns: int
    best_ns: int
    best: str
    changes_at: float | None

    @property
    def regret(self) -> float:
        """Share of the step that the better partition would save."""
        return (self.step_ns - self.best_ns) / self.step_ns if self.step_ns else 0.0


def sensitivity(
    plan: Plan,
    model: ModelSpec,
    costs: CostTable,
    *,
    error: float = 0.2,
    tolerance: float = 0.001,
    rivals: int = 8,
    contention: float | None = None,
) -> tuple[ErrorEffect, ...]:
    """The effect of an error of ``+error`` and ``-error`` in every kind that the model has, and in messages.

    ``rivals``: how many partitions with one boundary moved, those whose fullest rank has least to do. Partitions over
    the plan's memory limit are left out. Raises ScheduleError for an error outside ]0, 1[ or a negative tolerance.
    """
    problems = []
    if not 0 < error < 1:
        problems.append(Problem("error", error, "between 0 and 1", "0.2 = 20 %"))
    if not tolerance >= 0:
        problems.append(Problem("tolerance", tolerance, "at least 0"))
    if problems:
        raise ScheduleError.of("sensitivity", problems)
    present = {name.partition(":")[0].partition("_")[2] for name in costs.tasks}
    kinds = [kind for kind in KINDS if kind in present or (kind == "LINK" and plan.mesh.pp > 1)]
    cases = [(kind, sign * error * part) for kind in kinds for sign in (1, -1) for part in STEPS]
    scales = np.ones((1 + len(cases), len(KINDS)))
    for row, (kind, off) in enumerate(cases, start=1):
        scales[row, KINDS.index(kind)] = 1 + off
    partitions = dict(_partitions(plan, model, costs, rivals))
    steps = {
        name: _steps(plan, model, costs, bounds, interleavings, scales, contention)
        for name, (bounds, interleavings) in partitions.items()
    }
    return tuple(_effects(cases, steps, tolerance))


def _effects(
    cases: Sequence[tuple[str, float]], steps: Mapping[str, Sequence[int]], tolerance: float
) -> Iterator[ErrorEffect]:
    changes_at: float | None = None
    for row, (kind, off) in enumerate(cases, start=1):
        if (row - 1) % len(STEPS) == 0:
            changes_at = None
        mine = int(steps["plan"][row])
        best = min(steps, key=lambda name: (steps[name][row], name != "plan"))
        if changes_at is None and mine - steps[best][row] > tolerance * mine:
            changes_at = off
        if row % len(STEPS) == 0:
            yield ErrorEffect(
                kind=kind, error=off, step_ns=mine, best_ns=int(steps[best][row]), best=best, changes_at=changes_at
            )


def _steps(
    plan: Plan,
    model: ModelSpec,
    costs: CostTable,
    bounds: Bounds,
    interleavings: Mapping[str, Interleaving],
    scales: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    contention: float | None,
) -> Sequence[int]:
    program = prepare_schedule(
        [stage.rank for stage in plan.stages],
        plan.actions,
        ranges(bounds),
        interleavings,
        model,
        costs,
        contention=contention,
        halves=MOE_HALVES in plan.simulate_only,
        tapered=plan.tapered,
    )
    steps: list[int] = simulate_replicas(program, replicas=len(scales), scales=scales).steps_ns.tolist()
    return steps


def _partitions(
    plan: Plan, model: ModelSpec, costs: CostTable, rivals: int
) -> Iterator[tuple[str, tuple[Bounds, Mapping[str, Interleaving]]]]:
    """The plan's own, and distinct others that fit, with their names."""
    template = template_of(plan)
    own: Bounds = (*(stage.start for stage in plan.stages), plan.stages[-1].stop)
    yield "plan", (own, plan.interleavings)
    memory = MemoryModel(model, costs, template)
    limits = [rank.limit or max(memory.peaks(own)) * 1000 for rank in plan.memory]
    serial = range_sums(serial_times(model, costs))

    def load(bounds: Bounds) -> tuple[int, ...]:
        loads = [0] * plan.mesh.pp
        for stage, chunk in zip(plan.stages, ranges(bounds), strict=True):
            loads[stage.rank] += int(serial[chunk])
        return tuple(sorted(loads, reverse=True))

    moved = []
    for i in range(1, len(own) - 1):
        for by in (1, -1):
            bounds = (*own[:i], own[i] + by, *own[i + 1 :])
            if bounds[i - 1] <= bounds[i] <= bounds[i + 1]:
                moved.append((f"stage {i} begins {'later' if by > 0 else 'earlier'}", bounds))
    moved.sort(key=lambda entry: load(entry[1]))
    others: list[tuple[str, Bounds | None]] = [
        ("serial-balanced", serial_balanced(model, costs, template.stage_ranks)),
        ("equal layers", equal_layers(model, len(plan.stages))),
        *moved[:rivals],
    ]
    pairs = PairCosts(model, costs, method=_method(plan))
    actions: dict[str, Action] = {action.key: action for row in plan.actions for action in row}
    seen = {own}
    for name, found in others:
        if found is None or found in seen:
            continue
        seen.add(found)
        if all(peak <= limit for peak, limit in zip(memory.peaks(found), limits, strict=True)):
            chunks = ranges(found)
            yield name, (found, {key: pairs.interleaving(action, chunks) for key, action in actions.items()})


def _method(plan: Plan) -> str:
    """The method that ordered the plan's pairs: an interleaving is named by whose order it is, which may be a weaker
    method's."""
    found = {entry.method for key, entry in plan.interleavings.items() if ";" in key}
    if found & {"exact", "contended"}:
        return "exact"
    return next((method for method in ("megatron", "defer", "align", "fifo") if method in found), "align")
