"""What a part of the check records: cases that passed, failed or were skipped, with their figures.

The file is written after every case, so a part that is ended keeps what it found.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


class Check:
    """Collects the cases of one part. ``seconds``: what the part may take; ``dry_run``: on the CPU twin."""

    def __init__(self, path: Path, *, dry_run: bool, seconds: float) -> None:
        self.dry_run = dry_run
        self.device = torch.device("cpu" if dry_run else "cuda")
        self.deadline = time.monotonic() + seconds
        self._path = path
        self._cases: list[dict[str, Any]] = []
        self._write()

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    @contextmanager
    def case(self, name: str) -> Iterator[dict[str, Any]]:
        """Record a case; what it puts into the yielded mapping becomes its figures. A fault makes it failed.

        The fault is recorded with its traceback and the part goes on: the other cases still tell something.
        """
        figures: dict[str, Any] = {}
        start = time.perf_counter()
        try:
            yield figures
            self._add(name, PASSED, time.perf_counter() - start, figures=figures)
        except Exception:
            self._add(name, FAILED, time.perf_counter() - start, reason=traceback.format_exc(), figures=figures)

    def skip(self, name: str, reason: str) -> None:
        """Record that a case was not run, and why."""
        self._add(name, SKIPPED, 0.0, reason=reason)

    def _add(self, name: str, status: str, seconds: float, **more: Any) -> None:
        self._cases.append({"case": name, "status": status, "seconds": round(seconds, 3), **more})
        self._write()

    def _write(self) -> None:
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._cases, indent=1, default=str), encoding="utf-8")
        temporary.replace(self._path)
