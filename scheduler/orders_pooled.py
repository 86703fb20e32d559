"""W pools: weight gradients that wait on their rank, while backwards hand outputs on, until it has time for them.

A backward that hands its W to the rank's *pool* becomes I. The W run, oldest first, where the rank would wait for
others: in gaps of the steady state, and in the cool-down. Idea: Qi et al., "Zero Bubble Pipeline Parallelism" (2023);
here for any order, also of joint pairs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.plan import Action, ActionKind


@dataclass(frozen=True, slots=True)
class Pool:
    """The pool of one rank. ``room``: for each of its ``passes_of``, most W that wait behind it; empty: no pool.

    Backwards give their W up as long as there is room. Where room shrinks, the oldest W run in front of the action.
    ``beside``: one of them runs beside it instead, ``(F;I;W)OVERLAP_F_B``, which hides the communication of the one;
    else only beside backwards of the cool-down (behind the rank's last forward).
    """

    room: tuple[int, ...] = ()
    beside: bool = False

    @property
    def deferred(self) -> int:
        """Most W that there is room for at once."""
        return max(self.room, default=0)


def pooled(actions: Sequence[Action], pool: Pool) -> tuple[Action, ...]:
    """One rank's order with a pool. W keep the order of their backwards; those left at the end come last.

    Raises ScheduleError for negative room, or room for another number of actions.
    """
    if not pool.room:
        return tuple(actions)
    passes = passes_of(actions)
    _check(pool.room, len(passes))
    last_forward = _last_forward(passes)
    order: list[Action] = []
    waiting: deque[Action] = deque()
    for i, (parts, room) in enumerate(zip(passes, pool.room, strict=True)):
        backwards = [part for part in parts if part.kind is ActionKind.B]
        spent = max(0, len(waiting) + len(backwards) - room)
        oldest = [waiting.popleft() for _ in range(min(spent, len(waiting)))]
        full = backwards[: spent - len(oldest)]
        taken: list[Action] = []
        for part in parts:
            if part.kind is ActionKind.B and part not in full:
                taken.append(Action(ActionKind.I, part.stage, part.microbatch))
                waiting.append(Action(ActionKind.W, part.stage, part.microbatch))
            else:
                taken.append(part)
        # One micro-batch has one pass in an action, and a full backward's W would mix with others of its stage.
        may = (pool.beside or i > last_forward) and not full
        if may and oldest and all(part.microbatch != oldest[-1].microbatch for part in parts):
            taken.append(oldest.pop())
        order += oldest
        order.append(taken[0] if len(taken) == 1 else Action.overlap(*taken))
    return (*order, *waiting)


def passes_of(actions: Iterable[Action]) -> list[list[Action]]:
    """F and B of every action that has any, with I as B: an order without its W."""
    found = (
        [
            part if part.kind is ActionKind.F else Action(ActionKind.B, part.stage, part.microbatch)
            for part in action.passes
            if part.kind is not ActionKind.W
        ]
        for action in actions
    )
    return [parts for parts in found if parts]


def own_room(actions: Iterable[Action]) -> list[int]:
    """How many W wait behind each of the ``passes_of`` an order, by the order itself."""
    found: list[int] = []
    waiting = 0
    for action in actions:
        waiting -= sum(part.kind is ActionKind.W for part in action.passes)
        waiting += sum(part.kind is ActionKind.I for part in action.passes)
        if any(part.kind is not ActionKind.W for part in action.passes):
            found.append(waiting)
    return found


def late_room(actions: Sequence[Action], deferred: int, *, steady: bool = False) -> list[int]:
    """The order's own room up to its last ``deferred`` backwards; from there on no W has to run before the end.

    ``steady``: the cool-down has no more room than was taken before it (1 at least), so that one W runs beside each of
    its backwards.
    """
    passes, own = passes_of(actions), own_room(actions)
    last_forward = _last_forward(passes)
    backwards = [sum(part.kind is ActionKind.B for part in parts) for parts in passes]
    left = sum(backwards) - deferred  # backwards before the pool opens
    found: list[int] = []
    for i, (count, room) in enumerate(zip(backwards, own, strict=True)):
        before = found[-1] if found else 0
        more = before + min(count, max(0, count - left))
        if steady and i > last_forward:
            more = max(min(more, 1), before)
        found.append(room if left - count >= 0 else max(room, more))
        left -= count
    return found


def taken_room(actions: Iterable[Action], room: Sequence[int]) -> tuple[int, ...]:
    """How much of the room is taken behind each of the ``passes_of`` an order."""
    found: list[int] = []
    waiting = 0
    for parts, most in zip(passes_of(actions), room, strict=True):
        waiting = min(most, waiting + sum(part.kind is ActionKind.B for part in parts))
        found.append(waiting)
    return tuple(found)


def pending(actions: Iterable[Action], sizes: Sequence[int]) -> int:
    """Most bytes that wait for their W at once, between the end of an I and its W. ``sizes``: bytes of each stage."""
    now = most = 0
    for action in actions:
        now -= sum(sizes[part.stage] for part in action.passes if part.kind is ActionKind.W)
        now += sum(sizes[part.stage] for part in action.passes if part.kind is ActionKind.I)
        most = max(most, now)
    return most


def _check(room: Sequence[int], actions: int) -> None:
    allowed = "a number of W of at least 0"
    problems = [Problem(f"room[{i}]", count, allowed) for i, count in enumerate(room) if count < 0]
    if len(room) != actions:
        problems.append(Problem("room", len(room), f"one number for each of {actions} actions with F or B"))
    if problems:
        raise ScheduleError.of("W pool", problems)


def _last_forward(passes: Sequence[Sequence[Action]]) -> int:
    """Place of the last action with a forward; -1 if none has."""
    return max((i for i, parts in enumerate(passes) if any(p.kind is ActionKind.F for p in parts)), default=-1)
