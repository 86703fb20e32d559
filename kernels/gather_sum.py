"""Weighted gather-sum: bringing the experts' rows back to their tokens, its backward, and the router's gradient."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tessera_rt.kernels.gather_sum_kernels import (
    gather_sum_backward_kernel,
    gather_sum_kernel,
    router_weight_gradient_kernel,
)
from tessera_rt.kernels.launching import launching
from tessera_rt.kernels.operands import (
    DEFAULT_RUN,
    DTYPES,
    INDEX_DTYPES,
    Run,
    check_tensors,
    refuse,
    shape_problem,
    tensor_problems,
    warp_options,
)
from tessera_rt.kernels.routing import ExpertRows, device_problem

BLOCK_T, BLOCK_H, WARPS = 8, 512, 8


@launching
def gather_sum(y: Tensor, position: Tensor, weights: Tensor | None = None, *, run: Run = DEFAULT_RUN) -> Tensor:
    """``reference.gather_sum``: [R, H], [T, K] integers, [T, K] floats (any strides) -> [T, H] in the dtype of ``y``.

    Without ``weights`` it sums the rows of each token: the gradient of gathering them. ``position`` must be below R
    everywhere, which is not checked. The result carries no gradient: see ``gather_sum_backward``. Raises SpecError.
    """
    problems = shape_problem("y", y, None, None)
    problems += tensor_problems("position", position, (None, None), INDEX_DTYPES, y.device)
    if weights is not None:
        problems += tensor_problems("weights", weights, tuple(position.shape), DTYPES, y.device)
    check_tensors("gather_sum", problems, y, "y")
    tokens, top_k = position.shape
    out = torch.empty(tokens, y.shape[1], dtype=y.dtype, device=y.device)
    if out.numel() == 0:
        return out
    block_h = min(BLOCK_H, triton.next_power_of_2(y.shape[1]))
    tasks = triton.cdiv(tokens, BLOCK_T) * triton.cdiv(y.shape[1], block_h)
    grid, trace = run.grid(gather_sum_kernel, y.device, tasks)
    gather_sum_kernel[grid](
        y, position.contiguous(), None if weights is None else weights.contiguous(), out, trace,
        tokens, y.shape[1], *y.stride(),
        TOP_K=top_k, HAS_WEIGHTS=weights is not None, BLOCK_T=BLOCK_T, BLOCK_H=block_h, TRACE=trace is not None,
        **warp_options(WARPS),
    )  # fmt: skip
    return out


@launching
def gather_sum_backward(
    grad: Tensor,
    y: Tensor,
    source: Tensor,
    rows: ExpertRows,
    position: Tensor,
    weights: Tensor,
    *,
    run: Run = DEFAULT_RUN,
) -> tuple[Tensor, Tensor]:
    """``reference.gather_sum_backward``: (d y [R, H] in the dtype of ``y``, d weights [T, K] fp32); any strides.

    ``source``, ``position`` and the rows' offsets are those of one ``place``, which is not checked. Raises SpecError.
    """
    problems = shape_problem("grad", grad, position.shape[0], None) + shape_problem("y", y, rows.rows, grad.shape[-1])
    problems += tensor_problems("source", source, (rows.rows,), INDEX_DTYPES, grad.device)
    problems += tensor_problems("position", position, (None, None), INDEX_DTYPES, grad.device)
    problems += tensor_problems("weights", weights, tuple(position.shape), DTYPES, grad.device)
    problems += device_problem(rows, grad)
    check_tensors("gather_sum_backward", problems, grad, "grad", y=y)
    d_y = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    d_weights = torch.empty(position.shape, dtype=torch.float32, device=y.device)
    work = max(rows.rows, position.numel())
    if work == 0:
        return d_y, d_weights
    block_h = min(BLOCK_H, triton.next_power_of_2(max(y.shape[1], 1)))
    grid, trace = run.grid(gather_sum_backward_kernel, y.device, triton.cdiv(work, BLOCK_T))
    gather_sum_backward_kernel[grid](
        grad, y, weights.contiguous(), position.contiguous(), source.contiguous(), rows.offsets[-1:], d_y, d_weights,
        trace, rows.rows, position.numel(), y.shape[1], max(position.shape[1], 1), *grad.stride(), *y.stride(),
        BLOCK_R=BLOCK_T, BLOCK_H=block_h, TRACE=trace is not None, **warp_options(WARPS),
    )  # fmt: skip
    return d_y, d_weights


@launching
def router_weight_gradient(partials: Tensor, position: Tensor, *, run: Run = DEFAULT_RUN) -> Tensor:
    """``reference.router_weight_gradient``: row partials [R, tiles] fp32, position [T, K] -> d weights [T, K] fp32.
    Positions must be below R, which is not checked. Raises SpecError."""
    problems = tensor_problems("partials", partials, (None, None), (torch.float32,), position.device)
    refuse(
        "router_weight_gradient",
        problems + tensor_problems("position", position, (None, None), INDEX_DTYPES, position.device),
    )
    out = torch.empty(position.shape, dtype=torch.float32, device=position.device)
    if out.numel() == 0:
        return out
    column_tiles = partials.shape[1]
    block_n = min(16, triton.next_power_of_2(max(column_tiles, 1)))
    grid, trace = run.grid(router_weight_gradient_kernel, out.device, triton.cdiv(out.numel(), 128))
    router_weight_gradient_kernel[grid](
        partials.contiguous(), position.contiguous(), out, trace, out.numel(), column_tiles,
        BLOCK=128, BLOCK_N=block_n, TRACE=trace is not None, **warp_options(4),
    )  # fmt: skip
    return out
