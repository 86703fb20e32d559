"""Setting: everything a search for a partition looks at, for one cost table, and what a partition is worth in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
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
from tessera_rt.planner.step_clock import StepClock
from tessera_rt.planner.tables import Table, range_sums
from tessera_rt.scheduler.chunked import halved_costs
from tessera_rt.scheduler.patterns import Pattern
from tessera_rt.scheduler.templates import Template


class Setting:
    """Model, template and costs, with a memory ``limit`` in bytes per rank (0: none). Remembers simulated steps.

    ``pairs``: of the same model, costs, method and patterns, so that settings can share what they know.

    ``method`` and ``patterns``: as in ``PairCosts``. ``halves``: MoE layers of actions that run ``chunked.alone`` go in
    two halves (only simulated). ``tapered``: so many of the template's micro-batches at either end are small (only
    simulated).
    """

    def __init__(
        self,
        model: ModelSpec,
        costs: CostTable,
        template: Template,
        *,
        limit: int,
        method: str,
        patterns: Sequence[Pattern] = (),
        halves: bool = False,
        tapered: int = 0,
        pairs: PairCosts | None = None,
    ) -> None:
        self.model = model
        self.costs = costs
        self.template = template
        self.limit = limit
        self.patterns = tuple(patterns)
        self.pairs = pairs or PairCosts(model, costs, method=method, patterns=patterns)
        self.memory = MemoryModel(model, costs, template)
        self.edges: tuple[Edge, ...] = cost_edges(template)
        self.alone_pairs: PairCosts | None = None
        self.tapered = tapered
        self.clock = self._new_clock()
        if halves:
            self._halve()

    def with_halves(self, alone_pairs: PairCosts | None = None) -> Setting:
        """The same with MoE layers in halves where passes run alone (``alone_pairs``: if known already)."""
        other = copy(self)
        other._halve(alone_pairs)
        return other

    def with_tapered_ends(self, count: int) -> Setting:
        """The same with so many small micro-batches at either end (only simulated)."""
        other = copy(self)
        other.tapered = count
        other.clock = other._new_clock()
        return other

    def _new_clock(self) -> StepClock:
        return StepClock(
            self.template.stage_ranks,
            self.template.actions,
            self.pairs,
            alone_pairs=self.alone_pairs,
            tapered=self.tapered,
        )

    def with_method(self, method: str) -> Setting:
        """The same with pairs ordered by another method; itself if it is this one's."""
        if method == self.pairs.method:
            return self
        other = copy(self)
        other.pairs = PairCosts(self.model, self.costs, method=method, patterns=self.patterns)
        if self.alone_pairs is not None:
            other._halve()
        else:
            other.clock = other._new_clock()
        return other

    def _halve(self, alone_pairs: PairCosts | None = None) -> None:
        costs = halved_costs(self.model, self.costs)
        self.alone_pairs = alone_pairs or PairCosts(self.model, costs, method=self.pairs.method)
        self.clock = self._new_clock()

    def with_template(self, template: Template) -> Setting:
        """The same for another order of the same stages; what is known of pairs is shared."""
        other = copy(self)
        other.__dict__.pop("distinct_actions", None)  # of the other order
        other.template = template
        other.memory = MemoryModel(self.model, self.costs, template)
        other.edges = cost_edges(template)
        other.clock = self.clock.for_order(template.actions)
        return other

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
        return {
            action.key: self.clock.pairs_of(action).interleaving(action, chunks) for action in self.distinct_actions
        }

    def step_ns(self, bounds: Bounds) -> int:
        """Simulated step time."""
        return self.clock(bounds)
