"""The eager run that takes the place of a replay: when a call does not fit, or exceeded a capacity."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera_rt.cuda_graphs.overflow import Overflow
from tessera_rt.errors import CaptureError


class CaptureWarning(UserWarning):
    """Something runs eagerly because it could not be captured or replayed; the text names the operation or argument."""


@dataclass(frozen=True, slots=True)
class Fallback:
    """``eager`` does the captured work without a graph. ``strict``: only after an overflow, and without a warning."""

    eager: Callable[..., Any]
    overflow: Overflow | None
    strict: bool

    def run(self, error: CaptureError, args: Sequence[Any], kwargs: Mapping[str, Any], *, stacklevel: int) -> Any:
        """Raises ``error`` if ``strict``; otherwise warns of it (``stacklevel``: of the caller) and runs eagerly."""
        if self.strict:
            raise error
        announce(error, stacklevel=stacklevel + 1)
        return self.eager(*args, **kwargs)

    def redo(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The eager run after an overflow. Raises CaptureError if that overflows too."""
        assert self.overflow is not None
        self.overflow.clear()
        outputs = self.eager(*args, **kwargs)
        self.overflow.check_eager()
        return outputs


def announce(error: CaptureError, *, stacklevel: int) -> None:
    """Warns that what raised ``error`` runs eagerly instead; ``stacklevel`` as for ``warnings.warn`` by the caller."""
    warnings.warn(f"{error}\n  It runs eagerly.", CaptureWarning, stacklevel=stacklevel + 1)
