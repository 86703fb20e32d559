"""Experts and shared experts against one matrix product per row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tessera_rt.errors import SpecError
from tessera_rt.model_spec import Activation, FeedForward, FeedForwardKind
from tessera_rt.moe.experts import DenseFeedForward, Experts, SharedExpert, activate
from tessera_rt.split import PendingGrad, accumulate

SPEC = FeedForward(kind=FeedForwardKind.MOE, intermediate=6, experts=4, top_k=2, shared_intermediate=5)
RUNNABLE = [Activation.SWIGLU, Activation.GEGLU, Activation.RELU2]


def double(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def filled(module: nn.Module) -> nn.Module:
    for i, parameter in enumerate(module.parameters()):
        parameter.data.copy_(double(*parameter.shape, seed=10 + i))
    return module


def row_by_hand(activation: Activation, gate_up: Tensor, down: Tensor, row: Tensor) -> Tensor:
    """One row [H] through [2 I or I, H] and [H, I]."""
    inner = gate_up @ row
    if activation is Activation.RELU2:
        return down @ torch.where(inner > 0, inner * inner, 0.0)
    gate, up = inner[: len(inner) // 2], inner[len(inner) // 2 :]
    if activation is Activation.SWIGLU:
        return down @ (gate / (1 + torch.exp(-gate)) * up)
    return down @ (gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * up)


@pytest.mark.parametrize("activation", RUNNABLE)
@pytest.mark.parametrize("counts", [[5, 0, 3, 0], [0, 0, 0, 0], [1, 2, 3, 4]])
def test_experts_equal_a_loop_over_rows(activation: Activation, counts: list[int]) -> None:
    experts = filled(Experts(4, 8, replace(SPEC, activation=activation), dtype=torch.float64))
    offsets = [sum(counts[:e]) for e in range(5)]
    rows = double(sum(counts), 8)
    expert_of = [e for e, count in enumerate(counts) for _ in range(count)]

    def by_hand(rows: Tensor) -> Tensor:
        weights = [(experts.gate_up.weight[e], experts.down.weight[e]) for e in expert_of]
        done = [row_by_hand(activation, *weight, row) for weight, row in zip(weights, rows, strict=True)]
        return torch.stack(done) if done else rows

    leaf, expected_leaf = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    out, expected = experts(leaf, offsets), by_hand(expected_leaf)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    out.square().sum().backward()
    gradients = [experts.gate_up.weight.grad, experts.down.weight.grad]
    experts.zero_grad()
    expected.square().sum().backward()
    torch.testing.assert_close(leaf.grad, expected_leaf.grad, rtol=1e-11, atol=1e-11)
    for gradient, weight in zip(gradients, (experts.gate_up.weight, experts.down.weight), strict=True):
        assert gradient is not None  # exact zeros, not None, also where nothing was routed
        expected_gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-11)
        assert all(torch.equal(gradient[e], torch.zeros_like(gradient[e])) for e in range(4) if counts[e] == 0)


class Accumulating:
    """Runs W at once, into buffers that start at zero."""

    def __init__(self, module: nn.Module) -> None:
        self.buffers = {parameter: torch.zeros_like(parameter) for parameter in module.parameters()}

    def defer(self, pending: PendingGrad) -> None:
        accumulate(pending, self.buffers[pending.weight])


def test_deferred_gradients_equal_those_of_full_backward() -> None:
    experts, rows, offsets = filled(Experts(4, 8, SPEC, dtype=torch.float64)), double(8, 8), (0, 5, 5, 8, 8)
    experts(rows, offsets).square().sum().backward()
    sink = Accumulating(experts)
    experts.gate_up.sink = experts.down.sink = sink
    experts(rows.requires_grad_(), offsets).square().sum().backward()
    for weight in (experts.gate_up.weight, experts.down.weight):
        torch.testing.assert_close(sink.buffers[weight], weight.grad, rtol=1e-13, atol=0)


@pytest.mark.parametrize("activation", RUNNABLE)
@pytest.mark.parametrize("gated", [True, False])
def test_shared_expert_equals_the_formula(activation: Activation, gated: bool) -> None:
    spec = replace(SPEC, activation=activation, shared_gated=gated)
    shared, x = filled(SharedExpert(8, spec, dtype=torch.float64)), double(3, 8)
    expected = torch.stack([row_by_hand(activation, shared.gate_up.weight, shared.down.weight, row) for row in x])
    if gated:
        assert shared.gate is not None and type(shared.gate) is nn.Linear  # its gradient is computed in B
        expected = expected / (1 + torch.exp(-(x @ shared.gate.weight.T)))
    torch.testing.assert_close(shared(x), expected, rtol=1e-12, atol=1e-12)
    assert (shared.gate is not None) == gated


def test_dense_feed_forward_has_biases_where_asked() -> None:
    dense, x = filled(DenseFeedForward(8, 6, Activation.SWIGLU, bias=True, dtype=torch.float64)), double(2, 3, 8)
    inner = functional.linear(x, dense.gate_up.weight, dense.gate_up.bias)
    expected = functional.linear(functional.silu(inner[..., :6]) * inner[..., 6:], dense.down.weight, dense.down.bias)
    torch.testing.assert_close(dense(x), expected, rtol=1e-12, atol=1e-12)
    assert sum(p.numel() for p in dense.parameters()) == 12 * 8 + 12 + 8 * 6 + 8


@pytest.mark.parametrize("activation", RUNNABLE)
def test_activations_pass_gradcheck(activation: Activation) -> None:
    assert torch.autograd.gradcheck(lambda x: activate(activation, x), (double(3, 4).requires_grad_(),))


@pytest.mark.parametrize("activation", [Activation.SWIGLU_CLAMPED, Activation.SWIGLU_OSS])
def test_other_activations_are_refused_by_name(activation: Activation) -> None:
    with pytest.raises(SpecError, match=str(activation)):
        Experts(4, 8, replace(SPEC, activation=activation))
