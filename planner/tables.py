"""Integer tables over ranges of items: [n + 1, n + 1] arrays whose entry [p, q] belongs to the items p to q - 1."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.int64]

FORBIDDEN = np.iinfo(np.int64).max // 4
"""Cost of a range that a stage must not hold; small enough to be added up."""


def prefix_sums(values: Iterable[int]) -> Table:
    """[n + 1]: sums of the first 0, 1, ..., n values."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.fromiter(values, dtype=np.int64))])


def range_sums(values: Iterable[int]) -> Table:
    """[n + 1, n + 1]: sums of the values p to q - 1; FORBIDDEN where q < p."""
    sums = prefix_sums(values)
    table = sums[None, :] - sums[:, None]
    table[np.tri(len(sums), k=-1, dtype=bool)] = FORBIDDEN
    return table
