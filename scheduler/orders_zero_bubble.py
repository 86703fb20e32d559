"""Orders that split the backward into I (for inputs) and W (for weights), and fill the pipeline's bubbles with W.

All are from Qi et al., "Zero Bubble Pipeline Parallelism" (2023) and "Pipeline Parallelism with Controllable Memory"
(2024). None of them runs two passes together. See ``orders_1f1b`` for what an order is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from tessera_rt.plan import Action, ActionKind
from tessera_rt.scheduler.orders_1f1b import Order, looped_passes


def zb_h1(pp: int, vpp: int, sizes: Sequence[int]) -> Order:
    """ZB-H1, and with several stages a rank the interleaved zero-bubble order (ZB1P of torch.distributed.pipelining).

    Rank r runs ``(vpp-1) g_max + pp-1-r`` forwards (g_max: largest of the groups ``sizes``), then F and I in turn, then
    the remaining I. W passes follow in the order of their I, each r passes late: behind the I number i (from 0) comes
    the W number i - r, and the last r of them come at the end. With one stage a rank, the micro-batches that wait for
    their I and those that wait for their W are pp at most on every rank, as many as 1F1B holds.
    """
    order: Order = []
    for rank in range(pp):
        forwards, inputs = looped_passes(rank, pp, vpp, sizes, ActionKind.I)
        warmup = min((vpp - 1) * max(sizes) + pp - 1 - rank, len(forwards))
        mine = forwards[:warmup]
        for i, (forward, input_) in enumerate(zip_longest(forwards[warmup:], inputs)):
            mine += [forward, input_] if forward else [input_]
            mine += [_weight(inputs[i - rank])] if i >= rank else []
        order.append(mine + [_weight(input_) for input_ in inputs[max(0, len(inputs) - rank) :]])
    return order


def zb_h2(pp: int, microbatches: int) -> Order:
    """ZB-H2: no rank idles between its first and its last pass if F, I and W take equally long and m >= 2 pp - 1.

    Rank r runs ``2 (pp-1-r) + 1`` forwards, then I, W and F in turn until 2 r forwards are left; with these come I
    only, so that the last backwards follow one another faster. Then I and W in turn, and the W that are left. Rank 0
    holds 2 pp - 1 micro-batches, nearly twice as many as in 1F1B. All ranks together take no less time than ZB-H1 would
    at these durations, for the first rank ends first: to gain from that, its next step must begin without waiting for
    the others.
    """
    order: Order = []
    for rank in range(pp):
        forwards, inputs = looped_passes(rank, pp, 1, [microbatches], ActionKind.I)
        warmup = min(2 * (pp - 1 - rank) + 1, microbatches)
        early = max(0, microbatches - (2 * pp - 1))  # W passes right behind their I
        late = microbatches - warmup - early  # by how many I the other W passes lag behind
        mine = forwards[:warmup]
        for i, input_ in enumerate(inputs):
            mine.append(input_)
            if i < early:
                mine.append(_weight(input_))
            elif i >= early + late:
                mine.append(_weight(inputs[i - late]))
            mine += forwards[warmup + i : warmup + i + 1]
        order.append(mine + [_weight(input_) for input_ in inputs[microbatches - late :]])
    return order


def zb_v(pp: int, microbatches: int) -> Order:
    """ZB-V: two stages a rank, laid out as a V (rank r holds stages r and 2 pp - 1 - r), as torch orders it.

    The memory of 1F1B, and no bubble between a rank's first and last pass if F, I and W take equally long. The order is
    made for at least 2 pp - 1 micro-batches; callers leave out the passes of those that do not exist.
    """
    total = max(2 * pp - 1, microbatches)
    return [_zb_v_rank(pp, rank, total) for rank in range(pp)]


def _zb_v_rank(pp: int, rank: int, microbatches: int) -> list[Action]:
    down, up = _Passes(rank), _Passes(2 * pp - 1 - rank)  # the V's two halves
    order: list[Action] = []
    for _ in range(2 * (pp - rank) - 1):
        order.append(down.next(ActionKind.F))
    for _ in range(rank):
        order += [up.next(ActionKind.F), down.next(ActionKind.F)]
    for _ in range(pp - rank):
        order += [up.next(ActionKind.F), up.next(ActionKind.I), up.next(ActionKind.W)]
    while up.done[ActionKind.F] < microbatches:
        if down.done[ActionKind.F] < microbatches:
            order.append(down.next(ActionKind.F))
        order += [down.next(ActionKind.I), down.next(ActionKind.W)]
        order += [up.next(ActionKind.F), up.next(ActionKind.I), up.next(ActionKind.W)]
    for _ in range(rank):
        order += [down.next(ActionKind.I), up.next(ActionKind.I)]
    for _ in range(pp - rank):
        order += [down.next(ActionKind.I), down.next(ActionKind.W)]
    for half in (up, down):
        while half.done[ActionKind.W] < half.done[ActionKind.I]:
            order.append(half.next(ActionKind.W))
    return order


class _Passes:
    """Counts the passes of one stage: each kind takes its micro-batches in order."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.done = dict.fromkeys((ActionKind.F, ActionKind.I, ActionKind.W), 0)

    def next(self, kind: ActionKind) -> Action:
        self.done[kind] += 1
        return Action(kind, self.stage, self.done[kind] - 1)


def _weight(input_: Action) -> Action:
    return Action(ActionKind.W, input_.stage, input_.microbatch)
