"""Parameters, flops and memory: tiny layers counted by hand, released totals, and properties over random layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.cost_sources.layer_shapes import task_linears
from tessera_rt.cost_sources.sizes import (
    check_workload,
    item_expert_parameters,
    item_memory,
    item_parameters,
    model_parameters,
    task_flops,
)
from tessera_rt.cost_sources.work import attended_sum, task_work
from tessera_rt.costs import ItemMemory, Recompute, Workload
from tessera_rt.errors import SpecError
from tessera_rt.files.model_files import load_model
from tessera_rt.model_spec import (
    Activation,
    Attention,
    AttentionKind,
    FeedForward,
    FeedForwardKind,
    Item,
    ItemKind,
    LayerSpec,
    ModelSpec,
)
from tessera_rt.tasks import Pass, Resource, TaskKind, chunk_tasks, parse_task_name
from tessera_rt.testing.costs import dense_model, moe_layer, moe_model

NO_ATTENTION = Attention(kind=AttentionKind.NONE)
NO_FEED_FORWARD = FeedForward(kind=FeedForwardKind.NONE)
TWO_TOKENS = Workload(tokens=2, context=2)


def one_layer(attention: Attention = NO_ATTENTION, feed_forward: FeedForward = NO_FEED_FORWARD) -> ModelSpec:
    """Hidden 4, vocabulary 10."""
    layer = LayerSpec(attention=attention, feed_forward=feed_forward)
    return ModelSpec(name="one", hidden=4, vocab=10, layers=(layer,))


def moe(**sizes: object) -> FeedForward:
    return replace(
        FeedForward(kind=FeedForwardKind.MOE, intermediate=3, experts=6, top_k=2),
        **sizes,  # type: ignore[arg-type]
    )


# Hidden 4; every term is (rows x columns) of one weight or the length of one vector.
BY_HAND = {
    "softmax": (
        Attention(kind=AttentionKind.SOFTMAX, heads=6, kv_heads=2, head_dim=5),
        NO_FEED_FORWARD,
        4 + 30 * 4 + 10 * 4 + 10 * 4 + 4 * 30,
    ),
    "softmax, gate, norms and bias": (
        Attention(
            kind=AttentionKind.SLIDING,
            heads=2,
            kv_heads=1,
            head_dim=3,
            window=2,
            bias=True,
            qk_norm=True,
            output_gate=True,
        ),
        NO_FEED_FORWARD,
        4 + (6 + 6 + 3 + 3) * 4 + 18 + 4 * 6 + 4 + 3 + 3,
    ),
    "mla": (
        Attention(kind=AttentionKind.MLA, heads=2, q_rank=3, kv_rank=5, head_dim=4, rope_dim=2, v_dim=7),
        NO_FEED_FORWARD,
        4 + 3 * 4 + 3 + 12 * 3 + (5 + 2) * 4 + 5 + (8 + 14) * 5 + 4 * 14,
    ),
    "mla, full-rank q": (
        Attention(kind=AttentionKind.MLA, heads=2, kv_rank=5, head_dim=4, rope_dim=2, v_dim=7),
        NO_FEED_FORWARD,
        4 + 12 * 4 + (5 + 2) * 4 + 5 + (8 + 14) * 5 + 4 * 14,
    ),
    "gated delta net": (  # q and k 3, v and z 10, two gates per value head; convolution over q, k, v
        Attention(kind=AttentionKind.GATED_DELTA_NET, heads=2, kv_heads=1, head_dim=3, v_dim=5, conv=4),
        NO_FEED_FORWARD,
        4 + (3 + 3 + 10 + 10 + 2 + 2) * 4 + (3 + 3 + 10) * 4 + 2 + 2 + 5 + 4 * 10,
    ),
    "mamba 1": (
        Attention(kind=AttentionKind.MAMBA1, inner=8, state=3, conv=4, dt_rank=2),
        NO_FEED_FORWARD,
        4 + 16 * 4 + 8 * 4 + 8 + (2 + 3 + 3) * 8 + 2 + 3 + 3 + 8 * 2 + 8 + 8 * 3 + 8 + 4 * 8,
    ),
    "mamba 2": (
        Attention(kind=AttentionKind.MAMBA2, heads=4, head_dim=2, state=3, groups=2, conv=4),
        NO_FEED_FORWARD,
        4 + (8 + 8 + 6 + 6 + 4) * 4 + (8 + 6 + 6) * (4 + 1) + 4 + 4 + 4 + 8 + 4 * 8,
    ),
    "dense": (
        NO_ATTENTION,
        FeedForward(kind=FeedForwardKind.DENSE, intermediate=7),
        4 + 14 * 4 + 4 * 7,
    ),
    "dense, no gate, bias": (
        NO_ATTENTION,
        FeedForward(kind=FeedForwardKind.DENSE, intermediate=7, activation=Activation.RELU2, bias=True),
        4 + 7 * 4 + 7 + 4 * 7 + 4,
    ),
    "moe": (NO_ATTENTION, moe(), 4 + 6 * 4 + 6 * (6 * 4 + 4 * 3)),
    "moe, bias": (NO_ATTENTION, moe(bias=True), 4 + 6 * 4 + 6 + 6 * (6 * 4 + 6 + 4 * 3 + 4)),
    "moe, gated shared expert": (
        NO_ATTENTION,
        moe(shared_intermediate=5, shared_gated=True),
        4 + 6 * 4 + 6 * (6 * 4 + 4 * 3) + 10 * 4 + 4 * 5 + 4,
    ),
    "moe, latent": (
        NO_ATTENTION,
        moe(latent=2, activation=Activation.RELU2),
        4 + 6 * 4 + 2 * 4 + 4 * 2 + 6 * (3 * 2 + 2 * 3),
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_layers_counted_by_hand(name: str) -> None:
    attention, feed_forward, parameters = BY_HAND[name]
    model = one_layer(attention, feed_forward)
    assert item_parameters(model, model.items[1]) == parameters


def test_expert_parameters_are_those_of_the_experts_only() -> None:
    model = one_layer(feed_forward=moe(bias=True, shared_intermediate=5))
    assert item_expert_parameters(model, model.items[1]) == 6 * (6 * 4 + 6 + 4 * 3 + 4)
    assert item_expert_parameters(dense_model(1), dense_model(1).items[1]) == 0


def test_embedding_head_and_mtp_hold_their_copies_and_the_model_counts_them_once() -> None:
    model = dense_model(2, mtp=1, tied=True)  # vocabulary 16, hidden 4; a layer has 68 + 100
    sizes = {item.label: item_parameters(model, item) for item in model.items}
    assert sizes == {"EMBED": 64, "L0": 168, "L1": 168, "M0": 8 + 32 + 64 + 168, "HEAD": 4 + 64}
    assert model_parameters(model) == 64 + 3 * 168 + 8 + 32 + 4
    assert model_parameters(replace(model, tied=False)) == model_parameters(model) + 64


# Totals the makers state, in billions, without MTP blocks.
@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("mixtral-8x7b", 46.7),
        ("qwen3-30b-a3b", 30.5),
        ("qwen3-235b-a22b", 235.0),
        ("qwen3-next-80b", 80.0),
        ("deepseek-v3", 671.0),
        ("gpt-oss-120b", 117.0),
        ("kimi-k2", 1030.0),
        ("nemotron-3-nano", 31.6),
        ("nemotron-3-super", 120.6),
        ("jamba-1.5-mini", 52.0),
        ("jamba-1.5-large", 398.0),
    ],
)
def test_released_models_have_their_published_size(preset: str, billions: float) -> None:
    model = load_model(preset)
    assert model_parameters(replace(model, mtp=())) / 1e9 == pytest.approx(billions, rel=0.01)


def test_flops_of_a_dense_layer_by_hand() -> None:
    model, tokens, context = dense_model(1), 6, 8
    flops = task_flops(model, model.items[1], Workload(tokens=tokens, context=context))
    linear_attn, linear_mlp = 2 * tokens * 64, 2 * tokens * 96
    scores = 2 * tokens * (context // 2) * 4  # q k^T over half the context, head size 4
    assert flops == {
        "F_ATTN:L0": linear_attn + 2 * scores,
        "B_ATTN:L0": linear_attn + 5 * scores,
        "W_ATTN:L0": linear_attn,
        "F_MLP:L0": linear_mlp,
        "B_MLP:L0": linear_mlp,
        "W_MLP:L0": linear_mlp,
    }


def test_flops_of_a_moe_layer_by_hand() -> None:
    model = moe_model(1, shared=True)
    flops = task_flops(model, model.items[1], Workload(tokens=6, context=8))
    rows = 6 * 2
    assert flops["F_MLP:L0"] == flops["B_MLP:L0"] == flops["W_MLP:L0"] == 2 * rows * 96
    assert flops["F_SHARED:L0"] == flops["W_SHARED:L0"] == 2 * 6 * 96
    assert flops["F_ROUTE:L0"] == 2 * 6 * 16
    assert flops["B_ROUTE:L0"] == 2 * flops["F_ROUTE:L0"]  # the router's weight gradient is not split off
    assert flops["F_POST:L0"] == flops["B_POST:L0"] == 0
    assert not any(name.split("_")[1].startswith(("COUNT", "DISP", "COMB")) for name in flops)


def test_the_head_is_applied_once_more_per_mtp_block() -> None:
    flops = [
        task_flops(model, model.items[-1], TWO_TOKENS)["F_HEAD"] for model in (dense_model(1), dense_model(1, mtp=2))
    ]
    assert flops == [2 * 2 * 64, 3 * 2 * 2 * 64]


@given(context=st.integers(1, 60), window=st.integers(1, 80))
def test_attended_positions_are_the_sum_over_a_causal_window(context: int, window: int) -> None:
    attention = Attention(kind=AttentionKind.SLIDING, heads=1, kv_heads=1, head_dim=1, window=window)
    exact = sum(min(position + 1, window) for position in range(context))
    # A position that attends to itself counts half in the closed form.
    assert exact - context <= attended_sum(attention, context, context) <= exact


def test_memory_of_a_dense_layer_by_hand() -> None:
    model = dense_model(1)
    attention = 16 + 16 + 2 * (2 * (4 + 4 + 4 + 4) + 4)  # input, normed, per token q k v out and log-sum-exp
    mlp = 16 + 16 + 2 * 2 * (16 + 8)  # input, normed, both projections' outputs
    assert item_memory(model, model.items[1], TWO_TOKENS) == ItemMemory(
        weights=2 * 168,
        gradients=4 * 168,
        optimizer=12 * 168,
        activations=attention + mlp,
        pending_w=2 * 2 * ((4 + 12) + (4 + 4) + (4 + 16) + (8 + 4)),
        transient=mlp + 16,
        output=2 * 4 * 2,
    )


def test_memory_of_a_moe_layer_by_hand() -> None:
    model = moe_model(1, shared=True)
    attention = 16 + 16 + 2 * (2 * (4 + 4 + 4 + 4) + 4)
    route = 16 + 16 + 2 * (2 * 4 * 4 + 2 * (8 + 4))  # input, normed, logits and scores, ids and weights
    shared = 2 * 2 * (16 + 8)
    rows = 4 * 4 * 2  # 2 tokens x 2 experts
    experts = rows + 4 * 2 * (16 + 8)
    memory = item_memory(model, model.items[1], TWO_TOKENS)
    assert memory.activations == attention + route + shared + experts + rows
    assert memory.pending_w == 2 * (2 * (16 + 8) + 2 * (20 + 12) + 4 * (20 + 12))
    selective = item_memory(model, model.items[1], replace(TWO_TOKENS, recompute=Recompute.SELECTIVE))
    assert selective.activations == attention + route + rows + rows  # received and returned rows stay
    full = item_memory(model, model.items[1], replace(TWO_TOKENS, recompute=Recompute.FULL))
    assert full.activations == 16 + route + rows + rows
    assert full.transient == experts + 4 * 2 * (16 + 8) + rows  # recomputed values and their gradients
    assert full.pending_w == memory.pending_w


def test_reduced_combine_keeps_the_experts_outputs_instead_of_the_returned_rows() -> None:
    model = moe_model(1)
    rows, reduced = (
        item_memory(model, model.items[1], replace(TWO_TOKENS, combine=combine)) for combine in ("rows", "reduced")
    )
    assert rows.activations == reduced.activations
    rows, reduced = (
        item_memory(model, model.items[1], replace(TWO_TOKENS, combine=combine, recompute=Recompute.SELECTIVE))
        for combine in ("rows", "reduced")
    )
    assert rows.activations - reduced.activations == 4 * 4 * 2  # recomputed where the experts are


def test_memory_of_the_head_grows_with_its_uses() -> None:
    once, twice = dense_model(1), dense_model(1, mtp=1)  # vocabulary 16
    memory = item_memory(once, once.items[-1], TWO_TOKENS)
    kept, logits = 16 + 2 * 16 * 4, 2 * 16 * 2  # normed state, fp32 log-probabilities; logits on the way
    assert (memory.activations, memory.transient) == (16 + kept, 16 + kept + logits)
    assert memory.pending_w == 2 * 2 * (4 + 16)
    doubled = item_memory(twice, twice.items[-1], TWO_TOKENS)
    assert (doubled.activations, doubled.transient) == (2 * memory.activations, 2 * memory.transient)
    assert doubled.pending_w == 2 * memory.pending_w


def test_latent_experts_move_and_keep_latent_rows() -> None:
    model = one_layer(feed_forward=moe(latent=2))
    memory = item_memory(model, model.items[1], TWO_TOKENS)
    route = 16 + 16 + 2 * (2 * 6 * 4 + 2 * (8 + 4))
    experts = 4 * 2 * 2 + 4 * 2 * (6 + 3)
    assert memory.activations == route + experts + (4 * 2 * 2 + 2 * 2 * 2)  # returned rows and their latent sum
    assert memory.pending_w == 2 * 4 * ((2 + 6) + (3 + 2))


def test_output_grows_by_a_hidden_state_per_mtp_block() -> None:
    model = dense_model(1, mtp=2)
    outputs = [item_memory(model, item, TWO_TOKENS).output for item in model.items]
    assert outputs == [16, 16, 32, 48, 0]


def test_optimizer_state_is_sharded_over_the_ranks_that_reduce_the_same_gradients() -> None:
    model = moe_model(1)
    item, experts = model.items[1], 4 * 96
    dense = item_parameters(model, item) - experts
    workload = Workload(tokens=2, context=2, dp=3, ep=2)
    assert item_memory(model, item, workload).optimizer == 12 * (-(-dense // 6) + experts // 2 // 3)
    whole = replace(workload, shard_optimizer=False)
    assert item_memory(model, item, whole).optimizer == 12 * (dense + experts // 2)
    assert item_memory(model, item, replace(whole, optimizer="sgd")).optimizer == 4 * (dense + experts // 2)
    double, weights = item_memory(model, item, replace(whole, dtype="fp64")), dense + experts // 2
    assert (double.weights, double.gradients, double.optimizer) == (8 * weights, 8 * weights, 16 * weights)


@pytest.mark.parametrize(
    ("dtype", "optimizer", "momentum", "bytes_per_weight"),
    [
        ("bf16", "adamw", False, 12),
        ("fp16", "sgd", False, 4),
        ("fp16", "sgd", True, 8),
        ("fp32", "adamw", False, 8),
        ("fp32", "sgd", False, 0),
        ("fp32", "sgd", True, 4),
        ("fp64", "sgd", True, 8),
    ],
)
def test_weights_in_the_main_precision_have_no_master(
    dtype: str, optimizer: str, momentum: bool, bytes_per_weight: int
) -> None:
    model = dense_model(1)
    workload = replace(TWO_TOKENS, dtype=dtype, optimizer=optimizer, momentum=momentum)
    assert item_memory(model, model.items[1], workload).optimizer == bytes_per_weight * 168


def test_reduced_gradients_add_a_shard_where_several_ranks_reduce_them() -> None:
    model = moe_model(1)
    item, experts = model.items[1], 4 * 96
    dense = item_parameters(model, item) - experts
    workload = Workload(tokens=2, context=2, dp=3, ep=2)
    whole = 4 * (dense + experts // 2)
    assert item_memory(model, item, workload).gradients == whole + 4 * (-(-dense // 6) + experts // 2 // 3)
    assert item_memory(model, item, replace(workload, dp=1)).gradients == whole + 4 * -(-dense // 2)
    assert item_memory(model, item, replace(workload, shard_optimizer=False)).gradients == whole


def test_every_problem_of_a_workload_is_reported_at_once() -> None:
    model = moe_model(3)  # 4 experts
    wrong = Workload(
        tokens=0,
        context=-1,
        dp=0,
        ep=3,
        tp=0,
        dtype="fp8",
        optimizer="lion",
        momentum=True,
        combine="sum",
        recompute="some",  # type: ignore[arg-type]
    )
    with pytest.raises(SpecError) as error:
        check_workload(model, wrong)
    fields = {problem.field for problem in error.value.problems}
    assert fields == {f"workload.{name}" for name in Workload.__slots__ if name != "shard_optimizer"}
    assert "a divisor of 4, the number of experts of L0 and 2 more; such as 2" in str(error.value)
    with pytest.raises(SpecError, match="such as 4"):
        item_memory(model, model.items[1], replace(TWO_TOKENS, ep=8))
    check_workload(dense_model(3), replace(TWO_TOKENS, ep=3))


sizes = st.integers(1, 6)
attentions = st.one_of(
    st.just(NO_ATTENTION),
    st.builds(
        Attention,
        kind=st.sampled_from([AttentionKind.SOFTMAX, AttentionKind.SLIDING]),
        heads=sizes,
        kv_heads=st.just(1),
        head_dim=sizes,
        window=sizes,
        bias=st.booleans(),
        qk_norm=st.booleans(),
        output_gate=st.booleans(),
    ),
    st.builds(
        Attention,
        kind=st.just(AttentionKind.MLA),
        heads=sizes,
        q_rank=st.integers(0, 4),
        kv_rank=sizes,
        head_dim=sizes,
        rope_dim=st.sampled_from([0, 2]),
        v_dim=sizes,
    ),
    st.builds(
        Attention,
        kind=st.just(AttentionKind.GATED_DELTA_NET),
        heads=sizes,
        kv_heads=st.just(1),
        head_dim=sizes,
        v_dim=sizes,
        conv=sizes,
    ),
    st.builds(Attention, kind=st.just(AttentionKind.MAMBA1), inner=sizes, state=sizes, conv=sizes, dt_rank=sizes),
    st.builds(
        Attention,
        kind=st.just(AttentionKind.MAMBA2),
        heads=sizes,
        head_dim=sizes,
        state=sizes,
        groups=st.just(1),
        conv=sizes,
    ),
)
moe_layers = st.builds(
    lambda attention, activation, k, latent, shared, gated, bias: LayerSpec(
        attention=attention,
        feed_forward=FeedForward(
            kind=FeedForwardKind.MOE,
            intermediate=5,
            activation=activation,
            experts=12,
            top_k=k,
            latent=latent,
            shared_intermediate=shared,
            shared_gated=gated and shared > 0,
            bias=bias,
        ),
    ),
    attentions,
    st.sampled_from(Activation),
    st.integers(1, 12),
    st.sampled_from([0, 2]),
    st.sampled_from([0, 7]),
    st.booleans(),
    st.booleans(),
)
items = st.builds(Item, st.sampled_from([ItemKind.LAYER, ItemKind.MTP]), st.just(0), moe_layers)
workloads = st.builds(
    Workload,
    tokens=st.integers(1, 50),
    context=st.integers(1, 100),
    dp=st.integers(1, 3),
    ep=st.sampled_from([1, 2, 3, 4, 6, 12]),
    dtype=st.sampled_from(["bf16", "fp16", "fp32", "fp64"]),
    optimizer=st.sampled_from(["adamw", "sgd"]),
    combine=st.sampled_from(["rows", "reduced"]),
)


def model_of(item: Item) -> ModelSpec:
    assert item.layer is not None
    if item.kind is ItemKind.MTP:
        return ModelSpec(name="m", hidden=4, vocab=10, layers=(moe_layer(),), mtp=(item.layer,))
    return ModelSpec(name="m", hidden=4, vocab=10, layers=(item.layer,))


@given(item=items, workload=workloads)
def test_flops_cover_all_compute_tasks_and_follow_the_weights(item: Item, workload: Workload) -> None:
    model = model_of(item)
    flops, work = task_flops(model, item, workload), task_work(model, item, workload)
    graph = (*chunk_tasks([item], Pass.F).tasks, *chunk_tasks([item], Pass.B).tasks)
    assert [*flops] == [*work] == [task.name for task in graph if task.resource is Resource.COMP]
    for name, count in flops.items():
        pass_, kind, _ = parse_task_name(name)
        if pass_ is Pass.W:
            # Balanced routing: each of the T K rows meets one expert's weights.
            split = [linear for linear in task_linears(model, item)[kind] if linear.split]
            per_expert = sum(linear.n_in * linear.n_out for linear in split)
            rows = workload.tokens * (item.layer.feed_forward.top_k if kind is TaskKind.MLP else 1)  # type: ignore[union-attr]
            assert count == 2 * rows * per_expert
        assert sum(piece.bytes for piece in work[name]) > 0


@given(item=items, workload=workloads)
def test_memory_is_monotone_and_conserves_weights(item: Item, workload: Workload) -> None:
    model = model_of(item)
    policies = [item_memory(model, item, replace(workload, recompute=policy)) for policy in Recompute]
    none, selective, full = policies
    assert none.activations > selective.activations >= full.activations > 0
    assert none.transient <= selective.transient <= full.transient
    assert len({(m.static, m.pending_w, m.output) for m in policies}) == 1
    # The experts of all ranks together are the item's.
    element = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}[workload.dtype]
    experts = item_expert_parameters(model, item)
    dense = item_parameters(model, item) - experts
    assert (none.weights - element * dense) * workload.ep == element * experts
    # Sharded optimizer state: a rank never holds more, all ranks together never less than one copy.
    whole = item_memory(model, item, replace(workload, shard_optimizer=False)).optimizer
    assert none.optimizer <= whole <= none.optimizer * workload.dp * workload.ep
    twice = item_memory(model, item, replace(workload, tokens=2 * workload.tokens))
    assert twice.activations == 2 * none.activations and twice.pending_w == 2 * none.pending_w
    assert twice.static == none.static
