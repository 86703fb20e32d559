"""The weights of one rank's experts, and the buffers that their gradients are added to. Plain data: no Triton."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """``gate_up`` [E, 2 I (or I without a gate), H], ``down`` [E, H, I], biases [E, 2 I] and [E, H] or None.

    Any strides: storage [E, H, 2 I] is passed as its transpose.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MainGrads:
    """fp32 buffers of the weights' shapes, to which backward adds. A weight without one gets its ``.grad`` from
    autograd, written in the weight's dtype."""

    gate_up: Tensor | None = None
    down: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


NO_MAIN_GRADS = MainGrads()
