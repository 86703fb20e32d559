"""Which W each rank holds back, and where they run (``scheduler.orders_pooled``), within a pool of so many bytes.

What a rank gains from it depends on when others finish, so the simulated step decides: first all ranks together hold
W back to the end in simple patterns (more the later the rank would else wait for others). Then one rank after the other
holds W back over a part of its order, mostly until it waits in the simulated step, and keeps what makes that shorter.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from tessera_rt.plan import Action, ActionKind
from tessera_rt.planner.candidates import Bounds, ranges
from tessera_rt.planner.memory import MemoryModel
from tessera_rt.planner.setting import Setting
from tessera_rt.scheduler.orders_pooled import Pool, late_room, own_room, pending, pooled, taken_room
from tessera_rt.scheduler.templates import Template

FIT = 2
"""A W is held back for a wait if it takes at most so many times as long."""
MOST_SIMULATIONS = 800
SIMULATED_PASSES = 2_500_000
"""Work of looking for pools, in passes simulated: about fifteen seconds."""
_SLOPES = (0.0, 0.5, 1.0, 2.0, 3.0)
_BASES = (0, 1, 2, 4, 8)
_CHANGES = (-2, -1, 1, 1, 2, 4)
_BESIDE, _ANYWHERE = 0.1, 0.2  # shares of changes
_TRIES = 10  # changes looked at for each that is simulated

Pools = tuple[Pool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """A template with pools, and its simulated step."""

    template: Template
    pools: Pools
    step_ns: int


def with_pools(setting: Setting, bounds: Bounds, size: int, *, simulations: int = MOST_SIMULATIONS) -> Pooled:
    """The fastest pools found of at most ``size`` bytes on each rank; no pool at all if none makes the step shorter.

    Each rank's planned memory keeps the setting's limit. ``simulations``: most steps that are simulated.
    """
    search = _Search(setting, bounds, size, simulations)
    if any(0 < bytes_ <= size for bytes_ in search.sizes):
        search.try_patterns()
        search.try_changes(random.Random(0))
    if search.step_ns == setting.step_ns(bounds):
        search.best = (Pool(),) * setting.template.pp
    return Pooled(template=search.template(search.best), pools=search.best, step_ns=search.step_ns)


class _Search:
    """The best pools so far, ``best``, and their step."""

    def __init__(self, setting: Setting, bounds: Bounds, size: int, simulations: int) -> None:
        self.setting = setting
        self.bounds = bounds
        self.rows = setting.template.actions
        chunks = ranges(bounds)
        self.sizes = [setting.memory.pending_bytes(chunk) for chunk in chunks]
        self.most = [max(size, pending(row, self.sizes)) for row in self.rows]
        self.shortest = min(setting.pairs.solo(ActionKind.W, chunk) for chunk in chunks) // FIT
        self.excess = setting.excess(bounds)
        self.best: Pools = (Pool(),) * len(self.rows)
        self.step_ns = setting.step_ns(bounds)
        passes = sum(len(action.passes) for row in self.rows for action in row)
        self.simulations = min(simulations, SIMULATED_PASSES // max(1, passes))
        self._known: dict[Pools, int] = {self.best: self.step_ns}
        self._orders: dict[tuple[int, Pool], tuple[Action, ...]] = {}
        self._pending: dict[tuple[int, Pool], int] = {}

    def try_patterns(self) -> None:
        """All ranks hold back the W of their last backwards."""
        for steady in (True, False):
            most = [self._most_late(rank, steady) for rank in range(len(self.rows))]
            for slope, base in product(_SLOPES, _BASES):
                counts = [min(round(base + slope * rank), count) for rank, count in enumerate(most)]
                rooms = (late_room(row, count, steady=steady) for row, count in zip(self.rows, counts, strict=True))
                self._try(tuple(Pool(tuple(room)) for room in rooms))

    def try_changes(self, rng: random.Random) -> None:
        """One rank holds back more W, or fewer, over a part of its order."""
        waits = self._waits()
        for _ in range(_TRIES * self.simulations):
            if len(self._known) >= self.simulations:
                return
            rank = rng.randrange(len(self.rows))
            pool = self._changed(rank, waits[rank], rng)
            if self._try((*self.best[:rank], pool, *self.best[rank + 1 :])):
                waits = self._waits()

    def template(self, pools: Pools) -> Template:
        return replace(self.setting.template, actions=self._orders_of(pools))

    def _changed(self, rank: int, waits: Sequence[int], rng: random.Random) -> Pool:
        """The rank's pool with a change. ``waits``: ns in front of each of its ``passes_of``."""
        row, old = self.rows[rank], self.best[rank]
        room = list(old.room or own_room(row))
        if rng.random() < _BESIDE:
            return Pool(tuple(room), not old.beside)
        length = int(len(room) ** rng.random())
        if rng.random() < _ANYWHERE:
            stop = rng.randrange(len(room)) + length
        else:
            weights = [wait if wait >= self.shortest else 0 for wait in waits]
            # The end of the step counts as much as half of the longest wait.
            stop = rng.choices(range(len(room) + 1), [*weights, max(waits) // 2 + 1])[0]
        change = rng.choice(_CHANGES)
        for i in range(max(0, stop - length), min(stop, len(room))):
            room[i] = max(0, room[i] + change)
        return Pool(taken_room(row, room), old.beside)

    def _try(self, pools: Pools) -> bool:
        """Takes these pools if they keep all limits and make the step no longer. Whether they make it shorter."""
        if pools in self._known or not all(self._keeps_size(rank, pool) for rank, pool in enumerate(pools)):
            return False
        orders = self._orders_of(pools)
        self._known[pools] = step_ns = self.setting.clock.for_order(orders)(self.bounds)
        if step_ns > self.step_ns or not self._keeps_limit(pools):
            return False
        shorter = step_ns < self.step_ns
        self.best, self.step_ns = pools, step_ns
        return shorter

    def _keeps_size(self, rank: int, pool: Pool) -> bool:
        if (rank, pool) not in self._pending:
            self._pending[rank, pool] = pending(self._order(rank, pool), self.sizes)
        return self._pending[rank, pool] <= self.most[rank]

    def _keeps_limit(self, pools: Pools) -> bool:
        limit = self.setting.limit
        if not limit:
            return True
        memory = MemoryModel(self.setting.model, self.setting.costs, self.template(pools))
        return sum(max(0, peak - limit) for peak in memory.peaks(self.bounds)) <= self.excess

    def _most_late(self, rank: int, steady: bool) -> int:
        """The most last backwards of a rank whose W its pool can take."""
        row = self.rows[rank]
        few, many = 0, len(row) + 1  # known to fit, known not to
        while many - few > 1:
            middle = (few + many) // 2
            fits = self._keeps_size(rank, Pool(tuple(late_room(row, middle, steady=steady))))
            few, many = (middle, many) if fits else (few, middle)
        return few

    def _waits(self) -> list[list[int]]:
        """Per rank: ns for which it waits in front of each of its ``passes_of``, W in front included."""
        orders = self._orders_of(self.best)
        found: list[list[int]] = []
        for order, waits in zip(orders, self.setting.clock.for_order(orders).waits(self.bounds), strict=True):
            found.append([])
            before = 0
            for action, wait in zip(order, waits, strict=True):
                before += wait
                if any(part.kind is not ActionKind.W for part in action.passes):
                    found[-1].append(before)
                    before = 0
        return found

    def _orders_of(self, pools: Pools) -> tuple[tuple[Action, ...], ...]:
        return tuple(self._order(rank, pool) for rank, pool in enumerate(pools))

    def _order(self, rank: int, pool: Pool) -> tuple[Action, ...]:
        if (rank, pool) not in self._orders:
            self._orders[rank, pool] = pooled(self.rows[rank], pool)
        return self._orders[rank, pool]
