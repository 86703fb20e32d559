"""Graphs of a CUDA device, by torch.cuda.CUDAGraph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from tessera_rt.cuda_graphs.device import Graph


class CudaDevice:
    """Implements ``GraphDevice`` for one CUDA device (the current one by default)."""

    type = "cuda"

    def __init__(self, device: torch.device | None = None) -> None:
        index = None if device is None else device.index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)

    @property
    def default_generator(self) -> torch.Generator:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.cuda.default_generators[self.device.index]

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @contextmanager
    def capture(self, pool: Any, stream: Any, generators: Sequence[torch.Generator] = ()) -> Iterator[Graph]:
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        failure: BaseException | None = None
        try:
            # Watchdog and loader threads may use CUDA meanwhile: only this thread is held to the rules.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                try:
                    yield graph
                except BaseException as error:
                    failure = error
                    raise
        except RuntimeError:
            # Ending a capture that broke raises too, and would hide what broke it.
            if failure is not None:
                raise failure from None
            raise
