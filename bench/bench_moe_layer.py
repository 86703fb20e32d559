"""Forward and backward of a Qwen3-MoE block on the CPU: Tessera's layer beside transformers' implementations.

    python bench/bench_moe_layer.py [--rounds N] [--threads N] [--cells 0 1 ...] [--quick]

Both sides hold the same weights (checked: outputs and gradients agree) and run in turn, in an order that turns from
round to round; a ratio is the median over rounds of the peer's time over ours, so load from elsewhere meets both.

Peers of transformers: ``grouped_mm``, its default and the one to beat; ``batched_mm``, not where it would gather more
than 4 GB of weights; ``eager``, not where its backward would write more than 100 GB of zeros (a gradient of all experts
for every expert). The last two run in the last round only: they are slow. A step is zero_grad(set_to_none), forward,
backward. Wall time decides; CPU time of the process stands beside it. Peak memory is the growth of the resident set
over weights and inputs, in processes of its own for each side: the median of 5, since single ones differ by several
percent (in the committed results the two largest cells' was taken once, and memory in a run of its own, after times).

Writes results/moe_layer.json and results/moe_layer.png; ``--quick``: the smallest cell, two rounds, no files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tessera_rt.moe import MoE, MoEConfig, RouterRule

RESULTS = Path(__file__).with_name("results")
OURS, GROUPED, BATCHED, EAGER = "tessera", "grouped_mm", "batched_mm", "eager"
LEAST, MEAN, AIM = 0.95, 1.0, 1.3
MOST_GATHERED = 4e9  # bytes
MOST_ZEROED = 100e9  # bytes
SLOW_ROUNDS = 1
PEAK_RUNS = 5
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """One size: hidden, intermediate, experts, choices per token, tokens."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    tokens: int
    dtype: str

    def __str__(self) -> str:
        return f"H{self.hidden} I{self.intermediate} E{self.experts} K{self.top_k} T{self.tokens} {self.dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.dtype]

    @property
    def gathered(self) -> int:
        """Bytes of weights that batched_mm copies: one expert's for every choice."""
        return self.tokens * self.top_k * 3 * self.hidden * self.intermediate * self.torch_dtype.itemsize

    @property
    def zeroed(self) -> int:
        """Bytes that eager's backward fills: the gradient of all experts, once for each."""
        return self.experts**2 * 3 * self.hidden * self.intermediate * self.torch_dtype.itemsize


CELLS = tuple(
    Cell(*sizes, dtype)
    for sizes in ((512, 256, 64, 8, 64), (512, 256, 64, 8, 1024), (1024, 512, 16, 2, 1024), (2048, 768, 128, 8, 256))
    for dtype in ("fp32", "bf16")
)


def peer(cell: Cell) -> Qwen3MoeSparseMoeBlock:
    config = Qwen3MoeConfig(
        hidden_size=cell.hidden,
        moe_intermediate_size=cell.intermediate,
        num_experts=cell.experts,
        num_experts_per_tok=cell.top_k,
        norm_topk_prob=True,
    )
    with torch.device("meta"):
        block = Qwen3MoeSparseMoeBlock(config).to(cell.torch_dtype)
    block.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return block


def ours(cell: Cell, block: Qwen3MoeSparseMoeBlock) -> MoE:
    """Tessera's layer with the block's own parameters."""
    config = MoEConfig(
        hidden=cell.hidden,
        intermediate=cell.intermediate,
        experts=cell.experts,
        router=RouterRule(top_k=cell.top_k, renormalize=True),
    )
    layer = MoE(config, device=torch.device("meta"), dtype=cell.torch_dtype)
    layer.router.weight = block.gate.weight
    layer.experts.gate_up.weight = block.experts.gate_up_proj
    layer.experts.down.weight = block.experts.down_proj
    return layer


def inputs(cell: Cell) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, cell.tokens, cell.hidden, generator=generator).to(cell.torch_dtype)
    return x.requires_grad_(), torch.randn(x.shape, generator=generator).to(cell.torch_dtype)


def steps(cell: Cell) -> tuple[dict[str, Callable[[], Tensor]], nn.Module, Tensor]:
    """A step of each implementation that this cell has, by name; the block with the shared parameters; the input."""
    block = peer(cell)
    layer, (x, grad) = ours(cell, block), inputs(cell)

    def step(module: nn.Module, implementation: str = "") -> Tensor:
        if implementation:
            block.experts.config._experts_implementation = implementation
        block.zero_grad(set_to_none=True)
        x.grad = None
        y: Tensor = module(x)
        y.backward(grad)
        return y.detach()

    found: dict[str, Callable[[], Tensor]] = {OURS: lambda: step(layer), GROUPED: lambda: step(block, GROUPED)}
    if cell.gathered <= MOST_GATHERED:
        found[BATCHED] = lambda: step(block, BATCHED)
    if cell.zeroed <= MOST_ZEROED:
        found[EAGER] = lambda: step(block, EAGER)
    return found, block, x


def check_equal(cell: Cell, found: dict[str, Callable[[], Tensor]], block: nn.Module, x: Tensor) -> float:
    """The largest difference of outputs and gradients between ours and grouped_mm, relative to the largest value."""
    results = []
    for name in (OURS, GROUPED):
        y = found[name]()
        results.append([y, *(t.grad for t in (x, *block.parameters()) if t.grad is not None)])
    # In bf16 both sides round, and transformers also its router; a token whose choice differs would show as order one.
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True))
    allowed = 1e-4 if cell.dtype == "fp32" else 0.05
    if not worst <= allowed and cell.dtype == "fp32":
        raise AssertionError(f"{cell}: outputs or gradients differ by {worst:.1e}")
    return worst


def measured(cell: Cell, rounds: int, slow_rounds: int) -> Row:
    found, block, x = steps(cell)
    difference = check_equal(cell, found, block, x)
    names, times = list(found), {name: [] for name in found}
    for i in range(rounds):
        order = names[i % len(names) :] + names[: i % len(names)]
        for name in order:
            if name in (EAGER, BATCHED) and i < rounds - slow_rounds:
                continue
            wall, cpu = time.perf_counter(), time.process_time()
            found[name]()
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    row: Row = {**asdict(cell), "difference": difference, "gathered_bytes": cell.gathered, "rounds": rounds}
    for name in (OURS, GROUPED, BATCHED, EAGER):
        of_name = times.get(name, [])
        row[name] = None
        if of_name:
            pairs = list(zip(of_name, times[OURS][-len(of_name) :], strict=True))
            row[name] = {
                "wall_s": statistics.median(wall for wall, _ in of_name),
                "cpu_s": statistics.median(cpu for _, cpu in of_name),
                "wall_ratio": statistics.median(a[0] / b[0] for a, b in pairs),
                "cpu_ratio": statistics.median(a[1] / b[1] for a, b in pairs),
                "rounds": len(of_name),
            }
    return row


# -- memory -----------------------------------------------------------------------------------------------------------


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def peak_here(cell: Cell, name: str) -> int:
    """Growth of the resident set over two steps, above weights and inputs (this process runs nothing else)."""
    found, block, _ = steps(cell)
    small = Cell(64, 32, 4, 2, 8, cell.dtype)
    steps(small)[0][name]()  # threads and libraries are there before the measurement
    block.zero_grad(set_to_none=True)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    for _ in range(2):
        found[name]()
    return resident("VmHWM") - before


def peak_memory(cell: Cell, name: str, threads: int) -> int:
    command = [sys.executable, __file__, "--peak", name, "--threads", str(threads), "--cells", str(CELLS.index(cell))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    if done.returncode:
        raise RuntimeError(f"memory of {name} in {cell}: {done.stderr[-2000:]}")
    return int(done.stdout.split()[-1])


# -- output -----------------------------------------------------------------------------------------------------------


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(title="forward + backward; ratio = transformers' time over Tessera's (median of paired rounds)")
    for heading in ("cell", "ours s", "grouped_mm", "(CPU time)", "batched_mm", "eager", "peak MB", "grouped_mm's MB"):
        table.add_column(heading, justify="left" if heading == "cell" else "right")
    for row in rows:
        cell = cell_of(row)
        batched = f"{row[BATCHED]['wall_ratio']:.2f}" if row[BATCHED] else f"skipped: {cell.gathered / 1e9:.0f} GB"
        eager = f"{row[EAGER]['wall_ratio']:.1f}" if row[EAGER] else f"skipped: {cell.zeroed / 1e9:.0f} GB"
        peaks = (f"{row['peak_bytes'][name] / 1e6:.0f}" for name in (OURS, GROUPED))
        grouped = row[GROUPED]
        table.add_row(
            str(cell), f"{row[OURS]['wall_s']:.3f}", f"{grouped['wall_ratio']:.2f}", f"{grouped['cpu_ratio']:.2f}",
            batched, eager, *peaks,
        )  # fmt: skip
    return table


def cell_of(row: Row) -> Cell:
    return Cell(*(row[name] for name in ("hidden", "intermediate", "experts", "top_k", "tokens", "dtype")))


def claims(rows: Sequence[Row]) -> list[str]:
    ratios = [row[GROUPED]["wall_ratio"] for row in rows]
    cpu = [row[GROUPED]["cpu_ratio"] for row in rows]
    more = [str(cell_of(row)) for row in rows if row["peak_bytes"][OURS] > max(row["peaks_bytes"][GROUPED])]
    mean, cpu_mean = statistics.geometric_mean(ratios), statistics.geometric_mean(cpu)
    return [
        f"against grouped_mm: {min(ratios):.2f} to {max(ratios):.2f} times as fast, {mean:.2f} on (geometric) average; "
        f"in CPU time {min(cpu):.2f} to {max(cpu):.2f}, {cpu_mean:.2f} on average",
        f"targets: at least {LEAST} in every cell, {MEAN} on average, aim {AIM}",
        f"peak memory (median) above all of grouped_mm's in: {', '.join(more) or 'no cell'}",
    ]


def draw(rows: Sequence[Row], path: Path, note: str) -> None:
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    labels = [str(cell_of(row)) for row in rows]
    places = range(len(rows))
    left.barh([p - 0.2 for p in places], [row[GROUPED]["wall_ratio"] for row in rows], 0.4, label="wall time")
    left.barh([p + 0.2 for p in places], [row[GROUPED]["cpu_ratio"] for row in rows], 0.4, label="CPU time")
    left.axvline(1.0, color="black", linewidth=1)
    left.set_yticks(list(places), labels)
    left.invert_yaxis()
    left.set_xlabel("grouped_mm's time / Tessera's")
    left.legend(loc="lower right")
    for name, shift in ((OURS, -0.2), (GROUPED, 0.2)):
        right.barh([p + shift for p in places], [row["peak_bytes"][name] / 1e6 for row in rows], 0.4, label=name)
    right.set_xscale("log")
    right.set_xlabel("peak memory above weights and inputs, MB")
    right.legend(loc="lower right")
    figure.suptitle(f"MoE layer, forward + backward, on the CPU\n{note}", fontsize=9)
    figure.savefig(path, dpi=120)


def machine(threads: int) -> Row:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": threads,
        "huge_pages": pages.read_text(encoding="ascii").strip() if pages.exists() else "unknown",
        "load_at_start": os.getloadavg()[0],
        "niceness": os.nice(0),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers")},
    }


def save(rows: Sequence[Row], where: Row) -> None:
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"machine": where, "claims": claims(rows), "cells": rows}, indent=1)
    (RESULTS / "moe_layer.json").write_text(text + "\n", encoding="utf-8")
    note = f"{where['cpu']}, {where['threads']} threads, torch {where['torch']}, transformers {where['transformers']}"
    draw(rows, RESULTS / "moe_layer.png", note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cells", type=int, nargs="*", default=range(len(CELLS)))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peak", default="", help="print one implementation's peak memory in one cell, and stop")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", module="transformers")
    if options.peak:
        print(peak_here(CELLS[options.cells[0]], options.peak))
        return
    where, console = machine(options.threads), Console(width=140)
    console.print(where)
    rows: list[Row] = []
    rounds, slow_rounds = (2, 1) if options.quick else (options.rounds, min(SLOW_ROUNDS, options.rounds))
    for cell in CELLS[:1] if options.quick else [CELLS[i] for i in options.cells]:
        row = measured(cell, rounds, slow_rounds)
        row["peaks_bytes"] = {
            name: [peak_memory(cell, name, options.threads) for _ in range(PEAK_RUNS)] for name in (OURS, GROUPED)
        }
        row["peak_bytes"] = {name: statistics.median(found) for name, found in row["peaks_bytes"].items()}
        rows.append(row)
        console.print(table_of(rows[-1:]))
        if not options.quick:
            save(rows, where)
    console.print(table_of(rows))
    console.print(*claims(rows), sep="\n")


if __name__ == "__main__":
    main()
