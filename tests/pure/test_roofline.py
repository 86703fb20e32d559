"""Roofline costs: completeness, the traffic of balanced routing against enumeration, and known orders of magnitude."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.cost_sources.device import DeviceSpec, load_device
from tessera_rt.cost_sources.roofline import combine_rows, dispatch_rows, group_nodes, roofline_costs
from tessera_rt.cost_sources.sizes import item_memory, task_flops
from tessera_rt.costs import CostTable, Recompute, Workload
from tessera_rt.errors import CostError, SpecError
from tessera_rt.files.model_files import load_model, preset_ids
from tessera_rt.model_spec import FeedForward, FeedForwardKind, ModelSpec
from tessera_rt.tasks import Pass, Resource, TaskKind, chunk_tasks, parse_task_name
from tessera_rt.testing.costs import dense_model, moe_layer, moe_model

H800 = load_device("h800")


def all_tasks(model: ModelSpec) -> list[str]:
    return [name for pass_ in (Pass.F, Pass.B) for name in chunk_tasks(model.items, pass_).names]


@pytest.mark.parametrize("preset", preset_ids())
def test_every_task_and_item_of_every_preset_has_a_cost(preset: str) -> None:
    model = load_model(preset)
    costs = roofline_costs(model, Workload(tokens=4096, context=4096, ep=8), H800)
    assert set(costs.tasks) == set(all_tasks(model))
    assert set(costs.memory) == {item.label for item in model.items}
    assert all(type(cost.ns) is int and cost.ns >= H800.launch_ns for cost in costs.tasks.values())
    assert costs.apply(chunk_tasks(model.items, Pass.B)).total_ns() > 0
    assert costs.fingerprint == model.fingerprint and costs.provenance.source == "roofline"
    for item in model.items:
        assert costs.memory[item.label] == item_memory(model, item, costs.workload)


def test_qwen3_next_at_256k_is_near_the_known_estimate() -> None:
    """Estimated before for 8,192 tokens per GPU, EP32 on four nodes of H800, in ms; two independent models should agree
    within a factor of 1.6 (here they differ by at most 1.51, the expert GEMMs: 1.26 against 1.9 ms)."""
    model = load_model("qwen3-next-80b")
    workload = Workload(tokens=8192, context=262144, ep=32, combine="reduced")
    costs = roofline_costs(model, workload, H800)
    known = {  # L0 to L2 are gated delta nets, L3 is softmax attention
        "F_ATTN:L0": 1.9,
        "B_ATTN:L0": 2.7,
        "F_ATTN:L3": 30.6,
        "B_ATTN:L3": 90.0,
        "F_MLP:L0": 1.9,
        "F_DISP:L0": 2.3,
        "F_COMB:L0": 2.3,
        "B_COMB:L3": 2.3,
        "B_DISP:L3": 2.3,
    }
    deviations = {name: costs.tasks[name].ns / 1e6 / ms for name, ms in known.items()}
    assert all(1 / 1.6 < ratio < 1.6 for ratio in deviations.values()), deviations
    assert costs.tasks["F_ATTN:L3"].ns / costs.tasks["F_ATTN:L0"].ns > 10
    by_rows = roofline_costs(model, replace(workload, combine="rows"), H800)
    assert by_rows.tasks["F_DISP:L0"] == costs.tasks["F_DISP:L0"]
    assert by_rows.tasks["F_COMB:L0"].ns > 2 * costs.tasks["F_COMB:L0"].ns
    assert by_rows.tasks["B_DISP:L0"].bytes > costs.tasks["B_DISP:L0"].bytes


def test_context_costs_softmax_attention_only() -> None:
    model = load_model("qwen3-next-80b")
    short, long = (
        roofline_costs(model, Workload(tokens=4096, context=context, ep=8), H800) for context in (4096, 65536)
    )
    slower = {name for name in short.tasks if long.tasks[name].ns > short.tasks[name].ns}
    assert slower == {
        f"{pass_}_ATTN:{item.label}"
        for item in model.items
        for pass_ in "FB"
        if item.layer is not None and item.layer.attention.kind == "softmax"
    }


def expected_rows(ff: FeedForward, nodes: tuple[int, ...], rows: Callable[[int, set[int], list[int]], int]) -> Fraction:
    """Mean over all choices of experts of the largest per-rank sum of ``rows(node, nodes reached, ranks reached)``."""
    owner = [rank for rank in range(sum(nodes)) for _ in range(ff.experts // sum(nodes))]
    node_of = [node for node, ranks in enumerate(nodes) for _ in range(ranks)]
    choices = list(combinations(range(ff.experts), ff.top_k))
    totals = [
        sum(Fraction(rows(node, {node_of[owner[e]] for e in choice}, [owner[e] for e in choice])) for choice in choices)
        / len(choices)
        for node in range(len(nodes))
    ]
    return max(totals)


@pytest.mark.parametrize(
    ("experts", "top_k", "nodes"),
    [
        (8, 2, (2, 2)),
        (8, 3, (2, 2)),
        (6, 2, (2, 1)),
        (8, 1, (1, 1, 1, 1)),
        (12, 4, (4, 2)),
        (4, 4, (2, 2)),
        (8, 3, (4,)),
    ],
)
def test_dispatch_traffic_equals_enumeration(experts: int, top_k: int, nodes: tuple[int, ...]) -> None:
    ff = FeedForward(kind=FeedForwardKind.MOE, intermediate=1, experts=experts, top_k=top_k)
    network = expected_rows(ff, nodes, lambda own, reached, _: len(reached - {own}))
    assert dispatch_rows(ff, nodes).network == pytest.approx(float(network))
    by_row = expected_rows(ff, nodes, lambda own, _, ranks: sum(_node(rank, nodes) != own for rank in ranks))
    assert combine_rows(ff, nodes).network == pytest.approx(float(by_row))
    # Inside a node: all tokens that have work there reach each rank but the one they start or land on.
    ep = sum(nodes)
    per_rank = expected_rows(ff, nodes, lambda _own, _reached, ranks: int(0 in ranks))
    spread = max(Fraction(ep, ranks) * (ranks - 1) * per_rank for ranks in nodes)
    assert dispatch_rows(ff, nodes).node == pytest.approx(float(spread))


def _node(rank: int, nodes: tuple[int, ...]) -> int:
    return next(node for node in range(len(nodes)) if rank < sum(nodes[: node + 1]))


@given(ranks=st.integers(1, 40), gpus=st.integers(1, 16))
def test_groups_of_consecutive_ranks_lie_on_nodes(ranks: int, gpus: int) -> None:
    layouts = set()
    for group in range(gpus):
        nodes = [rank // gpus for rank in range(group * ranks, (group + 1) * ranks)]
        layouts.add(tuple(sorted((nodes.count(node) for node in set(nodes)), reverse=True)))
    assert set(group_nodes(ranks, gpus)) == layouts


def test_one_ep_rank_sends_nothing() -> None:
    model = moe_model(1)
    costs = roofline_costs(model, Workload(tokens=512, context=512), H800)
    comm = {name: cost for name, cost in costs.tasks.items() if parse_task_name(name)[1].resource is Resource.COMM}
    assert len(comm) == 5 and all(cost.bytes == 0 for cost in comm.values())
    assert costs.tasks["F_COUNT:L0"].ns == H800.launch_ns < costs.tasks["F_DISP:L0"].ns
    spread = roofline_costs(model, Workload(tokens=512, context=512, dp=2), H800)
    assert spread.tasks["F_COUNT:L0"].bytes == 4 * 8 and spread.tasks["F_DISP:L0"] == costs.tasks["F_DISP:L0"]


def test_dispatch_rows_carry_their_expert_ids_and_weights() -> None:
    model = moe_model(1)  # 4 experts, 2 per token, hidden 4
    costs = roofline_costs(model, Workload(tokens=600, context=600, ep=2), H800)
    reached = 600 * 5 / 6  # of 6 pairs of experts one lies wholly on the own rank
    assert costs.tasks["F_DISP:L0"].bytes == reached * (4 * 2 + 2 * 8)
    assert costs.tasks["B_COMB:L0"].bytes == reached * 4 * 2
    assert costs.tasks["F_COMB:L0"].bytes == costs.tasks["B_DISP:L0"].bytes == 600 * 4 * 2  # one of two rows


def test_inside_a_node_nothing_crosses_the_network() -> None:
    model = load_model("qwen3-235b-a22b")
    workload = Workload(tokens=4096, context=4096, ep=8)
    inside = roofline_costs(model, workload, H800)
    slow_network = replace(H800, inter_node=replace(H800.inter_node, bytes_per_s=1e6, latency_ns=10**9))
    assert roofline_costs(model, workload, slow_network).tasks == inside.tasks
    assert roofline_costs(model, replace(workload, ep=16), H800).tasks["F_DISP:L0"].ns > inside.tasks["F_DISP:L0"].ns


def test_recomputation_adds_the_forward_to_backward() -> None:
    model = moe_model(1, dense_first=1, shared=True, mtp=1)
    workload = Workload(tokens=4096, context=4096)
    plain = roofline_costs(model, workload, H800)
    for policy, kinds in (
        (Recompute.SELECTIVE, {TaskKind.MLP, TaskKind.SHARED}),
        (Recompute.FULL, {TaskKind.ATTN, TaskKind.MLP, TaskKind.SHARED, TaskKind.MTP}),
    ):
        again = roofline_costs(model, replace(workload, recompute=policy), H800)
        for name, cost in plain.tasks.items():
            pass_, kind, _ = parse_task_name(name)
            if pass_ is Pass.B and kind in kinds:
                forward = plain.tasks[f"F_{name[2:]}"]
                assert again.tasks[name].flops == cost.flops + forward.flops
                assert abs(again.tasks[name].ns - (cost.ns + forward.ns - H800.launch_ns)) <= 1
            else:
                assert again.tasks[name] == cost


def test_a_compute_task_takes_the_sum_of_its_rooflines() -> None:
    model = dense_model(1)
    workload = Workload(tokens=4096, context=4096)
    # With free memory only flops count, with free arithmetic only bytes.
    no_memory = replace(H800, hbm_bytes_per_s=1e30, launch_ns=0)
    ns = roofline_costs(model, workload, no_memory).tasks["F_MLP:L0"].ns
    assert ns == round(task_flops(model, model.items[1], workload)["F_MLP:L0"] / (0.6 * 989e12) * 1e9)
    free_flops = replace(H800, peak_flops={"bf16": 1e30}, launch_ns=0)
    ns = roofline_costs(model, workload, free_flops).tasks["F_MLP:L0"].ns
    gemms = 2 * (4096 * (4 + 16) + 4 * 16 + 4096 * (8 + 4) + 8 * 4)
    around = 2 * 4096 * (2 * 4 + 3 * 4 + 16 + 8)  # norm, residual, activation
    assert ns == round((gemms + around) / (0.8 * 3.35e12) * 1e9)


def test_more_communication_sms_never_slow_communication_and_always_slow_compute() -> None:
    model = load_model("qwen3-235b-a22b")
    tables = [
        roofline_costs(model, Workload(tokens=4096, context=4096, ep=8), H800, comm_sms=sms) for sms in (2, 8, 20, 40)
    ]
    times = [table.tasks["F_DISP:L0"].ns for table in tables]
    assert times == sorted(times, reverse=True) and times[0] > times[1] > times[2] == times[3]
    assert [table.comm_sms for table in tables] == [2, 8, 20, 40]
    slow_downs = [table.contention for table in tables]
    assert slow_downs == sorted(slow_downs) and slow_downs[2] == H800.contention
    assert len({table.tasks["F_MLP:L0"] for table in tables}) == 1


def test_impossible_requests_name_all_problems() -> None:
    model = moe_model(2)
    half: DeviceSpec = replace(H800, peak_flops={"bf16": 1e15})
    with pytest.raises(SpecError) as error:
        roofline_costs(model, Workload(tokens=0, context=1, ep=8, tp=3, dtype="fp64"), half)
    assert {problem.field for problem in error.value.problems} == {
        "workload.tokens",
        "workload.ep",
        "workload.tp",
        "workload.dtype",
    }
    for sms in (0, 132, -1):
        with pytest.raises(CostError, match="comm_sms"):
            roofline_costs(model, Workload(tokens=1, context=1), H800, comm_sms=sms)


@given(
    tokens=st.integers(1, 5000),
    ep=st.sampled_from([1, 2, 3, 4, 6, 12]),
    k=st.integers(1, 12),
    combine=st.sampled_from(["rows", "reduced"]),
)
def test_costs_grow_with_tokens(tokens: int, ep: int, k: int, combine: str) -> None:
    model = ModelSpec(name="m", hidden=64, vocab=100, layers=(moe_layer(experts=12, top_k=k),))

    def table(count: int) -> CostTable:
        return roofline_costs(model, Workload(tokens=count, context=count, ep=ep, combine=combine), H800)

    one, two = table(tokens), table(2 * tokens)
    assert all(one.tasks[name].ns <= two.tasks[name].ns for name in one.tasks)
    assert all(one.tasks[name].bytes <= two.tasks[name].bytes for name in one.tasks)


def test_notes_state_the_assumptions() -> None:
    costs = roofline_costs(moe_model(1), Workload(tokens=8, context=64, ep=2), H800)
    text = "\n".join(costs.provenance.notes)
    for words in ("nothing was measured", "balanced", "context-parallel traffic", "longer than the model", "by itself"):
        assert words in text
