"""Bounded waits: an error that says who waited how long for what, and which ranks could have ended the wait."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Self

import torch.distributed as dist

from tessera_rt.errors import TransportError


class WaitError(TransportError):
    """A wait that failed. ``waits_for``: the global ranks that could have ended it."""

    waits_for: tuple[int, ...] = ()

    def within(self, task: object) -> Self:
        """The same failure, with the task it happened in."""
        made = type(self)(f"{self.headline} (in {task})")
        made.__dict__.update(self.__dict__, headline=made.headline)
        return made

    @classmethod
    def after(
        cls, error: RuntimeError, who: str, what: str, waits_for: Sequence[int], *, started: float, timeout_s: float
    ) -> Self:
        """From the error of a wait that began at ``started`` (time.monotonic): a time-out or a lost connection."""
        if time.monotonic() - started >= 0.99 * timeout_s:
            made = cls(f"{who} waited {timeout_s:g} s for {what}")
        else:
            made = cls(f"{who} waited for {what} and lost its connection: {short_cause(error)}")
        made.waits_for = tuple(waits_for)
        return made


def short_cause(error: BaseException) -> str:
    """First sentence of a transport library's message, without the place in its source."""
    text = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip() or type(error).__name__)
    return re.split(r"\.\s|\n", text, maxsplit=1)[0]


def wait(work: dist.Work, who: str, what: str, waits_for: Sequence[int], *, timeout_s: float) -> None:
    """Block until ``work`` is done, at most ``timeout_s`` seconds. Raises WaitError: ``who`` waited for ``what``."""
    started = time.monotonic()
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise WaitError.after(error, who, what, waits_for, started=started, timeout_s=timeout_s) from error
