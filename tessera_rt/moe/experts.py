"""Feed-forwards: the experts of a MoE layer held by one rank, shared experts, and the dense feed-forward.

Layout of gated kinds: ``gate_up`` = [gate; up] stacked along the output dimension, ``down`` back to the hidden size.
Kinds without a gate have the same two weights, with the up projection alone in ``gate_up``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from tessera_rt.errors import Problem, SpecError
from tessera_rt.model_spec import Activation, FeedForward
from tessera_rt.split import GroupedLinear, SplitLinear

_RUNNABLE = (Activation.SWIGLU, Activation.GEGLU, Activation.RELU2)


def activate(activation: Activation, x: Tensor) -> Tensor:
    """Gated kinds: [..., 2 I] = [gate; up] -> [..., I]. Others: [..., I] -> [..., I]. GEGLU uses the exact GELU."""
    if activation is Activation.RELU2:
        return functional.relu(x).square()
    gate, up = x.chunk(2, dim=-1)
    return (functional.silu(gate) if activation is Activation.SWIGLU else functional.gelu(gate)) * up


def activation_problems(spec: FeedForward) -> list[Problem]:
    """Activations that need constants which a description does not hold can only be planned."""
    if spec.activation in _RUNNABLE:
        return []
    allowed = ", ".join(_RUNNABLE)
    return [Problem("activation", str(spec.activation), allowed, "other activations can only be planned, not run")]


class Experts(nn.Module):
    """``count`` experts side by side: ``gate_up`` [count, 2 I, H] and ``down`` [count, H, I]; weights uninitialised."""

    def __init__(
        self,
        count: int,
        hidden: int,
        spec: FeedForward,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        problems = activation_problems(spec)
        if problems:
            raise SpecError.of("experts", problems)
        width = _input_width(spec.activation, spec.intermediate)
        self.activation = spec.activation
        self.gate_up = GroupedLinear(count, hidden, width, device=device, dtype=dtype)
        self.down = GroupedLinear(count, spec.intermediate, hidden, device=device, dtype=dtype)

    def forward(self, rows: Tensor, offsets: Sequence[int]) -> Tensor:
        """Rows [R, H] ordered by expert -> [R, H]; rows of expert e are offsets[e]:offsets[e + 1] (host integers)."""
        out: Tensor = self.down(activate(self.activation, self.gate_up(rows, offsets)), offsets)
        return out


class DenseFeedForward(nn.Module):
    """down(activation(gate_up(x))), [..., H] -> [..., H]."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        activation: Activation,
        *,
        bias: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        width = _input_width(activation, intermediate)
        self.activation = activation
        self.gate_up = SplitLinear(hidden, width, bias=bias, device=device, dtype=dtype)
        self.down = SplitLinear(intermediate, hidden, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(activate(self.activation, self.gate_up(x)))
        return out


class SharedExpert(DenseFeedForward):
    """A feed-forward that every token passes, optionally times sigmoid(x @ gate), gate [1, H].

    The gate is a plain linear: its weight gradient is too small to be worth a task of its own.
    """

    def __init__(
        self,
        hidden: int,
        spec: FeedForward,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden, spec.shared_intermediate, spec.activation, device=device, dtype=dtype)
        self.gate = nn.Linear(hidden, 1, bias=False, device=device, dtype=dtype) if spec.shared_gated else None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if self.gate is None else out * torch.sigmoid(self.gate(x))


def _input_width(activation: Activation, intermediate: int) -> int:
    return 2 * intermediate if activation.gated else intermediate
