"""Orders without a split backward: GPipe, 1F1B and its interleaved form, and what all orders are built from.

An *order* is one list of actions per pipeline rank. Functions here and in the other ``orders_*`` modules take sizes
that ``templates.build_template`` has checked, and know nothing of durations.
"""

from __future__ import annotations

from collections.abc import Sequence

from tessera_rt.plan import Action, ActionKind

Order = list[list[Action]]


def gpipe(stages_of: Sequence[Sequence[int]], microbatches: int) -> Order:
    """GPipe (Huang et al. 2019): all forwards, the rank's first stage first; then all backwards, last stage first.

    ``stages_of[r]``: the stages of rank r by index.
    """
    return [
        [
            *passes(ActionKind.F, stages, [microbatches]),
            *passes(ActionKind.B, stages[::-1], [microbatches]),
        ]
        for stages in stages_of
    ]


def one_f_one_b(pp: int, vpp: int, sizes: Sequence[int], *, joint: bool) -> Order:
    """1F1B (PipeDream-Flush) with one stage a rank, else interleaved 1F1B (both Narayanan et al. 2021).

    A rank's forwards go through groups of micro-batches (``sizes``); in each group stage by stage, and in each stage
    micro-batch by micro-batch. Backwards do the same from the last stage to the first. The rank runs w forwards
    (warm-up), then forward w+i with backward i for i = 0, 1, ... (steady state), then the remaining backwards
    (cool-down). With g_max the size of the largest group and r the rank, w is
    - ``2 (pp-1-r) + (vpp-1) g_max + 1`` for ``joint``, the steady state in pairs ``(F;B)OVERLAP_F_B``;
    - ``pp-1-r`` for the classic form with one stage a rank, ``2 (pp-1-r) + (vpp-1) g_max`` with several.
    A joint pair needs both inputs before it can be ordered freely, so its forward is one more position ahead. Its two
    micro-batches always differ: the forward is at least (vpp-1) g_max + 1 positions ahead, and no F and B of one
    micro-batch on a rank are further than (vpp-1) g_max apart.
    """
    order: Order = []
    for rank in range(pp):
        if joint:
            warmup = 2 * (pp - 1 - rank) + (vpp - 1) * max(sizes) + 1
        elif vpp == 1:
            warmup = pp - 1 - rank
        else:
            warmup = 2 * (pp - 1 - rank) + (vpp - 1) * max(sizes)
        forwards, backwards = looped_passes(rank, pp, vpp, sizes, ActionKind.B)
        order.append(_in_turn(forwards, backwards, warmup, joint))
    return order


def looped_passes(
    rank: int, pp: int, vpp: int, sizes: Sequence[int], backward: ActionKind
) -> tuple[list[Action], list[Action]]:
    """Forwards and backwards of a rank that holds every pp-th stage, in the order of ``one_f_one_b``."""
    stages = range(rank, pp * vpp, pp)
    return passes(ActionKind.F, stages, sizes), passes(backward, stages[::-1], sizes)


def passes(kind: ActionKind, stages: Sequence[int], sizes: Sequence[int]) -> list[Action]:
    """One rank's passes of one kind: group by group, stage by stage, micro-batch by micro-batch."""
    found: list[Action] = []
    first = 0
    for size in sizes:
        found += [Action(kind, stage, mb) for stage in stages for mb in range(first, first + size)]
        first += size
    return found


def group_sizes(microbatches: int, pp: int) -> list[int]:
    """max(1, m // pp) groups whose sizes differ by at most 1, the larger ones first."""
    groups = max(1, microbatches // pp)
    small, larger = divmod(microbatches, groups)
    return [small + 1] * larger + [small] * (groups - larger)


def without_shadows(order: Sequence[Action], microbatches: int) -> list[Action]:
    """The order without the passes of micro-batches from ``microbatches`` on; half a pair becomes a single action."""
    kept: list[Action] = []
    for action in order:
        parts = tuple(part for part in action.passes if part.microbatch < microbatches)
        if len(parts) > 1:
            kept.append(Action.overlap(*parts))
        else:
            kept += parts
    return kept


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int, joint: bool) -> list[Action]:
    warmup = min(warmup, len(forwards))
    order = list(forwards[:warmup])
    steady = len(forwards) - warmup
    for forward, backward in zip(forwards[warmup:], backwards[:steady], strict=True):
        order += [Action.overlap(forward, backward)] if joint else [forward, backward]
    return order + list(backwards[steady:])
