"""The CPU twin of symmetric memory: ranks are processes that map each other's files in shared memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from tessera_rt.errors import Problem, TransportError
from tessera_rt.kernels.peer_memory import NO_USE, PeerMemory, asked_for, gathered, refuse_other_uses

SHARED = Path("/dev/shm")


class MappedMemory:
    """One file per rank and allocation, mapped by all ranks of ``group`` (one machine), each at addresses of its own.

    A file has no name any more when ``allocate`` returns or raises: the memory goes with the last process that maps it,
    however that ends. Raises TransportError when a rank's file cannot be made or mapped; a rank that does not come at
    all is reported by the group's own time-out.
    """

    def __init__(self, group: dist.ProcessGroup, folder: Path = SHARED) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._folder = group, folder

    def allocate(self, size: int, use: Mapping[str, str] = NO_USE) -> PeerMemory:
        refuse_other_uses(self.rank, *gathered(self._group, asked_for(size, use)))
        path, fault = self._file(size)
        try:
            names: list[tuple[str, str]] = [("", "")] * self.world
            dist.all_gather_object(names, (str(path), fault), group=self._group)
            parts, problems = [], []
            for rank, (other, cause) in enumerate(names):
                try:
                    parts.append(_mapped(Path(other), size, cause))
                except (OSError, ValueError) as error:
                    problems.append(
                        Problem(f"file of rank {rank}", other, f"{size} bytes, on this machine", str(error))
                    )
            failed: list[bool | None] = [None] * self.world
            dist.all_gather_object(failed, bool(problems), group=self._group)  # nobody unlinks before all have mapped
        finally:
            path.unlink(missing_ok=True)
        if problems:
            raise TransportError.of(f"peer memory of rank {self.rank}", problems)
        if any(failed):
            ranks = ", ".join(str(rank) for rank, bad in enumerate(failed) if bad)
            raise TransportError(f"peer memory of rank {self.rank}: ranks {ranks} could not map it")
        bases = torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64)
        return PeerMemory(self.rank, self.world, parts[self.rank], bases, parts)

    def _file(self, size: int) -> tuple[Path, str]:
        """This rank's file, and why it could not be made, which the others must hear instead of waiting."""
        path = self._folder / f"tessera-peer-{uuid4().hex}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:  # all of it now: a page that finds no room when it is first written would kill the process
                os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            return path, str(error)
        return path, ""


def _mapped(path: Path, size: int, fault: str) -> Tensor:
    if fault:
        raise OSError(fault)
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
