"""Costs computed from sizes and a device's stated rates: for plans made before, or without, any measurement.

A compute task takes the sum over its pieces of max(flops / rate, bytes / bandwidth), plus a launch. It runs alone and
at full rate here; what overlapped communication takes from it is the table's ``contention``.

A dispatch or combine takes max(network bytes / network bandwidth, NVLink bytes / NVLink bandwidth, all bytes / what the
communication SMs can move), plus a latency. Rows of one token travel together, as in DeepEP's kernels for many nodes:

- dispatch (F_DISP, B_COMB): one row per (token, node) crosses the network and is spread there, one per (token, rank);
- combine (F_COMB, B_DISP): ``reduced`` sums on each rank, then on each node, so it moves what a dispatch moves;
  ``rows`` returns every expert's row by itself, K per token.

A tensor-parallel collective moves the hidden states of a rank's tokens to every other of its tp ranks, which are
neighbours: over NVLink if they share a node, else over the network. Expert-parallel groups then lie tp ranks apart.

Routing is balanced: every expert is as likely as any other. Expectations are those of K distinct experts out of E.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd, prod

from tessera_rt.cost_sources.device import DeviceSpec
from tessera_rt.cost_sources.layer_shapes import input_width
from tessera_rt.cost_sources.sizes import check_workload, item_memory
from tessera_rt.cost_sources.work import DTYPE_BYTES, Work, WorkKind, count_payload, expert_rows, task_work, tp_payload
from tessera_rt.costs import RECOMPUTED, CostTable, Provenance, TaskCost, Workload
from tessera_rt.errors import CostError, Problem
from tessera_rt.model_spec import AttentionKind, FeedForward, Item, ModelSpec
from tessera_rt.tasks import TP_KINDS, Pass, Resource, Task, TaskKind, chunk_tasks, task_name

_ROUTE_BYTES = 8  # an expert id (int32) and a weight (fp32) per chosen expert ride with each dispatched row
_CONTEXT_KINDS = (AttentionKind.SOFTMAX, AttentionKind.SLIDING, AttentionKind.MLA)


def roofline_costs(
    model: ModelSpec, workload: Workload, device: DeviceSpec, *, comm_sms: int | None = None
) -> CostTable:
    """Duration of every task and memory of every item of ``model`` on ``device``.

    ``comm_sms``: SMs given to communication (default: the device's). ``TaskCost.flops`` are those executed,
    recomputation included. Raises SpecError with everything that is wrong with the workload, CostError for an
    impossible ``comm_sms``.
    """
    check_workload(model, workload, dtypes=[dtype for dtype in DTYPE_BYTES if dtype in device.peak_flops])
    sms = device.comm_sms if comm_sms is None else comm_sms
    if not 0 < sms < device.sm_count:
        allowed = f"an integer from 1 to {device.sm_count - 1}"
        raise CostError.of(device.name, [Problem("comm_sms", sms, allowed)])
    tasks: dict[str, TaskCost] = {}
    # Equal layers have equal costs: compute each kind once.
    known: dict[tuple[object, ...], dict[tuple[Pass, TaskKind], TaskCost]] = {}
    for item in model.items:
        key = (item.kind, item.layer)
        if key not in known:
            known[key] = _item_costs(model, item, workload, device, sms)
        for (pass_, kind), cost in known[key].items():
            tasks[task_name(pass_, kind, item.label)] = cost
    return CostTable(
        fingerprint=model.fingerprint,
        workload=workload,
        provenance=Provenance(source="roofline", device=device.name, notes=tuple(_notes(model, workload, device, sms))),
        tasks=tasks,
        memory={item.label: item_memory(model, item, workload) for item in model.items},
        link=device.inter_node,
        contention=device.contention_at(sms),
        comm_sms=sms,
    )


def work_ns(pieces: Iterable[Work], device: DeviceSpec, dtype: str) -> float:
    """Nanoseconds of pieces run one after the other, without launch."""
    seconds = 0.0
    for piece in pieces:
        compute = piece.flops / device.rate(piece.kind, dtype) if piece.kind is not WorkKind.MEMORY else 0.0
        seconds += max(compute, piece.bytes / device.memory_rate)
    return seconds * 1e9


@dataclass(frozen=True, slots=True)
class Traffic:
    """Expected bytes that the busiest rank sends in one dispatch or combine, over the network and inside its node."""

    network: float
    node: float


def dispatch_rows(feed_forward: FeedForward, nodes: tuple[int, ...]) -> Traffic:
    """Rows per token of a dispatch (or a reduced combine). ``nodes``: ranks of the EP group on each node it touches."""
    ep = sum(nodes)
    reach = [_chance(feed_forward, ranks, ep) for ranks in nodes]
    network = max(sum(reach) - own for own in reach)
    # A node's ranks spread their own tokens' rows and those that arrived, each to all ranks there but itself.
    node = max((ranks - 1) * ep / ranks for ranks in nodes) * _chance(feed_forward, 1, ep)
    return Traffic(network, node)


def combine_rows(feed_forward: FeedForward, nodes: tuple[int, ...]) -> Traffic:
    """Rows per token of a combine that returns every expert's row by itself."""
    ep, k = sum(nodes), feed_forward.top_k
    return Traffic(max(k * (ep - own) / ep for own in nodes), max(k * (own - 1) / own for own in nodes))


def group_nodes(ranks: int, gpus_per_node: int) -> tuple[tuple[int, ...], ...]:
    """How groups of ``ranks`` consecutive ranks lie on nodes: for each different position, its ranks per node."""
    positions = gpus_per_node // gcd(ranks, gpus_per_node)
    layouts: dict[tuple[int, ...], None] = {}
    for position in range(positions):
        first, left, nodes = position * ranks % gpus_per_node, ranks, []
        while left:
            here = min(left, gpus_per_node - first)
            nodes.append(here)
            first, left = 0, left - here
        layouts[tuple(sorted(nodes, reverse=True))] = None
    return tuple(layouts)


def _chance(feed_forward: FeedForward, ranks: int, ep: int) -> float:
    """Probability that at least one of K distinct random experts lives on ``ranks`` of the group's ranks."""
    experts, k = feed_forward.experts, feed_forward.top_k
    elsewhere = experts - experts // ep * ranks
    return 1.0 - prod(max(elsewhere - i, 0) / (experts - i) for i in range(k))


def _item_costs(
    model: ModelSpec, item: Item, workload: Workload, device: DeviceSpec, sms: int
) -> dict[tuple[Pass, TaskKind], TaskCost]:
    work = task_work(model, item, workload)
    recomputed = RECOMPUTED[workload.recompute]
    costs: dict[tuple[Pass, TaskKind], TaskCost] = {}
    tasks = [task for pass_ in (Pass.F, Pass.B) for task in chunk_tasks([item], pass_, tp=workload.tp).tasks]
    for task in tasks:
        if task.resource is Resource.COMM:
            costs[task.pass_, task.kind] = _comm_cost(model, item, task, workload, device, sms)
            continue
        pieces = work[task.name]
        if task.pass_ is Pass.B and task.kind in recomputed:
            pieces = work[task_name(Pass.F, task.kind, item.label)] + pieces
        costs[task.pass_, task.kind] = TaskCost(
            ns=round(work_ns(pieces, device, workload.dtype)) + device.launch_ns,
            flops=sum(piece.flops for piece in pieces),
        )
    return costs


def _comm_cost(model: ModelSpec, item: Item, task: Task, workload: Workload, device: DeviceSpec, sms: int) -> TaskCost:
    if task.kind in TP_KINDS:
        size = tp_payload(model, task, workload)
        crosses = any(len(nodes) > 1 for nodes in group_nodes(workload.tp, device.gpus_per_node))
        return _transfer(Traffic(size, 0) if crosses else Traffic(0, size), device, sms)
    assert item.layer is not None
    ff = item.layer.feed_forward
    if task.kind is TaskKind.COUNT:
        return _count_cost(ff.experts, workload, device)
    width = input_width(model, ff) * DTYPE_BYTES[workload.dtype]
    if workload.ep == 1:  # rows are put into the experts' order in device memory: read and written once
        copied = 2 * expert_rows(item, workload) * width / device.memory_rate
        return TaskCost(ns=round(copied * 1e9) + device.launch_ns)
    returning = (task.kind is TaskKind.COMB) is (task.pass_ is Pass.F)
    if returning and workload.combine == "rows":
        rows_of, row = combine_rows, width
    else:
        forward_dispatch = task.kind is TaskKind.DISP and task.pass_ is Pass.F
        rows_of, row = dispatch_rows, width + (_ROUTE_BYTES * ff.top_k if forward_dispatch else 0)
    worst = TaskCost(ns=0)
    for nodes in group_nodes(workload.ep, max(1, device.gpus_per_node // workload.tp)):
        rows = rows_of(ff, nodes)
        sent = Traffic(workload.tokens * rows.network * row, workload.tokens * rows.node * row)
        worst = max(worst, _transfer(sent, device, sms), key=lambda cost: cost.ns)
    return worst


def _transfer(sent: Traffic, device: DeviceSpec, sms: int) -> TaskCost:
    seconds = max(
        sent.network / device.inter_node.bytes_per_s,
        sent.node / device.intra_node.bytes_per_s,
        (sent.network + sent.node) / device.comm_bandwidth(sms),
    )
    latency = device.inter_node.latency_ns if sent.network else device.intra_node.latency_ns
    return TaskCost(ns=round(seconds * 1e9) + latency + device.launch_ns, bytes=round(sent.network + sent.node))


def _count_cost(experts: int, workload: Workload, device: DeviceSpec) -> TaskCost:
    """All-gather of [E] int64 over dp x ep: a latency, and a few kilobytes through the slowest link."""
    ranks = workload.dp * workload.ep
    if ranks == 1:
        return TaskCost(ns=device.launch_ns)
    crosses = any(len(nodes) > 1 for nodes in group_nodes(ranks, max(1, device.gpus_per_node // workload.tp)))
    link = device.inter_node if crosses else device.intra_node
    size = count_payload(experts, workload)
    return TaskCost(ns=round(size / link.bytes_per_s * 1e9) + link.latency_ns + device.launch_ns, bytes=size)


def _notes(model: ModelSpec, workload: Workload, device: DeviceSpec, sms: int) -> Iterator[str]:
    if device.measured:
        yield f"computed from rates of {device.title}; measured are {device.measured}; all others are assumed"
    else:
        yield f"computed from assumed rates of {device.title}; nothing was measured"
    yield "routing is balanced; every expert is as likely as any other"
    if workload.ep > 1:
        how = "summed per rank and node" if workload.combine == "reduced" else "every expert's row by itself"
        yield f"dispatch sends one row per token and node over the network; combine: {how}; {sms} SMs communicate"
    if workload.tp > 1:
        yield f"tp {workload.tp}: tokens are split between blocks (sequence parallelism), experts by ep alone"
    if workload.context > workload.tokens and any(
        item.layer is not None and item.layer.attention.kind in _CONTEXT_KINDS for item in model.items
    ):
        yield f"context {workload.context} > {workload.tokens} tokens: context-parallel traffic is not charged"
    if workload.context > model.context:
        yield f"context {workload.context} is longer than the model was made for ({model.context})"
    yield "neighbouring stages are on different nodes"
