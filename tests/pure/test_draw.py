"""Drawings of timelines: what they say, not how their pixels look."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console, RenderableType

from tessera_rt.costs import Link
from tessera_rt.errors import ScheduleError
from tessera_rt.scheduler.draw import perfetto_trace, save_perfetto, save_picture, split_table, terminal_grid
from tessera_rt.scheduler.draw_spans import blocks, by_lane, exposed, milliseconds, passes
from tessera_rt.scheduler.simulate import simulate
from tessera_rt.tasks import Pass
from tessera_rt.testing.costs import uniform_costs
from tessera_rt.testing.plans import simple_model, simple_plan
from tessera_rt.timeline import Span, Timeline


def span(name: str, start: int, end: int, *, rank: int = 0, lane: str = "COMP", stage: int = 0, m: int = 0) -> Span:
    return Span(rank=rank, lane=lane, name=name, stage=stage, microbatch=m, start_ns=start, end_ns=end)


def timeline(*spans: Span, label: str = "plan", source: str = "simulated", ranks: int = 1) -> Timeline:
    return Timeline(label=label, source=source, ranks=ranks, spans=spans)


def simulated(microbatches: int = 4, pp: int = 2, vpp: int = 2) -> Timeline:
    """A small pipeline with overlap, collectives and messages that take time."""
    model = simple_model("m" * 2 * pp * vpp)
    costs = uniform_costs(model, (300_000, 300_000, 200_000), comm_ns=150_000, link=Link(latency_ns=20_000))
    plan = simple_plan(model, pp=pp, vpp=vpp, microbatches=microbatches, joint=True)
    return simulate(plan, model, costs, label="pairs")


# Two ranks, 100 ns: F 0-30, a collective 30-40 that nothing hides, B and W, then idle; a message to rank 1.
HAND = timeline(
    span("F_ATTN:L0", 0, 20),
    span("F_MLP:L0", 20, 30),
    span("F_COMB:L0", 30, 40, lane="COMM"),
    span("SEND_F", 40, 50, lane="LINK"),
    span("B_MLP:L0", 70, 80),
    span("W_MLP:L0", 80, 90),
    span("F_MLP:L1", 50, 60, rank=1, stage=1),
    span("B_MLP:L1", 60, 65, rank=1, stage=1),
    span("SEND_B", 65, 70, rank=1, lane="LINK", stage=1),
    span("W_MLP:L1", 65, 100, rank=1, stage=1),
    ranks=2,
)


def printed(renderable: RenderableType, *, width: int = 120, colour: bool = False) -> str:
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=colour, color_system="truecolor" if colour else None, legacy_windows=False
    )
    console.print(renderable)
    return out.getvalue()


def rows_of(text: str) -> list[tuple[str, str]]:
    """(name, cells) of every row of a grid."""
    return [(match[1].strip(), match[2]) for match in re.finditer(r"^(.{13})\|(.*)\|$", text, re.M)]


# -- what all share ----------------------------------------------------------------------------------------------------


def test_blocks_join_neighbours_of_one_pass() -> None:
    lane = by_lane(HAND)[0, "COMP"]
    assert [(str(b), b.start_ns, b.end_ns) for b in blocks(lane)] == [("0F0", 0, 30), ("0B0", 70, 80), ("0W0", 80, 90)]
    assert blocks([span("F_ROUTE:L0", 5, 5)]) == []


def test_passes_go_from_first_to_last_task() -> None:
    found = [(str(b), b.start_ns, b.end_ns) for b in passes(HAND.spans)]
    assert found == [("0F0", 0, 40), ("1F0", 50, 60), ("1B0", 60, 65), ("0B0", 70, 80)]


@given(st.data())
def test_exposed_is_collectives_without_compute(data: st.DataObject) -> None:
    interval = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted)
    comp = [span("F_MLP:L0", a, b) for a, b in sorted(data.draw(st.lists(interval, max_size=6)))]
    comm = [span("F_DISP:L0", a, b, lane="COMM") for a, b in sorted(data.draw(st.lists(interval, max_size=6)))]

    def covered(spans: list[Span]) -> set[int]:
        return {t for s in spans for t in range(s.start_ns, s.end_ns)}

    found = exposed(comp, comm)
    assert {t for a, b in found for t in range(a, b)} == covered(comm) - covered(comp)
    assert all(a < b for a, b in found)
    assert all(before[1] <= after[0] for before, after in pairwise(found))
    line = timeline(*comp, *comm)
    assert line.split(0).exposed_ns == len(covered(comm) - covered(comp))


def test_times_have_about_three_digits() -> None:
    values = (0, 123, 123_456, 1_234_567, 12_345_678, 123_456_789, 12_345_678_900)
    assert [milliseconds(value) for value in values] == [
        "0.000000 ms",
        "0.000123 ms",
        "0.123 ms",
        "1.23 ms",
        "12.3 ms",
        "123 ms",
        "12346 ms",
    ]


# -- terminal ----------------------------------------------------------------------------------------------------------


def test_grid_without_colours() -> None:
    text = printed(terminal_grid(HAND, width=115))  # 100 columns of 1 ns
    assert "\x1b" not in text
    assert rows_of(text) == [
        ("rank 0  F", "0F0" + "-" * 37 + " " * 60),
        ("B", " " * 70 + "0B0" + "=" * 7 + " " * 20),
        ("COMP", "0F0" + "-" * 27 + "x" * 10 + "." * 30 + "0B0" + "=" * 7 + "0W0" + "~" * 7 + "." * 10),
        ("COMM", " " * 30 + "0F0" + "-" * 7 + " " * 60),
        ("LINK", " " * 40 + "0F0" + "-" * 7 + " " * 50),
        ("rank 1  F", " " * 50 + "1F0" + "-" * 7 + " " * 40),
        ("B", " " * 60 + "1B0==" + " " * 35),
        ("COMP", "." * 50 + "1F0" + "-" * 7 + "1B0==" + "1W0" + "~" * 32),
        ("COMM", " " * 100),
        ("LINK", " " * 65 + "1B0==" + " " * 30),
    ]
    assert text.splitlines()[0] == ("plan (simulated)  step 0.000100 ms: compute 50.0 %, exposed 5.0 %, bubble 45.0 %")
    for words in (
        "F- forward",
        "B= backward for inputs",
        "W~ backward for weights",
        "x exposed communication",
        ". idle",
        "one column: 0.000001 ms",
    ):
        assert words in text


def test_grid_with_colours_has_numbers_and_the_same_columns() -> None:
    text = printed(terminal_grid(HAND, width=115), colour=True)
    assert "\x1b[" in text
    rows = dict(rows_of(re.sub(r"\x1b\[[0-9;]*m", "", text))[:5])
    assert rows["COMP"].startswith("0F0 ") and len(rows["COMP"]) == 100
    assert "x" * 10 + "." * 30 + "0B0" in rows["COMP"]


def test_narrow_blocks_show_letters_or_digits() -> None:
    spans = [span("F_MLP:L0" if m % 2 else "B_MLP:L0", 10 * m, 10 * m + 10, m=m) for m in range(10, 20)]
    line = timeline(*spans)
    plain = dict(rows_of(printed(terminal_grid(line, width=35))))["rank 0  COMP"]
    assert plain.replace(".", "").strip("BF") == "" and plain.count("F") == plain.count("B") == 5
    coloured = re.sub(r"\x1b\[[0-9;]*m", "", printed(terminal_grid(line, width=35), colour=True))
    digits = dict(rows_of(coloured))["rank 0  COMP"].replace(".", "").strip()
    assert digits == "0123456789"


def test_short_things_keep_their_share() -> None:
    """Compute and collectives in turn, each far shorter than a column: half the columns show each."""
    spans = []
    for i in range(1000):
        spans.append(span("F_MLP:L0", 20 * i, 20 * i + 10))
        spans.append(span("F_DISP:L0", 20 * i + 10, 20 * i + 20, lane="COMM"))
    rows = dict(rows_of(printed(terminal_grid(timeline(*spans), width=95))))
    assert abs(rows["COMP"].count("x") - 40) <= 1
    assert abs(rows["COMM"].count("F") - 40) <= 1


def test_one_scale_for_all_and_the_width_is_kept() -> None:
    short, long = simulated(2), simulated(6)
    for width in (40, 80, 200):
        text = printed(terminal_grid([short, long], width=width), width=width)
        assert max(map(len, (f"{name:13}|{cells}|" for name, cells in rows_of(text)))) <= width
        half = rows_of(text)[: len(rows_of(text)) // 2]
        assert all(cells.endswith(" ") for _, cells in half)
    assert len(rows_of(printed(terminal_grid(simulated(4, pp=4), width=200), width=200))) == 4 * 5
    narrow = printed(terminal_grid(long, width=200), width=60)
    assert max(len(line) for line in narrow.splitlines()) <= 60


def test_grid_of_nothing() -> None:
    text = printed(terminal_grid([timeline(label="none")]))
    assert "none (simulated)  step 0.000000 ms" in text
    assert rows_of(text) == []
    assert "forward" in printed(terminal_grid([]))


def test_table_of_step_times() -> None:
    slow = timeline(span("F_MLP:L0", 0, 100), span("B_MLP:L0", 150, 200), label="slow", source="emulated")
    table = split_table([HAND, slow])
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns == {
        "schedule": ["plan", "slow"],
        "source": ["simulated", "emulated"],
        "step": ["0.000100 ms", "0.000200 ms"],
        "vs first": ["1.000", "2.000"],
        "compute": ["50.0 %", "75.0 %"],
        "exposed": ["5.0 %", "0.0 %"],
        "bubble": ["45.0 %", "25.0 %"],
        "warm-up": ["40.0 %", "25.0 %"],
        "imbalance": ["0.0 %", "0.0 %"],
        "cool-down": ["5.0 %", "0.0 %"],
    }
    assert "slow" in printed(table)
    empty = split_table([timeline()])
    assert list(empty.columns[3].cells) == ["-"]


# -- picture -----------------------------------------------------------------------------------------------------------


def svg_texts(path: Path) -> list[str]:
    return ["".join(element.itertext()).strip() for element in ET.parse(path).iter() if element.tag.endswith("}text")]


def test_svg_says_what_it_shows(tmp_path: Path) -> None:
    planned = simulated()
    measured = replace(planned, label="run 7", source="measured")
    path = tmp_path / "steps.svg"
    save_picture([planned, measured], path)
    texts = svg_texts(path)
    assert {"pairs (simulated)", "run 7 (measured)", "time (ms)", "rank 0", "rank 1"} <= set(texts)
    assert texts.count("rank 0") == 2
    for legend in (
        "F: forward",
        "B: backward for inputs",
        "W: backward for weights",
        "exposed communication (compute waits)",
        "idle",
    ):
        assert legend in texts
    assert any(text.startswith("rows of a rank: forward passes and backward passes") for text in texts)
    assert any(text.startswith(f"step {milliseconds(planned.step_ns)}: compute ") for text in texts)
    for m in range(4):  # a number on each of 4 stages, F and B, in 2 panels; ticks of the axis may add some
        assert texts.count(str(m)) >= 16
    again = tmp_path / "again.svg"
    save_picture([planned, measured], again)
    assert again.read_bytes() == path.read_bytes()


def test_svg_of_one_lane_leaves_out_what_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "one.svg"
    save_picture(timeline(span("F_MLP:L0", 0, 10), span("B_MLP:L0", 10, 30)), path)
    texts = " ".join(svg_texts(path))
    assert "F: forward" in texts and "W: " not in texts and "exposed communication" not in texts
    assert "collectives" not in texts and "messages" not in texts


def red_pixels(path: Path) -> int:
    image = Image.open(path).convert("RGB")
    return sum(count for count, colour in image.getcolors(2**24) or [] if colour == (234, 143, 144))


def test_exposed_communication_is_visible(tmp_path: Path) -> None:
    """The red of exposed communication grows with its time."""
    sizes = []
    for exposed_ns in (0, 10, 40):
        path = tmp_path / f"{exposed_ns}.png"
        comm = span("F_COMB:L0", 20, 20 + exposed_ns, lane="COMM")
        save_picture(timeline(span("F_MLP:L0", 0, 20), comm, span("B_MLP:L0", 90, 100)), path)
        sizes.append(red_pixels(path))
    assert sizes[0] == 0
    assert 3.5 < (sizes[2] / sizes[1]) < 4.1  # the legend adds a little to both


@pytest.mark.parametrize(("pp", "microbatches"), [(1, 1), (4, 8), (16, 3)])
def test_png_of_any_size(tmp_path: Path, pp: int, microbatches: int) -> None:
    path = tmp_path / "step.PNG"
    save_picture(simulated(microbatches, pp=pp), path)
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.width >= 13 * 150 and image.height >= 150 * (1 + 0.6 * pp)


def test_pictures_of_nothing_and_of_zero_length(tmp_path: Path) -> None:
    save_picture(timeline(), tmp_path / "empty.png")
    save_picture(timeline(span("F_MLP:L0", 0, 0)), tmp_path / "zero.svg")
    assert (tmp_path / "empty.png").stat().st_size > 1000


def test_wrong_requests_for_a_picture(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"path = .*step\.jpg.*\.png or \.svg") as caught:
        save_picture([], tmp_path / "step.jpg")
    assert [problem.field for problem in caught.value.problems] == ["path", "timelines"]
    assert list(tmp_path.iterdir()) == []


def test_drawing_leaves_matplotlib_as_it_was(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    save_picture(HAND, tmp_path / "step.svg")
    assert dict(matplotlib.rcParams) == before


# -- Perfetto ----------------------------------------------------------------------------------------------------------


def slices(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_trace_holds_every_span_exactly(tmp_path: Path) -> None:
    planned = simulated(pp=3)
    offset = 10**12 + 1
    shifted = (replace(s, start_ns=s.start_ns + offset, end_ns=s.end_ns + offset) for s in planned.spans)
    late = replace(planned, label="late", spans=tuple(shifted))
    path = tmp_path / "trace.json"
    save_perfetto([planned, late, HAND], path)
    trace = json.loads(path.read_text(encoding="utf-8"))
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert sorted(names.values()) == sorted(
        f"{line.label} (simulated) rank {rank}" for line in (planned, late, HAND) for rank in range(line.ranks)
    )
    found = sorted(
        (
            names[e["pid"]],
            lanes[e["pid"], e["tid"]].split()[0],
            e["name"],
            e["args"]["stage"],
            e["args"]["microbatch"],
            round(e["ts"] * 1000),
            round((e["ts"] + e["dur"]) * 1000),
        )
        for e in slices(trace)
    )
    assert found == sorted(
        (f"{line.label} (simulated) rank {s.rank}", s.lane, s.name, s.stage, s.microbatch, s.start_ns, s.end_ns)
        for line in (planned, late, HAND)
        for s in line.spans
    )


def test_slices_of_a_thread_do_not_overlap() -> None:
    """Messages to both neighbours at once, and two collectives under way, go to threads of their own."""
    line = timeline(
        span("SEND_F", 0, 50, lane="LINK"),
        span("SEND_B", 10, 30, lane="LINK", m=1),
        span("SEND_F", 30, 40, lane="LINK", m=2),
        span("F_DISP:L0", 0, 20, lane="COMM"),
        span("B_COMB:L0", 10, 30, lane="COMM"),
    )
    trace = perfetto_trace(line)
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in slices(trace):
        threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(threads) == 4
    for times in threads.values():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(times)))
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["COMM", "COMM 2", "LINK", "LINK 2"]


@pytest.mark.parametrize("stage_of_receiver", [False, True])
def test_arrows_lead_from_messages_to_passes(stage_of_receiver: bool) -> None:
    """Messages may bear the stage that sends them or the one they are for."""
    line = HAND
    if stage_of_receiver:
        other = {"SEND_F": 1, "SEND_B": 0}
        line = replace(HAND, spans=tuple(replace(s, stage=other.get(s.name, s.stage)) for s in HAND.spans))
    arrows = [event for event in perfetto_trace(line)["traceEvents"] if event["ph"] in "sf"]
    assert [(e["ph"], e["name"], e["pid"], round(e["ts"] * 1000)) for e in arrows] == [
        ("s", "SEND_F", 0, 40),
        ("f", "SEND_F", 1, 50),
        ("s", "SEND_B", 1, 65),
        ("f", "SEND_B", 0, 70),
    ]
    assert arrows[0]["id"] == arrows[1]["id"] != arrows[2]["id"] == arrows[3]["id"]


def test_every_message_of_a_simulated_step_has_an_arrow() -> None:
    line = simulated(pp=3)
    messages = sum(s.lane == "LINK" for s in line.spans)
    arrows = [event for event in perfetto_trace(line)["traceEvents"] if event["ph"] == "f"]
    assert messages == len(arrows) > 0
    assert {str(Pass.F), str(Pass.B)} == {event["name"][-1] for event in arrows}
