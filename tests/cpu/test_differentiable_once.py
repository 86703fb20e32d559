"""Differentiating twice is an error wherever a function of ours has a backward of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tessera_rt.cuda_graphs.capture import capture
from tessera_rt.kernels.expert_mlp import expert_mlp
from tessera_rt.kernels.options import Gate
from tessera_rt.kernels.routing import route_rows
from tessera_rt.kernels.weights import ExpertWeights
from tessera_rt.split import grouped_linear, linear
from tessera_rt.testing.graphs import StandInDevice


def experts(x: Tensor, weight: Tensor) -> Tensor:
    weights = ExpertWeights(torch.cat([weight, weight]).unsqueeze(0), weight.unsqueeze(0))
    routed = route_rows(torch.zeros(x.shape[0], 1, dtype=torch.int32), 1)
    return expert_mlp(x, weights, routed, torch.ones(x.shape[0], 1), Gate())


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": linear,
    "grouped_linear": lambda x, weight: grouped_linear(x, weight.unsqueeze(0), (0, x.shape[0])),
    "expert_mlp": experts,
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("reduce", [Tensor.sum, lambda y: y.square().sum()], ids=["sum", "squares"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_penalty_on_gradients_is_refused_and_the_gradients_are_right(
    name: str, reduce: Callable[[Tensor], Tensor]
) -> None:
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    gradients = [
        torch.autograd.grad(reduce(FUNCTIONS[name](x, weight)), (x, weight), create_graph=create)
        for create in (False, True)
    ]
    assert all(torch.equal(once, again) for once, again in zip(*gradients, strict=True))
    for gradient in gradients[1]:
        with pytest.raises(RuntimeError, match="differentiable once"):
            (x.sum() + gradient.square().sum()).backward()


def test_a_captured_module_is_differentiable_once() -> None:
    layer = capture(nn.Linear(4, 4), (torch.randn(2, 4, requires_grad=True),), device=StandInDevice())
    x = torch.randn(2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    assert torch.equal(gradient, layer.weight.sum(0).expand(2, 4))
    with pytest.raises(RuntimeError, match="differentiable once"):
        gradient.square().sum().backward()
