"""Templates: which passes each pipeline rank runs in which order, before anything is known about the model.

A template gives, for ``pp`` ranks with ``vpp`` virtual stages each and any number of micro-batches, every rank's list
of actions in the notation of ``plan.py``. It knows nothing of durations. Three templates exist:

- ``gpipe``: all forwards, then all backwards (Huang et al. 2019);
- ``1f1b``: one forward, one backward in turn (PipeDream-Flush, Narayanan et al. 2021), one stage a rank;
- ``interleaved-1f1b``: the same with several stages a rank (Megatron-LM, Narayanan et al. 2021).

With ``joint=True`` the steady state of the 1F1B templates consists of overlap pairs, one forward and one backward of
different micro-batches run together. Such a pair needs both inputs before it can be ordered freely, so its forward has
to be one more position ahead than in the classic order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.plan import Action, ActionKind

TEMPLATES = ("1f1b", "interleaved-1f1b", "gpipe")
PADS = ("groups", "shadow")
PLACEMENTS = ("loop", "v")


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """Order of the passes on every pipeline rank.

    ``stage_ranks[s]``: rank of stage s. ``actions[r]``: what rank r runs, in order. ``joint``: overlap pairs were asked
    for. ``shadows``: micro-batches of the padded order that were left out (``pad="shadow"`` only).
    """

    name: str
    pp: int
    vpp: int
    microbatches: int
    stage_ranks: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    joint: bool
    pad: str
    shadows: int


def build_template(
    name: str, *, pp: int, vpp: int, microbatches: int, joint: bool, pad: str = "groups", placement: str = "loop"
) -> Template:
    """The order of template ``name`` (one of ``TEMPLATES``) for any number of micro-batches, also fewer than ``pp``.

    ``gpipe``: forwards of the rank's first stage for all micro-batches, then of its next stage, and so on; then the
    backwards, last stage first. It has no steady state, so ``joint`` changes nothing.

    ``1f1b``, ``interleaved-1f1b``: a rank's forwards go through groups of micro-batches; in each group stage by stage,
    and in each stage micro-batch by micro-batch. Backwards do the same from the last stage to the first. The rank runs
    w forwards (warm-up), then forward w+i with backward i for i = 0, 1, ... (steady state), then the remaining
    backwards (cool-down). With g_max the size of the largest group and r the rank, w is
    - ``2 (pp-1-r) + (vpp-1) g_max + 1`` for ``joint=True``, the steady state in pairs ``(F;B)OVERLAP_F_B``;
    - ``pp-1-r`` for the classic ``1f1b``, and ``2 (pp-1-r) + (vpp-1) g_max`` for the classic ``interleaved-1f1b``.
    In a joint pair the two micro-batches always differ: the forward is at least (vpp-1) g_max + 1 positions ahead, and
    no F and B of one micro-batch on a rank are further than (vpp-1) g_max apart.

    ``pad="groups"``: max(1, m // pp) groups whose sizes differ by at most 1, the larger ones first.
    ``pad="shadow"``: the order is built for the next multiple of ``pp`` in groups of ``pp``; then the passes of the
    added (shadow) micro-batches are removed, and a pair that loses one pass becomes a single action.

    ``placement="loop"``: stage s sits on rank s % pp. ``"v"`` (``gpipe`` only): odd rounds go backwards.

    Raises ScheduleError with all problems of the arguments.
    """
    _check(name, pp, vpp, microbatches, pad, placement)
    shadows = -microbatches % pp if pad == "shadow" else 0
    total = microbatches + shadows
    sizes = [pp] * (total // pp) if pad == "shadow" else _group_sizes(total, pp)
    stage_ranks = tuple(_rank_of(stage, pp, placement) for stage in range(pp * vpp))
    if name == "gpipe":
        sizes = [total]
    actions: list[tuple[Action, ...]] = []
    for rank in range(pp):
        stages = [stage for stage in range(pp * vpp) if stage_ranks[stage] == rank]
        forwards = _passes(ActionKind.F, stages, sizes)
        backwards = _passes(ActionKind.B, stages[::-1], sizes)
        if name == "gpipe":
            order = [*forwards, *backwards]
        else:
            if joint:
                warmup = 2 * (pp - 1 - rank) + (vpp - 1) * max(sizes) + 1
            elif name == "1f1b":
                warmup = pp - 1 - rank
            else:
                warmup = 2 * (pp - 1 - rank) + (vpp - 1) * max(sizes)
            order = _one_f_one_b(forwards, backwards, warmup, joint)
        actions.append(tuple(_without_shadows(order, microbatches)))
    return Template(
        name=name,
        pp=pp,
        vpp=vpp,
        microbatches=microbatches,
        stage_ranks=stage_ranks,
        actions=tuple(actions),
        joint=joint,
        pad=pad,
        shadows=shadows,
    )


def in_flight(template: Template) -> tuple[int, ...]:
    """Per stage: how many micro-batches are between the start of F and the end of B at most (= input slots needed).

    An overlap action holds its forward and its backward at once. A split backward (``I``, then ``W``) ends with ``I``.
    """
    most = [0] * len(template.stage_ranks)
    now = [0] * len(template.stage_ranks)
    for actions in template.actions:
        for action in actions:
            for part in action.passes:
                if part.kind is ActionKind.F:
                    now[part.stage] += 1
                    most[part.stage] = max(most[part.stage], now[part.stage])
            for part in action.passes:
                if part.kind in (ActionKind.B, ActionKind.I):
                    now[part.stage] -= 1
    return tuple(most)


def _group_sizes(microbatches: int, pp: int) -> list[int]:
    groups = max(1, microbatches // pp)
    small, larger = divmod(microbatches, groups)
    return [small + 1] * larger + [small] * (groups - larger)


def _rank_of(stage: int, pp: int, placement: str) -> int:
    round_, position = divmod(stage, pp)
    return pp - 1 - position if placement == "v" and round_ % 2 else position


def _passes(kind: ActionKind, stages: Sequence[int], sizes: Sequence[int]) -> list[Action]:
    """One rank's passes of one kind: group by group, stage by stage, micro-batch by micro-batch."""
    passes: list[Action] = []
    first = 0
    for size in sizes:
        passes += [Action(kind, stage, mb) for stage in stages for mb in range(first, first + size)]
        first += size
    return passes


def _one_f_one_b(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int, joint: bool) -> list[Action]:
    warmup = min(warmup, len(forwards))
    order = list(forwards[:warmup])
    steady = len(forwards) - warmup
    for forward, backward in zip(forwards[warmup:], backwards[:steady], strict=True):
        order += [Action.overlap(forward, backward)] if joint else [forward, backward]
    return order + list(backwards[steady:])


def _without_shadows(order: Sequence[Action], microbatches: int) -> list[Action]:
    """The order without the passes of micro-batches from ``microbatches`` on."""
    kept: list[Action] = []
    for action in order:
        parts = tuple(part for part in action.passes if part.microbatch < microbatches)
        if len(parts) > 1:
            kept.append(Action.overlap(*parts))
        else:
            kept += parts
    return kept


def _check(name: str, pp: int, vpp: int, microbatches: int, pad: str, placement: str) -> None:
    problems: list[Problem] = []
    if name not in TEMPLATES:
        problems.append(Problem("template", name, f"one of {', '.join(TEMPLATES)}"))
    for field, value in (("pp", pp), ("vpp", vpp), ("microbatches", microbatches)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(Problem(field, value, "an integer of at least 1"))
    if name == "1f1b" and vpp != 1:
        problems.append(Problem("vpp", vpp, "1 for template 1f1b", "use interleaved-1f1b for several stages a rank"))
    if pad not in PADS:
        problems.append(Problem("pad", pad, f"one of {', '.join(PADS)}"))
    if placement not in PLACEMENTS:
        problems.append(Problem("placement", placement, f"one of {', '.join(PLACEMENTS)}"))
    elif placement == "v" and name in TEMPLATES and name != "gpipe":
        problems.append(
            Problem("placement", placement, f"loop for template {name}", "only gpipe can be laid out as a V")
        )
    if problems:
        raise ScheduleError.of("template", problems)
