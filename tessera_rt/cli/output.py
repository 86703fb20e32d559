"""What all commands share: exit codes, errors on stderr, one JSON object on stdout, checked output files."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.console import Console

from tessera_rt.errors import (
    CostError,
    PartitionInfeasible,
    PlanError,
    Problem,
    ScheduleError,
    SpecError,
    TesseraError,
    TransportError,
)

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
        case SpecError() | CostError() | ScheduleError():
            return BAD_INPUT
        case _:  # such as a checkpoint that could not be written
            return UNEXPECTED


def report(error: TesseraError) -> None:
    """The headline and each problem on a line of its own, on stderr.

    Under torchrun by the first rank only, except for failures that each rank sees differently.
    """
    if os.environ.get("RANK", "0") != "0" and not isinstance(error, TransportError):
        return
    lines = [f"error: {error.headline}", *(f"  {problem}" for problem in error.problems)]
    lines += [f"  {note}" for note in getattr(error, "__notes__", ())]
    sys.stderr.write("\n".join(lines) + "\n")


_BAD_PATHS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


def report_system(fault: OSError) -> int:
    """A fault of the operating system in one line on stderr; returns the code with which the command ends."""
    where = f"{fault.filename}: " if fault.filename is not None else ""
    sys.stderr.write(f"error: {where}{fault.strerror or str(fault) or type(fault).__name__}\n")
    return BAD_INPUT if fault.filename is not None and isinstance(fault, _BAD_PATHS) else UNEXPECTED


def console() -> Console:
    """For tables and texts on stdout."""
    width = None if sys.stdout.isatty() else _WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def emit(data: Mapping[str, Any]) -> None:
    """One JSON object on stdout. Numbers that JSON cannot hold (an infinite bandwidth) become null."""
    sys.stdout.write(json.dumps(_plain(data), allow_nan=False) + "\n")


class Written(StrEnum):
    """Kinds of files that commands write."""

    PLAN = "a plan"
    COSTS = "a cost table"
    PICTURE = "a picture"
    TRACE = "a trace"
    RESULT = "the result of a microbenchmark"


_SUFFIXES = {
    Written.PLAN: (".yaml", ".yml"),
    Written.COSTS: (".yaml", ".yml"),
    Written.PICTURE: (".png", ".svg"),
    Written.TRACE: (".json",),
    Written.RESULT: (".json",),
}
_TOP_KEYS = {Written.PLAN: ("actions", "interleavings"), Written.COSTS: ("provenance", "items")}
_HEAD = 4096  # bytes that tell a picture or a trace


def output_path(option: str, path: Path | None, kind: Written, inputs: Iterable[str | Path | None] = ()) -> Path | None:
    """The path of a file of ``kind`` to be written, checked before any work is done for it.

    Raises RequestError for a name or folder that cannot be, for one of the command's ``inputs``, and for a file that
    exists and is of another kind: nobody loses a model description to a slip.
    """
    if path is None:
        return None
    problems = []
    if path.suffix.lower() not in _SUFFIXES[kind]:
        problems.append(Problem(option, str(path), f"a name that ends in {' or '.join(_SUFFIXES[kind])}"))
    folder = path.absolute().parent
    if path.is_dir():
        problems.append(Problem(option, str(path), "the name of a file, not of a folder"))
    elif not folder.is_dir():
        problems.append(Problem(option, str(path), "in a folder that exists", f"mkdir -p {path.parent}"))
    elif not can_write(folder) or (path.exists() and not os.access(path, os.W_OK)):
        problems.append(Problem(option, str(path), "a file that can be written", "choose another folder"))
    elif any(_same_file(path, given) for given in inputs if given is not None):
        problems.append(Problem(option, str(path), "another file than those that are read", "choose another name"))
    elif path.exists() and not _is_of(kind, path):
        allowed = f"a new file, or one that holds {kind}"
        problems.append(Problem(option, str(path), allowed, "choose another name, or remove the file"))
    if problems:
        raise RequestError.of("output", problems)
    return path


def can_write(folder: Path) -> bool:
    """Whether a file can be made in a folder that exists."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _same_file(path: Path, given: str | Path) -> bool:
    try:
        return path.samefile(given)
    except (OSError, ValueError):  # one of them does not exist, or is the name of a preset
        return False


def _is_of(kind: Written, path: Path) -> bool:
    """Whether a file holds what is to be written there, as its first bytes or top keys tell; an empty one may."""
    try:
        if not path.is_file():
            return False
        if path.stat().st_size == 0:
            return True
        if kind in _TOP_KEYS:
            text = path.read_text(encoding="utf-8")
            return all(re.search(rf"^{key}:", text, re.MULTILINE) for key in _TOP_KEYS[kind])
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except (OSError, UnicodeDecodeError):
        return False
    if kind is Written.RESULT:
        return head.lstrip().startswith(b"{") and b'"tessera_bench"' in head
    if kind is Written.TRACE:
        return head.lstrip().startswith(b"{") and b'"traceEvents"' in head
    return head.startswith(b"\x89PNG\r\n") or b"<svg" in head


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
