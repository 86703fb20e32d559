"""Step time of every schedule over the lower bound, by simulation: what hiding expert-parallel communication is worth.

    python bench/bench_schedules.py [--quick]

For each model: 8 pipeline ranks, 32 expert-parallel ranks, computed costs of the H800's device file (assumed rates,
nothing measured), a combine that sums on the way, serial-balanced partitions. Lower bound: all compute without
contention, spread evenly. Exposed: compute idles while a collective of its rank runs; bubble: all other idle time; both
as means over ranks; imbalance: the part of the bubble between the first backward and the last forward. Held: most
micro-batches a rank keeps for its backward (half for those that wait for their W).

Writes results/schedules.json and results/schedules.png. ``--quick``: one model, 16 micro-batches, no files.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from tessera_rt.cost_sources.device import DeviceSpec, load_device
from tessera_rt.cost_sources.roofline import roofline_costs
from tessera_rt.costs import CostTable, Workload
from tessera_rt.files.model_files import load_model
from tessera_rt.model_spec import ModelSpec
from tessera_rt.planner.compare_schedules import SCHEDULES, Compared, compare
from tessera_rt.tasks import TaskKind, parse_task_name

RESULTS = Path(__file__).with_name("results")
DEVICE = "h800"
PP, EP = 8, 32
NO_OVERLAP, FIXED, ZB_V, OURS = (
    "interleaved 1F1B, no overlap",
    "Megatron's fixed pair order",
    "ZB-V",
    "interleaved 1F1B in exact pairs",
)
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model under a workload."""

    name: str
    preset: str
    tokens: int
    context: int
    vpp: int


SUBJECTS = (
    Subject("Qwen3-Next 8K", "qwen3-next-80b", 8192, 8192, 2),
    Subject("Qwen3-Next 64K", "qwen3-next-80b", 8192, 65536, 2),
    Subject("Qwen3-235B 8K", "qwen3-235b-a22b", 8192, 8192, 4),
    Subject("DeepSeek-V3 4K", "deepseek-v3", 4096, 4096, 4),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one model, 16 micro-batches, no files")
    quick = parser.parse_args(arguments).quick
    device, out = load_device(DEVICE), Console(width=144)
    out.print(
        f"Assumed: {device.title} of {DEVICE}.yaml, {PP} pipeline x {EP} expert-parallel ranks; nothing measured."
    )
    out.print("No recomputation; memory is reported, not limited. Combine reduced; contention as in the device file.")
    rows: list[Row] = []
    began = time.monotonic()
    for subject in SUBJECTS[:1] if quick else SUBJECTS:
        model, costs = costs_of(subject, device)
        for microbatches in (16,) if quick else (32, 64):
            found = [
                row_of(subject, compared, device)
                for compared in compare(model, costs, pp=PP, vpp=subject.vpp, microbatches=microbatches)
            ]
            out.print(table_of(found))
            rows += found
            out.print(*claims(found), sep="\n", style="bold")
    sensitivity = [] if quick else [row for subject in SUBJECTS for row in sensitivity_of(subject, device)]
    if sensitivity:
        out.print(sensitivity_table(sensitivity))
    out.print(f"took {time.monotonic() - began:.0f} s")
    if not quick:
        save(rows, sensitivity, device)
        draw([row for row in rows if row["microbatches"] == 64], RESULTS / "schedules.png")


def costs_of(subject: Subject, device: DeviceSpec) -> tuple[ModelSpec, CostTable]:
    model = load_model(subject.preset)
    workload = Workload(tokens=subject.tokens, context=subject.context, ep=EP, combine="reduced")
    return model, roofline_costs(model, workload, device)


def row_of(subject: Subject, compared: Compared, device: DeviceSpec) -> Row:
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
        "peak_bytes": compared.peak_bytes,
        "tokens_per_s": compared.tokens_per_s,
        "mfu": compared.mfu(device.peak_flops["bf16"]),
    }


def table_of(rows: Sequence[Row]) -> Table:
    first = rows[0]
    table = Table(title=f"{first['model']}, {first['microbatches']} micro-batches", title_justify="left")
    table.add_column("schedule (* simulate-only)")
    for name in (
        "stages a rank",
        "step ms",
        "/ lower bound",
        "exposed %",
        "bubble %",
        "imbalance %",
        "held",
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
            f"{row['held']:.1f}",
            f"{row['peak_bytes'] / 2**30:.0f}",
            f"{100 * row['mfu']:.1f}",
        )
    return table


def claims(rows: Sequence[Row]) -> list[str]:
    """What pairs in a synthesized order save against what people run."""
    step = {row["schedule"]: row["step_ns"] for row in rows}
    return [
        f"exact pairs: {step[NO_OVERLAP] / step[OURS]:.2f} times as fast as interleaved 1F1B without overlap; "
        f"{100 * (1 - step[OURS] / step[FIXED]):.1f} % of the step saved on the fixed order, "
        f"{100 * (1 - step[OURS] / step[ZB_V]):.1f} % on ZB-V"
    ]


def sensitivity_of(subject: Subject, device: DeviceSpec) -> list[Row]:
    """The main ratios with communication 20 % slower and faster, and with compute so."""
    model, costs = costs_of(subject, device)
    chosen = [schedule for schedule in SCHEDULES if schedule.name in (NO_OVERLAP, FIXED, ZB_V, OURS)]
    rows: list[Row] = []
    for comm, comp in ((1.0, 1.0), (0.8, 1.0), (1.2, 1.0), (1.0, 0.8), (1.0, 1.2)):
        scaled = scaled_costs(costs, comm, comp)
        steps = {
            compared.schedule.name: compared.timeline.step_ns
            for compared in compare(model, scaled, pp=PP, vpp=subject.vpp, microbatches=32, schedules=chosen)
        }
        rows.append({"model": subject.name, "communication": comm, "compute": comp, "microbatches": 32, **steps})
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
    table = Table(title="Costs off by 20 %, 32 micro-batches", title_justify="left")
    for name in ("model", "communication x", "compute x", "speed-up on no overlap", "saved on fixed %", "on ZB-V %"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for row in rows:
        table.add_row(
            row["model"],
            f"{row['communication']:.1f}",
            f"{row['compute']:.1f}",
            f"{row[NO_OVERLAP] / row[OURS]:.2f}",
            f"{100 * (1 - row[OURS] / row[FIXED]):.1f}",
            f"{100 * (1 - row[OURS] / row[ZB_V]):.1f}",
        )
    return table


def save(rows: Sequence[Row], sensitivity: Sequence[Row], device: DeviceSpec) -> None:
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
        "subjects": {
            s.name: {"preset": s.preset, "tokens": s.tokens, "context": s.context, "vpp": s.vpp} for s in SUBJECTS
        },
    }
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"assumptions": assumptions, "rows": rows, "sensitivity": sensitivity}, indent=1)
    (RESULTS / "schedules.json").write_text(text + "\n", encoding="utf-8")


def draw(rows: Sequence[Row], path: Path) -> None:
    """One panel a model: each schedule's step over the lower bound, split into compute, exposed and bubble."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(14, 4 * len(models) / 2 + 1.5), layout="constrained")
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
