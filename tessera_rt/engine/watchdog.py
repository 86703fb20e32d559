"""Who failed first, and why: failing ranks leave reports in the store, so that every error names the true cause.

A rank that waits in vain sees only its neighbour, which may itself wait for another. So a failing rank writes what it
waited for and from whom, follows the reports of those ranks, and names the one that reported nothing (it hangs, or was
killed) or that failed by itself. The first complete account is kept as the cause; all others quote it.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from tessera_rt.errors import SpecError, TransportError
from tessera_rt.waits import WaitError, short_cause

PROGRESS_DIR = "TESSERA_PROGRESS_DIR"
"""Environment variable: a folder in which every rank of this host keeps its last note (set by the launcher)."""

_FIRST_CAUSE = "first_cause.json"
_NOTE_BYTES = 512
_POLL_S = 0.02
_LISTED = 8


def read_note(folder: Path, rank: int) -> str:
    """The last note of a rank in a launcher's folder, "" if it left none."""
    path = _note_path(folder, rank)
    return path.read_bytes().split(b"\0", 1)[0].decode(errors="replace") if path.is_file() else ""


def write_first_cause(folder: Path, rank: int, text: str) -> None:
    """For the launcher, when the process of ``rank`` has ended without a word: ranks then quote ``text``."""
    temporary = folder / f".{_FIRST_CAUSE}"
    if not (folder / _FIRST_CAUSE).exists():
        temporary.write_text(json.dumps([rank, text]), encoding="utf-8")
        temporary.rename(folder / _FIRST_CAUSE)


def _note_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.note"


class ProgressNotes:
    """The last note of each rank: in a memory-mapped file per rank if there is a folder, else of this rank only.

    Writing one is a copy of a few bytes. The file outlives a killed process.
    """

    def __init__(self, rank: int, folder: Path | None) -> None:
        self.rank = rank
        self._folder = folder
        self._own = ""
        self._map: mmap.mmap | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            with _note_path(folder, rank).open("w+b") as file:
                file.truncate(_NOTE_BYTES)
                self._map = mmap.mmap(file.fileno(), _NOTE_BYTES)

    def write(self, text: str) -> None:
        self._own = text
        if self._map is not None:
            data = text.encode()[: _NOTE_BYTES - 1] + b"\0"
            self._map[: len(data)] = data

    def read(self, rank: int) -> str:
        """The rank's last note, "" if it is not known here."""
        if rank == self.rank:
            return self._own
        return read_note(self._folder, rank) if self._folder is not None else ""

    def launchers_cause(self) -> tuple[int, str] | None:
        """What the launcher wrote: the rank whose process ended, and how."""
        if self._folder is None or not (self._folder / _FIRST_CAUSE).is_file():
            return None
        rank, text = json.loads((self._folder / _FIRST_CAUSE).read_text(encoding="utf-8"))
        return int(rank), str(text)


class FailureReporter:
    """One rank's voice in the account of a failure. ``grace_s``: how long it waits for the others' reports.

    ``store``: shared by all ranks; best hosted by a process that outlives them. Keys begin with ``failure/``.
    """

    def __init__(
        self, store: dist.Store, rank: int, world: int, *, grace_s: float = 2.0, folder: Path | None = None
    ) -> None:
        self.rank = rank
        self.world = world
        self.grace_s = grace_s
        self._store = store
        self._reported = False
        configured = os.environ.get(PROGRESS_DIR)
        self.notes = ProgressNotes(rank, folder or (Path(configured) if configured else None))

    @classmethod
    def for_group(cls, group: dist.ProcessGroup, *, grace_s: float = 2.0) -> Self:
        """For the members of ``group`` (the world), in the store under its own prefix."""
        return cls(group.get_group_store(), dist.get_rank(), dist.get_world_size(group), grace_s=grace_s)

    # -- notes ------------------------------------------------------------------------------------------------------

    def arrive(self, text: str) -> None:
        """Note what this rank is about to do (an action, say); costs about a microsecond."""
        self.notes.write(text)

    # -- reports ----------------------------------------------------------------------------------------------------

    def fail(self, cause: str) -> None:
        """This rank failed by itself. The first cause of all ranks is kept."""
        self._report(cause, ())
        self._claim(cause)

    def cause(self) -> str | None:
        """The first cause, beginning with its rank; None while nobody has failed."""
        first = self._first()
        return f"rank {first[0]}: {first[1]}" if first else None

    def check(self) -> None:
        """Raises TransportError if some rank has failed."""
        cause = self.cause()
        if cause is not None:
            raise TransportError(f"rank {self.rank} stopped, since another rank failed:\n  {_indented(cause)}")

    def explain(self, local: str, waits_for: Sequence[int] = ()) -> str:
        """``local``, this rank's failed wait, with its last note and the first cause; may wait ``grace_s`` for that.

        If none appears, the account that this rank can give from all reports becomes the cause.
        """
        note = self.notes.read(self.rank)
        local = f"{local}; it was at {note}" if note else local
        self._report(local, waits_for)
        deadline = time.monotonic() + self.grace_s
        while (first := self._first()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if first is None:
            account = "\n  ".join([local, *self._chain(waits_for)])
            self._claim(account)
            first = self._first()
            if first is None or first[0] == self.rank:
                return account
        if first[0] == self.rank:
            return local
        return f"{local}\n  first failure, on rank {first[0]}: {_indented(first[1])}"

    def explained(self, error: TransportError) -> TransportError:
        """The same error with the first cause in its message; an explained one comes back as it is."""
        if getattr(error, "explained", False):
            return error
        waits_for = error.waits_for if isinstance(error, WaitError) else ()
        full = TransportError(self.explain(str(error), waits_for))
        full.__dict__["explained"] = True
        return full

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Everything that goes wrong inside is reported: other ranks then quote it.

        Errors of the transport library become TransportError, which says in which ``what`` and after which note.
        SpecError passes unreported: it is a fault of the input, which all ranks find alike.
        """
        try:
            yield
        except SpecError:
            raise
        except TransportError as error:
            raise self.explained(error) from error.__cause__
        except RuntimeError as error:
            if not _is_transport_failure(error):
                self.fail(f"{type(error).__name__} in {self._place(what)}: {error}")
                raise
            local = WaitError(f"rank {self.rank} lost its connection in {what}: {short_cause(error)}")
            raise self.explained(local) from error
        except Exception as error:
            self.fail(f"{type(error).__name__} in {self._place(what)}: {error}")
            raise

    def _place(self, what: str) -> str:
        note = self.notes.read(self.rank)
        return f"{what}, at {note}" if note else what

    # -- the store --------------------------------------------------------------------------------------------------

    def _report(self, text: str, waits_for: Sequence[int]) -> None:
        if not self._reported:
            self._reported = True
            self._try(self._store.set, f"failure/report/{self.rank}", json.dumps([text, list(waits_for)]))

    def _claim(self, text: str) -> None:
        self._try(self._store.compare_set, "failure/first", "", json.dumps([self.rank, text]))

    def _first(self) -> tuple[int, str] | None:
        found = self.notes.launchers_cause() or self._read("failure/first")
        return (int(found[0]), str(found[1])) if found else None

    def _read(self, key: str) -> Any:
        if not self._try(self._store.check, [key]):
            return None
        text = self._try(self._store.get, key)
        return json.loads(text) if text else None

    @staticmethod
    def _try(call: Any, *arguments: Any) -> Any:
        """None when the store is gone too: the rank then tells what it knows by itself."""
        try:
            return call(*arguments)
        except RuntimeError:
            return None

    def _chain(self, waits_for: Sequence[int]) -> list[str]:
        """What the awaited ranks reported, those they waited for in turn, and which ranks kept silent."""
        told: list[str] = []
        silent: list[str] = []
        seen = {self.rank}
        ahead = list(waits_for)
        while ahead:
            rank = ahead.pop(0)
            if rank in seen:
                continue
            seen.add(rank)
            report = self._read(f"failure/report/{rank}")
            if report is None:
                note = self.notes.read(rank)
                silent.append(f"rank {rank} reported nothing" + (f"; it was at {note}" if note else ""))
            else:
                told.append(f"rank {rank} reported: {_indented(str(report[0]))}")
                ahead += report[1]
        lines = silent[:_LISTED] + told[:_LISTED]
        hidden = len(silent) + len(told) - len(lines)
        return [*lines, f"and {hidden} more ranks"] if hidden else lines


def _is_transport_failure(error: RuntimeError) -> bool:
    words = r"connect|timed out|time-?out|socket|closed by peer|reset by peer|broken pipe|gloo|nccl"
    return isinstance(error, dist.DistError) or re.search(words, str(error), re.IGNORECASE) is not None


def _indented(text: str) -> str:
    return text.replace("\n", "\n  ")
