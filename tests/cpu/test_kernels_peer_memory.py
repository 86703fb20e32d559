"""Peer memory: virtual ranks in one process, and processes that map each other's files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tessera_rt.errors import SpecError, TransportError
from tessera_rt.kernels.peer_memory import SymmetricMemory, virtual_ranks
from tessera_rt.kernels.peer_memory_mapped import MappedMemory
from tessera_rt.testing.worker_pool import RankContext, WorkerPool


def test_virtual_ranks_share_one_table_and_start_with_zeros() -> None:
    first, second = virtual_ranks(2)
    a, b = first.allocate(64), second.allocate(64)
    assert torch.equal(a.bases, b.bases) and a.bases.tolist() == [a.local.data_ptr(), b.local.data_ptr()]
    assert (a.rank, b.rank, a.world) == (0, 1, 2) and not a.local.any()
    assert a.view(8, (2, 3), torch.int32).shape == (2, 3)
    assert first.allocate(32).local.data_ptr() != a.local.data_ptr(), "each call is an allocation of its own"
    with pytest.raises(SpecError, match="size = 16: must be 32 bytes as on the other ranks"):
        second.allocate(16)
    with pytest.raises(SpecError, match="world = 0"):
        virtual_ranks(0)


def test_symmetric_memory_is_refused_without_cuda() -> None:
    with pytest.raises(SpecError, match=r"(?s)device = 'cpu': must be a CUDA device.*MappedMemory"):
        SymmetricMemory(None, torch.device("cpu"))  # type: ignore[arg-type]


def map_memory(ctx: RankContext, folder: str, size: int, sizes_differ: bool) -> tuple[list[int], bool, str]:
    """Writes its rank into every rank's memory; (what the others wrote, own address is in the table, error)."""
    group = dist.group.WORLD
    assert group is not None
    try:
        memory = MappedMemory(group, Path(folder)).allocate(size // (2 if sizes_differ and ctx.rank == 1 else 1))
    except TransportError as error:
        return [], False, str(error)
    parts = memory.keeps
    assert isinstance(parts, list)
    for part in parts:
        part[ctx.rank] = ctx.rank + 1
    dist.barrier()
    return memory.local[:4].tolist(), int(memory.bases[ctx.rank]) == memory.local.data_ptr(), ""


def test_processes_write_into_each_other_and_leave_no_files(pool: WorkerPool, tmp_path: Path) -> None:
    results = pool.run(map_memory, 3, str(tmp_path), 4096, False)
    assert results == [([1, 2, 3, 0], True, "")] * 3
    assert list(tmp_path.iterdir()) == []


def test_sizes_that_differ_are_named_by_all_and_leave_no_files(pool: WorkerPool, tmp_path: Path) -> None:
    results = pool.run(map_memory, 3, str(tmp_path), 8192, True)
    assert "file of rank 1" in results[0][2] and "must be 8192 bytes, on this machine" in results[0][2]
    assert results[1][2] == "peer memory of rank 1: ranks 0, 2 could not map it"
    assert list(tmp_path.iterdir()) == []
