"""Linear and grouped linear functions whose weight gradient is a separate step (W).

Backward computes the input gradient (and the bias gradient) only and hands ``(x, grad)`` to a sink; W later
accumulates grad^T x into a preallocated main-gradient buffer. Without a sink they are ordinary functions of autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tessera_rt.differentiable_once import differentiable_once
from tessera_rt.errors import Problem, SpecError


@dataclass(frozen=True, slots=True)
class PendingGrad:
    """What one weight's W needs. ``weight`` [N, K] with x [R, K], grad [R, N]; or [E, N, K] with row ``offsets``.

    ``offsets``: E + 1 host integers; rows offsets[e] to offsets[e + 1] belong to expert e. ``x`` and ``grad`` may share
    memory with tensors that autograd hands on, so nobody may change those in place before W has run.
    """

    weight: nn.Parameter
    x: Tensor
    grad: Tensor
    offsets: tuple[int, ...] | None = None


class WeightGradSink(Protocol):
    """Receives deferred weight gradients during backward. Captured by the forward call, so no global state is used."""

    def defer(self, pending: PendingGrad) -> None: ...


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, sink: WeightGradSink | None = None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N] -> [..., N]; differentiable once.

    The weight gradient goes to ``sink`` if there is one and the weight is a parameter that requires a gradient. A
    weight computed from others (weight norm, say) gets its gradient in backward, since no buffer belongs to it.
    """
    return _Linear.apply(x, weight, bias, sink)  # type: ignore[no-any-return, no-untyped-call]


def grouped_linear(x: Tensor, weight: Tensor, offsets: Sequence[int], sink: WeightGradSink | None = None) -> Tensor:
    """Rows of expert e, x[offsets[e]:offsets[e + 1]], times weight[e] transposed: [R, K], [E, N, K] -> [R, N].

    ``offsets``: E + 1 host integers from 0 to R. Experts without rows get exact zeros as gradient. ``sink`` as in
    ``linear``. Raises SpecError for offsets that do not cover the rows in order.
    """
    bounds = tuple(int(offset) for offset in offsets)
    covers = len(bounds) == weight.shape[0] + 1 and bounds[0] == 0 and bounds[-1] == x.shape[0]
    if not covers or any(a > b for a, b in pairwise(bounds)):
        allowed = f"{weight.shape[0] + 1} rising integers from 0 to the number of rows {x.shape[0]}"
        raise SpecError.of("grouped_linear", [Problem("offsets", bounds, allowed)])
    return _GroupedLinear.apply(x, weight, bounds, sink)  # type: ignore[no-any-return, no-untyped-call]


@torch.no_grad()
def accumulate(pending: PendingGrad, main_grad: Tensor) -> None:
    """W: main_grad += grad^T x in place, per expert if grouped, in the precision of ``main_grad`` (fp32 or fp64)."""
    if pending.offsets is None:
        _add_product(main_grad, pending.grad, pending.x)
    else:
        for e, rows in _expert_rows(pending.offsets):
            _add_product(main_grad[e], pending.grad[rows], pending.x[rows])


class SplitLinear(nn.Linear):
    """nn.Linear whose weight gradient goes to ``sink``; with ``sink`` None it is nn.Linear."""

    sink: WeightGradSink | None = None

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, self.sink)


class GroupedLinear(nn.Module):
    """One linear map per expert: weight [experts, out_features, in_features], bias [experts, out_features] or None.

    Both start uninitialised: models fill them per expert, so that they do not depend on who holds which expert. The
    bias gradient is computed in backward.
    """

    sink: WeightGradSink | None = None
    bias: nn.Parameter | None

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features, device=device, dtype=dtype))
        of_bias = nn.Parameter(torch.empty(experts, out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", of_bias)

    def forward(self, rows: Tensor, offsets: Sequence[int]) -> Tensor:
        out = grouped_linear(rows, self.weight, offsets, self.sink)
        if self.bias is None:
            return out
        counts = torch.tensor([b - a for a, b in pairwise(offsets)], device=out.device)
        return out + self.bias.repeat_interleave(counts, 0)

    def extra_repr(self) -> str:
        experts, out_features, in_features = self.weight.shape
        bias = self.bias is not None
        return f"experts={experts}, in_features={in_features}, out_features={out_features}, bias={bias}"


def split_linear(model: nn.Module) -> list[str]:
    """Turns the model's nn.Linear modules (this exact type) into SplitLinear, in place.

    Parameters, hooks and sharing are kept. Returns the names of the trainable parameters that some module still uses
    unsplit, so that their gradient, or a part of it, is computed in backward.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = SplitLinear
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if parameter.requires_grad and not (name == "weight" and isinstance(module, SplitLinear | GroupedLinear))
    ]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: WeightGradSink | None) -> Tensor:
        ctx.deferred_to = _deferral(weight, sink)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        # Under autocast the dtypes of input, weight and output differ.
        grad_x = (grad_rows @ weight.to(grad.dtype)).to(x.dtype).view(x.shape) if needs_x else None
        grad_bias = grad_rows.sum(0).to(ctx.bias_dtype) if needs_bias else None
        grad_weight = None
        if needs_weight and ctx.deferred_to is not None:
            sink, parameter = ctx.deferred_to
            sink.defer(PendingGrad(parameter, rows, grad_rows))
        elif needs_weight:
            grad_weight = (grad_rows.mT @ rows.to(grad.dtype)).to(weight.dtype)
        return grad_x, grad_weight, grad_bias, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: tuple[int, ...], sink: WeightGradSink | None) -> Tensor:
        ctx.deferred_to, ctx.offsets = _deferral(weight, sink), offsets
        ctx.save_for_backward(x, weight)
        out = x.new_empty(x.shape[0], weight.shape[1])
        for e, rows in _expert_rows(offsets):
            torch.mm(x[rows], weight[e].mT, out=out[rows])
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _, _ = ctx.needs_input_grad
        grad_x = grad_weight = None
        if needs_x:
            grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
            for e, rows in _expert_rows(ctx.offsets):
                torch.mm(grad[rows], weight[e], out=grad_x[rows])
        if needs_weight and ctx.deferred_to is not None:
            sink, parameter = ctx.deferred_to
            sink.defer(PendingGrad(parameter, x, grad, ctx.offsets))
        elif needs_weight:
            grad_weight = torch.zeros_like(weight)
            for e, rows in _expert_rows(ctx.offsets):
                torch.mm(grad[rows].mT, x[rows], out=grad_weight[e])
        return grad_x, grad_weight, None, None


def _deferral(weight: Tensor, sink: WeightGradSink | None) -> tuple[WeightGradSink, nn.Parameter] | None:
    """Where the weight gradient goes, and for whom: saved-tensor hooks may hand backward another tensor object."""
    return (sink, weight) if sink is not None and isinstance(weight, nn.Parameter) else None


def _expert_rows(offsets: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, with their rows."""
    return ((e, slice(a, b)) for e, (a, b) in enumerate(pairwise(offsets)) if a < b)


def _add_product(out: Tensor, grad: Tensor, x: Tensor) -> None:
    # Low-precision factors are widened first, so that the sum is rounded in the buffer's precision only.
    out.addmm_(grad.to(out.dtype).mT, x.to(out.dtype))
