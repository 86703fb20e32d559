"""Kernels that move units between ranks: counts, placement, dispatch, combine. Flags: transport_signal_kernels.py.

No remote atomics: every rank computes where its units go, from all ranks' counts, so each address has one writer and
results do not depend on timing. Persistent: any grid gives the same result. A rank whose wait has failed sends and
signals nothing, so that its peers' waits fail too, and hands out NaN.

``bases`` [W] int64 holds every rank's peer memory; ``*_at`` and ``*_size`` are a region's byte offset and size (odd
epochs use the second half). U units with J choices, W ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from tessera_rt.kernels.tile_loop import write_trace
from tessera_rt.kernels.transport_signal_kernels import signal_when_last
from tessera_rt.kernels.work import Work, launch_metadata


def _choices_work(args: Mapping[str, Any]) -> Work:
    return Work(0, args["units"] * 4 * (args["J"] + args["world"]))


def _counts_work(args: Mapping[str, Any]) -> Work:
    return Work(0, 8 * args["world"] * (args["EXPERTS"] + 2 * args["world"]))


def _put_work(args: Mapping[str, Any]) -> Work:
    """As if every unit went to one rank: how many copies there are is known to the device only."""
    return Work(0, 2 * args["units"] * args["H"] * args["x"].element_size())


def _take_work(args: Mapping[str, Any]) -> Work:
    return Work(0, 2 * args["out"].numel() * args["out"].element_size())


def _return_work(args: Mapping[str, Any]) -> Work:
    y = args["y"]
    return Work(0, 2 * y.shape[0] * args["H"] * y.element_size())


def _sum_work(args: Mapping[str, Any]) -> Work:
    moved = args["T"] * args["H"]
    return Work(2 * moved * args["PARTS"], moved * (args["PARTS"] + 1) * args["out"].element_size())


@triton.jit
def ranks_of_units(ids, units, number, E, E_LOCAL, J: tl.constexpr, BLOCK: tl.constexpr, BLOCK_W: tl.constexpr):
    """How many choices of the units ``number`` [BLOCK] each rank has: [BLOCK, BLOCK_W] int32. ids [U, J]."""
    ranks = tl.arange(0, BLOCK_W)
    count = tl.zeros((BLOCK, BLOCK_W), tl.int32)
    for j in range(J):
        expert = tl.load(ids + number.to(tl.int64) * J + j, mask=number < units, other=-1)
        rank = tl.where((expert >= 0) & (expert < E), expert // E_LOCAL, -1)
        count += (rank[:, None] == ranks[None, :]).to(tl.int32)
    return count


@triton.jit(launch_metadata=launch_metadata(_choices_work))
def reach_kernel(
    ids, counts, trace, units, world, E, E_LOCAL,
    J: tl.constexpr, BLOCK: tl.constexpr, BLOCK_W: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """counts [tiles, 2 W]: for each tile of BLOCK units, how many go to each rank, and how many of their choices."""
    if TRACE:
        write_trace(trace)
    ranks = tl.arange(0, BLOCK_W)
    for tile in range(tl.program_id(0), tl.cdiv(units, BLOCK), tl.num_programs(0)):
        number = tile * BLOCK + tl.arange(0, BLOCK)
        count = ranks_of_units(ids, units, number, E, E_LOCAL, J, BLOCK, BLOCK_W)
        place = counts + tl.cast(tile, tl.int64) * 2 * world + ranks
        tl.store(place, tl.sum((count > 0).to(tl.int32), axis=0), mask=ranks < world)
        tl.store(place + world, tl.sum(count, axis=0), mask=ranks < world)


@triton.jit(launch_metadata=launch_metadata(_counts_work))
def counts_put_kernel(
    bases, of_experts, of_ranks, counter, words, arrivals, trace,
    counts_at, counts_size, flag, rank, world, EXPERTS,
    BLOCK: tl.constexpr, BLOCK_W: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Writes this rank's counts (per expert [E], per rank [2 W]) into its row of every rank's slab, then signals."""
    if TRACE:
        write_trace(trace)
    epoch = tl.load(counter)
    healthy = tl.load(words) == 0
    width = EXPERTS + 2 * world
    last = tl.where(healthy, world, 0)
    for peer in range(tl.program_id(0), last, tl.num_programs(0)):
        slab = tl.load(bases + peer) + counts_at + (epoch & 1).to(tl.int64) * counts_size
        row = slab.to(tl.pointer_type(tl.int32)) + rank * width
        for first in range(0, EXPERTS, BLOCK):
            column = first + tl.arange(0, BLOCK)
            value = tl.load(of_experts + column, mask=column < EXPERTS, other=0)
            tl.store(row + column, value, mask=column < EXPERTS)
        for first in range(0, 2 * world, BLOCK):
            column = first + tl.arange(0, BLOCK)
            value = tl.load(of_ranks + column, mask=column < 2 * world, other=0)
            tl.store(row + EXPERTS + column, value, mask=column < 2 * world)
    signal_when_last(arrivals, bases, flag, rank, epoch, healthy, world, BLOCK_W)


@triton.jit(launch_metadata=launch_metadata(_counts_work))
def counts_take_kernel(
    bases, slab, counter, words, arrivals, counts, first, incoming, trace,
    counts_size, flag, rank, world, EXPERTS, capacity, row_capacity,
    BLOCK: tl.constexpr, BLOCK_W: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Reads all ranks' counts. One program.

    counts [W, E]: choices per source and expert. first [W]: where this rank's units begin at each rank. incoming [1]:
    units this rank receives. words [4:6]: the most units and choices of one rank, where they exceed the capacities;
    all ranks see the same counts, so all record the same. Signals that the slab is free.
    """
    if TRACE:
        write_trace(trace)
    epoch = tl.load(counter)
    healthy = tl.load(words) == 0
    ranks = tl.arange(0, BLOCK_W)
    of_epoch = slab + (epoch & 1).to(tl.int64) * (counts_size // 4)
    width = EXPERTS + 2 * world
    before = tl.zeros((BLOCK_W,), tl.int32)
    units = tl.zeros((BLOCK_W,), tl.int32)
    choices = tl.zeros((BLOCK_W,), tl.int32)
    there = ranks < tl.where(healthy, world, 0)
    known = tl.where(healthy, EXPERTS, 0)
    for source in range(world):
        row = of_epoch + source * width
        count = tl.load(row + EXPERTS + ranks, mask=there, other=0)
        before += tl.where(source < rank, count, 0)
        units += count
        choices += tl.load(row + EXPERTS + world + ranks, mask=there, other=0)
        for column in range(0, EXPERTS, BLOCK):
            columns = column + tl.arange(0, BLOCK)
            value = tl.load(row + columns, mask=columns < known, other=0)
            tl.store(counts + source * EXPERTS + columns, value, mask=columns < EXPERTS)
    tl.store(first + ranks, before, mask=ranks < world)
    mine = tl.sum(tl.where(ranks == rank, units, 0), axis=0)
    tl.store(incoming, tl.minimum(mine, capacity))
    most_units = tl.max(units, axis=0)
    most_choices = tl.max(choices, axis=0)
    if most_units > capacity:
        tl.store(words + 4, tl.maximum(tl.load(words + 4), most_units))
    if most_choices > row_capacity:
        tl.store(words + 5, tl.maximum(tl.load(words + 5), most_choices))
    signal_when_last(arrivals, bases, flag, rank, epoch, healthy, world, BLOCK_W)


@triton.jit(launch_metadata=launch_metadata(_choices_work))
def slots_kernel(
    ids, before, first, words, slots, home, trace, units, world, E, E_LOCAL, capacity,
    J: tl.constexpr, BLOCK: tl.constexpr, BLOCK_W: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """slots [U, W]: the unit's row at each rank, -1 where it does not go or has no room (capacity). home [U, J]: the
    flat number of each choice that is sent, else -1. Units go in order behind those of lower ranks."""
    if TRACE:
        write_trace(trace)
    ranks = tl.arange(0, BLOCK_W)
    room = tl.where(tl.load(words) == 0, capacity, 0)
    start = tl.load(first + ranks, mask=ranks < world, other=0)
    for tile in range(tl.program_id(0), tl.cdiv(units, BLOCK), tl.num_programs(0)):
        number = tile * BLOCK + tl.arange(0, BLOCK)
        hit = (ranks_of_units(ids, units, number, E, E_LOCAL, J, BLOCK, BLOCK_W) > 0).to(tl.int32)
        base = start + tl.load(before + tl.cast(tile, tl.int64) * 2 * world + ranks, mask=ranks < world, other=0)
        slot = base[None, :] + tl.cumsum(hit, axis=0) - hit
        sent = (hit > 0) & (slot < room)
        inside = (number < units)[:, None] & (ranks < world)[None, :]
        tl.store(slots + number.to(tl.int64)[:, None] * world + ranks[None, :], tl.where(sent, slot, -1), mask=inside)
        for j in range(J):
            place = number.to(tl.int64) * J + j
            expert = tl.load(ids + place, mask=number < units, other=-1)
            rank = tl.where((expert >= 0) & (expert < E), expert // E_LOCAL, -1)
            goes = tl.sum((sent & (rank[:, None] == ranks[None, :])).to(tl.int32), axis=1) > 0
            tl.store(home + place, tl.where(goes, number * J + j, -1), mask=number < units)


@triton.jit(launch_metadata=launch_metadata(_put_work))
def rows_put_kernel(
    bases, x, slots, ids, weights, counter, words, arrivals, trace,
    rank, world, units, H, x_stride, divisor, row_stride,
    rows_at, rows_size, origin_at, origin_size, ids_at, ids_size, weights_at, weights_size, flag,
    J: tl.constexpr, META: tl.constexpr, TRACE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Writes row x[u // divisor] of every unit to its slots, with META also its origin, ids and weights; signals."""
    if TRACE:
        write_trace(trace)
    epoch = tl.load(counter)
    healthy = tl.load(words) == 0
    parity = (epoch & 1).to(tl.int64)
    column_tiles = tl.cdiv(H, BLOCK_H)
    tiles = tl.where(healthy, tl.cdiv(units, BLOCK) * column_tiles, 0)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        number = (tile // column_tiles) * BLOCK + tl.arange(0, BLOCK)
        column = (tile % column_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = number < units
        row = x + (number // divisor).to(tl.int64)[:, None] * x_stride + column[None, :]
        value = tl.load(row, mask=inside[:, None] & (column < H)[None, :], other=0.0)
        for peer in range(world):
            slot = tl.load(slots + number.to(tl.int64) * world + peer, mask=inside, other=-1)
            sent = slot >= 0
            slot64 = slot.to(tl.int64)
            base = tl.load(bases + peer)
            # An address out of a table has no known alignment; with it the stores are 16 bytes wide.
            out = (base + rows_at + parity * rows_size).to(tl.pointer_type(x.dtype.element_ty))
            out = tl.multiple_of(out, 16)
            place = out + slot64[:, None] * row_stride + column[None, :]
            tl.store(place, value, mask=sent[:, None] & (column < H)[None, :])
            if META:
                if tile % column_tiles == 0:
                    origin = (base + origin_at + parity * origin_size).to(tl.pointer_type(tl.int32)) + slot64 * 2
                    tl.store(origin, tl.zeros_like(slot) + rank, mask=sent)
                    tl.store(origin + 1, number, mask=sent)
                    out_ids = (base + ids_at + parity * ids_size).to(tl.pointer_type(tl.int32)) + slot64 * J
                    out_weights = (base + weights_at + parity * weights_size).to(tl.pointer_type(tl.float32))
                    for j in range(J):
                        choice = number.to(tl.int64) * J + j
                        tl.store(out_ids + j, tl.load(ids + choice, mask=sent, other=-1), mask=sent)
                        weight = tl.load(weights + choice, mask=sent, other=0.0)
                        tl.store(out_weights + slot64 * J + j, weight, mask=sent)
    signal_when_last(arrivals, bases, flag, rank, epoch, healthy, world, BLOCK_W)


@triton.jit(launch_metadata=launch_metadata(_take_work))
def rows_take_kernel(
    bases, rows, origin, ids, weights, counter, words, arrivals, incoming, out, out_origin, out_ids, out_weights, trace,
    rank, world, capacity, H, row_stride, E_LOCAL, rows_size, origin_size, ids_size, weights_size, flag,
    J: tl.constexpr, META: tl.constexpr, ELEMENT: tl.constexpr, TRACE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Copies the units that came out of this rank's peer memory, and signals that it is free.

    Ids become local: -1 for experts of other ranks and behind the last unit, where rows are left unwritten.
    """
    if TRACE:
        write_trace(trace)
    epoch = tl.load(counter)
    healthy = tl.load(words) == 0
    parity = (epoch & 1).to(tl.int64)
    count = tl.where(healthy, tl.load(incoming), 0)
    column_tiles = tl.cdiv(H, BLOCK_H)
    source = tl.multiple_of(rows + parity * (rows_size // ELEMENT), 16)
    for tile in range(tl.program_id(0), tl.cdiv(capacity, BLOCK) * column_tiles, tl.num_programs(0)):
        number = (tile // column_tiles) * BLOCK + tl.arange(0, BLOCK)
        column = (tile % column_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
        came = number < count
        number64 = number.to(tl.int64)
        mask = came[:, None] & (column < H)[None, :]
        value = tl.load(source + number64[:, None] * row_stride + column[None, :], mask=mask)
        tl.store(out + number64[:, None] * H + column[None, :], value, mask=mask)
        if META:
            if tile % column_tiles == 0:
                inside = number < capacity
                of_epoch = origin + parity * (origin_size // 4) + number64 * 2
                tl.store(out_origin + number64 * 2, tl.load(of_epoch, mask=came, other=-1), mask=inside)
                tl.store(out_origin + number64 * 2 + 1, tl.load(of_epoch + 1, mask=came, other=-1), mask=inside)
                for j in range(J):
                    place = number64 * J + j
                    expert = tl.load(ids + parity * (ids_size // 4) + place, mask=came, other=-1) - rank * E_LOCAL
                    local = came & (expert >= 0) & (expert < E_LOCAL)
                    weight = tl.load(weights + parity * (weights_size // 4) + place, mask=local, other=0.0)
                    tl.store(out_ids + place, tl.where(local, expert, -1), mask=inside)
                    tl.store(out_weights + place, weight, mask=inside)
    signal_when_last(arrivals, bases, flag, rank, epoch, healthy, world, BLOCK_W)


@triton.jit(launch_metadata=launch_metadata(_take_work))
def limit_rows_kernel(
    position, offsets, out, out_offsets, trace, total, rows, EXPERTS, BLOCK: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Placement in a buffer of ``rows`` rows: positions behind it become -1, offsets [E + 1] end there."""
    if TRACE:
        write_trace(trace)
    for first in range(tl.program_id(0) * BLOCK, tl.maximum(total, EXPERTS + 1), tl.num_programs(0) * BLOCK):
        place = first + tl.arange(0, BLOCK)
        row = tl.load(position + place, mask=place < total, other=-1)
        tl.store(out + place, tl.where(row < rows, row, -1), mask=place < total)
        offset = tl.load(offsets + place, mask=place <= EXPERTS, other=0)
        tl.store(out_offsets + place, tl.minimum(offset, rows), mask=place <= EXPERTS)


@triton.jit(launch_metadata=launch_metadata(_return_work))
def returns_put_kernel(
    bases, y, position, ids, origin, weights, gradient, incoming, counter, words, arrivals, trace,
    rank, world, H, y_stride, row_stride, rows_at, rows_size, gradients_at, gradients_size, flag,
    J: tl.constexpr, REDUCED: tl.constexpr, HAS_WEIGHTS: tl.constexpr, HAS_GRADIENT: tl.constexpr, TRACE: tl.constexpr,
    ELEMENT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Sends the experts' rows y[position[u, j]] home, and signals.

    Each to the place of its choice; or REDUCED: their sum (times the weights) over j in order, fp32, rounded once, to
    this rank's place at the token. Choices that found no room (position -1) send zeros. HAS_GRADIENT: also the router
    weights' gradients [U, J].
    """
    if TRACE:
        write_trace(trace)
    epoch = tl.load(counter)
    healthy = tl.load(words) == 0
    parity = (epoch & 1).to(tl.int64)
    count = tl.where(healthy, tl.load(incoming), 0)
    column_tiles = tl.cdiv(H, BLOCK_H)
    for tile in range(tl.program_id(0), tl.cdiv(count, BLOCK) * column_tiles, tl.num_programs(0)):
        number = (tile // column_tiles) * BLOCK + tl.arange(0, BLOCK)
        column = (tile % column_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = number < count
        columns = (column < H)[None, :]
        number64 = number.to(tl.int64)
        source = tl.load(origin + number64 * 2, mask=inside, other=0)
        unit = tl.load(origin + number64 * 2 + 1, mask=inside, other=0).to(tl.int64)
        base = tl.load(bases + source, mask=inside, other=0)
        start = base + rows_at + parity * rows_size
        total = tl.zeros((BLOCK, BLOCK_H), tl.float32)
        for j in range(J):
            place = number64 * J + j
            local = inside & (tl.load(ids + place, mask=inside, other=-1) >= 0)
            row = tl.load(position + place, mask=local, other=-1)
            mask = (row >= 0)[:, None] & columns
            value = tl.load(y + row.to(tl.int64)[:, None] * y_stride + column[None, :], mask=mask, other=0.0)
            if REDUCED:
                value = value.to(tl.float32)
                if HAS_WEIGHTS:
                    value = value * tl.load(weights + place, mask=row >= 0, other=0.0)[:, None]
                total += value
            else:
                out = (start + (unit * J + j) * row_stride * ELEMENT).to(tl.pointer_type(y.dtype.element_ty))
                out = tl.multiple_of(out, 16)
                tl.store(out[:, None] + column[None, :], value, mask=local[:, None] & columns)
            if HAS_GRADIENT:
                if tile % column_tiles == 0:
                    of_home = (base + gradients_at + parity * gradients_size).to(tl.pointer_type(tl.float32))
                    tl.store(of_home + unit * J + j, tl.load(gradient + place, mask=local, other=0.0), mask=local)
        if REDUCED:
            out = (start + (unit * world + rank) * row_stride * ELEMENT).to(tl.pointer_type(y.dtype.element_ty))
            out = tl.multiple_of(out, 16)
            tl.store(out[:, None] + column[None, :], total.to(y.dtype.element_ty), mask=inside[:, None] & columns)
    signal_when_last(arrivals, bases, flag, rank, epoch, healthy, world, BLOCK_W)


@triton.jit(launch_metadata=launch_metadata(_sum_work))
def returns_take_kernel(
    bases, rows, gradients, sent, home, weights, counter, words, arrivals, out, out_gradient, trace,
    rank, world, T, H, row_stride, rows_size, gradients_size, flag,
    PARTS: tl.constexpr, TOP_K: tl.constexpr, HAS_WEIGHTS: tl.constexpr, HAS_GRADIENT: tl.constexpr,
    TRACE: tl.constexpr, ELEMENT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """out[t] = the sum of the rows that came back to token t, PARTS of them in order (times the weights), fp32, rounded
    once; out_gradient [T, K]: the router weights' gradients. Signals that the memory is free.

    ``sent`` [T, PARTS] and ``home`` [T, K]: negative where nothing was sent.
    """
    if TRACE:
        write_trace(trace)
    epoch = tl.load(counter)
    healthy = tl.load(words) == 0
    parity = (epoch & 1).to(tl.int64)
    lost = tl.where(healthy, 0.0, float("nan"))
    least = tl.where(healthy, 0, 0x7FFFFFFF)
    source = tl.multiple_of(rows + parity * (rows_size // ELEMENT), 16)
    column_tiles = tl.cdiv(H, BLOCK_H)
    for tile in range(tl.program_id(0), tl.cdiv(T, BLOCK) * column_tiles, tl.num_programs(0)):
        token = (tile // column_tiles) * BLOCK + tl.arange(0, BLOCK)
        column = (tile % column_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = token < T
        columns = (column < H)[None, :]
        token64 = token.to(tl.int64)
        total = tl.zeros((BLOCK, BLOCK_H), tl.float32)
        for part in range(PARTS):
            place = token64 * PARTS + part
            came = tl.load(sent + place, mask=inside, other=-1) >= least
            row = source + place[:, None] * row_stride + column[None, :]
            value = tl.load(row, mask=came[:, None] & columns, other=0.0).to(tl.float32)
            if HAS_WEIGHTS:
                value = value * tl.load(weights + place, mask=came, other=0.0)[:, None]
            total += value
        total += lost
        place = out + token64[:, None] * H + column[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=inside[:, None] & columns)
        if HAS_GRADIENT:
            if tile % column_tiles == 0:
                for k in range(TOP_K):
                    choice = token64 * TOP_K + k
                    came = tl.load(home + choice, mask=inside, other=-1) >= least
                    value = tl.load(gradients + parity * (gradients_size // 4) + choice, mask=came, other=0.0)
                    tl.store(out_gradient + choice, value + lost, mask=inside)
    signal_when_last(arrivals, bases, flag, rank, epoch, healthy, world, BLOCK_W)
