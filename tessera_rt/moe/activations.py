"""Activations of experts with their derivatives in plain torch: each pass over the rows is one operation.

``kernels.reference.activate`` is the definition. These work below autograd, inside the torch backend's operators.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tessera_rt.kernels.options import Activation, Gate


def activated(pre: Tensor, gate: Gate) -> Tensor:
    """The first product ``pre`` [R, 2 I] or [R, I] -> a new [R, I]."""
    if not gate.gated:
        return functional.relu(pre).square_()
    left, right = _factors(pre, gate)
    return left.mul_(right)


@dataclass(frozen=True, slots=True)
class Activated:
    """``value`` [R, I] = left * right for gated kinds, relu(pre)^2 for the other; and what its derivative needs."""

    value: Tensor
    pre: Tensor
    gate: Gate
    left: Tensor | None
    right: Tensor | None

    @classmethod
    def of(cls, pre: Tensor, gate: Gate) -> Activated:
        if not gate.gated:
            return cls(functional.relu(pre).square_(), pre, gate, None, None)
        left, right = _factors(pre, gate)
        return cls(left * right, pre, gate, left, right)

    def gradient(self, d_value: Tensor) -> Tensor:
        """The gradient of ``pre`` for that of the value, which is overwritten."""
        if self.left is None or self.right is None:
            return functional.relu(self.pre).mul_(d_value).mul_(2.0)
        out = torch.empty_like(self.pre)
        d_gate, d_up = _halves(out, self.gate)
        torch.mul(d_value, self.left, out=d_up)
        self._gate_gradient(d_value.mul_(self.right), d_gate)
        if _clamps(self.gate):
            gate, up = _halves(self.pre, self.gate)
            limit = self.gate.limit
            d_gate.masked_fill_(gate > limit, 0.0)
            d_up.masked_fill_((up > limit) | (up < -limit), 0.0)
        return out

    def _gate_gradient(self, d_left: Tensor, out: Tensor) -> None:
        gate, _ = _halves(self.pre, self.gate)
        if _clamps(self.gate):
            gate = gate.clamp(max=self.gate.limit)
        match self.gate.activation:
            case Activation.GEGLU:
                torch.ops.aten.gelu_backward.grad_input(d_left, gate, grad_input=out)
            case Activation.GEGLU_TANH:
                torch.ops.aten.gelu_backward.grad_input(d_left, gate, approximate="tanh", grad_input=out)
            case Activation.SWIGLU_OSS:  # g s(a g) has the derivative s + a g s (1 - s)
                alpha = self.gate.alpha
                s = torch.sigmoid(alpha * gate)
                torch.mul(d_left, s.mul_((1 - s).mul_(gate).mul_(alpha).add_(1.0)), out=out)
            case _:
                torch.ops.aten.silu_backward.grad_input(d_left, gate, grad_input=out)


def _factors(pre: Tensor, gate: Gate) -> tuple[Tensor, Tensor]:
    """What is multiplied: a new tensor of the gate, and the up part."""
    g, u = _halves(pre, gate)
    if _clamps(gate):
        g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
    match gate.activation:
        case Activation.GEGLU:
            return functional.gelu(g), u
        case Activation.GEGLU_TANH:
            return functional.gelu(g, approximate="tanh"), u
        case Activation.SWIGLU_OSS:
            return torch.sigmoid(gate.alpha * g).mul_(g), u + 1
    return functional.silu(g), u


def _halves(pre: Tensor, gate: Gate) -> tuple[Tensor, Tensor]:
    if gate.interleaved:
        return pre[:, ::2], pre[:, 1::2]
    g, u = pre.chunk(2, dim=-1)
    return g, u


def _clamps(gate: Gate) -> bool:
    return gate.activation in (Activation.SWIGLU_CLAMPED, Activation.SWIGLU_OSS)
