"""Setting: everything a search for a partition looks at, for one cost table, and what a partition is worth in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from tessera_rt.costs import CostTable
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Action, Interleaving
from tessera_rt.planner.candidates import Bounds, ranges
from tessera_rt.planner.chain_dp import quick_times, serial_times
from tessera_rt.planner.edge_costs import largest_cost
from tessera_rt.planner.memory import MemoryModel
from tessera_rt.planner.overlap_graph import Edge, cost_edges
from tessera_rt.planner.pair_costs import PairCosts
from tessera_rt.planner.tables import Table, range_sums
from tessera_rt.scheduler.simulate import step_time
from tessera_rt.scheduler.templates import Template


class Setting:
    """Model, template and costs, with a memory ``limit`` in bytes per rank (0: none). Remembers simulated steps."""

    def __init__(self, model: ModelSpec, costs: CostTable, template: Template, *, limit: int, method: str) -> None:
        self.model = model
        self.costs = costs
        self.template = template
        self.limit = limit
        self.pairs = PairCosts(model, costs, method=method)
        self.memory = MemoryModel(model, costs, template)
        self.edges: tuple[Edge, ...] = cost_edges(template)
        self._steps: dict[Bounds, int] = {}

    @property
    def stages(self) -> int:
        return len(self.template.stage_ranks)

    @property
    def one_stage_a_rank(self) -> bool:
        return len(set(self.template.stage_ranks)) == self.stages

    @property
    def only_self_loops(self) -> bool:
        """Whether T_dom is a maximum over single stages (1F1B, and templates without overlap)."""
        return all(edge.forward == edge.backward for edge in self.edges)

    @cached_property
    def serial(self) -> Table:
        """[n + 1, n + 1] ns: all tasks of the items p to q - 1 one after the other."""
        return range_sums(serial_times(self.model, self.costs))

    @cached_property
    def quick(self) -> Table:
        """[n + 1, n + 1] ns: additive estimate of the time with overlap (``chain_dp.quick_times``)."""
        return range_sums(quick_times(self.model, self.costs))

    @cached_property
    def distinct_actions(self) -> tuple[Action, ...]:
        """One action of every key."""
        found: dict[str, Action] = {}
        for actions in self.template.actions:
            for action in actions:
                found.setdefault(action.key, action)
        return tuple(found.values())

    def excess(self, bounds: Bounds) -> int:
        """Bytes by which ranks exceed the limit, summed."""
        return sum(max(0, peak - self.limit) for peak in self.memory.peaks(bounds)) if self.limit else 0

    def t_dom(self, bounds: Bounds) -> int:
        """Largest cost of an edge (ns)."""
        return largest_cost(self.edges, self.pairs, bounds)[0]

    def bottleneck(self, bounds: Bounds) -> str:
        """Key of the interleaving that costs T_dom; empty if the template overlaps nothing."""
        edge = largest_cost(self.edges, self.pairs, bounds)[1]
        return edge.key if edge is not None and edge.overlapped else ""

    def rank_loads(self, bounds: Bounds) -> tuple[int, ...]:
        """ns each rank spends on its edges in a step."""
        loads = [0] * len(self.template.actions)
        chunks = ranges(bounds)
        for edge in self.edges:
            loads[edge.rank] += edge.count * self.pairs.edge(edge, chunks[edge.forward], chunks[edge.backward])
        return tuple(loads)

    def squares(self, bounds: Bounds) -> float:
        """Sum over stages of the squared serial time."""
        return float(sum(float(self.serial[chunk]) ** 2 for chunk in ranges(bounds)))

    def interleavings(self, bounds: Bounds) -> Mapping[str, Interleaving]:
        """Key -> interleaving of every action of the template."""
        chunks = ranges(bounds)
        return {action.key: self.pairs.interleaving(action, chunks) for action in self.distinct_actions}

    def step_ns(self, bounds: Bounds) -> int:
        """Simulated step time."""
        if bounds not in self._steps:
            self._steps[bounds] = step_time(
                self.template.stage_ranks,
                self.template.actions,
                ranges(bounds),
                self.interleavings(bounds),
                self.model,
                self.costs,
            )
        return self._steps[bounds]

    def boundary_ns(self, bounds: Sequence[int]) -> tuple[int, ...]:
        """For each boundary between stages: how long a message takes to cross it (0 within a rank)."""
        times: list[int] = []
        ranks = self.template.stage_ranks
        for stage, position in enumerate(bounds[1:-1]):
            if ranks[stage] == ranks[stage + 1]:
                times.append(0)
            else:
                size = self.costs.memory[self.model.items[position - 1].label].output if position else 0
                times.append(self.costs.link.occupancy_ns(size) + self.costs.link.latency_ns)
        return tuple(times)
