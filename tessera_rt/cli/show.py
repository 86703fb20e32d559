"""`tessera show`: a plan, or a run: what was measured against what was planned."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tessera_rt.cli import context as cli_context
from tessera_rt.cli import tables as cli_tables
from tessera_rt.cli.context import METRICS_FILE, OVERLAP_OFF, TIMELINES, Opened
from tessera_rt.cli.output import RequestError, console, emit, ms
from tessera_rt.cli.plan import CostsFile, Json, ModelName
from tessera_rt.cli.tables import Row
from tessera_rt.errors import Problem
from tessera_rt.files.exports import megatron_layout, torchtitan_modules
from tessera_rt.files.timeline_files import load_timeline
from tessera_rt.planner.explain import assumption_lines, explain, memory_table, solver_lines
from tessera_rt.scheduler.draw import split_table, terminal_grid
from tessera_rt.scheduler.simulate import simulate
from tessera_rt.scheduler.torch_csv import plan_to_csv
from tessera_rt.tasks import Pass, parse_task_name
from tessera_rt.timeline import Timeline

EXPORTS = ("megatron", "torchtitan", "csv", "csv-comms")
"""Megatron-Core's layout, torchtitan's module lists, and the CSV of torch.distributed.pipelining, on request with
messages."""
SHOW_EXAMPLES = """\
Show a plan file, or a run: times of tasks and stages as measured against planned, step time, exposed communication, \
bubble, losses.

Examples:

  tessera show plan.yaml

  tessera show runs/hybrid_tiny

  tessera show runs/hybrid_tiny --json

  tessera show plan.yaml --export megatron
"""


def show(
    source: Annotated[str, typer.Argument(metavar="PLAN|RUN", help="Plan file, or a run folder.")],
    model: ModelName = None,
    costs: CostsFile = None,
    grid: Annotated[bool, typer.Option("--grid", help="Also draw the timelines.")] = False,
    export: Annotated[
        str | None,
        typer.Option(
            "--export",
            help=f"Print the plan for another system: {', '.join(EXPORTS)} (csv: torch.distributed.pipelining).",
        ),
    ] = None,
    json: Json = False,
) -> None:
    folder = Path(source)
    is_run = folder.is_dir() and (folder / METRICS_FILE).is_file()
    if folder.is_dir() and not (is_run or (folder / cli_context.PLAN_FILE).is_file()):
        allowed = f"a plan file, or a run folder (with {cli_context.PLAN_FILE} and {METRICS_FILE})"
        raise RequestError.of("show", [Problem("PLAN|RUN", source, allowed)])
    opened = cli_context.open_plan(source, model, costs)
    if export is not None:
        value = _exported(opened, export)
        if json:
            emit({"format": export, "value": value})
        else:
            typer.echo((value if isinstance(value, str) else json_module.dumps(value, indent=1)).rstrip("\n"))
        return
    planned = _simulated(opened)
    if is_run:
        run = Run.read(folder, opened, planned)
        if json:
            emit(run.data())
        else:
            run.print(console(), grid=grid)
    elif json:
        step = cli_tables.timeline_row(planned) if planned else None
        emit(cli_tables.plan_data(opened.plan, opened.model, opened.costs) | {"step": step})
    else:
        _print_plan(console(), opened, planned, grid=grid)


def _exported(opened: Opened, form: str) -> str | list[list[str]]:
    """A plan as text (torchtitan: module names of every stage). Raises PlanError for what that system cannot hold."""
    if form not in EXPORTS:
        raise RequestError.of("show", [Problem("--export", form, f"one of {', '.join(EXPORTS)}")])
    if form.startswith("csv"):
        return plan_to_csv(opened.plan, comms=form == "csv-comms")
    if opened.model is None:
        raise RequestError.of("show", [Problem("--export", form, "of a plan whose model is known", opened.missing)])
    if form == "megatron":
        return megatron_layout(opened.plan, opened.model)
    return torchtitan_modules(opened.plan, opened.model)


def _simulated(opened: Opened) -> Timeline | None:
    if opened.model is None or opened.costs is None:
        return None
    label = "planned" if opened.overlap else "planned, no overlap"
    return simulate(opened.plan, opened.model, opened.costs, overlap=opened.overlap, label=label)


def _print_plan(out: Console, opened: Opened, planned: Timeline | None, *, grid: bool) -> None:
    if opened.model is not None and opened.costs is not None:
        out.print(explain(opened.plan, opened.model, opened.costs))
    else:
        out.print(cli_tables.plain_stage_table(opened.plan))
        out.print(memory_table(opened.plan))
        for line in (*solver_lines(opened.plan), *assumption_lines(opened.plan)):
            out.print(line)
        out.print(f"times of stages are not shown: {opened.missing}")
    out.print(cli_tables.edge_table(opened.plan))
    if planned is not None:
        out.print(split_table(planned))
        if grid:
            out.print(terminal_grid(planned, out.width))


# -- runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run folder holds. ``measured``: the last recorded step; ``planned``: the same step simulated."""

    folder: Path
    opened: Opened
    planned: Timeline | None
    measured: Timeline | None
    training: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, folder: Path, opened: Opened, planned: Timeline | None) -> Run:
        rows = _metrics(folder / METRICS_FILE)
        recorded = sorted((folder / TIMELINES).glob("step-*.json"))
        return cls(
            folder=folder,
            opened=opened,
            planned=planned,
            measured=load_timeline(recorded[-1]) if recorded else None,
            training=[row for row in rows if row["kind"] == "train"],
            evaluations=[row for row in rows if row["kind"] == "evaluate"],
        )

    def stage_rows(self) -> list[Row]:
        """One row per stage and pass: compute time of a micro-batch, planned and measured."""
        planned = cli_tables.pass_times(self.planned) if self.planned else {}
        measured = cli_tables.pass_times(self.measured) if self.measured else {}
        keys = sorted({*planned, *measured}, key=lambda key: (key[0], list(Pass).index(key[1])))
        return [
            {
                "stage": stage,
                "rank": self.opened.plan.stages[stage].rank,
                "pass": str(pass_),
                "planned_ns": planned.get((stage, pass_)),
                "measured_ns": measured.get((stage, pass_)),
            }
            for stage, pass_ in keys
        ]

    def task_rows(self) -> list[Row]:
        """One row per kind of task: mean over layers and micro-batches, planned and measured."""
        planned = _by_kind(cli_tables.task_times(self.planned)) if self.planned else {}
        measured = _by_kind(cli_tables.task_times(self.measured)) if self.measured else {}
        return [
            {"task": name, "planned_ns": planned.get(name), "measured_ns": measured.get(name)}
            for name in dict.fromkeys((*planned, *measured))
        ]

    def step_rows(self) -> list[Row]:
        """Planned and measured step: time, exposed communication, bubble."""
        return [cli_tables.timeline_row(timeline) for timeline in (self.planned, self.measured) if timeline]

    def summary(self) -> Row:
        """Losses and the median step time."""
        losses = [row["loss"] for row in self.training]
        held_out = [row["held_out_loss"] for row in self.evaluations]
        times = sorted(int(row["step_ns"]) for row in self.training)
        return {
            "steps": len(self.training),
            "first_loss": losses[0] if losses else None,
            "last_loss": losses[-1] if losses else None,
            "held_out_before": held_out[0] if held_out else None,
            "held_out_after": held_out[-1] if held_out else None,
            "median_step_ns": times[len(times) // 2] if times else None,
            "skipped": sum(bool(row["skipped"]) for row in self.training),
        }

    def notes(self) -> list[str]:
        """What a reader must know of the comparison."""
        notes = []
        if not self.opened.overlap:
            notes.append(OVERLAP_OFF)
        if self.opened.costs is not None and self.opened.costs.provenance.source == "roofline":
            name = self.opened.costs.provenance.device
            notes.append(f"planned times are computed for device {name}, not for the machine that ran")
        return notes

    def data(self) -> Row:
        """For `--json`."""
        return {
            "run": str(self.folder),
            "model": self.opened.plan.model,
            **self.summary(),
            "rows": self.stage_rows(),
            "tasks": self.task_rows(),
            "steps_compared": self.step_rows(),
            "overlap": self.opened.overlap,
            "notes": self.notes(),
            "missing": self.opened.missing,
        }

    def print(self, out: Console, *, grid: bool) -> None:
        summary = self.summary()
        out.print(f"run {self.folder}: {self.opened.plan.model}, {summary['steps']} steps", style="bold")
        for note in self.notes():
            out.print(f"note: {note}")
        out.print(_versus("Stages: compute of a micro-batch (ms)", self.stage_rows(), ("stage", "rank", "pass")))
        out.print(_versus("Tasks: mean over layers (ms)", self.task_rows(), ("task",)))
        out.print("measured collectives last from their issue to the end of the wait for them, with overlap in between")
        timelines = [timeline for timeline in (self.planned, self.measured) if timeline is not None]
        if timelines:
            out.print(split_table(timelines))
        if self.opened.missing:
            out.print(f"the plan could not be simulated: {self.opened.missing}")
        if summary["median_step_ns"] is not None:
            out.print(f"median step of the run: {ms(summary['median_step_ns'])} ms (optimizer and gradients included)")
        for name, before, after in (
            ("loss", summary["first_loss"], summary["last_loss"]),
            ("held-out loss", summary["held_out_before"], summary["held_out_after"]),
        ):
            if before is not None and after is not None:
                out.print(f"{name}: {before:.4f} -> {after:.4f} ({100 * (after / before - 1):+.1f} %)")
        if summary["skipped"]:
            out.print(f"{summary['skipped']} steps were skipped: their gradients were not finite")
        if grid and timelines:
            out.print(terminal_grid(timelines, out.width))


def _metrics(path: Path) -> list[Mapping[str, Any]]:
    """The rows of a metrics file; a last line that was cut off is left out. Raises RequestError for other faults."""
    rows: list[Mapping[str, Any]] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json_module.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and "kind" in row:
            rows.append(row)
        elif number < len(lines):
            raise RequestError.of(str(path), [Problem(f"line {number}", line, "a row of metrics (JSON)")])
    return rows


def _by_kind(times: Mapping[str, int]) -> dict[str, int]:
    """Mean over layers of each kind of task."""
    groups: dict[str, list[int]] = {}
    for name, ns in times.items():
        pass_, kind, _ = parse_task_name(name)
        groups.setdefault(f"{pass_}_{kind}", []).append(ns)
    return {name: round(sum(group) / len(group)) for name, group in groups.items()}


def _versus(title: str, rows: Sequence[Row], names: Sequence[str]) -> Table:
    """Rows with planned_ns and measured_ns, and their ratio."""
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name, justify="left" if name in ("pass", "task") else "right")
    for name in ("planned", "measured", "measured / planned"):
        table.add_column(name, justify="right")
    for row in rows:
        planned, measured = row["planned_ns"], row["measured_ns"]
        cells = ["-" if ns is None else ms(ns) for ns in (planned, measured)]
        ratio = f"{measured / planned:.2f}" if planned and measured is not None else "-"
        table.add_row(*(str(row[name]) for name in names), *cells, ratio)
    return table
