"""The worker pool: results, failures of every kind, and that the next job always finds healthy workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest
import torch
import torch.distributed as dist

from tessera_rt.testing.worker_pool import RankContext, RankResult, WorkerFailure, WorkerPool


@dataclass(frozen=True)
class Point:
    """A class that the workers can't import."""

    x: int
    y: int


@pytest.fixture(scope="module")
def own_pool() -> Iterator[WorkerPool]:
    """A pool that these tests may damage."""
    with WorkerPool(max_world=4) as workers:
        yield workers


def sum_of_ranks(ctx: RankContext) -> float:
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (ctx.rank, ctx.world, "gloo")
    tensor = torch.tensor([float(ctx.rank)])
    dist.all_reduce(tensor)
    return tensor.item()


@pytest.mark.parametrize("world", [2, 4, 1, 3, 2])
def test_all_reduce_on_jobs_of_different_sizes(own_pool: WorkerPool, world: int) -> None:
    assert own_pool.run(sum_of_ranks, world) == [sum(range(world))] * world


def test_workers_are_kept_between_jobs(own_pool: WorkerPool) -> None:
    first = own_pool.run(lambda ctx: os.getpid(), 2)
    assert own_pool.run(lambda ctx: os.getpid(), 2) == first
    assert first == own_pool.pids[:2]


def test_results_come_by_rank_whoever_ends_first(own_pool: WorkerPool) -> None:
    def late_first_rank(ctx: RankContext) -> int:
        time.sleep(0.2 * (ctx.world - ctx.rank))
        return 10 * ctx.rank

    assert own_pool.run(late_first_rank, 3) == [0, 10, 20]


def test_arguments_results_and_helpers_of_a_test_module(own_pool: WorkerPool) -> None:
    def shifted(ctx: RankContext, point: Point, *, by: torch.Tensor) -> tuple[Point, torch.Tensor]:
        return Point(point.x + ctx.rank, point.y), by + ctx.rank

    results = own_pool.run(shifted, 2, Point(1, 2), by=torch.zeros(2, dtype=torch.bfloat16))
    assert [point for point, _ in results] == [Point(1, 2), Point(2, 2)]
    assert torch.equal(results[1][1], torch.ones(2, dtype=torch.bfloat16))


def test_each_job_has_its_own_store_and_torch_settings(own_pool: WorkerPool) -> None:
    def count(ctx: RankContext) -> tuple[int, torch.dtype, float]:
        number = ctx.store.add("calls", 1)
        torch.set_default_dtype(torch.float64)
        return number, torch.tensor(0.0).dtype, torch.rand(1, dtype=torch.float32).item()

    def seen_default(ctx: RankContext) -> torch.dtype:
        return torch.get_default_dtype()

    first, second = own_pool.run(count, 2), own_pool.run(count, 2)
    assert sorted(number for number, _, _ in first) == sorted(number for number, _, _ in second) == [1, 2]
    assert {value for _, _, value in first} == {value for _, _, value in second}
    assert own_pool.run(seen_default, 2) == [torch.float32] * 2


def test_groups_made_by_a_job(own_pool: WorkerPool) -> None:
    def pairs(ctx: RankContext) -> float:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        tensor = torch.tensor([float(ctx.rank)])
        dist.all_reduce(tensor, group=groups[ctx.rank // 2])
        return tensor.item()

    assert own_pool.run(pairs, 4) == [1, 1, 5, 5]
    assert own_pool.run(pairs, 4) == [1, 1, 5, 5]


def test_a_raising_rank(own_pool: WorkerPool) -> None:
    def raise_on_one(ctx: RankContext) -> int:
        if ctx.rank == 1:
            raise KeyError("no such expert")
        return ctx.rank

    with pytest.raises(WorkerFailure, match="rank 1: KeyError: 'no such expert'") as caught:
        own_pool.run(raise_on_one, 3)
    assert list(caught.value.failures) == [1]
    failure = caught.value.failures[1]
    assert (failure.type_name, failure.message) == ("KeyError", "'no such expert'")
    assert "raise_on_one" in failure.traceback
    assert own_pool.run(sum_of_ranks, 3) == [3, 3, 3]


def test_the_cause_comes_first_when_its_peers_fail_too(own_pool: WorkerPool) -> None:
    def raise_before_collective(ctx: RankContext) -> float:
        if ctx.rank == 2:
            time.sleep(0.3)
            raise ValueError("the cause")
        return sum_of_ranks(ctx)

    with pytest.raises(WorkerFailure, match="first rank 2") as caught:
        own_pool.run(raise_before_collective, 3)
    assert next(iter(caught.value.failures)) == 2
    assert own_pool.run(sum_of_ranks, 3) == [3, 3, 3]


def test_a_killed_rank_and_a_peer_that_waits_for_nothing(own_pool: WorkerPool) -> None:
    def die(ctx: RankContext) -> None:
        if ctx.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if ctx.rank == 1:
            time.sleep(600)

    before = own_pool.run(lambda ctx: os.getpid(), 3)
    with pytest.raises(WorkerFailure, match="killed by SIGKILL") as caught:
        own_pool.run(die, 3, grace_s=0.5)
    kinds = {rank: failure.type_name for rank, failure in caught.value.failures.items()}
    assert kinds == {0: "WorkerDied", 1: "Abandoned"}
    assert "time.sleep(600)" in caught.value.failures[1].traceback, "says where the rank was"
    after = own_pool.run(lambda ctx: os.getpid(), 3)
    assert after[2] == before[2] and not set(after[:2]) & set(before[:2]), "only the lost workers are replaced"
    assert not any(psutil.pid_exists(pid) for pid in before[:2])


def test_a_rank_that_exits(own_pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match="ended with exit code 7"):
        own_pool.run(lambda ctx: os._exit(7), 1)
    assert own_pool.run(sum_of_ranks, 2) == [1, 1]


def test_a_hanging_rank_hits_the_time_out(own_pool: WorkerPool) -> None:
    def hang(ctx: RankContext) -> int:
        if ctx.rank == 1:
            while True:
                time.sleep(0.05)
        return ctx.rank

    with pytest.raises(WorkerFailure, match="no answer within 1 s") as caught:
        own_pool.run(hang, 2, timeout_s=1)
    assert {rank: failure.type_name for rank, failure in caught.value.failures.items()} == {1: "TimedOut"}
    assert "in hang" in caught.value.failures[1].traceback
    assert own_pool.run(sum_of_ranks, 4) == [6] * 4


def test_an_unanswered_receive_leaves_no_busy_worker(own_pool: WorkerPool) -> None:
    def receive_from_nobody(ctx: RankContext) -> dist.Work | None:
        if ctx.rank == 0:
            dist.irecv(torch.zeros(4), src=1)
            raise ValueError("with a receive outstanding")
        return None

    results = own_pool.run(receive_from_nobody, 2, expect_failure=True)
    assert results[0].failure.type_name == "ValueError"
    assert results[1].ok
    assert own_pool.run(sum_of_ranks, 2) == [1, 1]


def test_expected_failures_are_returned_by_rank(own_pool: WorkerPool) -> None:
    def raise_on_first(ctx: RankContext) -> int:
        if ctx.rank == 0:
            raise ValueError("expected")
        time.sleep(0.3)
        return ctx.rank

    results = own_pool.run(raise_on_first, 3, expect_failure=True)
    assert [result.ok for result in results] == [False, True, True]
    assert results[0].failure.message == "expected"
    assert results[1:] == [RankResult(1, 1), RankResult(2, 2)], "the others had the time to end by themselves"


def test_a_result_that_cannot_be_sent_is_that_rank_s_failure(own_pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match="pickle"):
        own_pool.run(lambda ctx: (x for x in range(3)), 1)
    assert own_pool.run(sum_of_ranks, 1) == [0]


def test_an_interrupted_run_leaves_no_busy_worker(own_pool: WorkerPool) -> None:
    class Interruption(Exception):
        pass

    def interrupt(signum: int, frame: object) -> None:
        raise Interruption

    previous = signal.signal(signal.SIGALRM, interrupt)
    own_pool.run(sum_of_ranks, 2)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(Interruption):
            own_pool.run(lambda ctx: time.sleep(600), 2, timeout_s=20)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert own_pool.run(sum_of_ranks, 2) == [1, 1]


@pytest.mark.parametrize("world", [0, 5])
def test_worlds_out_of_range(own_pool: WorkerPool, world: int) -> None:
    with pytest.raises(ValueError, match=f"world is {world}; allowed: 1 to 4"):
        own_pool.run(sum_of_ranks, world)


def test_close_ends_all_workers() -> None:
    pool = WorkerPool(max_world=2)
    pids = pool.run(lambda ctx: os.getpid(), 2)
    assert all(psutil.pid_exists(pid) for pid in pids)
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(sum_of_ranks, 1)


def test_workers_end_with_a_killed_parent() -> None:
    program = textwrap.dedent("""
        import os, time
        from tessera_rt.testing.worker_pool import WorkerPool

        pool = WorkerPool(2)
        print(*pool.run(lambda ctx: os.getpid(), 2), flush=True)
        pool.run(lambda ctx: time.sleep(600), 2)
    """)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        time.sleep(0.5)
        parent.kill()
    gone, alive = psutil.wait_procs(workers, timeout=20)
    assert len(gone) == 2, alive
