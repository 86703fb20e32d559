"""Megatron-Core's fixed order of the tasks of a pair."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Mesh
from tessera_rt.planner.build import plan_with
from tessera_rt.scheduler.fixed_order import fixed_order
from tessera_rt.scheduler.graphs import action_graph
from tessera_rt.scheduler.list_schedule import list_schedule
from tessera_rt.scheduler.validate import validate
from tessera_rt.tasks import TaskGraph
from tessera_rt.testing.costs import item_costs, uniform_costs
from tessera_rt.testing.plans import simple_model

PAIR = ["B_POST", "B_COMB", "F_ATTN", "F_ROUTE", "F_COUNT", "B_MLP", "F_DISP", "W_MLP"]
PAIR += ["B_DISP", "F_MLP", "F_COMB", "B_ROUTE", "B_ATTN"]
"""Two MoE layers up to the backward's attention, without labels."""


def graph_of(model: ModelSpec, key: str, *bounds: tuple[int, int]) -> TaskGraph:
    return action_graph(key, model, uniform_costs(model, comm_ns=10), bounds)


def with_labels(order: list[str], forward: str, backward: str) -> list[str]:
    return [f"{name}:{forward if name[0] == 'F' else backward}" for name in order]


def test_two_layers_run_in_the_hard_coded_order() -> None:
    graph = graph_of(simple_model("mm"), "0F;1B", (1, 2), (2, 3))
    assert fixed_order(graph) == with_labels([*PAIR, "F_POST", "W_ATTN"], "L0", "L1")


def test_layers_are_zipped_and_extras_run_alone() -> None:
    """Two layers forward, three backward from the last one; the last attention's W comes at the very end."""
    graph = graph_of(simple_model("mmmmm"), "0F;1B", (1, 3), (3, 6))
    first = with_labels([*PAIR, "W_ATTN", "F_POST"], "L0", "L4")
    second = with_labels([*PAIR, "F_POST", "W_ATTN"], "L1", "L3")
    alone = with_labels([name for name in PAIR if name[0] != "F"], "", "L2")
    assert fixed_order(graph) == [*first, *second, *alone, "W_ATTN:L2"]


def test_ends_of_the_model_stand_at_the_ends_of_the_pair() -> None:
    graph = graph_of(simple_model("dm"), "0F;1B", (0, 2), (2, 4))
    order = fixed_order(graph)
    assert order[:3] == ["F_EMBED", "B_HEAD", "W_HEAD"]
    graph = graph_of(simple_model("dm"), "1F;0B", (0, 2), (2, 4))
    assert fixed_order(graph)[-3:] == ["F_HEAD", "B_EMBED", "W_ATTN:L0"]


@given(st.text("dmsaf", min_size=2, max_size=6), st.text("ms", max_size=1), st.data())
def test_every_action_has_a_correct_schedule(layers: str, mtp: str, data: st.DataObject) -> None:
    """Alone and in pairs, with dense and MoE layers, shared experts, MTP, and stages without layers."""
    model = simple_model(layers, mtp=mtp)
    cut = data.draw(st.integers(0, len(model.items)))
    key = data.draw(st.sampled_from(["0F", "1F", "0B", "1B", "0I", "1W", "0F;1B", "1F;0B", "0F;0B", "0F;1I"]))
    labels = [item.label for item in model.items]
    times = {label: data.draw(st.tuples(*(st.integers(0, 9),) * 3)) for label in labels}
    graph = action_graph(key, model, item_costs(model, times, comm_ns=5), [(0, cut), (cut, len(labels))])
    made = list_schedule(graph, key, method="megatron", comm_sms=3)
    validate(made, graph)
    assert (made.method, made.comm_sms) == ("megatron", 3)
    assert made == list_schedule(graph, key, method="megatron", comm_sms=3)


@pytest.mark.parametrize("method", ["align", "fifo"])
def test_the_template_brings_its_order(method: str) -> None:
    """Whatever method was asked for."""
    model = simple_model("mmmm")
    plan = plan_with(
        (0, 2, 3, 4, 6),
        model,
        Mesh(pp=2, vpp=2),
        uniform_costs(model, comm_ns=10),
        microbatches=6,
        template="megatron-1f1b",
        method=method,
    )
    assert {entry.method for entry in plan.interleavings.values()} == {"megatron"}
    assert plan.template == "megatron-1f1b"
