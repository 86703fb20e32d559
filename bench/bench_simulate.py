"""The simulator: closed forms, 12,288 accelerators with filling of idle time, what filling gains, unequal groups.

    python bench/bench_simulate.py [--quick]

1. Step times that are known on paper, matched exactly: GPipe, 1F1B, interleaved 1F1B, ZB-H1, and with link time.
2. Shadow micro-batches against groups of unequal size, both over the ideal step.
3. A step of 12,288 accelerators: 16 pipeline ranks of 4 stages, 24 groups of 32 expert-parallel ranks, 64
   micro-batches, routing noise, weight gradients moved into idle time. Process time on one core; setting up and drawing
   the noise apart.
4. What moving weight gradients into idle time saves, net of what it saves without noise: 8 pipeline x 32
   expert-parallel ranks, 32 micro-batches, two groups, serial-balanced partitions, pairs in Align order. Two
   assumptions: a rank that receives more rows only computes longer, or its all-to-alls take longer as well.

Costs are computed from the H800's device file (assumed rates); nothing is measured on a GPU. Writes
results/simulate.json and results/simulate.png. ``--quick``: one model, few micro-batches, no files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from tessera_rt.cost_sources.device import load_device
from tessera_rt.cost_sources.roofline import roofline_costs
from tessera_rt.costs import CostTable, ItemMemory, Link, Workload
from tessera_rt.files.model_files import load_model
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Action
from tessera_rt.planner.baselines import serial_balanced
from tessera_rt.planner.candidates import ranges
from tessera_rt.planner.pair_costs import PairCosts
from tessera_rt.scheduler.bubble_filling import BubbleFilling
from tessera_rt.scheduler.closed_forms import gpipe_time, interleaved_time, zb_h1_time
from tessera_rt.scheduler.graphs import action_graph
from tessera_rt.scheduler.list_schedule import list_schedule
from tessera_rt.scheduler.noise import RoutingNoise, Rows, draw_rows
from tessera_rt.scheduler.replica_program import ReplicaProgram
from tessera_rt.scheduler.replicas import prepare_schedule, simulate_replicas
from tessera_rt.scheduler.simulate import simulate_schedule
from tessera_rt.scheduler.templates import Template, build_template
from tessera_rt.testing.costs import dense_model, item_costs

RESULTS = Path(__file__).with_name("results")
DEVICE, EP = "h800", 32
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Subject:
    name: str
    preset: str
    tokens: int
    vpp: int


SUBJECTS = (
    Subject("Qwen3-235B 8K", "qwen3-235b-a22b", 8192, 4),
    Subject("DeepSeek-V3 4K", "deepseek-v3", 4096, 4),
    Subject("Qwen3-Next 8K", "qwen3-next-80b", 8192, 2),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one model, few micro-batches, no files")
    quick = parser.parse_args(arguments).quick
    out = Console(width=130)
    out.print(hardware())
    forms = closed_forms()
    out.print(form_table(forms))
    padding = padding_rows()
    out.print(padding_table(padding))
    scale = large_step(microbatches=8 if quick else 64, tries=1 if quick else 5)
    out.print(large_text(scale))
    gains = [row for subject in SUBJECTS[:1] if quick for row in filling_gains(subject, microbatches=8)]
    gains += [row for subject in SUBJECTS if not quick for row in filling_gains(subject, microbatches=32)]
    out.print(gain_table(gains))
    if not quick:
        result = {
            "run_on": hardware(),
            "assumptions": f"costs computed from {DEVICE}.yaml, combine reduced, contention of the device file",
            "closed_forms": forms,
            "shadow_padding": padding,
            "large_step": scale,
            "filling": gains,
        }
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "simulate.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        draw(gains, RESULTS / "simulate.png")


def hardware() -> str:
    """Processor, Python and the libraries whose versions matter here."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    libraries = f"numba {numba.__version__}, numpy {np.__version__}"
    return (
        f"{name or platform.processor() or platform.machine()}, {os.cpu_count()} CPUs; "
        f"Python {platform.python_version()}, {libraries}"
    )


# -- closed forms -----------------------------------------------------------------------------------------------------


def uniform_step(template: Template, forward: int, inputs: int, weights: int, link: Link | None = None) -> int:
    """Step time of one dense layer a stage, by the event loop; messages have one byte."""
    stages = len(template.stage_ranks)
    model = dense_model(stages)
    memory = {item.label: ItemMemory(output=1) for item in model.items}
    costs = item_costs(model, {f"L{i}": (forward, inputs, weights) for i in range(stages)}, memory, link=link)
    bounds = [(1 + s - (s == 0), 2 + s + (s == stages - 1)) for s in range(stages)]
    actions: dict[str, Action] = {action.key: action for row in template.actions for action in row}
    orders = {key: list_schedule(action_graph(key, model, costs, bounds), key) for key in actions}
    timeline = simulate_schedule(template.stage_ranks, template.actions, bounds, orders, model, costs)
    program = prepare_schedule(template.stage_ranks, template.actions, bounds, orders, model, costs)
    assert program.planned_ns == timeline.step_ns, "the compiled loop and the event loop differ"
    return timeline.step_ns


def closed_forms() -> list[Row]:
    """Unit of time: 1 = 1,000 ns."""
    half = Link(latency_ns=500)
    cases = (
        ("GPipe, 4 ranks, 8 micro-batches, F 1, B 2", "gpipe", 4, 1, 8, (1000, 2000, 0), None, gpipe_time(4, 8, 1, 2)),
        ("1F1B, the same", "1f1b", 4, 1, 8, (1000, 2000, 0), None, gpipe_time(4, 8, 1, 2)),
        (
            "interleaved 1F1B, 2 stages a rank",
            "interleaved-1f1b",
            4,
            2,
            8,
            (500, 1000, 0),
            None,
            interleaved_time(4, 2, 8, 1, 2),
        ),
        ("ZB-H1, F = B = W = 1", "zb-h1", 4, 1, 8, (1000, 1000, 1000), None, zb_h1_time(4, 1, 8, 1, 1, 1)),
        ("GPipe, 2 ranks, 2 micro-batches, link 0.5", "gpipe", 2, 1, 2, (1000, 2000, 0), half, 10.0),
        ("1F1B, the same", "1f1b", 2, 1, 2, (1000, 2000, 0), half, 10.0),
    )
    rows = []
    for name, template, pp, vpp, microbatches, times, link, expected in cases:
        made = build_template(template, pp=pp, vpp=vpp, microbatches=microbatches, joint=False)
        simulated = uniform_step(made, *times, link) / 1000
        rows.append({"case": name, "expected": expected, "simulated": simulated, "equal": simulated == expected})
    return rows


def form_table(rows: Sequence[Row]) -> Table:
    table = Table(title="Step times known on paper", title_justify="left")
    for name in ("case", "on paper", "simulated", "equal"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for row in rows:
        table.add_row(row["case"], f"{row['expected']:g}", f"{row['simulated']:g}", "yes" if row["equal"] else "NO")
    return table


# -- micro-batches that the ranks do not divide -----------------------------------------------------------------------


def padding_rows() -> list[Row]:
    """Overhead over the ideal interleaved step, F = 1 and B = 2 a rank."""
    rows = []
    for pp, vpp, microbatches in (
        (8, 2, 60),
        (8, 2, 63),
        (8, 2, 250),
        (8, 4, 60),
        (8, 4, 63),
        (8, 4, 250),
        (4, 2, 10),
        (16, 2, 100),
    ):
        ideal = interleaved_time(pp, vpp, microbatches, 1, 2) * 1000
        row: Row = {"pp": pp, "vpp": vpp, "microbatches": microbatches}
        for pad in ("groups", "shadow"):
            template = build_template(
                "interleaved-1f1b", pp=pp, vpp=vpp, microbatches=microbatches, joint=False, pad=pad
            )
            step = uniform_step(template, 1000 // vpp, 2000 // vpp, 0)
            row[pad] = step / ideal - 1
            row["shadows"] = max(row.get("shadows", 0), template.shadows)
        rows.append(row)
    return rows


def padding_table(rows: Sequence[Row]) -> Table:
    table = Table(title="Overhead of micro-batches that the ranks do not divide", title_justify="left")
    for name in ("ranks", "stages a rank", "micro-batches", "shadows", "shadow padding %", "unequal groups %"):
        table.add_column(name, justify="right")
    for row in rows:
        sizes = (str(row[name]) for name in ("pp", "vpp", "microbatches", "shadows"))
        table.add_row(*sizes, f"{100 * row['shadow']:.2f}", f"{100 * row['groups']:.2f}")
    return table


# -- noise and filling ------------------------------------------------------------------------------------------------


def program_of(subject: Subject, pp: int, dp: int, microbatches: int) -> tuple[ModelSpec, CostTable, ReplicaProgram]:
    model = load_model(subject.preset)
    workload = Workload(tokens=subject.tokens, context=subject.tokens, ep=EP, dp=dp, combine="reduced")
    costs = roofline_costs(model, workload, load_device(DEVICE))
    template = build_template("interleaved-1f1b", pp=pp, vpp=subject.vpp, microbatches=microbatches, joint=True)
    bounds = serial_balanced(model, costs, template.stage_ranks)
    assert bounds is not None, "without a limit there is always a partition"
    chunks = ranges(bounds)
    pairs = PairCosts(model, costs, method="align")
    actions: dict[str, Action] = {action.key: action for row in template.actions for action in row}
    orders = {key: pairs.interleaving(action, chunks) for key, action in actions.items()}
    return model, costs, prepare_schedule(template.stage_ranks, template.actions, chunks, orders, model, costs)


def large_step(*, microbatches: int, tries: int) -> Row:
    pp, groups = 16, 24
    began = time.process_time()
    model, costs, program = program_of(SUBJECTS[0], pp, groups, microbatches)
    setup = time.process_time() - began
    filling = BubbleFilling(fit=1.0, pool_tasks=8)
    simulate_replicas(program, filling=filling)  # compiled, or read from the cache
    best = {"draw_s": float("inf"), "static_s": float("inf"), "filling_s": float("inf")}
    step = filled = 0
    for seed in range(tries):
        times = [time.process_time()]
        noise = RoutingNoise(lane_cv=0.2)
        rows = draw_rows(model, costs.workload, noise, microbatches=microbatches, replicas=groups, seed=seed)
        times.append(time.process_time())
        step = simulate_replicas(program, rows=rows).step_ns
        times.append(time.process_time())
        filled = simulate_replicas(program, rows=rows, filling=filling, deadline_ns=step).step_ns
        times.append(time.process_time())
        for name, seconds in zip(best, np.diff(times), strict=True):
            best[name] = min(best[name], float(seconds))
    return {
        "accelerators": pp * groups * EP,
        "microbatches": microbatches,
        "tasks": len(program.ops),
        "setup_s": setup,
        "tries": tries,
        **best,
        "step_ns": step,
        "filled_step_ns": filled,
    }


def large_text(row: Row) -> str:
    return (
        f"{row['accelerators']:,} accelerators, {row['tasks']:,} operations: {row['static_s']:.2f} s for a step, "
        f"{row['filling_s']:.2f} s with filling, {row['draw_s']:.2f} s to draw the noise (process time, best of "
        f"{row['tries']}; set-up {row['setup_s']:.1f} s); step {row['step_ns'] / 1e6:.0f} ms, filled "
        f"{row['filled_step_ns'] / 1e6:.0f} ms"
    )


def filling_gains(subject: Subject, *, microbatches: int) -> list[Row]:
    replicas = 2
    model, costs, program = program_of(subject, 8, replicas, microbatches)
    rows_out: list[Row] = []
    for traffic in (False, True):
        for cv in (0.1, 0.2):
            noise = RoutingNoise(lane_cv=cv, traffic=traffic)
            rows = draw_rows(model, costs.workload, noise, microbatches=microbatches, replicas=replicas, seed=1)
            plain = simulate_replicas(program, rows=rows)
            for pool in (8, 32):
                for fit in (1.0, 2.0):
                    filling = BubbleFilling(fit=fit, pool_tasks=pool)
                    rows_out.append(gain_row(subject, program, rows, plain.step_ns, filling, cv=cv, traffic=traffic))
    return rows_out


def gain_row(
    subject: Subject,
    program: ReplicaProgram,
    rows: Rows,
    step: int,
    filling: BubbleFilling,
    *,
    cv: float,
    traffic: bool,
) -> Row:
    filled = simulate_replicas(program, rows=rows, filling=filling, deadline_ns=step)
    control = simulate_replicas(program, filling=filling).step_ns
    gain, anyway = 1 - filled.step_ns / step, 1 - control / program.planned_ns
    return {
        "model": subject.name,
        "lane_cv": cv,
        "max_over_mean": rows.max_over_mean,
        "traffic": traffic,
        "pool_tasks": filling.pool_tasks,
        "fit": filling.fit,
        "planned_ns": program.planned_ns,
        "step_ns": step,
        "filled_ns": filled.step_ns,
        "gain": gain,
        "control_gain": anyway,
        "net_gain": gain - anyway,
        "filled_share": filled.filled,
        "pool_peak_bytes": filled.pool_peak_bytes,
    }


def gain_table(rows: Sequence[Row]) -> Table:
    title = "W tasks moved into idle time: % of the step saved, net of the control without noise (saved in all)"
    table = Table(title=title, title_justify="left")
    settings = list(dict.fromkeys((row["pool_tasks"], row["fit"]) for row in rows))
    for name in ("model", "unequal rows slow", "CV", "noise adds %"):
        table.add_column(name, justify="left" if name in ("model", "unequal rows slow") else "right")
    for pool, fit in settings:
        table.add_column(f"pool {pool}, fit {fit:g}", justify="right")
    for key in dict.fromkeys((row["model"], row["traffic"], row["lane_cv"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["traffic"], row["lane_cv"]) == key]
        adds = mine[0]["step_ns"] / mine[0]["planned_ns"] - 1
        cells = [f"{100 * row['net_gain']:.1f} ({100 * row['gain']:.1f})" for row in mine]
        table.add_row(key[0], "both" if key[1] else "compute", f"{key[2]:g}", f"{100 * adds:.1f}", *cells)
    return table


def draw(rows: Sequence[Row], path: Path) -> None:
    """Net gains: one panel for each assumption and CV, bars by pool and fit."""
    panels = list(dict.fromkeys((row["traffic"], row["lane_cv"]) for row in rows))
    models = list(dict.fromkeys(row["model"] for row in rows))
    settings = list(dict.fromkeys((row["pool_tasks"], row["fit"]) for row in rows))
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharey=True)
    for panel, (traffic, cv) in zip(axes.flat, panels, strict=True):
        for i, setting in enumerate(settings):
            heights = [
                100
                * next(
                    row["net_gain"]
                    for row in rows
                    if (row["model"], row["traffic"], row["lane_cv"]) == (name, traffic, cv)
                    and (row["pool_tasks"], row["fit"]) == setting
                )
                for name in models
            ]
            places = np.arange(len(models)) + 0.2 * (i - 1.5)
            panel.bar(places, heights, width=0.19, label=f"pool of {setting[0]}, fit {setting[1]:g}")
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set_xticks(range(len(models)), models, fontsize=8)
        slow = "compute and all-to-alls" if traffic else "compute only"
        panel.set_title(f"rows of ranks vary by {100 * cv:.0f} %, slowing {slow}", fontsize=9, loc="left")
        panel.set_ylabel("% of the step, net of control", fontsize=8)
    axes.flat[0].legend(fontsize=8)
    figure.suptitle(f"W tasks moved into idle time, simulated on assumed costs; {hardware()}", fontsize=9)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
