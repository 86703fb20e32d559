"""The experts in Triton: ``kernels.expert_mlp`` behind the backends' interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessera_rt.errors import Problem, SpecError
from tessera_rt.kernels.budget import SmBudget
from tessera_rt.kernels.expert_mlp import expert_mlp
from tessera_rt.kernels.operands import DEFAULT_RUN, Run
from tessera_rt.kernels.options import Gate
from tessera_rt.kernels.routing import Routed, expert_rows, route_rows
from tessera_rt.kernels.weights import ExpertWeights
from tessera_rt.moe.expert_parallel_triton import TritonRows

_opaque: Any = torch.compiler.disable(  # type: ignore[no-untyped-call, unused-ignore]
    reason="kernels are launched with settings of their own: compile without fullgraph"
)


class TritonBackend:
    """CUDA (or Triton's interpreter): bf16, fp16, fp32; counts stay on the device. To the compiler a call is one step
    that it does not look into: its graph ends before, and another begins behind.

    ``run``: the SM budget that its kernels keep to, also behind a transport (which has one of its own), and the trace
    of the experts' kernels.
    """

    name = "triton"

    def __init__(self, run: Run = DEFAULT_RUN) -> None:
        given: object = run
        if not isinstance(given, Run):
            raise SpecError.of("TritonBackend", [Problem("run", given, "a Run", "for a budget: Run(budget)")])
        self.run, self.rows = run, TritonRows(run)
        self._heights = () if run.config is None else (run.config.block_m,)

    @property
    def budget(self) -> SmBudget | None:
        return self.run.budget

    def __repr__(self) -> str:
        return f"TritonBackend({'' if self.run == DEFAULT_RUN else self.run})"

    @_opaque  # type: ignore[untyped-decorator, unused-ignore]
    def routed(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, gate: Gate) -> Tensor:
        run = self.run
        placed = route_rows(
            ids.detach(), experts.gate_up.shape[0], block_ms=self._heights, budget=run.budget, trace=run.trace
        )
        return expert_mlp(x, experts, placed, weights.float(), gate, run=run)

    @_opaque  # type: ignore[untyped-decorator, unused-ignore]
    def grouped(self, rows: Tensor, offsets: Tensor, experts: ExpertWeights, gate: Gate) -> Tensor:
        count = rows.shape[0]
        # Each row is a token with one choice: itself, as long as it belongs to somebody.
        index = torch.arange(count, dtype=torch.int32, device=rows.device)
        own = torch.where(index < offsets[-1], index, -1)
        placed = Routed(own.unsqueeze(1), own, expert_rows(offsets, count, self._heights, trace=self.run.trace))
        return expert_mlp(rows, experts, placed, rows.new_ones(count, 1, dtype=torch.float32), gate, run=self.run)
