"""Streams and events of the CPU stand-in: their order is known exactly, so that a missing event is found.

Work runs at once, in the order in which it is issued. What orders it are clocks: a stream counts its pieces of work, an
event holds how far its stream had come and what that stream had waited for, and a wait takes that over (Lamport's
happened-before, as vector clocks). During a capture the rules of CUDA's stream capture hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CaptureRuleError(RuntimeError):
    """Work under capture, or a replay, did what a CUDA graph cannot. RuntimeError, as torch.cuda raises."""


class Streams:
    """The streams of one stand-in device, and the capture that is under way on some of them."""

    def __init__(self) -> None:
        self._count = 0
        self.default = self.new()
        self.current = self.default
        self.capturing: set[CpuStream] | None = None
        self.captures = 0

    def new(self) -> CpuStream:
        self._count += 1
        return CpuStream(self, self._count - 1)

    @contextmanager
    def on(self, stream: CpuStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def begin(self, origin: CpuStream) -> None:
        if self.capturing is not None:
            raise CaptureRuleError("a capture is under way already")
        self.capturing = {origin}
        self.captures += 1

    def end(self) -> None:
        self.capturing = None

    def refuse_unjoined(self, origin: CpuStream, name_of: Callable[[CpuStream], str]) -> None:
        """At the end of a capture the first stream must have waited for all work of the others."""
        for stream in sorted(self.capturing or (), key=lambda stream: stream.number):
            if stream is not origin and stream.done and origin.clock.get(stream.number, 0) < stream.done:
                raise CaptureRuleError(f"{stream} was not joined: nothing waits for its {name_of(stream)}")

    def work(self) -> CpuStream:
        """The stream of work that is being captured, which must take part in the capture."""
        stream = self.current
        if self.capturing is None or stream not in self.capturing:
            raise CaptureRuleError(f"{stream} was not forked from the capturing stream: let it wait for an event of it")
        return stream

    def refuse_sync(self, what: str) -> None:
        if self.capturing is not None:
            raise CaptureRuleError(f"{what} is not permitted while a stream captures")


class CpuStream:
    """A stream of the stand-in, with torch.cuda's names."""

    def __init__(self, streams: Streams, number: int) -> None:
        self._streams, self.number = streams, number
        self.clock: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"stream {self.number}"

    @property
    def done(self) -> int:
        """Pieces of work so far."""
        return self.clock.get(self.number, 0)

    def advance(self) -> tuple[int, int]:
        """Another piece of work: (stream, its count)."""
        self.clock[self.number] = self.done + 1
        return self.number, self.done

    def has_seen(self, work: tuple[int, int]) -> bool:
        stream, count = work
        return self.clock.get(stream, 0) >= count

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        event = event or CpuEvent(self._streams)
        event.record(self)
        return event

    def wait_event(self, event: CpuEvent) -> None:
        streams = self._streams
        if event.clock is None:
            return  # never recorded: CUDA waits for nothing
        if streams.capturing is not None and event.capture == streams.captures:
            streams.capturing.add(self)
        elif streams.capturing is not None and self in streams.capturing:
            raise CaptureRuleError(f"{self} captures and waits for an event from outside the capture")
        for number, count in event.clock.items():
            self.clock[number] = max(self.clock.get(number, 0), count)

    def wait_stream(self, stream: CpuStream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self._streams.refuse_sync(f"synchronize of {self}")

    def query(self) -> bool:
        self._streams.refuse_sync(f"query of {self}")
        return True


class CpuEvent:
    """An event of the stand-in, with torch.cuda's names."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.clock: dict[int, int] | None = None
        self.capture = 0
        """The number of the capture in which it was recorded; 0 outside."""

    def record(self, stream: CpuStream | None = None) -> None:
        stream = stream or self._streams.current
        capturing = self._streams.capturing
        self.capture = self._streams.captures if capturing is not None and stream in capturing else 0
        self.clock = dict(stream.clock)

    def wait(self, stream: CpuStream | None = None) -> None:
        (stream or self._streams.current).wait_event(self)

    def synchronize(self) -> None:
        self._streams.refuse_sync("synchronize of an event")

    def query(self) -> bool:
        self._streams.refuse_sync("query of an event")
        return True
