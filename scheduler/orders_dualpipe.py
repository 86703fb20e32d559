"""Orders whose steady state pairs a forward with a backward on every rank: DualPipeV, and DualPipe with two copies.

Both follow the eight phases of deepseek-ai/DualPipe. See ``orders_1f1b`` for what an order is.
"""

from __future__ import annotations

from collections import deque

from tessera_rt.plan import Action, ActionKind
from tessera_rt.scheduler.orders_1f1b import Order


def dualpipe_v(pp: int, microbatches: int, *, joint: bool) -> Order:
    """DualPipeV: two stages a rank laid out as a V (rank r holds stages r and 2 pp - 1 - r), as torch orders it.

    With ``joint`` the steady state runs F of one stage with B of the other as ``(F;B)OVERLAP_F_B``; else one after the
    other. Backwards are split into I and W only where that shortens the warm-up or the cool-down. The order is made for
    at least 2 pp micro-batches; callers leave out the passes of those that do not exist.
    """
    total = max(2 * pp, microbatches)
    return [_Rank(pp, rank, rank, 2 * pp - 1 - rank, (0, 0), joint).order(total) for rank in range(pp)]


def dualpipe(pp: int, microbatches: int, *, joint: bool) -> Order:
    """DualPipe (DeepSeek-AI 2024): the pipeline runs from both ends at once, on two copies of the parameters.

    Rank r holds stage r of the first copy (stages 0 to pp-1 from rank 0 on) and stage 2 pp - 1 - r of the second one
    (stages pp to 2 pp - 1 from rank pp-1 on). The first half of the micro-batches goes through the first copy, the
    others through the second. Each half of the ranks orders its passes as DualPipeV on pp / 2 ranks does. pp and the
    number of micro-batches must be even, the latter at least 2 pp.
    """
    half = microbatches // 2
    order: Order = []
    for rank in range(pp):
        near, far = (rank, 2 * pp - 1 - rank), (0, half)  # stage and first micro-batch of the copy that starts nearer
        if rank >= pp // 2:
            near, far = near[::-1], far[::-1]
        order.append(_Rank(pp // 2, min(rank, pp - 1 - rank), *near, far, joint).order(half))
    return order


class _Rank:
    """Builds one rank's order. ``first``: number of the first micro-batch of either stage."""

    def __init__(self, ranks: int, rank: int, stage0: int, stage1: int, first: tuple[int, int], joint: bool) -> None:
        self.ranks = ranks
        self.rank = rank
        self.stages = (stage0, stage1)
        self.joint = joint
        self.forwards = list(first)
        self.backwards = list(first)
        self.waiting: deque[Action] = deque()  # W passes whose I is done
        self.actions: list[Action] = []

    def order(self, microbatches: int) -> list[Action]:
        """``microbatches``: that go through each of the two stages."""
        after = self.ranks - self.rank - 1
        for _ in range(2 * after):  # 1: F0
            self._add(self._forward(0))
        for _ in range(self.rank + 1):  # 2: F0 F1
            self._add(self._forward(0), self._forward(1))
        for _ in range(after):  # 3: I1 W1 F1
            self._add(self._backward(1, split=True))
            self._weight()
            self._add(self._forward(1))
        for i in range(microbatches - 2 * self.ranks + self.rank + 1):  # 4, the main phase: F0 with B1, F1 with B0
            # The last rank's first two passes are the two sides of the V's tip: apart, they leave a smaller bubble.
            self._pair(0, 1, apart=i == 0 and after == 0)
            self._pair(1, 0)
        for _ in range(after):  # 5: B1, F1 with B0
            self._add(self._backward(1))
            self._pair(1, 0)
        split = False
        for i in range(self.rank + 1):  # 6: B1 B0, the second half of them split
            middle = i == (self.rank + 1) // 2
            split |= middle and self.rank % 2 == 1
            self._add(self._backward(1, split=split))
            split |= middle and self.rank % 2 == 0
            self._add(self._backward(0, split=split))
        for _ in range(after):  # 7: W B0
            self._weight()
            self._add(self._backward(0, split=split))
        while self.waiting:  # 8: W
            self._weight()
        return self.actions

    def _add(self, *actions: Action) -> None:
        self.actions += actions

    def _forward(self, half: int) -> Action:
        self.forwards[half] += 1
        return Action(ActionKind.F, self.stages[half], self.forwards[half] - 1)

    def _backward(self, half: int, *, split: bool = False) -> Action:
        stage, microbatch = self.stages[half], self.backwards[half]
        self.backwards[half] += 1
        if split:
            self.waiting.append(Action(ActionKind.W, stage, microbatch))
        return Action(ActionKind.I if split else ActionKind.B, stage, microbatch)

    def _weight(self) -> None:
        if self.waiting:
            self._add(self.waiting.popleft())

    def _pair(self, forward: int, backward: int, *, apart: bool = False) -> None:
        passes = self._forward(forward), self._backward(backward)
        self._add(*passes if apart or not self.joint else (Action.overlap(*passes),))
