"""ModelSpec: what a heterogeneous decoder is made of, as immutable data with all sizes.

A model is a chain of *items*, the atoms of partitioning: the embedding, the decoder layers, the optional
multi-token-prediction (MTP) blocks, the head. A pipeline stage holds a contiguous range of items.
Reading and writing files: ``model_files.py``; released models: ``presets/``.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any


class AttentionKind(StrEnum):
    """How a layer mixes tokens."""

    SOFTMAX = "softmax"  # grouped-query attention over the whole context
    SLIDING = "sliding"  # the same over a window
    MLA = "mla"  # multi-head latent attention
    GATED_DELTA_NET = "gated_delta_net"
    MAMBA1 = "mamba1"
    MAMBA2 = "mamba2"
    NONE = "none"  # the layer is a feed-forward only (NemotronH's one mixer per layer)


class FeedForwardKind(StrEnum):
    """What follows the mixer."""

    DENSE = "dense"
    MOE = "moe"
    NONE = "none"


class Activation(StrEnum):
    """Activation of a feed-forward; gated kinds have two input projections."""

    SWIGLU = "swiglu"
    GEGLU = "geglu"
    SWIGLU_CLAMPED = "swiglu_clamped"
    SWIGLU_OSS = "swiglu_oss"  # clamped, gate * sigmoid(1.702 gate) * (up + 1)
    RELU2 = "relu2"  # squared ReLU, no gate

    @property
    def gated(self) -> bool:
        return self is not Activation.RELU2


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Sizes of one token mixer. Fields that a kind does not use stay at their defaults.

    softmax, sliding: ``heads``, ``kv_heads``, ``head_dim`` (+ ``window``).
    mla: ``heads``, ``q_rank`` (0 = full-rank q), ``kv_rank``, ``head_dim`` (no-position part), ``rope_dim``,
    ``v_dim``.
    gated_delta_net: ``heads`` (value heads), ``kv_heads`` (key heads), ``head_dim`` (key), ``v_dim``, ``conv``.
    mamba1: ``inner``, ``state``, ``conv``, ``dt_rank``.
    mamba2: ``heads``, ``head_dim``, ``state``, ``groups``, ``conv``.
    """

    kind: AttentionKind
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    v_dim: int = 0
    window: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0  # rotated dimensions per head; 0 = none (softmax: usually head_dim)
    inner: int = 0
    state: int = 0
    groups: int = 0
    conv: int = 0
    dt_rank: int = 0
    bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False  # Qwen3-Next: attention output times sigmoid(gate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How tokens choose experts (kinds R1 to R6 of released models)."""

    score: str = "softmax"  # softmax | sigmoid
    softmax_after_topk: bool = False
    renormalize: bool = True
    scale: float = 1.0
    choice_bias: bool = False  # a learned-by-rule bias used for the choice only
    groups: int = 1
    keep_groups: int = 1
    aux_coefficient: float = 0.0  # load-balance loss weight


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """Sizes of one feed-forward. MoE fields stay 0 for dense layers."""

    kind: FeedForwardKind
    intermediate: int = 0  # per expert for MoE
    activation: Activation = Activation.SWIGLU
    bias: bool = False
    experts: int = 0
    top_k: int = 0
    latent: int = 0  # expert input size when smaller than hidden (NemotronH); 0 = hidden
    shared_intermediate: int = 0  # total width of shared experts; 0 = none
    shared_gated: bool = False  # shared output times sigmoid(x @ gate)
    router: Router = Router()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer: a mixer and a feed-forward, either of which may be ``none`` but not both."""

    attention: Attention
    feed_forward: FeedForward

    @property
    def is_moe(self) -> bool:
        return self.feed_forward.kind is FeedForwardKind.MOE


class ItemKind(StrEnum):
    """Kinds of placeable items."""

    EMBED = "embed"
    LAYER = "layer"
    MTP = "mtp"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class Item:
    """One placeable item. ``label`` is its name in tasks and plans: EMBED, L0, L1, ..., M0, ..., HEAD."""

    kind: ItemKind
    index: int  # among items of its kind
    layer: LayerSpec | None  # for LAYER and MTP

    @property
    def label(self) -> str:
        match self.kind:
            case ItemKind.EMBED:
                return "EMBED"
            case ItemKind.HEAD:
                return "HEAD"
            case ItemKind.LAYER:
                return f"L{self.index}"
            case ItemKind.MTP:
                return f"M{self.index}"


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only model. ``hidden``, ``vocab``: sizes; ``context``: longest sequence it was made for (tokens).

    The items in order: embedding, layers, MTP blocks, head. An MTP block takes the last hidden state and the
    embedding of the next token, projects their concatenation ([2H] -> [H]) and runs one layer; the head is then
    applied to its output too.
    """

    name: str
    hidden: int
    vocab: int
    layers: tuple[LayerSpec, ...]
    mtp: tuple[LayerSpec, ...] = ()
    tied: bool = False  # embedding and head share one weight
    context: int = 4096
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    source: str = ""  # where the sizes come from

    @cached_property
    def items(self) -> tuple[Item, ...]:
        return (
            Item(ItemKind.EMBED, 0, None),
            *(Item(ItemKind.LAYER, i, layer) for i, layer in enumerate(self.layers)),
            *(Item(ItemKind.MTP, i, layer) for i, layer in enumerate(self.mtp)),
            Item(ItemKind.HEAD, 0, None),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data (str, int, float, bool, list, dict) with every field spelled out."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the canonical JSON without the name and its source: equal fingerprints mean equal models."""
        data = self.to_dict()
        del data["name"], data["source"]
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
