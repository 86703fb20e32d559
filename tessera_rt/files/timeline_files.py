"""Timelines as JSON files: what a run records and `tessera show` reads.

{"version": 1, "label": ..., "source": "measured", "ranks": 2,
 "spans": [{"rank": 0, "lane": "COMP", "name": "F_ATTN:L0", "stage": 0, "microbatch": 3, "start_ns": 0, "end_ns": 9}]}
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from tessera_rt.errors import Problem, SpecError
from tessera_rt.files.file_checks import StrictModel, problems_of, write_atomically
from tessera_rt.timeline import Span, Timeline

VERSION = 1


class _Span(StrictModel):
    rank: int = Field(ge=0)
    lane: Literal["COMP", "COMM", "LINK"]
    name: str
    stage: int
    microbatch: int
    start_ns: int
    end_ns: int


class _Timeline(StrictModel):
    version: Literal[1]
    label: str
    source: str
    ranks: int = Field(ge=1)
    spans: list[_Span]


def save_timeline(timeline: Timeline, path: Path) -> None:
    """Write the timeline, the whole file or nothing; its folder is made if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    spans = [asdict(span) for span in timeline.spans]
    head = {"version": VERSION, "label": timeline.label, "source": timeline.source, "ranks": timeline.ranks}
    write_atomically(path, json.dumps(head | {"spans": spans}, separators=(",", ":")) + "\n")


def load_timeline(path: Path) -> Timeline:
    """The timeline of a file. Raises SpecError with every fault of the file."""
    where = str(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise SpecError.of(where, [Problem("file", str(fault), "a readable timeline (JSON)")]) from None
    try:
        file = _Timeline.model_validate(data)
    except ValidationError as error:
        raise SpecError.of(where, problems_of(error, _Timeline)) from None
    outside = [i for i, span in enumerate(file.spans) if span.rank >= file.ranks or span.end_ns < span.start_ns]
    if outside:
        allowed = f"on one of {file.ranks} ranks and not to end before it starts"
        raise SpecError.of(where, [Problem(f"spans[{i}]", file.spans[i].model_dump(), allowed) for i in outside[:10]])
    return Timeline(
        label=file.label,
        source=file.source,
        ranks=file.ranks,
        spans=tuple(Span(**span.model_dump()) for span in file.spans),
    )
