"""Which weights each task of an item has: the one description that parameters, flops and memory are derived from.

Symbols used here, in ``work.py`` and in ``sizes.py``: H hidden size, V vocabulary, T tokens of a micro-batch on a rank,
C context, E experts, K experts per token, R = T * K rows that a rank's experts compute when routing is balanced, I
intermediate size (of one expert), D input size of an expert (``latent`` or H), e bytes per element.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tessera_rt.model_spec import Attention, AttentionKind, FeedForward, FeedForwardKind, Item, ItemKind, ModelSpec
from tessera_rt.tasks import TaskKind


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [n_out, n_in] applied to every token, or [experts, n_out, n_in] applied to the rows of each expert.

    Projections of one input are one Linear (q, k, v; gate and up). ``split``: its weight gradient is a W task; those of
    the others (router, gates, projections to and from the latent size) are computed in B.
    """

    n_in: int
    n_out: int
    experts: int = 0
    bias: bool = False
    split: bool = True

    @property
    def parameters(self) -> int:
        return max(self.experts, 1) * self.n_out * (self.n_in + self.bias)


def input_width(model: ModelSpec, feed_forward: FeedForward) -> int:
    """D: elements of a row that travels to an expert."""
    return feed_forward.latent or model.hidden


def up_width(feed_forward: FeedForward, intermediate: int) -> int:
    """Outputs of a feed-forward's first projection: 2 I with a gated activation, else I."""
    return (2 if feed_forward.activation.gated else 1) * intermediate


def task_linears(model: ModelSpec, item: Item) -> dict[TaskKind, tuple[Linear, ...]]:
    """The linear weights of each compute task of an item; tasks without one are absent."""
    hidden = model.hidden
    if item.kind is ItemKind.EMBED:
        return {}
    if item.kind is ItemKind.HEAD:
        return {TaskKind.HEAD: (Linear(hidden, model.vocab),)}
    assert item.layer is not None
    linears: dict[TaskKind, tuple[Linear, ...]] = {}
    if item.kind is ItemKind.MTP:
        linears[TaskKind.MTP] = (Linear(2 * hidden, hidden),)
    if item.layer.attention.kind is not AttentionKind.NONE:
        linears[TaskKind.ATTN] = _attention_linears(hidden, item.layer.attention)
    ff = item.layer.feed_forward
    if ff.kind is FeedForwardKind.DENSE:
        linears[TaskKind.MLP] = (
            Linear(hidden, up_width(ff, ff.intermediate), bias=ff.bias),
            Linear(ff.intermediate, hidden, bias=ff.bias),
        )
    elif ff.kind is FeedForwardKind.MOE:
        width = input_width(model, ff)
        router = Linear(hidden, ff.experts, bias=ff.bias, split=False)
        linears[TaskKind.ROUTE] = (router, Linear(hidden, width, split=False)) if ff.latent else (router,)
        linears[TaskKind.MLP] = (
            Linear(width, up_width(ff, ff.intermediate), ff.experts, ff.bias),
            Linear(ff.intermediate, width, ff.experts, ff.bias),
        )
        if ff.shared_intermediate:
            gate = (Linear(hidden, 1, split=False),) if ff.shared_gated else ()
            linears[TaskKind.SHARED] = (
                Linear(hidden, up_width(ff, ff.shared_intermediate)),
                Linear(ff.shared_intermediate, hidden),
                *gate,
            )
        if ff.latent:
            linears[TaskKind.POST] = (Linear(width, hidden, split=False),)
    return linears


def task_vectors(model: ModelSpec, item: Item) -> dict[TaskKind, int]:
    """Parameters of each task that are not in a Linear: norms, convolutions, decay terms, the embedding table."""
    hidden = model.hidden
    if item.kind is ItemKind.EMBED:
        return {TaskKind.EMBED: model.vocab * hidden}
    if item.kind is ItemKind.HEAD:
        return {TaskKind.HEAD: hidden}
    assert item.layer is not None
    vectors: dict[TaskKind, int] = {}
    if item.kind is ItemKind.MTP:
        vectors[TaskKind.MTP] = 2 * hidden + model.vocab * hidden  # two norms; its copy of the embedding
    if item.layer.attention.kind is not AttentionKind.NONE:
        vectors[TaskKind.ATTN] = hidden + _attention_vectors(item.layer.attention)
    match item.layer.feed_forward.kind:
        case FeedForwardKind.DENSE:
            vectors[TaskKind.MLP] = hidden
        case FeedForwardKind.MOE:
            vectors[TaskKind.ROUTE] = hidden
        case FeedForwardKind.NONE:
            pass
    return vectors


def embedding_uses(model: ModelSpec, items: Iterable[Item]) -> int:
    """How many of ``items`` hold the embedding table: the embedding, MTP blocks, and the head when it is tied."""
    kinds = {ItemKind.EMBED, ItemKind.MTP} | ({ItemKind.HEAD} if model.tied else set())
    return sum(item.kind in kinds for item in items)


def conv_channels(a: Attention) -> int:
    """Channels of the short convolution of a gated delta net or Mamba mixer."""
    match a.kind:
        case AttentionKind.GATED_DELTA_NET:
            return 2 * a.kv_heads * a.head_dim + a.heads * a.v_dim
        case AttentionKind.MAMBA1:
            return a.inner
        case AttentionKind.MAMBA2:
            return a.heads * a.head_dim + 2 * a.groups * a.state
        case _:
            return 0


def _attention_linears(hidden: int, a: Attention) -> tuple[Linear, ...]:
    match a.kind:
        case AttentionKind.SOFTMAX | AttentionKind.SLIDING:
            q = a.heads * a.head_dim * (2 if a.output_gate else 1)
            return (
                Linear(hidden, q + 2 * a.kv_heads * a.head_dim, bias=a.bias),
                Linear(a.heads * a.head_dim, hidden, bias=a.bias),
            )
        case AttentionKind.MLA:
            q = a.heads * (a.head_dim + a.rope_dim)
            return (
                Linear(hidden, (a.q_rank or q) + a.kv_rank + a.rope_dim, bias=a.bias),
                *((Linear(a.q_rank, q),) if a.q_rank else ()),
                Linear(a.kv_rank, a.heads * (a.head_dim + a.v_dim)),
                Linear(a.heads * a.v_dim, hidden, bias=a.bias),
            )
        case AttentionKind.GATED_DELTA_NET:  # q, k, v, z and the two gates per value head
            value = a.heads * a.v_dim
            return (
                Linear(hidden, 2 * a.kv_heads * a.head_dim + 2 * value + 2 * a.heads),
                Linear(value, hidden),
            )
        case AttentionKind.MAMBA1:  # x, z; time step, B, C; time step; out
            return (
                Linear(hidden, 2 * a.inner, bias=a.bias),
                Linear(a.inner, a.dt_rank + 2 * a.state),
                Linear(a.dt_rank, a.inner, bias=True),
                Linear(a.inner, hidden, bias=a.bias),
            )
        case AttentionKind.MAMBA2:  # z, x, B, C, time step; out
            inner = a.heads * a.head_dim
            return (
                Linear(hidden, 2 * inner + 2 * a.groups * a.state + a.heads, bias=a.bias),
                Linear(inner, hidden, bias=a.bias),
            )
        case AttentionKind.NONE:
            return ()


def _attention_vectors(a: Attention) -> int:
    match a.kind:
        case AttentionKind.SOFTMAX | AttentionKind.SLIDING:
            return 2 * a.head_dim if a.qk_norm else 0
        case AttentionKind.MLA:
            return a.q_rank + a.kv_rank  # norms of the two compressed vectors
        case AttentionKind.GATED_DELTA_NET:  # convolution; decay and time-step bias; norm of the output heads
            return conv_channels(a) * a.conv + 2 * a.heads + a.v_dim
        case AttentionKind.MAMBA1:  # convolution and bias; decay; skip; norms of time step, B and C (Jamba)
            return a.inner * (a.conv + 1 + a.state + 1) + a.dt_rank + 2 * a.state
        case AttentionKind.MAMBA2:  # convolution and bias; decay, skip, time-step bias; norm of the output
            return conv_channels(a) * (a.conv + 1) + 3 * a.heads + a.heads * a.head_dim
        case AttentionKind.NONE:
            return 0
