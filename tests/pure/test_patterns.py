"""User patterns: what is read, how it is completed, and the line of every fault."""

from __future__ import annotations

from pathlib import Path
from random import Random

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.errors import ScheduleError
from tessera_rt.scheduler.graphs import chunk_graph, to_networkx
from tessera_rt.scheduler.interleave import interleave
from tessera_rt.scheduler.list_schedule import evaluate
from tessera_rt.scheduler.patterns import Pattern, complete, load_patterns, patterns_from_yaml
from tessera_rt.tasks import Pass, Resource, TaskGraph
from tessera_rt.testing.costs import moe_model
from tessera_rt.testing.pairs import random_pair
from tessera_rt.testing.random_costs import random_costs

MODEL = moe_model(3, shared=True)
PAPER = """\
overlap_plans:
  - chunk_pair: {fwd_chunk: [Layer0, Layer1], bwd_chunk: [Layer0, Layer1]}
    pattern: [B_COMB:L1, F_ATTN:L0, F_DISP:L0, B_MLP:L1, F_COMB:L0, B_WGRAD:L1]
"""


def pair_graph(pattern: Pattern) -> TaskGraph:
    costs = random_costs(MODEL, 3)
    forward = chunk_graph(MODEL, costs, *pattern.forward, Pass.F)
    return forward.merged(chunk_graph(MODEL, costs, *pattern.backward, Pass.B))


def test_the_papers_own_example() -> None:
    (pattern,) = patterns_from_yaml(PAPER, MODEL)
    assert (pattern.forward, pattern.backward, pattern.line) == ((1, 3), (1, 3), 2)
    assert pattern.order == (
        *("B_POST:L1", "B_COMB:L1", "F_ATTN:L0", "F_ROUTE:L0", "F_COUNT:L0", "F_DISP:L0"),
        *("B_MLP:L1", "B_SHARED:L1", "F_COMB:L0", "F_POST:L0", "W_SHARED:L1", "W_MLP:L1", "W_ATTN:L1"),
    )


def lanes_of(order: tuple[str, ...], graph: TaskGraph) -> dict[Resource, list[str]]:
    return {lane: [name for name in order if graph.by_name[name].resource is lane] for lane in Resource}


@pytest.mark.parametrize("method", ["align", "exact"])
def test_missing_tasks_are_placed_around_the_given_order(method: str) -> None:
    text = PAPER.replace("F_COMB:L0, B_WGRAD:L1", "B_DISP:L1, F_COMB:L0")
    (pattern,) = patterns_from_yaml(text, MODEL)
    graph = pair_graph(pattern)
    made = complete(pattern, graph, "0F;0B", method=method, comm_sms=4)
    assert (made.method, made.key, made.comm_sms) == ("given", "0F;0B", 4)
    assert sorted(made.order) == sorted(graph.names)
    given_only = tuple(name for name in made.order if name in pattern.order)
    assert lanes_of(given_only, graph) == lanes_of(pattern.order, graph)
    assert made.makespan_ns >= interleave(graph, "0F;0B").makespan_ns


@given(st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_any_part_of_any_order_can_be_completed(seed: int, random: Random) -> None:
    graph = random_pair(seed, most_layers=2)
    place = {name: random.random() for name in graph.names}
    order = list(nx.lexicographical_topological_sort(to_networkx(graph), key=place.__getitem__))
    kept = tuple(name for name in order if random.random() < 0.4)
    part = complete(Pattern(forward=(1, 2), backward=(2, 3), order=kept, line=1), graph, "0F;1B", method="align")
    assert lanes_of(tuple(n for n in part.order if n in kept), graph) == lanes_of(kept, graph)
    whole = complete(Pattern(forward=(1, 2), backward=(2, 3), order=tuple(order), line=1), graph, "0F;1B")
    assert whole.makespan_ns == evaluate(order, graph)[1]


def test_ends_of_the_model_and_short_labels() -> None:
    text = """
overlap_plans:
- chunk_pair:
    fwd_chunk: [EMBED, L0]
    bwd_chunk: [Layer2, HEAD]
  pattern:
  - B_HEAD
  - F_EMBED
- chunk_pair: {fwd_chunk: [L1], bwd_chunk: [L2]}
  pattern: []
"""
    first, second = patterns_from_yaml(text, MODEL)
    assert (first.forward, first.backward, first.order) == ((0, 2), (3, 5), ("B_HEAD", "F_EMBED"))
    assert (second.forward, second.backward, second.order, second.line) == ((2, 3), (3, 4), (), 9)


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("Layer1], bwd", "Layer7], bwd", 2, "Layer0 to Layer2"),
        ("[Layer0, Layer1], bwd", "[Layer0, Layer2], bwd", 2, "L1: a chunk is a contiguous range"),
        ("[Layer0, Layer1], bwd", "[Layer1, Layer0], bwd", 2, "L2: a chunk is a contiguous range"),
        ("[Layer0, Layer1], bwd", "[], bwd", 2, "at least one item"),
        ("fwd_chunk", "forward", 2, "known here: fwd_chunk, bwd_chunk"),
        ("{fwd_chunk: [Layer0, Layer1], bwd_chunk: [Layer0, Layer1]}", "both", 2, "a mapping with fwd_chunk"),
        ("pattern:", "order:", 3, "known here: chunk_pair, pattern"),
        ("[B_COMB:L1, F", "[B_COMB:L2, F", 3, "on one of L1, L0"),
        ("F_ATTN:L0", "F_ATN:L0", 3, "one of F_ATTN"),
        ("B_COMB:L1, F_ATTN:L0", "B_COMB:L1, B_COMB:L1, F_ATTN:L0", 3, "named once"),
        ("F_ATTN:L0, F_DISP:L0", "F_DISP:L0, F_ATTN:L0", 3, "behind F_ATTN:L0"),
        ("F_COMB:L0, B_WGRAD:L1", "B_WGRAD:L1, F_COMB:L0, B_COMB:L1", 3, "named once"),
        ("[B_COMB:L1, F_ATTN:L0", "\n    - B_COMB:L1\n    - F_ATN:L0\n    ", 5, "one of F_ATTN"),
        ("[B_COMB:L1, F_ATTN:L0", "[B_COMB:L1, F_ATTN:L0", 0, ""),
        ("overlap_plans", "overlaps", 1, "known here: overlap_plans"),
    ],
)
def test_faults_are_named_with_their_line(old: str, new: str, line: int, says: str) -> None:
    assert old in PAPER
    text = PAPER.replace(old, new, 1)
    if "\n    - " in new:
        text = text.split("\n    ,")[0] + "\n"
    if not says:
        assert patterns_from_yaml(text, MODEL)
        return
    with pytest.raises(ScheduleError) as caught:
        patterns_from_yaml(text, MODEL, "mine.yaml")
    assert "mine.yaml" in str(caught.value) and says in str(caught.value)
    assert any(problem.field.startswith(f"line {line},") for problem in caught.value.problems)


def test_all_faults_of_a_document_come_together() -> None:
    text = PAPER.replace("F_ATTN", "F_ATN") + PAPER.partition("\n")[2].replace("Layer1", "Layer9")
    with pytest.raises(ScheduleError) as caught:
        patterns_from_yaml(text, MODEL)
    assert [problem.field for problem in caught.value.problems] == [
        "line 3, pattern",
        "line 4, fwd_chunk",
        "line 4, bwd_chunk",
    ]


def test_two_patterns_for_a_pair() -> None:
    with pytest.raises(ScheduleError, match="line 4, chunk_pair.*another pair than in line 2"):
        patterns_from_yaml(PAPER + PAPER.partition("\n")[2], MODEL)


@pytest.mark.parametrize(
    "text", ["", "overlap_plans: [", "- 1", "overlap_plans: {}", "overlap_plans: [3]", "a: 1\na: 2"]
)
def test_other_documents_are_refused(text: str) -> None:
    with pytest.raises(ScheduleError):
        patterns_from_yaml(text, MODEL)


def test_patterns_come_from_files(tmp_path: Path) -> None:
    path = tmp_path / "patterns.yaml"
    path.write_text(PAPER, encoding="utf-8")
    assert load_patterns(path, MODEL) == patterns_from_yaml(PAPER, MODEL)
    with pytest.raises(ScheduleError, match="missing.yaml"):
        load_patterns(tmp_path / "missing.yaml", MODEL)


def test_a_pattern_for_another_pair_is_refused() -> None:
    (pattern,) = patterns_from_yaml(PAPER, MODEL)
    with pytest.raises(ScheduleError, match="a task of 0F;1B"):
        complete(pattern, chunk_graph(MODEL, random_costs(MODEL, 0), 3, 4, Pass.F), "0F;1B")
