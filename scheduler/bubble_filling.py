"""Filling idle time with weight gradients, as the run-time optimizer does it (the paper's Algorithm 2).

A W task that its rank's order reaches goes into the rank's *pool* instead. If the pool of one rank of the EP group is
full, all of its ranks run a W in place, the oldest of the same weight, so that no rank falls behind alone. *Slots*,
where a W may come out again, are before compute tasks that wait

- for a collective (at most one W): the wait's length is foreseen from the profile and from the token counts that the
  group exchanges before each dispatch, since the slowest member's rows say when the collective can start and how long
  it takes;
- for another pipeline rank's message (as many as fit): foreseen is the idle time that the plan has there.

Of the W tasks that take at most ``fit`` times the foreseen wait, the longest goes in; their deadline is the end of the
step. Only the oldest W of each weight may run, which keeps the order in which gradients are summed. When a rank's
remaining work fills the time to the expected end of the step (no slack), the oldest goes into the next slot whether it
fits or not; what is left at the end of a rank's order runs there. Nothing else moves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tessera_rt.errors import Problem, ScheduleError


@dataclass(frozen=True, slots=True, kw_only=True)
class BubbleFilling:
    """Settings of the pool.

    ``fit``: a W goes into a window if it takes at most this many times its length. ``pool_tasks``, ``pool_bytes``
    (None: no limit): bounds on the W tasks that wait on a rank and on what they hold.
    """

    fit: float = 1.0
    pool_tasks: int = 32
    pool_bytes: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.fit < math.inf:
            problems.append(
                Problem("filling.fit", self.fit, "a finite number of at least 0", "1 = W no longer than the gap")
            )
        if not 0 <= self.pool_tasks <= 4096:
            problems.append(Problem("filling.pool_tasks", self.pool_tasks, "an integer from 0 to 4096"))
        if self.pool_bytes is not None and self.pool_bytes < 0:
            problems.append(Problem("filling.pool_bytes", self.pool_bytes, "at least 0 bytes, or None for no limit"))
        if problems:
            raise ScheduleError.of("bubble filling", problems)
