"""The fixed task order of Megatron-Core's combined 1F1B, as a baseline for synthesized interleavings.

Megatron-Core (``combined_1f1b``, expert-parallel overlap) zips the layers of a pair, first layer of the forward with
last layer of the backward, and runs every two of them in one hard-coded order:

    Bcomb Fattn Bmlp Fdisp Wmlp Bdisp Fmlp Fcomb Battn Wattn

Layers without a partner come after them, alone. The embedding's forward and the head's
backward come before all layers; the head's forward and the embedding's backward after them. Weight gradients of the
last attention come at the very end, behind the outputs of both passes.
"""

from __future__ import annotations

from itertools import zip_longest

from tessera_rt.tasks import Pass, Task, TaskGraph, TaskKind

_SLOTS: tuple[tuple[Pass, tuple[TaskKind, ...]], ...] = (
    (Pass.B, (TaskKind.POST, TaskKind.COMB)),
    (Pass.F, (TaskKind.MTP, TaskKind.TP_IN, TaskKind.ATTN, TaskKind.TP, TaskKind.ROUTE, TaskKind.COUNT)),
    (Pass.B, (TaskKind.TP_MLP, TaskKind.SHARED, TaskKind.MLP, TaskKind.TP_MLP_IN)),
    (Pass.F, (TaskKind.DISP,)),
    (Pass.W, (TaskKind.MLP, TaskKind.SHARED)),
    (Pass.B, (TaskKind.DISP,)),
    (Pass.F, (TaskKind.TP_MLP_IN, TaskKind.SHARED, TaskKind.MLP, TaskKind.TP_MLP)),
    (Pass.F, (TaskKind.COMB,)),
    (Pass.B, (TaskKind.ROUTE, TaskKind.TP, TaskKind.ATTN, TaskKind.TP_IN, TaskKind.MTP)),
)
# Behind these: the weighted sum waits for the combine, so W goes first and hides it, except in the forward's last
# layer, whose output is waited for on another rank.
_ATTENTION_W = (Pass.W, (TaskKind.ATTN, TaskKind.MTP))
_POST = (Pass.F, (TaskKind.POST,))
_ENDS = ("EMBED", "HEAD")

_Layer = dict[tuple[Pass, TaskKind], str]


def fixed_order(graph: TaskGraph) -> list[str]:
    """All tasks of an action (one pass or a pair) in Megatron-Core's order; a topological order of the graph."""
    forward, backward = _layers(graph, Pass.F), _layers(graph, Pass.B)
    order = [task.name for task in graph.tasks if _at_end(task, Pass.F, "EMBED") or _at_end(task, Pass.B, "HEAD")]
    late: list[str] = []
    if backward:
        late = [name for (pass_, kind), name in backward[-1].items() if pass_ is Pass.W and kind in _ATTENTION_W[1]]
    for i, layers in enumerate(zip_longest(forward, backward)):
        tasks = {key: name for layer in layers if layer for key, name in layer.items() if name not in late}
        behind = (_POST, _ATTENTION_W) if i == len(forward) - 1 else (_ATTENTION_W, _POST)
        for pass_, kinds in (*_SLOTS, *behind):
            order += [tasks[pass_, kind] for kind in kinds if (pass_, kind) in tasks]
    order += [task.name for task in graph.tasks if _at_end(task, Pass.F, "HEAD") or _at_end(task, Pass.B, "EMBED")]
    return order + late


def _layers(graph: TaskGraph, pass_: Pass) -> list[_Layer]:
    """The tasks of the pass's layers, in the order in which the pass comes to them; W belongs to the backward."""
    layers: dict[str, _Layer] = {}
    for task in graph.tasks:
        owner = Pass.F if task.pass_ is Pass.F else Pass.B
        if owner is pass_ and task.label not in _ENDS:
            layers.setdefault(task.label, {})[task.pass_, task.kind] = task.name
    return list(layers.values())


def _at_end(task: Task, pass_: Pass, label: str) -> bool:
    """Whether the task is one of the embedding's or head's in this pass; their W belongs to the backward."""
    owner = Pass.F if task.pass_ is Pass.F else Pass.B
    return task.label == label and owner is pass_
