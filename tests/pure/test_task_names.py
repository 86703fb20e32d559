"""Coarse task names and labels of items."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.errors import ScheduleError
from tessera_rt.files.task_names import expand_names, item_labels, label_range
from tessera_rt.tasks import Pass, TaskGraph, chunk_tasks
from tessera_rt.testing.plans import simple_model

MODEL = simple_model("smd", mtp="m")  # EMBED L0 (shared) L1 (MoE) L2 (dense) M0 HEAD


def pair(forward: Sequence[int], backward: Sequence[int]) -> TaskGraph:
    """F over some items with B (and W) over others, by position in the model."""
    items = MODEL.items
    return chunk_tasks([items[i] for i in forward], Pass.F).merged(chunk_tasks([items[i] for i in backward], Pass.B))


def expanded(text: str, graph: TaskGraph) -> str:
    return " ".join(expand_names(text.split(), graph))


def test_the_order_of_the_paper() -> None:
    graph = pair([1], [2])
    order = "B_COMBINE:L1 F_ATTN:L0 F_DISP:L0 B_MLP:L1 F_MLP:L0 B_DISP:L1 F_COMB:L0 B_ATTN:L1 B_WGRAD:L1"
    assert expanded(order, graph) == (
        "B_POST:L1 B_COMB:L1 F_ATTN:L0 F_ROUTE:L0 F_COUNT:L0 F_DISP:L0 B_MLP:L1 F_MLP:L0 F_SHARED:L0 B_DISP:L1 "
        "F_COMB:L0 F_POST:L0 B_ROUTE:L1 B_ATTN:L1 W_MLP:L1 W_ATTN:L1"
    )
    assert sorted(expand_names(order.split(), graph)) == sorted(graph.names)


def test_what_is_named_itself_keeps_its_place() -> None:
    graph = pair([1], [2])
    assert expanded("F_ATTN:L0 F_SHARED:L0 F_ROUTE:L0 F_MLP:L0", graph) == "F_ATTN:L0 F_SHARED:L0 F_ROUTE:L0 F_MLP:L0"
    assert expanded("W_MLP:L1 B_ATTN:L1 B_WGRAD:L1", graph) == "W_MLP:L1 B_ROUTE:L1 B_ATTN:L1 W_ATTN:L1"


def test_dense_layers_and_ends() -> None:
    graph = pair([0, 3], [3, 5])
    order = "F_EMBED B_HEAD F_ATTN:L2 B_WGRAD:HEAD F_MLP:L2 B_MLP:L2 B_ATTN:L2 B_WGRAD:L2"
    fine = "F_EMBED B_HEAD F_ATTN:L2 W_HEAD F_MLP:L2 B_MLP:L2 B_ATTN:L2 W_MLP:L2 W_ATTN:L2"
    assert expanded(order, graph) == fine


def test_label_left_out_where_one_layer_fits() -> None:
    assert expanded("F_ATTN B_COMBINE F_DISPATCH", pair([2], [1])) == (
        "F_ATTN:L1 F_ROUTE:L1 B_POST:L0 B_COMB:L0 F_COUNT:L1 F_DISP:L1"
    )
    with pytest.raises(ScheduleError, match="F_ATTN'.*name one of L0, L1"):
        expand_names(["F_ATTN"], pair([1, 2], [3]))
    with pytest.raises(ScheduleError, match="B_WGRAD'.*name one of L1, L0"):
        expand_names(["B_WGRAD"], pair([3], [1, 2]))


def test_all_unknown_names_are_reported() -> None:
    with pytest.raises(ScheduleError) as caught:
        expand_names(["F_ATTN:L1", "F_FOO:L0", "B_ATTN:L1", "F_ATTN:L0"], pair([1], [2]))
    assert [problem.value for problem in caught.value.problems] == ["F_ATTN:L1", "F_FOO:L0"]
    assert "on one of L0" in str(caught.value)


@given(st.data())
def test_exact_names_stay_as_they_are(data: st.DataObject) -> None:
    graph = pair([1, 2, 4], [0, 2, 3, 5])
    order = tuple(data.draw(st.permutations(graph.names)))
    assert expand_names(order, graph) == order


def test_labels() -> None:
    names = chunk_tasks(MODEL.items, Pass.F).names
    assert item_labels(6, names) == tuple(item.label for item in MODEL.items)
    assert item_labels(4, ()) == ("EMBED", "L0", "L1", "HEAD")
    assert [len(item_labels(count, names)) for count in range(5)] == [0, 1, 2, 3, 4]
    labels = item_labels(6, names)
    assert label_range(labels, 0, 6) == "EMBED..HEAD"
    assert label_range(labels, 2, 3) == "L1"
    assert label_range(labels, 2, 2) == "none"
