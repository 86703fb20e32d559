"""Kernels of the rows GEMM: row r of expert e becomes x[r] W[e]^T, with bias and activation in the epilogue.

Persistent: each program takes tiles program, program + grid, ... of the device-side tile table, so the grid is a free
choice (the SM budget) and results do not depend on it. A tile may read rows of the next expert, or of nobody; these
reach only output rows that are masked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from tessera_rt.kernels.activations import activate
from tessera_rt.kernels.tile_loop import place_of_tile, rows_of_tile, write_trace
from tessera_rt.kernels.work import Work, launch_metadata, rows_gemm_work, zero_tail_work


def _work(args: Mapping[str, Any]) -> Work:
    out, gated = args["out"], args["GATED"]
    n = args["N"] * (2 if gated else 1)
    return rows_gemm_work(
        rows=out.shape[0],
        experts=args["offsets"].numel() - 1,
        n=n,
        k=args["K"],
        element=out.element_size(),
        out_columns=args["N"] if args["WRITE_OUT"] else 0,
        saved=n if args["SAVE_PRE"] else 0,
        biased=args["HAS_BIAS"],
    )


def _tail_work(args: Mapping[str, Any]) -> Work:
    """At most: how many rows belong to nobody is known to the device only."""
    return zero_tail_work(rows=args["rows"], n=args["width"], element=args["out"].element_size())


@triton.jit
def weight_tile(w, expert, column, k, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, N_FIRST: tl.constexpr,
                HALVES: tl.constexpr):  # fmt: skip
    """A tile [BLOCK_K, COLUMNS] of one expert's weight by TMA, out of view [E, N, K] (N_FIRST) or [E, K, N].

    HALVES: the view has the axis (gate, up) before that of the columns, and the tile has half its columns of each.
    """
    if HALVES:
        if N_FIRST:
            return w.load([expert, 0, column, k]).reshape(COLUMNS, BLOCK_K).T
        else:
            return w.load([expert, k, 0, column]).reshape(BLOCK_K, COLUMNS)
    elif N_FIRST:
        return w.load([expert, column, k]).reshape(COLUMNS, BLOCK_K).T
    else:
        return w.load([expert, k, column]).reshape(BLOCK_K, COLUMNS)


@triton.jit
def gated_epilogue(
    gate, up, bias, out, pre, rows, end, column, expert, N, alpha, limit,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr, SAVE_PRE: tl.constexpr, WRITE_OUT: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = out.dtype.element_ty
    columns = column + tl.arange(0, BLOCK_N)
    mask = (rows < end)[:, None] & (columns < N)[None, :]
    rows64 = rows.to(tl.int64)[:, None]
    if HAS_BIAS:
        b = bias + expert.to(tl.int64) * (2 * N)
        gate_column = columns * 2 if INTERLEAVED else columns
        up_column = columns * 2 + 1 if INTERLEAVED else columns + N
        gate += tl.load(b + gate_column, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        up += tl.load(b + up_column, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    gate, up = gate.to(DTYPE), up.to(DTYPE)
    if SAVE_PRE:
        if INTERLEAVED:
            wide = column * 2 + tl.arange(0, 2 * BLOCK_N)
            wide_mask = (rows < end)[:, None] & (wide < 2 * N)[None, :]
            both = tl.join(gate, up).reshape(BLOCK_M, 2 * BLOCK_N)
            tl.store(pre + rows64 * (2 * N) + wide[None, :], both, mask=wide_mask)
        else:
            tl.store(pre + rows64 * (2 * N) + columns[None, :], gate, mask=mask)
            tl.store(pre + rows64 * (2 * N) + N + columns[None, :], up, mask=mask)
    if WRITE_OUT:
        # The activation starts from the rounded values, so that a recomputed one has the same bits.
        value = activate(gate.to(tl.float32), up.to(tl.float32), alpha, limit, ACTIVATION)
        tl.store(out + rows64 * N + columns[None, :], value.to(DTYPE), mask=mask)


@triton.jit
def plain_epilogue(
    value, bias, out, pre, rows, end, column, expert, N, alpha, limit,
    BLOCK_N: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, SAVE_PRE: tl.constexpr, WRITE_OUT: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = out.dtype.element_ty
    columns = column + tl.arange(0, BLOCK_N)
    mask = (rows < end)[:, None] & (columns < N)[None, :]
    place = rows.to(tl.int64)[:, None] * N + columns[None, :]
    if HAS_BIAS:
        b = bias + expert.to(tl.int64) * N
        value += tl.load(b + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    rounded = value.to(DTYPE)
    if SAVE_PRE:
        tl.store(pre + place, rounded, mask=mask)
    if WRITE_OUT:
        if ACTIVATION != 0:
            x = rounded.to(tl.float32)
            rounded = activate(x, x, alpha, limit, ACTIVATION).to(DTYPE)
        tl.store(out + place, rounded, mask=mask)


@triton.jit(launch_metadata=launch_metadata(_work))
def rows_gemm_aligned(
    a, w, bias, out, pre, index, offsets, tiles, tile_count, trace,
    N, K, a_stride, divisor, alpha, limit,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    GATHER: tl.constexpr, N_FIRST: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr, SAVE_PRE: tl.constexpr, WRITE_OUT: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """x by TMA descriptor [R, K] or gathered through pointers, W by TMA, results by masked 16-byte stores.

    N: columns of ``out``; a gated tile computes BLOCK_N of them from 2 BLOCK_N columns of the product.
    """
    if TRACE:
        write_trace(trace)
    COLUMNS: tl.constexpr = BLOCK_N * 2 if GATED else BLOCK_N
    row_tiles = tl.load(tile_count)
    column_tiles = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        row_tile, column_tile = place_of_tile(tile, row_tiles, column_tiles, GROUP_M)
        expert, first, end = rows_of_tile(tiles, offsets, row_tile, BLOCK_M)
        column = column_tile * BLOCK_N
        w_column = column * 2 if INTERLEAVED else column
        rows = first + tl.arange(0, BLOCK_M)
        if GATHER:
            source = tl.load(index + rows, mask=rows < end, other=0) // divisor
            a_rows = a + source.to(tl.int64)[:, None] * a_stride
        acc = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
        for k in range(0, K, BLOCK_K):
            if GATHER:
                ks = k + tl.arange(0, BLOCK_K)
                mask = (rows < end)[:, None]
                if not EVEN_K:
                    mask = mask & (ks < K)[None, :]
                x = tl.load(a_rows + ks[None, :], mask=mask, other=0.0)
            else:
                x = a.load([first, k])
            y = weight_tile(w, expert, w_column, k, COLUMNS, BLOCK_K, N_FIRST, GATED and not INTERLEAVED)
            acc = tl.dot(x, y, acc, input_precision=PRECISION)
        if GATED:
            if INTERLEAVED:
                gate, up = acc.reshape(BLOCK_M, BLOCK_N, 2).split()
            else:
                gate, up = acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
            gated_epilogue(gate, up, bias, out, pre, rows, end, column, expert, N, alpha, limit,
                           BLOCK_M, BLOCK_N, ACTIVATION, INTERLEAVED, HAS_BIAS, SAVE_PRE, WRITE_OUT)  # fmt: skip
        else:
            plain_epilogue(acc, bias, out, pre, rows, end, column, expert, N, alpha, limit,
                           BLOCK_N, ACTIVATION, HAS_BIAS, SAVE_PRE, WRITE_OUT)  # fmt: skip


@triton.jit
def strided_block(base, rows, columns, mask, row_stride, column_stride):
    place = rows.to(tl.int64)[:, None] * row_stride + columns.to(tl.int64)[None, :] * column_stride
    return tl.load(base + place, mask=mask, other=0.0)


@triton.jit(launch_metadata=launch_metadata(_work))
def rows_gemm_any(
    a, w, bias, out, pre, index, offsets, tiles, tile_count, trace,
    N, K, am_stride, ak_stride, we_stride, wn_stride, wk_stride, divisor, alpha, limit,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    GATHER: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr, SAVE_PRE: tl.constexpr, WRITE_OUT: tl.constexpr,
    PRECISION: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """As ``rows_gemm_aligned`` for any sizes and strides, by masked pointers; gate and up are two products."""
    if TRACE:
        write_trace(trace)
    row_tiles = tl.load(tile_count)
    column_tiles = tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = place_of_tile(tile, row_tiles, column_tiles, GROUP_M)
        expert, first, end = rows_of_tile(tiles, offsets, row_tile, BLOCK_M)
        column = column_tile * BLOCK_N
        rows = first + tl.arange(0, BLOCK_M)
        source = rows
        if GATHER:
            source = tl.load(index + rows, mask=rows < end, other=0) // divisor
        columns = column + tl.arange(0, BLOCK_N)
        w_expert = w + expert.to(tl.int64) * we_stride
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            ks = k + tl.arange(0, BLOCK_K)
            x = strided_block(a, source, ks, (rows < end)[:, None] & (ks < K)[None, :], am_stride, ak_stride)
            inside = (ks < K)[:, None] & (columns < N)[None, :]
            if GATED:
                gate_column = columns * 2 if INTERLEAVED else columns
                up_column = columns * 2 + 1 if INTERLEAVED else columns + N
                y = strided_block(w_expert, ks, gate_column, inside, wk_stride, wn_stride)
                acc = tl.dot(x, y, acc, input_precision=PRECISION)
                y = strided_block(w_expert, ks, up_column, inside, wk_stride, wn_stride)
                acc_up = tl.dot(x, y, acc_up, input_precision=PRECISION)
            else:
                y = strided_block(w_expert, ks, columns, inside, wk_stride, wn_stride)
                acc = tl.dot(x, y, acc, input_precision=PRECISION)
        if GATED:
            gated_epilogue(acc, acc_up, bias, out, pre, rows, end, column, expert, N, alpha, limit,
                           BLOCK_M, BLOCK_N, ACTIVATION, INTERLEAVED, HAS_BIAS, SAVE_PRE, WRITE_OUT)  # fmt: skip
        else:
            plain_epilogue(acc, bias, out, pre, rows, end, column, expert, N, alpha, limit,
                           BLOCK_N, ACTIVATION, HAS_BIAS, SAVE_PRE, WRITE_OUT)  # fmt: skip


@triton.jit(launch_metadata=launch_metadata(_tail_work))
def zero_tail_kernel(out, end, trace, rows, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRACE: tl.constexpr):
    """Zeros in the rows that belong to nobody, from ``end`` [1] to ``rows``."""
    if TRACE:
        write_trace(trace)
    first = tl.load(end)
    for block in range(first + tl.program_id(0) * BLOCK_M, rows, tl.num_programs(0) * BLOCK_M):
        place = block + tl.arange(0, BLOCK_M)
        for column in range(0, width, BLOCK_N):
            columns = column + tl.arange(0, BLOCK_N)
            mask = (place < rows)[:, None] & (columns < width)[None, :]
            zeros = tl.zeros((BLOCK_M, BLOCK_N), out.dtype.element_ty)
            tl.store(out + place.to(tl.int64)[:, None] * width + columns[None, :], zeros, mask=mask)
