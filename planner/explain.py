"""A plan in words and tables: rows of plain data (times in fields ending ``_ns``, memory in ``_bytes``), and for rich.

Nothing is computed here that the plan and its costs do not already say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tessera_rt.costs import CostTable
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Plan
from tessera_rt.scheduler.graphs import chunk_graph
from tessera_rt.scheduler.part_costs import SMALL_OVERHEAD
from tessera_rt.tasks import Pass

Row = dict[str, Any]

_STATUS = MappingProxyType(
    {
        "optimal": "optimal",
        "optimal-in-window": "optimal among partitions with boundaries near the balanced ones (see --window)",
        "incumbent": "the best when the time was up (see --time-limit)",
        "heuristic": "heuristic",
    }
)
"""``SolverStatus.status`` in words."""
_METHODS = MappingProxyType(
    {
        "exact": "exact (proven shortest)",
        "contended": "chosen for compute that communication slows down",
        "defer": "by +Defer",
        "align": "by +Align",
        "fifo": "by FIFO",
        "megatron": "in Megatron-Core's order",
        "given": "given",
    }
)
"""``Interleaving.method`` in words."""


def stage_rows(plan: Plan, model: ModelSpec, costs: CostTable) -> list[Row]:
    """One row per stage: its rank, items, serial time of F, B (inputs) and W, micro-batches in flight, rank's peak."""
    rows: list[Row] = []
    for stage in plan.stages:
        backward = chunk_graph(model, costs, stage.start, stage.stop, Pass.B).tasks
        rows.append(
            {
                "stage": stage.index,
                "rank": stage.rank,
                "items": item_names(model, stage.start, stage.stop),
                "f_ns": chunk_graph(model, costs, stage.start, stage.stop, Pass.F).total_ns(),
                "b_ns": sum(task.ns for task in backward if task.pass_ is Pass.B),
                "w_ns": sum(task.ns for task in backward if task.pass_ is Pass.W),
                "in_flight": stage.slots,
                "rank_peak_bytes": plan.memory[stage.rank].peak,
                "limit_bytes": plan.memory[stage.rank].limit,
            }
        )
    return rows


def memory_rows(plan: Plan) -> list[Row]:
    """One row per pipeline rank: what its memory is made of at its fullest moment."""
    return [
        {
            "rank": rank,
            "weights_bytes": memory.weights,
            "gradients_bytes": memory.gradients,
            "optimizer_bytes": memory.optimizer,
            "activations_bytes": memory.activations,
            "pending_w_bytes": memory.pending_w,
            "buffers_bytes": memory.buffers,
            "peak_bytes": memory.peak,
            "limit_bytes": memory.limit,
        }
        for rank, memory in enumerate(plan.memory)
    ]


def alternative_rows(plan: Plan) -> list[Row]:
    """One row per partition that was simulated, fastest first, with its step time relative to the plan's."""
    chosen = plan.solver.step_ns
    return [
        {"partition": name, "step_ns": step, "relative": step / chosen if chosen else 1.0}
        for name, step in sorted(plan.solver.alternatives.items(), key=lambda entry: entry[1])
    ]


def item_names(model: ModelSpec, start: int, stop: int) -> str:
    """``EMBED, L0-L3``: labels of a range of items, runs of layers or MTP blocks shortened."""
    runs = [[item.label for item in run] for _, run in groupby(model.items[start:stop], key=lambda item: item.kind)]
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "(empty)"


def explain(plan: Plan, model: ModelSpec, costs: CostTable) -> RenderableType:
    """Everything a person wants to know about a plan: the result, who holds what, and what it rests on."""
    parts: list[RenderableType] = [
        Text("\n".join(solver_lines(plan))),
        stage_table(plan, model, costs),
        memory_table(plan),
    ]
    if plan.solver.alternatives:
        parts.append(alternatives_table(plan))
    return Group(*parts, Text("\n".join(assumption_lines(plan))))


def microbatches_text(plan: Plan) -> str:
    """``16 micro-batches``; with tapered ends also how many go through a stage, and how many of them are small."""
    text = f"{plan.microbatches} micro-batches"
    if plan.tapered:
        text += f", the ends tapered: {plan.passes} in all, {plan.tapered} of half size at either end"
    return text


def stage_table(plan: Plan, model: ModelSpec, costs: CostTable) -> Table:
    """``stage_rows`` for people."""
    mesh = plan.mesh
    title = (
        f"{plan.model}: {plan.template}, pp {mesh.pp} x vpp {mesh.vpp}, dp {mesh.dp}, ep {mesh.ep}, "
        f"{microbatches_text(plan)}"
    )
    rows = [
        [
            str(row["stage"]),
            str(row["rank"]),
            row["items"],
            *(milliseconds(row[name]) for name in ("f_ns", "b_ns", "w_ns")),
            str(row["in_flight"]),
            _against_limit(row["rank_peak_bytes"], row["limit_bytes"]),
        ]
        for row in stage_rows(plan, model, costs)
    ]
    names = ("stage", "rank", "items", "F ms", "B ms", "W ms", "in flight", "rank's memory GiB")
    return _table(title, names, rows, left=("items",))


def memory_table(plan: Plan) -> Table:
    """``memory_rows`` for people, in GiB."""
    rows = [
        [str(row["rank"]), *(gibibytes(value) for name, value in row.items() if name not in ("rank", "limit_bytes"))]
        for row in memory_rows(plan)
    ]
    names = ("rank", "weights", "gradients", "optimizer", "activations", "pending W", "buffers", "peak")
    return _table("memory of each rank at its fullest moment, GiB", names, rows)


def alternatives_table(plan: Plan) -> Table:
    """``alternative_rows`` for people."""
    rows = [
        [row["partition"], milliseconds(row["step_ns"]), f"{row['relative']:.3f}"] for row in alternative_rows(plan)
    ]
    return _table("simulated step of other partitions", ("partition", "step ms", "relative"), rows, left=("partition",))


def solver_lines(plan: Plan) -> tuple[str, ...]:
    """The step, its bottleneck and how the partition was found."""
    solver = plan.solver
    where = f" at ({solver.bottleneck})" if solver.bottleneck else ""
    kind = "overlap pair" if solver.bottleneck else "forward and backward of a stage"
    return (
        f"simulated step: {milliseconds(solver.step_ns)} ms, with contention {plan.assumptions.contention:g}; "
        "T_dom and the makespans of pairs are without contention",
        f"bottleneck: {kind}{where} takes T_dom = {milliseconds(solver.t_dom_ns)} ms; no partition has less than "
        f"{milliseconds(solver.bound_ns)} ms (gap {solver.gap:.1%})",
        f"partition: objective {solver.objective}, {solver.method}, {_STATUS[solver.status]}, {solver.seconds:.1f} s",
        f"interleavings: {interleaving_line(plan)}",
    )


def interleaving_line(plan: Plan) -> str:
    """How many interleavings are whose, and how far those that are not the proven optimum may be from it."""
    entries = [entry for entry in plan.interleavings.values() if entry.order]
    counts = Counter(entry.method for entry in entries)
    parts = [f"{count} {_METHODS.get(method, method)}" for method, count in sorted(counts.items())]
    open_ones = [entry for entry in entries if 0 < entry.bound_ns < entry.makespan_ns]
    if open_ones:
        gap = max(entry.makespan_ns / entry.bound_ns - 1 for entry in open_ones)
        parts.append(f"without contention at most {gap:.1%} longer than the proven bound")
    return ", ".join(parts) or "none"


def assumption_lines(plan: Plan) -> tuple[str, ...]:
    """What the plan was computed with."""
    workload, assumed = plan.workload, plan.assumptions
    lines = [
        f"workload: {workload.tokens} tokens per micro-batch on a rank, context {workload.context}, {workload.dtype}, "
        f"recomputation {workload.recompute}, {workload.optimizer}{' with momentum' if workload.momentum else ''}"
        f"{' (sharded)' if workload.shard_optimizer else ''}, combine {workload.combine}",
        f"costs: {assumed.source}, device {assumed.device}, {assumed.comm_sms} communication SMs, "
        f"contention {assumed.contention:g}",
        *assumed.notes,
    ]
    if plan.shadows:
        lines.append(f"shadow micro-batches left out: {plan.shadows}")
    if plan.tapered:
        lines.append(
            f"tapered ends: {2 * plan.tapered} micro-batches of {workload.tokens // 2} tokens in place of "
            f"{plan.tapered} full ones; compute takes {SMALL_OVERHEAD:.0%} longer for a token of them, messages and "
            "memory count as those of full ones"
        )
    if plan.simulate_only:
        lines.append(f"can be simulated, not run yet: {', '.join(plan.simulate_only)}")
    return tuple(lines)


def milliseconds(ns: int) -> str:
    """Nanoseconds as milliseconds with enough digits to tell small ones apart."""
    return f"{ns / 1e6:.3f}"


def gibibytes(size: int) -> str:
    """Bytes as GiB."""
    return f"{size / 2**30:.2f}"


def _against_limit(peak: int, limit: int) -> str:
    return f"{gibibytes(peak)} of {gibibytes(limit)}" if limit else gibibytes(peak)


def _table(title: str, names: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        table.add_row(*row)
    return table
