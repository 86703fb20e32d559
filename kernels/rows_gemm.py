"""The rows GEMM: products of rows ordered by expert with their expert's weight; forward and input gradient.

Two classes. *Aligned*: row widths are multiples of 16 elements; tensor cores fed by TMA. Operands whose strides or
address TMA cannot read (expanded, of an odd slice; rows that are transposed), or 16-byte loads where rows are gathered,
are copied in every call. *Any size*: masked pointers, any strides, no speed claimed.
Which one runs follows from the sizes alone, so that bits do not depend on strides or addresses.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tessera_rt.errors import Problem
from tessera_rt.kernels.config_table import ROWS_GEMM
from tessera_rt.kernels.configs import choose, config_for, precision
from tessera_rt.kernels.descriptors import plain, width_is_aligned
from tessera_rt.kernels.launching import launching
from tessera_rt.kernels.operands import (
    DEFAULT_RUN,
    Run,
    check_tensors,
    index_problems,
    launch_options,
    readable,
    shape_problem,
    warp_options,
    weight_view,
)
from tessera_rt.kernels.options import NO_GATE, Activation, Gate
from tessera_rt.kernels.routing import ExpertRows, device_problem
from tessera_rt.kernels.rows_gemm_kernels import rows_gemm_aligned, rows_gemm_any, zero_tail_kernel


@launching
def rows_gemm(
    x: Tensor,
    weight: Tensor,
    rows: ExpertRows,
    *,
    index: Tensor | None = None,
    divisor: int = 1,
    bias: Tensor | None = None,
    gate: Gate = NO_GATE,
    save_pre: bool = False,
    write_out: bool = True,
    zero_tail: bool = True,
    kind: str = "",
    run: Run = DEFAULT_RUN,
) -> tuple[Tensor, Tensor | None]:
    """``reference.rows_gemm`` in the dtype of ``x``: (activation [R, N or I], product [R, N] if ``save_pre``).

    ``x`` [R, K], or [any, K] with ``index`` [R] int32 or int64, whose values are not checked; ``weight`` [E, N, K] with
    any strides (the input gradient passes ``weight.mT``); ``bias`` [E, N]. The product is rounded to the dtype before
    the activation, which is done in fp32 and rounded once: an activation recomputed from a saved product has the same
    bits. Without ``write_out`` only the product is written and the first result is empty. ``zero_tail``: rows that
    belong to no expert become zeros (they are left unwritten otherwise). ``kind`` names the row of the configuration
    table; by default it follows from the arguments. Raises SpecError for shapes, dtypes and devices that do not fit.
    """
    problems = _problems(x, weight, rows, index, bias, gate) + index_problems(index, divisor, rows.rows, x.device)
    problems += device_problem(rows, x)
    if not save_pre and not write_out:
        problems.append(Problem("save_pre", False, "true without write_out, or there is no result"))
    if kind and kind not in ROWS_GEMM:
        problems.append(Problem("kind", kind, f"one of {', '.join(ROWS_GEMM)}, or empty"))
    check_tensors("rows_gemm", problems, x, weight=weight, bias=bias)
    n_product, k = weight.shape[1], x.shape[1]
    n = gate.width(n_product)
    out = torch.empty(rows.rows if write_out else 0, n, dtype=x.dtype, device=x.device)
    pre = torch.empty(rows.rows, n_product, dtype=x.dtype, device=x.device) if save_pre else None
    if rows.rows == 0 or n == 0:
        return out, pre
    aligned = width_is_aligned(k) and width_is_aligned(n)
    name = kind or ("forward" if gate.activation is Activation.NONE else "forward_gate")
    choice = choose(
        name, x, rows.rows, rows.experts, aligned=aligned, gather=index is not None, gate=gate, biased=bias is not None
    )
    config = run.config or config_for(choice)
    table = rows.table(config.block_m)
    kernel = rows_gemm_any if choice.size == "any" else rows_gemm_aligned
    grid, trace = run.grid(kernel, x.device, table.entries.numel() * triton.cdiv(n, config.block_n))
    options: dict[str, object] = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "GATHER": index is not None,
        "ACTIVATION": int(gate.activation),
        "GATED": gate.gated,
        "INTERLEAVED": gate.gated and gate.interleaved,
        "HAS_BIAS": bias is not None,
        "SAVE_PRE": save_pre,
        "WRITE_OUT": write_out,
        "PRECISION": precision(x.dtype),
        "TRACE": trace is not None,
        **launch_options(config),
    }
    # A launch needs some tensor for ``out``, which gives the dtype; nothing is stored there without write_out.
    target = out if write_out else pre
    shared = (
        None if bias is None else bias.contiguous(), target, pre, None if index is None else index.contiguous(),
        rows.offsets, table.entries, table.count,
    )  # fmt: skip
    if choice.size == "any":
        kernel[grid](
            x, weight, *shared, trace, n, k, *x.stride(), *weight.stride(), divisor, gate.alpha, gate.limit,
            **options,
        )  # fmt: skip
    else:
        a = readable(x, gathered=index is not None)
        view, n_first = weight_view(weight)
        block_w = _weight_block(config.block_n, config.block_k, n_first, gate)
        if gate.gated and not gate.interleaved:
            view = view.view(rows.experts, 2, n, k) if n_first else view.view(rows.experts, k, 2, n)
        a_operand = a if index is not None else plain(a, [config.block_m, config.block_k])
        kernel[grid](
            a_operand, plain(view, block_w), *shared, trace,
            n, k, a.stride(0), divisor, gate.alpha, gate.limit,
            N_FIRST=n_first, EVEN_K=k % config.block_k == 0, **options,
        )  # fmt: skip
    if zero_tail:
        for tensor in (out if write_out else None, pre):
            if tensor is not None:
                zero_rows_behind(tensor, rows, run)
    return out, pre


@launching
def zero_rows_behind(tensor: Tensor, rows: ExpertRows, run: Run = DEFAULT_RUN) -> None:
    """Zeros in the rows of ``tensor`` [R, N] (contiguous) that belong to no expert."""
    grid, trace = run.grid(zero_tail_kernel, tensor.device, triton.cdiv(rows.rows, 32))
    zero_tail_kernel[grid](
        tensor, rows.offsets[-1:], trace, rows.rows, tensor.shape[1],
        BLOCK_M=32, BLOCK_N=128, TRACE=trace is not None, **warp_options(8),
    )  # fmt: skip


def _weight_block(block_n: int, block_k: int, n_first: bool, gate: Gate) -> list[int]:
    if not gate.gated:
        return [1, block_n, block_k] if n_first else [1, block_k, block_n]
    if gate.interleaved:
        return [1, 2 * block_n, block_k] if n_first else [1, block_k, 2 * block_n]
    return [1, 2, block_n, block_k] if n_first else [1, block_k, 2, block_n]


def _problems(
    x: Tensor, weight: Tensor, rows: ExpertRows, index: Tensor | None, bias: Tensor | None, gate: Gate
) -> list[Problem]:
    problems = shape_problem("x", x, rows.rows if index is None else None, None)
    problems += shape_problem("weight", weight, rows.experts, None, x.shape[-1])
    if not problems and bias is not None:
        problems += shape_problem("bias", bias, rows.experts, weight.shape[1])
    if not problems and gate.gated and weight.shape[1] % 2:
        problems.append(Problem("weight.shape[1]", weight.shape[1], "even with a gated activation"))
    return problems
