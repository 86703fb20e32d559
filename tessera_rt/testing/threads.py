"""Threads of a test: ranks, and the programs of a grid. One that fails ends all, a late one says what it waits for."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
TIMEOUT_S = 120.0
_GRACE_S = 10.0  # for threads that are told to stop, and may be in code that cannot be
Wait = Callable[[], str]  # says what a thread waits for, when somebody asks


class _Stopped(BaseException):
    """Ends a thread of a group in which another one failed or that ran out of time. No Exception: code that is
    interrupted must not handle it."""


@dataclass
class _Group:
    """Threads that were started together. ``waits``: what each waits for at the moment."""

    stopped: bool = False
    waits: dict[int, Wait] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Member:
    """One thread of a group, started by a member of another group or by none."""

    group: _Group
    index: int
    starter: _Member | None


_member: ContextVar[_Member | None] = ContextVar("member", default=None)


def stop_if_told() -> None:
    """Ends this thread if its group, or that of a thread that started it, has been stopped."""
    member = _member.get()
    while member is not None:
        if member.group.stopped:
            raise _Stopped
        member = member.starter


def set_wait(wait: Wait | None) -> None:
    """Records what this thread waits for, or that it no longer waits."""
    member = _member.get()
    while member is not None:
        if wait is None:
            member.group.waits.pop(member.index, None)
        else:
            member.group.waits[member.index] = wait
        member = member.starter


def run_threads(
    functions: Sequence[Callable[[], T]], *, timeout_s: float = TIMEOUT_S, names: Sequence[str] = ()
) -> list[T]:
    """Runs the functions at the same time, each in a thread with a copy of the caller's context; their results.

    When one fails, kernels that the others run or wait in are stopped, and the first failure is raised. Raises
    TimeoutError naming the threads that still run after ``timeout_s`` (by ``names``, or number) and the flags that
    their kernels wait for. What cannot be stopped is left behind in daemon threads, so that the process can end.
    """
    results: list[Any] = [None] * len(functions)
    failures: list[BaseException] = []
    group, running, ended = _Group(), set(range(len(functions))), SimpleQueue[int]()

    def call(index: int) -> None:
        _member.set(_Member(group, index, starter))
        try:
            results[index] = functions[index]()
        except _Stopped:
            pass
        except BaseException as error:
            failures.append(error)
        finally:
            ended.put(index)

    starter = _member.get()
    for index in range(len(functions)):
        name = names[index] if names else str(index)
        threading.Thread(target=copy_context().run, args=(call, index), name=name, daemon=True).start()

    def wait_for_all(end: float) -> None:
        while running:
            try:
                running.remove(ended.get(timeout=max(0.0, end - time.monotonic())))
            except Empty:
                return
            if failures and not group.stopped:
                group.stopped, end = True, min(end, time.monotonic() + _GRACE_S)

    try:
        wait_for_all(time.monotonic() + timeout_s)
        failed, late = list(failures), sorted(running)
        waits = {index: wait() for index, wait in group.waits.copy().items() if index in running}
    finally:
        group.stopped = True  # those that are late, and all of them at an interrupt
    wait_for_all(time.monotonic() + 1.0)
    stop_if_told()
    if failed:
        raise failed[0]
    if late:
        described = [
            (names[index] if names else f"thread {index}") + (f" ({waits[index]})" if index in waits else "")
            for index in late
        ]
        raise TimeoutError(f"after {timeout_s:g} s these still run: {', '.join(described)}")
    return results


def run_ranks(world: int, function: Callable[[int], T], *, timeout_s: float = TIMEOUT_S) -> list[T]:
    """``function(rank)`` for every rank of ``world`` as a thread; results by rank. Errors as in ``run_threads``."""
    calls = [lambda rank=rank: function(rank) for rank in range(world)]
    return run_threads(calls, timeout_s=timeout_s, names=[f"rank {rank}" for rank in range(world)])


class Turns:
    """Lets one of several threads run at a time, and draws the next one from ``seed`` whenever the one that runs
    passes on: threads interleave at these places, in the same way each time.

    Left to themselves, Python's threads change over every 5 ms: short programs would run one after another.
    """

    def __init__(self, threads: int, seed: int) -> None:
        self._random, self._running = random.Random(seed), list(range(threads))
        self._gates = [threading.Semaphore(0) for _ in range(threads)]
        self._open_next()

    def enter(self, thread: int) -> None:
        """Waits for the first turn."""
        self._gates[thread].acquire()

    def pass_on(self, thread: int) -> None:
        """Gives the turn to a thread drawn at random, which may be the same one, and waits for the next."""
        self._open_next()
        self._gates[thread].acquire()

    def leave(self, thread: int) -> None:
        """Gives the turn away for good."""
        self._running.remove(thread)
        if self._running:
            self._open_next()

    def _open_next(self) -> None:
        self._gates[self._random.choice(self._running)].release()
