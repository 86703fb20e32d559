"""A CPU stand-in for a device with CUDA graphs: it holds code that captures to the rules, and replays for real.

``StandInDevice`` implements ``GraphDevice``. CPU tensors are its tensors. A capture records every operation that torch
dispatches, and every launch of an interpreted Triton kernel, with the storages they read and write; a replay does the
same work on the same storages. It is stricter than a GPU:

- Capturing leaves no trace: whatever was written meanwhile is put back, what was allocated is poisoned.
- A replay begins with poison (NaN; the lowest integer) in all that its graph allocated and in what else of the pool
  was free when the graph was captured, and ends with it in what was free afterwards. Who relies on leftovers gets NaN.
- A replay fails if memory it uses has moved, changed its size, or has been freed by its owner.
- Work that reads what another stream writes needs an event between them, whether or not it would go wrong.
- Host reads, shapes that depend on values, waits for the device, streams that were not forked or joined, unknown
  random generators, memory from outside the pool and collectives are refused by name.

Not modelled: time, real concurrency, collectives, and what only a driver can refuse.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tessera_rt.testing.graphs_memory import Memory
from tessera_rt.testing.graphs_recording import Node, Recorder
from tessera_rt.testing.streams import CaptureRuleError, CpuEvent, CpuStream, Streams

__all__ = ["CaptureRuleError", "Pool", "StandInDevice", "StandInGraph"]


@dataclass(eq=False)
class Pool:
    """Memory of captured work, shared by the graphs that are captured with it."""

    memories: list[Memory] = field(default_factory=list)


@dataclass(eq=False)
class StandInGraph:
    """A captured graph; ``replays`` counts them."""

    device: StandInDevice
    pool: Pool
    nodes: list[Node] = field(default_factory=list)
    used: list[Memory] = field(default_factory=list)
    own: set[Memory] = field(default_factory=set)
    free_before: list[Memory] = field(default_factory=list)
    free_after: list[Memory] = field(default_factory=list)
    captured: bool = False
    replays: int = 0

    def replay(self) -> None:
        if not self.captured:
            raise CaptureRuleError("replay of a graph whose capture has not ended")
        if self.device.streams.capturing is not None:
            self.device.record_child(self)
            return
        self.run()

    def run(self) -> None:
        """All of the graph's work. Raises CaptureRuleError if memory that it uses is not as it was."""
        for memory in self.used:
            if memory not in self.own and memory not in self.pool.memories:
                memory.check_alive()
            memory.check_unmoved()
        for memory in (*self.own, *self.free_before):
            memory.poison()
        # What was recorded lies below autograd and autocast.
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for node in self.nodes:
                node.run()
        for memory in self.free_after:
            memory.poison()
        self.replays += 1

    def names(self) -> list[str]:
        """The recorded operations in order."""
        return [node.name for node in self.nodes]


class StandInDevice:
    """Implements ``tessera_rt.cuda_graphs.device.GraphDevice`` for CPU tensors. Use it from one thread."""

    type = "cpu"

    def __init__(self) -> None:
        self.streams = Streams()
        self.graphs: list[StandInGraph] = []
        self._memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
        self._recorder: Recorder | None = None

    @property
    def default_generator(self) -> torch.Generator:
        return torch.default_generator

    def current_stream(self) -> CpuStream:
        return self.streams.current

    def new_stream(self) -> CpuStream:
        return self.streams.new()

    def new_event(self) -> CpuEvent:
        return CpuEvent(self.streams)

    def on(self, stream: CpuStream) -> AbstractContextManager[None]:
        return self.streams.on(stream)

    def new_pool(self) -> Pool:
        return Pool()

    def synchronize(self) -> None:
        self.streams.refuse_sync("synchronize of the device")

    @contextmanager
    def capture(
        self, pool: Pool, stream: CpuStream, generators: Sequence[torch.Generator] = ()
    ) -> Iterator[StandInGraph]:
        graph = StandInGraph(self, pool, free_before=[memory for memory in pool.memories if memory.free])
        known = (torch.default_generator, *generators)
        drawn = [(generator, generator.get_state()) for generator in known]
        recorder = Recorder(self.streams, self._memories, known)
        self.streams.begin(stream)
        self._recorder = recorder
        try:
            with self.streams.on(stream):
                with recorder.recording():
                    yield graph
                self.streams.refuse_unjoined(stream, recorder.last_on)
                recorder.refuse_memory_from_outside(pool.memories)
        finally:
            self.streams.end()
            self._recorder = None
            recorder.undo()
            for generator, state in drawn:
                generator.set_state(state)
        graph.nodes, graph.used, graph.own = recorder.nodes, list(recorder.used), recorder.own
        pool.memories += recorder.own
        graph.free_after = [memory for memory in pool.memories if memory.free and memory not in graph.free_before]
        graph.captured = True
        self.graphs.append(graph)

    def record_child(self, graph: StandInGraph) -> None:
        """A replay while a stream captures becomes a part of that capture."""
        assert self._recorder is not None
        with _disable_current_modes():
            self._recorder.add_child(graph.run, graph.used)
