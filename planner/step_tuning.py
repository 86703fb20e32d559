"""Partitions by simulated step time: a search with the clock of ``step_clock.py``.

Trials found partitions optimal in their largest pair up to 11 % slower in the step than a plain balanced one, so the
step decides. The search is simulated annealing from several known partitions, then local search from the best; it ends
after a number of evaluations, not of seconds, and its generator is seeded: equal input gives equal output.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from tessera_rt.planner.candidates import Bounds, ranges
from tessera_rt.planner.chain_dp import improve

_ROUNDS = ((0, 0.3, 0.03), (1, 0.15, 0.015), (2, 0.1, 0.015), (-1, 0.2, 0.012), (-1, 0.1, 0.004))
"""Annealing: which start by rank (-1: the best so far), share of the evaluations, and heat: it begins by accepting
partitions that are about this much slower. The rest of the evaluations is local search."""
_SHARE_LEFT = 1 - sum(share for _, share, _ in _ROUNDS)
_SPREAD = (0, 0, 0, 1, 1, 2, 3)
"""By how many neighbours a moved boundary is accompanied."""


def tuned(
    clock: Callable[[Bounds], int],
    starts: Sequence[Bounds],
    *,
    shortest: int,
    evaluations: int,
    excess: Callable[[Bounds], int] = lambda bounds: 0,
    seed: int = 0,
    out_of_time: Callable[[], bool] = lambda: False,
) -> Bounds:
    """The fastest partition found, never slower than the starts.

    ``shortest``: fewest items of a stage. ``excess``: bytes over a memory limit; partitions with any are looked at only
    while none is known that keeps it. ``evaluations``: partitions timed, the starts not counted.
    """

    def key(bounds: Bounds) -> tuple[float, float]:
        over = excess(bounds)
        return (over, 0) if over else (0, clock(bounds))

    ranked = sorted(dict.fromkeys(starts), key=lambda bounds: (key(bounds), bounds))
    best = ranked[0]
    for number, (rank, share, heat) in enumerate(_ROUNDS):
        if rank < len(ranked):
            start = ranked[rank] if rank >= 0 else best
            draw = random.Random(f"{seed} {number}")
            found = _annealed(key, start, round(share * evaluations), heat, shortest, draw, out_of_time)
            best = min(best, found, key=lambda bounds: (key(bounds), bounds))
    left = max(1, round(_SHARE_LEFT * evaluations))
    return improve(best, key, shortest=shortest, evaluations=left, out_of_time=out_of_time)


def _annealed(
    key: Callable[[Bounds], tuple[float, float]],
    start: Bounds,
    evaluations: int,
    heat: float,
    shortest: int,
    draw: random.Random,
    out_of_time: Callable[[], bool],
) -> Bounds:
    best = current = start
    best_value = current_value = key(start)
    if len(start) < 3:
        return start
    for i in range(evaluations):
        if out_of_time():
            break
        moved = _moved(current, shortest, draw)
        if moved is None:
            continue
        value = key(moved)
        now = heat * (1 - i / evaluations)
        accepted = value < current_value
        if not accepted and value[0] == current_value[0] == 0:
            slower = value[1] / max(1.0, current_value[1]) - 1
            accepted = draw.random() < math.exp(-slower / now)
        if accepted:
            current, current_value = moved, value
            if value < best_value:
                best, best_value = moved, value
    return best


def _moved(bounds: Bounds, shortest: int, draw: random.Random) -> Bounds | None:
    """One boundary, or some neighbours together, one item further; sometimes another boundary as well."""
    last = len(bounds) - 2
    moved = list(bounds)
    first = draw.randint(1, last)
    step = draw.choice((-1, 1))
    for k in range(first, min(last, first + draw.choice(_SPREAD)) + 1):
        moved[k] += step
    if draw.random() < 0.4:
        moved[draw.randint(1, last)] += draw.choice((-1, 1))
    allowed = all(
        after - before >= min(shortest, old_after - old_before)
        for (before, after), (old_before, old_after) in zip(ranges(moved), ranges(bounds), strict=True)
    )
    return tuple(moved) if allowed else None
