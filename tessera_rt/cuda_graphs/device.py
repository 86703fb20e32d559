"""What capturing needs of a device: streams, events, a memory pool, and recording work instead of running it.

``CudaDevice`` is the one that trains. The names are torch.cuda's, so that its streams and graphs fit as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """Work that runs in order. Waits order it behind other streams' work, without the host."""

    def record_event(self) -> Any: ...

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


class Graph(Protocol):
    """Captured work. ``replay`` runs all of it on the current stream, with the addresses it was captured with."""

    def replay(self) -> None: ...


class GraphDevice(Protocol):
    """A device that captures graphs."""

    @property
    def type(self) -> str:
        """The ``torch.device.type`` of the tensors that it works on."""
        ...

    @property
    def default_generator(self) -> torch.Generator:
        """Where random numbers come from that name no generator; part of every graph."""
        ...

    def current_stream(self) -> Stream: ...

    def new_stream(self) -> Stream: ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Work of the context goes to ``stream``."""
        ...

    def new_pool(self) -> Any:
        """Memory for captured work. Graphs may share one only if they replay in the order of their capture."""
        ...

    def capture(
        self, pool: Any, stream: Any, generators: Sequence[torch.Generator] = ()
    ) -> AbstractContextManager[Graph]:
        """Work of the context is recorded on ``stream`` and not run; what it allocates comes from ``pool``.

        ``generators``: those besides the default one that the work draws from. Raises RuntimeError when the work, or
        its end, breaks a rule of capturing.
        """
        ...
