"""Step time of every schedule over the lower bound, by simulation: what hiding expert-parallel communication is worth.

    python bench/bench_schedules.py [--quick] [--only MODEL ...] [--parts 32 64 sensitivity] [--evaluations N]

For each model: 8 pipeline ranks, 32 expert-parallel ranks, computed costs of the H800's device file (assumed rates,
nothing measured), a combine that sums on the way. Others' schedules have serial-balanced partitions; ours are tuned to
the simulated step, each line with one ingredient more. Lower bound: all compute without contention, spread evenly.
Exposed: compute idles while a collective of its rank runs; bubble: all other idle time; both as means over ranks;
imbalance: the part of the bubble between the first backward and the last forward. Held: most activations and pending
weight gradients that a rank keeps, over those of Megatron's fixed order; lines above 1.25 do not count as ours.

Writes results/schedules.json after every part and results/schedules.png. ``--only``, ``--parts``: these models, these
parts of their results; others keep what the file has. ``--quick``: one model, 16 micro-batches, no files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from tessera_rt.cli.tables import rates
from tessera_rt.cost_sources.device import DeviceSpec, load_device
from tessera_rt.cost_sources.roofline import roofline_costs
from tessera_rt.costs import CostTable, Workload
from tessera_rt.files.model_files import load_model
from tessera_rt.model_spec import ModelSpec
from tessera_rt.planner.compare_schedules import MOST_HELD, OUR_TITLES, SCHEDULES, Compared, Known, compare
from tessera_rt.tasks import TaskKind, parse_task_name

RESULTS = Path(__file__).with_name("results")
DEVICE = "h800"
PP, EP = 8, 32
NO_OVERLAP, FIXED, ZB_V = "interleaved 1F1B, no overlap", "Megatron's fixed pair order", "ZB-V"
SENSITIVITY = "sensitivity"
PARTS = ("64", "32", SENSITIVITY)
EVALUATIONS, SEEDS = 1600, 3
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model under a workload."""

    name: str
    preset: str
    tokens: int
    context: int
    vpp: int

    @property
    def workload(self) -> Workload:
        return Workload(tokens=self.tokens, context=self.context, ep=EP, combine="reduced")


SUBJECTS = (
    Subject("Qwen3-Next 8K", "qwen3-next-80b", 8192, 8192, 2),
    Subject("Qwen3-Next 64K", "qwen3-next-80b", 8192, 65536, 2),
    Subject("Qwen3-235B 8K", "qwen3-235b-a22b", 8192, 8192, 4),
    Subject("DeepSeek-V3 4K", "deepseek-v3", 4096, 4096, 4),
)
TARGETS = {
    "Qwen3-Next 8K": (1.58, 8.5, 36, 1.30),
    "Qwen3-Next 64K": (1.47, 12, 25, 1.23),
    "Qwen3-235B 8K": (1.37, 6, 28, 1.12),
    "DeepSeek-V3 4K": (1.27, 2.5, 22, 1.11),
}
"""At 64 micro-batches: speed-up on no overlap, % saved on the fixed order and on ZB-V, step over the lower bound."""
TITLES = {
    subject.name: "DualPipeV" if subject.preset == "qwen3-next-80b" else "interleaved 1F1B" for subject in SUBJECTS
}
"""Which of our orders a sensitivity is given for."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one model, 16 micro-batches, no files")
    parser.add_argument("--only", nargs="+", choices=[s.name for s in SUBJECTS], help="these models only")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="these parts only")
    parser.add_argument(
        "--evaluations", type=int, default=EVALUATIONS, help=f"partitions tried for each tuned line, {SEEDS} times"
    )
    given = parser.parse_args(arguments)
    device, out = load_device(DEVICE), Console(width=170)
    out.print(
        f"Assumed: {device.title} of {DEVICE}.yaml, {PP} pipeline x {EP} expert-parallel ranks; nothing measured."
    )
    out.print("No recomputation; memory is reported, not limited. Combine reduced; contention as in the device file.")
    if given.quick:
        report(rows_of(SUBJECTS[0], device, 16, min(given.evaluations, 50), 1, Known()), out)
        return
    known = {subject.name: Known() for subject in SUBJECTS}
    for part in given.parts:
        for subject in SUBJECTS:
            if given.only and subject.name not in given.only:
                continue
            began = time.process_time()
            if part == SENSITIVITY:
                rows = sensitivity_of(subject, device, given.evaluations // 4)
                out.print(sensitivity_table(rows))
            else:
                rows = rows_of(subject, device, int(part), given.evaluations, SEEDS, known[subject.name])
                report(rows, out)
            seconds = time.process_time() - began
            out.print(f"{subject.name}, {part}: {seconds:.0f} s of CPU")
            save(subject, part, rows, seconds, device)
    draw([row for row in saved()["rows"] if row["microbatches"] == 64], RESULTS / "schedules.png")


def report(rows: Sequence[Row], out: Console) -> None:
    out.print(table_of(rows))
    out.print(*claims(rows), sep="\n", style="bold")


def rows_of(
    subject: Subject, device: DeviceSpec, microbatches: int, evaluations: int, seeds: int, known: Known
) -> list[Row]:
    """The rows of a model. ``known``: of its rows for other numbers of micro-batches."""
    model, costs = costs_of(subject, device)
    found = [
        row_of(subject, compared, device, model)
        for compared in compare(
            model,
            costs,
            pp=PP,
            vpp=subject.vpp,
            microbatches=microbatches,
            evaluations=evaluations,
            seeds=seeds,
            known=known,
        )
    ]
    fixed = next(row["activation_bytes"] for row in found if row["schedule"] == FIXED)
    return [
        {**row, "held_over_fixed": row["activation_bytes"] / fixed, "evaluations": evaluations * seeds} for row in found
    ]


def costs_of(subject: Subject, device: DeviceSpec) -> tuple[ModelSpec, CostTable]:
    model = load_model(subject.preset)
    return model, roofline_costs(model, subject.workload, device)


def row_of(subject: Subject, compared: Compared, device: DeviceSpec, model: ModelSpec) -> Row:
    split, step = compared.timeline.mean_split(), compared.timeline.step_ns
    return {
        "model": subject.name,
        "microbatches": compared.microbatches,
        "schedule": compared.schedule.name,
        "template": compared.schedule.template,
        "simulate_only": compared.schedule.simulate_only,
        "vpp": compared.vpp,
        "step_ns": step,
        "lower_bound_ns": compared.lower_bound_ns,
        "ratio": compared.ratio,
        "compute_ns": split.compute_ns,
        "exposed_ns": split.exposed_ns,
        "bubble_ns": split.bubble_ns,
        "warmup_ns": split.warmup_ns,
        "imbalance_ns": split.imbalance_ns,
        "cooldown_ns": split.cooldown_ns,
        "held": compared.held,
        "activation_bytes": compared.activation_bytes,
        "peak_bytes": compared.peak_bytes,
        "bounds": compared.bounds,
        **rates(
            model,
            subject.workload,
            compared.microbatches,
            ranks=PP,
            step_ns=step,
            peak=device.peak_flops[subject.workload.dtype],
        ),
    }


def table_of(rows: Sequence[Row]) -> Table:
    first = rows[0]
    table = Table(title=f"{first['model']}, {first['microbatches']} micro-batches", title_justify="left")
    table.add_column("schedule (* simulate-only)", no_wrap=True)
    for name in (
        "stages a rank",
        "step ms",
        "/ lower bound",
        "exposed %",
        "bubble %",
        "imbalance %",
        "held / fixed",
        "peak GiB",
        "MFU %",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["schedule"] + (" *" if row["simulate_only"] else ""),
            str(row["vpp"]),
            f"{row['step_ns'] / 1e6:.0f}",
            f"{row['ratio']:.3f}",
            f"{100 * row['exposed_ns'] / row['step_ns']:.1f}",
            f"{100 * row['bubble_ns'] / row['step_ns']:.1f}",
            f"{100 * row['imbalance_ns'] / row['step_ns']:.1f}",
            f"{row['held_over_fixed']:.2f}",
            f"{row['peak_bytes'] / 2**30:.0f}",
            f"{100 * row['mfu']:.1f}",
        )
    return table


def ours(rows: Sequence[Row], *, can_run: bool) -> Row:
    """The fastest of our tuned lines that holds at most MOST_HELD times what the fixed order does."""
    allowed = [
        row
        for row in rows
        if any(row["schedule"].startswith(f"{title}, tuned") for title in OUR_TITLES)
        and "tapered" not in row["schedule"]  # it changes the batch
        and row["held_over_fixed"] <= MOST_HELD
        and not (can_run and row["simulate_only"])
    ]
    return min(allowed, key=lambda row: int(row["step_ns"]))


def claims(rows: Sequence[Row]) -> list[str]:
    """What our best lines save against what people run, beside the targets."""
    step = {row["schedule"]: row["step_ns"] for row in rows}
    lines = []
    for can_run in (True, False):
        best = ours(rows, can_run=can_run)
        lines.append(
            f"{'can run' if can_run else 'simulated'}: {best['schedule']}: "
            f"{step[NO_OVERLAP] / best['step_ns']:.3f} times as fast as interleaved 1F1B without overlap; "
            f"{100 * (1 - best['step_ns'] / step[FIXED]):.1f} % of the step saved on the fixed order, "
            f"{100 * (1 - best['step_ns'] / step[ZB_V]):.1f} % on ZB-V; {best['ratio']:.3f} times the lower bound"
        )
    model = rows[0]["model"]
    if rows[0]["microbatches"] == 64 and model in TARGETS:
        speed, fixed, zb_v, ratio = TARGETS[model]
        lines.append(f"targets: {speed} times; {fixed} %, {zb_v} %; {ratio} times the lower bound")
    return lines


def sensitivity_of(subject: Subject, device: DeviceSpec, evaluations: int) -> list[Row]:
    """The main ratios with communication 20 % slower and faster, and with compute so; of ours the order of
    TITLES, tuned anew each time, with MoE halves and without."""
    model, costs = costs_of(subject, device)
    title = TITLES[subject.name]
    names = {NO_OVERLAP, FIXED, ZB_V, f"{title}, tuned, W pool", f"{title}, tuned, W pool, MoE halves"}
    chosen = [schedule for schedule in SCHEDULES if schedule.name in names]
    rows: list[Row] = []
    for comm, comp in ((0.8, 1.0), (1.2, 1.0), (1.0, 0.8), (1.0, 1.2)):
        found = [
            row_of(subject, compared, device, model)
            for compared in compare(
                model,
                scaled_costs(costs, comm, comp),
                pp=PP,
                vpp=subject.vpp,
                microbatches=32,
                schedules=chosen,
                evaluations=evaluations,
            )
        ]
        rows.append(
            {
                "model": subject.name,
                "communication": comm,
                "compute": comp,
                "microbatches": 32,
                **{row["schedule"]: row["step_ns"] for row in found},
                "lower_bound_ns": found[0]["lower_bound_ns"],
                "ours, can run": min(row["step_ns"] for row in found if row["schedule"].endswith("W pool")),
                "ours, simulated": min(row["step_ns"] for row in found if "W pool" in row["schedule"]),
            }
        )
    return rows


def scaled_costs(costs: CostTable, comm: float, comp: float) -> CostTable:
    """Durations of all collectives times ``comm``, of all compute tasks times ``comp``."""

    def factor(kind: TaskKind) -> float:
        return comm if kind.resource == "COMM" else comp

    tasks = {
        name: replace(cost, ns=round(cost.ns * factor(parse_task_name(name)[1]))) for name, cost in costs.tasks.items()
    }
    return replace(costs, tasks=tasks)


def sensitivity_table(rows: Sequence[Row]) -> Table:
    table = Table(title="Costs off by 20 %, 32 micro-batches (can run; simulated)", title_justify="left")
    for name in (
        *("model", "communication x", "compute x"),
        *("speed-up on no overlap", "saved on fixed %", "on ZB-V %", "/ lower bound"),
    ):
        table.add_column(name, justify="left" if name == "model" else "right")
    for row in rows:
        both = [row["ours, can run"], row["ours, simulated"]]
        table.add_row(
            row["model"],
            f"{row['communication']:.1f}",
            f"{row['compute']:.1f}",
            "; ".join(f"{row[NO_OVERLAP] / step:.2f}" for step in both),
            "; ".join(f"{100 * (1 - step / row[FIXED]):.1f}" for step in both),
            "; ".join(f"{100 * (1 - step / row[ZB_V]):.1f}" for step in both),
            "; ".join(f"{step / row['lower_bound_ns']:.3f}" for step in both),
        )
    return table


def saved() -> dict[str, Any]:
    """What the results file has; of an older form: nothing."""
    path = RESULTS / "schedules.json"
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return data if "cpu_seconds" in data else {"rows": [], "sensitivity": [], "cpu_seconds": {}}


def save(subject: Subject, part: str, rows: Sequence[Row], seconds: float, device: DeviceSpec) -> None:
    """Puts a part of a model's results into the file, in place of what it had."""
    assumptions = {
        "device": device.title,
        "device_file": f"{DEVICE}.yaml",
        "pipeline_ranks": PP,
        "expert_parallel_ranks": EP,
        "combine": "reduced",
        "recompute": "none",
        "contention": device.contention,
        "not_modelled": "network shared by messages and collectives, launches between tasks, optimizer, data-parallel "
        "reduction, context-parallel traffic at 64K",
        "moe_halves": "experts 5 % longer; hidden communication counts as compute; simulate-only",
        "simulated_on": f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in ("numpy", "numba", "scipy")),
        "subjects": {
            s.name: {"preset": s.preset, "tokens": s.tokens, "context": s.context, "vpp": s.vpp} for s in SUBJECTS
        },
    }
    before, order = saved(), [s.name for s in SUBJECTS]
    name = "sensitivity" if part == SENSITIVITY else "rows"
    counts = {row["microbatches"] for row in rows}
    kept = [row for row in before[name] if row["model"] != subject.name or row["microbatches"] not in counts]
    merged = sorted([*kept, *rows], key=lambda row: (order.index(row["model"]), row["microbatches"]))
    seconds_of = {**before["cpu_seconds"], f"{subject.name}, {part}": round(seconds)}
    data = {**before, "assumptions": assumptions, "cpu_seconds": seconds_of, name: merged}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "schedules.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def draw(rows: Sequence[Row], path: Path) -> None:
    """One panel a model: each schedule's step over the lower bound, split into compute, exposed and bubble."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(15, 5 * len(models) / 2 + 1.5), layout="constrained")
    panels = figure.subplots((len(models) + 1) // 2, 2, squeeze=False)
    for panel, name in zip(panels.flat, models, strict=False):
        mine = [row for row in rows if row["model"] == name][::-1]
        labels = [row["schedule"] + (" *" if row["simulate_only"] else "") for row in mine]
        left = [0.0] * len(mine)
        for part, color in (("compute", "#4c72b0"), ("exposed", "#dd8452"), ("bubble", "#cccccc")):
            widths = [row[f"{part}_ns"] / row["lower_bound_ns"] for row in mine]
            panel.barh(labels, widths, left=left, color=color, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for i, row in enumerate(mine):
            panel.text(left[i] + 0.02, i, f"{row['ratio']:.2f}", va="center", fontsize=8)
        panel.set_xlim(0, 1.12 * max(left))
        panel.axvline(1.0, color="black", linewidth=0.8)
        panel.set_title(f"{name}, {mine[0]['microbatches']} micro-batches", loc="left", fontsize=10)
        panel.tick_params(labelsize=8)
        panel.set_xlabel("step time / lower bound", fontsize=8)
    for panel in list(panels.flat)[len(models) :]:
        panel.axis("off")
    panels.flat[0].legend(loc="lower right", fontsize=8)
    figure.suptitle("Simulated steps on assumed H800 costs; * cannot be run", fontsize=11)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
