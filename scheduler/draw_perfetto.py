"""Timelines as a trace that https://ui.perfetto.dev and chrome://tracing open (the Trace Event Format, JSON).

A process per rank of each timeline, a thread per lane; where spans of one lane overlap (messages to two neighbours,
several collectives under way) they go to further threads of that lane. An arrow leads from each message to the pass it
feeds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tessera_rt.scheduler.draw_spans import LANES, LINK, as_list, by_lane, pass_of
from tessera_rt.tasks import Pass
from tessera_rt.timeline import Span, Timeline

Event = dict[str, Any]
Place = tuple[int, int]  # process, thread

_PROCESSES = 10_000  # ids left to each timeline
_THREADS = 100  # ids left to each lane


def save_perfetto(timelines: Timeline | Sequence[Timeline], path: str | Path) -> None:
    """Write ``perfetto_trace`` as JSON."""
    text = json.dumps(perfetto_trace(timelines), separators=(",", ":"), allow_nan=False)
    Path(path).write_text(text, encoding="utf-8", newline="\n")


def perfetto_trace(timelines: Timeline | Sequence[Timeline]) -> dict[str, Any]:
    """The trace as plain data. Times are microseconds with three digits, so exact to the nanosecond."""
    events: list[Event] = []
    for number, timeline in enumerate(as_list(timelines)):
        events += _events(timeline, number * _PROCESSES)
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _events(timeline: Timeline, first_process: int) -> Iterator[Event]:
    places: dict[int, Place] = {}
    lanes = by_lane(timeline)
    for rank in range(timeline.ranks):
        process = first_process + rank
        name = f"{timeline.label} ({timeline.source}) rank {rank}"
        yield _name("process_name", process, 0, name)
        yield _order("process_sort_index", process, 0, process)
        for lane_number, lane in enumerate(LANES):
            for track, spans in enumerate(_tracks(lanes[rank, lane])):
                thread = lane_number * _THREADS + track
                yield _name("thread_name", process, thread, f"{lane} {track + 1}" if track else lane)
                yield _order("thread_sort_index", process, thread, thread)
                for span in spans:
                    places[id(span)] = (process, thread)
                    yield _slice(span, process, thread)
    yield from _arrows(timeline, places, first_process)


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _order(kind: str, process: int, thread: int, index: int) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"sort_index": index}}


def _slice(span: Span, process: int, thread: int) -> Event:
    return {
        "ph": "X",
        "name": span.name,
        "cat": f"{span.lane},{pass_of(span)}",
        "pid": process,
        "tid": thread,
        "ts": span.start_ns / 1000,
        "dur": (span.end_ns - span.start_ns) / 1000,
        "args": {"stage": span.stage, "microbatch": span.microbatch, "pass": str(pass_of(span))},
    }


def _tracks(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans (by start) on as many tracks as it takes for none to overlap."""
    tracks: list[list[Span]] = []
    for span in spans:
        for track in tracks:
            if track[-1].end_ns <= span.start_ns:
                track.append(span)
                break
        else:
            tracks.append([span])
    return tracks


def _arrows(timeline: Timeline, places: dict[int, Place], first_id: int) -> Iterator[Event]:
    """From each message to the first task of the pass that takes it."""
    first: dict[tuple[Pass, int, int], Span] = {}
    rank_of: dict[int, int] = {}
    for span in timeline.spans:
        if span.lane != LINK:
            rank_of[span.stage] = span.rank
            key = (pass_of(span), span.stage, span.microbatch)
            if key not in first or span.start_ns < first[key].start_ns:
                first[key] = span
    messages = [span for span in timeline.spans if span.lane == LINK]
    for number, message in enumerate(messages):
        pass_ = pass_of(message)
        # A message may bear the number of the stage that sends it or of the one it is for; the rank tells which.
        to_stage = message.stage
        if rank_of.get(message.stage) == message.rank:
            to_stage += 1 if pass_ is Pass.F else -1
        target = first.get((pass_, to_stage, message.microbatch))
        if target is None or target.rank == message.rank:
            continue  # an empty stage has no task to point to
        arrow = {"name": message.name, "cat": "message", "id": first_id * _PROCESSES + number}
        for ph, span in (("s", message), ("f", target)):
            process, thread = places[id(span)]
            end = {"bp": "e"} if ph == "f" else {}
            yield {"ph": ph, **arrow, **end, "pid": process, "tid": thread, "ts": span.start_ns / 1000}
