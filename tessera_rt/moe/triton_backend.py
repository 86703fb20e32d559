"""The experts in Triton: ``kernels.expert_mlp`` behind the backends' interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessera_rt.kernels.expert_mlp import expert_mlp
from tessera_rt.kernels.options import Gate
from tessera_rt.kernels.routing import Routed, expert_rows, route_rows
from tessera_rt.kernels.weights import ExpertWeights

_opaque: Any = torch.compiler.disable(  # type: ignore[no-untyped-call, unused-ignore]
    reason="kernels are launched with settings of their own: compile without fullgraph"
)


class TritonBackend:
    """CUDA (or Triton's interpreter): bf16, fp16, fp32; counts stay on the device. To the compiler a call is one step
    that it does not look into: its graph ends before, and another begins behind."""

    name = "triton"

    def __repr__(self) -> str:
        return "TritonBackend()"

    @_opaque  # type: ignore[untyped-decorator, unused-ignore]
    def routed(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, gate: Gate) -> Tensor:
        placed = route_rows(ids.detach(), experts.gate_up.shape[0])
        return expert_mlp(x, experts, placed, weights.float(), gate)

    @_opaque  # type: ignore[untyped-decorator, unused-ignore]
    def grouped(self, rows: Tensor, offsets: Tensor, experts: ExpertWeights, gate: Gate) -> Tensor:
        count = rows.shape[0]
        # Each row is a token with one choice: itself, as long as it belongs to somebody.
        index = torch.arange(count, dtype=torch.int32, device=rows.device)
        own = torch.where(index < offsets[-1], index, -1)
        placed = Routed(own.unsqueeze(1), own, expert_rows(offsets, count))
        return expert_mlp(rows, experts, placed, rows.new_ones(count, 1, dtype=torch.float32), gate)
