"""Training data: token windows that depend on the seed and on a row's global number only.

Data is a stream of token ids: the bytes of files, or an array of ids on disk; nothing is held in memory. It is cut into
windows of ``sequence`` tokens whose labels are the next tokens, so every token but the first is a label once per epoch.
A step's rows are numbered over all ranks: row ``first + (i * ranks + d) * rows + j`` is row j of micro-batch i on data
rank d. An epoch visits every window once, in an order drawn from the seed. So a run that is resumed, with whatever
(dp, ep) layout, goes on with the rows that come next.
"""

from __future__ import annotations

import glob
import hashlib
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tessera_rt.config import DataSection
from tessera_rt.errors import Problem, SpecError

IGNORED = -100
"""Label of a position that counts for nothing: that of ``moe.steps``, which data does not import."""

_NOT_SOURCES = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_SCANNED_IDS = 1 << 22  # of a piece, when all are looked through
_ID_TYPES = ("uint8", "uint16", "uint32", "int32", "int64")

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Part:
    """``count`` token ids of type ``dtype`` in a file, from byte ``offset`` on; ``first``: the number of the first."""

    path: Path
    dtype: np.dtype[np.generic]
    offset: int
    count: int
    first: int = 0


@dataclass(frozen=True)
class Tokens:
    """A stream of token ids below ``vocab``, one part after the other."""

    parts: tuple[Part, ...]
    vocab: int

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(part.count for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1] if self.parts else 0

    def read(self, start: int, stop: int) -> Ids:
        """Ids [start, stop). Raises SpecError for ids that are not in the vocabulary and for files that have shrunk."""
        pieces: list[Ids] = []
        index = bisect_right(self._ends, start)
        while start < stop:
            part = self.parts[index]
            begin = start - (self._ends[index] - part.count)
            count = min(stop - start, part.count - begin)
            pieces.append(self._read_part(part, begin, count))
            start += count
            index += 1
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def section(self, start: int, stop: int) -> Tokens:
        """The stream of ids [start, stop)."""
        chosen = []
        for part, end in zip(self.parts, self._ends, strict=True):
            begin = end - part.count
            low, high = max(start, begin), min(stop, end)
            if low < high:
                offset = part.offset + (low - begin) * part.dtype.itemsize
                chosen.append(Part(part.path, part.dtype, offset, high - low, part.first + low - begin))
        return Tokens(tuple(chosen), self.vocab)

    def wrong_ids(self) -> list[Problem]:
        """The first id of each file that is not in the vocabulary. Reads everything once, in pieces."""
        return [problem for part in self.parts if (problem := self._wrong_in_part(part)) is not None]

    def _wrong_in_part(self, part: Part) -> Problem | None:
        if part.dtype.kind == "u" and 1 << 8 * part.dtype.itemsize <= self.vocab:
            return None  # no id of this type is too large
        ids = np.memmap(part.path, part.dtype, "r", part.offset, part.count)
        for begin in range(0, part.count, _SCANNED_IDS):
            piece = ids[begin : begin + _SCANNED_IDS]
            if int(piece.min()) < 0 or int(piece.max()) >= self.vocab:
                return self._wrong_id(part, begin, piece.astype(np.int64))
        return None

    def _wrong_id(self, part: Part, begin: int, ids: Ids) -> Problem | None:
        """The first of ``ids``, which start at id ``begin`` of the part, that is not in the vocabulary."""
        wrong = np.flatnonzero((ids < 0) | (ids >= self.vocab))
        if not len(wrong):
            return None
        at = int(wrong[0])
        return Problem(
            f"{part.path}, token {part.first + begin + at}",
            int(ids[at]),
            f"a token id from 0 to {self.vocab - 1}",
            "set data.vocab, data.dtype or the model's vocabulary",
        )

    def _read_part(self, part: Part, begin: int, count: int) -> Ids:
        offset = part.offset + begin * part.dtype.itemsize
        try:
            ids = np.fromfile(part.path, part.dtype, count, offset=offset).astype(np.int64)
        except OSError as fault:
            raise SpecError.of("data", [Problem("file", str(part.path), f"a readable file ({fault})")]) from None
        if len(ids) != count:
            allowed = "left as it was when the run started"
            raise SpecError.of("data", [Problem("file", str(part.path), allowed, "it has become shorter")])
        problem = self._wrong_id(part, begin, ids)
        if problem is not None:
            raise SpecError.of("data", [problem])
        return ids


@dataclass(frozen=True)
class Windows:
    """Windows of a stream with more than ``sequence`` tokens: every token but the first is a label once."""

    tokens: Tokens
    sequence: int

    def __len__(self) -> int:
        return (len(self.tokens) + self.sequence - 2) // self.sequence

    def row(self, index: int) -> tuple[Ids, Ids]:
        """Tokens and labels [s] of window ``index``.

        The last window reaches back so that it is full too; labels that the one before it has are ignored there.
        """
        start = min(index * self.sequence, len(self.tokens) - 1 - self.sequence)
        ids = self.tokens.read(start, start + self.sequence + 1)
        labels = ids[1:].copy()
        labels[: index * self.sequence - start] = IGNORED
        return ids[:-1], labels

    def labels(self, index: int) -> int:
        """How many labels of the window count."""
        return min(self.sequence, len(self.tokens) - 1 - index * self.sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Who reads what in a step: data rank ``rank`` of ``ranks``, with ``microbatches`` of ``rows`` rows each."""

    rank: int
    ranks: int
    microbatches: int
    rows: int

    @property
    def rows_per_step(self) -> int:
        """Over all ranks."""
        return self.ranks * self.microbatches * self.rows

    def numbers(self, first: int) -> list[int]:
        """Global numbers of this rank's rows of the step that starts at row ``first``, in batch order."""
        return [
            first + (i * self.ranks + self.rank) * self.rows + j
            for i in range(self.microbatches)
            for j in range(self.rows)
        ]


@dataclass(frozen=True, kw_only=True)
class Data:
    """What a run reads. ``held_out`` is None when nothing was held out."""

    train: Windows
    held_out: Windows | None
    seed: int

    def check_ids(self) -> None:
        """Raises SpecError that names the first id of each file that is not in the vocabulary. Reads everything."""
        problems = self.train.tokens.wrong_ids()
        if self.held_out is not None:
            problems += self.held_out.tokens.wrong_ids()
        if problems:
            raise SpecError.of("data", problems)

    def batch(self, first: int, layout: Layout) -> tuple[Tensor, Tensor]:
        """Tokens and labels [microbatches * rows, s] int64 of the step that starts at global row ``first``."""
        return _stacked(self.train.row(self._window(number)) for number in layout.numbers(first))

    def held_out_batches(self, limit: int, layout: Layout) -> int:
        """Batches of one evaluation: all of the held-out data, or ``limit`` if that is not 0 and less."""
        if self.held_out is None:
            return 0
        every = -(-len(self.held_out) // layout.rows_per_step)
        return min(limit, every) if limit else every

    def held_out_batch(self, index: int, layout: Layout) -> tuple[Tensor, Tensor, int]:
        """Tokens, labels [microbatches * rows, s] int64 and the labels that count over all ranks, of one batch.

        Batches take the held-out windows in a fixed mixed order. Rows behind the last window have no label that counts.
        """
        assert self.held_out is not None
        windows, first = self.held_out, index * layout.rows_per_step
        order = [shuffled(n % len(windows), len(windows), f"{self.seed}/held out") for n in layout.numbers(first)]
        tokens, labels = _stacked(map(windows.row, order))
        behind = [n >= len(windows) for n in layout.numbers(first)]
        labels[torch.tensor(behind)] = IGNORED
        everyone = range(first, min(first + layout.rows_per_step, len(windows)))
        counted = sum(windows.labels(shuffled(n, len(windows), f"{self.seed}/held out")) for n in everyone)
        return tokens, labels, counted

    def _window(self, number: int) -> int:
        epoch, position = divmod(number, len(self.train))
        return shuffled(position, len(self.train), f"{self.seed}/{epoch}")


def open_data(section: DataSection, *, vocab: int, seed: int) -> Data:
    """The data that a configuration names. Raises SpecError for files that are missing, unreadable or too small."""
    problems: list[Problem] = []
    held_parts = (
        _parts(section, section.held_out_files, "data.held_out_files", problems) if section.held_out_files else []
    )
    names = (section.tokens,) if section.tokens else section.files
    field = "data.tokens" if section.tokens else "data.files"
    parts = _parts(section, names, field, problems) if names else _standard_library(problems)
    if problems:
        raise SpecError.of("data", problems)
    held_paths = {part.path for part in held_parts}
    everything = Tokens(tuple(part for part in parts if part.path not in held_paths), vocab)
    if held_parts:
        train, held_out = everything, Tokens(tuple(held_parts), vocab)
    else:
        cut = _cut(everything, section.held_out)
        train, held_out = everything.section(0, cut), everything.section(cut, len(everything))
    least = section.sequence + 1
    if len(train) < least:
        where = f"at least {least} tokens to train on (data.sequence + 1)"
        problems.append(Problem(field, f"{len(train)} tokens", where, "give more data or a shorter sequence"))
    if 0 < len(held_out) < least:
        share = "data.held_out_files" if held_parts else "data.held_out"
        where = f"at least {least} held-out tokens (data.sequence + 1), or none"
        problems.append(Problem(share, f"{len(held_out)} tokens", where, "hold out more, or 0"))
    if problems:
        raise SpecError.of("data", problems)
    return Data(
        train=Windows(train, section.sequence),
        held_out=Windows(held_out, section.sequence) if len(held_out) else None,
        seed=seed,
    )


def shuffled(index: int, size: int, key: str) -> int:
    """Place of ``index`` in a permutation of range(size) drawn from ``key``, in O(1) memory.

    A four-round Feistel network over the next power of four, walked until the value is below ``size`` (Black and
    Rogaway 2002, "Ciphers with arbitrary finite domains").
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            digest = hashlib.blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        index = left << half | right
        if index < size:
            return index


def _stacked(rows: Iterable[tuple[Ids, Ids]]) -> tuple[Tensor, Tensor]:
    tokens, labels = zip(*rows, strict=True)
    return torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(labels))


def _cut(tokens: Tokens, share: float) -> int:
    """Where the held-out end begins: at the start of a file where that holds out at most twice the share."""
    if share == 0 or not len(tokens):
        return len(tokens)
    held_out = max(1, round(len(tokens) * share))
    cut = len(tokens) - held_out
    starts = accumulate((part.count for part in tokens.parts[:-1]), initial=0)
    file_start = max(start for start in starts if start <= cut)
    return file_start if len(tokens) - file_start <= 2 * held_out else cut


def _standard_library(problems: list[Problem]) -> list[Part]:
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if _NOT_SOURCES.isdisjoint(path.relative_to(root).parts))
    if not files:
        remedy = "name your own files"
        problems.append(Problem("data.files", (), "given, since this Python has no sources of its library", remedy))
    return [part for path in files if (part := _byte_part(path)).count]


def _parts(section: DataSection, names: Sequence[str], field: str, problems: list[Problem]) -> list[Part]:
    """The files of names and globs in order, each once; empty ones are left out."""
    paths: dict[Path, None] = {}
    for name in names:
        found = [Path(name)] if Path(name).is_file() else sorted(map(Path, glob.glob(name, recursive=True)))
        found = [path.resolve() for path in found if path.is_file()]
        if not found:
            problems.append(Problem(field, name, "an existing file, or a pattern that some file matches"))
        paths |= dict.fromkeys(found)
    parts = []
    for path in paths:
        try:
            part = _array_part(path, section, field, problems) if section.tokens else _byte_part(path)
        except OSError as fault:
            problems.append(Problem(field, str(path), f"a readable file ({fault.strerror})"))
            continue
        if part is not None and part.count:
            parts.append(part)
    return parts


def _byte_part(path: Path) -> Part:
    return Part(path, np.dtype(np.uint8), 0, path.stat().st_size)


def _array_part(path: Path, section: DataSection, field: str, problems: list[Problem]) -> Part | None:
    if path.suffix == ".npy":
        return _npy_part(path, section, field, problems)
    if section.dtype is None:
        problems.append(
            Problem("data.dtype", None, "given for a raw array of token ids", f"one of {', '.join(_ID_TYPES)}")
        )
        return None
    dtype: np.dtype[np.generic] = np.dtype(section.dtype).newbyteorder("<")
    size = path.stat().st_size
    if size % dtype.itemsize:
        allowed = f"a file of whole {section.dtype} values"
        problems.append(Problem(field, f"{path} ({size} bytes)", allowed, "it was cut off, or data.dtype is wrong"))
    return Part(path, dtype, 0, size // dtype.itemsize)


def _npy_part(path: Path, section: DataSection, field: str, problems: list[Problem]) -> Part | None:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as fault:
        problems.append(Problem(field, str(path), f"an array file of numpy ({fault})"))
        return None
    if not isinstance(array, np.memmap) or array.ndim != 1 or array.dtype.name not in _ID_TYPES:
        what = f"{getattr(array, 'dtype', '?')} {getattr(array, 'shape', '')}"
        problems.append(Problem(field, f"{path}: {what}", f"one-dimensional, of {', '.join(_ID_TYPES)}"))
        return None
    if section.dtype not in (None, array.dtype.name):
        problems.append(Problem("data.dtype", section.dtype, f"{array.dtype.name}, as {path} says", "leave it out"))
    return Part(path, array.dtype, array.offset, array.size)
