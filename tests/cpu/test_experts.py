"""Experts with deferrable weight gradients, shared experts, the dense feed-forward, against loops over rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tessera_rt.kernels.options import Activation, Gate, RouterRule
from tessera_rt.moe.backends import grouped_experts
from tessera_rt.moe.config import MoEConfig
from tessera_rt.moe.experts import DenseFeedForward, Experts, SharedExpert, activate
from tessera_rt.split import PendingGrad, accumulate
from tessera_rt.testing.moe_loops import activated_by_loop, expert_by_loop

CONFIG = MoEConfig(hidden=8, intermediate=6, experts=4, router=RouterRule(top_k=2), shared_intermediate=5)
GATES = {
    "swiglu": Gate(),
    "clamped": Gate(activation=Activation.SWIGLU_CLAMPED, limit=0.5),
    "oss": Gate(activation=Activation.SWIGLU_OSS, interleaved=True, limit=0.6),
    "geglu": Gate(activation=Activation.GEGLU),
    "geglu tanh": Gate(activation=Activation.GEGLU_TANH),
    "relu2": Gate(activation=Activation.RELU2),
}


def double(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def filled(module: nn.Module) -> nn.Module:
    for i, parameter in enumerate(module.parameters()):
        parameter.data.copy_(double(*parameter.shape, seed=10 + i))
    return module


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("counts", [[5, 0, 3, 0], [0, 0, 0, 0], [1, 2, 3, 4]])
def test_experts_equal_a_loop_over_rows(gate: str, bias: bool, counts: list[int]) -> None:
    config = replace(CONFIG, gate=GATES[gate], expert_bias=bias)
    experts = filled(Experts(4, config, dtype=torch.float64))
    offsets = [sum(counts[:e]) for e in range(5)]
    rows = double(sum(counts), 8)
    leaf, expected_leaf, parameters = (
        rows.clone().requires_grad_(),
        rows.clone().requires_grad_(),
        [*experts.parameters()],
    )
    expert_of = [e for e, count in enumerate(counts) for _ in range(count)]
    done = [
        expert_by_loop(row, e, experts.weights, config.gate) for row, e in zip(expected_leaf, expert_of, strict=True)
    ]
    out, expected = experts(leaf, offsets), torch.stack(done) if done else expected_leaf * 0
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(out.square().sum(), [leaf, *parameters])
    wanted = torch.autograd.grad(expected.square().sum(), [expected_leaf, *parameters], allow_unused=True)
    for gradient, of_loop in zip(gradients, wanted, strict=True):  # exact zeros, not None, also where nothing came
        of_loop = torch.zeros_like(gradient) if of_loop is None else of_loop
        torch.testing.assert_close(gradient, of_loop, rtol=1e-11, atol=1e-11)
    for gradient in gradients[1:]:
        assert all((gradient[e] == 0).all() for e in range(4) if counts[e] == 0)


@pytest.mark.parametrize("gate", GATES)
def test_both_forms_of_the_experts_agree(gate: str) -> None:
    """The form with deferrable gradients, and the backend's."""
    experts = filled(Experts(4, replace(CONFIG, gate=GATES[gate], expert_bias=True), dtype=torch.float64))
    rows, offsets = double(8, 8).requires_grad_(), (0, 5, 5, 7, 8)
    results = []
    for out in (experts(rows, offsets), grouped_experts(rows, torch.tensor(offsets), experts.weights, experts.gate)):
        results.append((out, *torch.autograd.grad(out.square().sum(), [rows, *experts.parameters()])))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class Accumulating:
    """Runs W at once, into buffers that start at zero."""

    def __init__(self, module: nn.Module) -> None:
        self.buffers = {parameter: torch.zeros_like(parameter) for parameter in module.parameters()}

    def defer(self, pending: PendingGrad) -> None:
        accumulate(pending, self.buffers[pending.weight])


def test_deferred_gradients_equal_those_of_full_backward() -> None:
    experts, rows, offsets = (
        filled(Experts(4, replace(CONFIG, expert_bias=True), dtype=torch.float64)),
        double(8, 8),
        (0, 5, 5, 8, 8),
    )
    experts(rows, offsets).square().sum().backward()
    whole = {name: p.grad for name, p in experts.named_parameters()}
    experts.zero_grad(set_to_none=True)
    sink = Accumulating(experts)
    experts.gate_up.sink = experts.down.sink = sink
    experts(rows.requires_grad_(), offsets).square().sum().backward()
    for name, parameter in experts.named_parameters():
        deferred = name.endswith("weight")  # a bias gets its gradient in backward
        assert (parameter.grad is None) == deferred
        torch.testing.assert_close(
            sink.buffers[parameter] if deferred else parameter.grad, whole[name], rtol=1e-13, atol=0
        )


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("gated", [True, False])
def test_shared_expert_equals_the_formula(gate: str, gated: bool) -> None:
    config = replace(CONFIG, gate=GATES[gate], shared_gated=gated)
    shared, x = filled(SharedExpert(config, dtype=torch.float64)), double(3, 8)
    stacked = replace(GATES[gate], interleaved=False)
    expected = torch.stack([shared.down.weight @ activated_by_loop(shared.gate_up.weight @ row, stacked) for row in x])
    if gated:
        assert type(shared.gate) is nn.Linear  # its gradient is computed in B
        expected = expected / (1 + torch.exp(-(x @ shared.gate.weight.T)))
    torch.testing.assert_close(shared(x), expected, rtol=1e-12, atol=1e-12)
    assert (shared.gate is not None) == gated


def test_dense_feed_forward_has_biases_where_asked_and_takes_any_shape() -> None:
    dense, x = filled(DenseFeedForward(8, 6, Gate(), bias=True, dtype=torch.float64)), double(2, 3, 8)
    inner = functional.linear(x, dense.gate_up.weight, dense.gate_up.bias)
    expected = functional.linear(functional.silu(inner[..., :6]) * inner[..., 6:], dense.down.weight, dense.down.bias)
    torch.testing.assert_close(dense(x), expected, rtol=1e-12, atol=1e-12)
    assert sum(p.numel() for p in dense.parameters()) == 12 * 8 + 12 + 8 * 6 + 8
    assert dense(double(0, 3, 8)).shape == (0, 3, 8)


@pytest.mark.parametrize("gate", GATES)
def test_activations_pass_gradcheck(gate: str) -> None:
    assert torch.autograd.gradcheck(lambda x: activate(x, GATES[gate]), (double(3, 4).requires_grad_(),))
