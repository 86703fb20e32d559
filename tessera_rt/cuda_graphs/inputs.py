"""The static buffers that a graph reads its arguments from, and the check of what is copied into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten_with_path, tree_unflatten

from tessera_rt.errors import CaptureError, Problem


class Inputs:
    """Buffers of the shapes, dtypes and strides of example arguments; arguments may be nested (torch's pytrees).

    What is no tensor is a constant of the graph. ``tensors`` are the buffers in order; one requires a gradient where
    its example does. Raises CaptureError for examples on another device.
    """

    def __init__(self, where: str, device_type: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._where = where
        named, self._spec = _named_leaves(args, kwargs)
        problems = [
            Problem(f"{name}.device", str(leaf.device), f"a {device_type} device")
            for name, leaf in named
            if isinstance(leaf, Tensor) and leaf.device.type != device_type
        ]
        if problems:
            raise CaptureError.of(where, problems)
        self._names = [name for name, _ in named]
        self._leaves = [_buffer(leaf) if isinstance(leaf, Tensor) else leaf for _, leaf in named]
        self.tensors = tuple(leaf for leaf in self._leaves if isinstance(leaf, Tensor))
        self._pointers = tuple(tensor.data_ptr() for tensor in self.tensors)

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) made of the buffers."""
        args, kwargs = tree_unflatten(self._leaves, self._spec)
        return args, kwargs

    def load(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Copies arguments into the buffers; the argument tensors in order. Raises CaptureError if they don't fit."""
        named, spec = _named_leaves(args, kwargs)
        if spec != self._spec:
            names = ", ".join(self._names) or "none"
            problem = Problem("arguments", ", ".join(name for name, _ in named) or "none", f"as captured: {names}")
            raise CaptureError.of(self._where, [problem])
        problems = []
        given: list[Tensor] = []
        for name, leaf, (_, value) in zip(self._names, self._leaves, named, strict=True):
            if isinstance(leaf, Tensor) and isinstance(value, Tensor):
                problems += _differences(name, leaf, value)
                given.append(value)
            elif isinstance(leaf, Tensor) or isinstance(value, Tensor) or leaf != value:
                remedy = "capture once for every value" if not isinstance(leaf, Tensor) else ""
                problems.append(Problem(name, value, f"{_described(leaf)}, as captured", remedy))
        for name, tensor, pointer in zip(self._tensor_names, self.tensors, self._pointers, strict=True):
            if tensor.data_ptr() != pointer:
                problems.append(moved(f"the buffer of {name}"))
        if problems:
            raise CaptureError.of(self._where, problems)
        with torch.no_grad():
            for buffer, value in zip(self.tensors, given, strict=True):
                if value is not buffer:
                    buffer.copy_(value)
        return tuple(given)

    def refuse_gradients(self, remedy: str) -> None:
        """Raises CaptureError if an example requires a gradient."""
        given = [name for name, tensor in zip(self._tensor_names, self.tensors, strict=True) if tensor.requires_grad]
        if given:
            raise CaptureError.of(
                self._where, [Problem(f"{name}.requires_grad", True, "False", remedy) for name in given]
            )

    def changed_by(self, run: Callable[[], Any]) -> list[str]:
        """Runs; the names of the buffers that torch's operations wrote or replaced meanwhile."""
        before = [(tensor._version, tensor.data_ptr()) for tensor in self.tensors]
        run()
        after = [(tensor._version, tensor.data_ptr()) for tensor in self.tensors]
        return [name for name, b, a in zip(self._tensor_names, before, after, strict=True) if a != b]

    @property
    def _tensor_names(self) -> list[str]:
        return [name for name, leaf in zip(self._names, self._leaves, strict=True) if isinstance(leaf, Tensor)]


def moved(name: str) -> Problem:
    """The problem of a tensor that is not where the graph reads and writes it."""
    remedy = "change it in place (copy_), or capture again"
    return Problem(name, "another tensor", "the one that was captured, at its address", remedy)


def _named_leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[tuple[str, Any]], TreeSpec]:
    leaves, spec = tree_flatten_with_path((tuple(args), dict(sorted(kwargs.items()))))
    return [(_name(path), leaf) for path, leaf in leaves], spec


def _name(path: Sequence[Any]) -> str:
    """``argument 0``, ``argument 1.mask``, ``argument scale``."""
    keys = [str(getattr(key, "idx", getattr(key, "key", key))) for key in path[1:]]
    return f"argument {'.'.join(keys)}"


def _buffer(example: Tensor) -> Tensor:
    buffer = torch.empty_like(example, memory_format=torch.preserve_format)
    buffer.copy_(example.detach())
    return buffer.requires_grad_(example.requires_grad)


def _differences(name: str, buffer: Tensor, value: Tensor) -> list[Problem]:
    problems = []
    if value.shape != buffer.shape:
        problems.append(Problem(f"{name}.shape", tuple(value.shape), f"{tuple(buffer.shape)}, as captured"))
    if value.dtype != buffer.dtype:
        problems.append(Problem(f"{name}.dtype", str(value.dtype), f"{buffer.dtype}, as captured"))
    if value.device != buffer.device:
        problems.append(Problem(f"{name}.device", str(value.device), f"{buffer.device}, as captured"))
    if value.requires_grad and not buffer.requires_grad and torch.is_grad_enabled():
        remedy = "capture with an example that requires a gradient"
        problems.append(Problem(f"{name}.requires_grad", True, "False, as captured", remedy))
    return problems


def _described(leaf: Any) -> str:
    return f"a tensor {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
