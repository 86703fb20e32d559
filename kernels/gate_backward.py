"""The gate backward: from the gradient of the experts' outputs to that of the first product, in one kernel."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tessera_rt.errors import Problem
from tessera_rt.kernels.configs import choose, config_for, precision
from tessera_rt.kernels.descriptors import plain, width_is_aligned
from tessera_rt.kernels.gate_backward_kernels import gate_backward_aligned, gate_backward_any
from tessera_rt.kernels.launching import launching
from tessera_rt.kernels.operands import (
    DEFAULT_RUN,
    DTYPES,
    Run,
    check_tensors,
    index_problems,
    launch_options,
    readable,
    shape_problem,
    tensor_problems,
    weight_view,
)
from tessera_rt.kernels.options import Gate
from tessera_rt.kernels.routing import ExpertRows, device_problem
from tessera_rt.kernels.rows_gemm import zero_rows_behind


@launching
def gate_backward(
    grad: Tensor,
    weight: Tensor,
    pre: Tensor,
    rows: ExpertRows,
    *,
    gate: Gate,
    index: Tensor | None = None,
    divisor: int = 1,
    scale: Tensor | None = None,
    partials: bool = False,
    zero_tail: bool = True,
    run: Run = DEFAULT_RUN,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``reference.gate_backward``: (d pre, activation [R, I], row partials [R, tiles] fp32 if ``partials``).

    ``grad`` [R, H], or [T, H] read at index[r] // divisor; ``weight`` [E, I, H] (``down.mT`` of a second product
    [E, H, I]); ``pre`` [R, 2 I or I] as saved by the forward. ``scale`` [T divisor]: flat router weights, read at
    index[r], whose values are not checked.
    The partials sum to <activation, d act> of each row before scaling (``router_weight_gradient`` sums them). Rows
    that belong to no expert become zeros with ``zero_tail``, except in the partials. Raises SpecError.
    """
    problems = shape_problem("grad", grad, rows.rows if index is None else None, None)
    problems += shape_problem("weight", weight, rows.experts, None, grad.shape[-1])
    if not problems:
        problems += shape_problem("pre", pre, rows.rows, weight.shape[1] * (2 if gate.gated else 1))
    problems += index_problems(index, divisor, rows.rows, grad.device) + device_problem(rows, grad)
    if scale is not None:
        if index is None:
            problems.append(Problem("index", None, "given with scale, which is read at index[row]"))
        problems += tensor_problems("scale", scale, (grad.shape[0] * divisor,), DTYPES, grad.device)
    check_tensors("gate_backward", problems, grad, "grad", weight=weight, pre=pre)
    n, k = weight.shape[1], grad.shape[1]
    d_pre = torch.empty(pre.shape, dtype=pre.dtype, device=pre.device)
    act = torch.empty(rows.rows, n, dtype=pre.dtype, device=pre.device)
    aligned = width_is_aligned(k) and width_is_aligned(n)
    gathers = index is not None
    choice = choose("gate_backward", grad, rows.rows, rows.experts, aligned=aligned, gather=gathers, gate=gate)
    config = run.config or config_for(choice)
    column_tiles = triton.cdiv(n, config.block_n)
    sums = torch.empty(rows.rows, column_tiles, dtype=torch.float32, device=grad.device) if partials else None
    if rows.rows == 0 or n == 0:
        return d_pre, act, sums
    table = rows.table(config.block_m)
    kernel = gate_backward_any if choice.size == "any" else gate_backward_aligned
    grid, trace = run.grid(kernel, grad.device, table.entries.numel() * column_tiles)
    options: dict[str, object] = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "SLICES": config.slices,
        "GATHER": gathers,
        "ACTIVATION": int(gate.activation),
        "GATED": gate.gated,
        "INTERLEAVED": gate.gated and gate.interleaved,
        "HAS_SCALE": scale is not None,
        "WRITE_PARTIALS": partials,
        "PRECISION": precision(grad.dtype),
        "TRACE": trace is not None,
        **launch_options(config),
    }
    flat_scale = None if scale is None else scale.contiguous()
    shared = (
        pre.contiguous(), flat_scale, d_pre, act, sums, None if index is None else index.contiguous(),
        rows.offsets, table.entries, table.count, trace,
    )  # fmt: skip
    if choice.size == "any":
        kernel[grid](
            grad, weight, *shared, n, k, *grad.stride(), *weight.stride(), divisor, gate.alpha, gate.limit, **options
        )
    else:
        a = readable(grad, gathered=gathers)
        view, n_first = weight_view(weight)
        block_w = [1, config.block_n, config.block_k] if n_first else [1, config.block_k, config.block_n]
        kernel[grid](
            a if gathers else plain(a, [config.block_m, config.block_k]),
            plain(view, block_w), *shared, n, k, a.stride(0), divisor, gate.alpha, gate.limit,
            N_FIRST=n_first, EVEN_K=k % config.block_k == 0, **options,
        )  # fmt: skip
    if zero_tail:
        zero_rows_behind(d_pre, rows, run)
        zero_rows_behind(act, rows, run)
    return d_pre, act, sums
