"""A schedule with everything that simulating it takes, for tests of the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tessera_rt.costs import CostTable
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Action, Interleaving
from tessera_rt.scheduler.graphs import action_graph
from tessera_rt.scheduler.list_schedule import list_schedule
from tessera_rt.scheduler.simulate import simulate_schedule
from tessera_rt.timeline import Timeline

Bounds = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Case:
    """Everything ``simulate_schedule`` takes."""

    stage_ranks: Sequence[int]
    actions: Sequence[Sequence[Action]]
    bounds: Bounds
    interleavings: Mapping[str, Interleaving]
    model: ModelSpec
    costs: CostTable

    def timeline(self, *, overlap: bool = True, contention: float | None = None) -> Timeline:
        return simulate_schedule(
            self.stage_ranks,
            self.actions,
            self.bounds,
            self.interleavings,
            self.model,
            self.costs,
            overlap=overlap,
            contention=contention,
        )

    def graphs(self) -> dict[str, set[str]]:
        keys = {action.key for row in self.actions for action in row}
        return {key: set(action_graph(key, self.model, self.costs, self.bounds).names) for key in keys}


def orders(
    actions: Sequence[Sequence[Action]], model: ModelSpec, costs: CostTable, bounds: Bounds
) -> dict[str, Interleaving]:
    keys = {action.key for row in actions for action in row}
    return {key: list_schedule(action_graph(key, model, costs, bounds), key) for key in keys}
