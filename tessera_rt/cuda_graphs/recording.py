"""Steps that every capture takes: running on a side stream, recording, and what is returned to users."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tessera_rt.cuda_graphs.device import Graph, GraphDevice, Stream
from tessera_rt.errors import CaptureError, Problem

T = TypeVar("T")


@contextmanager
def beside(device: GraphDevice, stream: Stream) -> Iterator[None]:
    """Work of the context runs on ``stream``, behind the current stream's and before what comes after."""
    current = device.current_stream()
    stream.wait_stream(current)
    try:
        with device.on(stream):
            yield
    finally:
        current.wait_stream(stream)


def record(
    where: str,
    device: GraphDevice,
    pool: Any,
    stream: Stream,
    generators: Sequence[torch.Generator],
    run: Callable[[], T],
) -> tuple[Graph, T]:
    """The graph of ``run``, and what it returned. Raises CaptureError when the device refuses."""
    # Under autocast, casts of weights are cached: one graph must not read what another one computes.
    torch.clear_autocast_cache()
    try:
        with device.capture(pool, stream, generators) as graph:
            result = run()
    except CaptureError:
        raise
    except RuntimeError as error:
        raise CaptureError(f"{where}: {error}") from error
    finally:
        torch.clear_autocast_cache()
    return graph, result


def copies(outputs: T) -> T:
    """The outputs with every tensor copied: the next replay overwrites the originals."""
    made: T = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, outputs)
    return made


def autocast_state(device_type: str) -> str:
    """What autocast does now: eager code looks it up at every call, a graph has it fixed."""
    return str(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else "off"


def autocast_problems(captured: str, device_type: str) -> list[Problem]:
    now = autocast_state(device_type)
    return [] if now == captured else [Problem("autocast", now, f"{captured}, as captured")]
