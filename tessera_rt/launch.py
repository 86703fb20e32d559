"""Starting ranks: ``run_local`` on this machine, or what torchrun started. Nothing hangs and nothing is left behind.

The launcher hosts the store and watches the ranks' processes. Each rank keeps its last note (the action it is in) in a
file of a folder named by TESSERA_PROGRESS_DIR (``engine/watchdog.py``), so what a killed rank was doing is known. The
launcher writes that cause into the same folder, where the other ranks look for the first failure before they give up.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from tessera_rt.engine.watchdog import PROGRESS_DIR, read_note, write_first_cause
from tessera_rt.errors import (
    CostError,
    PartitionInfeasible,
    PlanError,
    Problem,
    SpecError,
    TesseraError,
    TransportError,
)
from tessera_rt.waits import WaitError

_Result = TypeVar("_Result")

_DEFAULT = signal.SIG_DFL
_START_TIMEOUT_S = 300.0  # importing torch in several processes at once on a loaded machine
_GRACE_S = 10.0
_TERMINATE_S = 3.0
_POLL_S = 0.5
_OF_INPUT = (SpecError, CostError, PlanError, PartitionInfeasible)  # errors that say what a user has to change


class RankFailed(TransportError):
    """A launched run failed. ``rank``: the one that failed first; ``action``: its last note, if any; ``cause``: why."""

    rank: int
    action: str
    cause: str

    @classmethod
    def on(cls, rank: int, action: str, cause: str, more: Sequence[str] = ()) -> RankFailed:
        error = cls("\n  ".join([f"rank {rank} {cause}{f' during {action}' if action else ''}", *more]))
        error.rank, error.action, error.cause = rank, action, cause
        return error


def run_local(
    entry: Callable[..., _Result],
    world: int,
    args: Sequence[Any] = (),
    *,
    timeout_s: float = 300.0,
    log_dir: Path | None = None,
    grace_s: float = _GRACE_S,
    start_timeout_s: float = _START_TIMEOUT_S,
    stopped_at: Callable[[], str] = lambda: "before it was done",
) -> list[_Result]:
    """Run ``entry(*args)`` in ``world`` new processes, each one rank of a gloo process group; its results by rank.

    ``entry`` and ``args`` are pickled (``entry`` by its name in an importable module). A rank has one intra-op thread.
    ``timeout_s``: of every wait in the process group. ``log_dir``: ranks but the first write their output to
    ``rank<r>.log`` there, the first one only the traceback of what it failed with. When a rank fails, the others get
    ``grace_s`` seconds to end by themselves; whatever still runs then, or at an interrupt, is ended by its process id.

    Raises RankFailed (a TransportError) that names the rank which failed first, what it was doing and why; a SpecError,
    PlanError or other error of ours that a rank found in its input is raised as it is. An interrupt (KeyboardInterrupt)
    and SIGTERM (SystemExit with code 143) end the ranks too; one line on stderr then says what ``stopped_at`` tells.
    """
    if world < 1:
        raise SpecError.of("launch", [Problem("world", world, "at least 1 process")])
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
    with _stops_told(stopped_at), tempfile.TemporaryDirectory(prefix="tessera-ranks-") as folder:
        launch = _Launch(Path(folder), world, timeout_s, grace_s, log_dir)
        try:
            launch.start(entry, tuple(args), start_timeout_s)
            return launch.results()
        finally:
            launch.end()


def under_torchrun() -> bool:
    """Whether torchrun (or another launcher that sets its variables) has started this process as one of its ranks."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def init_from_torchrun(*, timeout_s: float = 300.0) -> None:
    """Join the gloo process group that torchrun's variables describe, with ``timeout_s`` for every wait.

    Raises TransportError when not all ranks come in time.
    """
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        raise TransportError(f"rank {rank} of {world} could not join the process group: {error}") from error


# -- the launcher's side --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ready:
    """A rank has imported everything."""


@dataclass(frozen=True, slots=True)
class _Done:
    """A rank's result, pickled."""

    value: bytes


@dataclass(frozen=True, slots=True)
class _Failed:
    """A rank's exception. ``error``: the exception itself where it is one of ours."""

    type_name: str
    message: str
    error: TesseraError | None

    @property
    def is_symptom(self) -> bool:
        """It says that another rank did not answer."""
        return isinstance(self.error, TransportError)


@dataclass(slots=True)
class _Rank:
    number: int
    process: SpawnProcess
    pipe: Connection
    ready: bool = False
    end: _Done | _Failed | int | None = None  # int: the exit code of a process that said nothing


@dataclass(slots=True)
class _Launch:
    """The processes of one run and what became of them."""

    folder: Path
    world: int
    timeout_s: float
    grace_s: float
    log_dir: Path | None
    ranks: list[_Rank] = field(default_factory=list)
    failed: list[_Rank] = field(default_factory=list)  # in the order in which it was noticed
    deadline: float | None = None
    store: dist.TCPStore | None = None

    def start(self, entry: Callable[..., Any], args: tuple[Any, ...], start_timeout_s: float) -> None:
        """Start all ranks and let them go once every one is ready, so that no time-out runs while others still load."""
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        for number in range(self.world):
            ours, theirs = context.Pipe()
            place = _Place(
                rank=number,
                world=self.world,
                port=self.store.port,
                timeout_s=self.timeout_s,
                notes=str(self.folder),
                log=str(self._log(number) or ""),
            )
            if path := self._log(number):
                path.unlink(missing_ok=True)  # of an earlier start of this run
            process = context.Process(target=_rank_main, args=(place, theirs, entry, args), daemon=True)
            self.ranks.append(_Rank(number, process, ours))
            process.start()
            theirs.close()
        limit = time.monotonic() + start_timeout_s
        while not self.failed and not all(rank.ready for rank in self.ranks):
            if time.monotonic() > limit:
                late = ", ".join(str(rank.number) for rank in self.ranks if not rank.ready)
                raise TransportError(f"rank {late} did not start within {start_timeout_s:g} s")
            self._listen(_POLL_S)
        if not self.failed:
            for rank in self.ranks:
                self._send_go(rank)

    def results(self) -> list[Any]:
        """Wait until all ranks have ended, or the deadline after the first failure. Raises for failed ranks."""
        while running := [rank for rank in self.ranks if rank.end is None]:
            left = _POLL_S if self.deadline is None else self.deadline - time.monotonic()
            if left <= 0:
                break
            self._listen(min(left, _POLL_S))
        if self.failed or running:
            raise self._error(running)
        return [pickle.loads(rank.end.value) for rank in self.ranks if isinstance(rank.end, _Done)]

    def end(self) -> None:
        """End every process that still runs: ask, wait a little, kill."""
        started = [rank for rank in self.ranks if rank.process.pid is not None]
        finished = all(isinstance(rank.end, _Done) for rank in started)
        if finished:  # they are closing their process group
            _join(started, self.grace_s)
        for rank in started:
            if rank.process.is_alive():
                rank.process.terminate()
        _join(started, _TERMINATE_S)
        for rank in started:
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()
            rank.pipe.close()
        if not finished and sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")  # a progress bar that was cut off has hidden the cursor
            sys.stdout.flush()

    def _send_go(self, rank: _Rank) -> None:
        try:
            rank.pipe.send("go")
        except OSError:  # it has died since; its sentinel will say so
            return

    def _listen(self, timeout_s: float) -> None:
        """Take in what ranks say and which processes have ended, waiting up to ``timeout_s`` for the first."""
        running = [rank for rank in self.ranks if rank.end is None]
        watched: list[Any] = [rank.pipe for rank in running if not rank.pipe.closed]
        watched += [rank.process.sentinel for rank in running]
        wait(watched, timeout_s)
        for rank in running:
            self._read(rank)
            if rank.end is None and not rank.process.is_alive():
                self._read(rank)  # it may have spoken between the two
                if rank.end is None:
                    self._ended(rank, rank.process.exitcode or 0)

    def _read(self, rank: _Rank) -> None:
        while rank.end is None and not rank.pipe.closed:
            try:
                if not rank.pipe.poll():
                    return
                said = rank.pipe.recv()
            except (EOFError, OSError):
                rank.pipe.close()
                return
            if isinstance(said, _Ready):
                rank.ready = True
            else:
                self._ended(rank, said)

    def _ended(self, rank: _Rank, end: _Done | _Failed | int) -> None:
        rank.end = end
        if isinstance(end, _Done):
            limit = self.timeout_s + self.grace_s  # the others are at most one wait behind
        else:
            self.failed.append(rank)
            limit = self.grace_s
            if isinstance(end, int):
                action = self._action(rank)
                text = f"{_how(end)}{f' during {action}' if action else ''}"
                write_first_cause(self.folder, rank.number, text)
        self.deadline = min(self.deadline or float("inf"), time.monotonic() + limit)

    def _action(self, rank: _Rank) -> str:
        return read_note(self.folder, rank.number)

    def _error(self, running: Sequence[_Rank]) -> TesseraError:
        """The true cause: a process that died, else a rank's own exception, else who waited in vain for whom."""
        still = [f"rank {rank.number} did not end by itself{self._in_action(rank)}" for rank in running]
        if not self.failed:
            first = next(rank.number for rank in self.ranks if rank.end is not None)
            cause = f"was not done {self.timeout_s + self.grace_s:g} s after rank {first}"
            return self._failure_of(running[0], cause, still[1:])
        for rank in self.failed:
            if isinstance(rank.end, int):
                return self._failure_of(rank, _how(rank.end), [*_start_hints(rank), *still])
        for rank in self.failed:
            if isinstance(rank.end, _Failed) and not rank.end.is_symptom:
                if isinstance(rank.end.error, _OF_INPUT):
                    rank.end.error.add_note(f"found by rank {rank.number}")
                    return rank.end.error
                failure = self._failure_of(rank, f"failed with {rank.end.type_name}: {rank.end.message}", still)
                if path := self._log(rank.number):
                    failure.add_note(f"its traceback is in {path}")
                return failure
        return self._unanswered(running, still)

    def _unanswered(self, running: Sequence[_Rank], still: Sequence[str]) -> RankFailed:
        """All failures are waits in vain. What the first of them waited for is to blame if that still runs alone."""
        first = self.failed[0]
        assert isinstance(first.end, _Failed)
        awaited = first.end.error.waits_for if isinstance(first.end.error, WaitError) else ()
        suspects = [rank for rank in running if rank.number in awaited] or running
        if len(suspects) == 1:
            others = [text for text, rank in zip(still, running, strict=True) if rank is not suspects[0]]
            return self._failure_of(suspects[0], "did not answer and was ended", [first.end.message, *others])
        error = RankFailed("\n  ".join([first.end.message, *still]))
        error.rank, error.action, error.cause = first.number, self._action(first), first.end.message
        return error

    def _failure_of(self, rank: _Rank, cause: str, more: Sequence[str]) -> RankFailed:
        return RankFailed.on(rank.number, self._action(rank), cause, more)

    def _log(self, number: int) -> Path | None:
        return self.log_dir / f"rank{number}.log" if self.log_dir is not None else None

    def _in_action(self, rank: _Rank) -> str:
        action = self._action(rank)
        return f" in {action}" if action else ""


@contextmanager
def _stops_told(stopped_at: Callable[[], str]) -> Iterator[None]:
    """SIGTERM ends the block as an interrupt does, and one line on stderr says that the run was stopped, and where."""
    handled = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is _DEFAULT
    if handled:
        signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    except KeyboardInterrupt:
        _tell(f"interrupted {stopped_at()}")
        raise
    except _Terminated:
        _tell(f"terminated {stopped_at()}")
        raise
    finally:
        if handled:
            signal.signal(signal.SIGTERM, _DEFAULT)


class _Terminated(SystemExit):
    """SIGTERM has come."""


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another one must not cut short how the ranks are ended
    raise _Terminated(128 + number)


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _start_hints(rank: _Rank) -> list[str]:
    """For a process that ended before it was a rank."""
    if rank.ready:
        return []
    hints = ["it never started; see its output above or in the log folder"]
    if rank.end == 1:
        hints.append("a script that starts ranks must do so under `if __name__ == '__main__':`")
    return hints


def _how(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
        return f"was killed by signal {-code} ({name})"
    return f"ended with exit code {code}" if code else "ended without a result"


def _join(ranks: Sequence[_Rank], timeout_s: float) -> None:
    limit = time.monotonic() + timeout_s
    for rank in ranks:
        rank.process.join(max(0.0, limit - time.monotonic()))


# -- the rank's side ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    rank: int
    world: int
    port: int
    timeout_s: float
    notes: str
    log: str


def _rank_main(place: _Place, pipe: Connection, entry: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """A rank's process. Ends at once when the launcher does, however that ends."""
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher is interrupted too, and ends its ranks
    if place.log and place.rank:
        _write_output_to(place.log)
    faulthandler.enable()
    os.environ.update(_environment(place))
    torch.set_num_threads(1)
    pipe.send(_Ready())
    pipe.recv()
    timeout = timedelta(seconds=place.timeout_s)
    try:
        store = dist.TCPStore("127.0.0.1", place.port, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world, timeout=timeout)
        said: _Done | _Failed = _Done(pickle.dumps(entry(*args)))
    except (Exception, SystemExit) as error:
        _log_failure(place, error)
        said = _Failed(type(error).__name__, str(error), _sendable(error))
    pipe.send(said)
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(said, _Failed):
        os._exit(1)  # taking the process group down can block on works that nobody will finish
    dist.destroy_process_group()


def _log_failure(place: _Place, error: BaseException) -> None:
    """The traceback, for the log. On the first rank's terminal only what is not ours and has no log to go to."""
    text = "".join(traceback.format_exception(error))
    if place.rank == 0 and place.log:
        Path(place.log).write_text(text, encoding="utf-8")
    elif place.log or not isinstance(error, TesseraError):
        sys.stderr.write(text)


def _sendable(error: BaseException) -> TesseraError | None:
    """The error if it is one of ours and can be pickled (its problems hold what users gave)."""
    if not isinstance(error, TesseraError):
        return None
    try:
        pickle.dumps(error)
    except (pickle.PicklingError, TypeError, AttributeError):
        return type(error)(str(error))
    return error


def _end_with_launcher() -> None:
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os._exit(1)


def _write_output_to(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _environment(place: _Place) -> Mapping[str, str]:
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if "lo" in (name for _, name in socket.if_nameindex()) else {}
    return {PROGRESS_DIR: place.notes} | loopback
