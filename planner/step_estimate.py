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
class _Block:
    """One action. ``inputs``: (output waited for, boundary it crosses or -1). ``outputs``: (output, part making it)."""

    rank: int
    kind: int  # number of its key
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]


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
        timing = [setting.pairs.timing(action, chunks) for action in setting.distinct_actions]
        crossing = (*setting.boundary_ns(bounds), 0)  # the last entry, for boundary -1, crosses nothing
        done = [0] * self._outputs
        free = [0] * len(setting.template.actions)
        for block in self._blocks:
            start = free[block.rank]
            for output, boundary in block.inputs:
                start = max(start, done[output] + crossing[boundary])
            length, outputs = timing[block.kind]
            free[block.rank] = start + length
            for output, part in block.outputs:
                done[output] = start + outputs[part]
        return max(free)

    def _block(self, rank: int, action: Action) -> _Block:
        last = self.setting.stages - 1
        inputs: list[tuple[int, int]] = []
        outputs: list[tuple[int, int]] = []
        for i, part in enumerate(action.passes):
            s, m = part.stage, part.microbatch
            if part.kind is ActionKind.F:
                outputs.append((self._number(s, m, 0), i))
                if s > 0:
                    inputs.append((self._number(s - 1, m, 0), s - 1))
            elif part.kind in (ActionKind.B, ActionKind.I):
                outputs.append((self._number(s, m, 1), i))
                inputs.append((self._number(s, m, 0), -1))
                if s < last:
                    inputs.append((self._number(s + 1, m, 1), s))
        return _Block(rank, self._keys[action.key], tuple(inputs), tuple(outputs))

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
            while place[rank] < len(row) and all(output in done for output, _ in row[place[rank]].inputs):
                block = row[place[rank]]
                done.update(output for output, _ in block.outputs)
                order.append(block)
                place[rank] += 1
                moved = True
    assert len(order) == sum(map(len, rows)), "a template's order has no deadlock"
    return order
