"""A module with two graphs, forward and backward, in as many slots as passes are under way at once."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from tessera_rt.cuda_graphs.device import GraphDevice
from tessera_rt.cuda_graphs.fallback import Fallback
from tessera_rt.cuda_graphs.recording import autocast_problems, autocast_state, beside, copies
from tessera_rt.cuda_graphs.rules import DryRun
from tessera_rt.cuda_graphs.slot import Slot
from tessera_rt.cuda_graphs.state import State
from tessera_rt.cuda_graphs.watch import Source
from tessera_rt.differentiable_once import differentiable_once
from tessera_rt.errors import CaptureError, Problem

_WARM_UPS = 3  # torch's advice: libraries choose algorithms and allocate in the first calls
_IGNORED = "no_part_of_graphs"  # attribute of hooks that change nothing a graph could miss
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class CapturedModule(nn.Module):
    """Stands where ``original`` stood: same parameters, buffers, submodules, state dict and attributes.

    A forward replays the first slot that is free, and its backward frees it (as does dropping its outputs). What
    leaves it (outputs, gradients of inputs and parameters) is copied. Made by ``capture``. When arguments, state or
    settings at a call are not those that were captured, or no slot is free, it raises CaptureError, or without
    ``strict`` warns and runs eagerly.
    """

    def __init__(
        self,
        where: str,
        module: nn.Module,
        device: GraphDevice,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        slots: int,
        extra: Sequence[Source],
        generators: Sequence[torch.Generator],
        fallback: Fallback,
    ) -> None:
        super().__init__()
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[shared] = module.__dict__[shared]
        self.training = module.training
        self._original = (module,)  # in a tuple, so that it is no submodule
        self._where, self._device, self._fallback = where, device, fallback
        self._state = State(where, (module, *extra), ())
        drawn = (device.default_generator, *generators)
        self._buffers_only = State(where, tuple(module.buffers()), drawn)
        self._autocast = autocast_state(device.type)
        self._check_hooks()
        trained = tuple(p for p in module.parameters() if p.requires_grad) if torch.is_grad_enabled() else ()
        values = State(where, (*module.buffers(), *extra), drawn).save()
        stream = device.new_stream()
        try:
            self._slots = [Slot(where, number, device, args, kwargs, trained) for number in range(slots)]
            with beside(device, stream):
                self._warm_up(self._slots[0], drawn)
            for slot in self._slots:
                slot.capture(module, stream, generators)
        finally:
            values.restore()

    @property
    def original(self) -> nn.Module:
        """The module that was captured."""
        return self._original[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self._check()
            slot = self._free_slot()
            given = slot.inputs.load(args, kwargs)
        except CaptureError as error:
            return self._fallback.run(error, args, kwargs, stacklevel=4)  # behind two frames of nn.Module
        overflow = self._fallback.overflow
        if overflow is None:
            slot.replay_forward()
        else:
            values = self._buffers_only.save()
            overflow.clear()
            slot.replay_forward()
            if overflow.happened():
                values.restore()
                return self._fallback.redo(args, kwargs)
        if not (torch.is_grad_enabled() and slot.differentiable):
            return copies(slot.result(slot.outputs))
        flight = Flight(slot)
        surface = [tensor for tensor, buffer in zip(given, slot.inputs.tensors, strict=True) if buffer.requires_grad]
        return slot.result(_Replay.apply(flight, *surface, *slot.parameters))  # type: ignore[no-untyped-call]

    # -- standing where the original stood --------------------------------------------------------------------------

    def train(self, mode: bool = True) -> CapturedModule:
        super().train(mode)
        self.original.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.original.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.original._load_from_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_original")
            if original is None:
                raise
            return getattr(original[0], name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        problem = Problem("copy", "of a captured module", "of the module itself", "copy or pickle `.original`")
        raise CaptureError.of(self._where, [problem])

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        problems = autocast_problems(self._autocast, self._device.type)
        slot = self._slots[0]
        if torch.is_grad_enabled() and not slot.differentiable and any(p.requires_grad for p in self.parameters()):
            remedy = "capture with gradients enabled"
            problems.append(Problem("gradients", "enabled", "disabled, as captured", remedy))
        if problems:
            raise CaptureError.of(self._where, problems)
        self._state.check()
        self._check_hooks()

    def _check_hooks(self) -> None:
        remedy = "a replay would not call them; remove them, or register them on the captured module"
        problems = [
            Problem(f"{name or 'module'}.{kind.strip('_')}", f"{count} hooks", "empty", remedy)
            for name, module in self.original.named_modules()
            for kind in _HOOKS
            if (count := sum(not getattr(hook, _IGNORED, False) for hook in getattr(module, kind).values()))
        ]
        if problems:
            raise CaptureError.of(self._where, problems)

    def _free_slot(self) -> Slot:
        for slot in self._slots:
            if slot.flight is None or slot.flight() is None:
                return slot
        count = len(self._slots)
        remedy = "run a backward first, drop outputs that get none, or capture with more slots"
        raise CaptureError.of(self._where, [Problem("forwards under way", count + 1, f"at most {count} slots", remedy)])

    def _warm_up(self, slot: Slot, generators: Sequence[torch.Generator]) -> None:
        with DryRun(self._where, self._device.type, generators):
            changed = slot.inputs.changed_by(lambda: slot.run_once(self.original))
        if changed:
            problems = [Problem(name, "changed in place", "only read", "copy it first") for name in changed]
            raise CaptureError.of(self._where, problems)
        self._state.check()
        for _ in range(_WARM_UPS - 1):
            slot.run_once(self.original)


class Flight:
    """One forward whose backward is still to come. It occupies the slot as long as somebody could call that."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        slot.flight = weakref.ref(self)
        self._versions = [parameter._version for parameter in slot.parameters]

    def backward(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The slot's gradients of inputs and parameters (its own buffers). Raises CaptureError for a second call."""
        slot = self.slot
        if slot.flight is None or slot.flight() is not self:
            remedy = "the activations are overwritten by the first; use the original module for that"
            raise CaptureError.of(slot.where, [Problem("backward", "again", "once after a forward", remedy)])
        if [parameter._version for parameter in slot.parameters] != self._versions:
            remedy = "run all backwards before the optimizer step"
            problem = Problem("parameters", "changed between forward and backward", "the same in both", remedy)
            raise CaptureError.of(slot.where, [problem])
        slot.flight = None
        return slot.replay_backward(gradients)


class _Replay(torch.autograd.Function):
    """The replayed forward as a node of autograd; inputs are those that get gradients, then the parameters."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, *_surface: Tensor) -> tuple[Tensor, ...]:
        ctx.flight = flight
        ctx.set_materialize_grads(False)
        outputs = copies(flight.slot.outputs)
        ctx.mark_non_differentiable(
            *(out for out, grad in zip(outputs, flight.slot.output_gradients, strict=True) if grad is None)
        )
        return outputs

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        found = ctx.flight.backward(gradients)
        needed = ctx.needs_input_grad[1:]
        return (
            None,
            *(grad.clone() if grad is not None and n else None for grad, n in zip(found, needed, strict=True)),
        )
