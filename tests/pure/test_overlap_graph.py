"""The overlap graph: read off the template's order, with the published numbers of edges."""

from __future__ import annotations

from collections import Counter

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.plan import ActionKind
from tessera_rt.planner.overlap_graph import cost_edges, edges_of, overlap_graph
from tessera_rt.scheduler.templates import Template, build_template
from tessera_rt.tasks import Pass


def template(pp: int, vpp: int, microbatches: int, *, joint: bool = True, pad: str = "groups") -> Template:
    name = "1f1b" if vpp == 1 else "interleaved-1f1b"
    return build_template(name, pp=pp, vpp=vpp, microbatches=microbatches, joint=joint, pad=pad)


@pytest.mark.parametrize(
    ("pp", "vpp", "microbatches", "edges"),
    [(8, 2, 64, 32), (8, 4, 64, 64), (7, 2, 63, 26), (8, 2, 61, 32), (4, 2, 32, 16)],
)
def test_interleaved_templates_have_the_derived_number_of_edges(
    pp: int, vpp: int, microbatches: int, edges: int
) -> None:
    """2 vpp edges on every rank if pp is even; vpp on the middle rank if it is odd."""
    graph = overlap_graph(template(pp, vpp, microbatches))
    assert graph.number_of_edges() == edges
    assert graph.number_of_nodes() == pp * vpp
    if pp % 2 == 0:
        assert Counter(data["rank"] for *_, data in graph.edges(data=True)) == dict.fromkeys(range(pp), 2 * vpp)


def test_f_with_b_and_b_with_f_are_different_edges() -> None:
    graph = overlap_graph(template(2, 2, 8))
    assert graph.has_edge(0, 2) and graph.has_edge(2, 0)
    data = graph.edges[0, 2, "0F;2B"]
    assert (data["source_pass"], data["target_pass"], data["rank"]) == (Pass.F, Pass.B, 0)


def test_1f1b_has_one_self_loop_a_stage() -> None:
    graph = overlap_graph(template(8, 1, 32))
    assert sorted(graph.edges()) == [(s, s) for s in range(8)] == sorted(nx.selfloop_edges(graph))


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 20), st.sampled_from(["groups", "shadow"]))
def test_counts_are_those_of_the_order(pp: int, vpp: int, microbatches: int, pad: str) -> None:
    made = template(pp, vpp, microbatches, pad=pad)
    graph = overlap_graph(made)
    seen = Counter(action.key for row in made.actions for action in row if action.kind is ActionKind.OVERLAP)
    assert {key: data["count"] for _, _, key, data in graph.edges(keys=True, data=True)} == seen
    for forward, backward, key in graph.edges(keys=True):
        assert key == f"{forward}F;{backward}B"
        assert made.stage_ranks[forward] == made.stage_ranks[backward]
    assert {edge.key for edge in edges_of(graph)} == set(seen)


def test_without_overlap_every_stage_costs_both_its_passes() -> None:
    edges = cost_edges(template(4, 2, 8, joint=False))
    assert [(edge.forward, edge.backward, edge.count) for edge in edges] == [(s, s, 8) for s in range(8)]
    assert not any(edge.overlapped for edge in edges)
    assert all(edge.overlapped for edge in cost_edges(template(4, 2, 8)))


def test_too_few_microbatches_for_any_pair_leave_the_graph_empty() -> None:
    assert overlap_graph(template(4, 1, 1)).number_of_edges() == 0
    assert len(cost_edges(template(4, 1, 1))) == 4


def test_ranks_whose_warm_up_takes_all_micro_batches_still_cost_something() -> None:
    """With 5 micro-batches rank 0 of 4 overlaps nothing, rank 3 does."""
    edges = cost_edges(template(4, 2, 5))
    assert {edge.rank for edge in edges if edge.overlapped} != {edge.rank for edge in edges}
    assert {edge.forward for edge in edges} == {edge.backward for edge in edges} == set(range(8))
