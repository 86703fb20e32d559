"""Timelines written and read back; damaged files are refused with every fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.errors import SpecError
from tessera_rt.files.timeline_files import load_timeline, save_timeline
from tessera_rt.timeline import Span, Timeline

spans = st.builds(
    lambda start, length, **fields: Span(start_ns=start, end_ns=start + length, **fields),
    start=st.integers(0, 10**12),
    length=st.integers(0, 10**9),
    rank=st.integers(0, 3),
    lane=st.sampled_from(["COMP", "COMM", "LINK"]),
    name=st.sampled_from(["F_ATTN:L0", "B_HEAD", "SEND_F"]),
    stage=st.integers(0, 7),
    microbatch=st.integers(0, 7),
)


@given(found=st.lists(spans, max_size=5), label=st.text(max_size=5))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, found: list[Span], label: str) -> None:
    path = tmp_path_factory.mktemp("timelines") / "folder" / "step.json"
    timeline = Timeline(label=label, source="measured", ranks=4, spans=tuple(found))
    save_timeline(timeline, path)
    assert load_timeline(path) == timeline


SPAN = {"rank": 0, "lane": "COMP", "name": "F_HEAD", "stage": 0, "microbatch": 0, "start_ns": 1, "end_ns": 2}
WHOLE = {"version": 1, "label": "", "source": "measured", "ranks": 1, "spans": [SPAN]}


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"version": 2}, {"version"}),
        ({"ranks": 0, "colour": "red"}, {"ranks", "colour"}),
        ({"spans": [SPAN, SPAN | {"lane": "DISK", "start_ns": 1.5}]}, {"spans[1].lane", "spans[1].start_ns"}),
        ({"spans": [SPAN, SPAN | {"rank": 1}, SPAN | {"end_ns": 0}]}, {"spans[1]", "spans[2]"}),
    ],
)
def test_faults(tmp_path: Path, change: dict[str, Any], fields: set[str]) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(WHOLE | change))
    with pytest.raises(SpecError) as caught:
        load_timeline(path)
    assert {problem.field for problem in caught.value.problems} == fields


@pytest.mark.parametrize("text", ["", "[", "[]", "3"])
def test_no_timeline(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(SpecError, match="t.json"):
        load_timeline(tmp_path / "t.json")
    with pytest.raises(SpecError, match="none.json"):
        load_timeline(tmp_path / "none.json")
