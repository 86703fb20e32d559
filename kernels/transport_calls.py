"""What the calls of an expert-parallel transport take and return, whatever moves the data. Plain data: no Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from torch import Tensor

T = TypeVar("T")
P = TypeVar("P")


class Issued(Generic[T]):
    """A call under way. ``wait`` finishes it, once, and returns its result."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._result: T

    def wait(self) -> T:
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result


@dataclass(frozen=True, slots=True)
class Received(Generic[P]):
    """Units that came for this rank's experts: R rows, of which some may be nobody's.

    ``x`` [R, H], whose rows of nobody hold anything; ``ids`` [R, J] int32, local, -1 where there is nothing to do;
    ``weights`` [R, J] fp32 (float64 with it). ``sent_weights`` [T, K]: those of this rank's own tokens. ``origin``
    [R, 2] int32: each unit's source rank and number there, where the way back does not follow from the order.
    """

    placement: P
    x: Tensor
    ids: Tensor
    weights: Tensor
    sent_weights: Tensor
    origin: Tensor | None = None

    def without_rows(self) -> Received[P]:
        """The same without ``x``: what backward needs."""
        return replace(self, x=self.x.new_empty(0))


@dataclass(frozen=True, slots=True)
class Combined:
    """``out`` [T, H]; ``router_gradient`` [T, K] fp32 if one was sent along."""

    out: Tensor
    router_gradient: Tensor | None = None
