"""Post-overlap cost of passes run together: an interleaving's, or a measured figure where the cost table has one.

Chunks made of equal items in equal order cost the same wherever they stand, so results are kept by the items' own costs
and renamed for the chunk at hand. Orders that users gave (``patterns``) hold for their own chunks only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from tessera_rt.costs import CostTable
from tessera_rt.errors import CostError, Problem
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Action, ActionKind, Interleaving
from tessera_rt.planner.candidates import Range
from tessera_rt.planner.overlap_graph import Edge
from tessera_rt.planner.tables import Table, prefix_sums
from tessera_rt.scheduler.contention import contended_times
from tessera_rt.scheduler.graphs import chunk_graph
from tessera_rt.scheduler.interleave import interleave
from tessera_rt.scheduler.patterns import Pattern, complete
from tessera_rt.tasks import Pass, Resource, TaskGraph

STATES_PER_PAIR = 50_000
"""Where the exact search of a pair stops: about 50 ms, since a plan looks at hundreds of pairs. Released models' pairs
of up to eight layers in all need fewer."""
STATES_PER_LONG_PAIR = 5_000
"""The same for pairs of more tasks than MOST_TASKS, which are rarely proven and whose heuristics are close."""
MOST_TASKS = 128


@dataclass(frozen=True, slots=True)
class _Order:
    """An interleaving by positions in the canonical task order instead of names; times in ns from its start."""

    order: tuple[int, ...]
    starts_ns: tuple[int, ...]
    makespan_ns: int
    stretched_ns: int  # its length under contention
    outputs_ns: tuple[int, ...]  # per pass: end of its last task that is no W, under contention
    method: str
    bound_ns: int


def pair_key(graph: TaskGraph) -> str:
    """The key of a measured pair in ``CostTable.pairs``: its task names in canonical order, forward's first."""
    return " ".join(graph.names)


class PairCosts:
    """Costs of running passes of item ranges, alone or together. All times are ns.

    ``method``: how tasks are interleaved (``interleave.METHODS``); ``patterns``: given orders of pairs. Instances
    remember what they computed. Raises ScheduleError for a pattern with a task that its pair lacks.
    """

    def __init__(
        self, model: ModelSpec, costs: CostTable, *, method: str = "exact", patterns: Sequence[Pattern] = ()
    ) -> None:
        self.model = model
        self.costs = costs
        self.method = method
        forward = [chunk_graph(model, costs, i, i + 1, Pass.F) for i in range(len(model.items))]
        backward = [chunk_graph(model, costs, i, i + 1, Pass.B) for i in range(len(model.items))]
        self._patterns = {(pattern.forward, pattern.backward): pattern for pattern in patterns}
        self._given = {chunk for pair in self._patterns for chunk in pair}
        self._class_of = _number(_signature(f, b) for f, b in zip(forward, backward, strict=True))
        self._graphs: dict[tuple[ActionKind, Range], TaskGraph] = {}
        self._orders: dict[tuple[tuple[ActionKind, tuple[int, ...]], ...], _Order] = {}
        self._given_orders: dict[tuple[tuple[ActionKind, Range], ...], _Order] = {}
        self._pairs: dict[tuple[Range, Range], int] = {}
        self._kinds: dict[tuple[int, ...] | Range, int] = {}
        self._forward_sums = _PrefixSums.of(forward)
        self._backward_sums = _PrefixSums.of(backward)

    @property
    def orders(self) -> int:
        """Number of orders made so far: of single passes and of different pairs."""
        return len(self._orders) + len(self._given_orders)

    def graph(self, kind: ActionKind, chunk: Range) -> TaskGraph:
        """Tasks of a pass over a chunk; ``B`` brings its W tasks, ``I`` does not."""
        key = (kind, chunk)
        if key not in self._graphs:
            pass_ = Pass.B if kind is ActionKind.I else Pass(kind)
            self._graphs[key] = chunk_graph(self.model, self.costs, *chunk, pass_, with_w=kind is not ActionKind.I)
        return self._graphs[key]

    def interleaving(self, action: Action, chunk_of: Sequence[Range]) -> Interleaving:
        """The order of an action's tasks when stage s holds the items ``chunk_of[s]``. Micro-batches are ignored."""
        parts = tuple((part.kind, chunk_of[part.stage]) for part in action.passes)
        found = self._order(parts)
        names = [name for kind, chunk in parts for name in self.graph(kind, chunk).names]
        return Interleaving(
            key=action.key,
            order=tuple(names[i] for i in found.order),
            starts_ns=found.starts_ns,
            makespan_ns=found.makespan_ns,
            comm_sms=self.costs.comm_sms,
            method=found.method,
            bound_ns=found.bound_ns,
        )

    def timing(self, action: Action, chunk_of: Sequence[Range]) -> tuple[int, tuple[int, ...]]:
        """Length of an action under contention (ns), and when the output of each of its passes exists (W left out)."""
        parts = tuple((part.kind, chunk_of[part.stage]) for part in action.passes)
        found = self._order(parts)
        return found.stretched_ns, found.outputs_ns

    def solo(self, kind: ActionKind, chunk: Range) -> int:
        """Time of one pass over a chunk by itself."""
        return self._order(((kind, chunk),)).makespan_ns

    def pair(self, forward: Range, backward: Range) -> int:
        """Time of F over one chunk with B and W over another: measured if the table has it, else scheduled.

        Raises CostError when a measured time lies outside what is possible: at least the longer chunk's, at most both
        chunks' tasks one after the other under full contention.
        """
        key = (forward, backward)
        if key not in self._pairs:
            self._pairs[key] = self._pair(forward, backward)
        return self._pairs[key]

    def edge(self, edge: Edge, forward: Range, backward: Range) -> int:
        """Cost of an edge of the overlap graph: its pair's time, or the sum of both passes where nothing overlaps."""
        if edge.overlapped:
            return self.pair(forward, backward)
        return self.solo(ActionKind.F, forward) + self.solo(ActionKind.B, backward)

    def kinds(self, chunks: Sequence[Range]) -> Table:
        """A number for each range; ranges of equal items in equal order have the same, unless a pattern names one."""
        keys = ((-1, *chunk) if chunk in self._given else self._class_of[slice(*chunk)] for chunk in chunks)
        return np.array([self._kinds.setdefault(key, len(self._kinds)) for key in keys], np.int64)

    def limits(self, edge: Edge, forward: Sequence[Range], backward: Sequence[Range]) -> tuple[Table, Table]:
        """[len(forward), len(backward)] each: least and greatest possible cost of pairs, without scheduling them."""
        f, b = self._forward_sums.over(forward).column(), self._backward_sums.over(backward)
        return self._least(f, b, edge.overlapped), self._most(f, b)

    def stage_limits(self, edge: Edge) -> tuple[Table, Table]:
        """[n + 1, n + 1] each, for ranges [p, q): the edge's least cost by its forward, by its backward stage."""
        f, b = self._forward_sums.tables(), self._backward_sums.tables()
        if edge.forward != edge.backward:
            return f.path, b.path
        least = self._least(f, b, edge.overlapped)
        return least, least

    def largest_limit(self, edges: Sequence[Edge], bounds: Sequence[int]) -> int:
        """A lower bound of the largest edge cost of a partition, without scheduling any pair."""
        chunks = list(pairwise(bounds))
        f = self._forward_sums.over([chunks[edge.forward] for edge in edges])
        b = self._backward_sums.over([chunks[edge.backward] for edge in edges])
        overlapped = [edge.overlapped for edge in edges]
        return int(np.where(overlapped, self._least(f, b, True), self._least(f, b, False)).max())

    def _least(self, f: _Loads, b: _Loads, overlapped: bool) -> Table:
        if not overlapped:
            return np.asarray(f.path + b.path, dtype=np.int64)
        longest = np.maximum(f.path, b.path)
        if self.costs.pairs:  # measured times need not add up
            return np.asarray(longest, dtype=np.int64)
        return np.asarray(np.maximum.reduce([longest, f.comp + b.comp, f.comm + b.comm]), dtype=np.int64)

    def _most(self, f: _Loads, b: _Loads) -> Table:
        most = f.comp + f.comm + b.comp + b.comm
        if self.costs.pairs:
            most = np.ceil(most * (1 + self.costs.contention))
        return np.asarray(most, dtype=np.int64)

    def _pair(self, forward: Range, backward: Range) -> int:
        f, b = self._forward_sums.over([forward]), self._backward_sums.over([backward])
        least, most = int(self._least(f, b, True)[0]), int(self._most(f, b)[0])
        measured = self._measured(forward, backward)
        if measured is not None:
            if not least <= measured <= most:
                field = f"pairs[{self._key(forward, backward)}]"
                problem = Problem(field, measured, f"between {least} and {most} ns", "measure this pair again")
                raise CostError.of("cost table", [problem])
            return measured
        if least == most:  # one lane only: nothing to order
            return most
        cost = self._order(((ActionKind.F, forward), (ActionKind.B, backward))).makespan_ns
        assert least <= cost <= most, f"{forward} with {backward}: {cost} ns is not within [{least}, {most}]"
        return cost

    def _measured(self, forward: Range, backward: Range) -> int | None:
        return self.costs.pairs.get(self._key(forward, backward)) if self.costs.pairs else None

    def _key(self, forward: Range, backward: Range) -> str:
        return pair_key(self.graph(ActionKind.F, forward).merged(self.graph(ActionKind.B, backward)))

    def _order(self, parts: tuple[tuple[ActionKind, Range], ...]) -> _Order:
        pattern = self._pattern(parts)
        if pattern is not None:
            if parts not in self._given_orders:
                self._given_orders[parts] = self._made(parts, pattern)
            return self._given_orders[parts]
        key = tuple((kind, self._class_of[chunk[0] : chunk[1]]) for kind, chunk in parts)
        if key not in self._orders:
            self._orders[key] = self._made(parts, None)
        return self._orders[key]

    def _pattern(self, parts: Sequence[tuple[ActionKind, Range]]) -> Pattern | None:
        if not self._patterns or len(parts) != 2 or parts[0][0] is not ActionKind.F:
            return None
        pattern = self._patterns.get((parts[0][1], parts[1][1]))
        if pattern is None or parts[1][0] is not ActionKind.I:
            return pattern
        # Without W tasks the rest of the pattern still holds.
        return replace(pattern, order=tuple(name for name in pattern.order if not name.startswith("W_")))

    def _made(self, parts: Sequence[tuple[ActionKind, Range]], pattern: Pattern | None) -> _Order:
        graphs = [self.graph(*part) for part in parts]
        graph = graphs[0]
        for other in graphs[1:]:
            graph = graph.merged(other)
        sms, contention = self.costs.comm_sms, self.costs.contention
        if pattern is not None:
            made = complete(pattern, graph, "", method=self.method, comm_sms=sms)
        else:
            states = STATES_PER_PAIR if len(graph.tasks) <= MOST_TASKS else STATES_PER_LONG_PAIR
            made = interleave(graph, "", method=self.method, comm_sms=sms, contention=contention, max_states=states)
        _, ends = contended_times(made.order, graph, contention)
        place = {name: i for i, name in enumerate(graph.names)}
        return _Order(
            order=tuple(place[name] for name in made.order),
            starts_ns=made.starts_ns,
            makespan_ns=made.makespan_ns,
            stretched_ns=max(ends.values(), default=0),
            outputs_ns=tuple(
                max((ends[task.name] for task in own.tasks if task.pass_ is not Pass.W), default=0) for own in graphs
            ),
            method=made.method,
            bound_ns=made.bound_ns,
        )


@dataclass(frozen=True, slots=True)
class _Loads:
    """Per chunk: time on each lane, and the longest chain of dependent tasks (W left out)."""

    comp: Table
    comm: Table
    path: Table

    def column(self) -> _Loads:
        return _Loads(self.comp[:, None], self.comm[:, None], self.path[:, None])


@dataclass(frozen=True, slots=True)
class _PrefixSums:
    """Sums over the first k items, so that any chunk's loads are differences. Paths add up: items form a chain."""

    comp: Table
    comm: Table
    path: Table

    @classmethod
    def of(cls, graphs: Sequence[TaskGraph]) -> _PrefixSums:
        return cls(
            prefix_sums(graph.total_ns(Resource.COMP) for graph in graphs),
            prefix_sums(graph.total_ns(Resource.COMM) for graph in graphs),
            prefix_sums(_longest_path(graph) for graph in graphs),
        )

    def tables(self) -> _Loads:
        """[n + 1, n + 1] of all ranges [p, q); without meaning where q < p."""
        return _Loads(*(sums[None, :] - sums[:, None] for sums in (self.comp, self.comm, self.path)))

    def over(self, chunks: Sequence[Range]) -> _Loads:
        start = np.array([chunk[0] for chunk in chunks], dtype=np.int64)
        stop = np.array([chunk[1] for chunk in chunks], dtype=np.int64)
        return _Loads(*(sums[stop] - sums[start] for sums in (self.comp, self.comm, self.path)))


def _longest_path(graph: TaskGraph) -> int:
    ends: dict[str, int] = {}
    for task in graph.tasks:
        if not task.movable:
            ends[task.name] = max((ends[dep] for dep in task.deps), default=0) + task.ns
    return max(ends.values(), default=0)


def _signature(forward: TaskGraph, backward: TaskGraph) -> tuple[tuple[str, str, int], ...]:
    """Everything about one item's tasks that an interleaving depends on (dependencies follow from the kinds)."""
    return tuple((task.kind, task.pass_, task.ns) for task in (*forward.tasks, *backward.tasks))


def _number(signatures: Iterable[tuple[tuple[str, str, int], ...]]) -> tuple[int, ...]:
    numbers: dict[tuple[tuple[str, str, int], ...], int] = {}
    return tuple(numbers.setdefault(signature, len(numbers)) for signature in signatures)
