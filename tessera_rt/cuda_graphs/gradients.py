"""The ``.grad`` of parameters around a captured function.

torch makes a new ``.grad`` whenever there is none, and users drop it (``zero_grad(set_to_none=True)``), while a graph
holds addresses. So a function that uses gradients it finds gets static ones; what is in ``.grad`` at a call is brought
there, and afterwards ``.grad`` is what the graph wrote. How a function uses what it finds is tried out beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from tessera_rt.errors import Problem


class Use(Enum):
    """What a function does with the gradients that it finds."""

    NONE = auto()
    """Nothing: it zeroes or drops them first."""
    SUM = auto()
    """It adds to them, and does not tell a missing one from zeros."""
    EXACT = auto()
    """It tells a missing one from zeros: an optimizer leaves a parameter without gradient alone."""


@dataclass(frozen=True, slots=True)
class Left:
    """Fingerprints of what a trial run left behind: of results and state, and of gradients (None where there is none).

    A fingerprint is the sum of all bits read as integers, and whether anything is not zero: copies of a whole model's
    state would not fit beside it.
    """

    values: tuple[tuple[int, bool], ...]
    gradients: tuple[tuple[int, bool] | None, ...]

    @classmethod
    def of(cls, values: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Left:
        return cls(
            tuple(map(_fingerprint, values)),
            tuple(None if gradient is None else _fingerprint(gradient) for gradient in gradients),
        )


def use_of_gradients(*, of_zeros: Left, of_nan: Left, of_none: Left) -> Use:
    """From what three runs left that differ in the gradients they found."""
    if of_zeros == of_nan:
        return Use.NONE
    alike = all(
        one == other or (other is None and one is not None and not one[1])
        for one, other in zip(of_zeros.gradients, of_none.gradients, strict=True)
    )
    return Use.SUM if alike and of_zeros.values == of_none.values else Use.EXACT


class Gradients:
    """``.grad`` of ``parameters`` for one graph."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = tuple(parameters)
        self._use = Use.NONE
        self._static: tuple[Tensor | None, ...] = ()
        self._made: tuple[bool, ...] = ()
        self._left: tuple[Tensor | None, ...] = ()

    def fill(self, value: float | None) -> None:
        """Every ``.grad`` is a new tensor full of ``value``, or there is none."""
        for parameter in self._parameters:
            parameter.grad = None if value is None else torch.full_like(parameter, value)

    def current(self) -> tuple[Tensor | None, ...]:
        return tuple(parameter.grad for parameter in self._parameters)

    def copied(self) -> tuple[Tensor | None, ...]:
        """The values in ``.grad`` now, in memory of their own."""
        return tuple(None if gradient is None else gradient.detach().clone() for gradient in self.current())

    def put(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def before_capture(self, use: Use, of_none: Left, found: Sequence[Tensor | None]) -> None:
        """Sets what the captured function finds. ``of_none``: what a run left that found none; ``found``: what the
        parameters hold when they are captured."""
        self._use, self._made = use, tuple(gradient is not None for gradient in of_none.gradients)
        self.fill(None)
        for parameter, gradient in zip(self._parameters, found, strict=True):
            if use is Use.SUM or (use is Use.EXACT and gradient is not None):
                parameter.grad = torch.zeros_like(parameter)
        self._static = self.current()

    def after_capture(self) -> None:
        """Keeps what the function left in ``.grad``: every replay leaves it there."""
        self._left = self.current()

    def problems(self) -> list[Problem]:
        """Gradients that are missing, or there, other than at the capture, if the function can tell."""
        if self._use is not Use.EXACT:
            return []
        return [
            Problem(f"gradient {number}", "missing" if gradient is None else "there", wanted, remedy)
            for number, (gradient, static) in enumerate(zip(self.current(), self._static, strict=True))
            if (gradient is None) != (static is None)
            for wanted, remedy in [
                ("missing, as captured", "zero_grad(set_to_none=True)")
                if static is None
                else ("there, as captured", "zero_grad(set_to_none=False)")
            ]
        ]

    @torch.no_grad()
    def before_replay(self) -> tuple[bool, ...]:
        """Brings what the parameters hold to the static gradients; which of them hold none."""
        for gradient, static in zip(self.current(), self._static, strict=True):
            if static is None:
                continue
            if gradient is None:
                static.zero_()
            elif gradient.data_ptr() != static.data_ptr():
                static.copy_(gradient)
        return tuple(gradient is None for gradient in self.current())

    def after_replay(self, missing: Sequence[bool]) -> None:
        """A gradient that was ``missing``, and that the function does not make, is still missing."""
        parts = zip(missing, self._made, self._left, strict=True)
        self.put([None if was_missing and not made else left for was_missing, made, left in parts])


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _fingerprint(tensor: Tensor) -> tuple[int, bool]:
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    if values.is_floating_point():
        values = values + 0.0  # -0 and 0 are one value
    bits = values.contiguous().view(_INTEGERS[values.element_size()])
    return int(bits.sum(dtype=torch.int64)), bool(bits.any())
