"""Kernels of the gate backward: the input gradient of the second product with the activation's backward behind it."""

from __future__ import annotations

import triton
import triton.language as tl

from tessera_rt.kernels.activations import activate_backward
from tessera_rt.kernels.rows_gemm_kernels import weight_tile
from tessera_rt.kernels.tile_loop import halves_of_columns, place_of_tile, rows_of_tile, write_trace


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
def gate_backward_aligned(
    a, w, pre, scale, d_pre, act, partials, index, offsets, tiles, tile_count, trace,
    N, K, a_stride, divisor, alpha, limit,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    GATHER: tl.constexpr, N_FIRST: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_SCALE: tl.constexpr, WRITE_PARTIALS: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
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
            y = weight_tile(w, expert, column, k, N, BLOCK_N, BLOCK_K, N_FIRST, False)
            acc = tl.dot(x, y, acc, input_precision=PRECISION)
        rows64 = rows.to(tl.int64)[:, None]
        mask_rows = (rows < end)[:, None]
        if HAS_SCALE:
            row_scale = tl.load(scale + rows, mask=rows < end, other=0.0)[:, None]
        else:
            row_scale = 1.0
        left, right = halves_of_columns(acc)
        s0, s1 = halves_of_columns(left)
        s2, s3 = halves_of_columns(right)
        WIDTH: tl.constexpr = BLOCK_N // 4
        p = gate_backward_slice(s0, pre, d_pre, act, rows64, mask_rows, row_scale, column, N, alpha, limit,
                                WIDTH, ACTIVATION, GATED, INTERLEAVED, HAS_SCALE)  # fmt: skip
        p += gate_backward_slice(s1, pre, d_pre, act, rows64, mask_rows, row_scale, column + WIDTH, N, alpha, limit,
                                 WIDTH, ACTIVATION, GATED, INTERLEAVED, HAS_SCALE)  # fmt: skip
        p += gate_backward_slice(s2, pre, d_pre, act, rows64, mask_rows, row_scale, column + 2 * WIDTH, N, alpha,
                                 limit, WIDTH, ACTIVATION, GATED, INTERLEAVED, HAS_SCALE)  # fmt: skip
        p += gate_backward_slice(s3, pre, d_pre, act, rows64, mask_rows, row_scale, column + 3 * WIDTH, N, alpha,
                                 limit, WIDTH, ACTIVATION, GATED, INTERLEAVED, HAS_SCALE)  # fmt: skip
        if WRITE_PARTIALS:
            tl.store(partials + rows.to(tl.int64) * column_tiles + column_tile, p, mask=rows < end)
