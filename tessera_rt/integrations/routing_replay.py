"""Activation checkpointing that keeps the routing decision instead of making it again.

A recomputed forward sees inputs that may differ in the last bit, and a tie between two experts then goes the other way:
the recomputed activations belong to another routing than the one whose loss is differentiated. ``SavedRouting`` around
a checkpoint function notes every choice that a router makes in the first run, and makes recomputations take the same
ones; the values are computed again. It costs K integers a token and layer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tessera_rt.errors import Problem, SpecError

CheckpointFunction = Callable[..., Any]


class SavedRouting:
    """``checkpoint(function, *args)`` whose recomputations route as the first run did. Works with both of torch's ways.

    Use: ``SavedRouting(torch.utils.checkpoint.checkpoint)(layer, x, use_reentrant=False)``.
    """

    def __init__(self, checkpoint: CheckpointFunction) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(_Replayed(function), *args, **kwargs)


class _Replayed:
    """A function that notes choices when it runs first, and repeats them whenever it runs again."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._choices: list[Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._function(*args, **kwargs)
        if self._choices is None:
            self._choices = []
            mode: _Choices = _Noting(self._choices)
        else:
            mode = _Repeating(self._choices)
        token = _ACTIVE.set(mode)
        try:
            return self._function(*args, **kwargs)
        finally:
            _ACTIVE.reset(token)


@contextmanager
def choosing() -> Iterator[None]:
    """Around a router's call: its choices are noted or repeated, where a ``SavedRouting`` is at work."""
    mode = None if torch.compiler.is_compiling() else _ACTIVE.get()
    if mode is None:
        yield
    else:
        with mode:
            yield


class _Choices(TorchFunctionMode):
    """topk as (gather(index), index): in both runs the same operations, which save the same tensors for backward."""

    def __init__(self, choices: list[Tensor]) -> None:
        super().__init__()
        self._choices = choices

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _CHOOSING:
            return func(*args, **kwargs)
        index = self._choose(func, args, kwargs)
        scores = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[2] if len(args) > 2 else -1)
        return torch.return_types.topk((scores.gather(dim, index), index))

    @abstractmethod
    def _choose(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor: ...


class _Noting(_Choices):
    def _choose(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        with torch.no_grad():
            index: Tensor = func(*args, **kwargs).indices
        self._choices.append(index)
        return index


class _Repeating(_Choices):
    def __init__(self, choices: list[Tensor]) -> None:
        super().__init__(choices)
        self._next = 0

    def _choose(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if self._next >= len(self._choices):
            allowed = f"the {len(self._choices)} choices of the first run"
            raise SpecError.of("recomputed router", [Problem("choices", self._next + 1, allowed)])
        self._next += 1
        return self._choices[self._next - 1]


# All routers of transformers decide by topk, but for PhiMoE's sparsemixer, which draws: checkpoints replay its RNG.
_CHOOSING: Final = (torch.topk, Tensor.topk)
_ACTIVE: Final[ContextVar[_Choices | None]] = ContextVar("tessera_routing_choices", default=None)
