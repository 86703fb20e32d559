"""Checks of a model description: types, names and ranges (pydantic), then what each kind of layer needs.

Both run over the whole description, so that one error shows everything that must be fixed. The second part looks
only at values that passed the first.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from tessera_rt.errors import Problem, SpecError
from tessera_rt.model_spec import (
    Activation,
    Attention,
    AttentionKind,
    FeedForward,
    FeedForwardKind,
    LayerSpec,
    ModelSpec,
    Router,
)

MAX_SIZE: Final = 2**31 - 1
MAX_LAYERS: Final = 10_000
MAX_DEPTH: Final = 8
SCORES: Final = ("softmax", "sigmoid")


class _Absent:
    """Shown as the value of a key that is missing."""

    def __repr__(self) -> str:
        return "(missing)"


ABSENT: Final = _Absent()

# The descriptions are the "must be ..." of errors.
_Size = Annotated[int, Field(ge=0, le=MAX_SIZE, description=f"an integer from 0 to {MAX_SIZE}")]
_Positive = Annotated[int, Field(ge=1, le=MAX_SIZE, description=f"an integer from 1 to {MAX_SIZE}")]
_Repeat = Annotated[int, Field(ge=1, le=MAX_LAYERS, description=f"an integer from 1 to {MAX_LAYERS}")]
_AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False, description="a finite number above 0")]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, description="a finite number, 0 or above")]
_Flag = Annotated[bool, Field(description="true or false")]
_Name = Annotated[str, Field(pattern=r"^[^\r\n]*\S[^\r\n]*$", description="a text of one line, not empty")]
_Text = Annotated[str, Field(description="a text")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Attention(_Strict):
    # Names are read as enum members, which strict mode would demand.
    kind: AttentionKind = Field(strict=False, description=f"one of {', '.join(AttentionKind)}")
    heads: _Size = 0
    kv_heads: _Size = 0
    head_dim: _Size = 0
    v_dim: _Size = 0
    window: _Size = 0
    q_rank: _Size = 0
    kv_rank: _Size = 0
    rope_dim: _Size = 0
    inner: _Size = 0
    state: _Size = 0
    groups: _Size = 0
    conv: _Size = 0
    dt_rank: _Size = 0
    bias: _Flag = False
    qk_norm: _Flag = False
    output_gate: _Flag = False


class _Router(_Strict):
    score: Annotated[str, Field(pattern="^(softmax|sigmoid)$", description=f"one of {', '.join(SCORES)}")] = "softmax"
    softmax_after_topk: _Flag = False
    renormalize: _Flag = True
    scale: _AboveZero = 1.0
    choice_bias: _Flag = False
    groups: _Positive = 1
    keep_groups: _Positive = 1
    aux_coefficient: _NotNegative = 0.0


class _FeedForward(_Strict):
    kind: FeedForwardKind = Field(strict=False, description=f"one of {', '.join(FeedForwardKind)}")
    intermediate: _Size = 0
    activation: Activation = Field(Activation.SWIGLU, strict=False, description=f"one of {', '.join(Activation)}")
    bias: _Flag = False
    experts: _Size = 0
    top_k: _Size = 0
    latent: _Size = 0
    shared_intermediate: _Size = 0
    shared_gated: _Flag = False
    router: _Router = Field(_Router(), description="a mapping")


class _Entry(_Strict):
    """One layer, or ``layers`` in their order, ``repeat`` times."""

    repeat: _Repeat = 1
    attention: _Attention | None = Field(None, description="a mapping with a kind")
    feed_forward: _FeedForward | None = Field(None, description="a mapping with a kind")
    layers: list[_Entry] | None = Field(None, description="a list of layer entries")


class _Model(_Strict):
    name: _Name
    hidden: _Positive
    vocab: _Positive
    layers: list[_Entry] = Field(description="a list of layer entries")
    mtp: list[_Entry] = Field([], description="a list of layer entries")
    tied: _Flag = False
    context: _Positive = 4096
    norm_eps: _AboveZero = 1e-6
    rope_theta: _AboveZero = 10000.0
    source: _Text = ""


_MODEL_OF_KEY: Final[Mapping[str, type[_Strict]]] = {
    "attention": _Attention,
    "feed_forward": _FeedForward,
    "router": _Router,
    "layers": _Entry,
    "mtp": _Entry,
}

# Fields each kind needs (at least 1) and may have; the others must keep their defaults.
_ATTENTION_FIELDS: Final[Mapping[AttentionKind, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    AttentionKind.SOFTMAX: (("heads", "kv_heads", "head_dim"), ("rope_dim", "bias", "qk_norm", "output_gate")),
    AttentionKind.SLIDING: (
        ("heads", "kv_heads", "head_dim", "window"),
        ("rope_dim", "bias", "qk_norm", "output_gate"),
    ),
    AttentionKind.MLA: (("heads", "kv_rank", "head_dim", "v_dim"), ("q_rank", "rope_dim", "bias")),
    AttentionKind.GATED_DELTA_NET: (("heads", "kv_heads", "head_dim", "v_dim", "conv"), ()),
    AttentionKind.MAMBA1: (("inner", "state", "conv", "dt_rank"), ("bias",)),
    AttentionKind.MAMBA2: (("heads", "head_dim", "state", "groups", "conv"), ("bias",)),
    AttentionKind.NONE: ((), ()),
}
_FEED_FORWARD_FIELDS: Final[Mapping[FeedForwardKind, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    FeedForwardKind.DENSE: (("intermediate",), ("activation", "bias")),
    FeedForwardKind.MOE: (
        ("intermediate", "experts", "top_k"),
        ("activation", "bias", "latent", "shared_intermediate", "shared_gated", "router"),
    ),
    FeedForwardKind.NONE: ((), ()),
}


def model_from_dict(data: object, where: str) -> ModelSpec:
    """The model that plain data (of a YAML file, or of ``ModelSpec.to_dict``) describes. ``where`` names the source.

    Raises SpecError with every fault of the description: field, value, allowed range.
    """
    if not isinstance(data, Mapping):
        raise SpecError.of(where, [Problem("file", data, "a mapping with name, hidden, vocab, layers, ...")])
    model: _Model | None = None
    problems: dict[str, Problem] = {}  # by field: the first fault of a field says enough
    try:
        model = _Model.model_validate(data)
    except ValidationError as error:
        for details in error.errors(include_url=False, include_context=False):
            problem = _problem_of(details)
            problems.setdefault(problem.field, problem)
    wrong = frozenset(problems)
    for problem in _model_problems(data, wrong):
        problems.setdefault(problem.field, problem)
    if problems:
        raise SpecError.of(where, problems.values())
    assert model is not None
    return ModelSpec(
        name=model.name,
        hidden=model.hidden,
        vocab=model.vocab,
        layers=tuple(_expanded(model.layers)),
        mtp=tuple(_expanded(model.mtp)),
        tied=model.tied,
        context=model.context,
        norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        source=model.source,
    )


def check_model(spec: ModelSpec, where: str = "") -> ModelSpec:
    """The same model if it is sound. Raises SpecError with every fault, as for a file; of equal layers once."""
    try:
        return model_from_dict(spec.to_dict(), where or spec.name)
    except SpecError as error:
        raise SpecError.of(where or spec.name, filter(lambda fault: _is_first(fault, spec), error.problems)) from None


def nearest(name: str, known: Sequence[str]) -> str:
    """``did you mean ...?`` for a mistyped name, or an empty text."""
    close = difflib.get_close_matches(name.lower(), known, n=1)
    return f"did you mean {close[0]!r}?" if close else ""


def _is_first(problem: Problem, spec: ModelSpec) -> bool:
    match = re.match(r"(layers|mtp)\[(\d+)\]", problem.field)
    if match is None:
        return True
    layers, index = (spec.layers if match[1] == "layers" else spec.mtp), int(match[2])
    return layers[index] not in layers[:index]


def _expanded(entries: Sequence[_Entry]) -> Iterator[LayerSpec]:
    for entry in entries:
        if entry.layers is not None:
            group = tuple(_expanded(entry.layers))
        else:
            group = (_layer(entry),)
        for _ in range(entry.repeat):
            yield from group


def _layer(entry: _Entry) -> LayerSpec:
    attention = Attention(kind=AttentionKind.NONE)
    if entry.attention is not None:
        attention = Attention(**entry.attention.model_dump())
    feed_forward = FeedForward(kind=FeedForwardKind.NONE)
    if entry.feed_forward is not None:
        router = Router(**entry.feed_forward.router.model_dump())
        feed_forward = FeedForward(**entry.feed_forward.model_dump(exclude={"router"}), router=router)
    return LayerSpec(attention=attention, feed_forward=feed_forward)


# Types, names and ranges.


def _problem_of(details: ErrorDetails) -> Problem:
    """Turns pydantic's report on one value into ours."""
    loc = details["loc"]
    path = _path(loc)
    keys = [part for part in loc[:-1] if isinstance(part, str)]
    parent = _MODEL_OF_KEY[keys[-1]] if keys else _Model
    last = loc[-1]
    if details["type"] in ("extra_forbidden", "invalid_key"):
        known = tuple(parent.model_fields)
        remedy = nearest(str(last), known) or f"known: {', '.join(known)}"
        return Problem(path, details["input"], "left out: there is no such key", remedy)
    if details["type"] == "recursion_loop":
        return Problem(path, ABSENT, "a list of layers", "it contains itself")
    allowed = "a mapping with attention and feed_forward, or with layers"
    if isinstance(last, str):
        allowed = parent.model_fields[last].description or "present"
    return Problem(path, ABSENT if details["type"] == "missing" else details["input"], allowed)


def _path(loc: Sequence[int | str]) -> str:
    """``layers[3].feed_forward.top_k``"""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


# What each kind needs. These functions read plain data; fields that are wrong in themselves are in ``wrong``.


class _Values:
    """The values of one mapping that are right in themselves, with the defaults of ``cls`` for those left out."""

    def __init__(self, cls: type[Any], data: Mapping[str, object], path: str, wrong: frozenset[str]) -> None:
        self.path = path
        self._given = data
        defaults = {field.name: field.default for field in fields(cls) if field.default is not MISSING}
        self.defaults: Mapping[str, object] = defaults
        self._values = {
            name: value
            for name, value in {**defaults, **data}.items()
            if isinstance(name, str) and f"{path}.{name}" not in wrong
        }

    def known(self, *names: str) -> bool:
        return all(name in self._values for name in names)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def problem(self, name: str, allowed: str, remedy: str = "") -> Problem:
        return Problem(f"{self.path}.{name}", self._given.get(name, ABSENT), allowed, remedy)


def _model_problems(data: Mapping[str, object], wrong: frozenset[str]) -> Iterator[Problem]:
    hidden = data.get("hidden") if "hidden" not in wrong else None
    for key in ("layers", "mtp"):
        entries = data.get(key)
        if not isinstance(entries, list):
            continue
        if key == "layers" and not entries:
            yield Problem(key, entries, "a list of at least one layer")
        count = yield from _entries_problems(entries, key, hidden, wrong, depth=1)
        if count > MAX_LAYERS:
            yield Problem(key, f"{count} layers", f"at most {MAX_LAYERS} layers in all")


def _entries_problems(
    entries: Sequence[object], path: str, hidden: object, wrong: frozenset[str], depth: int
) -> Generator[Problem, None, int]:
    """Yields the problems of a list of entries; returns the number of layers it stands for."""
    count = 0
    for index, entry in enumerate(entries):
        where = f"{path}[{index}]"
        if not isinstance(entry, Mapping):
            continue
        repeat = entry.get("repeat", 1) if f"{where}.repeat" not in wrong else 1
        nested = entry.get("layers")
        if nested is None:
            yield from _layer_problems(entry, where, hidden, wrong)
            count += repeat
            continue
        for key in ("attention", "feed_forward"):
            if entry.get(key) is not None:
                yield Problem(f"{where}.{key}", entry[key], "left out where layers are given", "move it into an entry")
        if not isinstance(nested, list):
            continue
        if not nested:
            yield Problem(f"{where}.layers", nested, "a list of at least one layer")
        elif depth == MAX_DEPTH:
            yield Problem(f"{where}.layers", "...", f"nested at most {MAX_DEPTH} deep")
        else:
            inner = yield from _entries_problems(nested, f"{where}.layers", hidden, wrong, depth + 1)
            count += repeat * inner
    return count


def _layer_problems(
    entry: Mapping[str, object], where: str, hidden: object, wrong: frozenset[str]
) -> Iterator[Problem]:
    attention, feed_forward = entry.get("attention"), entry.get("feed_forward")
    for part in (attention, feed_forward):
        if part is not None and not isinstance(part, Mapping):
            return
    if isinstance(attention, Mapping):
        yield from _attention_problems(_Values(Attention, attention, f"{where}.attention", wrong))
    if isinstance(feed_forward, Mapping):
        values = _Values(FeedForward, feed_forward, f"{where}.feed_forward", wrong)
        yield from _feed_forward_problems(values, feed_forward, hidden, wrong)
    kinds = [part.get("kind") if isinstance(part, Mapping) else "none" for part in (attention, feed_forward)]
    if kinds == ["none", "none"]:
        yield Problem(where, "attention none, feed_forward none", "a layer with at least one of the two")


def _kind_problems(values: _Values, what: str, needed: Sequence[str], optional: Sequence[str]) -> Iterator[Problem]:
    kind = values["kind"]
    for name in needed:
        if values.known(name) and values[name] == 0:
            yield values.problem(name, f"an integer from 1 to {MAX_SIZE} for kind {kind}")
    for name, default in values.defaults.items():
        if name in needed or name in optional or not values.known(name):
            continue
        given = values[name]
        if given != default and not (isinstance(given, Mapping) and isinstance(default, Router)):
            uses = ", ".join((*needed, *optional)) or "nothing"
            yield values.problem(name, f"left out: {what} of kind {kind} does not use it", f"it uses {uses}")


def _attention_problems(values: _Values) -> Iterator[Problem]:
    if not values.known("kind"):
        return
    kind = AttentionKind(values["kind"])
    needed, optional = _ATTENTION_FIELDS[kind]
    yield from _kind_problems(values, "attention", needed, optional)
    if "kv_heads" in needed and values.known("heads", "kv_heads"):
        heads, kv_heads = values["heads"], values["kv_heads"]
        if heads and kv_heads and heads % kv_heads:
            yield values.problem("kv_heads", f"a divisor of heads ({heads})")
    if kind is AttentionKind.MAMBA2 and values.known("heads", "groups"):
        heads, groups = values["heads"], values["groups"]
        if heads and groups and heads % groups:
            yield values.problem("groups", f"a divisor of heads ({heads})")
    if "rope_dim" in optional and values.known("rope_dim", "head_dim"):
        rope, head_dim = values["rope_dim"], values["head_dim"]
        limit = MAX_SIZE if kind is AttentionKind.MLA else head_dim  # MLA rotates dimensions of their own
        if rope % 2 or (head_dim and rope > limit):
            yield values.problem("rope_dim", f"an even number from 0 to {limit}")


def _feed_forward_problems(
    values: _Values, data: Mapping[str, object], hidden: object, wrong: frozenset[str]
) -> Iterator[Problem]:
    if not values.known("kind"):
        return
    kind = FeedForwardKind(values["kind"])
    needed, optional = _FEED_FORWARD_FIELDS[kind]
    yield from _kind_problems(values, "feed_forward", needed, optional)
    given = data.get("router", {})
    router = _Values(Router, given if isinstance(given, Mapping) else {}, f"{values.path}.router", wrong)
    if kind is not FeedForwardKind.MOE:
        for name, default in router.defaults.items():
            if router.known(name) and router[name] != default:
                yield router.problem(name, f"left out: feed_forward of kind {kind} has no router")
        return
    if values.known("top_k", "experts"):
        top_k, experts = values["top_k"], values["experts"]
        if experts and top_k > experts:
            yield values.problem("top_k", f"an integer from 1 to experts ({experts})")
    if isinstance(hidden, int) and values.known("latent") and values["latent"] >= hidden:
        yield values.problem("latent", f"an integer from 0 to {hidden - 1} (smaller than hidden; 0: none)")
    if values.known("shared_gated", "shared_intermediate"):
        if values["shared_gated"] and not values["shared_intermediate"]:
            yield values.problem("shared_gated", "false without a shared expert", "give shared_intermediate")
    yield from _router_problems(router, values)


def _router_problems(router: _Values, values: _Values) -> Iterator[Problem]:
    if router.known("score", "softmax_after_topk"):
        if router["softmax_after_topk"] and router["score"] != "softmax":
            yield router.problem("softmax_after_topk", f"false for score {router['score']}")
    if not router.known("groups"):
        return
    groups = router["groups"]
    if router.known("keep_groups") and router["keep_groups"] > groups:
        yield router.problem("keep_groups", f"an integer from 1 to groups ({groups})")
    if not values.known("experts") or not values["experts"]:
        return
    experts = values["experts"]
    if experts % groups:
        yield router.problem("groups", f"a divisor of experts ({experts})")
    elif router.known("keep_groups") and values.known("top_k"):
        reachable = experts // groups * min(router["keep_groups"], groups)
        if experts >= values["top_k"] > reachable:
            yield values.problem("top_k", f"an integer from 1 to {reachable} (the experts of the kept groups)")
