"""A plan's partition in the notation of other training systems, and back: Megatron-Core's layout, torchtitan's lists.

Only the partition leaves: which items each virtual stage holds. Orders go through ``scheduler/torch_csv.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from tessera_rt.errors import PlanError, Problem
from tessera_rt.model_spec import Item, ItemKind, ModelSpec
from tessera_rt.plan import Plan, Stage

_LETTERS = {ItemKind.EMBED: "E", ItemKind.LAYER: "t", ItemKind.MTP: "m", ItemKind.HEAD: "L"}
_REPEATS = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"([^()*])\*(\d+)"))
_LONGEST = 100_000
"""Characters of a layout with its repetitions written out."""


def megatron_layout(plan: Plan, model: ModelSpec) -> str:
    """The value of Megatron-Core's ``--pipeline-model-parallel-layout``, such as ``Ettt|(tt|)*29m|L``.

    One letter per item (E embedding, t decoder layer, m MTP block, L head and loss), ``|`` between virtual stages, in
    their order; stages may be empty. Raises PlanError where Megatron-Core would refuse: stages must loop over the
    ranks, and all MTP blocks must be in one stage, the last one of its rank.
    """
    problems = list(_foreign(plan, model))
    problems += [
        Problem(f"stages[{stage.index}].rank", stage.rank, f"{stage.index % plan.mesh.pp}: stages loop over the ranks")
        for stage in plan.stages
        if stage.rank != stage.index % plan.mesh.pp
    ]
    texts = ["".join(_LETTERS[item.kind] for item in _items(stage, model)) for stage in plan.stages]
    problems += _mtp_problems(texts, plan.mesh.pp)
    if problems:
        raise PlanError.of("Megatron-Core layout", problems)
    layout = ""
    for text, run in groupby(f"{text}|" for text in texts[:-1]):
        count = len(list(run))
        layout += f"({text})*{count}" if count > 2 else text * count
    return layout + texts[-1]


def bounds_from_megatron(layout: str, model: ModelSpec, *, pp: int) -> tuple[int, ...]:
    """The boundaries 0 = b_0 <= b_1 <= ... = number of items that a Megatron-Core layout gives the model.

    They can be planned with (``build_plan(..., fixed_bounds=...)``); there are ``len(bounds) - 1`` virtual stages, a
    multiple of ``pp``. Raises PlanError with all problems of the layout.
    """
    texts = _unrolled(layout).split("|")
    problems: list[Problem] = []
    unknown = sorted(set("".join(texts)) - set(_LETTERS.values()))
    if unknown:
        problems.append(Problem("layout", "".join(unknown), "E, t, m, L, | and repetitions such as (tt|)*3 or t*3"))
    if len(texts) % pp:
        problems.append(Problem("layout", f"{len(texts)} stages", f"a multiple of pp ({pp}) stages"))
    found, wanted = "".join(texts), "".join(_LETTERS[item.kind] for item in model.items)
    if not unknown and found != wanted:
        if sorted(found) == sorted(wanted):
            problems.append(Problem("layout", layout, "E first, then all t, then all m, then L"))
        problems += [
            Problem("layout", f"{found.count(letter)} {letter}", f"{wanted.count(letter)}, one for each {kind} item")
            for kind, letter in _LETTERS.items()
            if found.count(letter) != wanted.count(letter)
        ]
    if not problems:
        problems += _mtp_problems(texts, pp)
    if problems:
        raise PlanError.of("Megatron-Core layout", problems)
    bounds = [0]
    for text in texts:
        bounds.append(bounds[-1] + len(text))
    return tuple(bounds)


def torchtitan_modules(
    plan: Plan,
    model: ModelSpec,
    *,
    embedding: Sequence[str] = ("tok_embeddings",),
    head: Sequence[str] = ("norm", "output"),
) -> list[list[str]]:
    """torchtitan's ``module_fqns_per_model_part``: the names of the modules of every virtual stage, in their order.

    ``embedding``, ``head``: the model's names for these (newer models call the output ``lm_head``); decoder layers are
    ``layers.<i>``. Raises PlanError for a model with MTP blocks, which torchtitan has no place for, and for an empty
    stage.
    """
    problems = list(_foreign(plan, model))
    if model.mtp:
        problems.append(Problem("model.mtp", len(model.mtp), "0 MTP blocks", "torchtitan's lists cannot hold them"))
    problems += [
        Problem(f"stages[{stage.index}]", "empty", "a stage with at least one item", "plan with fewer virtual stages")
        for stage in plan.stages
        if stage.start == stage.stop
    ]
    if problems:
        raise PlanError.of("torchtitan module lists", problems)
    names = {ItemKind.EMBED: embedding, ItemKind.HEAD: head}
    return [
        [name for item in _items(stage, model) for name in names.get(item.kind, (f"layers.{item.index}",))]
        for stage in plan.stages
    ]


def _items(stage: Stage, model: ModelSpec) -> tuple[Item, ...]:
    return model.items[stage.start : stage.stop]


def _foreign(plan: Plan, model: ModelSpec) -> list[Problem]:
    if plan.fingerprint == model.fingerprint:
        return []
    value, allowed = f"{plan.fingerprint[:12]}... ({plan.model})", f"{model.fingerprint[:12]}... ({model.name})"
    return [Problem("fingerprint", value, allowed, "the plan was made for another model")]


def _mtp_problems(texts: Sequence[str], pp: int) -> list[Problem]:
    """``texts``: letters of every stage. Megatron-Core keeps MTP blocks together, in the last round of stages."""
    holders = [stage for stage, text in enumerate(texts) if "m" in text]
    problems: list[Problem] = []
    if len(holders) > 1:
        problems.append(Problem("MTP blocks", f"in stages {', '.join(map(str, holders))}", "all in one stage"))
    problems += [
        Problem("MTP blocks", f"in stage {stage}", f"in one of the last {pp} stages, the last of its rank")
        for stage in holders
        if stage < len(texts) - pp
    ]
    return problems


def _unrolled(layout: str) -> str:
    """The layout without repetitions, commas and blanks. Raises PlanError for one that is longer than any model."""
    text = re.sub(r"[,\s]", "", layout)
    for pattern in _REPEATS:
        # Length first: a large count must not fill the memory.
        grown = len(text) + sum(len(match[1]) * int(match[2][:9]) for match in pattern.finditer(text))
        if grown > _LONGEST:
            allowed = f"at most {_LONGEST} letters with its repetitions written out"
            raise PlanError.of("Megatron-Core layout", [Problem("layout", layout, allowed)])
        text = pattern.sub(lambda match: match[1] * int(match[2]), text)
    return text
