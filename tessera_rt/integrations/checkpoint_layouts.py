"""How runtimes store one MoE layer, as data: which of their tensors make up which of ours, and how they lie.

Ours, by the names of ``moe.layer.MoE``: weights [..., out, in], experts stacked along dimension 0, gate and up stacked
[gate; up] along the output dimension:

    router.weight [E, H]             router.bias [E]              router.choice_bias [E]
    experts.gate_up.weight [E, 2 I, H] ([E, I, H] without a gate) experts.down.weight [E, H, I]
    experts.gate_up.bias [E, 2 I]    experts.down.bias [E, H]
    shared.gate_up.weight [2 S, H]   shared.down.weight [H, S]    shared.gate.weight [1, H]
    to_latent.weight [L, H]        from_latent.weight [H, L]

Sources: transformers 5.24 (``conversion_mapping.py`` and the families' modules), torchtitan and Megatron-Core of August
2026 (``models/common/moe``, ``models/gpt_oss``; ``core/transformer/moe``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

EXPERT: Final = "{e}"
"""Stands for an expert's number in a key: such tensors hold one expert each and are stacked."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One of our tensors out of theirs.

    ``theirs``: one key, or two whose tensors are joined along the output dimension. ``transposed``: they store
    [..., in, out]. ``interleaved``: output rows gate 0, up 0, gate 1, up 1, ... instead of [gate; up]. ``as_row``: they
    store [1, ...].
    """

    ours: str
    theirs: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False
    as_row: bool = False

    @property
    def of_experts(self) -> bool:
        return self.ours.startswith("experts.")

    @property
    def numbered(self) -> bool:
        """Whether each expert has a key of its own."""
        return EXPERT in self.theirs[0]

    @property
    def output_dim(self) -> int:
        return -1 if self.ours.endswith("bias") else -2


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """A runtime's way to store a MoE layer; keys are relative to the layer's own prefix.

    ``local_numbers``: expert numbers count from 0 on each expert-parallel rank, not over all experts.
    """

    name: str
    entries: tuple[Entry, ...]
    local_numbers: bool = False


def _router(router: str, *, bias: str = "", choice_bias: str = "") -> tuple[Entry, ...]:
    pairs = (("router.weight", f"{router}.weight"), ("router.bias", bias), ("router.choice_bias", choice_bias))
    return tuple(Entry(ours, (theirs,)) for ours, theirs in pairs if theirs)


def _shared(prefix: str, gate: str, up: str, down: str, sigmoid: str = "") -> tuple[Entry, ...]:
    gate_up = tuple(f"{prefix}.{name}.weight" for name in (gate, up) if name)
    entries = (Entry("shared.gate_up.weight", gate_up), Entry("shared.down.weight", (f"{prefix}.{down}.weight",)))
    return (*entries, Entry("shared.gate.weight", (sigmoid,))) if sigmoid else entries


def _row(ours: str, theirs: str) -> Entry:
    return Entry(ours, (theirs,), as_row=True)


def _per_expert(gate: str, up: str, down: str) -> tuple[Entry, ...]:
    gate_up = tuple(f"experts.{EXPERT}.{name}.weight" for name in (gate, up) if name)
    down_keys = (f"experts.{EXPERT}.{down}.weight",)
    return Entry("experts.gate_up.weight", gate_up), Entry("experts.down.weight", down_keys)


def _fused(first: str = "experts.gate_up_proj", down: str = "experts.down_proj") -> tuple[Entry, ...]:
    return Entry("experts.gate_up.weight", (first,)), Entry("experts.down.weight", (down,))


_NAMES = ("gate_proj", "up_proj", "down_proj")
_W = ("w1", "w3", "w2")  # gate, up, down in Mixtral's and torchtitan's names
_LATENT = (
    Entry("to_latent.weight", ("fc1_latent_proj.weight",)),
    Entry("from_latent.weight", ("fc2_latent_proj.weight",)),
)
_DEEPSEEK = (*_router("gate", choice_bias="gate.e_score_correction_bias"), *_shared("shared_experts", *_NAMES))
_QWEN = (*_router("gate"), *_shared("shared_expert", *_NAMES, sigmoid="shared_expert_gate.weight"))
_ERNIE = (*_router("gate"), *_shared("shared_experts", *_NAMES))
_ERNIE_BIAS = "moe_statics.e_score_correction_bias"
_NEMOTRON = (
    *_router("gate", choice_bias="gate.e_score_correction_bias"),
    *_shared("shared_experts", "", "up_proj", "down_proj"),
    *_LATENT,
)
_GPT_OSS = (
    *_router("router", bias="router.bias"),
    Entry("experts.gate_up.weight", ("experts.gate_up_proj",), transposed=True, interleaved=True),
    Entry("experts.gate_up.bias", ("experts.gate_up_proj_bias",), interleaved=True),
    Entry("experts.down.weight", ("experts.down_proj",), transposed=True),
    Entry("experts.down.bias", ("experts.down_proj_bias",)),
)
_TITAN = "routed_experts.inner_experts"
_MEGATRON = (
    *_router("router", bias="router.bias", choice_bias="router.expert_bias"),
    Entry("shared.gate_up.weight", ("shared_experts.linear_fc1.weight",)),
    Entry("shared.down.weight", ("shared_experts.linear_fc2.weight",)),
    Entry("shared.gate.weight", ("shared_experts.gate_weight",)),
    *_LATENT,
)


def _megatron(first: str, second: str) -> tuple[Entry, ...]:
    """Both products; KIND stands for "weight" or "bias" in their keys."""
    return tuple(
        Entry(f"experts.{ours}.{kind}", (theirs.replace("KIND", kind),))
        for ours, theirs in (("gate_up", first), ("down", second))
        for kind in ("weight", "bias")
    )


_ALL = (
    # Checkpoints as transformers saves them: one key per expert.
    CheckpointLayout("hf/deepseek_v3", (*_DEEPSEEK, *_per_expert(*_NAMES))),
    CheckpointLayout("hf/ernie4_5_moe", (*_ERNIE, _row("router.choice_bias", _ERNIE_BIAS), *_per_expert(*_NAMES))),
    CheckpointLayout("hf/jamba", (*_router("router"), *_per_expert(*_NAMES))),
    CheckpointLayout("hf/mixtral", (*_router("gate"), *_per_expert(*_W))),
    CheckpointLayout("hf/nemotron_h", (*_NEMOTRON, *_per_expert("", "up_proj", "down_proj"))),
    CheckpointLayout("hf/qwen2_moe", (*_QWEN, *_per_expert(*_NAMES))),
    # transformers' modules: experts in one tensor (and so the checkpoints of GPT-OSS and Granite).
    CheckpointLayout("hf-fused/deepseek_v3", (*_DEEPSEEK, *_fused())),
    CheckpointLayout("hf-fused/ernie4_5_moe", (*_ERNIE, _row("router.choice_bias", f"gate.{_ERNIE_BIAS}"), *_fused())),
    CheckpointLayout("hf-fused/gpt_oss", _GPT_OSS),
    CheckpointLayout("hf-fused/granitemoe", (*_router("router"), *_fused())),
    CheckpointLayout("hf-fused/mixtral", (*_router("gate"), *_fused())),
    CheckpointLayout("hf-fused/nemotron_h", (*_NEMOTRON, *_fused("experts.up_proj"))),
    CheckpointLayout("hf-fused/qwen2_moe", (*_QWEN, *_fused())),
    CheckpointLayout(
        "torchtitan",
        (
            *_router("router.gate", choice_bias="expert_bias_E"),
            *_shared("shared_experts", *_W),
            Entry("experts.gate_up.weight", (f"{_TITAN}.w1_EFD", f"{_TITAN}.w3_EFD")),
            Entry("experts.down.weight", (f"{_TITAN}.w2_EDF",)),
        ),
    ),
    CheckpointLayout(
        "torchtitan/gpt_oss",
        (
            *_router("router.gate", bias="router.gate.bias"),
            Entry("experts.gate_up.weight", (f"{_TITAN}.mlp1_weight_EGD",), interleaved=True),
            Entry("experts.gate_up.bias", (f"{_TITAN}.mlp1_bias_EG",), interleaved=True),
            Entry("experts.down.weight", (f"{_TITAN}.mlp2_weight_EDF",)),
            Entry("experts.down.bias", (f"{_TITAN}.mlp2_bias_ED",)),
        ),
    ),
    CheckpointLayout(
        "megatron/te_grouped",
        (*_MEGATRON, *_megatron(f"experts.linear_fc1.KIND{EXPERT}", f"experts.linear_fc2.KIND{EXPERT}")),
        local_numbers=True,
    ),
    CheckpointLayout(
        "megatron/sequential",
        (
            *_MEGATRON,
            *_megatron(
                f"experts.local_experts.{EXPERT}.linear_fc1.KIND", f"experts.local_experts.{EXPERT}.linear_fc2.KIND"
            ),
        ),
        local_numbers=True,
    ),
)
LAYOUTS: Final[Mapping[str, CheckpointLayout]] = MappingProxyType({layout.name: layout for layout in _ALL})

# Which Hugging Face layout a model type has; both "hf/" and "hf-fused/" where a row of that name exists above.
FAMILIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "olmoe", "flex_olmo"), "qwen2_moe"
        ),
        **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe", "dots1", "solar_open"), "deepseek_v3"),
        **{name: name for name in ("ernie4_5_moe", "gpt_oss", "granitemoe", "jamba", "mixtral", "nemotron_h")},
    }
)
