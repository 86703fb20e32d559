"""Plans and timelines as rows for JSON, and as tables for people. Times in ns, memory in bytes, names say so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from rich.table import Table

from tessera_rt.cli.output import ms
from tessera_rt.cost_sources.device import DeviceSpec
from tessera_rt.cost_sources.sizes import task_flops
from tessera_rt.costs import CostTable, TaskCost, Workload
from tessera_rt.files.task_names import item_labels, label_range
from tessera_rt.model_spec import AttentionKind, FeedForwardKind, Item, ItemKind, ModelSpec
from tessera_rt.plan import ActionKind, Plan
from tessera_rt.planner.explain import alternative_rows, assumption_lines, memory_rows, stage_rows
from tessera_rt.tasks import Pass, Resource, chunk_tasks
from tessera_rt.timeline import StepSplit, Timeline

Row = dict[str, Any]


# -- plans ------------------------------------------------------------------------------------------------------------


def plan_data(plan: Plan, model: ModelSpec | None, costs: CostTable | None) -> Row:
    """Everything `--json` says of a plan; ``rows`` are its stages (without times where model or costs are missing)."""
    mesh, work = plan.mesh, plan.workload
    known = model is not None and costs is not None
    return {
        "model": plan.model,
        "mesh": {"pp": mesh.pp, "vpp": mesh.vpp, "dp": mesh.dp, "ep": mesh.ep, "tp": mesh.tp, "world": mesh.world},
        "template": plan.template,
        "microbatches": plan.microbatches,
        "shadows": plan.shadows,
        "tapered": plan.tapered,
        "workload": {
            "tokens": work.tokens,
            "context": work.context,
            "dtype": work.dtype,
            "recompute": str(work.recompute),
            "optimizer": work.optimizer,
        },
        "rows": stage_rows(plan, model, costs) if known and model and costs else plain_stage_rows(plan),
        "memory": memory_rows(plan),
        "solver": solver_row(plan),
        "bottleneck": bottleneck_row(plan),
        "alternatives": alternative_rows(plan),
        "edges": edge_rows(plan),
        "assumptions": list(assumption_lines(plan)),
        "simulate_only": list(plan.simulate_only),
    }


def plain_stage_rows(plan: Plan) -> list[Row]:
    """One row per stage, of what the plan alone says."""
    names = (name for entry in plan.interleavings.values() for name in entry.order)
    labels = item_labels(max((stage.stop for stage in plan.stages), default=0), names)
    return [
        {
            "stage": stage.index,
            "rank": stage.rank,
            "items": label_range(labels, stage.start, stage.stop),
            "in_flight": stage.slots,
            "rank_peak_bytes": plan.memory[stage.rank].peak,
            "limit_bytes": plan.memory[stage.rank].limit,
        }
        for stage in plan.stages
    ]


def plain_stage_table(plan: Plan) -> Table:
    """``plain_stage_rows`` for people."""
    table = Table(title=plan.model, title_justify="left")
    for name in ("stage", "rank", "items", "in flight"):
        table.add_column(name, justify="left" if name == "items" else "right")
    for row in plain_stage_rows(plan):
        table.add_row(*(str(row[name]) for name in ("stage", "rank", "items", "in_flight")))
    return table


def solver_row(plan: Plan) -> Row:
    """How the partition was found and what it is worth."""
    solver = plan.solver
    return {
        "objective": solver.objective,
        "method": solver.method,
        "status": solver.status,
        "t_dom_ns": solver.t_dom_ns,
        "bound_ns": solver.bound_ns,
        "gap": solver.gap,
        "step_ns": solver.step_ns,
        "took_ns": round(solver.seconds * 1e9),
    }


def bottleneck_row(plan: Plan) -> Row | None:
    """The overlap edge that takes T_dom, None where nothing overlaps."""
    return next((row for row in edge_rows(plan) if row["edge"] == plan.solver.bottleneck), None)


def edge_rows(plan: Plan) -> list[Row]:
    """The overlap edges with their ranks, how often each occurs in a step and what it takes; costliest first."""
    counts: Counter[str] = Counter()
    ranks: dict[str, int] = {}
    for rank, actions in enumerate(plan.actions):
        for action in actions:
            if action.kind is ActionKind.OVERLAP:
                counts[action.key] += 1
                ranks[action.key] = rank
    rows: list[Row] = [
        {
            "edge": key,
            "rank": ranks[key],
            "count": count,
            "makespan_ns": plan.interleavings[key].makespan_ns,
            "method": plan.interleavings[key].method,
        }
        for key, count in counts.items()
    ]
    return sorted(rows, key=lambda row: (-int(row["makespan_ns"]), str(row["edge"])))


def edge_table(plan: Plan, *, most: int = 16) -> Table:
    """``edge_rows`` for people."""
    rows = edge_rows(plan)
    left_out = f", the {most} costliest of {len(rows)}" if len(rows) > most else ""
    table = Table(title=f"Overlap edges: forward and backward that run together{left_out}", title_justify="left")
    for name in ("edge", "rank", "times a step", "ms", "interleaving"):
        table.add_column(name, justify="left" if name in ("edge", "interleaving") else "right")
    for row in rows[:most]:
        cells = [row["edge"], str(row["rank"]), str(row["count"]), ms(row["makespan_ns"]), row["method"]]
        table.add_row(*cells)
    return table


def figure_lines(device: DeviceSpec) -> Iterator[str]:
    """The device file's figures with their sources."""
    values: Row = {
        "sm_count": device.sm_count,
        "hbm_bytes": device.hbm_bytes,
        "hbm_bytes_per_s": device.hbm_bytes_per_s,
        "gpus_per_node": device.gpus_per_node,
        "comm_sms": device.comm_sms,
        "comm_sms_candidates": ", ".join(map(str, device.comm_sms_candidates)),
        "comm_bytes_per_sm": device.comm_bytes_per_sm,
        "contention": device.contention,
        "launch_ns": device.launch_ns,
        **{f"peak_flops.{dtype}": rate for dtype, rate in device.peak_flops.items()},
        **{f"fractions.{kind}": share for kind, share in device.fractions.items()},
    }
    for name in ("intra_node", "inter_node"):
        link = getattr(device, name)
        values |= {f"{name}.latency_ns": link.latency_ns, f"{name}.bytes_per_s": link.bytes_per_s}
    for name, source in device.sources.items():
        value = values[name]
        yield f"{name} = {value if isinstance(value, str) else format(value, 'g')} ({source})"


# -- models -----------------------------------------------------------------------------------------------------------

_SHORT = {
    AttentionKind.SOFTMAX: "softmax",
    AttentionKind.SLIDING: "sliding",
    AttentionKind.MLA: "mla",
    AttentionKind.GATED_DELTA_NET: "gdn",
    AttentionKind.MAMBA1: "mamba1",
    AttentionKind.MAMBA2: "mamba2",
}


def item_kind(item: Item) -> str:
    """``embed``, ``gdn+moe``, ``softmax+dense``, ``mtp``, ``head``."""
    if item.layer is None:
        return str(item.kind)
    attention = _SHORT.get(item.layer.attention.kind, "")
    ff = item.layer.feed_forward
    feed_forward = "" if ff.kind is FeedForwardKind.NONE else str(ff.kind)
    if ff.shared_intermediate:
        feed_forward += "(shared)"
    name = "+".join(part for part in (attention, feed_forward) if part)
    return f"mtp:{name}" if item.kind is ItemKind.MTP else name


def contents(items: Iterable[Item]) -> str:
    """``embed, 3 gdn+moe, softmax+moe``: kinds in order of their first occurrence, with their number."""
    counts = Counter(item_kind(item) for item in items)
    return ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in counts.items()) or "nothing"


def cost_rows(model: ModelSpec, costs: CostTable) -> list[Row]:
    """One row per kind of item and task: mean duration (ns) over the items of that kind, and the largest spread."""
    groups: dict[tuple[str, str], list[TaskCost]] = {}
    for item in model.items:
        for pass_ in (Pass.F, Pass.B):
            for task in chunk_tasks([item], pass_, tp=costs.workload.tp).tasks:
                key = (item_kind(item), f"{task.pass_}_{task.kind}")
                groups.setdefault(key, []).append(costs.tasks[task.name])
    return [
        {
            "item": kind,
            "task": name,
            "items": len(found),
            "duration_ns": round(sum(cost.ns for cost in found) / len(found)),
            "spread": max(cost.spread for cost in found),
            "samples": sum(cost.samples for cost in found),
        }
        for (kind, name), found in groups.items()
    ]


def cost_table(model: ModelSpec, costs: CostTable) -> Table:
    """``cost_rows`` for people: a column per kind of item, a row per task, in ms."""
    rows = cost_rows(model, costs)
    kinds = list(dict.fromkeys(str(row["item"]) for row in rows))
    cells = {(row["item"], row["task"]): ms(row["duration_ns"]) for row in rows}
    table = Table(title=f"Costs ({costs.provenance.source}, {costs.provenance.device}), ms", title_justify="left")
    table.add_column("task")
    for kind in kinds:
        table.add_column(kind, justify="right")
    for task in dict.fromkeys(str(row["task"]) for row in rows):
        table.add_row(task, *(cells.get((kind, task), "") for kind in kinds))
    return table


# -- timelines --------------------------------------------------------------------------------------------------------


def split_row(split: StepSplit) -> Row:
    """A step's parts: compute, exposed communication, bubble with its parts."""
    return {
        "compute_ns": split.compute_ns,
        "exposed_ns": split.exposed_ns,
        "bubble_ns": split.bubble_ns,
        "warmup_ns": split.warmup_ns,
        "imbalance_ns": split.imbalance_ns,
        "cooldown_ns": split.cooldown_ns,
    }


def rank_rows(timeline: Timeline) -> list[Row]:
    """One row per pipeline rank: how the step's time divides there."""
    return [{"rank": rank, **split_row(timeline.split(rank))} for rank in range(timeline.ranks)]


def timeline_row(timeline: Timeline) -> Row:
    """A whole timeline: step time, and its parts as means over ranks."""
    return {
        "label": timeline.label,
        "source": timeline.source,
        "step_ns": timeline.step_ns,
        **split_row(timeline.mean_split()),
    }


def rates(
    model: ModelSpec, workload: Workload, microbatches: int, *, ranks: int, step_ns: int, peak: float | None
) -> Row:
    """Tokens per second of all ranks, and MFU: the model's work, recomputation left out, over the ranks' peak.

    ``microbatches``: full ones, of ``workload``'s tokens each. ``ranks``: pipeline ranks. ``peak``: flops per second of
    one; None where it is not known, and then MFU is None.
    """
    if not step_ns:
        return {"tokens_per_s": None, "mfu": None}
    tokens = workload.tokens * workload.dp * workload.ep * workload.tp * microbatches
    mfu = None
    if peak is not None:
        work = sum(sum(task_flops(model, item, workload).values()) for item in model.items) * microbatches
        mfu = work * 1e9 / (step_ns * ranks * peak)
    return {"tokens_per_s": tokens * 1e9 / step_ns, "mfu": mfu}


def pass_times(timeline: Timeline) -> dict[tuple[int, Pass], int]:
    """(Stage, pass) -> mean compute time (ns) of a micro-batch."""
    total: Counter[tuple[int, Pass]] = Counter()
    seen: dict[tuple[int, Pass], set[int]] = {}
    for span in timeline.spans:
        if span.lane == Resource.COMP:
            key = (span.stage, Pass(span.name[0]))
            total[key] += span.end_ns - span.start_ns
            seen.setdefault(key, set()).add(span.microbatch)
    return {key: round(ns / len(seen[key])) for key, ns in total.items()}


def task_times(timeline: Timeline) -> dict[str, int]:
    """Task name -> mean duration (ns)."""
    total: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for span in timeline.spans:
        if span.lane in (Resource.COMP, Resource.COMM):
            total[span.name] += span.end_ns - span.start_ns
            count[span.name] += 1
    return {name: round(ns / count[name]) for name, ns in total.items()}
