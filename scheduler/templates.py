"""Templates: which passes each pipeline rank runs in which order, before anything is known about the model.

A template gives, for ``pp`` ranks with ``vpp`` virtual stages each and any number of micro-batches, every rank's list
of actions in the notation of ``plan.py``. It knows nothing of durations. The orders are in ``orders_*.py``:

- ``gpipe``, ``1f1b``, ``interleaved-1f1b``: ``orders_1f1b.py``; the 1F1B orders in joint pairs or classic;
- ``megatron-1f1b``: interleaved 1F1B in joint pairs under the rules of Megatron-Core's combined 1F1B, whose pairs run
  their tasks in one fixed order (``fixed_order.py``);
- ``zb-h1``, ``zb-h2``, ``zb-v``, ``interleaved-zb``: ``orders_zero_bubble.py``; the backward in two parts;
- ``dualpipe-v``: ``orders_dualpipe.py``; a V in joint pairs.

Orders that can be simulated but not run are in ``comparisons.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.plan import Action, ActionKind
from tessera_rt.scheduler.orders_1f1b import Order, gpipe, group_sizes, one_f_one_b, without_shadows
from tessera_rt.scheduler.orders_dualpipe import dualpipe_v
from tessera_rt.scheduler.orders_zero_bubble import zb_h1, zb_h2, zb_v

PADS = ("groups", "shadow")
PLACEMENTS = ("loop", "v")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a template demands. ``vpp``: least and most stages a rank; ``placements``: the first is its own choice.

    ``joint_only``: it consists of joint pairs. ``whole_groups``: pp must divide the number of micro-batches unless
    they are padded. ``interleaving``: the method that orders the tasks of its actions, None for the user's choice.
    """

    vpp: tuple[int, float] = (1, 1)
    placements: tuple[str, ...] = ("loop",)
    joint_only: bool = False
    whole_groups: bool = False
    interleaving: str | None = None


_ANY = float("inf")
RULES: Mapping[str, Rules] = MappingProxyType(
    {
        "1f1b": Rules(),
        "interleaved-1f1b": Rules(vpp=(1, _ANY)),
        "gpipe": Rules(vpp=(1, _ANY), placements=("loop", "v")),
        "zb-h1": Rules(),
        "zb-h2": Rules(),
        "zb-v": Rules(vpp=(2, 2), placements=("v",)),
        "interleaved-zb": Rules(vpp=(1, _ANY)),
        "dualpipe-v": Rules(vpp=(2, 2), placements=("v",)),
        "megatron-1f1b": Rules(vpp=(2, _ANY), joint_only=True, whole_groups=True, interleaving="megatron"),
    }
)
TEMPLATES = tuple(RULES)
_GROUPED = ("interleaved-1f1b", "interleaved-zb")
"""Orders that go through groups of micro-batches, of any size."""
_OTHER_TEMPLATE = MappingProxyType({"1f1b": "interleaved-1f1b", "zb-h1": "interleaved-zb", "megatron-1f1b": "1f1b"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """Order of the passes on every pipeline rank.

    ``stage_ranks[s]``: rank of stage s. ``actions[r]``: what rank r runs, in order. ``joint``: overlap pairs were asked
    for. ``shadows``: micro-batches of the padded order that were left out (``pad="shadow"`` only). ``interleaving``:
    the method that orders the tasks of its actions, None where any may.
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
    interleaving: str | None = None


def build_template(
    name: str,
    *,
    pp: int,
    vpp: int,
    microbatches: int,
    joint: bool,
    pad: str = "groups",
    placement: str | None = None,
    group: int | None = None,
) -> Template:
    """The order of template ``name`` (one of ``TEMPLATES``) for any number of micro-batches, also fewer than ``pp``.

    ``vpp``: 1 for ``1f1b``, ``zb-h1`` and ``zb-h2``; 2 for ``zb-v`` and ``dualpipe-v``; at least 2 for
    ``megatron-1f1b``; any for the others.

    ``joint``: steady state in pairs ``(F;B)OVERLAP_F_B`` (the 1F1B templates and ``dualpipe-v``). ``megatron-1f1b`` has
    no other form. GPipe has no steady state and the zero-bubble templates have no pairs: there it changes nothing.

    ``pad="groups"``: the micro-batches go through interleaved templates in max(1, m // pp) groups whose sizes differ by
    at most 1, the larger ones first. ``megatron-1f1b`` has groups of pp only. ``group``: in groups of about so many
    instead, at least pp: larger groups keep more micro-batches in flight. Only orders that go through groups have it.
    ``pad="shadow"``: the order is built for the next multiple of ``pp`` in groups of ``pp`` (``zb-v``: at least 2 pp-1
    micro-batches, ``dualpipe-v``: at least 2 pp); then the passes of the added (shadow) micro-batches are removed, and
    a pair that loses one pass becomes a single action.

    ``placement="loop"``: stage s sits on rank s % pp. ``"v"``: odd rounds go backwards. None: the template's own, which
    is a V for ``zb-v`` and ``dualpipe-v``; only ``gpipe`` has a choice.

    Raises ScheduleError with all problems of the arguments.
    """
    _check(name, pp, vpp, microbatches, joint, pad, placement, group)
    rules = RULES[name]
    placement = placement or rules.placements[0]
    shadows = -microbatches % pp if pad == "shadow" else 0
    if pad == "shadow" and rules.placements == ("v",):
        shadows = max(shadows, _least_microbatches(name, pp) - microbatches)
    total = microbatches + shadows
    sizes = [pp] * (total // pp) if pad == "shadow" else group_sizes(total, group or pp)
    stage_ranks = tuple(_rank_of(stage, pp, placement) for stage in range(pp * vpp))
    order = _order(name, pp, vpp, sizes, joint, stage_ranks)
    return Template(
        name=name,
        pp=pp,
        vpp=vpp,
        microbatches=microbatches,
        stage_ranks=stage_ranks,
        actions=tuple(tuple(without_shadows(actions, microbatches)) for actions in order),
        joint=joint,
        pad=pad,
        shadows=shadows,
        interleaving=rules.interleaving,
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


def held_chunks(template: Template, *, pending_w: float = 0.5) -> tuple[float, ...]:
    """Per rank: most micro-batches that all its stages hold at once, in chunks (one micro-batch on one stage).

    A micro-batch counts as one chunk from the start of its F to the end of its B or I, and as ``pending_w`` of one from
    there to the end of its W. Divided by vpp it compares templates with different numbers of stages a rank.
    """
    peaks: list[float] = []
    for actions in template.actions:
        now = most = 0.0
        for action in actions:
            now += sum(part.kind is ActionKind.F for part in action.passes)
            most = max(most, now)
            for part in action.passes:
                match part.kind:
                    case ActionKind.B:
                        now -= 1
                    case ActionKind.I:
                        now -= 1 - pending_w
                    case ActionKind.W:
                        now -= pending_w
        peaks.append(most)
    return tuple(peaks)


def _order(name: str, pp: int, vpp: int, sizes: list[int], joint: bool, stage_ranks: tuple[int, ...]) -> Order:
    total = sum(sizes)
    match name:
        case "gpipe":
            stages_of = [[stage for stage, owner in enumerate(stage_ranks) if owner == rank] for rank in range(pp)]
            return gpipe(stages_of, total)
        case "zb-h1" | "interleaved-zb":
            return zb_h1(pp, vpp, sizes)
        case "zb-h2":
            return zb_h2(pp, total)
        case "zb-v":
            return zb_v(pp, total)
        case "dualpipe-v":
            return dualpipe_v(pp, total, joint=joint)
        case _:
            return one_f_one_b(pp, vpp, sizes, joint=joint)


def _least_microbatches(name: str, pp: int) -> int:
    """For how many micro-batches the order is made if there are fewer."""
    return 2 * pp - 1 if name == "zb-v" else 2 * pp


def _rank_of(stage: int, pp: int, placement: str) -> int:
    round_, position = divmod(stage, pp)
    return pp - 1 - position if placement == "v" and round_ % 2 else position


def _check(
    name: str,
    pp: int,
    vpp: int,
    microbatches: int,
    joint: bool,
    pad: str,
    placement: str | None,
    group: int | None,
) -> None:
    problems: list[Problem] = []
    rules = RULES.get(name)
    if rules is None:
        remedy = "it can only be simulated, with scheduler.comparisons" if name in ("dualpipe", "chunked") else ""
        problems.append(Problem("template", name, f"one of {', '.join(TEMPLATES)}", remedy))
    whole = {
        field: isinstance(value, int) and not isinstance(value, bool) and value >= 1
        for field, value in (("pp", pp), ("vpp", vpp), ("microbatches", microbatches))
    }
    for field, value in (("pp", pp), ("vpp", vpp), ("microbatches", microbatches)):
        if not whole[field]:
            problems.append(Problem(field, value, "an integer of at least 1"))
    if rules is not None:
        problems += _rule_problems(name, rules, pp, vpp, microbatches, joint, pad, whole)
    if group is not None:
        if name not in _GROUPED or pad != "groups":
            allowed = f"left out, except for {' and '.join(_GROUPED)} without shadow padding"
            problems.append(Problem("group", group, allowed))
        elif not isinstance(group, int) or isinstance(group, bool) or (whole["pp"] and group < pp):
            problems.append(Problem("group", group, f"an integer of at least pp ({pp})", "smaller groups cannot run"))
    if pad not in PADS:
        problems.append(Problem("pad", pad, f"one of {', '.join(PADS)}"))
    if placement not in (None, *PLACEMENTS):
        problems.append(Problem("placement", placement, f"one of {', '.join(PLACEMENTS)}"))
    elif rules is not None and placement is not None and placement not in rules.placements:
        remedy = "only gpipe can be laid out either way"
        problems.append(Problem("placement", placement, f"{rules.placements[0]} for template {name}", remedy))
    if problems:
        raise ScheduleError.of("template", problems)


def _rule_problems(
    name: str,
    rules: Rules,
    pp: int,
    vpp: int,
    microbatches: int,
    joint: bool,
    pad: str,
    whole: Mapping[str, bool],
) -> list[Problem]:
    problems: list[Problem] = []
    least, most = rules.vpp
    if whole["vpp"] and not least <= vpp <= most:
        allowed = f"{least} for template {name}" if least == most else f"at least {least} for template {name}"
        count = "several stages" if vpp > most else "one stage"
        other = _OTHER_TEMPLATE.get(name)
        problems.append(Problem("vpp", vpp, allowed, f"use {other} for {count} a rank" if other else ""))
    if rules.joint_only and not joint:
        remedy = "use interleaved-1f1b for passes one after the other"
        problems.append(Problem("joint", joint, f"True for template {name}", remedy))
    if rules.whole_groups and pad == "groups" and whole["pp"] and whole["microbatches"] and microbatches % pp:
        allowed = f"a multiple of pp ({pp}) for template {name}"
        problems.append(Problem("microbatches", microbatches, allowed, "pad with shadow, or use interleaved-1f1b"))
    return problems
