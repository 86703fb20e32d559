"""The experts of one rank between dispatch and combine, in Triton. Needs Triton and its supported dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tessera_rt.kernels.expert_rows import expert_rows, expert_rows_backward
from tessera_rt.kernels.operands import DEFAULT_RUN, Run
from tessera_rt.kernels.options import Gate
from tessera_rt.kernels.routing import Routed
from tessera_rt.kernels.row_gradients import Needs, RowGradients
from tessera_rt.kernels.transport import route_received
from tessera_rt.kernels.transport_calls import Received
from tessera_rt.kernels.weights import ExpertWeights, MainGrads
from tessera_rt.moe.expert_parallel_rows import Computed


class TritonRows:
    """``kernels.expert_rows``; counts stay on the device. ``run``: budget and configuration of the products."""

    def __init__(self, run: Run = DEFAULT_RUN) -> None:
        self._run = run

    def forward(
        self, received: Received[Any], experts: ExpertWeights, gate: Gate, limit: int, *, recompute: bool
    ) -> Computed:
        heights = () if self._run.config is None else (self._run.config.block_m,)
        routed = route_received(received.ids, experts.gate_up.shape[0], limit, block_ms=heights, run=self._run)
        y, pre = expert_rows(received.x, experts, routed, gate, save_pre=not recompute, run=self._run)
        # The router's gradient needs y only with a bias behind the second product.
        kept = (received.x, pre, y if experts.down_bias is not None else None)
        return Computed(y, routed.position, kept, routed)

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
        x, pre, y = kept
        assert x is not None and isinstance(state, Routed)
        return expert_rows_backward(
            grad, x, experts, state, received.weights, gate,
            pre=pre, y=y, main_grads=main_grads, needs=needs, run=self._run,
        )  # fmt: skip
