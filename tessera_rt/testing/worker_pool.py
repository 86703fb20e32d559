"""A persistent pool of worker processes for functions that run on several ranks.

Starting a rank means importing torch, which takes seconds; a pool pays this once. Every job gets a process group of its
own, and a rank that fails, dies or hangs costs its worker, never the next job:

    with WorkerPool(max_world=4) as pool:
        pool.run(lambda ctx: ctx.rank**2, 4)  # [0, 1, 4, 9]

Functions, arguments and results travel by cloudpickle; the function's module is sent by value, so workers need not be
able to import it (pytest's importlib mode makes test modules that nobody can import). Needs the extra `[test]`.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, Self

import cloudpickle
import torch.distributed as dist

import tessera_rt
from tessera_rt.testing.worker import Job, RankContext, RankFailure, Reply

__all__ = ["RankContext", "RankFailure", "RankResult", "WorkerFailure", "WorkerPool"]

_START_TIMEOUT_S = 180.0  # importing torch in several processes at once on a loaded machine
_IDLE_TIMEOUT_S = 10.0  # destroying a process group after its job
_POLL_S = 0.2
_STACK_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class RankResult:
    """How one rank ended: its function's result, or its failure."""

    rank: int
    value: Any = None
    failure: RankFailure | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None


class WorkerFailure(RuntimeError):
    """Some ranks of a job failed. `failures` holds them by rank, in the order they failed: the first is the cause.

    Besides the exceptions of the job's function, a failure's `type_name` is `WorkerDied` (the process ended),
    `TimedOut` (no answer within the job's time-out) or `Abandoned` (it was still busy when the grace period that
    follows another rank's failure was over).
    """

    def __init__(self, failures: dict[int, RankFailure], world: int) -> None:
        self.failures = failures
        lines = [f"{len(failures)} of {world} ranks failed, first rank {next(iter(failures))}:"]
        for rank, failure in failures.items():
            lines.append(f"rank {rank}: {failure.type_name}: {failure.message}")
            lines += [f"    {line}" for line in failure.traceback.splitlines()]
        super().__init__("\n".join(lines))


class _Worker:
    """One worker process and our end of its pipe."""

    def __init__(self) -> None:
        self.pipe, child_end = Pipe()
        with child_end:
            fd = child_end.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from tessera_rt.testing.worker import serve; serve({fd})"],
                env=_worker_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=[fd],
            )
        self.started = False

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, request: Job | str) -> None:
        with suppress(OSError):  # if it has just died, whoever waits for the answer sees the end of the pipe
            self.pipe.send(request)

    def receive(self) -> Reply | None:
        """The next reply, waiting for it; None if the process has ended."""
        try:
            reply = self.pipe.recv()
        except (EOFError, OSError):
            return None
        assert isinstance(reply, Reply)
        return reply

    def stack(self) -> str:
        """Where the job is now, or "" if the worker can't say."""
        self.send("stack")
        deadline = time.monotonic() + _STACK_TIMEOUT_S
        while self.pipe.poll(max(0.0, deadline - time.monotonic())):
            reply = self.receive()
            if reply is None:
                return ""
            if reply.kind == "stack":
                return reply.stack
        return ""

    def died(self) -> RankFailure:
        try:
            code = self.process.wait(_IDLE_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it closed its pipe and lives on
            self.process.kill()
            code = self.process.wait()
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return RankFailure("WorkerDied", f"the worker process (pid {self.process.pid}) {end}", "")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()


class WorkerPool:
    """Up to `max_world` worker processes, started when a job first needs them. For use from one thread.

    The workers end with `close`, or with the pool's process, however that ends.
    """

    def __init__(self, max_world: int) -> None:
        if max_world < 1:
            raise ValueError(f"max_world is {max_world}; allowed: at least 1")
        self.max_world = max_world
        self._workers: list[_Worker] = []
        self._store: dist.TCPStore | None = None
        self._jobs = 0
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are alive, by rank."""
        return [worker.process.pid for worker in self._workers if worker.alive]

    def run(
        self,
        fn: Callable[..., Any],
        world: int,
        *args: Any,
        timeout_s: float = 60.0,
        grace_s: float | None = None,
        expect_failure: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs `fn(rank_context, *args, **kwargs)` on `world` ranks with torch.distributed set up (gloo).

        `timeout_s` bounds the job and every collective in it; starting workers is not counted. Once a rank has failed,
        the others have `grace_s` to end by themselves (default: 5 s; with `expect_failure` as long as the job has).
        Returns the results by rank; with `expect_failure` a `RankResult` for each rank instead, whether it failed or
        not. Raises WorkerFailure if a rank failed and that was not expected.
        """
        if self._closed:
            raise RuntimeError("the pool is closed")
        if not 1 <= world <= self.max_world:
            raise ValueError(f"world is {world}; allowed: 1 to {self.max_world}, this pool's max_world")
        if grace_s is None:
            grace_s = timeout_s if expect_failure else min(5.0, timeout_s)
        with _sent_by_value(fn):
            payload = _pickled((fn, args, kwargs))
        workers = self._ready_workers(world)
        try:
            results = self._run_job(workers, payload, timeout_s, grace_s)
        except BaseException:  # also an interrupt or a test's own time-out: no worker may stay busy with this job
            for worker in workers:
                worker.kill()
            raise
        if expect_failure:
            return [results[rank] for rank in range(world)]
        failures = {rank: result.failure for rank, result in results.items() if result.failure is not None}
        if failures:
            raise WorkerFailure(failures, world)
        return [results[rank].value for rank in range(world)]

    def close(self) -> None:
        """Ends all workers; the pool can't be used afterwards."""
        self._closed = True
        for worker in self._workers:
            worker.kill()
        self._workers = []
        self._store = None

    def _ready_workers(self, world: int) -> list[_Worker]:
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank, worker in enumerate(self._workers[:world]):
            if not worker.alive:
                worker.kill()
                self._workers[rank] = _Worker()
        self._workers += [_Worker() for _ in range(world - len(self._workers))]
        workers = self._workers[:world]
        deadline = time.monotonic() + _START_TIMEOUT_S
        for worker in workers:
            if not worker.started:
                if not worker.pipe.poll(max(0.0, deadline - time.monotonic())):
                    worker.kill()
                    raise RuntimeError(f"worker {worker.process.pid} did not start within {_START_TIMEOUT_S:.0f} s")
                if worker.receive() is None:
                    raise RuntimeError(f"could not start a worker: {worker.died().message}; see its standard error")
                worker.started = True
        return workers

    def _run_job(
        self, workers: Sequence[_Worker], payload: bytes, timeout_s: float, grace_s: float
    ) -> dict[int, RankResult]:
        """Results by rank, in the order in which the ranks ended."""
        assert self._store is not None
        self._jobs += 1
        for rank, worker in enumerate(workers):
            worker.send(Job(self._jobs, rank, len(workers), self._store.port, timeout_s, payload))
        results: dict[int, RankResult] = {}
        running = dict(enumerate(workers))
        deadline = time.monotonic() + timeout_s
        late = RankFailure("TimedOut", f"no answer within {timeout_s:g} s", "")
        while running and time.monotonic() < deadline:
            for rank, reply in _replies(running, min(_POLL_S, deadline - time.monotonic())):
                result = _result(rank, workers[rank], reply)
                results[rank] = result
                del running[rank]
                if result.failure is not None and late.type_name == "TimedOut":
                    grace_end = time.monotonic() + grace_s
                    if grace_end < deadline:
                        deadline = grace_end
                        late = RankFailure("Abandoned", f"still busy {grace_s:g} s after rank {rank} had failed", "")
        for rank, worker in running.items():
            results[rank] = RankResult(rank, failure=RankFailure(late.type_name, late.message, worker.stack()))
        for worker in running.values():
            worker.kill()
        self._await_idle({rank: worker for rank, worker in enumerate(workers) if worker.alive})
        return results

    def _await_idle(self, workers: dict[int, _Worker]) -> None:
        """Kills the workers that can't put their job's process group away."""
        deadline = time.monotonic() + _IDLE_TIMEOUT_S
        while workers and time.monotonic() < deadline:
            for rank, reply in _replies(workers, min(_POLL_S, deadline - time.monotonic())):
                assert reply is None or reply.kind == "idle", reply
                del workers[rank]
        for worker in workers.values():
            worker.kill()


def _replies(workers: dict[int, _Worker], timeout_s: float) -> Iterator[tuple[int, Reply | None]]:
    """One reply of each worker that has one, None for those that have ended; waits up to `timeout_s` for the first."""
    ranks = {worker.pipe: rank for rank, worker in workers.items()}
    ready: list[Any] = wait(list(ranks), max(0.0, timeout_s))
    for pipe in ready:
        yield ranks[pipe], workers[ranks[pipe]].receive()
    # A dead worker's pipe stays open while a process that it forked lives on.
    for rank in [rank for pipe, rank in ranks.items() if pipe not in ready and not workers[rank].alive]:
        if not workers[rank].pipe.poll():
            yield rank, None


def _result(rank: int, worker: _Worker, reply: Reply | None) -> RankResult:
    if reply is None:
        return RankResult(rank, failure=worker.died())
    if reply.failure is not None:
        return RankResult(rank, failure=reply.failure)
    assert reply.kind == "done", reply
    try:
        return RankResult(rank, cloudpickle.loads(reply.payload))
    except Exception as error:  # a result that can be sent but not read here is this rank's failure
        return RankResult(rank, failure=RankFailure.of(error))


def _worker_environment() -> dict[str, str]:
    source_root = str(Path(tessera_rt.__file__).parents[1])
    path = os.pathsep.join(filter(None, [source_root, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if "lo" in (name for _, name in socket.if_nameindex()):
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle that keeps the file names of code, so that tracebacks on the workers show source lines."""

    @staticmethod
    def _reduce_code(code: CodeType) -> tuple[Any, ...]:
        make, values = cloudpickle.Pickler.dispatch_table[CodeType](code)
        return make, tuple(code.co_filename if value == "<dynamic-code>" else value for value in values)

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({CodeType: _reduce_code})


def _pickled(value: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


@contextmanager
def _sent_by_value(fn: Callable[..., Any]) -> Iterator[None]:
    """Makes cloudpickle send by value what `fn`'s top-level package defines (not tessera_rt: workers have it)."""
    name = getattr(fn, "__module__", None) or "__main__"
    top = name.partition(".")[0]
    module = sys.modules.get(top) or sys.modules.get(name)
    if module is None or top in ("tessera_rt", "__main__"):  # cloudpickle sends __main__ by value anyway
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)
