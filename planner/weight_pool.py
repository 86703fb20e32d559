"""How many W each rank holds back (``scheduler.orders_pooled``), within a pool of so many bytes.

What a rank gains from it depends on when others finish, so the simulated step decides: first all ranks together in
simple patterns (more W the later the rank would else wait for others), then one rank after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from tessera_rt.plan import Action
from tessera_rt.planner.candidates import Bounds, ranges
from tessera_rt.planner.memory import MemoryModel
from tessera_rt.planner.setting import Setting
from tessera_rt.scheduler.orders_pooled import Pool, pending, pooled
from tessera_rt.scheduler.templates import Template

_SLOPES = (0.0, 0.5, 1.0, 2.0, 3.0)
_BASES = (0, 1, 2, 4, 8)
_CHANGES = (-4, -2, -1, 1, 2, 4)
_SWEEPS = 2

Pools = tuple[Pool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """A template with pools, and its simulated step."""

    template: Template
    pools: Pools
    step_ns: int


def with_pools(setting: Setting, bounds: Bounds, size: int) -> Pooled:
    """The fastest pools found of at most ``size`` bytes on each rank; no pool at all if none makes the step shorter.

    Each rank's planned memory keeps the setting's limit.
    """
    template = setting.template
    sizes = [setting.memory.pending_bytes(chunk) for chunk in ranges(bounds)]
    most = [_most(row, sizes, size) for row in template.actions]
    known: dict[Pools, int] = {}

    def step(pools: Pools) -> int:
        if pools not in known:
            known[pools] = setting.clock.for_order(_rows(template.actions, pools))(bounds)
        return known[pools]

    best = (Pool(),) * template.pp
    for beside, slope, base in product((True, False), _SLOPES, _BASES):
        counts = [round(base + slope * rank) for rank in range(template.pp)]
        best = _better(best, tuple(Pool(min(c, m[beside]), beside) for c, m in zip(counts, most, strict=True)), step)
    for _ in range(_SWEEPS):
        before = best
        for rank, change in product(reversed(range(template.pp)), _CHANGES):
            old = best[rank]
            count = min(max(0, old.deferred + change), most[rank][old.beside])
            best = _better(best, (*best[:rank], Pool(count, old.beside), *best[rank + 1 :]), step)
        if best == before:
            break
    if setting.limit:
        best = _within(setting, bounds, best)
    return Pooled(template=_template(template, best), pools=best, step_ns=step(best))


def _better(best: Pools, other: Pools, step: Callable[[Pools], int]) -> Pools:
    return other if step(other) < step(best) else best


def _most(row: Sequence[Action], sizes: Sequence[int], size: int) -> tuple[int, int]:
    """The largest pools of a rank that keep the size: with W at the end, with W beside backwards."""
    own = pending(row, sizes)
    found: list[int] = []
    for beside in (False, True):
        few, many = 0, len(row) + 1  # known to fit, known not to
        while many - few > 1:
            middle = (few + many) // 2
            fits = pending(pooled(row, Pool(middle, beside)), sizes) <= max(size, own)
            few, many = (middle, many) if fits else (few, middle)
        found.append(few)
    return found[0], found[1]


def _within(setting: Setting, bounds: Bounds, pools: Pools) -> Pools:
    """The pools, halved on ranks over the memory limit until they keep it."""
    while True:
        peaks = MemoryModel(setting.model, setting.costs, _template(setting.template, pools)).peaks(bounds)
        over = [peak > setting.limit and pool.deferred > 0 for peak, pool in zip(peaks, pools, strict=True)]
        if not any(over):
            return pools
        pools = tuple(
            replace(pool, deferred=pool.deferred // 2) if too_much else pool
            for pool, too_much in zip(pools, over, strict=True)
        )


def _rows(actions: Sequence[Sequence[Action]], pools: Pools) -> tuple[tuple[Action, ...], ...]:
    return tuple(pooled(row, pool) for row, pool in zip(actions, pools, strict=True))


def _template(template: Template, pools: Pools) -> Template:
    return replace(template, actions=_rows(template.actions, pools))
