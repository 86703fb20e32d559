"""What each compute task does: pieces of work with their flops and the bytes they read and write.

A piece is about one kernel; a roofline gives it max(flops / rate, bytes / bandwidth). Elementwise pieces (norms,
activations, rotary embedding, residuals, gathers) count bytes only; in backward they move twice the forward's bytes
(they read the incoming gradient and the saved input). Symbols: ``layer_shapes.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tessera_rt.cost_sources.layer_shapes import Linear, conv_channels, input_width, task_linears, up_width
from tessera_rt.costs import Workload
from tessera_rt.model_spec import Attention, AttentionKind, FeedForward, FeedForwardKind, Item, ModelSpec
from tessera_rt.tasks import Pass, Resource, Task, TaskKind, chunk_tasks, split_by_tp, task_name

GDN_CHUNK = 64  # tokens per chunk of the chunked gated delta rule (flash-linear-attention's kernels)
MAMBA2_CHUNK = 128  # tokens per chunk of the state-space-duality algorithm (NemotronH's configuration)
SCAN_FLOPS = 9  # of Mamba-1's selective scan per channel and state: discretise 3, update 3, read out 3
_COUNT_BYTES = 8  # int64
DTYPE_BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


class WorkKind(StrEnum):
    """What limits a piece of work; a device states the reachable fraction of its peak for each."""

    GEMM = "gemm"
    GROUPED_GEMM = "grouped_gemm"  # one GEMM per expert in one kernel
    ATTENTION_FORWARD = "attention_forward"  # fused softmax attention
    ATTENTION_BACKWARD = "attention_backward"
    LINEAR_ATTENTION = "linear_attention"  # chunked delta rule, state-space scans
    MEMORY = "memory"  # bytes only


@dataclass(frozen=True, slots=True)
class Work:
    """One piece: floating-point operations (a multiply-add is 2) and bytes of device memory read and written."""

    kind: WorkKind
    flops: int
    bytes: int


def state_bytes(dtype: str) -> int:
    """Bytes of a main gradient, master weight or moment: fp32, or fp64 for fp64 parameters."""
    return 8 if dtype == "fp64" else 4


def head_uses(model: ModelSpec) -> int:
    """How often the head is applied: to the last hidden state and to the output of each MTP block."""
    return 1 + len(model.mtp)


def expert_rows(item: Item, workload: Workload) -> int:
    """R: rows the experts of one rank compute for a micro-batch when routing is balanced, T * K."""
    assert item.layer is not None
    return workload.tokens * item.layer.feed_forward.top_k


def task_work(model: ModelSpec, item: Item, workload: Workload) -> dict[str, tuple[Work, ...]]:
    """Task name -> its pieces, for every compute task of the item (F, B, W), without recomputation.

    B holds input gradients, and the weight gradients of what is not split; W the weight gradients of split weights.
    ``workload.tokens`` are a rank's own; where tensor parallelism splits a task, a rank computes 1 / tp of it (key and
    value heads, too) for the tokens of all tp ranks: the same flops, 1 / tp of the weight's bytes, and rows are charged
    as if they were its own.
    """
    linears = task_linears(model, item)
    work: dict[str, tuple[Work, ...]] = {}
    names = [*chunk_tasks([item], Pass.F).tasks, *chunk_tasks([item], Pass.B).tasks]
    for task in names:
        if task.resource is Resource.COMM:
            continue
        own = linears.get(task.kind, ())
        pieces: list[Work] = []
        for linear in own:
            rows = _rows(model, item, task.kind, linear, workload)
            shards = workload.tp if linear.split and split_by_tp(item, task.kind) else 1
            if task.pass_ is Pass.F or task.pass_ is Pass.B:
                pieces.append(_gemm(linear, rows, workload, shards))
            if task.pass_ is (Pass.W if linear.split else Pass.B):
                pieces.append(_weight_gradient(linear, rows, workload, shards))
        if task.pass_ is not Pass.W:
            pieces += _core(item, task.kind, task.pass_, workload)
            moved = _elementwise(model, item, task.kind, workload)
            if task.pass_ is Pass.B:
                moved = 2 * moved + _returned_rows(model, item, task.kind, workload)
            pieces.append(Work(WorkKind.MEMORY, 0, moved))
        work[task_name(task.pass_, task.kind, item.label)] = tuple(pieces)
    return work


def comm_payload(model: ModelSpec, item: Item, workload: Workload) -> dict[TaskKind, int]:
    """Bytes a rank sends off itself per collective when every (token, expert) row travels by itself; {} without MoE."""
    if item.layer is None or not item.layer.is_moe:
        return {}
    ff = item.layer.feed_forward
    rows = expert_rows(item, workload) * (workload.ep - 1) // workload.ep
    size = rows * input_width(model, ff) * DTYPE_BYTES[workload.dtype]
    return {TaskKind.COUNT: count_payload(ff.experts, workload), TaskKind.DISP: size, TaskKind.COMB: size}


def tp_payload(model: ModelSpec, task: Task, workload: Workload) -> int:
    """Bytes a rank sends in a tensor-parallel collective: its tokens' hidden states to, or sums for, every other rank.

    The collective that gathers an output's gradient gathers the input again, too, for the weight gradient.
    """
    states = 2 if task.pass_ is Pass.B and task.kind in (TaskKind.TP, TaskKind.TP_MLP) else 1
    return states * (workload.tp - 1) * workload.tokens * model.hidden * DTYPE_BYTES[workload.dtype]


def count_payload(experts: int, workload: Workload) -> int:
    """Bytes of the all-gather of counts [E] int64 over dp x ep: each rank's own, to every other rank."""
    return (workload.dp * workload.ep - 1) * experts * _COUNT_BYTES


def _rows(model: ModelSpec, item: Item, kind: TaskKind, linear: Linear, workload: Workload) -> int:
    if linear.experts:
        return expert_rows(item, workload)
    return workload.tokens * (head_uses(model) if kind is TaskKind.HEAD else 1)


def _gemm(linear: Linear, rows: int, workload: Workload, shards: int) -> Work:
    """Forward or input gradient: 2 rows n_in n_out flops; reads rows and weights, writes rows."""
    local = linear.experts // workload.ep if linear.experts else 1
    moved = rows * (linear.n_in + linear.n_out) + local * linear.n_in * linear.n_out // shards
    kind = WorkKind.GROUPED_GEMM if linear.experts else WorkKind.GEMM
    return Work(kind, 2 * rows * linear.n_in * linear.n_out, DTYPE_BYTES[workload.dtype] * moved)


def _weight_gradient(linear: Linear, rows: int, workload: Workload, shards: int) -> Work:
    """The same flops; reads both rows, reads and writes the main gradient."""
    local = linear.experts // workload.ep if linear.experts else 1
    moved = DTYPE_BYTES[workload.dtype] * rows * (linear.n_in + linear.n_out)
    moved += 2 * state_bytes(workload.dtype) * local * linear.n_in * linear.n_out // shards
    kind = WorkKind.GROUPED_GEMM if linear.experts else WorkKind.GEMM
    return Work(kind, 2 * rows * linear.n_in * linear.n_out, moved)


def attended_sum(attention: Attention, tokens: int, context: int) -> int:
    """Positions attended to, summed over a micro-batch's tokens: T C / 2 (causal), or T w (1 - w / 2C) in a window w.

    With context parallelism a rank's tokens are assumed to be spread evenly over the context.
    """
    window = context
    if attention.kind is AttentionKind.SLIDING:
        window = min(attention.window, context)
    return tokens * window * (2 * context - window) // (2 * context)


def _core(item: Item, kind: TaskKind, pass_: Pass, workload: Workload) -> list[Work]:
    """The part of a mixer that is no GEMM with a weight.

    Softmax attention: two products forward (q k^T, p v), five backward (as fused kernels recompute q k^T). Linear
    kinds: three times the forward in backward (two gradients per product, and the chunk states once more).
    """
    if kind is not TaskKind.ATTN:
        return []
    assert item.layer is not None
    a, tokens, e = item.layer.attention, workload.tokens, DTYPE_BYTES[workload.dtype]
    forward = pass_ is Pass.F
    match a.kind:
        case AttentionKind.SOFTMAX | AttentionKind.SLIDING | AttentionKind.MLA:
            mla = a.kind is AttentionKind.MLA
            qk = a.head_dim + (a.rope_dim if mla else 0)
            v = a.v_dim if mla else a.head_dim
            kv_heads = a.heads if mla else a.kv_heads
            pairs = attended_sum(a, tokens, workload.context) * a.heads
            flops = 2 * pairs * (qk + v if forward else 3 * qk + 2 * v)
            read = tokens * a.heads * (qk + v) + max(tokens, workload.context) * kv_heads * (qk + v)
            work = WorkKind.ATTENTION_FORWARD if forward else WorkKind.ATTENTION_BACKWARD
            return [Work(work, flops, e * read * (1 if forward else 2))]
        case AttentionKind.GATED_DELTA_NET:
            c, dk, dv = GDN_CHUNK, a.head_dim, a.v_dim
            # Per token and head: k k^T, T k, q k^T; T v, a v; the triangular inverse T; w S, q S, k^T u.
            per_token = a.heads * 2 * (3 * c * dk + 2 * c * dv + c * c + 3 * dk * dv)
            read = a.heads * (2 * dk + 2 * dv)
        case AttentionKind.MAMBA2:
            c = MAMBA2_CHUNK
            per_token = 2 * (a.groups * c * a.state + a.heads * a.head_dim * (c + 2 * a.state))
            read = 2 * a.heads * a.head_dim + 2 * a.groups * a.state
        case AttentionKind.MAMBA1:
            per_token = SCAN_FLOPS * a.inner * a.state
            read = 4 * a.inner + 2 * a.state
        case AttentionKind.NONE:
            return []
    times = 1 if forward else 3
    return [Work(WorkKind.LINEAR_ATTENTION, times * tokens * per_token, times * e * tokens * read)]


def _elementwise(model: ModelSpec, item: Item, kind: TaskKind, workload: Workload) -> int:
    """Bytes that the forward of a task reads and writes outside GEMMs and mixer cores."""
    tokens, hidden, e = workload.tokens, model.hidden, DTYPE_BYTES[workload.dtype]
    norm = 2 * tokens * hidden * e
    residual = 3 * tokens * hidden * e
    if kind is TaskKind.EMBED:
        return norm  # read a row of the table, write it
    if kind is TaskKind.HEAD:  # norm; read logits, write their fp32 log-probabilities
        return head_uses(model) * (norm + tokens * model.vocab * (e + state_bytes(workload.dtype)))
    assert item.layer is not None
    ff = item.layer.feed_forward
    match kind:
        case TaskKind.MTP:
            return 3 * norm  # embedding, two norms
        case TaskKind.ATTN:
            return norm + residual + tokens * e * _mixer_elementwise(item.layer.attention)
        case TaskKind.MLP:
            rows = expert_rows(item, workload) if ff.kind is FeedForwardKind.MOE else tokens
            around = 0 if ff.kind is FeedForwardKind.MOE else norm + residual
            return around + rows * e * _activation(ff, ff.intermediate)
        case TaskKind.SHARED:
            return tokens * e * _activation(ff, ff.shared_intermediate) + (norm if ff.shared_gated else 0)
        case TaskKind.ROUTE:  # norm; logits and scores in fp32
            return norm + 4 * tokens * ff.experts * state_bytes(workload.dtype)
        case TaskKind.POST:  # read K rows per token, write their sum; shared output, residual
            shared = tokens * hidden * e if ff.shared_intermediate else 0
            return (expert_rows(item, workload) + tokens) * input_width(model, ff) * e + residual + shared
        case _:
            return 0


def _returned_rows(model: ModelSpec, item: Item, kind: TaskKind, workload: Workload) -> int:
    """Bytes of B_ROUTE alone: it sums the K gradient rows that came back for each token."""
    if kind is not TaskKind.ROUTE:
        return 0
    assert item.layer is not None
    width = input_width(model, item.layer.feed_forward)
    return (expert_rows(item, workload) + workload.tokens) * width * DTYPE_BYTES[workload.dtype]


def _activation(ff: FeedForward, intermediate: int) -> int:
    """Elements per row: read the first projection's output, write the activation."""
    return up_width(ff, intermediate) + intermediate


def _mixer_elementwise(a: Attention) -> int:
    """Elements per token: rotary embedding and q/k norms, or convolution, gates and output norm."""
    match a.kind:
        case AttentionKind.SOFTMAX | AttentionKind.SLIDING:
            rotated = (a.heads + a.kv_heads) * a.head_dim
            gate = 3 * a.heads * a.head_dim if a.output_gate else 0
            return 2 * rotated * (1 + a.qk_norm) + gate
        case AttentionKind.MLA:
            return 2 * (a.q_rank + a.kv_rank + (a.heads + 1) * a.rope_dim)
        case AttentionKind.GATED_DELTA_NET:  # convolution, l2 norms of q and k, gated norm of the output
            return 2 * conv_channels(a) + 4 * a.kv_heads * a.head_dim + 3 * a.heads * a.v_dim
        case AttentionKind.MAMBA1:
            return 2 * conv_channels(a) + 3 * a.inner
        case AttentionKind.MAMBA2:
            return 2 * conv_channels(a) + 3 * a.heads * a.head_dim
        case AttentionKind.NONE:
            return 0
