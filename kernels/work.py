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


def bias_gradient_work(*, rows: int, experts: int, n: int, element: int, out_element: int) -> Work:
    """The bias gradient [E, n]."""
    return Work(rows * n, rows * n * element + experts * n * out_element)


def zero_tail_work(*, rows: int, n: int, element: int) -> Work:
    """Zeros in ``rows`` rows that belong to nobody."""
    return Work(0, rows * n * element)


def gather_sum_work(*, rows: int, tokens: int, h: int, element: int) -> Work:
    """The weighted gather-sum of ``rows`` rows into ``tokens``; position and weight of each row."""
    return Work(2 * rows * h, (rows + tokens) * h * element + rows * 8)


def gather_sum_backward_work(*, rows: int, h: int, element: int) -> Work:
    """Its backward: reads a row and its token's gradient, writes the row's."""
    return Work(3 * rows * h, 3 * rows * h * element + rows * 12)


def router_weight_gradient_work(*, choices: int, column_tiles: int) -> Work:
    """The sum of each row's partials."""
    return Work(choices * column_tiles, choices * (4 * column_tiles + 8))


def topk_work(*, tokens: int, experts: int, top_k: int, element: int, backward: bool) -> Work:
    """The choice of experts. Each round compares a row's scores twice; the backward writes as much as it reads."""
    scores = tokens * experts
    return Work(scores * (2 * top_k + 4), scores * element * (2 if backward else 1) + tokens * top_k * 8)


def choices_work(*, choices: int, tiles: int, experts: int, placed: bool) -> Work:
    """Histogram or (``placed``) placement: ids and the counts of every tile, and position with source."""
    return Work(0, choices * (12 if placed else 4) + tiles * experts * 4)


def tile_scan_work(*, tiles: int, experts: int) -> Work:
    """The counts of every tile read and written, and their totals."""
    return Work(0, (2 * tiles + 1) * experts * 4)


def per_expert_work(*, experts: int, written: int) -> Work:
    """Offsets or a tile table: one number per expert read, ``written`` numbers stored."""
    return Work(0, (experts + written + 1) * 4)


def launch_metadata(work: Callable[[Mapping[str, Any]], Work]) -> Callable[..., dict[str, Any]]:
    """For ``triton.jit(launch_metadata=...)``: the kernel's name with what ``work`` says of its arguments."""

    def describe(grid: tuple[int, ...], kernel: Any, args: Mapping[str, Any]) -> dict[str, Any]:
        done = work(args)
        return {"name": kernel.name, "flops": done.flops, "bytes": done.bytes}

    return describe
