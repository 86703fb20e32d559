"""Captured layers and training steps on the stand-in: many replays, bit for bit those of eager code."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import tessera_rt
from tessera_rt.cuda_graphs.capture import capture
from tessera_rt.errors import CaptureError
from tessera_rt.kernels.options import RouterRule
from tessera_rt.model_spec import AttentionKind
from tessera_rt.moe.config import MoEConfig
from tessera_rt.moe.layer import MoE
from tessera_rt.testing import graphs_checks as checks
from tessera_rt.testing.graphs import StandInDevice
from tessera_rt.testing.graphs_models import CapacityMoE, Decoder, Target, Training, differing

HIDDEN = 32


@pytest.fixture
def target() -> Target:
    print("seed", torch.seed())
    return Target(StandInDevice(), torch.device("cpu"), torch.float32)


def moe(*, held: int = 8, capacity: int | None = None) -> CapacityMoE:
    return CapacityMoE(HIDDEN, 16, experts=8, held=held, top_k=2, capacity=capacity)


def decoder(kind: AttentionKind, *, held: int = 8, capacity: int | None = None) -> Decoder:
    return Decoder(kind, moe(held=held, capacity=capacity), HIDDEN)


def test_the_package_offers_it() -> None:
    assert tessera_rt.capture is capture


def test_the_example_of_the_documentation(target: Target) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "capture.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    training = Training.of(nn.Linear(4, 4))
    names: dict[str, Any] = {
        "tessera_rt": SimpleNamespace(capture=partial(capture, device=target.graphs)),
        "moe": nn.Linear(4, 4), "x": torch.randn(2, 4), "optimizer": training.optimizer,
        "model": training.model, "tokens": torch.randn(2, 3, 4), "labels": torch.randn(2, 3, 4),
        "loss_of": functional.mse_loss,
    }  # fmt: skip
    names["model"].layers = [SimpleNamespace() for _ in range(4)]
    exec(block, names)
    before = training.model.weight.detach().clone()
    names["step"](torch.randn(2, 3, 4), torch.randn(2, 3, 4))
    assert not torch.equal(training.model.weight, before)
    assert names["model"].layers[3].mlp(names["x"]).requires_grad


def test_moe_layer(target: Target) -> None:
    checks.check_module(target, target.place(moe()), (24, HIDDEN), steps=12, scale=3.0)


def triton_moe(hidden: int, **settings: Any) -> MoE:
    rule = RouterRule(top_k=2, renormalize=True)
    return MoE(MoEConfig(hidden=hidden, intermediate=16, experts=4, router=rule, **settings), backend="triton")


def test_moe_layer_of_triton_kernels(target: Target, interpreted: None) -> None:
    """The library's own layer: routing, placement and products in kernels, counts on the device."""
    checks.check_module(target, target.place(triton_moe(16)), (6, 16), steps=3)
    names = {name for graph in target.graphs.graphs for name in graph.names()}
    assert {"triton.place_kernel", "triton.rows_gemm_aligned", "triton.wgrad_aligned"} <= names, names


@pytest.mark.parametrize("kind", [AttentionKind.SOFTMAX, AttentionKind.SLIDING, AttentionKind.GATED_DELTA_NET])
def test_decoder_layer(target: Target, kind: AttentionKind) -> None:
    checks.check_module(target, target.place(decoder(kind)), (2, 7, HIDDEN), steps=6)


def test_slots(target: Target) -> None:
    checks.check_slots(target, target.place(decoder(AttentionKind.SOFTMAX)), (1, 6, HIDDEN))


@pytest.mark.parametrize("kind", [AttentionKind.SOFTMAX, AttentionKind.GATED_DELTA_NET])
def test_training_step(target: Target, kind: AttentionKind) -> None:
    checks.check_training_step(target, target.place(decoder(kind)), (3, 1, 6, HIDDEN), steps=6)


@pytest.mark.slow
def test_training_step_of_triton_kernels(target: Target, interpreted: None) -> None:
    model = target.place(Decoder(AttentionKind.GATED_DELTA_NET, triton_moe(16, shared_intermediate=8), 16))
    checks.check_training_step(target, model, (2, 1, 5, 16), steps=2)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_over_micro_batches(target: Target, set_to_none: bool) -> None:
    model = target.place(decoder(AttentionKind.SOFTMAX))
    checks.check_accumulation(target, model, (3, 1, 6, HIDDEN), set_to_none=set_to_none)


def seeded(seed: int) -> Target:
    """Which calls overflow depends on the seed."""
    torch.manual_seed(seed)
    return Target(StandInDevice(), torch.device("cpu"), torch.float32)


def test_overflowing_steps_are_done_again() -> None:
    target = seeded(1)
    model = target.place(decoder(AttentionKind.SOFTMAX, held=4, capacity=19))
    checks.check_overflow_step(target, model, model.moe, (2, 2, 8, HIDDEN), steps=8)


def test_overflowing_micro_batches_are_done_again() -> None:
    target = seeded(4)
    model = target.place(decoder(AttentionKind.SOFTMAX, held=4, capacity=15))
    checks.check_overflow_accumulation(target, model, model.moe, (8, 2, 8, HIDDEN))


def test_overflowing_calls_are_done_again() -> None:
    target = seeded(2)
    checks.check_overflow_module(target, target.place(moe(held=4, capacity=14)), (16, HIDDEN), calls=8)


def test_ranks_agree_on_overflow_and_an_eager_overflow_is_an_error(target: Target) -> None:
    layer = target.place(moe(held=4, capacity=1))
    seen: list[int] = []
    x = target.random(16, HIDDEN)
    captured = capture(
        layer, (x,), overflow=layer.overflow, agree=lambda word: seen.append(int(word)), device=target.graphs
    )
    with pytest.raises(CaptureError, match="overflow = 'set by the eager run too'.*pass eager="):
        captured(x)
    assert seen == [1, 1], "asked after the replay and after the eager run"
    roomy = target.place(moe(held=4))

    def other_rank_overflowed(word: Tensor) -> None:
        if not seen:
            word.fill_(1)
        seen.append(int(word))

    seen.clear()
    eager = copy.deepcopy(roomy)
    captured = capture(roomy, (x,), overflow=roomy.overflow, agree=other_rank_overflowed, device=target.graphs)
    assert torch.equal(captured(x), eager(x)) and seen == [1, 0]
    assert torch.equal(roomy.counts, eager.counts), "counted once, although it ran twice"


# -- case 83: static gradients, their accumulation and their order ----------------------------------------------------


class Unordered(nn.Module):
    """Three weights of one shape, used in another order than that of their names; one is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.second, self.frozen = (nn.Parameter(torch.randn(5, 5)) for _ in range(4))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = ((x @ self.second).tanh() @ self.first) @ self.frozen
        return h * y, h.argmax(-1), (self.second * 2).sum()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_three_micro_batches_add_up(target: Target, set_to_none: bool) -> None:
    module = Unordered()
    eager = copy.deepcopy(module)
    layer = capture(module, (torch.randn(4, 5), torch.randn(4, 5)), device=target.graphs)
    for _ in range(3):
        kept = []
        for _ in range(3):
            x, y = torch.randn(4, 5), torch.randn(4, 5)
            one, other = layer(x, y), eager(x, y)
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
            for outputs in (one, other):
                (outputs[0].sum() + outputs[2] * x[0, 0]).backward()
            assert module.first.grad is not None
            kept.append((module.first.grad, module.first.grad.clone()))
        for name in ("first", "second"):
            assert torch.equal(getattr(module, name).grad, getattr(eager, name).grad)
        assert module.unused.grad is None and module.frozen.grad is None
        assert all(grad is kept[0][0] for grad, _ in kept), "one tensor, to which backwards add"
        for m in (module, eager):
            m.zero_grad(set_to_none=set_to_none)
        if set_to_none:
            assert torch.equal(*kept[-1]), "what a user keeps is no buffer of the graph"


def accumulate_only(training: Training, x: Tensor, y: Tensor) -> Tensor:
    return training.accumulate(x, y)


def drop_first(training: Training, x: Tensor, y: Tensor) -> Tensor:
    training.optimizer.zero_grad(set_to_none=True)
    loss = training.accumulate(x, y)
    training.optimizer.step()
    return loss


def zero_first(training: Training, x: Tensor, y: Tensor) -> Tensor:
    training.optimizer.zero_grad(set_to_none=False)
    loss = training.accumulate(x, y)
    training.optimizer.step()
    return loss


def drop_last(training: Training, x: Tensor, y: Tensor) -> Tensor:
    loss = training.accumulate(x, y)
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=True)
    return loss


def step_on_the_gradients_of_before(training: Training, x: Tensor, y: Tensor) -> Tensor:
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=True)
    return training.accumulate(x, y)


BETWEEN: dict[str, Callable[[Training], object]] = {
    "nothing": lambda t: None,
    "drop": lambda t: t.optimizer.zero_grad(set_to_none=True),
    "zero": lambda t: t.optimizer.zero_grad(set_to_none=False),
    "step": lambda t: t.optimizer.step(),
    "eager micro-batch": lambda t: t.accumulate(torch.ones(2, 3), torch.zeros(2, 3)),
    "clip": lambda t: nn.utils.clip_grad_norm_(t.model.parameters(), 0.1),
    "learning rate": lambda t: t.lr.mul_(0.9),
    "other gradients": lambda t: [setattr(p, "grad", torch.full_like(p, 0.5)) for p in t.model.parameters()],
    "one gradient": lambda t: setattr(next(t.model.parameters()), "grad", None),
}


class Partly(nn.Module):
    """Uses two of its three parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


FUNCTIONS = [accumulate_only, drop_first, zero_first, drop_last, step_on_the_gradients_of_before]
BETWEEN_CALLS = st.lists(st.lists(st.sampled_from(sorted(BETWEEN)), max_size=3), min_size=1, max_size=5)


@pytest.mark.parametrize("function", FUNCTIONS)
@settings(max_examples=15)
@given(between=BETWEEN_CALLS)
def test_whatever_happens_to_gradients_between_calls(
    function: Callable[[Training, Tensor, Tensor], Tensor], between: list[list[str]]
) -> None:
    """Eager code and captured code, with the same things done to both between the calls."""
    for ours, theirs, call in calls_between(nn.Linear(3, 3), function, between):
        missing = [parameter.grad is None for parameter in ours.model.parameters()]
        if function is step_on_the_gradients_of_before and any(missing):
            # An optimizer leaves a parameter without gradient alone; the graph has one that does not.
            with pytest.raises(CaptureError, match=f"gradient {missing.index(True)} = 'missing': must be there"):
                call()
            return
        one, other = call()
        assert torch.equal(one, other) and not differing(ours.values(), theirs.values())


@pytest.mark.filterwarnings("ignore:capture of:tessera_rt.cuda_graphs.fallback.CaptureWarning")
@pytest.mark.parametrize("function", FUNCTIONS)
@settings(max_examples=10)
@given(between=BETWEEN_CALLS)
def test_gradients_that_are_never_made(
    function: Callable[[Training, Tensor, Tensor], Tensor], between: list[list[str]]
) -> None:
    """Optimizers leave parameters without gradient alone. What a graph cannot follow, it leaves to eager code."""
    for ours, theirs, call in calls_between(Partly(), function, between, fallback="eager"):
        one, other = call()
        assert torch.equal(one, other) and not differing(ours.values(), theirs.values())


def calls_between(
    model: nn.Module, function: Callable[[Training, Tensor, Tensor], Tensor], between: list[list[str]], **how: Any
) -> Iterator[tuple[Training, Training, Callable[[], tuple[Tensor, Tensor]]]]:
    """Captured training, eager training, and a call of both; before each, what ``between`` names is done to both."""
    ours = Training.of(model)
    ours.step(torch.randn(1, 2, 3), torch.randn(1, 2, 3))
    theirs, example = ours.twin(), (torch.zeros(2, 3), torch.zeros(2, 3))
    device = StandInDevice()
    captured = capture(partial(function, ours), example, state=(ours.model, ours.optimizer), device=device, **how)
    for actions in between:
        for action in actions:
            BETWEEN[action](ours)
            BETWEEN[action](theirs)
        x, y = torch.randn(2, 3), torch.randn(2, 3)
        yield ours, theirs, lambda: (captured(x, y), function(theirs, x, y))  # noqa: B023


def test_streams_inside_a_function(target: Target) -> None:
    device = target.graphs
    assert isinstance(device, StandInDevice)

    def two_streams(join: bool, x: Tensor) -> Tensor:
        side, current = device.new_stream(), device.current_stream()
        side.wait_stream(current)
        with device.on(side):
            y = x * 2
        z = x * 3
        if join:
            current.wait_stream(side)
            return y + z
        return z

    captured = capture(partial(two_streams, True), (torch.zeros(3),), device=device)
    x = torch.randn(3)
    assert torch.equal(captured(x), x * 2 + x * 3)
    with pytest.raises(CaptureError, match=r"was not joined: nothing waits for its aten\.mul"):
        capture(partial(two_streams, False), (torch.zeros(3),), device=device)

    def waits(x: Tensor) -> Tensor:
        device.synchronize()
        return x * 2

    with pytest.raises(CaptureError, match="synchronize of the device is not permitted while a stream captures"):
        capture(waits, (torch.zeros(3),), device=device)


def test_what_leaves_a_slot_is_a_copy(target: Target) -> None:
    layer = capture(nn.Linear(4, 4), (torch.randn(2, 4, requires_grad=True),), device=target.graphs)
    kept = []
    for _ in range(3):
        x = torch.randn(2, 4, requires_grad=True)
        y = layer(x)
        found = (y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]))
        kept += [(tensor, tensor.detach().clone()) for tensor in found]
    assert all(torch.equal(tensor, values) for tensor, values in kept)


def test_outputs_that_get_no_gradient_count_as_zero(target: Target) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, x.exp()

    layer = capture(Two(), (torch.randn(3, requires_grad=True),), device=target.graphs)
    for used in (0, 1, 0):
        x = torch.randn(3, requires_grad=True)
        layer(x)[used].sum().backward()
        assert x.grad is not None and torch.equal(x.grad, torch.full((3,), 2.0) if used == 0 else x.detach().exp())


def test_under_autocast_every_slot_casts_the_weights_of_now(target: Target) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    eager = copy.deepcopy(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer = capture(module, (torch.randn(2, 4),), slots=2, device=target.graphs)
    # With its cache, eager code would share one cast, and round the sum of both gradients through it.
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        for _ in range(3):
            xs = [torch.randn(2, 4) for _ in range(2)]
            one, other = [layer(x) for x in xs], [eager(x) for x in xs]
            assert all(torch.equal(a, b) and a.dtype == torch.bfloat16 for a, b in zip(one, other, strict=True))
            for outputs in (one, other):
                sum(y.float().sum() for y in outputs).backward()
            for mine, theirs in zip(module.parameters(), eager.parameters(), strict=True):
                assert mine.grad is not None and theirs.grad is not None and torch.equal(mine.grad, theirs.grad)
                for parameter in (mine, theirs):
                    parameter.data -= 0.1 * parameter.grad


def test_random_numbers_are_those_of_eager_code(target: Target) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
    ours = Training.of(model)
    batch = torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    ours.step(*batch)
    theirs, state = ours.twin(), torch.get_rng_state()
    step = capture(ours.step, batch, state=(ours.model, ours.optimizer), device=target.graphs)
    assert torch.equal(torch.get_rng_state(), state), "warm-up and capture draw nothing"
    for _ in range(3):
        state = torch.get_rng_state()
        one = step(*batch)
        torch.set_rng_state(state)
        assert torch.equal(one, theirs.step(*batch))
        assert not differing(ours.values(), theirs.values())


def test_a_generator_that_is_named(target: Target) -> None:
    generator = torch.Generator().manual_seed(5)
    captured = capture(
        lambda x: x + torch.rand(x.shape, generator=generator), (torch.zeros(4),),
        generators=(generator,), device=target.graphs,
    )  # fmt: skip
    same = torch.Generator().manual_seed(5)
    assert all(torch.equal(captured(torch.zeros(4)), torch.rand(4, generator=same)) for _ in range(3))
