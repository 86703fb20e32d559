"""What the ranks of test_launch.py run: new processes import it by name, so it is no part of the test module."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tessera_rt.engine.watchdog import FailureReporter
from tessera_rt.errors import Problem, SpecError, TesseraError
from tessera_rt.launch import run_local


def leave_pid(folder: Path) -> int:
    rank = dist.get_rank()
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    return rank


def sums(folder: Path, base: int) -> tuple[int, int, int]:
    rank = leave_pid(folder)
    total = torch.tensor([base + rank])
    dist.all_reduce(total)
    print(f"rank {rank} printed this")
    return rank, int(total), torch.get_num_threads()


def steps(folder: Path, end: str, victim: int) -> None:
    """Steps of an all-reduce each; in the third one rank ``victim`` comes to an end of the given kind."""
    rank = leave_pid(folder)
    reporter = FailureReporter.for_group(dist.group.WORLD)
    for step in range(1000):
        with reporter.guard(f"step {step}"):
            reporter.arrive(f"{step % 7}B{step}")
            if step == 3 and rank == victim:
                stop(end)
            dist.all_reduce(torch.ones(1))


def stop(end: str) -> None:
    match end:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exits":
            os._exit(3)
        case "silent":
            os._exit(0)
        case "raises":
            raise ValueError("the dog ate it")
        case "user":
            raise SpecError.of("file", [Problem("field", 1, "2")])
        case "ours":
            raise TesseraError("the disk is full")
        case "hangs":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)


def first_is_done_early(folder: Path) -> None:
    if leave_pid(folder):
        time.sleep(1000)


def wait_for_ever(folder: Path) -> None:
    leave_pid(folder)
    time.sleep(1000)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job that a script starts with & ignores it
    run_local(wait_for_ever, 2, (Path(sys.argv[1]),), stopped_at=lambda: "at a place")
