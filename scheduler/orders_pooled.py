"""W pools: the last weight gradients of a rank, held back until nothing else is left to do for it.

Towards the end of a step a rank waits more and more for backwards of other ranks. The *pool* of a rank takes the W of
its last ``deferred`` full backwards: those become I, which hand their outputs on earlier, and their W run where the
rank would wait. Idea: Qi et al., "Zero Bubble Pipeline Parallelism" (2023); here for any order, also of joint pairs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.plan import Action, ActionKind


@dataclass(frozen=True, slots=True)
class Pool:
    """How one rank spends its W. ``deferred``: how many of its last backwards give theirs up.

    ``beside``: each backward of the cool-down (behind the rank's last forward) runs beside the oldest W of the pool,
    ``(I;W)OVERLAP_F_B``, which hides the communication of the one; else all W come at the end.
    """

    deferred: int = 0
    beside: bool = False


def pooled(actions: Sequence[Action], pool: Pool) -> tuple[Action, ...]:
    """One rank's order with a pool. W keep the order of their backwards; W that the order splits off itself stay where
    they are as long as the pool is not open. Raises ScheduleError for a negative number.

    With ``deferred`` beyond the number of backwards all are deferred.
    """
    if pool.deferred < 0:
        raise ScheduleError.of("W pool", [Problem("deferred", pool.deferred, "a number of backwards of at least 0")])
    backwards = [i for i, action in enumerate(actions) if _of(action, ActionKind.B, ActionKind.I)]
    if not pool.deferred or not backwards:
        return tuple(actions)
    opens = backwards[-min(pool.deferred, len(backwards))]
    last_forward = max((i for i, action in enumerate(actions) if _of(action, ActionKind.F)), default=-1)
    order = list(actions[:opens])
    waiting = deque(_unfinished(order))
    for i, action in enumerate(actions[opens:], opens):
        parts = [part for part in action.passes if part.kind is ActionKind.F]
        for part in _of(action, ActionKind.B, ActionKind.I):
            parts.append(Action(ActionKind.I, part.stage, part.microbatch))
            if pool.beside and i > last_forward and waiting:
                parts.append(waiting.popleft())
            waiting.append(Action(ActionKind.W, part.stage, part.microbatch))
        if parts:
            order.append(parts[0] if len(parts) == 1 else Action.overlap(*parts))
    return (*order, *waiting)


def pending(actions: Iterable[Action], sizes: Sequence[int]) -> int:
    """Most bytes that wait for their W at once, between the end of an I and its W. ``sizes``: bytes of each stage."""
    now = most = 0
    for action in actions:
        for part in action.passes:
            if part.kind is ActionKind.W:
                now -= sizes[part.stage]
        now += sum(sizes[part.stage] for part in _of(action, ActionKind.I))
        most = max(most, now)
    return most


def _of(action: Action, *kinds: ActionKind) -> list[Action]:
    return [part for part in action.passes if part.kind in kinds]


def _unfinished(actions: Iterable[Action]) -> list[Action]:
    """W passes whose I is in the order and that are not, in the order of their I."""
    found: dict[Action, None] = {}
    for action in actions:
        for part in action.passes:
            if part.kind is ActionKind.W:
                del found[part]
        for part in _of(action, ActionKind.I):
            found[Action(ActionKind.W, part.stage, part.microbatch)] = None
    return list(found)
