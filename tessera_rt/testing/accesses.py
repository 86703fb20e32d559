"""Which programs of a launch touch which memory: shows that none depends on what another one writes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two programs that touch the byte at ``address``, which the first of them writes."""

    writer: int
    other: int
    address: int


class Accesses:
    """The bytes that the programs of one launch read and wrote."""

    def __init__(self) -> None:
        self._read: defaultdict[int, list[np.ndarray]] = defaultdict(list)
        self._written: defaultdict[int, list[np.ndarray]] = defaultdict(list)

    def note(self, program: int, addresses: np.ndarray, size: int, *, writes: bool) -> None:
        """``program`` touches ``size`` bytes at each of ``addresses``."""
        starts = np.unique(addresses.astype(np.uint64))
        everything = starts[:, None] + np.arange(size, dtype=np.uint64)[None, :]
        (self._written if writes else self._read)[program].append(everything.reshape(-1))

    def conflict(self) -> Conflict | None:
        """Two programs of which one writes what the other reads or writes, if there are any."""
        addresses, writers = _by_address(self._written)
        twice = np.flatnonzero(addresses[1:] == addresses[:-1])
        if twice.size:
            first = int(twice[0])
            return Conflict(int(writers[first]), int(writers[first + 1]), int(addresses[first]))
        for program, parts in self._read.items():
            read = np.concatenate(parts)
            place = np.searchsorted(addresses, read)
            known = place < addresses.size
            read, place = read[known], place[known]
            foreign = np.flatnonzero((addresses[place] == read) & (writers[place] != program))
            if foreign.size:
                first = int(foreign[0])
                return Conflict(int(writers[place[first]]), program, int(read[first]))
        return None


def _by_address(written: dict[int, list[np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Every byte once per program that wrote it, by address, and that program."""
    parts = {program: np.unique(np.concatenate(of_program)) for program, of_program in written.items()}
    if not parts:
        return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
    addresses = np.concatenate(list(parts.values()))
    programs = np.concatenate([np.full(part.size, program) for program, part in parts.items()])
    order = np.argsort(addresses, kind="stable")
    return addresses[order], programs[order]
