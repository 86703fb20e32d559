"""Timing functions one by one and two at a time, on a GPU's streams or on a CPU's threads.

Caches are flushed before every sample. With a process group, ranks meet at a barrier before every sample and a sample
is the slowest rank's. Every wait is bounded. Launches are functions without arguments that leave their work on the
current stream (CUDA) or do it before they return (CPU).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from statistics import median, quantiles
from typing import Protocol

import torch
import torch.distributed as dist

from tessera_rt.errors import TransportError

_CPU_FLUSH_BYTES = 64 << 20
_POLL_S = 20e-6

Launch = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Median of the samples, the distance of their quartiles relative to it, and their number."""

    ns: int
    spread: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[int]) -> Timing:
        middle = median(samples)
        low, _, high = quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else (middle, middle, middle)
        return cls(ns=round(middle), spread=(high - low) / middle if middle else 0.0, samples=len(samples))


@dataclass(frozen=True, slots=True)
class Both:
    """One run of two functions at once, in ns from their common start: until both, comm, and comp were done."""

    total: int
    comm: int
    comp: int


class Stopwatch(Protocol):
    """Times launches on one device."""

    def alone(self, launch: Launch) -> int:
        """Nanoseconds that ``launch`` takes on a flushed, idle device."""
        ...

    def both(self, comm: Launch, comp: Launch) -> Both:
        """``comm`` and ``comp`` on two lanes, ``comm`` issued first."""
        ...


@contextmanager
def stopwatch(
    device: torch.device, group: dist.ProcessGroup | None = None, *, timeout_s: float = 60.0
) -> Iterator[Stopwatch]:
    """A stopwatch for ``device``; each of its waits ends after ``timeout_s`` with a TransportError."""
    if device.type == "cuda":
        yield _CudaStopwatch(device, group, timeout_s)
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one per lane, so that neither takes the other's core
    lane = _Lane()
    try:
        yield _CpuStopwatch(group, timeout_s, lane)
    finally:
        lane.close()
        torch.set_num_threads(threads)


def slowest_rank(samples: Sequence[int], group: dist.ProcessGroup | None) -> list[int]:
    """Every sample's maximum over the ranks of ``group``. Collective."""
    if group is None:
        return list(samples)
    found = torch.tensor(samples, dtype=torch.int64)
    if dist.get_backend(group) == "nccl":
        found = found.cuda()
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return [int(sample) for sample in found.tolist()]


class _Lane:
    """A thread for communication: a daemon, which does not keep the process when what it runs never ends."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Future[int], Callable[[], int]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="communication", daemon=True).start()

    def submit(self, call: Callable[[], int]) -> Future[int]:
        future: Future[int] = Future()
        self._tasks.put((future, call))
        return future

    def close(self) -> None:
        self._tasks.put(None)

    def _run(self) -> None:
        torch.set_num_threads(1)
        while (task := self._tasks.get()) is not None:
            future, call = task
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)


class _CpuStopwatch:
    """Compute on the caller's thread, communication on one of its own."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float, lane: _Lane) -> None:
        self._group, self._timeout_s, self._lane = group, timeout_s, lane
        self._flush = torch.empty(_CPU_FLUSH_BYTES, dtype=torch.uint8)

    def alone(self, launch: Launch) -> int:
        self._prepare()
        start = time.perf_counter_ns()
        launch()
        return time.perf_counter_ns() - start

    def both(self, comm: Launch, comp: Launch) -> Both:
        def communicate() -> int:
            comm()
            return time.perf_counter_ns()

        self._prepare()
        start = time.perf_counter_ns()
        pending = self._lane.submit(communicate)
        comp()
        comp_end = time.perf_counter_ns()
        try:
            comm_end = pending.result(self._timeout_s)
        except TimeoutError as error:
            raise _late("communication", self._timeout_s) from error
        return Both(total=max(comm_end, comp_end) - start, comm=comm_end - start, comp=comp_end - start)

    def _prepare(self) -> None:
        self._flush.zero_()
        if self._group is not None:
            dist.barrier(self._group)


class _CudaStopwatch:
    """Both lanes are streams; times come from events. Communication is launched first, as a plan does."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self._device, self._group, self._timeout_s = device, group, timeout_s
        self._comm: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._comp: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(2 * cache, dtype=torch.uint8, device=device)

    def alone(self, launch: Launch) -> int:
        start = self._start()
        with torch.cuda.stream(self._comp):
            self._comp.wait_event(start)
            launch()
            end = self._stamp(self._comp)
        self._wait(end, "the function timed alone")
        return _ns(start, end)

    def both(self, comm: Launch, comp: Launch) -> Both:
        start = self._start()
        ends = []
        for stream, launch in ((self._comm, comm), (self._comp, comp)):
            with torch.cuda.stream(stream):
                stream.wait_event(start)
                launch()
                ends.append(self._stamp(stream))
        self._wait(ends[0], "communication")
        self._wait(ends[1], "compute")
        comm_ns, comp_ns = (_ns(start, end) for end in ends)
        return Both(total=max(comm_ns, comp_ns), comm=comm_ns, comp=comp_ns)

    def _start(self) -> torch.cuda.Event:
        self._flush.zero_()
        self._wait(self._stamp(torch.cuda.current_stream(self._device)), "the cache flush")
        if self._group is not None:
            dist.barrier(self._group)
        return self._stamp(torch.cuda.current_stream(self._device))

    @staticmethod
    def _stamp(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def _wait(self, event: torch.cuda.Event, what: str) -> None:
        """A blocking wait could never end: kernels that wait for a peer spin."""
        limit = time.monotonic() + self._timeout_s
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > limit:
                raise _late(what, self._timeout_s)
            time.sleep(_POLL_S)


def _ns(start: torch.cuda.Event, end: torch.cuda.Event) -> int:
    return round(float(start.elapsed_time(end)) * 1e6)


def _late(what: str, timeout_s: float) -> TransportError:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return TransportError(f"microbench: rank {rank} waited {timeout_s:g} s for {what}, which did not finish")
