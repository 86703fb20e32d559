"""What the keys of a Hugging Face ``config.json`` mean, family by family (``model_type``).

The source of every rule is transformers' code: ``models/<type>/configuration_<type>.py`` and ``modeling_<type>.py``.
Keys that fix a size or the routing must be there: no default of a class stands in for a value of the model. Keys that
older files lack (``attention_bias``, ``rope_theta``, ``rms_norm_eps``, ...) take the default of the class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tessera_rt.files.hf_keys import ConfigKeys
from tessera_rt.files.model_validation import MAX_LAYERS
from tessera_rt.model_spec import (
    Activation,
    Attention,
    AttentionKind,
    FeedForward,
    FeedForwardKind,
    LayerSpec,
    Router,
)

_NO_ATTENTION: Final = Attention(kind=AttentionKind.NONE)
_NO_FEED_FORWARD: Final = FeedForward(kind=FeedForwardKind.NONE)
_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "silu": Activation.SWIGLU,
    "swish": Activation.SWIGLU,
    "gelu": Activation.GEGLU,
    "gelu_new": Activation.GEGLU,
    "gelu_pytorch_tanh": Activation.GEGLU,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What differs by family: the layers, the MTP blocks, and keys with names or defaults of their own."""

    layers: tuple[LayerSpec, ...]
    mtp: tuple[LayerSpec, ...] = ()
    eps_keys: tuple[str, ...] = ("rms_norm_eps",)
    eps: float = 1e-6
    theta: float = 10000.0


# Parts that several families share.


def _count(keys: ConfigKeys) -> int:
    return keys.size("num_hidden_layers", most=MAX_LAYERS)


def _mtp_count(keys: ConfigKeys) -> int:
    return keys.size("num_nextn_predict_layers", "num_mtp_layers", default=0, least=0, most=MAX_LAYERS)


def _gqa(
    keys: ConfigKeys,
    hidden: int,
    *,
    bias: bool = False,
    qk_norm: bool = False,
    rotary: float = 1.0,
    head_dim_needed: bool = False,
) -> Attention:
    """Grouped-query softmax attention. ``rotary``: share of a head that is rotated where the config is silent."""
    heads = keys.size("num_attention_heads")
    head_dim = keys.head_dim(heads, hidden, head_dim_needed)
    return Attention(
        kind=AttentionKind.SOFTMAX,
        heads=heads,
        kv_heads=keys.size("num_key_value_heads", default=heads),
        head_dim=head_dim,
        rope_dim=int(head_dim * keys.rope("partial_rotary_factor", default=rotary)) if rotary else 0,
        bias=bias,
        qk_norm=qk_norm,
    )


def _windowed(keys: ConfigKeys, attention: Attention) -> Attention:
    return replace(attention, kind=AttentionKind.SLIDING, window=keys.size("sliding_window"))


def _by_type(keys: ConfigKeys, count: int, kinds: Mapping[str, Attention], default: Sequence[str]) -> list[Attention]:
    """Attention of each layer by ``layer_types``, or by the family's ``default`` list where the config has none."""
    types = keys.names("layer_types", values={kind: kind for kind in kinds}, count=count)
    return [kinds[kind] for kind in types or default]


def _dense(keys: ConfigKeys, *, bias: bool = False) -> FeedForward:
    return FeedForward(
        kind=FeedForwardKind.DENSE,
        intermediate=keys.size("intermediate_size"),
        activation=keys.choice("hidden_act", _ACTIVATIONS, "silu"),
        bias=bias,
    )


def _aux(keys: ConfigKeys) -> float:
    return keys.number("router_aux_loss_coef", default=0.001, inclusive=True)


def _sigmoid_router(keys: ConfigKeys) -> Router:
    """The DeepSeek-V3 router: sigmoid scores, a bias for the choice only, groups of experts."""
    # Not in transformers' classes, but in released files: other scores and methods of the same code.
    score = keys.choice("scoring_func", {"sigmoid": "sigmoid", "softmax": "softmax"}, "sigmoid")
    methods = {"noaux_tc": True, "greedy": False, "group_limited_greedy": False}
    return Router(
        score=score,
        renormalize=keys.flag("norm_topk_prob"),
        scale=keys.number("routed_scaling_factor"),
        choice_bias=keys.choice("topk_method", methods, "noaux_tc"),
        groups=keys.size("n_group"),
        keep_groups=keys.size("topk_group"),
    )


def _sigmoid_moe(keys: ConfigKeys) -> FeedForward:
    intermediate = keys.size("moe_intermediate_size")
    return FeedForward(
        kind=FeedForwardKind.MOE,
        intermediate=intermediate,
        activation=keys.choice("hidden_act", _ACTIVATIONS, "silu"),
        experts=keys.size("n_routed_experts", "num_local_experts"),
        top_k=keys.size("num_experts_per_tok"),
        shared_intermediate=intermediate * keys.size("n_shared_experts", null=0, least=0, most=1024),
        router=_sigmoid_router(keys),
    )


def _layers(attention: Sequence[Attention], feed_forward: Sequence[FeedForward]) -> tuple[LayerSpec, ...]:
    return tuple(
        LayerSpec(attention=mixer, feed_forward=mlp) for mixer, mlp in zip(attention, feed_forward, strict=True)
    )


# Families. Each takes the keys and hidden_size.


def _llama(keys: ConfigKeys, hidden: int) -> Parts:
    count = _count(keys)
    attention = _gqa(keys, hidden, bias=keys.flag("attention_bias", default=False))
    feed_forward = _dense(keys, bias=keys.flag("mlp_bias", default=False))
    return Parts(layers=_layers([attention] * count, [feed_forward] * count))


def _mistral(keys: ConfigKeys, hidden: int) -> Parts:
    count = _count(keys)
    attention = _gqa(keys, hidden)
    if not keys.is_null("sliding_window"):  # transformers' default is a window, that of most models is none
        attention = _windowed(keys, attention)
    return Parts(layers=_layers([attention] * count, [_dense(keys)] * count))


def _qwen3(keys: ConfigKeys, hidden: int) -> Parts:
    count = _count(keys)
    full = _gqa(keys, hidden, bias=keys.flag("attention_bias", default=False), qk_norm=True, head_dim_needed=True)
    kinds = {"full_attention": full}
    types = ["full_attention"] * count
    if keys.flag("use_sliding_window", default=False):
        kinds["sliding_attention"] = _windowed(keys, full)
        first = keys.size("max_window_layers", least=0)
        types = ["sliding_attention" if index >= first else "full_attention" for index in range(count)]
    return Parts(layers=_layers(_by_type(keys, count, kinds, types), [_dense(keys)] * count))


def _mixtral(keys: ConfigKeys, hidden: int) -> Parts:
    count = _count(keys)
    attention = _gqa(keys, hidden)
    if keys.has("sliding_window"):
        attention = _windowed(keys, attention)
    moe = FeedForward(
        kind=FeedForwardKind.MOE,
        intermediate=keys.size("intermediate_size"),
        activation=keys.choice("hidden_act", _ACTIVATIONS, "silu"),
        experts=keys.size("num_local_experts", "num_experts"),
        top_k=keys.size("num_experts_per_tok"),
        router=Router(aux_coefficient=_aux(keys)),
    )
    return Parts(layers=_layers([attention] * count, [moe] * count), eps=1e-5, theta=1e6)


def _qwen_moe(keys: ConfigKeys, *, shared: bool) -> FeedForward:
    width = keys.size("shared_expert_intermediate_size", least=0) if shared else 0
    return FeedForward(
        kind=FeedForwardKind.MOE,
        intermediate=keys.size("moe_intermediate_size"),
        activation=keys.choice("hidden_act", _ACTIVATIONS, "silu"),
        experts=keys.size("num_experts", "num_local_experts"),
        top_k=keys.size("num_experts_per_tok"),
        shared_intermediate=width,
        shared_gated=width > 0,
        router=Router(renormalize=keys.flag("norm_topk_prob"), aux_coefficient=_aux(keys)),
    )


def _qwen_feed_forward(keys: ConfigKeys, count: int, *, shared: bool) -> list[FeedForward]:
    """Every ``decoder_sparse_step``-th layer is MoE, except ``mlp_only_layers``."""
    step = keys.size("decoder_sparse_step", default=1)
    only = keys.indices("mlp_only_layers", count)
    sparse = [index not in only and (index + 1) % step == 0 for index in range(count)]
    moe = _qwen_moe(keys, shared=shared) if any(sparse) else _NO_FEED_FORWARD
    dense = _NO_FEED_FORWARD if all(sparse) else _dense(keys)
    return [moe if is_sparse else dense for is_sparse in sparse]


def _qwen2_moe(keys: ConfigKeys, hidden: int) -> Parts:
    count = _count(keys)
    full = _gqa(keys, hidden, bias=keys.flag("qkv_bias", default=True))
    kinds = {"full_attention": full}
    types = ["full_attention"] * count
    if keys.flag("use_sliding_window", default=False):
        kinds["sliding_attention"] = _windowed(keys, full)
        last = keys.size("max_window_layers", least=0)
        types = ["sliding_attention" if index % 2 == 0 and index < last else "full_attention" for index in range(count)]
    attention = _by_type(keys, count, kinds, types)
    return Parts(layers=_layers(attention, _qwen_feed_forward(keys, count, shared=True)))


def _qwen3_moe(keys: ConfigKeys, hidden: int) -> Parts:
    count = _count(keys)
    attention = _gqa(keys, hidden, bias=keys.flag("attention_bias", default=False), qk_norm=True)
    if keys.flag("use_sliding_window", default=False):
        attention = _windowed(keys, attention)
    return Parts(layers=_layers([attention] * count, _qwen_feed_forward(keys, count, shared=False)))


def _qwen3_next(keys: ConfigKeys, hidden: int) -> Parts:
    count = _count(keys)
    bias = keys.flag("attention_bias", default=False)
    full = _gqa(keys, hidden, bias=bias, qk_norm=True, rotary=0.25, head_dim_needed=True)
    full = replace(full, output_gate=True)
    linear = Attention(
        kind=AttentionKind.GATED_DELTA_NET,
        heads=keys.size("linear_num_value_heads"),
        kv_heads=keys.size("linear_num_key_heads"),
        head_dim=keys.size("linear_key_head_dim"),
        v_dim=keys.size("linear_value_head_dim"),
        conv=keys.size("linear_conv_kernel_dim"),
    )
    interval = keys.size("full_attention_interval", default=4)
    types = ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(count)]
    kinds = {"full_attention": full, "linear_attention": linear}
    feed_forward = _qwen_feed_forward(keys, count, shared=True)
    layers = _layers(_by_type(keys, count, kinds, types), feed_forward)
    block = LayerSpec(attention=full, feed_forward=feed_forward[-1])
    return Parts(layers=layers, mtp=(block,) * _mtp_count(keys))


def _deepseek_v3(keys: ConfigKeys, hidden: int) -> Parts:
    attention = Attention(
        kind=AttentionKind.MLA,
        heads=keys.size("num_attention_heads"),
        q_rank=keys.size("q_lora_rank", null=0),
        kv_rank=keys.size("kv_lora_rank"),
        head_dim=keys.size("qk_nope_head_dim"),
        rope_dim=keys.size("qk_rope_head_dim"),
        v_dim=keys.size("v_head_dim"),
        bias=keys.flag("attention_bias", default=False),
    )
    return _first_dense(keys, attention)


def _glm4_moe(keys: ConfigKeys, hidden: int) -> Parts:
    bias = keys.flag("attention_bias", default=False)
    attention = _gqa(keys, hidden, bias=bias, qk_norm=keys.flag("use_qk_norm", default=False), rotary=0.5)
    return replace(_first_dense(keys, attention), eps=1e-5)


def _first_dense(keys: ConfigKeys, attention: Attention) -> Parts:
    """``first_k_dense_replace`` dense layers, then MoE (every ``moe_layer_freq``-th); MTP blocks are like the last."""
    count = _count(keys)
    first = keys.size("first_k_dense_replace", least=0)
    step = keys.size("moe_layer_freq", default=1)
    sparse = [index >= first and index % step == 0 for index in range(count)]
    moe = _sigmoid_moe(keys) if any(sparse) else _NO_FEED_FORWARD
    dense = _NO_FEED_FORWARD if all(sparse) else _dense(keys)
    feed_forward = [moe if is_sparse else dense for is_sparse in sparse]
    block = LayerSpec(attention=attention, feed_forward=feed_forward[-1])
    return Parts(layers=_layers([attention] * count, feed_forward), mtp=(block,) * _mtp_count(keys))


def _gpt_oss(keys: ConfigKeys, hidden: int) -> Parts:
    count = _count(keys)
    full = _gqa(keys, hidden, bias=keys.flag("attention_bias", default=True), head_dim_needed=True)
    kinds = {"full_attention": full, "sliding_attention": _windowed(keys, full)}
    types = ["full_attention" if index % 2 else "sliding_attention" for index in range(count)]
    moe = FeedForward(
        kind=FeedForwardKind.MOE,
        intermediate=keys.size("intermediate_size"),
        activation=Activation.SWIGLU_OSS,
        bias=True,
        experts=keys.size("num_local_experts", "num_experts"),
        top_k=keys.size("num_experts_per_tok", "experts_per_token"),
        router=Router(softmax_after_topk=True, aux_coefficient=_aux(keys)),
    )
    layers = _layers(_by_type(keys, count, kinds, types), [moe] * count)
    return Parts(layers=layers, eps=1e-5, theta=150000.0)


def _jamba(keys: ConfigKeys, hidden: int) -> Parts:
    count = _count(keys)
    rank = math.ceil(hidden / 16)
    mamba = Attention(
        kind=AttentionKind.MAMBA1,
        inner=hidden * keys.size("mamba_expand", most=1024),
        state=keys.size("mamba_d_state"),
        conv=keys.size("mamba_d_conv"),
        dt_rank=rank if keys.raw("mamba_dt_rank")[1] == "auto" else keys.size("mamba_dt_rank"),
        bias=keys.flag("mamba_proj_bias", default=False),
    )
    full = _gqa(keys, hidden, rotary=0)
    period, offset = keys.size("attn_layer_period"), keys.size("attn_layer_offset", least=0)
    types = ["full_attention" if index % period == offset else "linear_attention" for index in range(count)]
    kinds = {"full_attention": full, "linear_attention": mamba}
    period, offset = keys.size("expert_layer_period"), keys.size("expert_layer_offset", least=0)
    dense = _dense(keys)
    experts = keys.size("num_experts", "num_local_experts")
    moe = replace(
        dense,
        kind=FeedForwardKind.MOE,
        experts=experts,
        top_k=keys.size("num_experts_per_tok"),
        router=Router(renormalize=False, aux_coefficient=_aux(keys)),
    )
    sparse = [experts > 1 and index % period == offset for index in range(count)]
    attention = [kinds[kind] for kind in types]
    return Parts(layers=_layers(attention, [moe if is_sparse else dense for is_sparse in sparse]))


_NEMOTRON_LETTERS: Final[Mapping[str, str]] = {letter: letter for letter in "ME*-"}
_NEMOTRON_NAMES: Final[Mapping[str, str]] = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "moe": "E",
    "mlp": "-",
}


def _nemotron_pattern(keys: ConfigKeys, letters: str, *names: str, count: int | None) -> list[str] | None:
    """Letters of a pattern given as a list of names, or as a text of M (Mamba-2), * (attention), E (MoE), - (MLP)."""
    if keys.has(*names):
        return keys.names(*names, values=_NEMOTRON_NAMES, count=count)
    return keys.names(letters, values=_NEMOTRON_LETTERS, count=count)


def _nemotron_h(keys: ConfigKeys, hidden: int) -> Parts:
    """One mixer or one feed-forward per layer; no rotation anywhere (the keys for it have no effect in the model)."""
    count = _count(keys) if keys.has("num_hidden_layers") else None
    pattern = _nemotron_pattern(keys, "hybrid_override_pattern", "layers_block_type", "layer_types", count=count)
    if not pattern:
        keys.fail("hybrid_override_pattern", keys.raw("hybrid_override_pattern")[1], "a pattern of M, E, * and -")
    blocks = _mtp_count(keys)
    ahead = ["*", "E"]
    if blocks:
        names = ("mtp_hybrid_override_pattern", "mtp_layers_block_type")
        ahead = _nemotron_pattern(keys, *names, count=None) or ahead
    letters = {*(pattern or ()), *(ahead if blocks else ())}
    mixers: dict[str, Attention] = {}
    feed_forwards: dict[str, FeedForward] = {}
    activation = keys.choice("mlp_hidden_act", {"relu2": Activation.RELU2}, "relu2")
    bias = keys.flag("mlp_bias", default=False)
    if "M" in letters:
        mixers["M"] = Attention(
            kind=AttentionKind.MAMBA2,
            heads=keys.size("mamba_num_heads"),
            head_dim=keys.size("mamba_head_dim"),
            state=keys.size("ssm_state_size"),
            groups=keys.size("n_groups", "mamba_n_groups"),
            conv=keys.size("conv_kernel", "mamba_d_conv"),
            bias=keys.flag("use_bias", default=False),
        )
    if "*" in letters:
        mixers["*"] = _gqa(keys, hidden, rotary=0, head_dim_needed=True)
    if "-" in letters:
        feed_forwards["-"] = FeedForward(
            kind=FeedForwardKind.DENSE, intermediate=keys.size("intermediate_size"), activation=activation, bias=bias
        )
    if "E" in letters:
        shared = keys.size("n_shared_experts", null=0, least=0)
        feed_forwards["E"] = FeedForward(
            kind=FeedForwardKind.MOE,
            intermediate=keys.size("moe_intermediate_size"),
            activation=activation,
            bias=bias,
            experts=keys.size("n_routed_experts", "num_local_experts"),
            top_k=keys.size("num_experts_per_tok"),
            latent=keys.size("moe_latent_size", default=0),
            # One module of this width, however many experts it is said to hold.
            shared_intermediate=keys.size("moe_shared_expert_intermediate_size") if shared else 0,
            router=_sigmoid_router(keys),
        )
    layers = tuple(
        LayerSpec(attention=mixers.get(letter, _NO_ATTENTION), feed_forward=feed_forwards.get(letter, _NO_FEED_FORWARD))
        for letter in pattern or ()
    )
    block = LayerSpec(
        attention=mixers.get(ahead[0], _NO_ATTENTION), feed_forward=feed_forwards.get(ahead[-1], _NO_FEED_FORWARD)
    )
    if blocks and "".join(ahead) not in ("M", "*", "E", "-", "ME", "M-", "*E", "*-"):
        keys.fail(
            "mtp_hybrid_override_pattern", "".join(ahead), "one mixer (M or *), one feed-forward (E or -), or both"
        )
    return Parts(layers=layers, mtp=(block,) * blocks, eps_keys=("layer_norm_epsilon", "norm_eps"), eps=1e-5)


FAMILIES: Final[Mapping[str, Callable[[ConfigKeys, int], Parts]]] = {
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "jamba": _jamba,
    "kimi_k2": _deepseek_v3,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "nemotron_h": _nemotron_h,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
}
