"""Timelines as a picture, PNG or SVG: a panel each, stacked on one time scale in milliseconds."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.path import Path

from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.scheduler.draw_spans import (
    COMM,
    COMP,
    LINK,
    MEANING,
    Block,
    Interval,
    as_list,
    blocks,
    by_lane,
    exposed,
    pass_of,
    passes,
    summary,
)
from tessera_rt.tasks import Pass
from tessera_rt.timeline import MemorySeries, Timeline

Colour = tuple[float, float, float]

_COLOURS: dict[Pass, Colour] = {Pass.F: to_rgb("#4c78a8"), Pass.B: to_rgb("#e07b1a"), Pass.W: to_rgb("#54a24b")}
_EXPOSED: Colour = to_rgb("#ea8f90")
_IDLE, _TEXT, _QUIET = "#f0f0ee", "#222222", "#777777"
_PAGE_WIDTH = (13.0, 36.0)  # inches, least and most
_LEFT, _RIGHT = 0.85, 0.35  # inches beside the axes
_FEW_RANKS = 8
_MEMORY_HEIGHT = 1.6  # inches
_RANK_HEIGHT = (0.95, 0.6)  # inches: few ranks, many ranks
_TEXT_SIZE = (3.6, 6.5)  # points, least and most, of micro-batch numbers
_DPI = 150
_FORWARDS, _BACKWARDS = "forward passes", "backward passes"
_HEIGHT = {
    _FORWARDS: 0.42,
    _BACKWARDS: 0.42,
    COMP: 0.9,
    COMM: 0.42,
    LINK: 0.16,
}  # rows of a rank from the top, relative
_LIGHTER = {_FORWARDS: 0.0, _BACKWARDS: 0.0, COMP: 0.0, COMM: 0.3, LINK: 0.0}  # how far a row's colours go to white


def save_picture(
    timelines: Timeline | Sequence[Timeline], path: str | pathlib.Path, memory: Sequence[MemorySeries] = ()
) -> None:
    """Write a picture of the timelines; the suffix of ``path`` says whether PNG or SVG.

    Every rank has a band of rows: forward and backward passes from their first task to their last with the micro-batch
    number, then its lanes: compute, collectives, messages sent. Red in the compute lane is exposed communication, grey
    is idle; stages of one rank differ in shade. ``memory``: drawn below, a line for each rank.

    Raises ScheduleError for another suffix or no timeline.
    """
    path, chosen = pathlib.Path(path), as_list(timelines)
    problems = []
    if path.suffix.lower() not in (".png", ".svg"):
        problems.append(Problem("path", str(path), "a name that ends in .png or .svg"))
    if not chosen:
        problems.append(Problem("timelines", [], "at least one timeline"))
    if problems:
        raise ScheduleError.of("picture", problems)
    # Text stays text in SVG, and equal timelines give equal files.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tessera", "font.size": 8.5}):
        figure = _figure(chosen, memory)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
        figure.savefig(path, format=path.suffix.lower()[1:], dpi=_DPI, metadata=metadata)


def _figure(timelines: list[Timeline], memory: Sequence[MemorySeries]) -> Figure:
    step_ms = max(1, *(timeline.step_ns for timeline in timelines)) / 1e6
    ranks = max(timeline.ranks for timeline in timelines)
    width = _page_width(timelines)
    rank_height = _RANK_HEIGHT[0] if ranks <= _FEW_RANKS else _RANK_HEIGHT[1]
    heights = [timeline.ranks * rank_height + 0.05 for timeline in timelines]
    title, axis, legend = 0.42, 0.45, 0.6
    below = _MEMORY_HEIGHT + title if memory else 0.0
    total = sum(heights) + title * len(timelines) + below + axis + legend
    figure = Figure(figsize=(width, total), facecolor="white")
    FigureCanvasAgg(figure)
    top = total
    for number, (timeline, height) in enumerate(zip(timelines, heights, strict=True)):
        top -= title + height
        inner = width - _LEFT - _RIGHT
        axes = figure.add_axes((_LEFT / width, top / total, inner / width, height / total))
        axes.set_xlim(0, step_ms)
        _Panel(timeline, axes, inner / step_ms).draw()
        if number < len(timelines) - 1 or memory:
            axes.tick_params(axis="x", labelbottom=False)
        else:
            axes.set_xlabel("time (ms)", color=_TEXT)
    if memory:
        inner = (width - _LEFT - _RIGHT) / width
        panel = figure.add_axes((_LEFT / width, (top - below) / total, inner, _MEMORY_HEIGHT / total))
        _draw_memory(panel, memory, step_ms)
    legend_place = (0.5, 0.22 / total)
    figure.legend(handles=_legend(timelines), loc="lower center", ncols=6, frameon=False, bbox_to_anchor=legend_place)
    figure.text(0.5, 0.12 / total, _rows_text(timelines), ha="center", color=_QUIET)
    return figure


def _draw_memory(axes: Axes, memory: Sequence[MemorySeries], step_ms: float) -> None:
    """Planned bytes over the step, one line a rank, darker for earlier ranks."""
    for series in memory:
        shade = _lighter(_COLOURS[Pass.F], 0.75 * series.rank / max(len(memory), 1))
        times = [*(start / 1e6 for start in series.starts_ns), step_ms]
        values = [size / 2**30 for size in series.bytes]
        axes.step(times, [*values, *values[-1:]], where="post", color=shade, linewidth=1.0)
    axes.set_xlim(0, step_ms)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("time (ms)", color=_TEXT)
    axes.tick_params(color=_QUIET, labelcolor=_TEXT)
    peak = max(memory, key=lambda series: series.peak_bytes)
    title = "planned memory (GiB), a line a rank, rank 0 darkest"
    axes.set_title(title, loc="left", fontweight="bold", color=_TEXT, pad=5)
    text = f"peak {peak.peak_bytes / 2**30:.1f} GiB on rank {peak.rank}"
    axes.set_title(text, loc="right", fontsize=8.5, color=_TEXT, pad=5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _page_width(timelines: list[Timeline]) -> float:
    """Wide enough for the micro-batch number in most passes, within limits."""
    step = max(1, *(timeline.step_ns for timeline in timelines))
    lengths = sorted(block.end_ns - block.start_ns for timeline in timelines for block in passes(timeline.spans))
    typical = max(1, lengths[len(lengths) // 4]) if lengths else step
    needed = 0.15 * step / typical + _LEFT + _RIGHT
    return min(max(needed, _PAGE_WIDTH[0]), _PAGE_WIDTH[1])


@dataclass(frozen=True, slots=True)
class _Panel:
    """One timeline in its axes; ``inches_per_ms`` tells which texts fit."""

    timeline: Timeline
    axes: Axes
    inches_per_ms: float

    def draw(self) -> None:
        timeline, axes = self.timeline, self.axes
        lanes = by_lane(timeline)
        rows: dict[tuple[int, str], list[Block]] = {key: blocks(spans) for key, spans in lanes.items()}
        for rank in range(timeline.ranks):
            extents = passes([*lanes[rank, COMP], *lanes[rank, COMM]])
            for row, pass_ in ((_FORWARDS, Pass.F), (_BACKWARDS, Pass.B)):
                rows[rank, row] = [block for block in extents if block.pass_ is pass_]
        shown = [row for row in _HEIGHT if any(rows[rank, row] for rank in range(timeline.ranks))] or [COMP]
        places = _row_places(shown)
        shades = _stage_shades(timeline)
        step_ms = timeline.step_ns / 1e6
        for rank in range(timeline.ranks):
            for row in shown:
                offset, height = places[row]
                y = rank + offset
                if row == COMP:
                    axes.add_patch(Rectangle((0, y), step_ms, height, facecolor=_IDLE, linewidth=0))
                    hidden = exposed(lanes[rank, COMP], lanes[rank, COMM])
                    self._bars([(a, b) for a, b in hidden], [_EXPOSED] * len(hidden), y, height, edge=0)
                found = rows[rank, row]
                colours = [
                    _lighter(_COLOURS[block.pass_], max(shades.get(block.stage, 0.0), _LIGHTER[row])) for block in found
                ]
                self._bars([(block.start_ns, block.end_ns) for block in found], colours, y, height, edge=0.4)
                if row in (_FORWARDS, _BACKWARDS):
                    self._numbers(found, colours, y + height / 2)
            if rank:
                axes.axhline(rank, color="#dddddd", linewidth=0.5)
        axes.axvline(step_ms, color=_QUIET, linewidth=0.8, linestyle=(0, (3, 2)))
        axes.set_ylim(timeline.ranks, 0)
        axes.set_yticks([rank + 0.5 for rank in range(timeline.ranks)])
        axes.set_yticklabels([f"rank {rank}" for rank in range(timeline.ranks)], color=_TEXT)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", color=_QUIET, labelcolor=_TEXT)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(_QUIET)
        axes.set_title(f"{timeline.label} ({timeline.source})", loc="left", fontweight="bold", color=_TEXT, pad=5)
        axes.set_title(summary(timeline, timeline.mean_split()), loc="right", fontsize=8.5, color=_TEXT, pad=5)

    def _bars(
        self, intervals: Sequence[Interval], colours: Sequence[Colour], y: float, height: float, edge: float
    ) -> None:
        """Rectangles over time intervals (ns), with thin white edges where they are wide enough for that.

        All of one colour are one path: thousands of single ones would take long, and long files.
        """
        if not intervals:
            return
        mean_ms = sum(end - start for start, end in intervals) / len(intervals) / 1e6
        width = edge if mean_ms * self.inches_per_ms > 0.05 else edge / 3
        by_colour: dict[Colour, list[Interval]] = {}
        for interval, colour in zip(intervals, colours, strict=True):
            by_colour.setdefault(colour, []).append(interval)
        for colour, chosen in by_colour.items():
            times = np.array(chosen, dtype=float) / 1e6
            corners = np.empty((len(chosen), 5, 2))
            corners[:, :, 0] = times[:, [0, 0, 1, 1, 0]]
            corners[:, :, 1] = [y, y + height, y + height, y, y]
            codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(chosen)
            path = Path(corners.reshape(-1, 2), codes)
            bars = PathCollection([path], facecolors=[colour], edgecolors="white", linewidths=width)
            self.axes.add_collection(bars, autolim=False)

    def _numbers(self, found: list[Block], colours: Sequence[Colour], y: float) -> None:
        """Micro-batch numbers, smaller where they would not fit, left out where they would be too small to read."""
        for block, colour in zip(found, colours, strict=True):
            text = str(block.microbatch)
            room = (block.end_ns - block.start_ns) / 1e6 * self.inches_per_ms * 72 / (0.62 * len(text) + 0.1)
            if room >= _TEXT_SIZE[0]:
                x = (block.start_ns + block.end_ns) / 2e6
                ink = "white" if sum(colour) < 1.85 else _TEXT
                size = min(round(2 * room) / 2, _TEXT_SIZE[1] if self.timeline.ranks <= _FEW_RANKS else 5.0)
                self.axes.text(x, y, text, ha="center", va="center_baseline", fontsize=size, color=ink)


def _row_places(shown: Sequence[str]) -> dict[str, tuple[float, float]]:
    """(offset from the rank's top, height) of each row in a band of height 1."""
    gap = 0.02
    unit = (0.9 - gap * (len(shown) - 1)) / sum(_HEIGHT[row] for row in shown)
    places, at = {}, 0.05
    for row in shown:
        places[row] = (at, unit * _HEIGHT[row])
        at += unit * _HEIGHT[row] + gap
    return places


def _stage_shades(timeline: Timeline) -> dict[int, float]:
    """How far each stage's colour goes to white: later stages of a rank are lighter."""
    stages: dict[int, set[int]] = {}
    for span in timeline.spans:
        if span.lane != LINK:
            stages.setdefault(span.rank, set()).add(span.stage)
    shades: dict[int, float] = {}
    for held in stages.values():
        for position, stage in enumerate(sorted(held)):
            shades[stage] = 0.4 * position / max(len(held) - 1, 1)
    return shades


def _lighter(colour: Colour, share: float) -> Colour:
    red, green, blue = (channel + (1 - channel) * share for channel in colour)
    return red, green, blue


def _legend(timelines: list[Timeline]) -> list[Patch]:
    spans = [span for timeline in timelines for span in timeline.spans if span.end_ns > span.start_ns]
    found = {pass_of(span) for span in spans}
    lanes = {span.lane for span in spans}
    patches = [Patch(facecolor=_COLOURS[p], label=f"{p}: {meaning}") for p, meaning in MEANING.items() if p in found]
    if COMM in lanes:
        patches.append(Patch(facecolor=_EXPOSED, label="exposed communication (compute waits)"))
    patches.append(Patch(facecolor=_IDLE, label="idle"))
    return patches


def _rows_text(timelines: list[Timeline]) -> str:
    lanes = {span.lane for timeline in timelines for span in timeline.spans if span.end_ns > span.start_ns}
    rows = [f"{_FORWARDS} and {_BACKWARDS} with their micro-batch", "compute"]
    rows += [name for lane, name in ((COMM, "collectives"), (LINK, "messages sent")) if lane in lanes]
    return f"rows of a rank: {', '.join(rows)}; later stages of a rank are lighter"
