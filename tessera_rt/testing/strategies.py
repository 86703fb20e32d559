"""Hypothesis strategies for model descriptions: small, sound, of every kind of layer."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

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

ATTENTION_KINDS = tuple(AttentionKind)
FEED_FORWARD_KINDS = tuple(FeedForwardKind)


def _sizes(most: int = 4) -> st.SearchStrategy[int]:
    return st.integers(1, most)


def _positive() -> st.SearchStrategy[float]:
    return st.floats(1e-12, 1e9, allow_nan=False)


@st.composite
def attentions(draw: st.DrawFn, kind: AttentionKind) -> Attention:
    """A sound token mixer of one kind."""
    kv_heads = draw(_sizes())
    heads = kv_heads * draw(_sizes())
    head_dim = 2 * draw(_sizes(8))
    flag = st.booleans()
    match kind:
        case AttentionKind.SOFTMAX | AttentionKind.SLIDING:
            return Attention(
                kind=kind,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                window=draw(_sizes(64)) if kind is AttentionKind.SLIDING else 0,
                rope_dim=2 * draw(st.integers(0, head_dim // 2)),
                bias=draw(flag),
                qk_norm=draw(flag),
                output_gate=draw(flag),
            )
        case AttentionKind.MLA:
            return Attention(
                kind=kind,
                heads=heads,
                head_dim=head_dim,
                v_dim=draw(_sizes(8)),
                q_rank=draw(st.integers(0, 8)),
                kv_rank=draw(_sizes(8)),
                rope_dim=2 * draw(st.integers(0, 4)),
                bias=draw(flag),
            )
        case AttentionKind.GATED_DELTA_NET:
            return Attention(
                kind=kind, heads=heads, kv_heads=kv_heads, head_dim=head_dim, v_dim=draw(_sizes(8)), conv=draw(_sizes())
            )
        case AttentionKind.MAMBA1:
            return Attention(
                kind=kind,
                inner=draw(_sizes(32)),
                state=draw(_sizes(8)),
                conv=draw(_sizes()),
                dt_rank=draw(_sizes()),
                bias=draw(flag),
            )
        case AttentionKind.MAMBA2:
            return Attention(
                kind=kind,
                heads=heads,
                head_dim=head_dim,
                state=draw(_sizes(8)),
                groups=kv_heads,
                conv=draw(_sizes()),
                bias=draw(flag),
            )
        case AttentionKind.NONE:
            return Attention(kind=kind)


@st.composite
def routers(draw: st.DrawFn, experts: int, top_k: int) -> Router:
    """A sound router: its groups divide the experts, and the kept ones hold at least ``top_k``."""
    score = draw(st.sampled_from(("softmax", "sigmoid")))
    groups = draw(st.sampled_from([count for count in range(1, experts + 1) if experts % count == 0]))
    needed = -(-top_k * groups // experts)
    return Router(
        score=score,
        softmax_after_topk=score == "softmax" and draw(st.booleans()),
        renormalize=draw(st.booleans()),
        scale=draw(_positive()),
        choice_bias=draw(st.booleans()),
        groups=groups,
        keep_groups=draw(st.integers(needed, groups)),
        aux_coefficient=draw(st.just(0.0) | _positive()),
    )


@st.composite
def feed_forwards(draw: st.DrawFn, kind: FeedForwardKind, hidden: int) -> FeedForward:
    """A sound feed-forward of one kind for a model of ``hidden``."""
    if kind is FeedForwardKind.NONE:
        return FeedForward(kind=kind)
    activation, bias = draw(st.sampled_from(Activation)), draw(st.booleans())
    if kind is FeedForwardKind.DENSE:
        return FeedForward(kind=kind, intermediate=draw(_sizes(32)), activation=activation, bias=bias)
    experts = draw(_sizes(8))
    top_k = draw(_sizes(experts))
    shared = draw(st.integers(0, 16))
    return FeedForward(
        kind=kind,
        intermediate=draw(_sizes(32)),
        activation=activation,
        bias=bias,
        experts=experts,
        top_k=top_k,
        latent=draw(st.just(0) | st.integers(0, hidden - 1)),
        shared_intermediate=shared,
        shared_gated=shared > 0 and draw(st.booleans()),
        router=draw(routers(experts, top_k)),
    )


@st.composite
def layer_specs(
    draw: st.DrawFn,
    hidden: int,
    attention_kinds: Sequence[AttentionKind] = ATTENTION_KINDS,
    feed_forward_kinds: Sequence[FeedForwardKind] = FEED_FORWARD_KINDS,
) -> LayerSpec:
    """A sound layer of the given kinds; never one without both parts."""
    attention = draw(st.sampled_from(attention_kinds))
    kinds = [k for k in feed_forward_kinds if attention is not AttentionKind.NONE or k is not FeedForwardKind.NONE]
    feed_forward = draw(st.sampled_from(kinds))
    return LayerSpec(attention=draw(attentions(attention)), feed_forward=draw(feed_forwards(feed_forward, hidden)))


@st.composite
def model_specs(
    draw: st.DrawFn,
    *,
    min_layers: int = 1,
    max_layers: int = 8,
    max_mtp: int = 1,
    attention_kinds: Sequence[AttentionKind] = ATTENTION_KINDS,
    feed_forward_kinds: Sequence[FeedForwardKind] = FEED_FORWARD_KINDS,
) -> ModelSpec:
    """A small sound model. Its layers come from at most three different ones, so that patterns occur."""
    hidden = draw(st.integers(1, 32))
    layers = layer_specs(hidden, attention_kinds, feed_forward_kinds)
    kinds = draw(st.lists(layers, min_size=1, max_size=3))
    return ModelSpec(
        name=draw(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1).filter(str.strip)),
        hidden=hidden,
        vocab=draw(st.integers(1, 64)),
        layers=tuple(draw(st.lists(st.sampled_from(kinds), min_size=min_layers, max_size=max_layers))),
        mtp=tuple(draw(st.lists(layers, max_size=max_mtp))),
        tied=draw(st.booleans()),
        context=draw(st.integers(1, 128)),
        norm_eps=draw(_positive()),
        rope_theta=draw(_positive()),
        source=draw(st.text(st.characters(codec="utf-8"))),
    )
