"""Failure reports: the first cause is kept and quoted, chains of waiting ranks are followed to the silent one."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tessera_rt.engine.watchdog import PROGRESS_DIR, FailureReporter, ProgressNotes
from tessera_rt.errors import Problem, ScheduleError, SpecError, TransportError
from tessera_rt.testing.worker_pool import RankContext, WorkerPool
from tessera_rt.waits import WaitError, short_cause, wait


def reporters(world: int, *, grace_s: float = 0.05, folder: Path | None = None) -> list[FailureReporter]:
    store = dist.HashStore()
    return [FailureReporter(store, rank, world, grace_s=grace_s, folder=folder) for rank in range(world)]


def waiting(text: str, *waits_for: int) -> WaitError:
    error = WaitError(text)
    error.waits_for = waits_for
    return error


def test_the_first_cause_wins_and_is_quoted() -> None:
    first, second, third = reporters(3)
    assert first.cause() is None
    first.check()
    second.fail("expert 3 has NaN")
    third.fail("too late")
    assert first.cause() == "rank 1: expert 3 has NaN"
    with pytest.raises(TransportError, match="rank 0 stopped, since another rank failed:\n  rank 1: expert 3 has NaN"):
        first.check()
    text = first.explain("rank 0 waited 1 s for F", (1,))
    assert text == "rank 0 waited 1 s for F\n  first failure, on rank 1: expert 3 has NaN"


def test_a_chain_of_waits_ends_at_the_silent_rank(tmp_path: Path) -> None:
    ranks = reporters(4, folder=tmp_path)
    ranks[3].arrive("3F2")
    ranks[1].arrive("1B0")
    ranks[1]._report("rank 1 waited 1 s for F of 2", (2,))
    ranks[2]._report("rank 2 waited 1 s for F of 3", (3,))
    text = ranks[0].explain("rank 0 waited 1 s for B of 1", (1,))
    assert text.splitlines() == [
        "rank 0 waited 1 s for B of 1",
        "  rank 3 reported nothing; it was at 3F2",
        "  rank 1 reported: rank 1 waited 1 s for F of 2",
        "  rank 2 reported: rank 2 waited 1 s for F of 3",
    ]
    assert "first failure, on rank 0" in ranks[2].explain("rank 2 waited", (3,)), "the first full account is the cause"


def test_a_cycle_of_waits_ends() -> None:
    ranks = reporters(2)
    ranks[1]._report("rank 1 waited for rank 0", (0,))
    assert ranks[0].explain("rank 0 waited for rank 1", (1,)).count("waited") == 2


def test_explaining_waits_for_a_cause_that_comes_a_little_later() -> None:
    ranks = reporters(2, grace_s=20)
    timer = threading.Timer(0.2, ranks[1].fail, ["out of memory"])
    timer.start()
    assert ranks[0].explain("rank 0 lost rank 1", (1,)).endswith("first failure, on rank 1: out of memory")
    timer.join()


def test_guard_reports_what_goes_wrong_inside() -> None:
    ranks = reporters(5)
    ranks[0].arrive("0F1")
    with pytest.raises(ScheduleError, match="bad order"), ranks[0].guard("step 3"):
        raise ScheduleError("bad order")
    assert ranks[1].cause() == "rank 0: ScheduleError in step 3, at 0F1: bad order"
    with pytest.raises(TransportError, match="rank 1 waited(.|\n)*first failure, on rank 0") as caught:
        with ranks[1].guard("step 3"), ranks[1].guard("inner"):
            raise waiting("rank 1 waited", 0)
    assert str(caught.value).count("first failure") == 1, "explained once"
    assert "first failure, on rank 0" in str(pickle.loads(pickle.dumps(caught.value)))
    with pytest.raises(TransportError, match="rank 2 lost its connection in step 3: Connection closed by peer"):
        with ranks[2].guard("step 3"):
            raise RuntimeError(
                "[/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:9. This is typically a crash."
            )
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), ranks[3].guard("step 3"):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def test_guard_leaves_faults_of_the_input_unreported() -> None:
    (rank,) = reporters(1)
    with pytest.raises(SpecError), rank.guard("step 3"):
        raise SpecError.of("batch", [Problem("rows", 1, "at least 2")])
    assert rank.cause() is None


def test_a_lost_store_does_not_hide_the_local_error() -> None:
    class Gone(dist.HashStore):
        def check(self, *args: object) -> bool:
            raise dist.DistNetworkError("connection reset by peer")

    rank = FailureReporter(Gone(), 0, 2, grace_s=0.05)
    assert rank.cause() is None
    assert rank.explain("rank 0 waited", (1,)).startswith("rank 0 waited\n  rank 1 reported nothing")


def test_notes_are_read_by_other_ranks_and_outlive_the_writer(tmp_path: Path) -> None:
    writer, reader = ProgressNotes(0, tmp_path), ProgressNotes(1, tmp_path)
    writer.write("(0F4;3B1)OVERLAP_F_B with a long text")
    writer.write("0F5")
    assert reader.read(0) == writer.read(0) == "0F5"
    del writer
    assert reader.read(0) == "0F5"
    assert reader.read(7) == ""
    reader.write("x" * 2000)
    assert len(ProgressNotes(2, tmp_path).read(1)) < 2000
    alone = ProgressNotes(0, None)
    alone.write("1B0")
    assert (alone.read(0), alone.read(1)) == ("1B0", "")


def test_short_causes() -> None:
    gloo = "[/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:9110. This is typically caused by a crash."
    assert short_cause(RuntimeError(gloo)) == "Connection closed by peer [127.0.0.1]:9110"
    assert short_cause(RuntimeError("")) == "RuntimeError"


def test_a_collective_that_nobody_joins_times_out_and_a_killed_rank_is_named(pool: WorkerPool, tmp_path: Path) -> None:
    def run(ctx: RankContext) -> str:
        os.environ[PROGRESS_DIR] = str(tmp_path)
        reporter = FailureReporter(ctx.store, ctx.rank, ctx.world, grace_s=0.3)
        del os.environ[PROGRESS_DIR]
        reporter.arrive("2F1")
        if ctx.rank == 2:
            ctx.store.set("note written", "")
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        ctx.store.wait(["note written"])
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        try:
            with reporter.guard("step 1"):
                wait(work, f"rank {ctx.rank}", "the sum of losses", (0, 1, 2), timeout_s=20)
        except TransportError as error:
            return str(error)
        return "no error"

    results = pool.run(run, 3, expect_failure=True)
    for rank in (0, 1):
        text = results[rank].value
        assert text.startswith(f"rank {rank} waited for the sum of losses and lost its connection: ")
        assert "rank 2 reported nothing; it was at 2F1" in text


def test_a_time_out_is_told_from_a_lost_connection(pool: WorkerPool) -> None:
    def run(ctx: RankContext) -> str:
        if ctx.rank == 1:
            ctx.store.wait(["timed out"])
            return ""
        work = dist.irecv(torch.ones(1), src=1)
        assert work is not None
        try:
            wait(work, "rank 0", "a message", (1,), timeout_s=0.5)
        except WaitError as error:
            ctx.store.set("timed out", "")
            return f"{error} {error.waits_for}"
        return "no error"

    assert pool.run(run, 2)[0] == "rank 0 waited 0.5 s for a message (1,)"
