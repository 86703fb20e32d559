"""The worker process of `WorkerPool`: waits for jobs on a pipe and runs each in a fresh gloo process group.

Two threads: the main thread runs jobs, the other reads the pipe, so that a worker whose job hangs can still say where,
and ends as soon as the pool's process is gone (end of file on the pipe).
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Literal

import cloudpickle
import torch
import torch.distributed as dist

__all__ = ["Job", "RankContext", "RankFailure", "Reply", "serve"]


@dataclass(frozen=True, slots=True)
class RankContext:
    """A rank's place in its job: its rank, the number of ranks, and a store that only this job uses."""

    rank: int
    world: int
    store: dist.Store


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How one rank failed: the exception's type name, its message, and the rank's traceback ("" if there is none)."""

    type_name: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> RankFailure:
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


@dataclass(frozen=True, slots=True)
class Job:
    """One rank's part of a job. `payload` is the cloudpickled (function, args, kwargs)."""

    number: int
    rank: int
    world: int
    store_port: int
    timeout_s: float
    payload: bytes


@dataclass(frozen=True, slots=True)
class Reply:
    """What a worker says: `started` once; for each job `done` or `failed`, then `idle`; `stack` when it is asked."""

    kind: Literal["started", "done", "failed", "idle", "stack"]
    job: int = -1
    payload: bytes = b""
    failure: RankFailure | None = None
    stack: str = ""


def serve(pipe_fd: int) -> None:
    """Runs jobs until the pipe ends."""
    os.set_inheritable(pipe_fd, False)
    torch.set_num_threads(1)
    pipe = Connection(pipe_fd)
    sending = threading.Lock()

    def send(reply: Reply) -> None:
        with sending:
            pipe.send(reply)

    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    threading.Thread(target=_read_pipe, args=(pipe, jobs, send, threading.get_ident()), daemon=True).start()
    send(Reply("started"))
    while True:
        _run(jobs.get(), send)


def _read_pipe(pipe: Connection, jobs: queue.SimpleQueue[Job], send: Callable[[Reply], None], main_thread: int) -> None:
    while True:
        try:
            request = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)  # the pool is gone: whatever the job is doing, nobody waits for it
        if isinstance(request, Job):
            jobs.put(request)
        else:
            send(Reply("stack", stack="".join(traceback.format_stack(sys._current_frames()[main_thread]))))


def _run(job: Job, send: Callable[[Reply], None]) -> None:
    # The answer goes out before the process group is destroyed: after a failure that can block on unfinished works.
    try:
        send(Reply("done", job.number, payload=_call(job)))
    except Exception as error:
        send(Reply("failed", job.number, failure=RankFailure.of(error)))
    if dist.is_initialized():
        dist.destroy_process_group()
    send(Reply("idle", job.number))


def _call(job: Job) -> bytes:
    # Jobs must not see what earlier ones left behind in torch's global settings.
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    timeout = timedelta(seconds=job.timeout_s)
    function, args, kwargs = cloudpickle.loads(job.payload)
    server = dist.TCPStore("127.0.0.1", job.store_port, is_master=False, timeout=timeout)
    store = dist.PrefixStore(f"job{job.number}", server)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("group", store), rank=job.rank, world_size=job.world, timeout=timeout
    )
    result: Any = function(RankContext(job.rank, job.world, dist.PrefixStore("user", store)), *args, **kwargs)
    return bytes(cloudpickle.dumps(result))
