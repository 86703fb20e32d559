"""Tiny models that really run, random cost tables, and batches: what tests of the engine need."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from tessera_rt.costs import CostTable, ItemMemory, Link, Provenance, TaskCost, Workload
from tessera_rt.model_spec import Attention, AttentionKind, FeedForward, FeedForwardKind, LayerSpec, ModelSpec, Router
from tessera_rt.moe.steps import IGNORED
from tessera_rt.tasks import Pass, chunk_tasks

_GDN = Attention(kind=AttentionKind.GATED_DELTA_NET, heads=2, kv_heads=1, head_dim=4, v_dim=4, conv=3)
_SOFTMAX = Attention(kind=AttentionKind.SOFTMAX, heads=4, kv_heads=2, head_dim=4, rope_dim=4)
_DENSE = FeedForward(kind=FeedForwardKind.DENSE, intermediate=20)
_MOE = FeedForward(kind=FeedForwardKind.MOE, intermediate=12, experts=4, top_k=2, router=Router(aux_coefficient=0.01))
_SHARED = FeedForward(
    kind=FeedForwardKind.MOE,
    intermediate=12,
    experts=4,
    top_k=2,
    shared_intermediate=8,
    shared_gated=True,
    router=Router(aux_coefficient=0.01),
)
LAYERS = {
    "g": LayerSpec(attention=_GDN, feed_forward=_MOE),
    "G": LayerSpec(attention=_GDN, feed_forward=_SHARED),
    "s": LayerSpec(attention=_SOFTMAX, feed_forward=_MOE),
    "S": LayerSpec(attention=_SOFTMAX, feed_forward=_SHARED),
    "d": LayerSpec(attention=_SOFTMAX, feed_forward=_DENSE),
}


def tiny_hybrid(layers: str = "gSds", *, tied: bool = False, vocab: int = 23, hidden: int = 16) -> ModelSpec:
    """One letter a layer: g/G gated delta net, s/S softmax, with MoE (capital: and a gated shared expert); d dense."""
    return ModelSpec(
        name=f"tiny-{layers}",
        hidden=hidden,
        vocab=vocab,
        layers=tuple(LAYERS[letter] for letter in layers),
        tied=tied,
        context=64,
    )


def random_costs(
    model: ModelSpec,
    workload: Workload | None = None,
    *,
    seed: int = 0,
    link: Link | None = None,
    contention: float = 0.0,
    zero_share: float = 0.0,
    scale: int = 1,
) -> CostTable:
    """A table with random durations (1 to 1000 ``scale`` ns; 0 for a share of tasks) and random boundary sizes."""
    draw = random.Random(seed)
    names = [name for pass_ in (Pass.F, Pass.B) for name in chunk_tasks(model.items, pass_).names]
    return CostTable(
        fingerprint=model.fingerprint,
        workload=workload or Workload(tokens=16, context=16),
        provenance=Provenance(source="table", device="random"),
        tasks={
            name: TaskCost(
                ns=0 if draw.random() < zero_share else draw.randint(1, 1000 * scale), bytes=draw.randint(0, 4096)
            )
            for name in names
        },
        memory={
            item.label: ItemMemory(weights=64, activations=draw.randint(1, 64), output=draw.randint(1, 512))
            for item in model.items
        },
        link=link or Link(),
        contention=contention,
    )


def token_batch(
    model: ModelSpec, shapes: Sequence[tuple[int, int]], *, seed: int, ignored: float = 0.1
) -> list[tuple[Tensor, Tensor]]:
    """One (tokens, labels) pair of random int64 [b, s] per micro-batch; a share of the labels is -100."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for shape in shapes:
        tokens = torch.randint(model.vocab, shape, generator=generator)
        labels = torch.randint(model.vocab, shape, generator=generator)
        labels[torch.rand(shape, generator=generator) < ignored] = IGNORED
        batch.append((tokens, labels))
    return batch
