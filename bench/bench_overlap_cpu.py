"""How much of an all-to-all hides behind real compute on CPUs: two ranks over a link of 400 Mbit/s.

    python bench/bench_overlap_cpu.py [--quick]

The bench makes two network namespaces joined by a virtual link with a token-bucket limit, runs one rank in each, and
removes them. Each rank multiplies matrices on its main thread while gloo moves the bytes: compute is sized to take 1.3
times as long as the communication. Hidden share: (t_comm + t_comp - t_both) / t_comm, medians over rounds that time all
three in turn, slowest rank of each sample. Both ranks share the machine's cores, so it shows that communication needs
little of the compute thread, not what a GPU does. It needs the right to make namespaces (root); without it, it says so
and ends with code 0. Writes results/overlap_cpu.json and results/overlap_cpu.png. ``--quick``: one size, no files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from tessera_rt.microbench import overlap
from tessera_rt.microbench.traffic import all_to_all, unbudgeted

RESULTS = Path(__file__).with_name("results")
RATE = "400mbit"
ADDRESSES = ("192.0.2.1", "192.0.2.2")  # reserved for documentation: no real network has them
PORT = 29400
SIZES_MB = (0.25, 1, 4, 16)
COMPUTE_FACTOR = 1.3
MATRIX = 512
TIMEOUT_S = 120.0
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one size, no files")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    sizes, samples = ((1,), 3) if options.quick else (SIZES_MB, 15)
    if options.rank is not None:
        rows = measure(options.rank, sizes, samples)
        if options.rank == 0:
            print(json.dumps(rows))
        return
    out = Console(width=140)
    reason = why_not()
    if reason:
        out.print(f"skipped: {reason}")
        return
    out.print(f"Two ranks on {environment()}; link limited to {RATE}")
    rows = run_ranks(options.quick)
    out.print(table_of(rows))
    if not options.quick:
        save(rows)


def why_not() -> str:
    """Why the link cannot be made here; empty if it can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the program {tool} (iproute2) is not installed"
    name = f"tessera-{secrets.token_hex(3)}"
    try:
        command("ip", "netns", "add", name)
    except RuntimeError as error:
        return f"network namespaces are not permitted here ({error})"
    command("ip", "netns", "delete", name)
    return ""


@contextmanager
def limited_link() -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Two namespaces joined by a limited link: ((name, interface) of each rank). Both are removed at the end."""
    token = secrets.token_hex(3)
    names, interfaces = (f"tessera-{token}-0", f"tessera-{token}-1"), (f"ts{token}0", f"ts{token}1")
    with ExitStack() as stack:
        for name in names:
            command("ip", "netns", "add", name)
            stack.callback(command, "ip", "netns", "delete", name)  # removes its end of the link too
        command("ip", "link", "add", interfaces[0], "netns", names[0], "type", "veth", "peer", "name", interfaces[1],
                "netns", names[1])  # fmt: skip
        for name, interface, address in zip(names, interfaces, ADDRESSES, strict=True):
            inside = ("ip", "netns", "exec", name)
            command(*inside, "ip", "link", "set", "lo", "up")
            command(*inside, "ip", "address", "add", f"{address}/24", "dev", interface)
            command(*inside, "ip", "link", "set", interface, "up")
            command(*inside, "tc", "qdisc", "add", "dev", interface, "root", "tbf", "rate", RATE, "burst", "128kb",
                    "latency", "50ms")  # fmt: skip
        yield (names[0], interfaces[0]), (names[1], interfaces[1])


def run_ranks(quick: bool) -> list[Row]:
    """The rows that rank 0 measured. Both ranks are ended, by their id, whatever happens."""
    with limited_link() as places, ExitStack() as stack:
        ranks = []
        for rank, (name, interface) in enumerate(places):
            line = ["ip", "netns", "exec", name, sys.executable, __file__, "--rank", str(rank)]
            process = subprocess.Popen(
                [*line, "--quick"] if quick else line,
                env=os.environ | {"GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append(process)
        text, _ = ranks[0].communicate(timeout=600)
        ranks[1].communicate(timeout=TIMEOUT_S)
        if any(process.returncode for process in ranks):
            raise RuntimeError(f"the ranks ended with codes {[process.returncode for process in ranks]}")
    rows: list[Row] = json.loads(text.splitlines()[-1])
    return rows


def measure(rank: int, sizes: Sequence[float], samples: int) -> list[Row]:
    """What each rank runs."""
    torch.set_num_threads(1)
    store = dist.TCPStore(ADDRESSES[0], PORT, 2, is_master=rank == 0, timeout=timedelta(seconds=TIMEOUT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S))
    group = dist.group.WORLD
    assert group is not None
    a = torch.randn(MATRIX, MATRIX)
    b = torch.randn(MATRIX, MATRIX)
    rows = []
    for size in sizes:
        count = round(size * 1e6) // 2 * 2
        communicate = all_to_all(count, device=torch.device("cpu"), group=group, timeout_s=TIMEOUT_S)
        products = agreed(COMPUTE_FACTOR * seconds(communicate) / seconds(lambda: a @ b))

        def compute(_budget: object, products: int = products) -> None:
            for _ in range(products):
                torch.mm(a, b)

        result = overlap(
            unbudgeted(communicate), compute, samples=samples, device=torch.device("cpu"), group=group,
            timeout_s=TIMEOUT_S,
        )  # fmt: skip
        row = result.rows[0]
        hidden = (row.comm.ns + row.comp.ns - row.both.ns) / row.comm.ns
        rows.append({"size_bytes": count, "products": products, "hidden": hidden, **row.as_row()})
    dist.destroy_process_group()
    return rows


def seconds(call: Any) -> float:
    """The median of five calls."""
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return median(taken)


def agreed(products: float) -> int:
    """The larger of both ranks' numbers."""
    found = torch.tensor(products)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return max(1, round(float(found)))


def command(*words: str) -> None:
    """Raises RuntimeError with what a command that failed says."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")


def environment() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, torch {torch.__version__}"


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(title="share of an all-to-all that hides behind compute")
    for column in ("MB sent by a rank", "comm ms", "comp ms", "both ms", "one after the other", "hidden", "spread"):
        table.add_column(column, justify="right")
    for row in rows:
        comm, comp, both = (row[f"{name}_ns"] / 1e6 for name in ("comm", "comp", "both"))
        table.add_row(
            f"{row['size_bytes'] / 1e6:g}", f"{comm:.2f}", f"{comp:.2f}", f"{both:.2f}", f"{comm + comp:.2f}",
            f"{100 * row['hidden']:.0f} %", f"{100 * row['spread']:.0f} %",
        )  # fmt: skip
    return table


def save(rows: Sequence[Row]) -> None:
    data = {
        "claim": "share of a gloo all-to-all between two ranks over a 400 Mbit/s link that hides behind compute",
        "hardware": environment(),
        "rate": RATE,
        "rows": list(rows),
    }
    (RESULTS / "overlap_cpu.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([row["size_bytes"] / 1e6 for row in rows], [100 * row["hidden"] for row in rows], marker="o")
    axes.set(xscale="log", xlabel="MB sent by a rank", ylabel="% hidden", ylim=(0, 105))
    axes.set_title(f"all-to-all hidden behind compute, {RATE} link", fontsize="medium")
    figure.savefig(RESULTS / "overlap_cpu.png")


if __name__ == "__main__":
    main()
