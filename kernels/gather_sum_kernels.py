"""Kernels of the weighted gather-sum (un-permute), its backward, and the router-weight gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from tessera_rt.kernels.tile_loop import write_trace
from tessera_rt.kernels.work import (
    Work,
    gather_sum_backward_work,
    gather_sum_work,
    launch_metadata,
    router_weight_gradient_work,
)


def _sum_work(args: Mapping[str, Any]) -> Work:
    out, rows = args["out"], args["position"].numel()
    return gather_sum_work(rows=rows, tokens=out.shape[0], h=args["H"], element=out.element_size())


def _backward_work(args: Mapping[str, Any]) -> Work:
    return gather_sum_backward_work(rows=args["source"].numel(), h=args["H"], element=args["d_y"].element_size())


def _router_work(args: Mapping[str, Any]) -> Work:
    return router_weight_gradient_work(choices=args["total"], column_tiles=args["column_tiles"])


@triton.jit(launch_metadata=launch_metadata(_sum_work))
def gather_sum_kernel(
    y, position, weights, out, trace, T, H, y_stride, yh_stride,
    TOP_K: tl.constexpr, HAS_WEIGHTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
    TRACE: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over k of weights[t, k] y[position[t, k]]: k ascending, in fp32, rounded once."""
    if TRACE:
        write_trace(trace)
    column_tiles = tl.cdiv(H, BLOCK_H)
    for tile in range(tl.program_id(0), tl.cdiv(T, BLOCK_T) * column_tiles, tl.num_programs(0)):
        tokens = (tile // column_tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
        columns = (tile % column_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (columns < H)[None, :]
        tokens64 = tokens.to(tl.int64)
        total = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
        for k in range(TOP_K):
            row = tl.load(position + tokens64 * TOP_K + k, mask=tokens < T, other=-1)
            place = row.to(tl.int64)[:, None] * y_stride + columns.to(tl.int64)[None, :] * yh_stride
            value = tl.load(y + place, mask=(row >= 0)[:, None] & inside, other=0.0).to(tl.float32)
            if HAS_WEIGHTS:
                w = tl.load(weights + tokens64 * TOP_K + k, mask=(tokens < T) & (row >= 0), other=0.0)
                value = value * w.to(tl.float32)[:, None]
            total += value
        place = out + tokens64[:, None] * H + columns[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=(tokens < T)[:, None] & inside)


@triton.jit(launch_metadata=launch_metadata(_backward_work))
def gather_sum_backward_kernel(
    grad, y, weights, position, source, end, d_y, d_weights, trace, rows, choices, H, divisor,
    gt_stride, gh_stride, yr_stride, yh_stride, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """d_y[r] = weights[c] grad[c // divisor] and d_weights[c] = <y[r], grad[c // divisor]>, with c = source[r].

    Rows that belong to nobody get zeros, and so do the weights of dropped choices.
    """
    if TRACE:
        write_trace(trace)
    used = tl.load(end)
    for first in range(tl.program_id(0) * BLOCK_R, tl.maximum(rows, choices), tl.num_programs(0) * BLOCK_R):
        places = first + tl.arange(0, BLOCK_R)
        valid = places < used
        choice = tl.load(source + places, mask=valid, other=0)
        token = (choice // divisor).to(tl.int64)[:, None]
        w = tl.load(weights + choice, mask=valid, other=0.0).to(tl.float32)[:, None]
        rows64 = places.to(tl.int64)[:, None]
        dot = tl.zeros((BLOCK_R,), tl.float32)
        for column in range(0, H, BLOCK_H):
            columns = column + tl.arange(0, BLOCK_H)
            mask = valid[:, None] & (columns < H)[None, :]
            columns64 = columns.to(tl.int64)[None, :]
            g = tl.load(grad + token * gt_stride + columns64 * gh_stride, mask=mask, other=0.0).to(tl.float32)
            value = tl.load(y + rows64 * yr_stride + columns64 * yh_stride, mask=mask, other=0.0).to(tl.float32)
            dot += tl.sum(g * value, axis=1)
            stored = (places < rows)[:, None] & (columns < H)[None, :]
            tl.store(d_y + rows64 * H + columns[None, :], (g * w).to(d_y.dtype.element_ty), mask=stored)
        tl.store(d_weights + choice, dot, mask=valid)
        dropped = tl.load(position + places, mask=places < choices, other=0) < 0
        tl.store(d_weights + places, tl.zeros((BLOCK_R,), tl.float32), mask=dropped)


@triton.jit(launch_metadata=launch_metadata(_router_work))
def router_weight_gradient_kernel(
    partials, position, out, trace, total, column_tiles,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """out[c] = the sum of partials[position[c]], in blocks of BLOCK_N tiles, in order; 0 for dropped choices."""
    if TRACE:
        write_trace(trace)
    for first in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        choices = first + tl.arange(0, BLOCK)
        row = tl.load(position + choices, mask=choices < total, other=-1)
        value = tl.zeros((BLOCK,), tl.float32)
        for tile in range(0, column_tiles, BLOCK_N):
            tiles = tile + tl.arange(0, BLOCK_N)
            mask = (row >= 0)[:, None] & (tiles < column_tiles)[None, :]
            place = partials + row.to(tl.int64)[:, None] * column_tiles + tiles[None, :]
            value += tl.sum(tl.load(place, mask=mask, other=0.0), axis=1)
        tl.store(out + choices, value, mask=choices < total)
