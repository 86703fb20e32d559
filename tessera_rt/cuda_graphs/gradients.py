"""The ``.grad`` of parameters around a captured function.

torch makes a new ``.grad`` whenever there is none, and users drop it (``zero_grad(set_to_none=True)``), while a graph
holds addresses. So a function that adds to gradients it finds gets static ones; what is in ``.grad`` at a call is
brought there, nothing counts as zero, and afterwards ``.grad`` is what the graph wrote.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Gradients:
    """``.grad`` of ``parameters`` (name, parameter) for one graph. ``static``: the function reads what it finds."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = tuple(parameters)
        self._found: tuple[Tensor, ...] | None = None
        self._left: tuple[Tensor | None, ...] = ()

    def fill(self, value: float) -> None:
        """Every ``.grad`` is a new tensor full of ``value``."""
        for parameter in self._parameters:
            parameter.grad = torch.full_like(parameter, value)

    def drop(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def current(self) -> tuple[Tensor | None, ...]:
        return tuple(parameter.grad for parameter in self._parameters)

    def copied(self) -> tuple[Tensor | None, ...]:
        """The values in ``.grad`` now, in memory of their own."""
        return tuple(None if grad is None else grad.detach().clone() for grad in self.current())

    def put(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, grad in zip(self._parameters, gradients, strict=True):
            parameter.grad = grad

    def before_capture(self, *, static: bool) -> None:
        """Sets what the captured function finds: static zeros, or nothing."""
        if static:
            self.fill(0.0)
            self._found = tuple(grad for grad in self.current() if grad is not None)
        else:
            self.drop()

    def after_capture(self) -> None:
        """Keeps what the function left in ``.grad``: every replay leaves it there."""
        self._left = self.current()

    @torch.no_grad()
    def before_replay(self) -> None:
        """Brings what the parameters hold to the static gradients, if the function reads them."""
        if self._found is None:
            return
        for parameter, static in zip(self._parameters, self._found, strict=True):
            if parameter.grad is None:
                static.zero_()
            elif parameter.grad.data_ptr() != static.data_ptr():
                static.copy_(parameter.grad)

    def after_replay(self) -> None:
        self.put(self._left)
