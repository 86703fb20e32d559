"""A transport that delivers only when it is waited for: until then its outputs hold NaN (counts: -1).

Wrapped around a real transport it makes a missing wait visible, however fast the network was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessera_rt.moe.steps import Pending, RowLayout, Transport


class LateTransport:
    """Passes every collective on to ``inner`` and holds back its output until ``wait``."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.dp_rank, self.ep_rank, self.ep_size = inner.dp_rank, inner.ep_rank, inner.ep_size

    def gather_counts(self, counts: Tensor) -> Pending:
        return LatePending(self.inner.gather_counts(counts), -1)

    def dispatch(self, rows: Tensor, layout: RowLayout) -> Pending:
        return LatePending(self.inner.dispatch(rows, layout), float("nan"))

    def combine(self, rows: Tensor, layout: RowLayout) -> Pending:
        return LatePending(self.inner.combine(rows, layout), float("nan"))


class LatePending:
    """``output`` is filled with ``poison`` until ``wait`` copies the real values into it."""

    def __init__(self, inner: Pending, poison: float) -> None:
        self._inner: Pending | None = inner
        self.output: Tensor = torch.full_like(inner.output, poison)

    def wait(self) -> Any:
        if self._inner is not None:
            with torch.no_grad():
                self.output.copy_(self._inner.wait())
            self._inner = None
        return self.output
