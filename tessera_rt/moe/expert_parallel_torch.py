"""The experts of one rank between dispatch and combine, in plain torch: the grouped experts of ``torch_backend``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessera_rt.kernels import reference
from tessera_rt.kernels.options import Gate
from tessera_rt.kernels.row_gradients import Needs, RowGradients
from tessera_rt.kernels.transport_calls import Received
from tessera_rt.kernels.weights import ExpertWeights, MainGrads
from tessera_rt.moe.expert_parallel_rows import Computed
from tessera_rt.moe.torch_backend import TorchBackend


class TorchRows:
    """Plain torch, any device and floating dtype; reads counts on the host. The graph of the forward is kept, unless it
    is to be computed again."""

    def forward(
        self, received: Received[Any], experts: ExpertWeights, gate: Gate, limit: int, *, recompute: bool
    ) -> Computed:
        ids, top_k = received.ids, received.ids.shape[1]
        position, source, offsets = reference.place(ids, experts.gate_up.shape[0])
        offsets = offsets.clamp(max=limit)
        position = position.masked_fill(position >= limit, -1)
        source = source[: int(offsets[-1])].long()
        rows = received.x[source // max(top_k, 1)]
        graph = None if recompute else _graph(rows, offsets, experts, gate)
        y = _rows(rows, offsets, experts, gate) if graph is None else graph.y.detach()
        return Computed(y, position, (rows,) if recompute else (), (source, offsets, graph))

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
        source, offsets, graph = state
        if graph is None:
            (rows,) = kept
            assert rows is not None
            graph = _graph(rows, offsets, experts, gate)
        d_rows = grad[source // max(received.ids.shape[1], 1)]
        precision = torch.promote_types(grad.dtype, torch.float32)
        weights = received.weights.flatten()[source].to(precision)
        router = None
        if needs.router:
            router = torch.zeros_like(received.weights)
            products = (graph.y.detach().to(precision) * d_rows.to(precision)).sum(-1)
            router.view(-1)[source] = products.to(router.dtype)
        d_y = (d_rows.to(precision) * weights.unsqueeze(-1)).to(grad.dtype)
        x_rows, *found = torch.autograd.grad(graph.y, graph.leaves, d_y, retain_graph=True, allow_unused=True)
        names = ("gate_up", "down", "gate_up_bias", "down_bias")
        present = iter(found)
        gradients = {name: None if getattr(experts, name) is None else next(present) for name in names}
        for name in names:
            main = getattr(main_grads, name)
            if main is not None and gradients[name] is not None and getattr(needs, name):
                main += gradients[name]
            if main is not None or not getattr(needs, name):
                gradients[name] = None
        return RowGradients(x_rows if needs.x else None, router, **gradients)


@dataclass(frozen=True, slots=True)
class _Graph:
    """``y`` with the graph that leads to it from ``leaves``: the rows, and the weights there are."""

    y: Tensor
    leaves: tuple[Tensor, ...]


def _graph(rows: Tensor, offsets: Tensor, experts: ExpertWeights, gate: Gate) -> _Graph:
    # What it saves stays as it is: hooks of activation checkpointing would run the whole region again for it alone.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged):
        x = rows.detach().requires_grad_()
        tensors = (experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias)
        leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in tensors]
        assert leaves[0] is not None and leaves[1] is not None
        y = _rows(x, offsets, ExpertWeights(leaves[0], leaves[1], leaves[2], leaves[3]), gate)
    return _Graph(y, (x, *(leaf for leaf in leaves if leaf is not None)))


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _rows(rows: Tensor, offsets: Tensor, experts: ExpertWeights, gate: Gate) -> Tensor:
    return TorchBackend().grouped(rows, offsets, experts, gate)
