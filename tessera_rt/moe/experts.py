"""Feed-forwards: the experts of a MoE layer held by one rank, the shared expert, and the dense feed-forward.

Layout of gated kinds: ``gate_up`` = [gate; up] stacked along the output dimension, or gate and up in turn where the
gate says ``interleaved``; ``down`` back to the input size. Kinds without a gate have the up projection alone in
``gate_up``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from tessera_rt.kernels import reference
from tessera_rt.kernels.options import Gate
from tessera_rt.kernels.weights import ExpertWeights
from tessera_rt.moe.config import MoEConfig
from tessera_rt.split import GroupedLinear, SplitLinear


def activate(pre: Tensor, gate: Gate) -> Tensor:
    """[..., 2 I] -> [..., I] for gated kinds, else [..., I] -> [..., I]."""
    rows = reference.activate(pre.flatten(0, -2), gate)
    return rows.view(*pre.shape[:-1], rows.shape[1])


class Experts(nn.Module):
    """``count`` of a layer's experts side by side: ``gate_up.weight`` [count, 2 I, D], ``down.weight`` [count, D, I].

    D = ``config.expert_input``. Biases [count, 2 I] and [count, D] where the configuration says so. Uninitialised.
    """

    def __init__(
        self, count: int, config: MoEConfig, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        bias = config.expert_bias
        self.gate = config.gate
        self.gate_up = GroupedLinear(count, config.expert_input, config.product, bias=bias, device=device, dtype=dtype)
        self.down = GroupedLinear(
            count, config.intermediate, config.expert_input, bias=bias, device=device, dtype=dtype
        )

    @property
    def weights(self) -> ExpertWeights:
        """The parameters as the backends take them."""
        return ExpertWeights(self.gate_up.weight, self.down.weight, self.gate_up.bias, self.down.bias)

    def forward(self, rows: Tensor, offsets: Sequence[int]) -> Tensor:
        """Rows [R, D] ordered by expert -> [R, D]; rows of expert e are offsets[e]:offsets[e + 1] (host integers).

        The form whose weight gradients can be deferred: its linears hand them to their sinks, if they have one.
        """
        out: Tensor = self.down(activate(self.gate_up(rows, offsets), self.gate), offsets)
        return out

    def extra_repr(self) -> str:
        return f"gate={self.gate}"


class DenseFeedForward(nn.Module):
    """down(activation(gate_up(x))), [..., H] -> [..., H]."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        gate: Gate,
        *,
        bias: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = gate
        width = 2 * intermediate if gate.gated else intermediate
        self.gate_up = SplitLinear(hidden, width, bias=bias, device=device, dtype=dtype)
        self.down = SplitLinear(intermediate, hidden, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(activate(self.gate_up(x), self.activation))
        return out


class SharedExpert(DenseFeedForward):
    """A feed-forward that every token passes, optionally times sigmoid(x @ gate), gate [1, H].

    Its activation is that of the experts, with [gate; up] stacked. The gate is a plain linear: its weight gradient is
    too small to be worth a task of its own.
    """

    def __init__(
        self, config: MoEConfig, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        stacked = replace(config.gate, interleaved=False)
        super().__init__(config.hidden, config.shared_intermediate, stacked, device=device, dtype=dtype)
        self.gate = nn.Linear(config.hidden, 1, bias=False, device=device, dtype=dtype) if config.shared_gated else None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if self.gate is None else out * torch.sigmoid(self.gate(x))
