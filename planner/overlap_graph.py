"""The overlap graph: which passes of which virtual stages a template runs together, read off the template's own order.

Nodes are virtual stages, an edge says that the forward pass of its first stage runs together with the backward pass of
its second one. ``F@s with B@t`` and ``F@t with B@s`` are different edges; a stage may pair with itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import networkx as nx

from tessera_rt.plan import Action, ActionKind
from tessera_rt.scheduler.templates import Template
from tessera_rt.tasks import Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One overlap opportunity. ``forward``, ``backward``: the stages whose F and B (or I) run together on ``rank``.

    ``count``: how often this occurs in a step. ``overlapped`` is False only for self-loops that stand for
    stages without overlap (``cost_edges``): their cost is the sum of both passes.
    """

    key: str
    rank: int
    forward: int
    backward: int
    count: int
    overlapped: bool = True


def overlap_graph(template: Template) -> nx.MultiDiGraph[int]:
    """MultiDiGraph of a template: node attribute ``rank``; edges keyed by ``Action.key``.

    Edge attributes: ``source_pass`` and ``target_pass`` (the directions), ``rank`` and ``count``.
    """
    graph: nx.MultiDiGraph[int] = nx.MultiDiGraph()
    for stage, rank in enumerate(template.stage_ranks):
        graph.add_node(stage, rank=rank)
    counts = Counter(
        (rank, action.key, *_directions(action))
        for rank, actions in enumerate(template.actions)
        for action in actions
        if action.kind is ActionKind.OVERLAP and len(action.parts) >= 2
    )
    for (rank, key, forward, backward), count in sorted(counts.items()):
        if forward >= 0 and backward >= 0:
            graph.add_edge(forward, backward, key=key, source_pass=Pass.F, target_pass=Pass.B, rank=rank, count=count)
    return graph


def _directions(action: Action) -> tuple[int, int]:
    """(stage of the forward part, stage of the backward part) of an overlap, -1 where it has none."""
    forward = backward = -1
    for part in action.parts:
        if part.kind is ActionKind.F:
            forward = part.stage
        elif part.kind in (ActionKind.B, ActionKind.I):
            backward = part.stage
    return forward, backward


def edges_of(graph: nx.MultiDiGraph[int]) -> tuple[Edge, ...]:
    """The graph's edges as plain data, by rank and key."""
    found = [
        Edge(key=key, rank=data["rank"], forward=forward, backward=backward, count=data["count"])
        for forward, backward, key, data in graph.edges(keys=True, data=True)
    ]
    return tuple(sorted(found, key=lambda edge: (edge.rank, edge.forward, edge.backward, edge.key)))


def cost_edges(template: Template) -> tuple[Edge, ...]:
    """The edges whose largest cost is T_dom: the overlap edges, and what the rest of the order repeats.

    A stage that never overlaps its F, or never its B, still does both for every micro-batch: it gets a self-loop that
    costs both passes one after the other.
    """
    edges = edges_of(overlap_graph(template))
    both = {edge.forward for edge in edges} & {edge.backward for edge in edges}
    alone = tuple(
        Edge(key=f"{s}F;{s}B", rank=rank, forward=s, backward=s, count=template.microbatches, overlapped=False)
        for s, rank in enumerate(template.stage_ranks)
        if s not in both
    )
    return (*edges, *alone)
