"""Which costs hold for a pass: MoE layers in halves where passes run alone, smaller micro-batches at a step's ends.

Warm-up and cool-down last as long as the first and the last micro-batches take through all stages, so that smaller ones
there shorten both. They change the composition of the batch (others than the middle ones get fewer tokens) and are only
simulated. Messages between stages are charged in full for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tessera_rt.costs import CostTable
from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Action
from tessera_rt.scheduler.chunked import alone, halved_costs
from tessera_rt.tasks import Resource, parse_task_name

SMALL_SHARE, SMALL_OVERHEAD = 0.5, 0.05
"""Tokens of a small micro-batch as a share of a full one's, and by how much longer compute takes for a token of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCosts:
    """Cost tables of full and small micro-batches, in pairs and ``chunked.alone``. ``tapered``: how many are small at
    either end of ``microbatches``."""

    full: CostTable
    full_alone: CostTable
    small: CostTable
    small_alone: CostTable
    tapered: int
    microbatches: int

    @classmethod
    def of(
        cls, model: ModelSpec, costs: CostTable, microbatches: int, *, halves: bool = False, tapered: int = 0
    ) -> PartCosts:
        """Raises ScheduleError for more small micro-batches than there are."""
        if not 0 <= 2 * tapered <= microbatches:
            allowed = f"0 to {microbatches // 2}, half of the {microbatches} micro-batches"
            raise ScheduleError.of("tapered ends", [Problem("tapered", tapered, allowed)])
        small = small_costs(costs)
        return cls(
            full=costs,
            full_alone=halved_costs(model, costs) if halves else costs,
            small=small,
            small_alone=halved_costs(model, small) if halves else small,
            tapered=tapered,
            microbatches=microbatches,
        )

    def is_small(self, microbatch: int) -> bool:
        return not self.tapered <= microbatch < self.microbatches - self.tapered

    def tables(self, action: Action) -> tuple[CostTable, ...]:
        """The table of each pass of an action."""
        full, small = (self.full_alone, self.small_alone) if alone(action.key) else (self.full, self.small)
        return tuple(small if self.is_small(part.microbatch) else full for part in action.passes)


def part_costs(
    actions: Sequence[Sequence[Action]], model: ModelSpec, costs: CostTable, *, halves: bool, tapered: int
) -> PartCosts | None:
    """``PartCosts.of`` the schedule; None where all passes have ``costs``."""
    if not (halves or tapered):
        return None
    microbatches = 1 + max((part.microbatch for row in actions for a in row for part in a.passes), default=0)
    return PartCosts.of(model, costs, microbatches, halves=halves, tapered=tapered)


def small_costs(costs: CostTable) -> CostTable:
    """Costs of a small micro-batch. A collective takes its share, compute SMALL_OVERHEAD longer than its share."""
    share = {Resource.COMM: SMALL_SHARE, Resource.COMP: SMALL_SHARE * (1 + SMALL_OVERHEAD)}
    tasks = {
        name: replace(cost, ns=round(cost.ns * share[parse_task_name(name)[1].resource]))
        for name, cost in costs.tasks.items()
    }
    return replace(costs, tasks=tasks, pairs={})
