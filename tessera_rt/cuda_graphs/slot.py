"""One captured instance of a module: static inputs and outputs, a forward graph, a backward graph, one pool."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tessera_rt.cuda_graphs.device import Graph, GraphDevice, Stream
from tessera_rt.cuda_graphs.inputs import Inputs
from tessera_rt.cuda_graphs.recording import record

_TENSOR = object()


class Slot:
    """Its pool is its own: saved activations live from a forward replay to the backward replay, and slots are replayed
    in any order. ``flight``: the forward that waits for its backward, if any."""

    _forward: Graph
    _backward: Graph
    _spec: TreeSpec

    def __init__(
        self,
        where: str,
        number: int,
        device: GraphDevice,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self.where = f"{where}, slot {number}"
        self._device = device
        self.inputs = Inputs(where, device.type, args, kwargs)
        self.parameters = tuple(parameters)
        self.outputs: tuple[Tensor, ...] = ()
        self.output_gradients: tuple[Tensor | None, ...] = ()
        self._input_gradients: tuple[Tensor | None, ...] = ()
        self._returned: list[Any] = []  # the leaves of what the module returned, _TENSOR for tensors
        self.flight: weakref.ref[Any] | None = None

    @property
    def differentiable(self) -> bool:
        return any(gradient is not None for gradient in self.output_gradients)

    def run_once(self, module: nn.Module) -> None:
        """Forward and backward on the buffers, eagerly; results are dropped."""
        outputs = [leaf for leaf in tree_flatten(self._call(module))[0] if isinstance(leaf, Tensor)]
        self._gradients(outputs, [torch.ones_like(out) if out.requires_grad else None for out in outputs])

    def capture(self, module: nn.Module, stream: Stream, generators: Sequence[torch.Generator]) -> None:
        pool = self._device.new_pool()
        self._forward, result = record(self.where, self._device, pool, stream, generators, lambda: self._call(module))
        leaves, self._spec = tree_flatten(result)
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._returned = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.output_gradients = tuple(torch.zeros_like(out) if out.requires_grad else None for out in outputs)
        if self.differentiable:
            # Backward follows the forward in the pool, also in every replay: it may reuse what the forward left free.
            self._backward, self._input_gradients = record(
                self.where, self._device, pool, stream, generators,
                lambda: self._gradients(outputs, self.output_gradients),
            )  # fmt: skip
        self.outputs = tuple(out.detach() for out in outputs)

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """What the module returned, with ``outputs`` for its tensors."""
        rest = iter(outputs)
        return tree_unflatten([next(rest) if leaf is _TENSOR else leaf for leaf in self._returned], self._spec)

    def replay_forward(self) -> None:
        self._forward.replay()

    @torch.no_grad()
    def replay_backward(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Gradients of the outputs -> those of the inputs that require one, then of the parameters (static buffers)."""
        for static, given in zip(self.output_gradients, gradients, strict=True):
            if static is None:
                continue
            if given is None:
                static.zero_()
            else:
                static.copy_(given)
        self._backward.replay()
        return self._input_gradients

    def _call(self, module: nn.Module) -> Any:
        args, kwargs = self.inputs.arguments
        return module(*args, **kwargs)

    def _gradients(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        wanted = [*(tensor for tensor in self.inputs.tensors if tensor.requires_grad), *self.parameters]
        pairs = [(out, grad) for out, grad in zip(outputs, gradients, strict=True) if grad is not None]
        if not pairs or not wanted:
            return tuple(None for _ in wanted)
        roots, seeds = zip(*pairs, strict=True)
        return torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
