"""Several expert-parallel ranks on one device, one phase after the other: all put before any waits.

Ranks that wait on one device while others have still to put might never meet: nothing promises that two kernels run at
once. So this is how one GPU can run the real transport kernels, and all that it can say of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessera_rt.kernels.operands import Run
from tessera_rt.kernels.options import Gate
from tessera_rt.kernels.peer_memory import virtual_ranks
from tessera_rt.kernels.row_gradients import Needs
from tessera_rt.kernels.transport import PeerTransport
from tessera_rt.kernels.transport_layout import Combine, Dispatch, Traffic
from tessera_rt.kernels.weights import NO_MAIN_GRADS, ExpertWeights
from tessera_rt.moe.expert_parallel import compute_for

WORLD = 4
FORMS = {
    "tokens, rows": (Dispatch.TOKENS, Combine.ROWS),
    "tokens, reduced": (Dispatch.TOKENS, Combine.REDUCED),
    "rows, rows": (Dispatch.ROWS, Combine.ROWS),
}
ALL = Needs(True, True, True, False, False, True)


@dataclass(frozen=True, slots=True)
class Inputs:
    """One rank's x [T, H], ids [T, K] int32, router weights [T, K] fp32, and the gradient [T, H] of its output."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    grad: Tensor


@dataclass(frozen=True, slots=True)
class Outputs:
    """One rank's output with the gradients of x, router weights, and its experts' weights."""

    out: Tensor
    x: Tensor
    router: Tensor
    gate_up: Tensor
    down: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return self.out, self.x, self.router, self.gate_up, self.down


def transports(traffic: Traffic, device: torch.device, run: Run) -> list[PeerTransport]:
    return [PeerTransport(traffic, allocator, run=run) for allocator in virtual_ranks(traffic.world, device)]


def step(
    ranks: Sequence[PeerTransport], inputs: Sequence[Inputs], experts: Sequence[ExpertWeights], gate: Gate
) -> list[Outputs]:
    """Forward and backward of the layer on every rank."""
    compute = compute_for(ranks[0].device, "triton")
    placed = _wait([rank.exchange(one.ids) for rank, one in zip(ranks, inputs, strict=True)])
    received = _wait([r.dispatch(i.x, i.weights, p) for r, i, p in zip(ranks, inputs, placed, strict=True)])
    done = [
        compute.forward(came, own, gate, rank.rows_limit, recompute=False)
        for rank, came, own in zip(ranks, received, experts, strict=True)
    ]
    outs = _wait([r.combine(d.y, d.position, c) for r, d, c in zip(ranks, done, received, strict=True)])
    grads = _wait([r.dispatch_gradient(i.grad, c) for r, i, c in zip(ranks, inputs, received, strict=True)])
    found = [
        compute.backward(grad, came, own, gate, d.kept, d.state, main_grads=NO_MAIN_GRADS, needs=ALL)
        for grad, came, own, d in zip(grads, received, experts, done, strict=True)
    ]
    home = _wait(
        [
            rank.combine(f.x_rows, d.position, came, weighted=False, router_gradient=f.router)
            for rank, f, d, came in zip(ranks, found, done, received, strict=True)
        ]
    )
    return [
        Outputs(out.out, back.out, back.router_gradient, f.gate_up, f.down)
        for out, back, f in zip(outs, home, found, strict=True)
    ]


def _wait(issued: Sequence[Any]) -> list[Any]:
    return [one.wait() for one in issued]
