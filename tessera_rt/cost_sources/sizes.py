"""Parameters, flops and memory of items, from a model description and a workload. Symbols: ``layer_shapes.py``.

Memory is bytes on one rank. What is counted:

- weights: every dense parameter of the item, experts / ep of the experts, in the workload's dtype; of the tasks that
  tensor parallelism splits (``tasks.split_by_tp``) 1 / tp of the split weights and of the embedding table;
- gradients: one main-gradient element (fp32; fp64 for fp64) per weight of the rank, and the rank's shard of the reduced
  ones where several ranks reduce the same gradient: dp * ep for dense parameters, dp for experts, times tp for what
  tensor parallelism does not split;
- optimizer: two moments for adamw, one for sgd with momentum, and a master weight unless the weight itself has the
  gradients' dtype, all in that dtype; a shard of them, as of the reduced gradients.
  Without ``shard_optimizer`` the state is whole and gradients are reduced in place;
- activations: what each task keeps between F and B (``_held``), values shared by two tasks counted once. They are those
  of fused kernels: a small fp32 model in plain torch on a CPU kept 2.1 (gated delta net), 1.37 (softmax attention) and
  1.26 (head) times as much;
- pending_w: input rows and output-gradient rows of every split weight;
- transient: of a task: gradients of all it holds, its outputs, and what it recomputes, and with tp > 1 the hidden
  states of the other ranks' tokens, gathered and before they are summed; the largest task counts;
- output: the hidden state, plus one per MTP block at or before the item (the head needs all of them).

A recomputed task keeps its inputs only. Collectives are never redone, so rows received by a dispatch or a combine stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tessera_rt.cost_sources.layer_shapes import (
    conv_channels,
    embedding_uses,
    input_width,
    task_linears,
    task_vectors,
    up_width,
)
from tessera_rt.cost_sources.work import DTYPE_BYTES, expert_rows, head_uses, state_bytes, task_work
from tessera_rt.costs import RECOMPUTED, ItemMemory, Recompute, Workload
from tessera_rt.errors import Problem, SpecError
from tessera_rt.model_spec import Attention, AttentionKind, FeedForward, FeedForwardKind, Item, ItemKind, ModelSpec
from tessera_rt.tasks import Pass, Resource, TaskKind, chunk_tasks, split_by_tp

_ID_BYTES = 8  # token and expert ids are int64
_MOST: Mapping[str, int] = {"tokens": 2**20, "context": 2**24, "dp": 2**20, "ep": 2**20, "tp": 2**10}
"""Largest sizes of a workload: far beyond any use, and the times and bytes of a step fit 64 bits."""
_MOMENTS: Mapping[str, int] = {"adamw": 2, "sgd": 0}  # without momentum


def item_parameters(model: ModelSpec, item: Item) -> int:
    """Parameters of an item in the whole model, all experts included.

    Each item counts what it holds: a tied head its V H weights, an MTP block its copy of the embedding.
    ``model_parameters`` counts copies once.
    """
    linear = sum(part.parameters for parts in task_linears(model, item).values() for part in parts)
    return linear + sum(task_vectors(model, item).values())


def item_expert_parameters(model: ModelSpec, item: Item) -> int:
    """Those of ``item_parameters`` that expert parallelism divides."""
    return sum(part.parameters for parts in task_linears(model, item).values() for part in parts if part.experts)


def model_parameters(model: ModelSpec) -> int:
    """Distinct parameters of the model: copies of the embedding are counted once."""
    copies = embedding_uses(model, model.items) - 1
    return sum(item_parameters(model, item) for item in model.items) - copies * model.vocab * model.hidden


def task_flops(model: ModelSpec, item: Item, workload: Workload) -> dict[str, int]:
    """Floating-point operations of every compute task (F, B, W) of an item on one rank, recomputation not included.

    B is the gradient of inputs (and of the weights that are not split), W the gradient of split weights.
    """
    work = task_work(model, item, workload)
    return {name: sum(piece.flops for piece in pieces) for name, pieces in work.items()}


def item_memory(model: ModelSpec, item: Item, workload: Workload) -> ItemMemory:
    """What an item needs on its rank; see the module's docstring. Raises SpecError for a workload that cannot be."""
    check_workload(model, workload, items=[item])
    e, state = DTYPE_BYTES[workload.dtype], state_bytes(workload.dtype)
    experts = item_expert_parameters(model, item) // workload.ep
    split = _ceil(_split_parameters(model, item), workload.tp)
    dense = item_parameters(model, item) - item_expert_parameters(model, item) - _split_parameters(model, item)
    # (parameters on the rank, ranks that reduce the same gradient)
    held_by = (
        (split, workload.dp * workload.ep),
        (dense, workload.dp * workload.ep * workload.tp),
        (experts, workload.dp * workload.tp),
    )
    shards = [(count, ranks if workload.shard_optimizer else 1) for count, ranks in held_by]
    others = 2 * (workload.tp - 1) * workload.tokens * model.hidden * e
    recomputed = RECOMPUTED[workload.recompute]
    held = {kind: _held(model, item, kind, workload) for kind in _compute_kinds(item)}
    return ItemMemory(
        weights=e * sum(count for count, _ in shards),
        gradients=state * sum(count + _reduced(count, ranks) for count, ranks in shards),
        optimizer=_optimizer_bytes(workload) * sum(_ceil(count, ranks) for count, ranks in shards),
        activations=sum(h.inputs + (0 if kind in recomputed else h.inside) for kind, h in held.items()),
        pending_w=_pending_w(model, item, workload),
        transient=max(
            h.inputs + h.outputs + h.inside * (2 if kind in recomputed else 1) + others * split_by_tp(item, kind)
            for kind, h in held.items()
        ),
        output=_output(model, item, workload),
    )


def check_workload(
    model: ModelSpec, workload: Workload, *, items: Iterable[Item] | None = None, dtypes: Iterable[str] = DTYPE_BYTES
) -> None:
    """Raises SpecError with every reason why ``workload`` cannot be: sizes, names, experts that ep does not divide.

    ``items``: those to look at (default: all). ``dtypes``: those the device states a rate for.
    """
    names = {
        "dtype": tuple(dtypes),
        "optimizer": tuple(_MOMENTS),
        "combine": ("rows", "reduced"),
        "recompute": tuple(Recompute),
    }
    problems = [
        Problem(f"workload.{name}", getattr(workload, name), f"one of {', '.join(allowed)}")
        for name, allowed in names.items()
        if getattr(workload, name) not in allowed
    ]
    for name, most in _MOST.items():
        value = getattr(workload, name)
        if not isinstance(value, int) or not 1 <= value <= most:
            problems.append(Problem(f"workload.{name}", value, f"an integer from 1 to {most}"))
    if workload.momentum and workload.optimizer != "sgd":
        problems.append(Problem("workload.momentum", workload.momentum, f"false with {workload.optimizer}"))
    if isinstance(workload.tp, int) and 1 < workload.tp <= _MOST["tp"]:
        problems += _tp_problems(model.items if items is None else items, workload.tp)
    if isinstance(workload.ep, int) and workload.ep >= 1:
        labels: dict[int, list[str]] = {}
        for item in model.items if items is None else items:
            if item.layer is not None and item.layer.is_moe and item.layer.feed_forward.experts % workload.ep:
                labels.setdefault(item.layer.feed_forward.experts, []).append(item.label)
        for experts, where in labels.items():
            few = f"{where[0]} and {len(where) - 1} more" if len(where) > 1 else where[0]
            allowed = f"a divisor of {experts}, the number of experts of {few}"
            problems.append(Problem("workload.ep", workload.ep, allowed, f"such as {_divisor(experts, workload.ep)}"))
    if problems:
        raise SpecError.of(f"workload for {model.name}", problems)


def _tp_problems(items: Iterable[Item], tp: int) -> Iterator[Problem]:
    """Sizes that ``tp`` ranks cannot share evenly, each once."""
    seen: set[tuple[str, int]] = set()
    for item in items:
        if item.layer is None:
            continue
        ff = item.layer.feed_forward
        sizes = {
            "attention heads": item.layer.attention.heads,
            "intermediate size": ff.intermediate if ff.kind is FeedForwardKind.DENSE else 0,
            "shared experts' intermediate size": ff.shared_intermediate,
        }
        for name, size in sizes.items():
            if size % tp and (name, size) not in seen:
                seen.add((name, size))
                yield Problem("workload.tp", tp, f"a divisor of {size}, the {name} of {item.label}")


def _split_parameters(model: ModelSpec, item: Item) -> int:
    """Dense parameters of an item that tensor parallelism divides: split linear weights and the embedding table."""
    linear = sum(
        part.parameters
        for kind, parts in task_linears(model, item).items()
        if split_by_tp(item, kind)
        for part in parts
        if part.split
    )
    table = model.vocab * model.hidden if item.kind in (ItemKind.EMBED, ItemKind.MTP) else 0
    return linear + table


def _divisor(experts: int, ep: int) -> int:
    """The largest divisor of ``experts`` that is not above ``ep``."""
    return next(size for size in range(min(ep, experts), 0, -1) if experts % size == 0)


def _ceil(count: int, ranks: int) -> int:
    return -(-count // ranks)


def _reduced(count: int, ranks: int) -> int:
    """Elements of a rank's shard of the reduced gradients; one rank alone reduces nothing."""
    return _ceil(count, ranks) if ranks > 1 else 0


def _optimizer_bytes(workload: Workload) -> int:
    """Optimizer state per weight that a rank updates."""
    state = state_bytes(workload.dtype)
    master = DTYPE_BYTES[workload.dtype] != state
    return state * (_MOMENTS[workload.optimizer] + workload.momentum + master)


def _compute_kinds(item: Item) -> list[TaskKind]:
    return [task.kind for task in chunk_tasks([item], Pass.F).tasks if task.resource is Resource.COMP]


def _output(model: ModelSpec, item: Item, workload: Workload) -> int:
    states = {ItemKind.MTP: item.index + 2, ItemKind.HEAD: 0}.get(item.kind, 1)
    return states * workload.tokens * model.hidden * DTYPE_BYTES[workload.dtype]


def _pending_w(model: ModelSpec, item: Item, workload: Workload) -> int:
    elements = 0
    for kind, linears in task_linears(model, item).items():
        for linear in linears:
            if linear.split:
                rows = expert_rows(item, workload) if linear.experts else workload.tokens
                uses = head_uses(model) if kind is TaskKind.HEAD else 1
                elements += uses * rows * (linear.n_in + linear.n_out)
    return elements * DTYPE_BYTES[workload.dtype]


@dataclass(frozen=True, slots=True)
class _Held:
    """Bytes of one task per micro-batch. ``inputs``: values from other tasks that its backward needs, counted at their
    first reader; ``inside``: what it makes and its backward needs; ``outputs``: what it makes for others."""

    inputs: int
    inside: int
    outputs: int


def _held(model: ModelSpec, item: Item, kind: TaskKind, workload: Workload) -> _Held:
    e, state, tokens = DTYPE_BYTES[workload.dtype], state_bytes(workload.dtype), workload.tokens
    hidden = tokens * model.hidden * e  # one hidden state; a normed copy of it has the same size
    ids = tokens * _ID_BYTES
    if kind is TaskKind.EMBED:
        return _Held(ids, 0, hidden)
    if kind is TaskKind.HEAD:  # kept: normed state and fp32 log-probabilities; on the way: logits
        uses, logits = head_uses(model), tokens * model.vocab
        return _Held(uses * hidden, uses * (hidden + logits * state), uses * logits * e)
    assert item.layer is not None
    ff = item.layer.feed_forward
    moe = ff.kind is FeedForwardKind.MOE
    expert_io = expert_rows(item, workload) * input_width(model, ff) * e if moe else 0
    reduced = workload.combine == "reduced"
    match kind:
        case TaskKind.MTP:  # inputs: hidden state and ids; inside: embedding, both norms
            return _Held(hidden + ids, 3 * hidden, hidden)
        case TaskKind.ATTN:
            return _Held(hidden, hidden + tokens * _mixer_held(item.layer.attention, e, state), hidden)
        case TaskKind.ROUTE:  # never redone; normed state, logits and scores, ids and weights; out: rows to send
            kept = hidden + tokens * (2 * ff.experts * state + ff.top_k * (_ID_BYTES + state))
            return _Held(hidden + kept, 0, expert_io)
        case TaskKind.SHARED:  # its input is ROUTE's normed state
            inside = _feed_forward_held(ff, ff.shared_intermediate) * tokens * e + (hidden if ff.shared_gated else 0)
            return _Held(0, inside, hidden)
        case TaskKind.MLP if moe:  # weights of experts need each expert's output: here when it is summed here
            inside = _feed_forward_held(ff, ff.intermediate) * expert_rows(item, workload) * e
            return _Held(expert_io, inside + (expert_io if reduced else 0), expert_io)
        case TaskKind.MLP:
            return _Held(hidden, hidden + _feed_forward_held(ff, ff.intermediate) * tokens * e, hidden)
        case TaskKind.POST:  # returned rows, for the gradient of the weights; the latent sum
            latent = tokens * ff.latent * e
            return _Held((0 if reduced else expert_io) + latent, 0, hidden)
        case _:
            raise AssertionError(f"{kind} is no compute task")


def _feed_forward_held(ff: FeedForward, intermediate: int) -> int:
    """Elements per row: output of the first projection, and the activation."""
    return up_width(ff, intermediate) + intermediate


def _mixer_held(a: Attention, e: int, state: int) -> int:
    """Bytes per token that a mixer keeps besides its input and its normed input, with fused kernels."""
    match a.kind:
        case AttentionKind.SOFTMAX | AttentionKind.SLIDING:  # q, k, v, out; q, k before their norms; gate and product
            q, k = a.heads * a.head_dim, a.kv_heads * a.head_dim
            elements = 2 * q + 2 * k + (q + k if a.qk_norm else 0) + (2 * q if a.output_gate else 0)
            return e * elements + a.heads * state  # log-sum-exp
        case AttentionKind.MLA:  # compressed vectors before and after their norms; q, k, v, out
            qk = 2 * a.heads * (a.head_dim + a.rope_dim)
            return e * (2 * (a.q_rank + a.kv_rank) + qk + 2 * a.heads * a.v_dim) + a.heads * state
        case AttentionKind.GATED_DELTA_NET:  # before and after convolution, z, core output, normed output; 2 gates
            elements = 2 * conv_channels(a) + 3 * a.heads * a.v_dim
            return e * elements + 2 * a.heads * state
        case AttentionKind.MAMBA1:  # x and z, convolved x, time step B C, time step, scan output, gated output
            return e * (6 * a.inner + a.dt_rank + 2 * a.state)
        case AttentionKind.MAMBA2:  # z, before and after the convolution, scan output, normed output; time step
            return e * (2 * conv_channels(a) + 3 * a.heads * a.head_dim) + a.heads * state
        case AttentionKind.NONE:
            return 0
