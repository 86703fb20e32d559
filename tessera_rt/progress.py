"""How a run shows where it is: a bar on a terminal, plain lines elsewhere, nothing on ranks but the first."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_LINES = 40
"""Plain lines of a run, about."""


class RunProgress:
    """Shows steps with loss, tokens per second, step time and time left. ``console`` None: shows nothing."""

    def __init__(self, console: Console | None, *, first: int, steps: int) -> None:
        self._console = console
        self._first = first
        self._steps = steps
        self._began = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if console is not None and console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[figures]}"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("", total=steps, completed=first, figures="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, number: int, *, loss: float, tokens: int, step_ns: int) -> None:
        """Step ``number`` (from 1) is done: its mean ``loss``, the ``tokens`` of all ranks, how long it took."""
        rate = tokens * 1e9 / max(step_ns, 1)
        figures = f"loss {loss:.4f}  {rate:,.0f} tokens/s  {step_ns / 1e9:.3f} s/step"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=number, figures=figures)
        elif self._console is not None:
            every = max(1, (self._steps - self._first) // _LINES)
            if (number - self._first - 1) % every == 0 or number == self._steps:
                self._line(f"step {number}/{self._steps}  {figures}  {self._left(number)} left")

    def note(self, text: str) -> None:
        """A line of its own, such as a held-out loss."""
        if self._console is not None:
            self._line(text)

    def _line(self, text: str) -> None:
        assert self._console is not None
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _left(self, number: int) -> str:
        per_step = (time.monotonic() - self._began) / (number - self._first)
        seconds = round(per_step * (self._steps - number))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
