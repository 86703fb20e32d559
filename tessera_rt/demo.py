"""The demo: one configuration, every station of the path printed, the run checked, schedules compared.

    model description -> costs -> overlap graph -> interleavings -> partition -> plan -> engine -> trained steps

The table of schedules comes from the emulated device: real engine and messages, virtual time. Its times say what the
plans are worth under the measured costs, whatever else this machine is busy with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tessera_rt.cli import tables as cli_tables
from tessera_rt.cli.output import ms, percent
from tessera_rt.config import TrainConfig, run_folder
from tessera_rt.cost_sources.sizes import model_parameters
from tessera_rt.costs import CostTable
from tessera_rt.emulate import Emulation, emulate_many
from tessera_rt.errors import Problem, SpecError
from tessera_rt.files.plan_files import load_plan, save_plan
from tessera_rt.files.timeline_files import load_timeline
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Interleaving, Plan
from tessera_rt.plan_check import check_plan
from tessera_rt.planner.baselines import equal_layers, serial_balanced
from tessera_rt.planner.build import plan_with
from tessera_rt.planner.explain import (
    alternatives_table,
    assumption_lines,
    memory_table,
    solver_lines,
    stage_table,
)
from tessera_rt.scheduler.draw import save_perfetto, save_picture, split_table, terminal_grid
from tessera_rt.scheduler.graphs import action_graph
from tessera_rt.scheduler.list_schedule import list_schedule
from tessera_rt.scheduler.simulate import simulate
from tessera_rt.start import Prepared, prepare, run_training
from tessera_rt.tasks import Pass, TaskGraph
from tessera_rt.timeline import Span, Timeline
from tessera_rt.train import PLAN, TIMELINES, TrainSummary

FALL = 0.3
"""Share by which losses must fall."""
FIRST_LOSS_MARGIN = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One row of the schedule table: a plan, simulated and executed on the emulated device."""

    label: str
    overlap: bool
    plan: Plan
    simulated: Timeline
    emulated: Timeline


def run_demo(config: TrainConfig, out: Console) -> bool:
    """Everything; whether all checks passed. Raises SpecError for a plan from a file, and what the stations raise."""
    if config.plan.file:
        problem = Problem("plan.file", config.plan.file, "left out", "the demo shows how a plan is made")
        raise SpecError.of("demo", [problem])
    folder = run_folder(config)
    prepared = _plan_stations(config, folder, out)
    summary = _train_station(config, prepared, folder, out)
    assert prepared.costs is not None
    schedules = compare(config, prepared.plan, prepared.costs)
    _heading(out, 8, "schedules on the emulated device (virtual time, measured costs; not this machine's speed)")
    out.print(schedule_table(schedules))
    out.print(
        "simulated and executed times come from two programs that share no timing code. no overlap: same layers, "
        "classic warm-up, one task after the other"
    )
    _picture_station(schedules[0], folder, out)
    return _print_checks(checks(config, summary, schedules), out)


# -- stations ---------------------------------------------------------------------------------------------------------


def _heading(out: Console, number: int, text: str) -> None:
    out.print()
    out.rule(f"{number}. {text}", align="left", style="dim")


def _plan_stations(config: TrainConfig, folder: Path, out: Console) -> Prepared:
    model = config.model
    _heading(out, 1, "model description")
    out.print(
        f"{model.name}: {model_parameters(model):,} parameters, hidden {model.hidden}, vocabulary {model.vocab}; "
        f"{len(model.layers)} layers: {cli_tables.contents(item for item in model.items if item.layer)}"
    )
    _heading(out, 2, "costs")
    prepared = prepare(config, say=out.print)
    plan, costs = prepared.plan, prepared.costs
    assert costs is not None, "plans from files were refused"
    out.print(cli_tables.cost_table(model, costs))
    for note in costs.provenance.notes:
        out.print(f"  {note}")
    out.print(
        f"  between pipeline ranks: {costs.link.latency_ns / 1e3:.0f} us + bytes / {_rate(costs.link.bytes_per_s)}"
    )
    _heading(out, 3, "overlap graph: which passes of which stages the order lets run together")
    out.print(cli_tables.edge_table(plan))
    _heading(out, 4, "interleavings: how the tasks of such a pair are ordered")
    for line in _interleaving_station(plan, model, costs, out):
        out.print(line)
    _heading(out, 5, "partition: which layers go together")
    if plan.solver.alternatives:
        out.print(alternatives_table(plan))
    for line in solver_lines(plan):
        out.print(line)
    _heading(out, 6, "plan")
    out.print(stage_table(plan, model, costs))
    out.print(memory_table(plan))
    for line in assumption_lines(plan):
        out.print(line)
    folder.mkdir(parents=True, exist_ok=True)
    save_plan(plan, folder / PLAN)
    check_plan(load_plan(folder / PLAN), model, world=config.mesh.world)
    out.print(f"wrote {folder / PLAN}, read it back and checked it")
    return prepared


def _interleaving_station(plan: Plan, model: ModelSpec, costs: CostTable, out: Console) -> Iterator[str]:
    """Draws the pair that gains most by alignment, by both methods."""
    bounds = [(stage.start, stage.stop) for stage in plan.stages]
    pairs = [(row["edge"], action_graph(row["edge"], model, costs, bounds)) for row in cli_tables.edge_rows(plan)]
    if not pairs:
        yield "this order has no pairs"
        return
    drawn = [
        (key, graph, list_schedule(graph, key, method="fifo"), list_schedule(graph, key, method="align"))
        for key, graph in pairs
    ]
    key, graph, fifo, align = max(drawn, key=lambda pair: pair[2].makespan_ns - pair[3].makespan_ns)
    serial = graph.total_ns()
    yield (
        f"pair {key}: one task after the other {ms(serial)} ms; FIFO {ms(fifo.makespan_ns)} ms; "
        f"aligned {ms(align.makespan_ns)} ms ({percent(serial - align.makespan_ns, serial)} saved)"
    )
    timelines = [pair_timeline(fifo, graph, f"{key} FIFO"), pair_timeline(align, graph, f"{key} aligned")]
    out.print(terminal_grid(timelines, out.width))
    yield "tasks in the aligned order: " + " ".join(align.order)


def pair_timeline(interleaving: Interleaving, graph: TaskGraph, label: str) -> Timeline:
    """An interleaving as the timeline of one rank, its forward as micro-batch 1 and its backward as micro-batch 0."""
    stage_of = {part[-1]: int(part[:-1]) for part in interleaving.key.split(";")}
    spans = [
        Span(
            rank=0,
            lane=graph.by_name[name].resource,
            name=name,
            stage=stage_of["F" if name[0] == Pass.F else "B"],
            microbatch=int(name[0] == Pass.F),
            start_ns=start,
            end_ns=start + graph.by_name[name].ns,
        )
        for name, start in zip(interleaving.order, interleaving.starts_ns, strict=True)
    ]
    return Timeline(label=label, source="planned", ranks=1, spans=tuple(spans))


def _train_station(config: TrainConfig, prepared: Prepared, folder: Path, out: Console) -> TrainSummary:
    mesh = config.mesh
    _heading(out, 7, "engine: training by the plan")
    out.print(
        f"{config.run.steps} steps on {mesh.world} local ranks (pp {mesh.pp} x dp {mesh.dp} x ep {mesh.ep}), "
        f"{config.rows_per_step * config.data.sequence:,} tokens a step"
    )
    return run_training(config, prepared, folder)


def compare(config: TrainConfig, plan: Plan, costs: CostTable) -> list[Schedule]:
    """The plan, the equal-layer split and the serial-balanced split, each with and without overlap."""
    model = config.model
    ranks = [stage.rank for stage in plan.stages]
    balanced = serial_balanced(model, costs, ranks)
    assert balanced is not None, "without a limit every partition is allowed"
    partitions = {
        "plan": (0, *(stage.stop for stage in plan.stages)),
        "equal layers": equal_layers(model, len(ranks)),
        "serial-balanced": balanced,
    }
    runs: list[Emulation] = []
    for name, bounds in partitions.items():
        for overlap in (True, False):
            made = plan_with(
                bounds,
                model,
                plan.mesh,
                costs,
                microbatches=plan.microbatches,
                template=plan.template,
                pad=plan.pad,
                joint=overlap,
            )
            runs.append(Emulation(plan=plan if name == "plan" and overlap else made, overlap=overlap, label=name))
    executed = emulate_many(runs, model, costs)
    return [
        Schedule(
            label=run.label,
            overlap=run.overlap,
            plan=run.plan,
            simulated=simulate(run.plan, model, costs, overlap=run.overlap, label=run.label),
            emulated=timeline,
        )
        for run, timeline in zip(runs, executed, strict=True)
    ]


def schedule_table(schedules: Sequence[Schedule]) -> Table:
    """Step times and where they go (of the executed timelines; mean over ranks), against the first row."""
    table = Table(title="Emulated device, virtual time", title_justify="left")
    table.add_column("partition")
    table.add_column("overlap")
    for name in ("simulated ms", "executed ms", "vs plan", "exposed", "bubble", "warm-up", "imbalance", "cool-down"):
        table.add_column(name, justify="right")
    table.add_column("T_dom ms", justify="right")
    first = schedules[0].emulated.step_ns
    for row in schedules:
        split, step = row.emulated.mean_split(), row.emulated.step_ns
        parts = (split.exposed_ns, split.bubble_ns, split.warmup_ns, split.imbalance_ns, split.cooldown_ns)
        table.add_row(
            row.label,
            "yes" if row.overlap else "no",
            ms(row.simulated.step_ns),
            ms(step),
            f"{step / first:.3f}",
            *(percent(part, step) for part in parts),
            ms(row.plan.solver.t_dom_ns),
        )
    return table


def _picture_station(chosen: Schedule, folder: Path, out: Console) -> None:
    _heading(out, 9, "timelines: planned, executed in virtual time, measured")
    measured = load_timeline(max((folder / TIMELINES).glob("step-*.json")))
    timelines = {"planned": chosen.simulated, "emulated": chosen.emulated, "measured": measured}
    out.print(split_table(list(timelines.values())))
    for name, timeline in timelines.items():
        save_picture(timeline, folder / f"{name}.png")
    save_picture(list(timelines.values()), folder / "timelines.png")
    save_perfetto(list(timelines.values()), folder / "timelines.json")
    out.print(f"pictures: {', '.join(str(folder / f'{name}.png') for name in (*timelines, 'timelines'))}")
    out.print(f"trace for https://ui.perfetto.dev: {folder / 'timelines.json'}")


# -- checks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Check:
    """Something the demo must show, and what was found."""

    passed: bool
    claim: str
    found: str


def checks(config: TrainConfig, summary: TrainSummary, schedules: Sequence[Schedule]) -> list[Check]:
    """What the run must have shown."""
    first, most = summary.first_loss, math.log(config.vocab) + FIRST_LOSS_MARGIN
    changed = summary.parameters - len(summary.unchanged)
    apart = [row for row in schedules if row.simulated.step_ns != row.emulated.step_ns]
    names = ", ".join(summary.unchanged[:5])
    return [
        Check(
            first is not None and first <= most,
            f"first loss at most ln({config.vocab}) + {FIRST_LOSS_MARGIN} = {most:.3f}",
            "none" if first is None else f"{first:.3f}",
        ),
        _falls("loss", first, summary.last_loss),
        _falls("held-out loss", summary.held_out_before, summary.held_out_after),
        Check(
            not summary.unchanged,
            "every parameter changed",
            f"{changed} of {summary.parameters}" + (f"; not {names}" if names else ""),
        ),
        Check(
            not apart,
            "simulated and executed virtual time agree to the nanosecond",
            f"in {len(schedules) - len(apart)} of {len(schedules)} schedules",
        ),
    ]


def _falls(name: str, before: float | None, after: float | None) -> Check:
    claim = f"{name} falls by at least {100 * FALL:.0f} %"
    if before is None or after is None:
        return Check(False, claim, "not measured")
    return Check(
        after <= (1 - FALL) * before, claim, f"{before:.3f} -> {after:.3f} ({100 * (after / before - 1):+.1f} %)"
    )


def _print_checks(found: Sequence[Check], out: Console) -> bool:
    out.print()
    for check in found:
        out.print(f"{'ok    ' if check.passed else 'FAILED'} {check.claim}: {check.found}")
    return all(check.passed for check in found)


def _rate(bytes_per_s: float) -> str:
    return f"({bytes_per_s / 1e9:.2f} GB/s)" if math.isfinite(bytes_per_s) else "(no limit)"
