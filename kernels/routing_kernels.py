"""Kernels of routing: the choice of experts and its backward, and the placement of chosen tokens in expert order.

No atomics and no data-dependent order: every number has one writer, sums run in a fixed order. Counts are int32 and
addresses int64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from tessera_rt.kernels.tile_loop import write_trace
from tessera_rt.kernels.work import Work, choices_work, launch_metadata, per_expert_work, tile_scan_work, topk_work


def _topk_work(args: Mapping[str, Any]) -> Work:
    return topk_work(
        tokens=args["T"],
        experts=args["EXPERTS"],
        top_k=args["TOP_K"],
        element=args["logits"].element_size(),
        backward="out" in args,
    )


def _choices_work(args: Mapping[str, Any]) -> Work:
    return choices_work(choices=args["total"], tiles=args["tiles"], experts=args["EXPERTS"], placed="position" in args)


def _scan_work(args: Mapping[str, Any]) -> Work:
    return tile_scan_work(tiles=args["tiles"], experts=args["EXPERTS"])


def _experts_work(args: Mapping[str, Any]) -> Work:
    written = args["entries"].numel() if "entries" in args else args["EXPERTS"]
    return per_expert_work(experts=args["EXPERTS"], written=written)


LOWEST = tl.constexpr(-2147483648)  # below the key of every value
MINUS_INF_KEY = tl.constexpr(-2139095041)  # the key of -inf


@triton.jit
def order_key(x):
    """int32 keys with the order of a sort that puts NaN above +inf and takes -0 for +0."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))  # noqa: PLR0124


@triton.jit
def value_of_key(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_column(key, columns, WIDTH: tl.constexpr):
    """(highest key, lowest column that has it) of each row."""
    best = tl.max(key, axis=1)
    return best, tl.min(tl.where(key == best[:, None], columns[None, :], WIDTH), axis=1)


@triton.jit
def scores_of(x, valid, SIGMOID: tl.constexpr):
    if SIGMOID:
        return tl.where(valid, 1.0 / (1.0 + tl.exp(-x)), 0.0)
    else:
        e = tl.where(valid, tl.exp(x - tl.max(tl.where(valid, x, float("-inf")), axis=1)[:, None]), 0.0)
        return e / tl.sum(e, axis=1)[:, None]


@triton.jit
def open_groups(key, columns, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr, TOP2: tl.constexpr,
                BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr):  # fmt: skip
    """Which columns [BLOCK_T, BLOCK_E] belong to the KEEP best groups."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    group_columns = tl.arange(0, BLOCK_G)
    group_keys = tl.full((BLOCK_T, BLOCK_G), LOWEST, tl.int32)
    for g in range(GROUPS):
        members = tl.where((columns // SIZE == g)[None, :], key, LOWEST)
        best, column = best_column(members, columns, BLOCK_E)
        score = value_of_key(best)
        if TOP2 and SIZE > 1:
            others = tl.where(columns[None, :] == column[:, None], LOWEST, members)
            score += value_of_key(tl.max(others, axis=1))
        group_keys = tl.where((group_columns == g)[None, :], order_key(score)[:, None], group_keys)
    is_open = columns[None, :] < tl.zeros((BLOCK_T, 1), tl.int32)  # nothing
    for _ in range(KEEP):
        _best, group = best_column(group_keys, group_columns, BLOCK_G)
        is_open = is_open | ((columns // SIZE)[None, :] == group[:, None])
        group_keys = tl.where(group_columns[None, :] == group[:, None], LOWEST, group_keys)
    return is_open


@triton.jit(launch_metadata=launch_metadata(_topk_work))
def topk_forward_kernel(
    logits, bias, mask, ids, weights, trace, T, t_stride, e_stride, eps, scale,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, AFTER_TOPK: tl.constexpr,
    RENORMALIZE: tl.constexpr, BY_LOGITS: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr, TOP2: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """TOP_K rounds of (highest key, lowest column): equal to a stable descending sort, for any input."""
    if TRACE:
        write_trace(trace)
    columns, choices = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    valid = (columns < EXPERTS)[None, :]
    for first in range(tl.program_id(0) * BLOCK_T, T, tl.num_programs(0) * BLOCK_T):
        tokens = first + tl.arange(0, BLOCK_T)
        present = (tokens < T)[:, None]
        place = tokens.to(tl.int64)[:, None] * t_stride + columns.to(tl.int64)[None, :] * e_stride
        x = tl.load(logits + place, mask=present & valid, other=0.0).to(tl.float32)
        scores = scores_of(x, valid, SIGMOID)
        choice = x if BY_LOGITS else scores
        if HAS_BIAS:
            choice += tl.load(bias + columns, mask=columns < EXPERTS, other=0.0).to(tl.float32)[None, :]
        key = tl.where(valid, order_key(choice), LOWEST)
        if GROUPS > 1:
            is_open = open_groups(key, columns, EXPERTS, GROUPS, KEEP, TOP2, BLOCK_T, BLOCK_E, BLOCK_G)
            key = tl.where(valid & (is_open == 0), MINUS_INF_KEY, key)
        values = x if AFTER_TOPK else scores
        chosen = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
        weight = tl.full((BLOCK_T, BLOCK_K), float("-inf") if AFTER_TOPK else 0.0, tl.float32)
        for k in range(TOP_K):
            _best, column = best_column(key, columns, BLOCK_E)
            here = columns[None, :] == column[:, None]
            value = tl.sum(tl.where(here, values, 0.0), axis=1)
            chosen = tl.where((choices == k)[None, :], column[:, None], chosen)
            weight = tl.where((choices == k)[None, :], value[:, None], weight)
            key = tl.where(here, LOWEST, key)
        if AFTER_TOPK:
            weight = tl.exp(weight - tl.max(weight, axis=1)[:, None])
            weight = weight / tl.sum(weight, axis=1)[:, None]
        if RENORMALIZE:
            weight = weight / (tl.sum(weight, axis=1)[:, None] + eps)
        weight = weight * scale
        if HAS_MASK:
            routed = tl.load(mask + tokens, mask=tokens < T, other=0)[:, None] != 0
            chosen = tl.where(routed, chosen, -1)
            weight = tl.where(routed, weight, 0.0)
        out = tokens.to(tl.int64)[:, None] * TOP_K + choices[None, :]
        stored = present & (choices < TOP_K)[None, :]
        tl.store(ids + out, chosen, mask=stored)
        tl.store(weights + out, weight, mask=stored)


@triton.jit(launch_metadata=launch_metadata(_topk_work))
def topk_backward_kernel(
    grad, logits, ids, out, trace, T, gt_stride, gk_stride, t_stride, e_stride, eps, scale,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, AFTER_TOPK: tl.constexpr,
    RENORMALIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Gradient of the logits, the choice being fixed; ids out of range are no choices, tokens without any get zeros."""
    if TRACE:
        write_trace(trace)
    columns, choices = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    valid = (columns < EXPERTS)[None, :]
    for first in range(tl.program_id(0) * BLOCK_T, T, tl.num_programs(0) * BLOCK_T):
        tokens = first + tl.arange(0, BLOCK_T)
        present = (tokens < T)[:, None]
        tokens64 = tokens.to(tl.int64)[:, None]
        place = tokens64 * t_stride + columns.to(tl.int64)[None, :] * e_stride
        x = tl.load(logits + place, mask=present & valid, other=0.0).to(tl.float32)
        listed = present & (choices < TOP_K)[None, :]
        chosen = tl.load(ids + tokens64 * TOP_K + choices[None, :], mask=listed, other=-1)
        g = tl.load(grad + tokens64 * gt_stride + choices.to(tl.int64)[None, :] * gk_stride, mask=listed, other=0.0)
        is_choice = (chosen >= 0) & (chosen < EXPERTS)
        g = tl.where(is_choice, g.to(tl.float32) * scale, 0.0)
        scores = scores_of(x, valid, SIGMOID)
        values = x if AFTER_TOPK else scores
        p = tl.full((BLOCK_T, BLOCK_K), float("-inf") if AFTER_TOPK else 0.0, tl.float32)
        for k in range(TOP_K):
            column = tl.sum(tl.where((choices == k)[None, :], chosen, 0), axis=1)
            value = tl.sum(tl.where(columns[None, :] == column[:, None], values, 0.0), axis=1)
            p = tl.where((choices == k)[None, :], value[:, None], p)
        if AFTER_TOPK:
            p = tl.where(is_choice, p, float("-inf"))
            p = tl.exp(p - tl.max(p, axis=1)[:, None])
            p = p / tl.sum(p, axis=1)[:, None]
        if RENORMALIZE:
            total = tl.sum(p, axis=1)[:, None] + eps
            # Never total squared: of small scores it is 0 in fp32 long before total is.
            g = (g - tl.sum(g * p, axis=1)[:, None] / total) / total
        if AFTER_TOPK:
            g = p * (g - tl.sum(g * p, axis=1)[:, None])
        d = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
        for k in range(TOP_K):
            here = (choices == k)[None, :]
            column = tl.sum(tl.where(here, chosen, 0), axis=1)
            value = tl.sum(tl.where(here, g, 0.0), axis=1)
            d += tl.where(columns[None, :] == column[:, None], value[:, None], 0.0)
        if not AFTER_TOPK:
            if SIGMOID:
                d = d * scores * (1.0 - scores)
            else:
                d = scores * (d - tl.sum(d * scores, axis=1)[:, None])
        routed = tl.max(is_choice.to(tl.int32), axis=1) > 0
        d = tl.where(routed[:, None], d, 0.0)
        tl.store(out + tokens64 * EXPERTS + columns[None, :], d.to(out.dtype.element_ty), mask=present & valid)


@triton.jit
def chosen_experts(ids, entries, total, EXPERTS, TOP_K, t_stride, k_stride):
    """Experts of the flat choices ``entries``; -1 for dropped ones and those behind the end."""
    place = (entries // TOP_K).to(tl.int64) * t_stride + (entries % TOP_K).to(tl.int64) * k_stride
    inside = entries < total
    expert = tl.load(ids + place, mask=inside, other=0)
    # Compared as loaded: an id of 64 bits must not come into range by losing its upper half.
    return tl.where(inside & (expert >= 0) & (expert < EXPERTS), expert.to(tl.int32), -1)


@triton.jit(launch_metadata=launch_metadata(_choices_work))
def histogram_kernel(
    ids, counts, trace, total, tiles, EXPERTS, TOP_K, t_stride, k_stride,
    BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """counts [tiles, E]: how often each expert was chosen in each tile of BLOCK choices."""
    if TRACE:
        write_trace(trace)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        entries = tile * BLOCK + tl.arange(0, BLOCK)
        expert = chosen_experts(ids, entries, total, EXPERTS, TOP_K, t_stride, k_stride)
        for first in range(0, EXPERTS, BLOCK_E):
            columns = first + tl.arange(0, BLOCK_E)
            count = tl.sum((expert[:, None] == columns[None, :]).to(tl.int32), axis=0)
            tl.store(counts + tl.cast(tile, tl.int64) * EXPERTS + columns, count, mask=columns < EXPERTS)


@triton.jit(launch_metadata=launch_metadata(_scan_work))
def tile_scan_kernel(
    counts, totals, trace, tiles, EXPERTS, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, TRACE: tl.constexpr
):
    """Replaces counts [tiles, E] by the sum over earlier tiles, in place; totals [E] gets the sum over all."""
    if TRACE:
        write_trace(trace)
    for first in range(tl.program_id(0) * BLOCK_E, EXPERTS, tl.num_programs(0) * BLOCK_E):
        columns = first + tl.arange(0, BLOCK_E)
        before = tl.zeros((BLOCK_E,), tl.int32)
        for tile in range(0, tiles, BLOCK_T):
            rows = tile + tl.arange(0, BLOCK_T)
            place = counts + rows.to(tl.int64)[:, None] * EXPERTS + columns[None, :]
            inside = (rows < tiles)[:, None] & (columns < EXPERTS)[None, :]
            count = tl.load(place, mask=inside, other=0)
            tl.store(place, tl.cumsum(count, axis=0) - count + before[None, :], mask=inside)
            before += tl.sum(count, axis=0)
        tl.store(totals + columns, before, mask=columns < EXPERTS)


@triton.jit(launch_metadata=launch_metadata(_experts_work))
def offsets_kernel(totals, offsets, trace, EXPERTS, BLOCK_E: tl.constexpr, TRACE: tl.constexpr):
    """offsets [E + 1]: where each expert's rows start, and how many there are in all. One program."""
    if TRACE:
        write_trace(trace)
    columns = tl.arange(0, BLOCK_E)
    count = tl.load(totals + columns, mask=columns < EXPERTS, other=0)
    end = tl.cumsum(count, axis=0)
    tl.store(offsets + columns, end - count, mask=columns < EXPERTS)
    tl.store(offsets + columns + 1, end, mask=columns == EXPERTS - 1)


@triton.jit(launch_metadata=launch_metadata(_choices_work))
def place_kernel(
    ids, before, offsets, position, source, trace, total, tiles, EXPERTS, TOP_K, t_stride, k_stride,
    BLOCK: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Row of each choice: its expert's offset, the choices in earlier tiles, the earlier ones in this tile."""
    if TRACE:
        write_trace(trace)
    rows = tl.load(offsets + EXPERTS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        numbers = tl.arange(0, BLOCK)
        entries = tile * BLOCK + numbers
        expert = chosen_experts(ids, entries, total, EXPERTS, TOP_K, t_stride, k_stride)
        kept = expert >= 0
        earlier = (expert[:, None] == expert[None, :]) & (numbers[None, :] < numbers[:, None])
        rank = tl.sum(earlier.to(tl.int32), axis=1)
        base = tl.load(offsets + expert, mask=kept, other=0)
        base += tl.load(before + tl.cast(tile, tl.int64) * EXPERTS + expert, mask=kept, other=0)
        row = tl.where(kept, base + rank, -1)
        tl.store(position + entries, row, mask=entries < total)
        tl.store(source + row, entries, mask=kept)
        tl.store(source + entries, tl.zeros_like(entries) - 1, mask=(entries >= rows) & (entries < total))


@triton.jit(launch_metadata=launch_metadata(_experts_work))
def tile_table_kernel(
    offsets, entries, count, trace, EXPERTS, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, TRACE: tl.constexpr
):
    """entries: expert << 16 | number of every tile of BLOCK_M rows; count [1]: how many. One program."""
    if TRACE:
        write_trace(trace)
    columns = tl.arange(0, BLOCK_E)
    inside = columns < EXPERTS
    rows = tl.load(offsets + columns + 1, mask=inside, other=0) - tl.load(offsets + columns, mask=inside, other=0)
    tiles = tl.cdiv(rows, BLOCK_M)
    end = tl.cumsum(tiles, axis=0)
    for number in range(tl.max(tiles, axis=0)):
        tl.store(entries + end - tiles + number, (columns << 16) | number, mask=number < tiles)
    tl.store(count, tl.sum(tiles, axis=0))
