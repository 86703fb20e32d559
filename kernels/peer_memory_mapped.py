"""The CPU twin of symmetric memory: ranks are processes that map each other's files in shared memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tessera_rt.errors import Problem, TransportError
from tessera_rt.kernels.peer_memory import PeerMemory

SHARED = Path("/dev/shm")


class MappedMemory:
    """One file per rank and allocation, mapped by all ranks of ``group`` (one machine), each at addresses of its own.

    A file has no name any more when ``allocate`` returns or raises: the memory goes with the last process that maps it,
    however that ends. Raises TransportError when a rank's file cannot be mapped; a rank that does not come at all is
    reported by the group's own time-out.
    """

    def __init__(self, group: dist.ProcessGroup, folder: Path = SHARED) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._folder = group, folder

    def allocate(self, size: int) -> PeerMemory:
        descriptor, name = tempfile.mkstemp(prefix="tessera-peer-", dir=self._folder)
        try:
            os.ftruncate(descriptor, size)
            names: list[str | None] = [None] * self.world
            dist.all_gather_object(names, name, group=self._group)
            parts, problems = [], []
            for rank, other in enumerate(names):
                try:
                    parts.append(_mapped(Path(str(other)), size))
                except (OSError, ValueError) as error:
                    problems.append(
                        Problem(f"file of rank {rank}", f"{other} ({error})", f"{size} bytes, on this machine")
                    )
            failed: list[bool | None] = [None] * self.world
            dist.all_gather_object(failed, bool(problems), group=self._group)  # nobody unlinks before all have mapped
            if problems:
                raise TransportError.of(f"peer memory of rank {self.rank}", problems)
            if any(failed):
                ranks = ", ".join(str(rank) for rank, bad in enumerate(failed) if bad)
                raise TransportError(f"peer memory of rank {self.rank}: ranks {ranks} could not map it")
        finally:
            os.close(descriptor)
            Path(name).unlink()
        bases = torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64)
        return PeerMemory(self.rank, self.world, parts[self.rank], bases, parts)


def _mapped(path: Path, size: int) -> Tensor:
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
