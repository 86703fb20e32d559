"""Kernels of the weight gradient: for each expert, the sum over its rows of left[r]^T right[r]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from tessera_rt.kernels.rows_gemm_kernels import strided_block
from tessera_rt.kernels.tile_loop import halves_of_columns, write_trace
from tessera_rt.kernels.work import Work, bias_gradient_work, launch_metadata, wgrad_work


def _work(args: Mapping[str, Any]) -> Work:
    out = args["out"]
    return wgrad_work(
        rows=args["ROWS"],
        experts=args["EXPERTS"],
        n=args["P"],
        k=args["Q"],
        element=args["ELEMENT"],
        out_element=out.element_size(),
        accumulate=args["ACCUMULATE"],
    )


def _bias_work(args: Mapping[str, Any]) -> Work:
    grad, out = args["grad"], args["out"]
    return bias_gradient_work(
        rows=grad.shape[0], experts=args["EXPERTS"], n=args["N"], element=grad.element_size(),
        out_element=out.element_size(),
    )  # fmt: skip


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


@triton.jit(launch_metadata=launch_metadata(_work))
def wgrad_aligned(
    left, right, out, index, offsets, trace,
    ROWS, EXPERTS, P, Q, left_stride, right_stride, divisor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr, ACCUMULATE: tl.constexpr,
    ELEMENT: tl.constexpr, PRECISION: tl.constexpr, TRACE: tl.constexpr,
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
        base = tl.cast(expert, tl.int64) * P * Q
        out_rows = p + tl.arange(0, BLOCK_M)
        WIDTH: tl.constexpr = BLOCK_N // 4
        a, b = halves_of_columns(acc)
        s0, s1 = halves_of_columns(a)
        s2, s3 = halves_of_columns(b)
        store_slice(out, base, out_rows, q, P, Q, s0, WIDTH, ACCUMULATE)
        store_slice(out, base, out_rows, q + WIDTH, P, Q, s1, WIDTH, ACCUMULATE)
        store_slice(out, base, out_rows, q + 2 * WIDTH, P, Q, s2, WIDTH, ACCUMULATE)
        store_slice(out, base, out_rows, q + 3 * WIDTH, P, Q, s3, WIDTH, ACCUMULATE)


@triton.jit(launch_metadata=launch_metadata(_work))
def wgrad_any(
    left, right, out, index, offsets, trace,
    ROWS, EXPERTS, P, Q, lr_stride, lp_stride, rr_stride, rq_stride, divisor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr, ACCUMULATE: tl.constexpr,
    ELEMENT: tl.constexpr, PRECISION: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """As ``wgrad_aligned`` for any sizes and strides, by masked pointers."""
    if TRACE:
        write_trace(trace)
    p_tiles = tl.cdiv(P, BLOCK_M)
    per_expert = p_tiles * tl.cdiv(Q, BLOCK_N)
    for tile in range(tl.program_id(0), EXPERTS * per_expert, tl.num_programs(0)):
        expert = tile // per_expert
        within = tile % per_expert
        ps = (within % p_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
        q = (within // p_tiles) * BLOCK_N
        qs = q + tl.arange(0, BLOCK_N)
        start = tl.load(offsets + expert)
        end = tl.load(offsets + expert + 1)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(start, end, BLOCK_K):
            rows = first + tl.arange(0, BLOCK_K)
            left_rows = rows
            right_rows = rows
            if GATHER_LEFT:
                left_rows = tl.load(index + rows, mask=rows < end, other=0) // divisor
            if GATHER_RIGHT:
                right_rows = tl.load(index + rows, mask=rows < end, other=0) // divisor
            x = strided_block(left, left_rows, ps, (rows < end)[:, None] & (ps < P)[None, :], lr_stride, lp_stride)
            y = strided_block(right, right_rows, qs, (rows < end)[:, None] & (qs < Q)[None, :], rr_stride, rq_stride)
            acc = tl.dot(x.T, y, acc, input_precision=PRECISION)
        store_slice(out, tl.cast(expert, tl.int64) * P * Q, ps, q, P, Q, acc, BLOCK_N, ACCUMULATE)


@triton.jit(launch_metadata=launch_metadata(_bias_work))
def bias_gradient_kernel(
    grad, out, offsets, trace, EXPERTS, N, row_stride, column_stride,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, ACCUMULATE: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """out[e] [N] = or += the sum of the rows of e, BLOCK_R at a time, in order."""
    if TRACE:
        write_trace(trace)
    column_tiles = tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), EXPERTS * column_tiles, tl.num_programs(0)):
        expert = tile // column_tiles
        columns = (tile % column_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
        start = tl.load(offsets + expert)
        end = tl.load(offsets + expert + 1)
        total = tl.zeros((BLOCK_N,), tl.float32)
        for first in range(start, end, BLOCK_R):
            rows = first + tl.arange(0, BLOCK_R)
            mask = (rows < end)[:, None] & (columns < N)[None, :]
            total += tl.sum(strided_block(grad, rows, columns, mask, row_stride, column_stride).to(tl.float32), axis=0)
        place = out + tl.cast(expert, tl.int64) * N + columns
        if ACCUMULATE:
            total += tl.load(place, mask=columns < N, other=0.0)
        tl.store(place, total.to(out.dtype.element_ty), mask=columns < N)
