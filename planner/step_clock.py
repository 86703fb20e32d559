"""The clock of searches: simulated step times of partitions under one order of passes, by ``scheduler.fast_steps``."""

from __future__ import annotations

from collections.abc import Sequence

from tessera_rt.plan import Action, ActionKind
from tessera_rt.planner.candidates import Bounds, Range, ranges
from tessera_rt.planner.pair_costs import PairCosts
from tessera_rt.scheduler.chunked import alone
from tessera_rt.scheduler.fast_steps import Blocks, FastSteps, Ran, occupancies

_Kind = tuple[bool, tuple[tuple[ActionKind, int], ...]]


class SharedBlocks:
    """Blocks, and which of them an action of chunks of these kinds (``PairCosts.kinds``) is."""

    def __init__(self) -> None:
        self.blocks = Blocks()
        self.numbers: dict[_Kind, int] = {}


class StepClock:
    """Simulated step time (ns) of partitions under one order of passes; the simulator's, to the nanosecond.

    ``pairs``: costs and task orders of actions; ``alone_pairs``: of actions that run ``chunked.alone``, where theirs
    differ (MoE layers in halves). Clocks that share ``blocks`` do not prepare the same action twice. Raises
    ScheduleError for an order that cannot run.
    """

    def __init__(
        self,
        stage_ranks: Sequence[int],
        actions: Sequence[Sequence[Action]],
        pairs: PairCosts,
        *,
        alone_pairs: PairCosts | None = None,
        blocks: SharedBlocks | None = None,
    ) -> None:
        self.stage_ranks = tuple(stage_ranks)
        self.pairs = pairs
        self.alone_pairs = alone_pairs
        self.blocks = blocks or SharedBlocks()
        self._steps = FastSteps(stage_ranks, actions)
        self._outputs = [pairs.costs.memory[item.label].output for item in pairs.model.items]
        self._known: dict[Bounds, int] = {}

    def __call__(self, bounds: Bounds) -> int:
        if bounds not in self._known:
            self._known[bounds] = self.run(bounds).step_ns
        return self._known[bounds]

    def for_order(self, actions: Sequence[Sequence[Action]]) -> StepClock:
        """A clock for another order of the same stages."""
        return StepClock(self.stage_ranks, actions, self.pairs, alone_pairs=self.alone_pairs, blocks=self.blocks)

    def run(self, bounds: Bounds) -> Ran:
        """The step with the times of all tasks."""
        chunks = ranges(bounds)
        costs = self.pairs.costs
        numbers = {pairs: pairs.kinds(chunks).tolist() for pairs in (self.pairs, self.alone_pairs) if pairs is not None}
        return self._steps.run(
            self.blocks.blocks,
            [self._block(action, chunks, numbers[self.pairs_of(action)]) for action in self._steps.kinds],
            occupancies(self.stage_ranks, bounds, self._outputs, costs),
            latency_ns=costs.link.latency_ns,
            contention=costs.contention,
        )

    def pairs_of(self, action: Action) -> PairCosts:
        """The costs that hold for an action."""
        return self.alone_pairs if self.alone_pairs is not None and alone(action.key) else self.pairs

    def _block(self, action: Action, chunks: Sequence[Range], numbers: Sequence[int]) -> int:
        pairs = self.pairs_of(action)
        key = (pairs is not self.pairs, tuple((part.kind, numbers[part.stage]) for part in action.passes))
        if key not in self.blocks.numbers:
            graphs = [pairs.graph(part.kind, chunks[part.stage]) for part in action.passes]
            place = {name: i for i, name in enumerate(name for graph in graphs for name in graph.names)}
            order = [place[name] for name in pairs.interleaving(action, chunks).order]
            self.blocks.numbers[key] = self.blocks.blocks.add(graphs, order)
        return self.blocks.numbers[key]
