"""The experts of one rank between dispatch and combine: received units to rows of the experts, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from tessera_rt.kernels.options import Gate
from tessera_rt.kernels.row_gradients import Needs, RowGradients
from tessera_rt.kernels.transport_calls import Received
from tessera_rt.kernels.weights import ExpertWeights, MainGrads


@dataclass(frozen=True, slots=True)
class Computed:
    """``y``: the experts' rows; ``position`` [R, J] int32: the row of each received choice, -1 for none. For backward:
    tensors ``kept`` and ``state``."""

    y: Tensor
    position: Tensor
    kept: Sequence[Tensor | None]
    state: Any


class RowsCompute(Protocol):
    """Computes the experts' rows, without the sum over a token's choices."""

    def forward(
        self, received: Received[Any], experts: ExpertWeights, gate: Gate, limit: int, *, recompute: bool
    ) -> Computed:
        """At most ``limit`` rows: choices behind get position -1."""
        ...

    def backward(
        self,
        grad: Tensor,
        received: Received[Any],
        experts: ExpertWeights,
        gate: Gate,
        kept: Sequence[Tensor | None],
        state: Any,
        *,
        main_grads: MainGrads,
        needs: Needs,
    ) -> RowGradients:
        """For ``grad`` [R, H] of each unit's weighted sum; ``x_rows`` at the same positions as ``y``."""
        ...
