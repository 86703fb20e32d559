"""Two processes that share one GPU through torch's symmetric memory, where torch lets them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tessera_rt.kernels.peer_memory import SymmetricMemory
from tessera_rt.kernels.transport import PeerTransport
from tessera_rt.kernels.transport_layout import Traffic

TIMEOUT_S = 20.0
REFUSED = 3  # exit code of a process that torch gives no memory to share


def run_two(seconds: float) -> tuple[str, str]:
    """(why two processes cannot share the device, what went wrong): both empty if they exchanged counts."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
        line = [sys.executable, __file__, str(Path(folder) / "store")]
        ranks = [
            subprocess.Popen([*line, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             text=True)
            for rank in range(2)
        ]  # fmt: skip
        deadline = time.monotonic() + max(5.0, min(40.0, seconds))
        try:
            texts = [rank.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for rank in ranks]
        except subprocess.TimeoutExpired:
            return "the processes did not end in time: kernels that wait for each other may not run at once", ""
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    said = [(rank.returncode, text.strip()[-1000:] or f"exit code {rank.returncode}")
            for rank, text in zip(ranks, texts, strict=True)]  # fmt: skip
    refusals = [text.splitlines()[-1] for code, text in said if code == REFUSED]
    if refusals:
        return f"not possible here: {refusals[0]}", ""
    return "", next((text for code, text in said if code), "")


def main(store: str, rank: int) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2,
                            timeout=timedelta(seconds=TIMEOUT_S))  # fmt: skip
    group = dist.group.WORLD
    assert group is not None
    traffic = Traffic(world=2, experts=4, top_k=2, hidden=64, tokens=8, dtype=torch.float32)
    try:
        transport = PeerTransport(traffic, SymmetricMemory(group, device))
    except RuntimeError as error:  # torch's refusal; the other process, which waits for this one, ends likewise
        print(str(error).strip().splitlines()[0], flush=True)
        sys.exit(REFUSED)
    ids = torch.tensor([[0, 3]] * (rank + 1), dtype=torch.int32, device=device)
    counts = transport.exchange(ids).wait().counts
    transport.check()
    assert counts.tolist() == [[1, 0, 0, 1], [2, 0, 0, 2]], counts.tolist()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
