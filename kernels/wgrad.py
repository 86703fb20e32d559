"""Weight and bias gradients of rows ordered by expert, added to fp32 main gradients or written in any dtype.

The gradient contract: with ``accumulate`` the result is added in place to an fp32 buffer of the parameter's shape;
without, every element of ``out`` is written, exact zeros for experts without rows, rounded once from fp32 to its dtype.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tessera_rt.errors import Problem
from tessera_rt.kernels.configs import choose, config_for, precision
from tessera_rt.kernels.descriptors import ragged, width_is_aligned
from tessera_rt.kernels.launching import launching
from tessera_rt.kernels.operands import (
    DEFAULT_RUN,
    Run,
    check_tensors,
    index_problems,
    launch_options,
    negation_problems,
    readable,
    shape_problem,
    warp_options,
)
from tessera_rt.kernels.routing import ExpertRows, device_problem
from tessera_rt.kernels.wgrad_kernels import bias_gradient_kernel, wgrad_aligned, wgrad_any


@launching
def wgrad(
    grad: Tensor,
    x: Tensor,
    rows: ExpertRows,
    out: Tensor,
    *,
    accumulate: bool,
    index: Tensor | None = None,
    divisor: int = 1,
    gather_grad: bool = False,
    gather_x: bool = False,
    run: Run = DEFAULT_RUN,
) -> Tensor:
    """``reference.wgrad`` into ``out`` [E, N, K] (contiguous, or the transpose of a contiguous [E, K, N]); returns it.

    ``grad`` [R, N] and ``x`` [R, K]; a gathered one is [T, .] and read at index[r] // divisor. The sum over an
    expert's rows runs in their order, in blocks fixed by the configuration. Raises SpecError.
    """
    gathers = gather_grad or gather_x
    problems = shape_problem("grad", grad, None if gather_grad else rows.rows, None)
    problems += shape_problem("x", x, None if gather_x else rows.rows, None)
    if gathers and index is None:
        problems.append(Problem("index", None, f"[{rows.rows}] to gather by"))
    if index is not None and not gathers:
        problems.append(Problem("index", tuple(index.shape), "None without gather_grad or gather_x"))
    problems += index_problems(index, divisor, rows.rows, grad.device) + device_problem(rows, grad)
    if not problems:
        problems += shape_problem("out", out, rows.experts, grad.shape[1], x.shape[1])
    if not is_destination(out):
        problems.append(Problem("out.stride", out.stride(), "contiguous, or the transpose of that"))
    problems += _destination_problems(out, grad, accumulate)
    check_tensors("wgrad", problems, grad, "grad", x=x)
    given = out
    if not out.is_contiguous():  # the transpose of the result is that of the exchanged operands
        grad, x, gather_grad, gather_x, out = x, grad, gather_x, gather_grad, out.mT
    p, q = grad.shape[1], x.shape[1]
    if out.numel() == 0 or (rows.rows == 0 and accumulate):
        return given
    if rows.rows == 0:
        return given.zero_()
    index = None if index is None else index.contiguous()
    aligned = width_is_aligned(p) and width_is_aligned(q)
    kind = "wgrad_accumulate" if accumulate else "wgrad_write"
    choice = choose(kind, grad, rows.rows, rows.experts, aligned=aligned, gather=gathers)
    config = run.config or config_for(choice)
    kernel = wgrad_any if choice.size == "any" else wgrad_aligned
    tasks = rows.experts * triton.cdiv(p, config.block_m) * triton.cdiv(q, config.block_n)
    grid, trace = run.grid(kernel, grad.device, tasks)
    options: dict[str, object] = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GATHER_LEFT": gather_grad,
        "GATHER_RIGHT": gather_x,
        "ACCUMULATE": accumulate,
        "ELEMENT": grad.element_size(),
        "PRECISION": precision(grad.dtype),
        "TRACE": trace is not None,
        **launch_options(config),
    }
    sizes = (rows.rows, rows.experts, p, q)
    if choice.size == "any":
        kernel[grid](grad, x, out, index, rows.offsets, trace, *sizes, *grad.stride(), *x.stride(), divisor, **options)
    else:
        left, right = readable(grad, gathered=gather_grad), readable(x, gathered=gather_x)
        kernel[grid](
            left if gather_grad else ragged(left, [config.block_k, config.block_m]),
            right if gather_x else ragged(right, [config.block_k, config.block_n]),
            out, index, rows.offsets, trace, *sizes, left.stride(0), right.stride(0), divisor, **options,
        )  # fmt: skip
    return given


def is_destination(out: Tensor) -> bool:
    """Whether ``wgrad`` (three dimensions) or ``bias_gradient`` can write to a tensor of these strides."""
    return out.is_contiguous() or (out.dim() == 3 and out.mT.is_contiguous())


@launching
def bias_gradient(grad: Tensor, rows: ExpertRows, out: Tensor, *, accumulate: bool, run: Run = DEFAULT_RUN) -> Tensor:
    """``reference.bias_gradient`` into ``out`` [E, N] (contiguous), by the same contract; ``grad`` any strides."""
    problems = shape_problem("grad", grad, rows.rows, None)
    if not problems:
        problems += shape_problem("out", out, rows.experts, grad.shape[1])
    if not out.is_contiguous():
        problems.append(Problem("out.stride", out.stride(), "contiguous"))
    problems += _destination_problems(out, grad, accumulate)
    problems += device_problem(rows, grad)
    check_tensors("bias_gradient", problems, grad, "grad")
    if out.numel() == 0:
        return out
    tasks = rows.experts * triton.cdiv(grad.shape[1], 64)
    grid, trace = run.grid(bias_gradient_kernel, grad.device, tasks)
    bias_gradient_kernel[grid](
        grad, out, rows.offsets, trace, rows.experts, grad.shape[1], *grad.stride(),
        BLOCK_R=64, BLOCK_N=64, ACCUMULATE=accumulate, TRACE=trace is not None, **warp_options(4),
    )  # fmt: skip
    return out


def _destination_problems(out: Tensor, grad: Tensor, accumulate: bool) -> list[Problem]:
    problems = negation_problems("out", out)
    if out.device != grad.device:
        problems.append(Problem("out.device", str(out.device), f"{grad.device} like grad"))
    if accumulate and out.dtype != torch.float32:
        problems.append(Problem("out.dtype", str(out.dtype), "float32 to accumulate into"))
    elif out.dtype not in (torch.float32, grad.dtype):
        problems.append(Problem("out.dtype", str(out.dtype), f"float32 or {grad.dtype}"))
    return problems
