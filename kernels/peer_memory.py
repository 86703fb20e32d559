"""Memory that every rank of a group can address: one allocation per rank, and a table of their addresses.

Three allocators behind one protocol:

    SymmetricMemory   CUDA, one process per GPU: torch's symmetric memory. Has not run on a GPU yet
    MappedMemory      CPU, one process per rank: files in shared memory (peer_memory_mapped.py)
    virtual_ranks     one process: the ranks are threads (interpreted kernels), or take turns on one GPU
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tessera_rt.errors import Problem, SpecError
from tessera_rt.kernels.transport_layout import differences

NO_USE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """One rank's view: ``local`` [bytes] uint8 is its own allocation, ``bases`` [W] int64 (on its device) has the
    address of every rank's, as this rank's kernels must use it. ``keeps`` holds what the addresses belong to."""

    rank: int
    world: int
    local: Tensor
    bases: Tensor
    keeps: object = None

    def view(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The part of ``local`` from byte ``start`` on as a tensor."""
        return self.local[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


class PeerAllocator(Protocol):
    """Makes peer memory. ``allocate`` is called by all ranks in the same order with the same arguments."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def allocate(self, size: int, use: Mapping[str, str] = NO_USE) -> PeerMemory:
        """``size`` bytes, zero on every rank before the first rank's call returns; lives as long as the result.

        ``use`` names what decides the meaning of the bytes. Raises SpecError where a rank's size or use is not that of
        the others.
        """
        ...


def virtual_ranks(world: int, device: torch.device = torch.device("cpu")) -> list[PeerAllocator]:
    """Allocators of ``world`` ranks in this process on one device; may be used from one thread or from several."""
    if world < 1:
        raise SpecError.of("virtual ranks", [Problem("world", world, "at least 1")])
    shared = _Shared(world, device)
    return [_VirtualRank(rank, shared) for rank in range(world)]


def asked_for(size: int, use: Mapping[str, str]) -> dict[str, str]:
    """What all ranks must have in common."""
    return {**use, "size": str(size)}


def refuse_other_uses(rank: int, mine: Mapping[str, str], others: Mapping[int, Mapping[str, str]]) -> None:
    """Raises SpecError if a rank asked for something else: each would read and write at places of its own."""
    problems = [
        problem
        for other, asked in others.items()
        for problem in differences(mine, asked, f"as on rank {other}", "give all ranks the same")
    ]
    if problems:
        raise SpecError.of(f"peer memory of rank {rank}", problems)


def gathered(group: dist.ProcessGroup, mine: dict[str, str]) -> tuple[dict[str, str], dict[int, dict[str, str]]]:
    """``mine`` and that of every rank of ``group``. Collective."""
    found: list[dict[str, str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return mine, dict(enumerate(found))


class _Shared:
    """The allocations of virtual ranks: the first rank that asks for the n-th one makes it for all."""

    def __init__(self, world: int, device: torch.device) -> None:
        self.world = world
        self._device = device
        self._lock = threading.Lock()
        self._made: list[list[PeerMemory]] = []
        self._asked: list[tuple[int, dict[str, str]]] = []  # of which rank, and what

    def get(self, number: int, rank: int, size: int, asked: dict[str, str]) -> PeerMemory:
        with self._lock:
            if number == len(self._made):
                parts = [torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(self.world)]
                bases = torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device=self._device)
                self._made.append([PeerMemory(r, self.world, part, bases, parts) for r, part in enumerate(parts)])
                self._asked.append((rank, asked))
            found, (first, wanted) = self._made[number][rank], self._asked[number]
        refuse_other_uses(rank, asked, {first: wanted})
        return found


class _VirtualRank:
    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank, self.world = rank, shared.world
        self._shared = shared
        self._calls = 0

    def allocate(self, size: int, use: Mapping[str, str] = NO_USE) -> PeerMemory:
        self._calls += 1
        return self._shared.get(self._calls - 1, self.rank, size, asked_for(size, use))


class SymmetricMemory:
    """torch.distributed's symmetric memory (CUDA with peer access, all ranks on one node), for ``group``.

    Written against torch 2.11 to 2.13 and not run yet, for want of GPUs; the CPU twin has the same interface.
    Raises SpecError for a device that is not CUDA.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        if device.type != "cuda":
            remedy = "use MappedMemory, or virtual_ranks in one process"
            raise SpecError.of("symmetric memory", [Problem("device", str(device), "a CUDA device", remedy)])
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._device = group, device

    def allocate(self, size: int, use: Mapping[str, str] = NO_USE) -> PeerMemory:
        import torch.distributed._symmetric_memory as symmetric  # private in torch: loaded only where it is used

        refuse_other_uses(self.rank, *gathered(self._group, asked_for(size, use)))
        local = symmetric.empty(size, dtype=torch.uint8, device=self._device).zero_()
        handle = symmetric.rendezvous(local, self._group)
        offset = int(getattr(handle, "offset", 0))  # of the tensor in its mapped block; absent before torch 2.10
        bases = torch.tensor(
            [int(base) + offset for base in handle.buffer_ptrs], dtype=torch.int64, device=self._device
        )
        torch.cuda.synchronize(self._device)
        dist.barrier(group=self._group)
        return PeerMemory(self.rank, self.world, local, bases, handle)
