"""Gradients of the experts' rows, and which are wanted. Plain data: no Triton."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Needs:
    """Which gradients are wanted."""

    x: bool = True
    gate_up: bool = True
    down: bool = True
    gate_up_bias: bool = True
    down_bias: bool = True
    router: bool = True


ALL_NEEDS = Needs()


@dataclass(frozen=True, slots=True)
class RowGradients:
    """``x_rows`` [R, H]: of each row's input, to be summed over a token's choices; ``router`` [T, K] fp32; the weights'
    in their dtypes. None: not wanted, or added to a main gradient."""

    x_rows: Tensor | None
    router: Tensor | None
    gate_up: Tensor | None
    down: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
