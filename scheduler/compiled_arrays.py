"""Sets as bits, growing arrays and hashes for compiled searches.

numba's cache looks at the file of the function that is called from Python only: after a change here, remove the
``__pycache__`` folders of scheduler/.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

_ONE = np.uint64(1)
_ZERO = np.uint64(0)
_LOW = np.uint64(63)


def jit(function: Any) -> Any:
    """Compiled at the first call, and kept on disk."""
    return numba.njit(cache=True)(function)


@jit
def has(mask, task):  # type: ignore[no-untyped-def]
    return (mask[task >> 6] >> (np.uint64(task) & _LOW)) & _ONE != _ZERO


@jit
def meets(mask, other):  # type: ignore[no-untyped-def]
    shared = _ZERO
    for word in range(mask.shape[0]):
        shared |= mask[word] & other[word]
    return shared != _ZERO


@jit
def within(mask, other):  # type: ignore[no-untyped-def]
    outside = _ZERO
    for word in range(mask.shape[0]):
        outside |= mask[word] & ~other[word]
    return outside == _ZERO


@jit
def longer(array, least):  # type: ignore[no-untyped-def]
    """The array with twice its places, or with ``least`` if that is more."""
    grown = np.zeros(max(least, 2 * array.shape[0]), dtype=array.dtype)
    grown[: array.shape[0]] = array
    return grown


@jit
def taller(array):  # type: ignore[no-untyped-def]
    """The table with twice its rows."""
    grown = np.zeros((2 * array.shape[0], array.shape[1]), dtype=array.dtype)
    grown[: array.shape[0]] = array
    return grown


@jit
def wider(array, columns):  # type: ignore[no-untyped-def]
    grown = np.zeros((array.shape[0], columns), dtype=array.dtype)
    grown[:, : array.shape[1]] = array
    return grown


@jit
def hashed(numbers, seed):  # type: ignore[no-untyped-def]
    value = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15)
    for i in range(numbers.shape[0]):
        value = (value ^ np.uint64(numbers[i])) * np.uint64(0xFF51AFD7ED558CCD)
        value ^= value >> np.uint64(32)
    return value
