"""Device functions that all grouped GEMMs share: which tile a program works on, and the trace of where it ran."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place_of_tile(tile, tile_rows, column_tiles, GROUP: tl.constexpr):
    """(row tile, column tile) number ``tile``: GROUP row tiles share their column tiles while these are in L2."""
    per_group = GROUP * column_tiles
    first = (tile // per_group) * GROUP
    height = tl.minimum(tile_rows - first, GROUP)
    within = tile % per_group
    return first + within % height, within // height


@triton.jit
def rows_of_tile(tiles, offsets, row_tile, BLOCK_M: tl.constexpr):
    """(expert, first row, end of the expert's rows) of an entry ``expert << 16 | number`` of the tile table."""
    entry = tl.load(tiles + row_tile)
    expert = entry >> 16
    first = tl.load(offsets + expert) + (entry & 0xFFFF) * BLOCK_M
    return expert, first, tl.load(offsets + expert + 1)


@triton.jit
def halves_of_columns(x):
    """[M, N] -> two [M, N / 2], the left and the right columns. An epilogue on slices of a tile needs no spills where
    one on the whole tile does."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def write_trace(trace):
    """Writes (program, SM) to row ``program`` of ``trace`` [programs, 2] int32: tests read the real grid back."""
    program = tl.program_id(0)
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(trace + program * 2, program)
    tl.store(trace + program * 2 + 1, sm)
