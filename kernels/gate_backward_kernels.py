"""Kernels of the gate backward: the input gradient of the second product with the activation's backward behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from tessera_rt.kernels.activations import activate_backward
from tessera_rt.kernels.rows_gemm_kernels import strided_block, weight_tile
from tessera_rt.kernels.tile_loop import halves_of_columns, place_of_tile, rows_of_tile, write_trace
from tessera_rt.kernels.work import Work, gate_backward_work, launch_metadata


def _work(args: Mapping[str, Any]) -> Work:
    act = args["act"]
    return gate_backward_work(
        rows=act.shape[0],
        experts=args["offsets"].numel() - 1,
        n=args["N"],
        k=args["K"],
        element=act.element_size(),
        pre=args["N"] * (2 if args["GATED"] else 1),
        partials=-(-args["N"] // args["BLOCK_N"]) if args["WRITE_PARTIALS"] else 0,
    )


@triton.jit
def quarters_of_columns(x):
    left, right = halves_of_columns(x)
    a, b = halves_of_columns(left)
    c, d = halves_of_columns(right)
    return a, b, c, d


@triton.jit
def eighths_of_columns(x):
    left, right = halves_of_columns(x)
    a, b, c, d = quarters_of_columns(left)
    e, f, g, h = quarters_of_columns(right)
    return a, b, c, d, e, f, g, h


@triton.jit
def gate_backward_slice(
    grad, pre, d_pre, act, rows64, mask_rows, scale, column, N, alpha, limit,
    WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """One slice of columns: reads pre, writes d_pre and act, returns each row's <act, grad> over the slice."""
    DTYPE: tl.constexpr = act.dtype.element_ty
    columns = column + tl.arange(0, WIDTH)
    mask = mask_rows & (columns < N)[None, :]
    if GATED:
        if INTERLEAVED:
            wide = column * 2 + tl.arange(0, 2 * WIDTH)
            wide_mask = mask_rows & (wide < 2 * N)[None, :]
            both = tl.load(pre + rows64 * (2 * N) + wide[None, :], mask=wide_mask, other=0.0)
            gate, up = both.reshape(both.shape[0], WIDTH, 2).split()
        else:
            gate = tl.load(pre + rows64 * (2 * N) + columns[None, :], mask=mask, other=0.0)
            up = tl.load(pre + rows64 * (2 * N) + N + columns[None, :], mask=mask, other=0.0)
        gate, up = gate.to(tl.float32), up.to(tl.float32)
    else:
        up = tl.load(pre + rows64 * N + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        gate = up
    if HAS_SCALE:
        weighted = grad * scale
    else:
        weighted = grad
    value, d_gate, d_up = activate_backward(gate, up, weighted, alpha, limit, ACTIVATION)
    partial = tl.sum(tl.where(mask, value * grad, 0.0), axis=1)
    if HAS_SCALE:
        value = value * scale
    tl.store(act + rows64 * N + columns[None, :], value.to(DTYPE), mask=mask)
    if GATED:
        if INTERLEAVED:
            both = tl.join(d_gate.to(DTYPE), d_up.to(DTYPE)).reshape(d_gate.shape[0], 2 * WIDTH)
            tl.store(d_pre + rows64 * (2 * N) + wide[None, :], both, mask=wide_mask)
        else:
            tl.store(d_pre + rows64 * (2 * N) + columns[None, :], d_gate.to(DTYPE), mask=mask)
            tl.store(d_pre + rows64 * (2 * N) + N + columns[None, :], d_up.to(DTYPE), mask=mask)
    else:
        tl.store(d_pre + rows64 * N + columns[None, :], d_up.to(DTYPE), mask=mask)
    return partial


@triton.jit
def sliced_epilogue(
    acc, pre, d_pre, act, rows64, mask_rows, scale, column, N, alpha, limit,
    BLOCK_N: tl.constexpr, SLICES: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """The epilogue in SLICES pieces of columns (a whole tile would spill); each row's <act, grad> over the tile."""
    WIDTH: tl.constexpr = BLOCK_N // SLICES
    if SLICES == 8:
        parts = eighths_of_columns(acc)
    else:
        parts = quarters_of_columns(acc)
    partial = tl.zeros((acc.shape[0],), tl.float32)
    for i in tl.static_range(SLICES):
        partial += gate_backward_slice(
            parts[i], pre, d_pre, act, rows64, mask_rows, scale, column + i * WIDTH, N, alpha, limit,
            WIDTH, ACTIVATION, GATED, INTERLEAVED, HAS_SCALE,
        )  # fmt: skip
    return partial


@triton.jit(launch_metadata=launch_metadata(_work))
def gate_backward_aligned(
    a, w, pre, scale, d_pre, act, partials, index, offsets, tiles, tile_count, trace,
    N, K, a_stride, divisor, alpha, limit,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SLICES: tl.constexpr, GATHER: tl.constexpr, N_FIRST: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_SCALE: tl.constexpr, WRITE_PARTIALS: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """N = I columns of d act from K = H. ``scale`` is read at the row's flat choice index[r]."""
    if TRACE:
        write_trace(trace)
    row_tiles = tl.load(tile_count)
    column_tiles = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        row_tile, column_tile = place_of_tile(tile, row_tiles, column_tiles, GROUP_M)
        expert, first, end = rows_of_tile(tiles, offsets, row_tile, BLOCK_M)
        column = column_tile * BLOCK_N
        rows = first + tl.arange(0, BLOCK_M)
        if GATHER:
            source = tl.load(index + rows, mask=rows < end, other=0) // divisor
            a_rows = a + source.to(tl.int64)[:, None] * a_stride
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            if GATHER:
                ks = k + tl.arange(0, BLOCK_K)
                mask = (rows < end)[:, None]
                if not EVEN_K:
                    mask = mask & (ks < K)[None, :]
                x = tl.load(a_rows + ks[None, :], mask=mask, other=0.0)
            else:
                x = a.load([first, k])
            y = weight_tile(w, expert, column, k, BLOCK_N, BLOCK_K, N_FIRST, False)
            acc = tl.dot(x, y, acc, input_precision=PRECISION)
        row_scale = 1.0
        if HAS_SCALE:
            choice = tl.load(index + rows, mask=rows < end, other=0)
            row_scale = tl.load(scale + choice, mask=rows < end, other=0.0).to(tl.float32)[:, None]
        partial = sliced_epilogue(
            acc, pre, d_pre, act, rows.to(tl.int64)[:, None], (rows < end)[:, None], row_scale, column, N, alpha, limit,
            BLOCK_N, SLICES, ACTIVATION, GATED, INTERLEAVED, HAS_SCALE,
        )  # fmt: skip
        if WRITE_PARTIALS:
            tl.store(partials + rows.to(tl.int64) * column_tiles + column_tile, partial, mask=rows < end)


@triton.jit(launch_metadata=launch_metadata(_work))
def gate_backward_any(
    a, w, pre, scale, d_pre, act, partials, index, offsets, tiles, tile_count, trace,
    N, K, am_stride, ak_stride, we_stride, wn_stride, wk_stride, divisor, alpha, limit,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SLICES: tl.constexpr, GATHER: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_SCALE: tl.constexpr, WRITE_PARTIALS: tl.constexpr,
    PRECISION: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """As ``gate_backward_aligned`` for any sizes and strides, by masked pointers."""
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
        for k in range(0, K, BLOCK_K):
            ks = k + tl.arange(0, BLOCK_K)
            x = strided_block(a, source, ks, (rows < end)[:, None] & (ks < K)[None, :], am_stride, ak_stride)
            inside = (ks < K)[:, None] & (columns < N)[None, :]
            y = strided_block(w_expert, ks, columns, inside, wk_stride, wn_stride)
            acc = tl.dot(x, y, acc, input_precision=PRECISION)
        row_scale = 1.0
        if HAS_SCALE:
            choice = tl.load(index + rows, mask=rows < end, other=0)
            row_scale = tl.load(scale + choice, mask=rows < end, other=0.0).to(tl.float32)[:, None]
        partial = sliced_epilogue(
            acc, pre, d_pre, act, rows.to(tl.int64)[:, None], (rows < end)[:, None], row_scale, column, N, alpha, limit,
            BLOCK_N, SLICES, ACTIVATION, GATED, INTERLEAVED, HAS_SCALE,
        )  # fmt: skip
        if WRITE_PARTIALS:
            tl.store(partials + rows.to(tl.int64) * column_tiles + column_tile, partial, mask=rows < end)
