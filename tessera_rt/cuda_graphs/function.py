"""One graph for a whole function: a training step, a part of one, or anything that needs no gradient from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tessera_rt.cuda_graphs.device import GraphDevice
from tessera_rt.cuda_graphs.fallback import Fallback
from tessera_rt.cuda_graphs.gradients import Gradients, Left, Use, use_of_gradients
from tessera_rt.cuda_graphs.inputs import Inputs
from tessera_rt.cuda_graphs.recording import autocast_problems, autocast_state, beside, copies, record
from tessera_rt.cuda_graphs.rules import DryRun
from tessera_rt.cuda_graphs.state import State
from tessera_rt.errors import CaptureError, Problem


class CapturedFunction:
    """Callable like the function; every call is one replay. Made by ``capture``; outputs are copies.

    When arguments, state or settings at a call are not those that were captured, it raises CaptureError, or without
    ``strict`` warns and runs eagerly.
    """

    def __init__(
        self,
        where: str,
        function: Callable[..., Any],
        device: GraphDevice,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        state: State,
        gradients: Gradients,
        generators: Sequence[torch.Generator],
        fallback: Fallback,
    ) -> None:
        self._where, self._function, self._device = where, function, device
        self._state, self._gradients, self._fallback = state, gradients, fallback
        self._generators = (device.default_generator, *generators)
        self._inputs = Inputs(where, device.type, args, kwargs)
        self._inputs.refuse_gradients("a function's gradients stay inside it; capture a torch.nn.Module")
        self._autocast = autocast_state(device.type)
        values, grads = state.save(), gradients.current()
        stream = device.new_stream()
        try:
            with beside(device, stream):
                use, of_none = self._warm_up(values.restore)
                values.restore()
                gradients.before_capture(use, of_none, grads)
            self._graph, self._outputs = record(
                where, device, device.new_pool(), stream, generators, self._run_on_buffers
            )
            gradients.after_capture()
        finally:
            values.restore()
            gradients.put(grads)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self._check()
            self._inputs.load(args, kwargs)
        except CaptureError as error:
            return self._fallback.run(error, args, kwargs, stacklevel=2)
        overflow = self._fallback.overflow
        if overflow is None:
            self._replay()
            return copies(self._outputs)
        values, grads = self._state.save(), self._gradients.copied()
        overflow.clear()
        self._replay()
        if not overflow.happened():
            return copies(self._outputs)
        values.restore()
        self._gradients.put(grads)
        return copies(self._fallback.redo(args, kwargs))

    def _check(self) -> None:
        problems = [*autocast_problems(self._autocast, self._device.type), *self._gradients.problems()]
        if problems:
            raise CaptureError.of(self._where, problems)
        self._state.check()

    def _replay(self) -> None:
        missing = self._gradients.before_replay()
        self._graph.replay()
        self._gradients.after_replay(missing)

    def _run_on_buffers(self) -> Any:
        args, kwargs = self._inputs.arguments
        return self._function(*args, **kwargs)

    def _warm_up(self, restore: Callable[[], None]) -> tuple[Use, Left]:
        """Runs three times for real, first held to the rules, with other gradients in ``.grad`` every time."""
        of_zeros = self._left_by_run(0.0, DryRun(self._where, self._device.type, self._generators))
        restore()
        of_nan = self._left_by_run(float("nan"), nullcontext())
        restore()
        of_none = self._left_by_run(None, nullcontext())
        return use_of_gradients(of_zeros=of_zeros, of_nan=of_nan, of_none=of_none), of_none

    def _left_by_run(self, gradient: float | None, held: AbstractContextManager[Any]) -> Left:
        self._gradients.fill(gradient)
        outputs: list[Any] = []
        with held:
            changed = self._inputs.changed_by(lambda: outputs.extend(tree_leaves(self._run_on_buffers())))
        problems = [Problem(name, "changed in place", "only read", "copy it first") for name in changed]
        tensors = [leaf for leaf in outputs if isinstance(leaf, Tensor)]
        if any(tensor.requires_grad for tensor in tensors):
            remedy = "call backward inside, detach it, or capture a torch.nn.Module, which gets a backward graph"
            problems.append(Problem("output.requires_grad", True, "False for a function", remedy))
        if problems:
            raise CaptureError.of(self._where, problems)
        self._state.check()
        return Left.of([*tensors, *self._state.tensors()], self._gradients.current())
