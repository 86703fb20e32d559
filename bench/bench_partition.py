"""How long an exact partition takes, and what it is worth: threshold search against HiGHS, CP-SAT and plain baselines.

    python bench/bench_partition.py [--quick]

The paper's four sizes: 48 (M) and 96 (L) layers in Qwen3-Next's pattern, 8 pipeline ranks with 2 or 4 chunks each
(C2, C4), 32 expert-parallel ranks, context 262,144; computed costs of the H800's device file (assumed rates, nothing
measured), combine reduced, interleaved 1F1B in exact pairs.

Search: the least T_dom with boundaries at most two items from the serial-balanced ones, by the threshold search and by
HiGHS on the same tables, and with free boundaries, by the threshold search and by CP-SAT (which shows that T_dom can be
reached and one nanosecond less cannot). Memory (boundary window 2, pairs in +Align's order): a loose limit, 1.2 times
the serial-balanced partition's peak; a tight one, 1 % above the least peak known; one below what the bound on memory
proves. Value: T_dom and the simulated step of equal layers, serial-balanced, T_dom-optimal (the first found and after
ties are broken) and step-tuned partitions. Off by 20 %: all collectives, or all compute. Plans: build_plan's defaults.

Times are of this process on one core, compiled code loaded before. Writes results/partition.json and
results/partition.png. ``--quick``: the smallest size, no CP-SAT, no plans, no files.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from tessera_rt.cost_sources.device import load_device
from tessera_rt.cost_sources.roofline import roofline_costs
from tessera_rt.costs import CostTable, Workload
from tessera_rt.files.model_files import load_model
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Mesh
from tessera_rt.planner.baselines import equal_layers, memory_balanced, serial_balanced
from tessera_rt.planner.build import build_plan
from tessera_rt.planner.candidates import Bounds, Candidates, candidates
from tessera_rt.planner.edge_costs import EdgeCosts, edge_costs
from tessera_rt.planner.least import Clock, Options, t_dom_bound, ties_broken
from tessera_rt.planner.limits import fit
from tessera_rt.planner.memory_bound import memory_bound
from tessera_rt.planner.milp_problem import milp_problem
from tessera_rt.planner.partition_milp import MinMax, partition_milp, scipy_solver
from tessera_rt.planner.partition_threshold import Threshold, partition_threshold, threshold_search
from tessera_rt.planner.search import search
from tessera_rt.planner.setting import Setting
from tessera_rt.planner.tables import FORBIDDEN
from tessera_rt.scheduler.templates import build_template
from tessera_rt.tasks import Resource, parse_task_name

RESULTS = Path(__file__).with_name("results")
DEVICE, PRESET = "h800", "qwen3-next-80b"
PP, EP, TOKENS, CONTEXT, MICROBATCHES = 8, 32, 8192, 262144, 64
WINDOW = 2
SIZES = {"M-C2": (48, 2), "M-C4": (48, 4), "L-C2": (96, 2), "L-C4": (96, 4)}
PAPER_SECONDS = {"M-C2": 0.34, "L-C2": 1.51, "M-C4": 0.82, "L-C4": 4.22}
"""Of the paper's integer program on 64 cores, boundaries bounded (OSDI '26)."""
HIGHS_SECONDS, CP_SAT_SECONDS = 300.0, 300.0
TIGHT_SECONDS = 10.0
EVALUATIONS = 300
"""Partitions that tuning the step looks at: build_plan allows itself more."""
Row = dict[str, Any]
_Result = TypeVar("_Result")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest size, no CP-SAT, no plans, no files")
    quick = parser.parse_args(arguments).quick
    out = Console(width=150)
    out.print(f"Assumed: {load_device(DEVICE).title} of {DEVICE}.yaml, context {CONTEXT}; nothing measured.")
    out.print(environment())
    warm_up()
    rows: list[Row] = []
    for size in ["M-C2"] if quick else SIZES:
        rows.append(row_of(size, cp_sat=not quick))
        out.print(f"{size}: " + ", ".join(f"{key} {value}" for key, value in rows[-1].items() if key != "size"))
        if not quick:
            save(rows, [], [])  # it takes minutes: what is there is kept
    out.print(search_table(rows), memory_table(rows), value_table(rows))
    if quick:
        return
    plans: list[Row] = []
    for layers in (48, 96):
        plans.append(plan_row(layers))
        out.print(f"whole plan, {layers} layers, PP8-C4, EP32: {plans[-1]['seconds']:.1f} s ({plans[-1]['method']})")
    save(rows, [], plans)
    sensitivity = [row for size in SIZES for row in sensitivity_of(size)]
    out.print(sensitivity_table(sensitivity))
    save(rows, sensitivity, plans)


# -- settings ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Problem:
    """One size: its setting, the serial-balanced partition, and the cost tables near it or of all partitions."""

    setting: Setting
    start: Bounds

    def tables(self, window: int | None, at_least: int = 0) -> tuple[Candidates, tuple[EdgeCosts, ...]]:
        """Pairs that cannot cost more than ``at_least`` are not costed."""
        setting = self.setting
        cands = candidates(len(setting.model.items), setting.stages, [self.start], window=window)
        at_most = setting.t_dom(self.start)
        made = edge_costs(cands, setting.edges, setting.pairs, at_most=at_most, at_least=at_least)
        assert made is not None
        return made


def model_of(layers: int) -> ModelSpec:
    """The preset with as many layers of its own pattern."""
    model = load_model(PRESET)
    return replace(model, name=f"{model.name}-{layers}", layers=(model.layers * 2)[:layers])


def costs_of(model: ModelSpec, comm: float = 1.0, comp: float = 1.0) -> CostTable:
    """Computed costs with all collectives ``comm`` and all compute ``comp`` times as long."""
    workload = Workload(tokens=TOKENS, context=CONTEXT, ep=EP, combine="reduced")
    costs = roofline_costs(model, workload, load_device(DEVICE))
    scaled = {
        name: replace(cost, ns=round(cost.ns * (comm if parse_task_name(name)[1].resource is Resource.COMM else comp)))
        for name, cost in costs.tasks.items()
    }
    return replace(costs, tasks=scaled)


def problem_of(size: str, comm: float = 1.0, comp: float = 1.0) -> Problem:
    layers, vpp = SIZES[size]
    model = model_of(layers)
    costs = costs_of(model, comm, comp)
    template = build_template("interleaved-1f1b", pp=PP, vpp=vpp, microbatches=MICROBATCHES, joint=True)
    start = serial_balanced(model, costs, template.stage_ranks)
    assert start is not None
    return Problem(Setting(model, costs, template, limit=0, method="exact"), start)


def warm_up() -> None:
    """Loads, or compiles, what is compiled: a small plan."""
    model = model_of(10)
    build_plan(model, Mesh(pp=2, vpp=2, ep=EP), costs_of(model), microbatches=4, objective="t_dom", window=1)
    template = build_template("interleaved-1f1b", pp=2, vpp=2, microbatches=4, joint=True)
    setting = Setting(model, costs_of(model), template, limit=2**60, method="align")
    start = equal_layers(model, 4)
    made = edge_costs(candidates(len(model.items), 4, [start]), setting.edges, setting.pairs, at_most=FORBIDDEN - 1)
    assert made is not None
    partition_threshold(*made, memory=setting.memory, limit=setting.limit)


def timed(function: Callable[[], _Result]) -> tuple[_Result, float]:
    """What it returns, and its process time (s)."""
    began = time.process_time()
    result = function()
    return result, time.process_time() - began


# -- one size ----------------------------------------------------------------------------------------------------------


def row_of(size: str, *, cp_sat: bool) -> Row:
    problem = problem_of(size)
    setting = problem.setting
    near, near_tables_s = timed(lambda: problem.tables(WINDOW))
    every = candidates(len(setting.model.items), setting.stages, [problem.start], window=WINDOW)
    found, near_s = timed(lambda: threshold_search(*near, known=problem.start))
    highs, highs_s = timed(lambda: partition_milp(*near, time_limit_s=HIGHS_SECONDS))
    free, free_tables_s = timed(lambda: problem.tables(None))
    best, free_s = timed(lambda: threshold_search(*free, known=problem.start))
    assert found.proven and best.proven and best.bounds is not None
    row: Row = {
        "size": size,
        "variables": variables_of(every, near[1]),
        "variables_left": len(milp_problem(*near).lower) - 1,
        "pairs_costed": setting.pairs.orders,
        "tables_s": near_tables_s,
        "threshold_s": near_s,
        "threshold_nodes": found.nodes,
        "highs_s": highs_s,
        "highs_status": "none" if highs is None else highs.status,
        "equal_to_highs": highs is not None and highs.value == found.value,
        "paper_s": PAPER_SECONDS[size],
        "free_tables_s": free_tables_s,
        "free_s": free_s,
        "free_nodes": best.nodes,
        "free_values": sum(map(len, free[0].ranges)),
        "t_dom_window_ns": found.value,
        "t_dom_free_ns": best.value,
    }
    if cp_sat:
        answers, row["cp_sat_s"] = timed(lambda: [cp_sat_reaches(*free, best.value - less) for less in (0, 1)])
        row["equal_to_cp_sat"] = answers == [True, False]
        row["cp_sat_answers"] = answers
    row |= memory_of(problem)
    row |= value_of(problem, best.bounds)
    return row


def variables_of(cands: Candidates, tables: Sequence[EdgeCosts]) -> int:
    """Variables of the integer program before pruning: ranges, and pairs of ranges of every two stages that overlap."""
    pairs = {tuple(sorted((t.edge.forward, t.edge.backward))) for t in tables if t.edge.forward != t.edge.backward}
    return sum(map(len, cands.ranges)) + sum(len(cands.ranges[s]) * len(cands.ranges[t]) for s, t in pairs)


def memory_of(problem: Problem) -> Row:
    """The least T_dom within three limits, boundaries near the serial-balanced partition that keeps the limit."""
    own, memory = problem.setting, problem.setting.memory
    peak = max(memory.peaks(problem.start))
    least, bound_s = timed(lambda: memory_bound(memory))
    leanest = min(least.peak, max(memory.peaks(memory_balanced(memory.template.stage_ranks, memory))))
    row: Row = {
        "serial_peak_bytes": peak,
        "leanest_peak_bytes": leanest,
        "memory_bound_bytes": least.bound,
        "memory_bound_s": bound_s,
    }
    limits = {"loose": round(1.2 * peak), "tight": round(1.01 * leanest), "infeasible": round(0.98 * least.bound)}
    for name, limit in limits.items():
        setting = Setting(own.model, own.costs, own.template, limit=limit, method="align")
        known, fit_s = timed(lambda setting=setting: fit(setting, time_limit_s=TIGHT_SECONDS, solver=scipy_solver))  # type: ignore[misc]
        row |= {f"{name}_limit_bytes": limit, f"{name}_fit_s": fit_s}
        if known.start is None:
            proven = known.bound > limit
            row |= {f"{name}_s": fit_s, f"{name}_status": "infeasible, proven" if proven else "nothing fits"}
            continue
        centers = [problem.start, known.start]
        cands = candidates(len(setting.model.items), setting.stages, centers, window=WINDOW)
        made = edge_costs(cands, setting.edges, setting.pairs, at_most=setting.t_dom(known.start))
        assert made is not None

        def solve(known: Bounds = known.start, limit: int = limit, made: Any = made) -> MinMax | None:
            return partition_threshold(*made, memory=memory, limit=limit, known=known, time_limit_s=TIGHT_SECONDS)

        found, seconds = timed(solve)
        assert found is not None
        row |= {
            f"{name}_s": seconds,
            f"{name}_status": found.status,
            f"{name}_method": found.method,
            f"{name}_gap": 1 - found.bound / found.value,
            f"{name}_t_dom_ns": found.value,
            f"{name}_known_t_dom_ns": setting.t_dom(known.start),
        }
    return row


def value_of(problem: Problem, optimal: Bounds) -> Row:
    """T_dom and simulated step of every partition; the tuned one starts from all others."""
    setting = problem.setting
    named = {
        "equal": equal_layers(setting.model, setting.stages),
        "serial": problem.start,
        "t_dom": optimal,
        "t_dom_ties": ties_broken(setting, optimal, Clock(3600.0)),
    }
    options = Options(
        objective="step",
        partitioner="threshold",
        window=None,
        time_limit_s=3600.0,
        solver=never,
        evaluations=EVALUATIONS,
    )
    found, seconds = timed(lambda: search(setting, problem.start, options))
    named["ours"] = found.bounds
    row: Row = {"search_s": seconds}
    for name, bounds in named.items():
        row |= {f"{name}_t_dom_ns": setting.t_dom(bounds), f"{name}_step_ns": setting.step_ns(bounds)}
    return row


def never(*_: object) -> Any:
    raise AssertionError("without a memory limit the threshold search decides")


def cp_sat_reaches(cands: Candidates, tables: Sequence[EdgeCosts], at_most: int) -> bool | None:
    """Whether a partition has all costs at most ``at_most``, by OR-tools' CP-SAT; None when it does not say in time."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    y = [[model.new_bool_var(f"y{s},{i}") for i in range(len(own))] for s, own in enumerate(cands.ranges)]
    for own in y:
        model.add_exactly_one(own)
    for s in range(cands.stages - 1):
        for i, (_, stop) in enumerate(cands.ranges[s]):
            meeting = [y[s + 1][j] for j, (start, _) in enumerate(cands.ranges[s + 1]) if start == stop]
            model.add_bool_or([y[s][i].negated(), *meeting])
    for table in tables:
        f, b = table.edge.forward, table.edge.backward
        allowed = table.cost <= at_most
        if f == b:
            for i in np.flatnonzero(~allowed.diagonal()):
                model.add(y[f][i] == 0)
            continue
        for i in range(len(y[f])):
            model.add_bool_or([y[f][i].negated(), *(y[b][j] for j in np.flatnonzero(allowed[i]))])
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = CP_SAT_SECONDS
    status = solver.solve(model)
    return {cp_model.OPTIMAL: True, cp_model.FEASIBLE: True, cp_model.INFEASIBLE: False}.get(status)


def sensitivity_of(size: str) -> Iterator[Row]:
    """What exact partitions are worth, and how long they take, with costs off by 20 %."""
    for comm, comp in ((1.0, 1.0), (0.8, 1.0), (1.2, 1.0), (1.0, 0.8), (1.0, 1.2)):
        problem = problem_of(size, comm, comp)
        setting = problem.setting
        bound = t_dom_bound(setting)
        free = problem.tables(None, at_least=bound)

        def solve(free: Any = free, known: Bounds = problem.start, bound: int = bound) -> Threshold:
            return threshold_search(*free, known=known, at_least=bound)

        best, seconds = timed(solve)
        assert best.proven and best.bounds is not None
        yield {
            "size": size,
            "communication": comm,
            "compute": comp,
            "serial_over_optimal": setting.t_dom(problem.start) / best.value,
            "equal_over_optimal": setting.t_dom(equal_layers(setting.model, setting.stages)) / best.value,
            "optimal_step_over_serial": setting.step_ns(best.bounds) / setting.step_ns(problem.start),
            "free_s": seconds,
        }


def plan_row(layers: int) -> Row:
    """A whole plan of PP8-C4 with build_plan's defaults."""
    model = model_of(layers)
    costs = costs_of(model)
    plan, seconds = timed(lambda: build_plan(model, Mesh(pp=PP, vpp=4, ep=EP), costs, microbatches=MICROBATCHES))
    return {"layers": layers, "seconds": seconds, "step_ns": plan.solver.step_ns, "method": plan.solver.method}


# -- output ------------------------------------------------------------------------------------------------------------


def search_table(rows: Sequence[Row]) -> Table:
    table = Table(
        title="Search for the least T_dom: process seconds (tables of pair costs apart)", title_justify="left"
    )
    names = ("size", "variables (left)", "tables", "threshold", "HiGHS", "equal", "paper, 64 cores")
    for name in (*names, "free: ranges", "tables", "threshold", "nodes", "CP-SAT", "equal"):
        table.add_column(name, justify="left" if name == "size" else "right")
    for row in rows:
        table.add_row(
            row["size"],
            f"{row['variables']} ({row['variables_left']})",
            f"{row['tables_s']:.1f}",
            f"{row['threshold_s']:.4f}",
            f"{row['highs_s']:.1f} {row['highs_status']}",
            "yes" if row["equal_to_highs"] else "NO",
            f"{row['paper_s']:.2f}",
            str(row["free_values"]),
            f"{row['free_tables_s']:.1f}",
            f"{row['free_s']:.3f}",
            str(row["free_nodes"]),
            f"{row['cp_sat_s']:.1f}" if "cp_sat_s" in row else "",
            ("yes" if row["equal_to_cp_sat"] else "NO") if "equal_to_cp_sat" in row else "",
        )
    return table


def memory_table(rows: Sequence[Row]) -> Table:
    table = Table(title="Memory limits, boundary window 2: process seconds", title_justify="left")
    for name in ("size", "loose", "tight", "infeasible", "bound on memory alone"):
        table.add_column(name, justify="left" if name == "size" else "right")
    for row in rows:
        cells = [
            f"{row[f'{name}_s']:.2f} {row[f'{name}_status']}"
            + (f", gap {100 * row[f'{name}_gap']:.1f} % ({row[f'{name}_method']})" if f"{name}_gap" in row else "")
            for name in ("loose", "tight", "infeasible")
        ]
        table.add_row(row["size"], *cells, f"{row['memory_bound_s']:.2f}")
    return table


PARTITIONS = {
    "equal": "equal layers",
    "serial": "serial-balanced",
    "t_dom": "T_dom-optimal",
    "t_dom_ties": "the same, ties broken",
    "ours": "step-tuned",
}


def value_table(rows: Sequence[Row]) -> Table:
    table = Table(title="T_dom over the least T_dom / simulated step over the step-tuned one's", title_justify="left")
    table.add_column("size")
    for label in PARTITIONS.values():
        table.add_column(label, justify="right")
    for row in rows:
        least, step = row["t_dom_free_ns"], row["ours_step_ns"]
        cells = [f"{row[f'{n}_t_dom_ns'] / least:.3f} / {row[f'{n}_step_ns'] / step:.3f}" for n in PARTITIONS]
        table.add_row(row["size"], *cells)
    return table


def sensitivity_table(rows: Sequence[Row]) -> Table:
    table = Table(title="Costs off by 20 %, free boundaries", title_justify="left")
    names = ("size", "communication x", "compute x", "T_dom: serial / optimal", "equal / optimal")
    for name in (*names, "step: T_dom-optimal / serial", "search s"):
        table.add_column(name, justify="left" if name == "size" else "right")
    for row in rows:
        table.add_row(
            row["size"],
            f"{row['communication']:.1f}",
            f"{row['compute']:.1f}",
            f"{row['serial_over_optimal']:.3f}",
            f"{row['equal_over_optimal']:.3f}",
            f"{row['optimal_step_over_serial']:.3f}",
            f"{row['free_s']:.3f}",
        )
    return table


def environment() -> str:
    """Processor, Python and the libraries whose versions matter here."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    libraries = ", ".join(f"{library} {version(library)}" for library in ("numpy", "numba", "scipy", "ortools"))
    return f"{name or platform.processor()}, one core; Python {platform.python_version()}, {libraries}"


def save(rows: Sequence[Row], sensitivity: Sequence[Row], plans: Sequence[Row]) -> None:
    RESULTS.mkdir(exist_ok=True)
    data = {
        "assumptions": {
            "costs": f"computed from {DEVICE}.yaml, combine reduced, no recomputation; nothing measured on a GPU",
            "model": f"{PRESET}'s pattern with 48 (M) and 96 (L) layers",
            "pipeline_ranks": PP,
            "expert_parallel_ranks": EP,
            "tokens": TOKENS,
            "context": CONTEXT,
            "microbatches": MICROBATCHES,
            "template": "interleaved-1f1b in exact pairs",
            "window": WINDOW,
        },
        "environment": environment(),
        "sizes": rows,
        "sensitivity": sensitivity,
        "whole_plans": plans,
    }
    (RESULTS / "partition.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    draw(rows, RESULTS / "partition.png")


def draw(rows: Sequence[Row], path: Path) -> None:
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    times, value = figure.subplots(1, 2)
    searches = {
        "threshold, window 2": "threshold_s",
        "HiGHS, window 2": "highs_s",
        "threshold, free": "free_s",
        "CP-SAT, free": "cp_sat_s",
        "paper, 64 cores": "paper_s",
    }
    _bars(times, rows, searches, lambda row, key: row.get(key, float("nan")))
    times.set_yscale("log")
    times.set_ylabel("seconds")
    times.set_title("Search for the least T_dom", loc="left", fontsize=10)
    names = {label: f"{name}_step_ns" for name, label in PARTITIONS.items()}
    _bars(value, rows, names, lambda row, key: row[key] / row["ours_step_ns"])
    value.set_ylim(0.95, None)
    value.set_ylabel("simulated step / step-tuned")
    value.set_title("What a partition is worth", loc="left", fontsize=10)
    figure.suptitle(f"Partitions of Qwen3-Next-like models, assumed {DEVICE} costs", fontsize=11)
    figure.savefig(path, dpi=110)


def _bars(axes: Any, rows: Sequence[Row], series: dict[str, str], height: Callable[[Row, str], float]) -> None:
    width = 0.8 / len(series)
    for i, (label, key) in enumerate(series.items()):
        places = [x + (i - (len(series) - 1) / 2) * width for x in range(len(rows))]
        axes.bar(places, [height(row, key) for row in rows], width, label=label)
    axes.set_xticks(range(len(rows)), [row["size"] for row in rows])
    axes.legend(fontsize=8)


if __name__ == "__main__":
    main()
