"""How far interleavings are from the optimum, and what proving it takes: FIFO, +Align, +Defer against the exact search.

    python bench/bench_interleave.py [--quick]

Realistic pairs: F over one to four layers of a preset with B and W over one to four others, computed costs of the
H800's device file (assumed rates, nothing measured), EP8 and EP32, no two alike. General pairs: random durations and
random task graphs. Gap: makespan over the proven optimum, less 1. *Chains* are pairs without a branch beside their W
tasks; shared experts and random graphs have branches. Times are this process's on one core: for the exact search with
its incumbents (+Align, +Defer) included, for +Defer what it takes beyond +Align (the best of three runs).

*Coarse* gaps are those of every fourth pair with neighbouring tasks of a lane fused, as in the paper's four tasks per
layer: there is less to decide, so heuristics lose less, but the optimum is longer than that of the finer tasks.

The optima are compared with a mixed-integer program (scaled to small durations) and with CP-SAT (as they are) on random
subsets. Writes results/interleave.json and results/interleave.png. ``--quick``: some pairs of each kind, no files.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from tessera_rt.cost_sources.device import load_device
from tessera_rt.cost_sources.roofline import roofline_costs
from tessera_rt.costs import Recompute, Workload
from tessera_rt.files.model_files import load_model
from tessera_rt.scheduler.defer import defer_order
from tessera_rt.scheduler.graphs import chunk_graph
from tessera_rt.scheduler.interleave import interleave, prove
from tessera_rt.scheduler.lane_graph import LaneGraph
from tessera_rt.tasks import Pass, Resource, Task, TaskGraph
from tessera_rt.testing.pairs import random_graph, random_pair
from tessera_rt.testing.schedule_oracles import cp_sat_makespan, milp_makespan

RESULTS = Path(__file__).with_name("results")
DEVICE = "h800"
PRESETS = ("qwen3-next-80b", "qwen3-235b-a22b", "deepseek-v3", "nemotron-3-super")
EPS = (8, 32)
METHODS = ("fifo", "align", "defer")
REPEATS = 3  # of +Defer, for its time
PAPER = {8: 0.12, 32: 1.19}
"""Mean gap in % of the paper's heuristic to its integer program, analytic costs (OSDI '26); which model is not said."""
KEY = "0F;1B"
CP_SAT_SECONDS = 5.0
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="some pairs of each kind, no files")
    quick = parser.parse_args(arguments).quick
    out = Console(width=160)
    per_set, general, oracle = (4, 10, 3) if quick else (160, 500, 30)
    out.print(f"Assumed: {load_device(DEVICE).title} of {DEVICE}.yaml; nothing measured. {environment()}")
    realistic = {f"{preset} EP{ep}": list(realistic_pairs(preset, ep, per_set)) for preset in PRESETS for ep in EPS}
    sets: dict[str, list[TaskGraph]] = {**realistic, "random general": list(general_pairs(general))}
    solved = {name: [solve(graph) for graph in graphs] for name, graphs in sets.items()}
    rows = [row_of(name, found) for name, found in solved.items()]
    out.print(table_of(rows))
    found = [one for name in realistic for one in solved[name]]
    summary = [
        summary_of("realistic chains", [one for one in found if is_chain(one.graph)]),
        summary_of("realistic branched", [one for one in found if not is_chain(one.graph)]),
        summary_of("random general", solved["random general"]),
    ]
    for line in summary:
        out.print(
            f"{line['kind']}: {line['pairs']} pairs, {line['proven']} proven optimal, "
            f"mean {line['ms_mean']:.1f} ms, p99 {line['ms_p99']:.1f} ms, most {line['ms_max']:.1f} ms"
        )
    sensitivity = [sensitivity_of(name, solved[name]) for name in realistic]
    out.print("Mean gap of +Defer in % with communication at 0.8, 1 and 1.2 times its duration:")
    for line in sensitivity:
        out.print(f"  {line['set']}: {' / '.join(f'{gap:.2f}' for gap in line['gaps'])}")
    checks = agreement([one.graph for one in found], sets["random general"], oracle)
    for line in checks:
        out.print(f"{line['oracle']}: {line['pairs']} pairs, {line['proven']} proven by it, {line['differ']} differ")
    if not quick:
        save(rows, summary, sensitivity, checks)


# -- pairs -----------------------------------------------------------------------------------------------------------


def realistic_pairs(preset: str, ep: int, count: int) -> Iterator[TaskGraph]:
    """Pairs of a preset under varied tokens, context and recomputation; all different in their durations."""
    model, device, draw = load_model(preset), load_device(DEVICE), random.Random(f"{preset} {ep}")
    layers = len(model.layers)
    seen: set[tuple[tuple[str, int], ...]] = set()
    while len(seen) < count:
        workload = Workload(
            tokens=draw.choice((2048, 4096, 8192, 16384)),
            context=draw.choice((16384, 65536, 262144)),
            ep=ep,
            recompute=draw.choice(tuple(Recompute)),
            combine="reduced",
        )
        costs = roofline_costs(model, workload, device, comm_sms=draw.choice((8, 16, 20, 24)))
        for _ in range(4):
            first, second = draw.randint(1, 4), draw.randint(1, 4)
            f, b = draw.randint(1, 1 + layers - first), draw.randint(1, 1 + layers - second)
            graph = chunk_graph(model, costs, f, f + first, Pass.F)
            graph = graph.merged(chunk_graph(model, costs, b, b + second, Pass.B))
            signature = tuple((task.name.partition(":")[0], task.ns) for task in graph.tasks)
            if signature not in seen and len(seen) < count:
                seen.add(signature)
                yield graph


def general_pairs(count: int) -> Iterator[TaskGraph]:
    """In turn: layers with shared experts and random durations, and two random graphs side by side."""
    for seed in range(count):
        if seed % 2:
            first = random_graph(seed, tasks=18, density=0.1, longest=1000)
            second = random_graph(seed + 10**6, tasks=18, density=0.1, longest=1000)
            yield first.merged(TaskGraph(tuple(renamed(task, 18) for task in second.tasks)))
        else:
            yield random_pair(seed)


def renamed(task: Task, shift: int) -> Task:
    def shifted(label: str) -> str:
        head, _, number = label.rpartition("L")
        return f"{head}L{int(number) + shift}"

    return replace(task, label=shifted(task.label), deps=tuple(map(shifted, task.deps)))


def is_chain(graph: TaskGraph) -> bool:
    """No task waits for two others, and none has two followers, W tasks left out."""
    backbone = [task for task in graph.tasks if not task.movable]
    named = [dep for task in backbone for dep in task.deps]
    return all(len(task.deps) < 2 for task in backbone) and len(set(named)) == len(named)


def fused(graph: TaskGraph) -> TaskGraph:
    """Tasks that follow one another on a lane, with nothing else in between, as one; W waits for the whole."""
    followers: dict[str, list[Task]] = {name: [] for name in graph.names}
    for task in graph.tasks:
        for dep in task.deps:
            followers[dep].append(task)
    within: dict[str, str] = {}  # task -> the first of those that it is fused with
    ns: dict[str, int] = {}
    for task in graph.tasks:
        within[task.name] = task.name
        if len(task.deps) == 1 and not task.movable:
            before = graph.by_name[task.deps[0]]
            alone = [other for other in followers[before.name] if not other.movable] == [task]
            if alone and before.resource is task.resource:
                within[task.name] = within[before.name]
        ns[within[task.name]] = ns.get(within[task.name], 0) + task.ns
    return TaskGraph(
        tuple(
            replace(task, ns=ns[task.name], deps=tuple(dict.fromkeys(within[dep] for dep in task.deps)))
            for task in graph.tasks
            if within[task.name] == task.name
        )
    )


def scaled(graph: TaskGraph, comm: float = 1.0, every: float = 1.0) -> TaskGraph:
    return TaskGraph(
        tuple(
            replace(task, ns=round(task.ns * every * (comm if task.resource is Resource.COMM else 1.0)))
            for task in graph.tasks
        )
    )


# -- figures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Solved:
    """Of one pair: makespans by method, the optimum or best known, the proof, and process times in ms."""

    graph: TaskGraph
    makespans: dict[str, int]
    best: int
    proven: bool
    states: int
    ms: float
    defer_ms: float

    def gap(self, method: str) -> float:
        return 100 * (self.makespans[method] / self.best - 1)


def solve(graph: TaskGraph) -> Solved:
    makespans = {method: interleave(graph, KEY, method=method).makespan_ns for method in METHODS}
    defer_s = min(seconds_of_defer(graph) for _ in range(REPEATS))
    began = time.process_time()
    exact = prove(graph, KEY)
    ended = time.process_time()
    return Solved(
        graph=graph,
        makespans=makespans,
        best=exact.interleaving.makespan_ns,
        proven=exact.proof.optimal,
        states=exact.proof.states,
        ms=1e3 * (ended - began),
        defer_ms=1e3 * defer_s,
    )


def seconds_of_defer(graph: TaskGraph) -> float:
    began = time.process_time()
    defer_order(LaneGraph.of(graph))
    return time.process_time() - began


def row_of(name: str, found: Sequence[Solved]) -> Row:
    both = found[::4]
    coarse = [solve(fused(one.graph)) for one in both]
    row: Row = {
        "set": name,
        "pairs": len(found),
        "tasks": fmean(len(one.graph.tasks) for one in found),
        "proven": sum(one.proven for one in found),
        "ms_mean": fmean(one.ms for one in found),
        "ms_max": max(one.ms for one in found),
        "defer_ms_mean": fmean(one.defer_ms for one in found),
        "defer_ms_max": max(one.defer_ms for one in found),
        "states_max": max(one.states for one in found),
        "coarse_longer": fmean(100 * (c.best / one.best - 1) for c, one in zip(coarse, both, strict=True)),
    }
    for method in METHODS:
        row[f"{method}_mean"] = fmean(one.gap(method) for one in found)
        row[f"{method}_max"] = max(one.gap(method) for one in found)
        row[f"{method}_coarse"] = fmean(one.gap(method) for one in coarse)
    return row


def summary_of(kind: str, found: Sequence[Solved]) -> Row:
    times = sorted(one.ms for one in found) or [0.0]
    return {
        "kind": kind,
        "pairs": len(found),
        "proven": sum(one.proven for one in found),
        "ms_mean": fmean(times),
        "ms_p99": times[int(0.99 * (len(times) - 1))],
        "ms_max": times[-1],
    }


def sensitivity_of(name: str, found: Sequence[Solved]) -> Row:
    """Gaps of +Defer with communication at other speeds, of every eighth pair."""
    chosen = found[::8]
    less, more = ([solve(scaled(one.graph, comm)) for one in chosen] for comm in (0.8, 1.2))
    gaps = [fmean(one.gap("defer") for one in each) for each in (less, chosen, more)]
    return {"set": name, "pairs": len(chosen), "comm": [0.8, 1.0, 1.2], "gaps": gaps}


def agreement(realistic: Sequence[TaskGraph], general: Sequence[TaskGraph], count: int) -> list[Row]:
    """Our optima against two general solvers."""
    draw = random.Random(0)
    small = [scaled(graph, every=45 / graph.total_ns()) for graph in [*realistic, *general] if len(graph.tasks) <= 26]
    chosen = draw.sample(small, min(count, len(small)))
    rows = [
        compared(
            "MILP (HiGHS, time-indexed, durations scaled to a total of about 45)",
            [(graph, milp_makespan(graph, interleave(graph, KEY, method="fifo").makespan_ns)) for graph in chosen],
        )
    ]
    if find_spec("ortools"):
        chosen = draw.sample([*realistic, *general], count)
        solved = [(graph, cp_sat_makespan(graph, time_limit_s=CP_SAT_SECONDS)) for graph in chosen]
        rows.append(compared(f"CP-SAT (one thread, {CP_SAT_SECONDS:g} s a pair)", solved))
    return rows


def compared(oracle: str, solved: Iterable[tuple[TaskGraph, int | None]]) -> Row:
    pairs = list(solved)
    proven = [(graph, length) for graph, length in pairs if length is not None]
    differ = sum(prove(graph, KEY).interleaving.makespan_ns != length for graph, length in proven)
    return {"oracle": oracle, "pairs": len(pairs), "proven": len(proven), "differ": differ}


# -- output ----------------------------------------------------------------------------------------------------------


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(title="Gap to the proven optimum in %, mean (largest; coarse tasks)")
    table.add_column("pairs of")
    for heading in ("n", "tasks", "FIFO", "+Align", "+Defer", "paper", "proven", "exact ms (most)", "+Defer ms (most)"):
        table.add_column(heading, justify="right")
    for row in rows:
        ep = row["set"].rpartition(" EP")[2]
        gaps = [f"{row[f'{m}_mean']:.2f} ({row[f'{m}_max']:.1f}; {row[f'{m}_coarse']:.2f})" for m in METHODS]
        table.add_row(
            row["set"],
            str(row["pairs"]),
            f"{row['tasks']:.0f}",
            *gaps,
            f"{PAPER[int(ep)]:.2f}" if ep.isdigit() else "",
            f"{row['proven']}/{row['pairs']}",
            f"{row['ms_mean']:.1f} ({row['ms_max']:.0f})",
            f"{row['defer_ms_mean']:.2f} ({row['defer_ms_max']:.1f})",
        )
    return table


def environment() -> str:
    """Processor, Python and the libraries whose versions matter here."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    libraries = ", ".join(f"{name} {version(name)}" for name in ("networkx", "numpy", "scipy"))
    return f"{name or platform.processor()}, Python {platform.python_version()}, {libraries}"


def save(rows: Sequence[Row], summary: Sequence[Row], sensitivity: Sequence[Row], checks: Sequence[Row]) -> None:
    RESULTS.mkdir(exist_ok=True)
    data = {
        "assumptions": f"computed costs of {DEVICE}.yaml, combine reduced; nothing measured on a GPU",
        "environment": environment(),
        "paper_gap_percent": {f"EP{ep}": gap for ep, gap in PAPER.items()},
        "sets": rows,
        "summary": summary,
        "sensitivity": sensitivity,
        "agreement": checks,
    }
    (RESULTS / "interleave.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    draw(rows, RESULTS / "interleave.png")


def draw(rows: Sequence[Row], path: Path) -> None:
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(METHODS)
    for i, (method, label) in enumerate(zip(METHODS, ("FIFO", "+Align", "+Defer"), strict=True)):
        places = [x + (i - 1) * width for x in range(len(rows))]
        axes.bar(places, [row[f"{method}_mean"] for row in rows], width, label=label)
        axes.scatter(places, [row[f"{method}_coarse"] for row in rows], color="black", marker="_", zorder=3)
    for x, row in enumerate(rows):
        ep = row["set"].rpartition(" EP")[2]
        if ep.isdigit():
            axes.scatter(
                [x + width],
                [PAPER[int(ep)]],
                color="tab:red",
                marker="D",
                zorder=4,
                label="paper's heuristic" if not x else None,
            )
    axes.set_xticks(range(len(rows)), [row["set"].replace(" EP", "\nEP") for row in rows], fontsize=8)
    axes.set_ylabel("mean gap to the proven optimum, %")
    axes.set_title("Interleavings of overlap pairs against the optimum (lines: neighbouring tasks fused)")
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
