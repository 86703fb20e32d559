"""Planned memory of every pipeline rank: what its stages always hold, and the fullest moment of its order.

While a rank works through its actions its memory is

    weights, gradients, optimizer state of all its stages
    + activations of every micro-batch in flight, stage by stage
    + what the W tasks of the running backward hold beyond the activations they replace, and of W passes still to come
    + the working set of the running compute task, payloads of the running passes' collectives (sent and received), and
      one buffer for each message that its stages send or receive.

Every term belongs to one stage and its item range, so a rank's memory is linear in the choice of ranges; the peak is
the maximum over the moments of the order (``in_flight.live_states``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tessera_rt.cost_sources.layer_shapes import embedding_uses
from tessera_rt.costs import CostTable
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import RankMemory
from tessera_rt.planner.candidates import Bounds, Range, ranges
from tessera_rt.planner.in_flight import LiveState, live_states, stages_on
from tessera_rt.planner.tables import Table, prefix_sums
from tessera_rt.scheduler.graphs import chunk_graph
from tessera_rt.scheduler.templates import Template
from tessera_rt.tasks import Pass


class MemoryModel:
    """Bytes on each pipeline rank for any partition, under one template and one cost table.

    The embedding table is used by the embedding, by MTP blocks and by a tied head. Uses on one rank share its weight,
    optimizer state and shard of the reduced gradients (counted once); each keeps a gradient buffer of its own.
    """

    def __init__(self, model: ModelSpec, costs: CostTable, template: Template) -> None:
        self.template = template
        self.ranks = len(template.actions)
        self.states: tuple[tuple[LiveState, ...], ...] = live_states(template)
        self._stages_on = [stages_on(template, rank) for rank in range(self.ranks)]
        self._place = {stage: i for stages in self._stages_on for i, stage in enumerate(stages)}
        memory = [costs.memory[item.label] for item in model.items]
        self.items = len(memory)
        self._weights = prefix_sums(m.weights for m in memory)
        self._gradients = prefix_sums(m.gradients for m in memory)
        self._optimizer = prefix_sums(m.optimizer for m in memory)
        self._activations = prefix_sums(m.activations for m in memory)
        self._pending = prefix_sums(m.pending_w for m in memory)
        self._transient = _range_maxima([m.transient for m in memory])
        self._payload_f, self._payload_b = (_range_maxima(_payloads(model, costs, pass_)) for pass_ in (Pass.F, Pass.B))
        self._growth = _growth([m.activations for m in memory], [m.pending_w for m in memory])
        # Position p stands for the boundary before item p: what crosses it is the output of item p - 1.
        self._crossing = np.array([0, *(m.output for m in memory[:-1]), 0], dtype=np.int64)
        self._known_chunks: dict[tuple[int, int, int], Table] = {}
        self._known_peaks: dict[tuple[int, tuple[Range, ...]], int] = {}
        uses = [embedding_uses(model, [item]) for item in model.items]
        self._uses = prefix_sums(uses)
        tables = [m for m, use in zip(memory, uses, strict=True) if use]
        self._table_weights = min(m.weights for m in tables)
        self._table_optimizer = min(m.optimizer for m in tables)
        # Gradients are a buffer and, where several ranks reduce them, 1 / ranks of it for this rank's shard of the sum.
        ranks = costs.workload.dp * costs.workload.ep if costs.workload.shard_optimizer else 1
        self._table_shard = min(m.gradients for m in tables) // (ranks + 1) if ranks > 1 else 0

    @property
    def table_bytes(self) -> int:
        """Bytes of the embedding table on a rank that uses it at least once; not part of ``stage_bytes``."""
        return self._table_weights + self._table_optimizer + self._table_shard

    def uses_table(self, chunk: Range) -> bool:
        """Whether an item of the range uses the embedding table."""
        return bool(self._uses[chunk[1]] > self._uses[chunk[0]])

    def stage_bytes(self, stage: int, start: Table, stop: Table) -> Table:
        """[states of the stage's rank, *start.shape]: bytes that stage adds if it holds the items [start, stop).

        Without the embedding table, which a rank holds once however many of its stages use it.
        """
        static = self._static(stage, start, stop)
        activations = _between(self._activations, start, stop)
        pending = _between(self._pending, start, stop)
        i = self._place[stage]
        return np.stack(
            [
                static
                + state.in_flight[i] * activations
                + state.waiting_w[i] * pending
                + state.backward[i] * self._growth[start, stop]
                + state.computing[i] * self._transient[start, stop]
                + 2 * state.forward[i] * self._payload_f[start, stop]
                + 2 * state.backward[i] * self._payload_b[start, stop]
                for state in self.states[self.template.stage_ranks[stage]]
            ]
        )

    def stage_peaks(self) -> Table:
        """[stages, n + 1, n + 1]: peak bytes of a stage's rank if the stage held items p to q - 1 and were alone there.

        With one stage a rank this is the rank's peak; otherwise a lower bound. Entries with q < p have no meaning.
        """
        start, stop = np.meshgrid(np.arange(self.items + 1), np.arange(self.items + 1), indexing="ij")
        peaks = np.stack([self.stage_bytes(s, start, stop).max(axis=0) for s in range(len(self.template.stage_ranks))])
        return np.asarray(peaks + self.table_bytes * (_between(self._uses, start, stop) > 0), dtype=np.int64)

    def stage_need(self, stage: int, chunk: Range) -> int:
        """Bytes of one stage at its own fullest moment, the embedding table included if it uses it."""
        return int(self._chunk_bytes(stage, chunk).max()) + self.uses_table(chunk) * self.table_bytes

    def pending_bytes(self, chunk: Range) -> int:
        """Bytes that one micro-batch holds on a stage with these items between its I and its W."""
        return int(self._pending[chunk[1]] - self._pending[chunk[0]])

    def held_bytes(self, rank: int, chunks: Sequence[Range]) -> int:
        """Most bytes that a rank holds for passes to come: activations of micro-batches in flight and pending W.

        ``chunks``: the items of every stage.
        """
        held = [chunks[stage] for stage in self._stages_on[rank]]
        activations = [int(self._activations[q] - self._activations[p]) for p, q in held]
        pending = [self.pending_bytes(chunk) for chunk in held]
        growth = [int(self._growth[chunk]) for chunk in held]
        return max(
            sum(
                state.in_flight[i] * activations[i] + state.waiting_w[i] * pending[i] + state.backward[i] * growth[i]
                for i in range(len(held))
            )
            for state in self.states[rank]
        )

    def peaks(self, bounds: Bounds) -> tuple[int, ...]:
        """Peak bytes of every rank."""
        chunks = ranges(bounds)
        return tuple(self._peak(rank, tuple(chunks[s] for s in held)) for rank, held in enumerate(self._stages_on))

    def _peak(self, rank: int, held: tuple[Range, ...]) -> int:
        # Searches move few stages at a time, so most ranks were seen before.
        key = (rank, held)
        if key not in self._known_peaks:
            self._known_peaks[key] = int(self._moments(rank, held).max())
        return self._known_peaks[key]

    def of(self, bounds: Bounds, limit: int = 0) -> tuple[RankMemory, ...]:
        """The memory of every rank, taken apart at its fullest moment. ``limit`` (0: none) is only noted."""
        chunks = ranges(bounds)
        return tuple(self._rank(rank, chunks, limit) for rank in range(self.ranks))

    def _rank(self, rank: int, chunks: Sequence[Range], limit: int) -> RankMemory:
        held = [chunks[s] for s in self._stages_on[rank]]
        return self._parts(rank, held, self.states[rank][int(self._moments(rank, tuple(held)).argmax())], limit)

    def at(self, rank: int, state: LiveState, bounds: Bounds) -> RankMemory:
        """The memory of a rank at one moment of its order, taken apart."""
        chunks = ranges(bounds)
        return self._parts(rank, [chunks[s] for s in self._stages_on[rank]], state, 0)

    def _parts(self, rank: int, held: Sequence[Range], state: LiveState, limit: int) -> RankMemory:
        extra = max(0, sum(int(self._uses[q] - self._uses[p]) for p, q in held) - 1)
        activations = pending = working = 0
        for i, (p, q) in enumerate(held):
            activations += state.in_flight[i] * int(self._activations[q] - self._activations[p])
            pending += state.waiting_w[i] * int(self._pending[q] - self._pending[p])
            pending += state.backward[i] * int(self._growth[p, q])
            working += state.computing[i] * int(self._transient[p, q])
            working += 2 * state.forward[i] * int(self._payload_f[p, q])
            working += 2 * state.backward[i] * int(self._payload_b[p, q])
        return RankMemory(
            weights=sum(int(self._weights[q] - self._weights[p]) for p, q in held) - extra * self._table_weights,
            gradients=sum(int(self._gradients[q] - self._gradients[p]) for p, q in held) - extra * self._table_shard,
            optimizer=sum(int(self._optimizer[q] - self._optimizer[p]) for p, q in held)
            - extra * self._table_optimizer,
            activations=activations,
            pending_w=pending,
            buffers=working
            + sum(self._messages(s, *chunk) for s, chunk in zip(self._stages_on[rank], held, strict=True)),
            limit=limit,
        )

    def moments(self, rank: int, bounds: Bounds) -> Table:
        """[states of the rank]: bytes on it at each of its moments."""
        chunks = ranges(bounds)
        return self._moments(rank, tuple(chunks[s] for s in self._stages_on[rank]))

    def _moments(self, rank: int, held: tuple[Range, ...]) -> Table:
        rows = [self._chunk_bytes(stage, chunk) for stage, chunk in zip(self._stages_on[rank], held, strict=True)]
        table = self.table_bytes if any(map(self.uses_table, held)) else 0
        return np.asarray(np.sum(rows, axis=0) + table, dtype=np.int64)

    def _chunk_bytes(self, stage: int, chunk: Range) -> Table:
        key = (stage, *chunk)
        if key not in self._known_chunks:
            self._known_chunks[key] = self.stage_bytes(stage, np.asarray(chunk[0]), np.asarray(chunk[1]))
        return self._known_chunks[key]

    def _static(self, stage: int, start: Table, stop: Table) -> Table:
        sums = (self._weights, self._gradients, self._optimizer)
        static = sum((_between(s, start, stop) for s in sums), np.zeros_like(start))
        before, after = self._neighbours(stage)
        static = static - self.table_bytes * _between(self._uses, start, stop)
        return static + 2 * (before * self._crossing[start] + after * self._crossing[stop])

    def _messages(self, stage: int, start: int, stop: int) -> int:
        """One buffer to send and one to receive for each boundary that another rank shares."""
        before, after = self._neighbours(stage)
        return 2 * (before * int(self._crossing[start]) + after * int(self._crossing[stop]))

    def _neighbours(self, stage: int) -> tuple[bool, bool]:
        """Whether the stage before and the stage behind exist and sit on other ranks."""
        ranks = self.template.stage_ranks
        before = stage > 0 and ranks[stage - 1] != ranks[stage]
        after = stage + 1 < len(ranks) and ranks[stage + 1] != ranks[stage]
        return before, after


def _payloads(model: ModelSpec, costs: CostTable, pass_: Pass) -> list[int]:
    """Per item: bytes of the largest collective of a pass."""
    graphs = [chunk_graph(model, costs, i, i + 1, pass_) for i in range(len(model.items))]
    return [max((task.bytes for task in graph.tasks), default=0) for graph in graphs]


def _between(sums: Table, start: Table, stop: Table) -> Table:
    return np.asarray(sums[stop] - sums[start], dtype=np.int64)


def _range_maxima(values: Sequence[int]) -> Table:
    """[n + 1, n + 1]: largest of the values p to q - 1; 0 for empty ranges."""
    n = len(values)
    table = np.zeros((n + 1, n + 1), dtype=np.int64)
    for p in range(n):
        table[p, p + 1 :] = np.maximum.accumulate(values[p:])
    return table


def _growth(activations: Sequence[int], pending: Sequence[int]) -> Table:
    """[n + 1, n + 1]: what a backward over items p to q - 1 holds at most beyond the chunk's activations.

    Backward goes from the last item to the first. An item's activations go when its B has ended, its pending W comes
    when its B begins, and all W may wait until the end: max over k of
    pending[k] + sum over i > k of (pending[i] - activations[i]).
    """
    n = len(activations)
    table = np.zeros((n + 1, n + 1), dtype=np.int64)
    for q in range(1, n + 1):
        replaced = most = 0
        for p in reversed(range(q)):
            most = max(most, replaced + pending[p])
            replaced += pending[p] - activations[p]
            table[p, q] = most
    return table
