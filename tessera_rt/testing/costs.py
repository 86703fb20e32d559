"""Small models and hand-made cost tables for tests of the scheduler, the simulator and the planner.

``item_costs`` turns "this item takes so long and holds so much" into a ``CostTable``: an item's whole compute time lies
on one task (its feed-forward, else its mixer, else the embedding or head itself), so that plans can be checked by hand.
"""

from __future__ import annotations

from collections.abc import Mapping

from tessera_rt.costs import CostTable, ItemMemory, Link, Provenance, TaskCost, Workload
from tessera_rt.errors import CostError, Problem
from tessera_rt.model_spec import (
    Attention,
    AttentionKind,
    FeedForward,
    FeedForwardKind,
    Item,
    LayerSpec,
    ModelSpec,
)
from tessera_rt.tasks import Pass, Resource, Task, TaskKind, chunk_tasks

# The first of these that an item has carries its time.
_TIMED_KINDS = (TaskKind.MLP, TaskKind.ATTN, TaskKind.HEAD, TaskKind.EMBED)


def dense_layer() -> LayerSpec:
    """The smallest useful layer: one-head softmax attention and a dense feed-forward of width 8, hidden 4."""
    return LayerSpec(
        attention=Attention(kind=AttentionKind.SOFTMAX, heads=1, kv_heads=1, head_dim=4, rope_dim=4),
        feed_forward=FeedForward(kind=FeedForwardKind.DENSE, intermediate=8),
    )


def moe_layer(*, shared: bool = False, experts: int = 4, top_k: int = 2) -> LayerSpec:
    """The same with a MoE feed-forward of width 8 per expert, on request with a shared expert of width 8."""
    return LayerSpec(
        attention=dense_layer().attention,
        feed_forward=FeedForward(
            kind=FeedForwardKind.MOE,
            intermediate=8,
            experts=experts,
            top_k=top_k,
            shared_intermediate=8 if shared else 0,
        ),
    )


def dense_model(n_layers: int, *, mtp: int = 0, tied: bool = False) -> ModelSpec:
    """Embedding, ``n_layers`` dense layers, ``mtp`` dense MTP blocks, head."""
    return ModelSpec(
        name=f"dense-{n_layers}",
        hidden=4,
        vocab=16,
        layers=(dense_layer(),) * n_layers,
        mtp=(dense_layer(),) * mtp,
        tied=tied,
        context=16,
    )


def moe_model(
    n_layers: int, *, dense_first: int = 0, mtp: int = 0, shared: bool = False, tied: bool = False
) -> ModelSpec:
    """Embedding, ``dense_first`` dense layers, MoE layers up to ``n_layers`` in all, ``mtp`` MoE MTP blocks, head."""
    moe = moe_layer(shared=shared)
    return ModelSpec(
        name=f"moe-{dense_first}-{n_layers}",
        hidden=4,
        vocab=16,
        layers=(dense_layer(),) * dense_first + (moe,) * (n_layers - dense_first),
        mtp=(moe,) * mtp,
        tied=tied,
        context=16,
    )


def item_costs(
    model: ModelSpec,
    times: Mapping[str, tuple[int, int, int]],
    memory: Mapping[str, ItemMemory] | None = None,
    *,
    default: tuple[int, int, int] = (0, 0, 0),
    comm_ns: int = 0,
    count_ns: int = 0,
    comm_bytes: int = 0,
    link: Link | None = None,
    contention: float = 0.0,
    comm_sms: int = 0,
    workload: Workload | None = None,
) -> CostTable:
    """A cost table in which item ``label`` takes ``times[label]`` = (F, B, W) ns of compute; others take ``default``.

    The time lies on one task of the item: MLP, else ATTN, else HEAD or EMBED; all other compute tasks take 0. The
    embedding has no W task: its W time is added to its B. Each dispatch and combine takes ``comm_ns`` and sends
    ``comm_bytes``, each count exchange takes ``count_ns``. Items absent from ``memory`` hold nothing.

    Raises CostError for labels the model does not have.
    """
    memory = memory or {}
    labels = [item.label for item in model.items]
    problems = [
        Problem(f"{name}.{label}", label, f"one of {', '.join(labels)}")
        for name, given in (("times", times), ("memory", memory))
        for label in given
        if label not in labels
    ]
    if problems:
        raise CostError.of("item costs", problems)
    tasks: dict[str, TaskCost] = {}
    for item in model.items:
        f_ns, b_ns, w_ns = times.get(item.label, default)
        graph = (*chunk_tasks([item], Pass.F).tasks, *chunk_tasks([item], Pass.B).tasks)
        timed = _timed_kind(item)
        if not any(task.pass_ is Pass.W and task.kind is timed for task in graph):
            b_ns, w_ns = b_ns + w_ns, 0
        ns_of = {Pass.F: f_ns, Pass.B: b_ns, Pass.W: w_ns}
        for task in graph:
            if task.resource is Resource.COMM:
                tasks[task.name] = _comm_cost(task, comm_ns, count_ns, comm_bytes)
            else:
                tasks[task.name] = TaskCost(ns=ns_of[task.pass_] if task.kind is timed else 0)
    return CostTable(
        fingerprint=model.fingerprint,
        workload=workload or Workload(tokens=1, context=1),
        provenance=Provenance(source="table", device="none", notes=("made by hand for a test",)),
        tasks=tasks,
        memory={label: memory.get(label, ItemMemory()) for label in labels},
        link=link or Link(),
        contention=contention,
        comm_sms=comm_sms,
    )


def uniform_costs(
    model: ModelSpec,
    times: tuple[int, int, int] = (10, 10, 10),
    *,
    comm_ns: int = 0,
    memory: ItemMemory | None = None,
    link: Link | None = None,
    contention: float = 0.0,
) -> CostTable:
    """``item_costs`` with (F, B, W) ns and memory alike for every layer and MTP block; embedding and head take 0."""
    inner = [item.label for item in model.items[1:-1]]
    return item_costs(
        model,
        dict.fromkeys(inner, times),
        dict.fromkeys(inner, memory or ItemMemory()),
        comm_ns=comm_ns,
        link=link,
        contention=contention,
    )


def _timed_kind(item: Item) -> TaskKind:
    kinds = {task.kind for task in chunk_tasks([item], Pass.F).tasks}
    return next(kind for kind in _TIMED_KINDS if kind in kinds)


def _comm_cost(task: Task, comm_ns: int, count_ns: int, comm_bytes: int) -> TaskCost:
    if task.kind is TaskKind.COUNT:
        return TaskCost(ns=count_ns)
    return TaskCost(ns=comm_ns, bytes=comm_bytes)
