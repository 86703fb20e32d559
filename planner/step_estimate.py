"""A fast estimate of the step time, for searches that look at thousands of partitions.

Each action is one block: it starts when its rank is free and all its inputs are there, and each of its passes hands its
output on when its last task ends in the action's interleaving. The simulator (two lanes per task, contention, queues on
links) has the last word; this one is some hundred times faster and errs on all partitions alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tessera_rt.plan import Action, ActionKind
from tessera_rt.planner.candidates import Bounds, ranges
from tessera_rt.planner.setting import Setting


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass of an action. ``output``: number of what it hands on. ``inputs``: (output it needs, boundary or -1)."""

    stage: int
    output: int
    inputs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Block:
    """One action. ``kind``: number of its key."""

    rank: int
    kind: int
    passes: tuple[_Pass, ...]


class StepEstimate:
    """Estimated step time (ns) of partitions in one setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._keys = {action.key: i for i, action in enumerate(setting.distinct_actions)}
        self._blocks = _in_order([[self._block(r, a) for a in row] for r, row in enumerate(setting.template.actions)])
        self._outputs = 2 * setting.stages * setting.template.microbatches

    @property
    def actions(self) -> int:
        """Number of actions of a step: the work of one estimate."""
        return len(self._blocks)

    def __call__(self, bounds: Bounds) -> int:
        setting = self.setting
        chunks = ranges(bounds)
        empty = [p == q for p, q in chunks]
        timing = [setting.pairs.timing(action, chunks) for action in setting.distinct_actions]
        crossing = (*setting.boundary_ns(bounds), 0)  # the last entry, for boundary -1, crosses nothing
        done = [0] * self._outputs
        free = [0] * len(setting.template.actions)
        last_arrival = 0
        for block in self._blocks:
            start = free[block.rank]
            for part in block.passes:
                ready = 0
                for output, boundary in part.inputs:
                    ready = max(ready, done[output] + crossing[boundary])
                last_arrival = max(last_arrival, ready)
                if empty[part.stage]:
                    done[part.output] = ready  # passed on without waiting for the rank
                else:
                    start = max(start, ready)
            length, outputs = timing[block.kind]
            free[block.rank] = start + length
            for part, output_ns in zip(block.passes, outputs, strict=True):
                if not empty[part.stage]:
                    done[part.output] = start + output_ns
        return max(last_arrival, *free)

    def _block(self, rank: int, action: Action) -> _Block:
        return _Block(rank, self._keys[action.key], tuple(map(self._pass, action.passes)))

    def _pass(self, part: Action) -> _Pass:
        s, m = part.stage, part.microbatch
        if part.kind is ActionKind.F:
            return _Pass(s, self._number(s, m, 0), ((self._number(s - 1, m, 0), s - 1),) if s > 0 else ())
        own_forward = (self._number(s, m, 0), -1)
        if s + 1 == self.setting.stages:
            return _Pass(s, self._number(s, m, 1), (own_forward,))
        return _Pass(s, self._number(s, m, 1), (own_forward, (self._number(s + 1, m, 1), s)))

    def _number(self, stage: int, microbatch: int, backward: int) -> int:
        return 2 * (stage * self.setting.template.microbatches + microbatch) + backward


def _in_order(rows: Sequence[Sequence[_Block]]) -> list[_Block]:
    """All blocks so that none comes before one it waits for; each rank's stay in order."""
    done: set[int] = set()
    place = [0] * len(rows)
    order: list[_Block] = []
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while place[rank] < len(row) and all(i in done for part in row[place[rank]].passes for i, _ in part.inputs):
                block = row[place[rank]]
                done.update(part.output for part in block.passes)
                order.append(block)
                place[rank] += 1
                moved = True
    assert len(order) == sum(map(len, rows)), "a template's order has no deadlock"
    return order
