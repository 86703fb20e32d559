"""Floating-point operations and bytes of a launch, for profilers (Triton's launch metadata) and the efficiency note.

Counts stay on the device, so rows are those of the buffer: an upper bound where rows are dropped. Bytes are those that
must move at least once; what a cache does not hold moves again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Work:
    """``flops`` counts a multiply-add as two; ``bytes`` read and written."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / max(self.bytes, 1)


def rows_gemm_work(
    *, rows: int, experts: int, n: int, k: int, element: int, out_columns: int, saved: int = 0, biased: bool = False
) -> Work:
    """The rows GEMM: ``n`` columns of product, ``out_columns`` stored, ``saved`` columns of pre-activation stored."""
    moved = rows * (k + out_columns + saved) + experts * n * (k + biased)
    return Work(2 * rows * n * k, moved * element)


def gate_backward_work(*, rows: int, experts: int, n: int, k: int, element: int, pre: int, partials: int = 0) -> Work:
    """The gate backward: ``n`` = I columns of activation, ``k`` = H; ``pre`` columns read and written back as d pre."""
    moved = rows * (k + n + 2 * pre) + experts * n * k
    return Work(2 * rows * n * k, moved * element + rows * partials * 4)


def wgrad_work(*, rows: int, experts: int, n: int, k: int, element: int, out_element: int, accumulate: bool) -> Work:
    """The weight gradient [E, n, k]."""
    return Work(2 * rows * n * k, rows * (n + k) * element + experts * n * k * out_element * (2 if accumulate else 1))


def launch_metadata(work: Callable[[Mapping[str, Any]], Work]) -> Callable[..., dict[str, Any]]:
    """For ``triton.jit(launch_metadata=...)``: the kernel's name with what ``work`` says of its arguments."""

    def describe(grid: tuple[int, ...], kernel: Any, args: Mapping[str, Any]) -> dict[str, Any]:
        done = work(args)
        return {"name": kernel.name, "flops": done.flops, "bytes": done.bytes}

    return describe
