"""What all commands share: exit codes, errors on stderr, one JSON object on stdout, checked output files."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tessera_rt.errors import PartitionInfeasible, PlanError, Problem, SpecError, TesseraError, TransportError

OK, UNEXPECTED, BAD_INPUT, INFEASIBLE, PLAN_FAULTY, RUN_FAILED = range(6)
EXIT_CODES = """\
Exit codes: 0 done; 1 unexpected failure (or doctor found something missing); 2 bad input or usage; \
3 no plan satisfies the limits; 4 a plan is faulty or does not fit; 5 a run failed (a rank died or did not answer)."""

_WIDTH = 150  # columns where stdout is no terminal


class RequestError(SpecError):
    """What was asked for on the command line is not possible."""


def exit_code(error: TesseraError) -> int:
    """The code with which a command ends for an error."""
    match error:
        case PartitionInfeasible():
            return INFEASIBLE
        case PlanError():
            return PLAN_FAULTY
        case TransportError():
            return RUN_FAILED
        case _:
            return BAD_INPUT


def report(error: TesseraError) -> None:
    """The headline and each problem on a line of its own, on stderr.

    Under torchrun by the first rank only, except for failures that each rank sees differently.
    """
    if os.environ.get("RANK", "0") != "0" and not isinstance(error, TransportError):
        return
    lines = [f"error: {error.headline}", *(f"  {problem}" for problem in error.problems)]
    lines += [f"  {note}" for note in getattr(error, "__notes__", ())]
    sys.stderr.write("\n".join(lines) + "\n")


def console() -> Console:
    """For tables and texts on stdout."""
    width = None if sys.stdout.isatty() else _WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def emit(data: Mapping[str, Any]) -> None:
    """One JSON object on stdout. Numbers that JSON cannot hold (an infinite bandwidth) become null."""
    sys.stdout.write(json.dumps(_plain(data), allow_nan=False) + "\n")


def output_path(option: str, path: Path | None, suffixes: Sequence[str] = ()) -> Path | None:
    """The path of a file to be written, checked before any work is done for it. Raises RequestError."""
    if path is None:
        return None
    problems = []
    if suffixes and path.suffix.lower() not in suffixes:
        problems.append(Problem(option, str(path), f"a name that ends in {' or '.join(suffixes)}"))
    if path.is_dir():
        problems.append(Problem(option, str(path), "the name of a file, not of a folder"))
    elif not path.absolute().parent.is_dir():
        problems.append(Problem(option, str(path), "in a folder that exists", f"mkdir -p {path.parent}"))
    elif not os.access(path.absolute().parent, os.W_OK):
        problems.append(Problem(option, str(path), "in a folder that can be written"))
    if problems:
        raise RequestError.of("output", problems)
    return path


def existing_file(option: str, path: Path) -> Path:
    """Raises RequestError unless there is such a file."""
    if not path.is_file():
        raise RequestError.of("input", [Problem(option, str(path), "a file that exists")])
    return path


def ms(ns: float) -> str:
    """Milliseconds with about three digits that count."""
    value = ns / 1e6
    digits = 0 if value >= 1000 else 1 if value >= 100 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


def gib(size: float) -> str:
    """GiB, or MiB and KiB for what is small."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size / 2**10:.1f} KiB"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
