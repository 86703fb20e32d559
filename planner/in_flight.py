"""What is alive on a rank while it works through its order: micro-batches in flight, pending W, running passes.

Several stages share a rank and peak at different moments, so memory is the largest *simultaneous* sum over the order,
not the sum of each stage's own maximum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tessera_rt.plan import Action, ActionKind
from tessera_rt.scheduler.templates import Template


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveState:
    """What is alive during one action of a rank; one entry per stage of the rank, by stage index.

    ``in_flight``: micro-batches between the start of their F and the end of their B. ``waiting_w``: micro-batches
    between the end of their I and their W. ``forward``, ``backward``: 1 while the stage's F, B (or I) runs.
    ``computing``: 1 for the stage whose compute task runs; passes share one compute lane, so a pair makes two states.
    """

    in_flight: tuple[int, ...]
    waiting_w: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    computing: tuple[int, ...]

    @property
    def vector(self) -> tuple[int, ...]:
        """All entries in one row; memory grows with every one of them."""
        return self.in_flight + self.waiting_w + self.forward + self.backward + self.computing


def live_states(template: Template) -> tuple[tuple[LiveState, ...], ...]:
    """For each rank, the states that no other state of the rank dominates (is at least as large in every entry)."""
    return tuple(
        _maximal(state for _, state in walk(actions, stages_on(template, rank)))
        for rank, actions in enumerate(template.actions)
    )


def stages_on(template: Template, rank: int) -> list[int]:
    """The stages of a rank, by index."""
    return [stage for stage, owner in enumerate(template.stage_ranks) if owner == rank]


def walk(actions: Iterable[Action], stages: list[int]) -> Iterable[tuple[int, LiveState]]:
    """(place of the action, what is alive during it) through a rank's order; an action of two stages has two states."""
    place = {stage: i for i, stage in enumerate(stages)}
    in_flight, waiting_w = [0] * len(stages), [0] * len(stages)
    for place_of, action in enumerate(actions):
        forward, backward = [0] * len(stages), [0] * len(stages)
        for part in action.passes:
            i = place[part.stage]
            if part.kind is ActionKind.F:
                in_flight[i] += 1
                forward[i] = 1
            elif part.kind in (ActionKind.B, ActionKind.I):
                backward[i] = 1
        for stage in {part.stage for part in action.passes}:
            state = LiveState(
                in_flight=tuple(in_flight),
                waiting_w=tuple(waiting_w),
                forward=tuple(forward),
                backward=tuple(backward),
                computing=tuple(int(other == stage) for other in stages),
            )
            yield place_of, state
        for part in action.passes:
            i = place[part.stage]
            if part.kind in (ActionKind.B, ActionKind.I):
                in_flight[i] -= 1
            if part.kind is ActionKind.I:
                waiting_w[i] += 1
            elif part.kind is ActionKind.W:
                waiting_w[i] -= 1


def _maximal(states: Iterable[LiveState]) -> tuple[LiveState, ...]:
    # By decreasing sum: a state can only be dominated by one that comes before it.
    distinct = sorted(set(states), key=lambda state: (-sum(state.vector), state.vector))
    vectors = np.array([state.vector for state in distinct])
    kept = np.zeros(len(distinct), dtype=bool)
    for i, vector in enumerate(vectors):
        kept[i] = not (vectors[:i][kept[:i]] >= vector).all(axis=1).any()
    return tuple(state for state, keep in zip(distinct, kept, strict=True) if keep)
