"""Checks of ``capture`` that hold on every device: replays against the same work done eagerly, bit for bit.

The stand-in's tests and those on a GPU run the same functions. Each raises AssertionError.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor, nn

from tessera_rt.cuda_graphs.capture import capture
from tessera_rt.testing.graphs_models import CapacityMoE, Target, Training, differing, room_for_all


def check_module(target: Target, module: nn.Module, shape: Sequence[int], *, steps: int, scale: float = 1.0) -> None:
    """Forward and backward of a captured module with new values at every step (so with other routing)."""
    eager = copy.deepcopy(module)
    layer = capture(module, (target.random(*shape, requires_grad=True),), device=target.graphs)
    _equal(dict(layer.named_buffers()), dict(eager.named_buffers()), "buffers after the capture")
    for step in range(steps):
        x, grad = scale * target.random(*shape), target.random(*shape)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        one, other = layer(ours), eager(theirs)
        one.backward(grad)
        other.backward(grad)
        _equal({"y": one, "dx": _grad(ours)}, {"y": other, "dx": _grad(theirs)}, f"step {step}")
        _equal(_grads(layer), _grads(eager), f"gradients of step {step}")
        _equal(layer.state_dict(), eager.state_dict(), f"buffers of step {step}")
        if step % 4 == 3:  # gradients add up over four micro-batches
            layer.zero_grad(set_to_none=True)
            eager.zero_grad(set_to_none=True)


def check_slots(target: Target, module: nn.Module, shape: Sequence[int]) -> None:
    """Two forwards under way: backwards in the order of the forwards, and against it."""
    eager = copy.deepcopy(module)
    layer = capture(module, (target.random(*shape, requires_grad=True),), slots=2, device=target.graphs)
    for order in ((0, 1), (1, 0), (0, 1)):
        xs = [target.random(*shape) for _ in range(2)]
        ours, theirs = ([x.clone().requires_grad_() for x in xs] for _ in range(2))
        one, other = [layer(x) for x in ours], [eager(x) for x in theirs]
        for number in order:
            one[number].square().sum().backward()
            other[number].square().sum().backward()
        for number in range(2):
            _equal({"y": one[number], "dx": _grad(ours[number])}, {"y": other[number], "dx": _grad(theirs[number])}, "")
        _equal(_grads(layer), _grads(eager), f"gradients in order {order}")


def check_training_step(target: Target, model: nn.Module, shape: Sequence[int], *, steps: int) -> None:
    """A whole step: micro-batches, optimizer, another learning rate every time, gradients dropped between steps."""
    ours = Training.of(model)
    ours.step(*_batch(target, shape))
    theirs = ours.twin()
    step = capture(ours.step, _batch(target, shape), state=(ours.model, ours.optimizer), device=target.graphs)
    _equal(ours.values(), theirs.values(), "values after the capture")
    for number in range(steps):
        batch = _batch(target, shape)
        for training in (ours, theirs):
            training.lr.fill_(0.01 / (1 + number))
        _equal({"loss": step(*batch)}, {"loss": theirs.step(*batch)}, f"step {number}")
        _equal(ours.values(), theirs.values(), f"values after step {number}")
        if number % 2:
            ours.optimizer.zero_grad(set_to_none=True)
            theirs.optimizer.zero_grad(set_to_none=True)


def check_accumulation(target: Target, model: nn.Module, shape: Sequence[int], *, set_to_none: bool) -> None:
    """A captured micro-batch that adds to gradients; optimizer steps between, eagerly."""
    ours = Training.of(model)
    ours.step(*_batch(target, shape))
    theirs = ours.twin()
    micro = tuple(part[0] for part in _batch(target, shape))
    parameters = tuple(ours.model.parameters())
    buffers = tuple(ours.model.buffers())
    accumulate = capture(ours.accumulate, micro, state=buffers, parameters=parameters, device=target.graphs)
    _equal(ours.values(), theirs.values(), "values after the capture")
    for number in range(3):
        for training in (ours, theirs):
            training.optimizer.zero_grad(set_to_none=set_to_none)
        batch = _batch(target, shape)
        for x, y in zip(*(part.unbind(0) for part in batch), strict=True):
            if number == 1:  # gradients may be other tensors at every call
                for parameter in (*parameters, *theirs.model.parameters()):
                    parameter.grad = None if parameter.grad is None else parameter.grad * 0.5
            _equal({"loss": accumulate(x, y)}, {"loss": theirs.accumulate(x, y)}, "micro-batch")
            _equal(ours.values(), theirs.values(), "gradients so far")
        for training in (ours, theirs):
            training.optimizer.step()
        _equal(ours.values(), theirs.values(), f"values after step {number}")


def check_overflow_step(target: Target, model: nn.Module, moe: CapacityMoE, shape: Sequence[int], steps: int) -> None:
    """Steps whose tokens exceed the capacity of ``moe`` are done again eagerly; all equal steps without a capacity."""
    ours = Training.of(model)
    with room_for_all(model):
        ours.step(*_batch(target, shape))
    theirs = ours.twin()
    redone: list[int] = []

    def eager(inputs: Tensor, targets: Tensor) -> Tensor:
        redone.append(number)
        with room_for_all(model):
            return ours.step(inputs, targets)

    step = capture(
        ours.step, _batch(target, shape), state=(ours.model, ours.optimizer),
        overflow=moe.overflow, eager=eager, device=target.graphs,
    )  # fmt: skip
    for number in range(steps):
        batch = _batch(target, shape)
        ours.lr.fill_(0.01 / (1 + number))
        theirs.lr.copy_(ours.lr)
        with room_for_all(theirs.model):
            _equal({"loss": step(*batch)}, {"loss": theirs.step(*batch)}, f"step {number}")
        _equal(ours.values(), theirs.values(), f"values after step {number}")
    assert 0 < len(redone) < steps, f"steps done again: {redone} of {steps}"


def check_overflow_accumulation(target: Target, model: nn.Module, moe: CapacityMoE, shape: Sequence[int]) -> None:
    """The same for micro-batches that add to gradients: those of the micro-batches before are not lost."""
    ours = Training.of(model)
    theirs = ours.twin()
    redone: list[int] = []

    def eager(x: Tensor, y: Tensor) -> Tensor:
        redone.append(len(redone))
        with room_for_all(model):
            return ours.accumulate(x, y)

    count, micro = shape[0], tuple(part[0] for part in _batch(target, shape))
    accumulate = capture(
        ours.accumulate, micro, state=tuple(model.buffers()), parameters=tuple(model.parameters()),
        overflow=moe.overflow, eager=eager, device=target.graphs,
    )  # fmt: skip
    for x, y in zip(*(part.unbind(0) for part in _batch(target, shape)), strict=True):
        with room_for_all(theirs.model):
            _equal({"loss": accumulate(x, y)}, {"loss": theirs.accumulate(x, y)}, "micro-batch")
        _equal(ours.values(), theirs.values(), "gradients so far")
    assert 0 < len(redone) < count, f"{len(redone)} of {count} micro-batches done again"


def check_overflow_module(target: Target, moe: CapacityMoE, shape: Sequence[int], *, calls: int) -> None:
    """The same for single calls of a captured layer, with their backward."""
    eager = copy.deepcopy(moe)
    redone: list[int] = []

    def exact(x: Tensor) -> Tensor:
        redone.append(number)
        with room_for_all(moe):
            out: Tensor = moe(x)
            return out

    layer = capture(
        moe, (target.random(*shape, requires_grad=True),), overflow=moe.overflow, eager=exact, device=target.graphs
    )
    for number in range(calls):
        x, grad = target.random(*shape), target.random(*shape)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        one = layer(ours)
        with room_for_all(eager):
            other = eager(theirs)
        one.backward(grad)
        other.backward(grad)
        _equal({"y": one, "dx": _grad(ours)}, {"y": other, "dx": _grad(theirs)}, f"call {number}")
        _equal(_grads(layer), _grads(eager), f"gradients of call {number}")
        _equal(layer.state_dict(), eager.state_dict(), f"buffers of call {number}")
    assert 0 < len(redone) < calls, f"calls done again: {redone} of {calls}"


def _batch(target: Target, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    return target.random(*shape), target.random(*shape)


def _grads(module: nn.Module) -> dict[str, Tensor]:
    return {name: _grad(parameter) for name, parameter in module.named_parameters()}


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _equal(one: dict[str, Tensor], other: dict[str, Tensor], what: str) -> None:
    different = differing(one, other)
    assert not different, f"{what}: {', '.join(different)} differ"
    for name, value in one.items():
        assert not value.is_floating_point() or bool(value.isfinite().all()), f"{what}: {name} is not finite"
