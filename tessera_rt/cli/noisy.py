"""What `tessera simulate` says beyond the plan's own timeline: noise, filling, memory, sensitivity."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from tessera_rt.cli.output import RequestError, gib, ms
from tessera_rt.cli.tables import Row, split_row
from tessera_rt.costs import CostTable
from tessera_rt.errors import Problem
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Plan
from tessera_rt.planner.sensitivity import ErrorEffect, sensitivity
from tessera_rt.scheduler.bubble_filling import BubbleFilling
from tessera_rt.scheduler.noise import Jitter, RoutingNoise, Rows, draw_rows, load_counts
from tessera_rt.scheduler.replicas import ReplicaRun, prepare, simulate_replicas
from tessera_rt.timeline import MemorySeries, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseRequest:
    """What was asked for; None: not said."""

    noise: float | None
    counts: Path | None
    jitter: float | None
    seed: int
    dbo: bool
    fit_factor: float | None
    pool_tasks: int | None
    pool_bytes: int | None
    replicas: int | None

    @property
    def asked(self) -> bool:
        """Whether replicas are to be simulated at all. Raises RequestError for options that go with others."""
        if self.noise is not None and self.counts is not None:
            raise RequestError.of("simulate", [Problem("--noise", self.noise, "left out when --counts is given")])
        given = (
            ("--fit-factor", self.fit_factor),
            ("--pool-tasks", self.pool_tasks),
            ("--pool-bytes", self.pool_bytes),
        )
        problems = [
            Problem(name, value, "left out without --dbo")
            for name, value in given
            if value is not None and not self.dbo
        ]
        if self.counts is not None and self.replicas is not None:
            problems.append(
                Problem("--replicas", self.replicas, "left out with --counts, which say how many there are")
            )
        if problems:
            raise RequestError.of("simulate", problems)
        return any((self.noise is not None, self.counts, self.jitter is not None, self.dbo, self.replicas is not None))


@dataclass(frozen=True, kw_only=True)
class Noisy:
    """The steps of all replicas without filling, and with it; the same without noise."""

    rows: Rows | None
    run: ReplicaRun
    filled: ReplicaRun | None
    planned_ns: int
    control_ns: int | None
    filling: BubbleFilling | None

    @property
    def shown(self) -> ReplicaRun:
        return self.filled or self.run

    @property
    def timeline(self) -> Timeline:
        timeline = self.shown.timeline
        assert timeline is not None
        return timeline


def simulate_noise(
    request: NoiseRequest,
    plan: Plan,
    model: ModelSpec,
    costs: CostTable,
    *,
    overlap: bool,
    contention: float | None,
) -> Noisy:
    """The replicas of a plan; the timeline is that of the slowest one's first rank of the EP group."""
    program = prepare(plan, model, costs, overlap=overlap, contention=contention)
    replicas = plan.mesh.dp if request.replicas is None else request.replicas
    rows: Rows | None = None
    if request.counts is not None:
        if plan.tapered:
            allowed = "left out for a plan with tapered ends: counts are recorded of micro-batches of one size"
            raise RequestError.of("simulate", [Problem("--counts", request.counts, allowed, "use --noise")])
        rows = load_counts(request.counts, model, costs.workload, microbatches=plan.microbatches)
    elif request.noise is not None:
        noise = RoutingNoise(lane_cv=request.noise)
        rows = draw_rows(model, costs.workload, noise, microbatches=plan.passes, replicas=replicas, seed=request.seed)
    jitter = None if request.jitter is None else Jitter(amount=request.jitter)
    ep = plan.mesh.ep

    def run(filling: BubbleFilling | None, deadline: int | None, slowest: int = 0) -> ReplicaRun:
        return simulate_replicas(
            program,
            replicas=replicas,
            ep=ep,
            rows=rows,
            jitter=jitter,
            filling=filling,
            deadline_ns=deadline,
            seed=request.seed,
            record=(slowest, 0),
            label=f"{plan.template}, slowest replica" + (", W in idle time" if filling else ""),
        )

    plain = run(None, None)
    slowest = int(np.argmax(plain.steps_ns))
    if not request.dbo:
        return Noisy(
            rows=rows,
            run=run(None, None, slowest) if slowest else plain,
            filled=None,
            planned_ns=program.planned_ns,
            control_ns=None,
            filling=None,
        )
    usual = BubbleFilling()
    filling = BubbleFilling(
        fit=usual.fit if request.fit_factor is None else request.fit_factor,
        pool_tasks=usual.pool_tasks if request.pool_tasks is None else request.pool_tasks,
        pool_bytes=_headroom(plan) if request.pool_bytes is None else request.pool_bytes,
    )
    return Noisy(
        rows=rows,
        run=plain,
        filled=run(filling, plain.step_ns, slowest),
        planned_ns=program.planned_ns,
        control_ns=simulate_replicas(program, filling=filling).step_ns,
        filling=filling,
    )


def _headroom(plan: Plan) -> int | None:
    """Bytes that every rank has left under the plan's limit; None without a limit."""
    left = [memory.limit - memory.peak for memory in plan.memory if memory.limit]
    return max(0, min(left)) if left else None


def noise_row(noisy: Noisy) -> Row:
    """``noisy`` for machines. Gains: shares of the step that filling saves; net: without what it saves anyway."""
    run = noisy.run
    row: Row = {
        "replicas": len(run.steps_ns),
        "step_ns": run.step_ns,
        "mean_step_ns": round(float(run.steps_ns.mean())),
        "planned_step_ns": noisy.planned_ns,
        **split_row(run.mean_split()),
    }
    if noisy.rows is not None:
        row |= {"lane_cv": noisy.rows.lane_cv, "max_over_mean": noisy.rows.max_over_mean}
    if noisy.filled is not None and noisy.filling is not None and noisy.control_ns is not None:
        filled = noisy.filled
        gain = 1 - filled.step_ns / run.step_ns if run.step_ns else 0.0
        control = 1 - noisy.control_ns / noisy.planned_ns if noisy.planned_ns else 0.0
        row["dbo"] = {
            "fit_factor": noisy.filling.fit,
            "pool_tasks": noisy.filling.pool_tasks,
            "pool_bytes": noisy.filling.pool_bytes,
            "step_ns": filled.step_ns,
            **split_row(filled.mean_split()),
            "pool_peak_bytes": filled.pool_peak_bytes,
            "filled": filled.filled,
            "gain": gain,
            "control_gain": control,
            "net_gain": gain - control,
        }
    return row


def noise_table(row: Row) -> Table:
    """``noise_row`` for people."""
    table = Table(title=f"{row['replicas']} replicas; parts are means over all ranks", title_justify="left")
    for name in ("", "step ms", "compute ms", "exposed ms", "bubble ms"):
        table.add_column(name, justify="right" if name else "left")
    shown = [("as planned", {"step_ns": row["planned_step_ns"]}), ("with noise", row)]
    if "dbo" in row:
        shown.append(("and W in idle time", row["dbo"]))
    for name, values in shown:
        parts = [ms(values[part]) if part in values else "" for part in ("compute_ns", "exposed_ns", "bubble_ns")]
        table.add_row(name, ms(values["step_ns"]), *parts)
    return table


def noise_text(row: Row) -> list[str]:
    lines = []
    if "lane_cv" in row:
        lines.append(f"rows of a rank: CV {row['lane_cv']:.2f}, fullest {row['max_over_mean']:.2f} times the mean")
    if "dbo" in row:
        dbo = row["dbo"]
        lines.append(
            f"filling saves {100 * dbo['gain']:.1f} %, without noise {100 * dbo['control_gain']:.1f} %: "
            f"net {100 * dbo['net_gain']:.1f} %; {100 * dbo['filled']:.0f} % of the W tasks filled a slot, "
            f"pool up to {gib(dbo['pool_peak_bytes'])}"
        )
    return lines


def memory_rows(memory: tuple[MemorySeries, ...]) -> list[Row]:
    """Bytes over time of every rank; moments that change nothing are left out."""
    rows = []
    for series in memory:
        sizes = series.bytes
        kept = [i for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]]
        rows.append(
            {
                "rank": series.rank,
                "peak_bytes": series.peak_bytes,
                "starts_ns": [series.starts_ns[i] for i in kept],
                "held_bytes": [sizes[i] for i in kept],
            }
        )
    return rows


def memory_text(memory: tuple[MemorySeries, ...]) -> str:
    fullest = max(memory, key=lambda series: series.peak_bytes)
    at = fullest.starts_ns[fullest.bytes.index(fullest.peak_bytes)]
    return f"fullest rank: {fullest.rank}, {gib(fullest.peak_bytes)} from {ms(at)} ms on"


def sensitivity_effects(
    percent: float, plan: Plan, model: ModelSpec, costs: CostTable, contention: float | None
) -> tuple[ErrorEffect, ...]:
    """Raises RequestError for a percentage that is none."""
    if not 0 < percent < 100:
        allowed = "a percentage above 0 and below 100"
        raise RequestError.of("simulate", [Problem("--sensitivity", percent, allowed)])
    return sensitivity(plan, model, costs, error=percent / 100, contention=contention)


def sensitivity_rows(effects: tuple[ErrorEffect, ...]) -> list[Row]:
    return [
        {
            "kind": effect.kind,
            "error": effect.error,
            "step_ns": effect.step_ns,
            "best_step_ns": effect.best_ns,
            "best": effect.best,
            "regret": effect.regret,
            "changes_at": effect.changes_at,
        }
        for effect in effects
    ]


def sensitivity_table(effects: tuple[ErrorEffect, ...]) -> Table:
    table = Table(title="If a kind of task took longer or shorter than its cost", title_justify="left")
    for name in ("kind", "error %", "step ms", "best partition then", "would save %", "from % on"):
        table.add_column(name, justify="left" if name in ("kind", "best partition then") else "right")
    for effect in effects:
        table.add_row(
            effect.kind,
            f"{100 * effect.error:+.0f}",
            ms(effect.step_ns),
            effect.best,
            f"{100 * effect.regret:.2f}",
            "" if effect.changes_at is None else f"{100 * effect.changes_at:+.0f}",
        )
    return table
