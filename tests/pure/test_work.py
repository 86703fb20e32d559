"""Pieces of work counted by hand: mixer cores, bytes of GEMMs and of elementwise operations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tessera_rt.cost_sources.work import GDN_CHUNK, MAMBA2_CHUNK, SCAN_FLOPS, Work, WorkKind, comm_payload, task_work
from tessera_rt.costs import Workload
from tessera_rt.model_spec import Attention, AttentionKind, FeedForward, FeedForwardKind, LayerSpec, ModelSpec
from tessera_rt.testing.costs import dense_model, moe_model

WORKLOAD = Workload(tokens=6, context=8)  # bf16


def core_of(attention: Attention, name: str) -> Work:
    layer = LayerSpec(attention=attention, feed_forward=FeedForward(kind=FeedForwardKind.NONE))
    model = ModelSpec(name="one", hidden=4, vocab=10, layers=(layer,))
    (core,) = (
        piece
        for piece in task_work(model, model.items[1], WORKLOAD)[name]
        if piece.kind not in (WorkKind.GEMM, WorkKind.MEMORY)
    )
    return core


# Per token a chunked kernel multiplies with a chunk of c tokens, or with the state.
CORES = {
    "mla": (
        Attention(kind=AttentionKind.MLA, heads=3, kv_rank=5, head_dim=4, rope_dim=2, v_dim=7),
        # T C / 2 pairs per head; q k^T over 4 + 2 dimensions, p v over 7; backward: q k^T, dq, dk and dp, dv.
        2 * 24 * 3 * (6 + 7),
        2 * 24 * 3 * (3 * 6 + 2 * 7),
        (WorkKind.ATTENTION_FORWARD, WorkKind.ATTENTION_BACKWARD),
    ),
    "sliding": (
        Attention(kind=AttentionKind.SLIDING, heads=2, kv_heads=1, head_dim=5, window=4),
        2 * (6 * 4 * 12 // 16) * 2 * 10,
        2 * (6 * 4 * 12 // 16) * 2 * 25,
        (WorkKind.ATTENTION_FORWARD, WorkKind.ATTENTION_BACKWARD),
    ),
    "gated delta net": (
        Attention(kind=AttentionKind.GATED_DELTA_NET, heads=3, kv_heads=1, head_dim=5, v_dim=7, conv=4),
        6 * 3 * 2 * (GDN_CHUNK * (3 * 5 + 2 * 7 + GDN_CHUNK) + 3 * 5 * 7),
        3 * 6 * 3 * 2 * (GDN_CHUNK * (3 * 5 + 2 * 7 + GDN_CHUNK) + 3 * 5 * 7),
        (WorkKind.LINEAR_ATTENTION, WorkKind.LINEAR_ATTENTION),
    ),
    "mamba 2": (
        Attention(kind=AttentionKind.MAMBA2, heads=4, head_dim=2, state=3, groups=2, conv=4),
        6 * 2 * (2 * MAMBA2_CHUNK * 3 + 4 * MAMBA2_CHUNK * 2 + 4 * 2 * 2 * 3),
        3 * 6 * 2 * (2 * MAMBA2_CHUNK * 3 + 4 * MAMBA2_CHUNK * 2 + 4 * 2 * 2 * 3),
        (WorkKind.LINEAR_ATTENTION, WorkKind.LINEAR_ATTENTION),
    ),
    "mamba 1": (
        Attention(kind=AttentionKind.MAMBA1, inner=8, state=3, conv=4, dt_rank=2),
        6 * SCAN_FLOPS * 8 * 3,
        3 * 6 * SCAN_FLOPS * 8 * 3,
        (WorkKind.LINEAR_ATTENTION, WorkKind.LINEAR_ATTENTION),
    ),
}


@pytest.mark.parametrize("name", CORES)
def test_mixer_cores(name: str) -> None:
    attention, forward, backward, kinds = CORES[name]
    found = [core_of(attention, "F_ATTN:L0"), core_of(attention, "B_ATTN:L0")]
    assert [piece.flops for piece in found] == [forward, backward]
    assert tuple(piece.kind for piece in found) == kinds
    assert found[1].bytes > found[0].bytes > 0


def test_bytes_of_a_dense_feed_forward() -> None:
    model = dense_model(1)
    work = task_work(model, model.items[1], WORKLOAD)
    up, down = 6 * (4 + 16), 6 * (8 + 4)  # elements of input and output rows
    elementwise = 2 * 6 * (2 * 4 + 3 * 4 + 16 + 8)  # norm, residual, activation
    gemms = (Work(WorkKind.GEMM, 2 * 6 * 64, 2 * (up + 64)), Work(WorkKind.GEMM, 2 * 6 * 32, 2 * (down + 32)))
    assert work["F_MLP:L0"] == (*gemms, Work(WorkKind.MEMORY, 0, elementwise))
    assert work["B_MLP:L0"] == (*gemms, Work(WorkKind.MEMORY, 0, 2 * elementwise))
    # W reads both rows, and reads and writes the fp32 gradient.
    assert work["W_MLP:L0"] == (
        Work(WorkKind.GEMM, 2 * 6 * 64, 2 * up + 8 * 64),
        Work(WorkKind.GEMM, 2 * 6 * 32, 2 * down + 8 * 32),
    )


def test_bytes_of_experts_count_the_local_ones_once() -> None:
    model = moe_model(1)
    rows = 6 * 2
    work = task_work(model, model.items[1], replace(WORKLOAD, ep=2))
    assert work["F_MLP:L0"][0] == Work(WorkKind.GROUPED_GEMM, 2 * rows * 64, 2 * (rows * 20 + 2 * 64))
    assert work["W_MLP:L0"][1] == Work(WorkKind.GROUPED_GEMM, 2 * rows * 32, 2 * rows * 12 + 8 * 2 * 32)
    assert work["F_MLP:L0"][-1].bytes == 2 * rows * (16 + 8)


def test_backward_of_routing_sums_the_returned_rows() -> None:
    model = moe_model(1)
    work = task_work(model, model.items[1], WORKLOAD)
    forward, backward = work["F_ROUTE:L0"][-1].bytes, work["B_ROUTE:L0"][-1].bytes
    assert backward - 2 * forward == 2 * (6 * 2 + 6) * 4


def test_head_reads_logits_and_writes_log_probabilities_per_use() -> None:
    once, twice = dense_model(1), dense_model(1, mtp=1)  # vocabulary 16
    (logits, loss) = task_work(once, once.items[-1], WORKLOAD)["F_HEAD"]
    assert logits == Work(WorkKind.GEMM, 2 * 6 * 64, 2 * (6 * 20 + 64))
    assert loss == Work(WorkKind.MEMORY, 0, 2 * 6 * 4 * 2 + 6 * 16 * (2 + 4))
    assert task_work(twice, twice.items[-1], WORKLOAD)["F_HEAD"][-1].bytes == 2 * loss.bytes


def test_payload_of_rows_that_travel_one_by_one() -> None:
    model = moe_model(1, dense_first=0)
    payload = comm_payload(model, model.items[1], replace(WORKLOAD, ep=4, dp=3))
    assert payload == {"COUNT": 11 * 4 * 8, "DISP": 9 * 4 * 2, "COMB": 9 * 4 * 2}  # 12 rows, a quarter stays
    assert comm_payload(model, model.items[0], WORKLOAD) == {}
