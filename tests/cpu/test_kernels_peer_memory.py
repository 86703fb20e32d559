"""Peer memory: virtual ranks in one process, and processes that map each other's files."""

from __future__ import annotations

import errno
import os
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
    with pytest.raises(SpecError, match=r"(?s)rank 1.*size = '16': must be 32, as on rank 0"):
        second.allocate(16)
    first.allocate(8, {"form": "tokens"})
    with pytest.raises(SpecError, match="form = 'rows': must be tokens, as on rank 0"):
        second.allocate(8, {"form": "rows"})
    with pytest.raises(SpecError, match="world = 0"):
        virtual_ranks(0)


def test_symmetric_memory_is_refused_without_cuda() -> None:
    with pytest.raises(SpecError, match=r"(?s)device = 'cpu': must be a CUDA device.*MappedMemory"):
        SymmetricMemory(None, torch.device("cpu"))  # type: ignore[arg-type]


def map_memory(ctx: RankContext, folder: str, size: int, fault: str) -> tuple[list[int], bool, str]:
    """Writes its rank into every rank's memory; (what the others wrote, own address is in the table, error). Rank 1 has
    the fault."""
    group = dist.group.WORLD
    assert group is not None
    mine = fault if ctx.rank == 1 else ""
    memory_folder = Path(folder, "missing") if mine == "folder" else Path(folder)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if mine == "full":
                patch.setattr(os, "posix_fallocate", _no_room)
            memory = MappedMemory(group, memory_folder).allocate(
                size // (2 if mine == "size" else 1), {"form": mine if mine == "use" else ""}
            )
    except (TransportError, SpecError) as error:
        return [], False, str(error)
    parts = memory.keeps
    assert isinstance(parts, list)
    for part in parts:
        part[ctx.rank] = ctx.rank + 1
    dist.barrier()
    return memory.local[:4].tolist(), int(memory.bases[ctx.rank]) == memory.local.data_ptr(), ""


def _no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_processes_write_into_each_other_and_leave_no_files(pool: WorkerPool, tmp_path: Path) -> None:
    results = pool.run(map_memory, 3, str(tmp_path), 4096, "")
    assert results == [([1, 2, 3, 0], True, "")] * 3
    assert list(tmp_path.iterdir()) == []


def test_sizes_and_uses_that_differ_are_named_by_all(pool: WorkerPool, tmp_path: Path) -> None:
    results = pool.run(map_memory, 3, str(tmp_path), 8192, "size")
    for rank in (0, 2):
        assert f"rank {rank}" in results[rank][2] and "size = '8192': must be 4096, as on rank 1" in results[rank][2]
    assert "size = '4096': must be 8192, as on rank 0" in results[1][2] and "as on rank 2" in results[1][2]
    results = pool.run(map_memory, 3, str(tmp_path), 8192, "use")
    assert "form = '': must be use, as on rank 1" in results[0][2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("fault", "cause"), [("full", "No space left"), ("folder", "No such file or directory")])
def test_a_file_that_cannot_be_made_is_named_by_all(pool: WorkerPool, tmp_path: Path, fault: str, cause: str) -> None:
    """Memory that is only promised would kill the process that first writes to it; a rank that fails alone would leave
    the others waiting."""
    results = pool.run(map_memory, 3, str(tmp_path), 8192, fault, timeout_s=60)
    for _, _, message in results:
        assert "file of rank 1" in message and cause in message
    assert list(tmp_path.iterdir()) == []
