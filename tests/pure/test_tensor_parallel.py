"""Tensor parallelism in tasks, costs, memory and plans; what the engine makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tessera_rt.cost_sources.device import load_device
from tessera_rt.cost_sources.measured import measured_costs
from tessera_rt.cost_sources.roofline import roofline_costs
from tessera_rt.cost_sources.sizes import item_expert_parameters, item_memory, item_parameters
from tessera_rt.costs import Recompute, Workload
from tessera_rt.errors import CostError, SpecError
from tessera_rt.files.cost_files import cost_table_from_yaml, cost_table_to_yaml
from tessera_rt.files.model_files import load_model
from tessera_rt.files.plan_files import load_plan, save_plan
from tessera_rt.plan import Mesh
from tessera_rt.plan_check import check_plan
from tessera_rt.planner.build import build_plan
from tessera_rt.scheduler.interleave import METHODS
from tessera_rt.scheduler.simulate import simulate
from tessera_rt.tasks import TP_KINDS, Pass, Resource, chunk_tasks, parse_task_name
from tessera_rt.testing.costs import moe_model

H800 = load_device("h800")
QWEN = load_model("qwen3-next-80b")
_DEEPSEEK = load_model("deepseek-v3")
SMALL = replace(_DEEPSEEK, layers=_DEEPSEEK.layers[2:6])
"""One dense layer, three MoE layers with a shared expert, an MTP block."""


def chain(items, pass_: Pass) -> dict[str, tuple[str, ...]]:  # type: ignore[no-untyped-def]
    return {task.name: task.deps for task in chunk_tasks(items, pass_, tp=2).tasks}


def test_collectives_stand_around_what_is_split() -> None:
    model = moe_model(2, dense_first=1, shared=True)
    assert chain(model.items, Pass.F) == {
        "F_EMBED": (),
        "F_TP:EMBED": ("F_EMBED",),
        "F_TP_IN:L0": ("F_TP:EMBED",),
        "F_ATTN:L0": ("F_TP_IN:L0",),
        "F_TP:L0": ("F_ATTN:L0",),
        "F_TP_MLP_IN:L0": ("F_TP:L0",),
        "F_MLP:L0": ("F_TP_MLP_IN:L0",),
        "F_TP_MLP:L0": ("F_MLP:L0",),
        "F_TP_IN:L1": ("F_TP_MLP:L0",),
        "F_ATTN:L1": ("F_TP_IN:L1",),
        "F_TP:L1": ("F_ATTN:L1",),
        "F_ROUTE:L1": ("F_TP:L1",),
        "F_COUNT:L1": ("F_ROUTE:L1",),
        "F_DISP:L1": ("F_COUNT:L1",),
        "F_TP_MLP_IN:L1": ("F_ROUTE:L1",),
        "F_SHARED:L1": ("F_TP_MLP_IN:L1",),
        "F_TP_MLP:L1": ("F_SHARED:L1",),
        "F_MLP:L1": ("F_DISP:L1",),
        "F_COMB:L1": ("F_MLP:L1",),
        "F_POST:L1": ("F_COMB:L1", "F_TP_MLP:L1"),
        "F_TP_IN:HEAD": ("F_POST:L1",),
        "F_HEAD": ("F_TP_IN:HEAD",),
    }
    backward = chain(model.items, Pass.B)
    assert backward["B_TP_IN:HEAD"] == ("B_HEAD",) and backward["B_POST:L1"] == ("B_TP_IN:HEAD",)
    assert backward["B_TP_MLP:L1"] == ("B_POST:L1",) and backward["B_SHARED:L1"] == ("B_TP_MLP:L1",)
    assert backward["B_ROUTE:L1"] == ("B_DISP:L1", "B_TP_MLP_IN:L1")
    assert backward["B_TP:L1"] == ("B_ROUTE:L1",) and backward["B_ATTN:L1"] == ("B_TP:L1",)
    assert backward["B_TP:EMBED"] == ("B_TP_IN:L0",) and backward["B_EMBED"] == ("B_TP:EMBED",)
    names = list(backward)
    for name, deps in backward.items():
        if name.startswith("W_"):  # right behind its parent, on which it depends alone
            assert deps == ("B" + name[1:],) and names.index(name) == names.index(deps[0]) + 1
    for task in (*chunk_tasks(model.items, Pass.F, tp=4).tasks, *chunk_tasks(model.items, Pass.B, tp=4).tasks):
        assert parse_task_name(task.name) == (task.pass_, task.kind, task.label)
        assert (task.kind in TP_KINDS) <= (task.resource is Resource.COMM)
    without = [name for name in names if parse_task_name(name)[1] not in TP_KINDS]
    assert without == list(chunk_tasks(model.items, Pass.B).names)


def test_times_of_collectives_follow_from_bytes_and_links() -> None:
    inside, across = (roofline_costs(QWEN, Workload(tokens=4096, context=4096, ep=8, tp=tp), H800) for tp in (4, 16))
    hidden = 4096 * QWEN.hidden * 2
    assert inside.tasks["F_TP_IN:L0"].bytes == 3 * hidden and inside.tasks["B_TP:L0"].bytes == 6 * hidden
    seconds = 3 * hidden / H800.intra_node.bytes_per_s
    expected = round(seconds * 1e9) + H800.intra_node.latency_ns + H800.launch_ns
    assert inside.tasks["F_TP_IN:L0"].ns == expected
    seconds = 15 * hidden / H800.inter_node.bytes_per_s
    assert across.tasks["F_TP:L3"].ns == round(seconds * 1e9) + H800.inter_node.latency_ns + H800.launch_ns
    # Two of a node's eight GPUs are left for an expert-parallel group of eight: its rows cross the network.
    alone = roofline_costs(QWEN, Workload(tokens=4096, context=4096, ep=8), H800)
    assert inside.tasks["F_DISP:L0"].ns > alone.tasks["F_DISP:L0"].ns
    # A rank's flops stay what they are: 1 / tp of the heads for tp times the tokens.
    assert inside.tasks["F_ATTN:L0"].flops == alone.tasks["F_ATTN:L0"].flops


def test_memory_of_split_weights() -> None:
    model = SMALL
    dense, moe = model.items[1], model.items[2]
    one, two = (Workload(tokens=64, context=64, ep=256, tp=tp) for tp in (1, 2))
    norms = 2 * model.hidden + dense.layer.attention.q_rank + dense.layer.attention.kv_rank  # type: ignore[union-attr]
    split = item_parameters(model, dense) - norms
    assert item_memory(model, dense, two).weights == 2 * (split // 2 + norms)
    assert item_memory(model, model.items[0], two).weights * 2 == item_memory(model, model.items[0], one).weights
    # Experts are not split, and their gradients are summed over tp.
    before, after = item_memory(model, moe, one), item_memory(model, moe, two)
    experts = 2 * item_expert_parameters(model, moe) // 256
    assert experts + (before.weights - experts) / 2 < after.weights < before.weights
    assert after.activations == before.activations and after.pending_w == before.pending_w
    grown = item_memory(model, dense, two).transient - item_memory(model, dense, one).transient
    assert grown == 2 * 64 * model.hidden * 2


@pytest.mark.parametrize("method", METHODS)
def test_a_plan_with_tensor_parallelism_is_sound_and_only_simulated(method: str, tmp_path: Path) -> None:
    model = SMALL
    costs = roofline_costs(model, Workload(tokens=512, context=512, ep=2, tp=2), H800)
    mesh = Mesh(pp=2, vpp=2, ep=2, tp=2)
    plan = build_plan(model, mesh, costs, microbatches=4, method=method)
    check_plan(plan, model)
    assert "tp" in plan.simulate_only and mesh.world == 8
    assert any("F_TP:" in name for entry in plan.interleavings.values() for name in entry.order)
    assert simulate(plan, model, costs).step_ns == plan.solver.step_ns
    save_plan(plan, tmp_path / "plan.yaml")
    assert load_plan(tmp_path / "plan.yaml", model=model) == plan
    text = cost_table_to_yaml(costs)
    assert cost_table_from_yaml(text, model=model) == costs


def test_sizes_that_do_not_divide_and_measured_costs_are_refused() -> None:
    model = SMALL
    with pytest.raises(SpecError, match="a divisor of 128, the attention heads of L0"):
        roofline_costs(model, Workload(tokens=64, context=64, tp=7), H800)
    with pytest.raises(SpecError, match="from 1 to"):
        roofline_costs(model, Workload(tokens=64, context=64, tp=0), H800)
    with pytest.raises(CostError, match="can only be computed"):
        measured_costs(
            model,
            Workload(tokens=64, context=64, tp=2, recompute=Recompute.NONE),
            {},
            device="cpu",
            versions="",
            link=H800.inter_node,
        )
