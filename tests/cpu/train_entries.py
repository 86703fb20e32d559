"""What the ranks of test_launch.py run when they train; apart from launch_entries.py, since it loads slowly."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from tessera_rt.config import TrainConfig
from tessera_rt.engine.watchdog import FailureReporter
from tessera_rt.launch import init_from_torchrun, under_torchrun
from tessera_rt.plan import Plan
from tessera_rt.train import TrainSummary, train


def train_and_die(folder: Path, config: TrainConfig, plan: Plan, victim: int, step: int, action: str) -> TrainSummary:
    """Train; rank ``victim`` is killed as it comes to ``action`` of step ``step`` (from 1)."""
    rank = dist.get_rank()
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    arrive = FailureReporter.arrive
    seen = []

    def arrive_or_die(reporter: FailureReporter, text: str) -> None:
        arrive(reporter, text)
        if rank == victim and text == action:
            seen.append(text)
            if len(seen) == step:
                os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(FailureReporter, "arrive", arrive_or_die):
        return train(config, plan, folder / "run")


def under_torch(folder: Path) -> None:
    """This process is one of torchrun's ranks: train, and leave the summary in the folder."""
    assert under_torchrun()
    init_from_torchrun(timeout_s=60)
    config, plan = pickle.loads((folder / "job").read_bytes())
    summary = train(config, plan)
    (folder / f"{dist.get_rank()}.summary").write_bytes(pickle.dumps(summary))
    dist.destroy_process_group()


if __name__ == "__main__":
    under_torch(Path(sys.argv[1]))
