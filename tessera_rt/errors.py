"""The exception tree: every mistake a user can make has one of these classes and carries its problems.

A problem names the field, the value given, what is allowed and what to do. Readers of files collect all problems of
a file before they raise, so that one run shows everything that must be fixed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault in a user's input: ``field = value`` is not ``allowed``; ``remedy`` says what to do (may be empty)."""

    field: str
    value: object
    allowed: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.field} = {_short(self.value)}: must be {self.allowed}"
        return f"{text}; {self.remedy}" if self.remedy else text


class TesseraError(Exception):
    """Base of all errors raised for users. ``problems`` holds the single faults, possibly none."""

    def __init__(self, message: str, problems: Iterable[Problem] = ()) -> None:
        self.headline = message
        self.problems = tuple(problems)
        super().__init__("\n  ".join([message, *map(str, self.problems)]))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.headline, self.problems, self.__dict__.copy()))

    @classmethod
    def of(cls, where: str, problems: Iterable[Problem]) -> Self:
        """An error about one source ``where`` (a file name, "plan", ...) with all its problems."""
        found = tuple(problems)
        count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
        return cls(f"{where}: {count}", found)


class SpecError(TesseraError):
    """A model description, workload, training configuration or batch is not usable."""


class CostError(TesseraError):
    """A cost table, device file or measurement is incomplete or not a cost."""


class ScheduleError(TesseraError):
    """A schedule breaks a rule: order, dependency, lane, deadlock."""


class PartitionInfeasible(TesseraError):
    """No partition satisfies the limits; the problems name rank, need, limit and the smallest remedy."""


class PlanError(TesseraError):
    """A plan contradicts itself, its model, or the processes it is asked to run on."""


class TransportError(TesseraError):
    """A message or collective failed or timed out; the text says which rank waited for what from whom."""


class CaptureError(TesseraError):
    """Something cannot be captured in a CUDA graph; the text names the operation."""


def _short(value: object, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _rebuild(cls: type[TesseraError], headline: str, problems: tuple[Problem, ...], state: dict[str, object]) -> object:
    error = cls.__new__(cls)
    TesseraError.__init__(error, headline, problems)
    error.__dict__.update(state)
    return error
