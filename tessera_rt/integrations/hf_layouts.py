"""What an experts module of transformers computes, read from its class and its flags, never from shapes.

A class under ``use_experts_implementation`` says how its weights lie (``is_transposed``, ``is_concatenated``,
``has_bias``, ``has_gate``) and what happens between its products (``act_fn``, or ``_apply_gate`` of its own). Classes
that define ``_apply_gate`` are listed in ``GATES``; one that is not listed is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import activations
from transformers.integrations import moe as hf_moe

from tessera_rt.errors import Problem, SpecError
from tessera_rt.kernels.options import Activation, Gate
from tessera_rt.kernels.weights import ExpertWeights

_FLAGS: Final = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
_DTYPES: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# act_fn by its type, of experts with a gate.
_GATED: Final[Mapping[object, Activation]] = {
    nn.SiLU: Activation.SWIGLU,
    activations.SiLUActivation: Activation.SWIGLU,
    functional.silu: Activation.SWIGLU,
    activations.GELUActivation: Activation.GEGLU,
    activations.GELUTanh: Activation.GEGLU_TANH,
    activations.NewGELUActivation: Activation.GEGLU_TANH,
}
_PLAIN: Final[Mapping[object, Activation]] = {activations.ReLUSquaredActivation: Activation.RELU2}


@dataclass(frozen=True, slots=True)
class OwnGate:
    """A class's own ``_apply_gate``. ``activation`` None: act_fn decides. ``alpha``, ``limit``: attributes with them.

    ``fp32``: it computes in float32 whatever the dtype, so in float64 Tessera is the more precise one.
    """

    activation: Activation | None
    alpha: str = ""
    limit: str = ""
    fp32: bool = False


GATES: Final[Mapping[str, OwnGate]] = {
    "beam.BeamExperts": OwnGate(None, fp32=True),
    "deepseek_v4.DeepseekV4Experts": OwnGate(Activation.SWIGLU_CLAMPED, limit="limit"),
    "glm5_next.Glm5NextTextExperts": OwnGate(Activation.SWIGLU_CLAMPED, limit="swiglu_limit"),
    "gpt_oss.GptOssExperts": OwnGate(Activation.SWIGLU_OSS, alpha="alpha", limit="limit"),
    "hy_v4.HYV4Experts": OwnGate(Activation.SWIGLU_CLAMPED, limit="swiglu_limit"),
    "hy_v4_vl.HYV4VLExperts": OwnGate(Activation.SWIGLU_CLAMPED, limit="swiglu_limit"),
    "minimax_m3_vl.MiniMaxM3VLExperts": OwnGate(Activation.SWIGLU_OSS, alpha="swiglu_alpha", limit="swiglu_limit"),
    "openai_privacy_filter.OpenAIPrivacyFilterExperts": OwnGate(
        Activation.SWIGLU_OSS, alpha="alpha", limit="limit", fp32=True
    ),
}


LAYOUT_ATTRIBUTES: Final = frozenset(
    {*_FLAGS, "act_fn", "_apply_gate", *(name for own in GATES.values() for name in (own.alpha, own.limit) if name)}
)
"""What a layout is read from, besides the class."""


@dataclass(frozen=True, slots=True)
class ExpertsLayout:
    """How to read an experts module's parameters, and what it does between its two products."""

    gate: Gate
    transposed: bool
    has_bias: bool

    @property
    def first(self) -> str:
        """Name of the first product's weight."""
        return "gate_up_proj" if self.gate.gated else "up_proj"

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all parameters, each with the experts along its first dimension."""
        names = (self.first, "down_proj")
        return (*names, *(f"{name}_bias" for name in names)) if self.has_bias else names

    def weights(self, module: nn.Module) -> ExpertWeights:
        """The module's parameters as they are now (adapters may stand in their place), without a copy."""
        read: Callable[[str], Tensor] = lambda name: getattr(module, name)  # noqa: E731
        first, down = read(self.first), read("down_proj")
        return ExpertWeights(
            first.mT if self.transposed else first,
            down.mT if self.transposed else down,
            read(f"{self.first}_bias") if self.has_bias else None,
            read("down_proj_bias") if self.has_bias else None,
        )


def is_experts(module: nn.Module) -> bool:
    """Whether the module's class stands under ``use_experts_implementation``."""
    return hasattr(module, "_apply_gate") and all(hasattr(module, flag) for flag in _FLAGS)


def class_key(cls: type) -> str:
    """``gpt_oss.GptOssExperts`` for a class of transformers' models, the full name for any other."""
    module = cls.__module__.split(".")
    return f"{module[2] if module[:2] == ['transformers', 'models'] else cls.__module__}.{cls.__qualname__}"


def read_layout(module: nn.Module) -> ExpertsLayout:
    """The layout of an experts module. Raises SpecError naming every flag that Tessera cannot reproduce."""
    problems = list(_problems(module))
    if problems:
        raise SpecError.of(type(module).__name__, problems)
    own = GATES.get(class_key(_gate_owner(module)))
    activation = own.activation if own is not None and own.activation is not None else _activation(module)
    assert activation is not None
    numbers = {} if own is None else {
        name: float(getattr(module, attribute))
        for name, attribute in (("alpha", own.alpha), ("limit", own.limit))
        if attribute
    }  # fmt: skip
    gate = Gate(activation=activation, interleaved=not _flag(module, "is_concatenated"), **numbers)
    return ExpertsLayout(gate, _flag(module, "is_transposed"), _flag(module, "has_bias"))


def _problems(module: nn.Module) -> list[Problem]:
    if not is_experts(module):
        remedy = "its class must stand under transformers' use_experts_implementation"
        return [Problem("class", type(module).__qualname__, "an experts module of transformers", remedy)]
    problems = []
    owner = _gate_owner(module)
    default = "_apply_gate" not in vars(module) and vars(owner)["_apply_gate"] is hf_moe._default_apply_gate
    own = None if default or "_apply_gate" in vars(module) else GATES.get(class_key(owner))
    if _flag(module, "has_post_expert_norm"):
        problems.append(Problem("has_post_expert_norm", True, "false", "a norm behind each expert is not supported"))
    if not default and own is None:
        known = ", ".join(sorted(GATES))
        problems.append(Problem("_apply_gate", class_key(owner), f"transformers' own, or that of {known}"))
    if default and _flag(module, "has_gate") and not _flag(module, "is_concatenated"):
        allowed = "true with transformers' own _apply_gate, which splits the product in halves"
        problems.append(Problem("is_concatenated", False, allowed))
    if own is not None:
        for attribute in filter(None, (own.alpha, own.limit)):
            value = getattr(module, attribute, None)
            if not isinstance(value, int | float):
                problems.append(Problem(attribute, value, "a number"))
    needs_act_fn = default or own is None or own.activation is None or hasattr(module, "act_fn")
    if needs_act_fn and _activation(module) is None:
        table = _GATED if _flag(module, "has_gate") else _PLAIN
        names = ", ".join(sorted({str(getattr(key, "__name__", key)) for key in table}))
        problems.append(Problem("act_fn", _act_name(module), f"one of {names}"))
    elif own is not None and own.activation is Activation.SWIGLU_CLAMPED and needs_act_fn:
        if _activation(module) is not Activation.SWIGLU:
            problems.append(Problem("act_fn", _act_name(module), "SiLU, for a clamped gate"))
    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, DTensor):
            remedy = "apply Tessera before FSDP, tensor parallelism or transformers' expert parallelism"
            problems.append(Problem(name, "DTensor", "a plain tensor", remedy))
        elif parameter.dtype not in _DTYPES:
            problems.append(Problem(f"{name}.dtype", str(parameter.dtype), "float64, float32, bfloat16 or float16"))
    return problems


def _flag(module: nn.Module, name: str) -> bool:
    return bool(getattr(module, name))


def _gate_owner(module: nn.Module) -> type:
    return next(cls for cls in type(module).__mro__ if "_apply_gate" in vars(cls))


def _activation(module: nn.Module) -> Activation | None:
    act: Any = getattr(module, "act_fn", None)
    table = _GATED if _flag(module, "has_gate") else _PLAIN
    if type(act) is nn.GELU:
        return {"none": Activation.GEGLU, "tanh": Activation.GEGLU_TANH}.get(act.approximate)
    return table.get(type(act), table.get(act) if callable(act) and not isinstance(act, nn.Module) else None)


def _act_name(module: nn.Module) -> str:
    act = getattr(module, "act_fn", None)
    return type(act).__name__ if isinstance(act, nn.Module) else repr(act)
