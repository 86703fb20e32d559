"""Routing: choice of experts (forward, backward), placement of the chosen tokens, tile tables of the grouped products.

Everything stays on the device; the host knows only the largest number of rows, T K. Expert id -1 (or any id outside
0 .. E - 1) means dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from tessera_rt.errors import Problem, SpecError
from tessera_rt.kernels.architecture import architecture
from tessera_rt.kernels.budget import SmBudget
from tessera_rt.kernels.configs import tile_heights
from tessera_rt.kernels.launching import launching
from tessera_rt.kernels.operands import DTYPES, ID_DTYPES, INDEX_DTYPES, Run, refuse, tensor_problems, warp_options
from tessera_rt.kernels.options import MAX_EXPERTS, RouterRule
from tessera_rt.kernels.routing_kernels import (
    histogram_kernel,
    offsets_kernel,
    place_kernel,
    tile_scan_kernel,
    tile_table_kernel,
    topk_backward_kernel,
    topk_forward_kernel,
)
from tessera_rt.kernels.trace import Trace

BLOCK_T = 4  # tokens per program of the choice
PLACE_BLOCK = 64  # choices whose ranks are counted at once, by a matrix of equalities


@launching
def topk(
    logits: Tensor,
    rule: RouterRule,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    budget: SmBudget | None = None,
    trace: Trace | None = None,
) -> tuple[Tensor, Tensor]:
    """``reference.topk`` in fp32: ids [T, K] int32 and weights [T, K] fp32 of ``logits`` [T, E] (bf16, fp16 or fp32,
    any strides); ``bias`` [E], ``mask`` [T] bool. The weights carry no gradient: see ``topk_backward``.
    Raises SpecError."""
    experts = _checked_logits("topk", logits, rule)
    tokens, top_k = logits.shape[0], rule.top_k
    problems = []
    if bias is not None:
        problems += tensor_problems("bias", bias, (experts,), DTYPES, logits.device)
    if mask is not None:
        problems += tensor_problems("mask", mask, (tokens,), (torch.bool,), logits.device)
    refuse("topk", problems)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    if tokens == 0:
        return ids, weights
    run = Run(budget, trace=trace)
    grid, places = run.grid(topk_forward_kernel, logits.device, triton.cdiv(tokens, BLOCK_T))
    topk_forward_kernel[grid](
        logits,
        None if bias is None else bias.contiguous(),
        None if mask is None else mask.contiguous().view(torch.int8),
        ids,
        weights,
        places,
        tokens,
        logits.stride(0),
        logits.stride(1),
        rule.eps,
        rule.scale,
        GROUPS=rule.groups,
        KEEP=rule.keep_groups,
        TOP2=rule.group_score == "top2",
        BY_LOGITS=rule.chooses_by_logits(bias is not None),
        HAS_BIAS=bias is not None,
        HAS_MASK=mask is not None,
        BLOCK_G=triton.next_power_of_2(rule.groups),
        TRACE=places is not None,
        **_rule_options(rule, experts),
    )
    return ids, weights


@launching
def topk_backward(
    grad: Tensor,
    logits: Tensor,
    ids: Tensor,
    rule: RouterRule,
    *,
    budget: SmBudget | None = None,
    trace: Trace | None = None,
) -> Tensor:
    """``reference.topk_backward``: gradient [T, E] in the logits' dtype for ``grad`` and ``ids`` [T, K], any
    strides. Raises SpecError."""
    experts = _checked_logits("topk_backward", logits, rule)
    shape = (logits.shape[0], rule.top_k)
    refuse(
        "topk_backward",
        tensor_problems("grad", grad, shape, DTYPES, logits.device)
        + tensor_problems("ids", ids, shape, INDEX_DTYPES, logits.device),
    )
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    tokens = logits.shape[0]
    if tokens == 0:
        return out
    run = Run(budget, trace=trace)
    grid, places = run.grid(topk_backward_kernel, logits.device, triton.cdiv(tokens, BLOCK_T))
    topk_backward_kernel[grid](
        grad,
        logits,
        ids.contiguous(),
        out,
        places,
        tokens,
        grad.stride(0),
        grad.stride(1),
        logits.stride(0),
        logits.stride(1),
        rule.eps,
        rule.scale,
        TRACE=places is not None,
        **_rule_options(rule, experts),
    )
    return out


@launching
def place(
    ids: Tensor, experts: int, *, budget: SmBudget | None = None, trace: Trace | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``reference.place``: position [T, K], source [T K], offsets [E + 1], int32, of choices ``ids`` [T, K] of any
    integer dtype. Raises SpecError."""
    problems = tensor_problems("ids", ids, (None, None), ID_DTYPES, ids.device)
    if not 1 <= experts <= MAX_EXPERTS:
        problems.append(Problem("experts", experts, f"from 1 to {MAX_EXPERTS}"))
    if ids.numel() >= 1 << 31:
        problems.append(Problem("tokens x top_k", ids.numel(), "below 2^31"))
    refuse("place", problems)
    run = Run(budget, trace=trace)
    total, top_k = ids.numel(), ids.shape[1]
    position = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    source = torch.empty(total, dtype=torch.int32, device=ids.device)
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=ids.device)
    if total == 0:
        return position, source, offsets.zero_()
    tiles = triton.cdiv(total, PLACE_BLOCK)
    before = torch.empty(tiles, experts, dtype=torch.int32, device=ids.device)
    totals = torch.empty(experts, dtype=torch.int32, device=ids.device)
    shape = (total, tiles, experts, top_k, ids.stride(0), ids.stride(1))
    shared: dict[str, object] = {"TRACE": trace is not None, **warp_options(4)}
    grid, places = run.grid(histogram_kernel, ids.device, tiles)
    histogram_kernel[grid](ids, before, places, *shape, BLOCK=PLACE_BLOCK, BLOCK_E=32, **shared)
    grid, places = run.grid(tile_scan_kernel, ids.device, triton.cdiv(experts, 32))
    tile_scan_kernel[grid](before, totals, places, tiles, experts, BLOCK_T=64, BLOCK_E=32, **shared)
    grid, places = run.grid(offsets_kernel, ids.device, 1)
    offsets_kernel[grid](totals, offsets, places, experts, BLOCK_E=triton.next_power_of_2(experts), **shared)
    grid, places = run.grid(place_kernel, ids.device, tiles)
    place_kernel[grid](ids, before, offsets, position, source, places, *shape, BLOCK=PLACE_BLOCK, **shared)
    return position, source, offsets


@dataclass(frozen=True, slots=True)
class Routed:
    """Where the chosen tokens of a batch went: position [T, K], source [T K] (both int32), and the rows by expert."""

    position: Tensor
    source: Tensor
    rows: ExpertRows

    @property
    def top_k(self) -> int:
        return self.position.shape[1]


def route_rows(
    ids: Tensor,
    experts: int,
    *,
    block_ms: Sequence[int] = (),
    budget: SmBudget | None = None,
    trace: Trace | None = None,
) -> Routed:
    """``place`` and ``expert_rows`` of choices ``ids`` [T, K] over a buffer of T K rows. Raises SpecError."""
    position, source, offsets = place(ids, experts, budget=budget, trace=trace)
    return Routed(position, source, expert_rows(offsets, ids.numel(), block_ms, trace=trace))


@dataclass(frozen=True, slots=True)
class TileTable:
    """Tiles of ``block_m`` rows: ``entries`` (expert << 16 | number), of which the first ``count`` [1] are filled."""

    block_m: int
    entries: Tensor
    count: Tensor


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rows ordered by expert, as the grouped products take them: ``rows`` is the buffer's size, known to the host.

    Rows of expert e are offsets[e] to offsets[e + 1]; those from offsets[E] to ``rows`` belong to nobody.
    """

    rows: int
    offsets: Tensor
    tables: tuple[TileTable, ...]

    @property
    def experts(self) -> int:
        return self.offsets.numel() - 1

    def table(self, block_m: int) -> TileTable:
        """The table of this tile height. Raises SpecError if it was not asked for."""
        for table in self.tables:
            if table.block_m == block_m:
                return table
        have = ", ".join(str(table.block_m) for table in self.tables)
        raise SpecError.of("expert rows", [Problem("block_m", block_m, f"one of {have}", "pass it to expert_rows")])


@launching
def tile_table(offsets: Tensor, rows: int, block_m: int, *, trace: Trace | None = None) -> TileTable:
    """``reference.tile_table`` of ``offsets`` [E + 1] int32 on the device. There must be at most ``rows`` rows, which
    only the device could check. Raises SpecError."""
    offsets = _checked_offsets(offsets)
    if rows > block_m << 16:
        raise SpecError.of("tile table", [Problem("rows", rows, f"at most {block_m << 16} with tiles of {block_m}")])
    experts = offsets.numel() - 1
    most = triton.cdiv(rows, block_m) + min(experts, rows)
    entries = torch.empty(most, dtype=torch.int32, device=offsets.device)
    count = torch.empty(1, dtype=torch.int32, device=offsets.device)
    block_e = triton.next_power_of_2(experts)
    grid, places = Run(trace=trace).grid(tile_table_kernel, offsets.device, 1)
    tile_table_kernel[grid](
        offsets, entries, count, places, experts,
        BLOCK_M=block_m, BLOCK_E=block_e, TRACE=trace is not None, **warp_options(4),
    )  # fmt: skip
    return TileTable(block_m, entries, count)


def expert_rows(offsets: Tensor, rows: int, block_ms: Sequence[int] = (), *, trace: Trace | None = None) -> ExpertRows:
    """Tile tables for ``offsets`` [E + 1] int32 over a buffer of ``rows`` rows, by default for every tile height that
    the configurations of this device have. Raises SpecError."""
    offsets = _checked_offsets(offsets)
    block_ms = block_ms or tile_heights(architecture(offsets.device))
    return ExpertRows(rows, offsets, tuple(tile_table(offsets, rows, block_m, trace=trace) for block_m in block_ms))


def device_problem(rows: ExpertRows, like: Tensor) -> list[Problem]:
    """A problem if the rows' offsets are not on the device of an operand."""
    if rows.offsets.device == like.device:
        return []
    return [Problem("rows.offsets.device", str(rows.offsets.device), f"{like.device} like the operands")]


def _checked_offsets(offsets: Tensor) -> Tensor:
    """The offsets, contiguous."""
    problems = tensor_problems("offsets", offsets, (None,), (torch.int32,), offsets.device)
    if not problems and not 2 <= offsets.numel() <= MAX_EXPERTS + 1:
        problems.append(Problem("offsets.shape", tuple(offsets.shape), f"[experts + 1] of 1 to {MAX_EXPERTS} experts"))
    refuse("expert rows", problems)
    return offsets.resolve_neg().contiguous()


def _checked_logits(where: str, logits: Tensor, rule: RouterRule) -> int:
    refuse(where, tensor_problems("logits", logits, (None, None), DTYPES, logits.device))
    rule.check(logits.shape[1])
    return logits.shape[1]


def _rule_options(rule: RouterRule, experts: int) -> dict[str, object]:
    block_e = triton.next_power_of_2(experts)
    return {
        "EXPERTS": experts,
        "TOP_K": rule.top_k,
        "SIGMOID": rule.score == "sigmoid",
        "AFTER_TOPK": rule.softmax_after_topk,
        "RENORMALIZE": rule.renormalize,
        "BLOCK_T": BLOCK_T,
        "BLOCK_E": block_e,
        "BLOCK_K": triton.next_power_of_2(rule.top_k),
        **warp_options(topk_warps(block_e)),
    }


def topk_warps(block_e: int) -> int:
    """Warps of the choice: a row of 512 scores and more spills with four on Blackwell."""
    return 8 if block_e >= 512 else 4
