"""Capacity that was exceeded on the device: found after a replay, and the work done again eagerly.

A graph has static shapes, so what depends on values (rows of an expert, say) gets a capacity. Whoever is captured
writes a word that is not zero when its values do not fit; what the replay computed is void then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tessera_rt.errors import CaptureError, Problem


@dataclass(frozen=True, slots=True)
class Overflow:
    """``words``: a tensor that captured work makes different from zero anywhere. ``agree`` is called with it before it
    is read, so that ranks that step together decide alike (an all-reduce with MAX, say)."""

    where: str
    words: Tensor
    agree: Callable[[Tensor], None] | None = None

    def clear(self) -> None:
        self.words.zero_()

    def happened(self) -> bool:
        """Waits for the device and reads the words."""
        if self.agree is not None:
            self.agree(self.words)
        return bool(self.words.any())

    def check_eager(self) -> None:
        """Raises CaptureError if the eager run did not fit either."""
        if self.happened():
            remedy = "pass eager=, the same work without a capacity"
            raise CaptureError.of(self.where, [Problem("overflow", "set by the eager run too", "0 after it", remedy)])
