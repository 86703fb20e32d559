"""``capture`` on a CUDA device: what tests/cpu/test_capture.py shows on the stand-in, with real graphs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tessera_rt
from tessera_rt.cuda_graphs.cuda import CudaDevice
from tessera_rt.errors import CaptureError
from tessera_rt.kernels.options import RouterRule
from tessera_rt.model_spec import AttentionKind
from tessera_rt.moe.config import MoEConfig
from tessera_rt.moe.layer import MoE
from tessera_rt.testing import graphs_checks as checks
from tessera_rt.testing.graphs_models import CapacityMoE, Decoder, Target, Training, differing

HIDDEN = 64


@pytest.fixture
def target() -> Iterator[Target]:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("torch's grouped products read the host below compute capability 9.0")
    torch.manual_seed(0)
    with sdpa_kernel(SDPBackend.MATH):  # the backward of the others is not deterministic
        yield Target(CudaDevice(), torch.device("cuda"), torch.bfloat16)


def capacity_moe(capacity: int | None = None, *, held: int = 8) -> CapacityMoE:
    return CapacityMoE(HIDDEN, 32, experts=8, held=held, top_k=2, capacity=capacity)


def library_moe() -> MoE:
    rule = RouterRule(top_k=2, renormalize=True)
    return MoE(MoEConfig(hidden=HIDDEN, intermediate=32, experts=8, router=rule), backend="triton")


def decoder(kind: AttentionKind, moe: nn.Module) -> Decoder:
    return Decoder(kind, moe, HIDDEN)


@pytest.mark.parametrize("make", [capacity_moe, library_moe])
def test_moe_layer(target: Target, make: Any) -> None:
    checks.check_module(target, target.place(make()), (256, HIDDEN), steps=12, scale=3.0)


@pytest.mark.parametrize("kind", [AttentionKind.SOFTMAX, AttentionKind.SLIDING, AttentionKind.GATED_DELTA_NET])
def test_decoder_layer(target: Target, kind: AttentionKind) -> None:
    checks.check_module(target, target.place(decoder(kind, library_moe())), (2, 48, HIDDEN), steps=6)


def test_slots(target: Target) -> None:
    checks.check_slots(target, target.place(decoder(AttentionKind.SOFTMAX, library_moe())), (1, 48, HIDDEN))


@pytest.mark.parametrize("kind", [AttentionKind.SOFTMAX, AttentionKind.GATED_DELTA_NET])
def test_training_step(target: Target, kind: AttentionKind) -> None:
    checks.check_training_step(target, target.place(decoder(kind, library_moe())), (3, 1, 48, HIDDEN), steps=6)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_over_micro_batches(target: Target, set_to_none: bool) -> None:
    model = target.place(decoder(AttentionKind.SOFTMAX, library_moe()))
    checks.check_accumulation(target, model, (3, 1, 48, HIDDEN), set_to_none=set_to_none)


def test_overflowing_steps_are_done_again(target: Target) -> None:
    moe = capacity_moe(19, held=4)
    model = target.place(decoder(AttentionKind.SOFTMAX, moe))
    checks.check_overflow_step(target, model, moe, (2, 2, 8, HIDDEN), steps=12)


def test_overflowing_calls_are_done_again(target: Target) -> None:
    checks.check_overflow_module(target, target.place(capacity_moe(15, held=4)), (16, HIDDEN), calls=16)


@pytest.mark.parametrize(
    ("function", "operation"),
    [
        (lambda x: x * x.sum().item(), "_local_scalar_dense"),
        (lambda x: x.sum(0).tolist(), "_to_copy"),
        (lambda x: x.cpu(), "_to_copy"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x + torch.tensor(1.0, device="cuda"), "_to_copy"),
        (lambda x: x + torch.rand(x.shape, device="cuda", generator=torch.Generator("cuda")), "generator"),
    ],
)
def test_host_reads_are_refused_by_name(function: Any, operation: str) -> None:
    with pytest.raises(CaptureError, match=operation):
        tessera_rt.capture(function, (torch.randn(3, 3, device="cuda"),))
    x = torch.randn(3, 3, device="cuda")
    assert torch.equal(tessera_rt.capture(torch.neg, (x,))(x), -x), "the device captures afterwards"


def test_what_only_the_device_refuses_is_a_capture_error() -> None:
    x = torch.randn(3, device="cuda")

    def function(x: Tensor) -> Tensor:
        torch.cuda.synchronize()
        return x * 2

    with pytest.raises(CaptureError, match="captur"):
        tessera_rt.capture(function, (x,))


def test_random_numbers_are_those_of_eager_code() -> None:
    ours = Training.of(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).cuda())
    batch = torch.randn(2, 3, 6, device="cuda"), torch.randn(2, 3, 6, device="cuda")
    ours.step(*batch)
    theirs, state = ours.twin(), torch.cuda.get_rng_state()
    step = tessera_rt.capture(ours.step, batch, state=(ours.model, ours.optimizer))
    assert torch.equal(torch.cuda.get_rng_state(), state)
    for _ in range(3):
        state = torch.cuda.get_rng_state()
        one = step(*batch)
        torch.cuda.set_rng_state(state)
        assert torch.equal(one, theirs.step(*batch))
        assert not differing(ours.values(), theirs.values())


def test_work_on_two_streams() -> None:
    side = torch.cuda.Stream()

    def function(x: Tensor) -> Tensor:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            double = x * 2
        triple = x * 3
        current.wait_stream(side)
        return double + triple

    captured = tessera_rt.capture(function, (torch.zeros(1000, device="cuda"),))
    for _ in range(3):
        x = torch.randn(1000, device="cuda")
        assert torch.equal(captured(x), x * 2 + x * 3)


def test_gradients_of_three_micro_batches_add_up() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).cuda()
    eager = copy.deepcopy(module)
    layer = tessera_rt.capture(module, (torch.randn(4, 8, device="cuda"),))
    for _ in range(3):
        for _ in range(3):
            x = torch.randn(4, 8, device="cuda")
            layer(x).square().sum().backward()
            eager(x).square().sum().backward()
        for mine, theirs in zip(module.parameters(), eager.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None and torch.equal(mine.grad, theirs.grad)
        module.zero_grad(set_to_none=True)
        eager.zero_grad(set_to_none=True)
