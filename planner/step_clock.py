"""The clock of searches: simulated step times of partitions under one order of passes, by ``scheduler.fast_steps``."""

from __future__ import annotations

from collections.abc import Sequence

from tessera_rt.plan import Action, ActionKind
from tessera_rt.planner.candidates import Bounds, Range, ranges
from tessera_rt.planner.pair_costs import PairCosts
from tessera_rt.scheduler.chunked import alone
from tessera_rt.scheduler.fast_steps import Blocks, FastSteps, Ran, occupancies
from tessera_rt.scheduler.part_costs import part_costs

_Kind = tuple[bool, str, tuple[tuple[ActionKind, int], ...]]


class SharedBlocks:
    """Blocks, and which of them an action of chunks of these kinds (``PairCosts.kinds``) is."""

    def __init__(self) -> None:
        self.blocks = Blocks()
        self.numbers: dict[_Kind, int] = {}
        self.small: dict[PairCosts, PairCosts] = {}  # costs of full micro-batches -> of small ones


class StepClock:
    """Simulated step time (ns) of partitions under one order of passes; the simulator's, to the nanosecond.

    ``pairs``: costs and task orders of actions; ``alone_pairs``: of actions that run ``chunked.alone``, where theirs
    differ (MoE layers in halves). ``tapered``: so many micro-batches at either end are small (``part_costs.py``); their
    actions have the task orders of full ones. Clocks that share ``blocks`` do not prepare the same action twice. Raises
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
        tapered: int = 0,
    ) -> None:
        self.stage_ranks = tuple(stage_ranks)
        self.pairs = pairs
        self.alone_pairs = alone_pairs
        self.blocks = blocks or SharedBlocks()
        self.tapered = tapered
        self._sizes, self._small = self._small_pairs(actions) if tapered else ({}, self.blocks.small)
        self._steps = FastSteps(stage_ranks, actions, kind_of=self._sizes or None)
        self._outputs = [pairs.costs.memory[item.label].output for item in pairs.model.items]
        self._known: dict[Bounds, int] = {}

    def __call__(self, bounds: Bounds) -> int:
        if bounds not in self._known:
            self._known[bounds] = self.run(bounds).step_ns
        return self._known[bounds]

    def for_order(self, actions: Sequence[Sequence[Action]]) -> StepClock:
        """A clock for another order of the same stages."""
        return StepClock(
            self.stage_ranks,
            actions,
            self.pairs,
            alone_pairs=self.alone_pairs,
            blocks=self.blocks,
            tapered=self.tapered,
        )

    def run(self, bounds: Bounds) -> Ran:
        """The step with the times of all tasks."""
        costs = self.pairs.costs
        return self._steps.run(
            self.blocks.blocks,
            self._block_of(ranges(bounds)),
            occupancies(self.stage_ranks, bounds, self._outputs, costs),
            latency_ns=costs.link.latency_ns,
            contention=costs.contention,
        )

    def waits(self, bounds: Bounds) -> list[list[int]]:
        """Per rank and action: ns for which compute idles in front of it."""
        return self._steps.waits(self.blocks.blocks, self._block_of(ranges(bounds)), self.run(bounds))

    def pairs_of(self, action: Action) -> PairCosts:
        """The costs that hold for an action."""
        return self.alone_pairs if self.alone_pairs is not None and alone(action.key) else self.pairs

    def _small_pairs(self, actions: Sequence[Sequence[Action]]) -> tuple[dict[Action, str], dict[PairCosts, PairCosts]]:
        """Each action's key with a letter a pass for its size, and what costs of full micro-batches are for small."""
        model, costs = self.pairs.model, self.pairs.costs
        tables = part_costs(actions, model, costs, halves=self.alone_pairs is not None, tapered=self.tapered)
        assert tables is not None, "some micro-batches are small"
        sizes = {
            action: f"{action.key} " + "".join("fs"[tables.is_small(part.microbatch)] for part in action.passes)
            for row in actions
            for action in row
        }
        if self.pairs not in self.blocks.small:
            self.blocks.small[self.pairs] = PairCosts(model, tables.small)
        if self.alone_pairs is not None and self.alone_pairs not in self.blocks.small:
            self.blocks.small[self.alone_pairs] = PairCosts(model, tables.small_alone)
        return sizes, self.blocks.small

    def _block_of(self, chunks: Sequence[Range]) -> list[int]:
        """The block of each kind of action."""
        numbers = {pairs: pairs.kinds(chunks).tolist() for pairs in (self.pairs, self.alone_pairs) if pairs is not None}
        return [self._block(action, chunks, numbers[self.pairs_of(action)]) for action in self._steps.kinds]

    def _block(self, action: Action, chunks: Sequence[Range], numbers: Sequence[int]) -> int:
        pairs = self.pairs_of(action)
        size = self._sizes.get(action, "").partition(" ")[2]
        key = (pairs is not self.pairs, size, tuple((part.kind, numbers[part.stage]) for part in action.passes))
        if key not in self.blocks.numbers:
            graphs = [
                (self._small[pairs] if size[i : i + 1] == "s" else pairs).graph(part.kind, chunks[part.stage])
                for i, part in enumerate(action.passes)
            ]
            place = {name: i for i, name in enumerate(name for graph in graphs for name in graph.names)}
            order = [place[name] for name in pairs.interleaving(action, chunks).order]
            self.blocks.numbers[key] = self.blocks.blocks.add(graphs, order)
        return self.blocks.numbers[key]
