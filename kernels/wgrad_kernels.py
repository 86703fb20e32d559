"""Kernels of the weight gradient: for each expert, the sum over its rows of left[r]^T right[r]."""

from __future__ import annotations

import triton
import triton.language as tl

from tessera_rt.kernels.tile_loop import halves_of_columns, write_trace


@triton.jit
def rows_block(
    source, rows, end, first, column, index, stride, width, divisor,
    BLOCK_R: tl.constexpr, COLUMNS: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Rows ``first`` to ``end`` of a tile, zeros behind: by ragged TMA (descriptors.ragged), or gathered."""
    if GATHER:
        token = tl.load(index + rows, mask=rows < end, other=0) // divisor
        columns = column + tl.arange(0, COLUMNS)
        return tl.load(
            source + token.to(tl.int64)[:, None] * stride + columns[None, :],
            mask=(rows < end)[:, None] & (columns < width)[None, :],
            other=0.0,
        )
    else:
        return source.load([1 << 30, end, (1 << 30) - (end - first), column]).reshape(BLOCK_R, COLUMNS)


@triton.jit
def store_slice(out, base, rows, column, P, Q, value, WIDTH: tl.constexpr, ACCUMULATE: tl.constexpr):
    columns = column + tl.arange(0, WIDTH)
    mask = (rows < P)[:, None] & (columns < Q)[None, :]
    place = out + base + rows.to(tl.int64)[:, None] * Q + columns[None, :]
    if ACCUMULATE:
        value += tl.load(place, mask=mask, other=0.0)
    tl.store(place, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def wgrad_aligned(
    left, right, out, index, offsets, trace,
    EXPERTS, P, Q, left_stride, right_stride, divisor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr, ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """out[e] [P, Q] = or += left^T right over the rows of e; ``BLOCK_K`` rows at a time, in order.

    An expert without rows gets exact zeros (or keeps what it has, when accumulating).
    """
    if TRACE:
        write_trace(trace)
    p_tiles = tl.cdiv(P, BLOCK_M)
    q_tiles = tl.cdiv(Q, BLOCK_N)
    per_expert = p_tiles * q_tiles
    for tile in tl.range(tl.program_id(0), EXPERTS * per_expert, tl.num_programs(0), flatten=True):
        expert = tile // per_expert
        within = tile % per_expert
        p = (within % p_tiles) * BLOCK_M
        q = (within // p_tiles) * BLOCK_N
        start = tl.load(offsets + expert)
        end = tl.load(offsets + expert + 1)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(start, end, BLOCK_K):
            rows = first + tl.arange(0, BLOCK_K)
            x = rows_block(left, rows, end, first, p, index, left_stride, P, divisor, BLOCK_K, BLOCK_M, GATHER_LEFT)
            y = rows_block(right, rows, end, first, q, index, right_stride, Q, divisor, BLOCK_K, BLOCK_N, GATHER_RIGHT)
            acc = tl.dot(x.T, y, acc, input_precision=PRECISION)
        base = expert.to(tl.int64) * P * Q
        out_rows = p + tl.arange(0, BLOCK_M)
        WIDTH: tl.constexpr = BLOCK_N // 4
        a, b = halves_of_columns(acc)
        s0, s1 = halves_of_columns(a)
        s2, s3 = halves_of_columns(b)
        store_slice(out, base, out_rows, q, P, Q, s0, WIDTH, ACCUMULATE)
        store_slice(out, base, out_rows, q + WIDTH, P, Q, s1, WIDTH, ACCUMULATE)
        store_slice(out, base, out_rows, q + 2 * WIDTH, P, Q, s2, WIDTH, ACCUMULATE)
        store_slice(out, base, out_rows, q + 3 * WIDTH, P, Q, s3, WIDTH, ACCUMULATE)
