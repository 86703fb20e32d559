"""Timelines as a picture, PNG or SVG: a panel each, stacked on one time scale in milliseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.scheduler.draw_spans import (
    COMM,
    COMP,
    LANES,
    LINK,
    MEANING,
    Block,
    as_list,
    blocks,
    by_lane,
    exposed,
    milliseconds,
    summary,
)
from tessera_rt.tasks import Pass
from tessera_rt.timeline import Timeline

Colour = tuple[float, float, float]

_COLOURS: dict[Pass, Colour] = {Pass.F: to_rgb("#4c78a8"), Pass.B: to_rgb("#ee8a2d"), Pass.W: to_rgb("#54a24b")}
_EXPOSED, _IDLE, _TEXT, _QUIET = "#e45756", "#f0f0ee", "#222222", "#777777"
_PAGE_WIDTH = (13.0, 34.0)  # inches, least and most
_SIDES = 1.25  # inches beside the axes
_RANK_HEIGHT = (0.62, 0.30)  # inches: few ranks, many ranks
_DPI = 150
_LANE_HEIGHT = {COMP: 1.0, COMM: 0.5, LINK: 0.18}  # relative
_LIGHTER = {COMP: 0.0, COMM: 0.35, LINK: 0.0}  # how far lane colours go to white


def save_picture(timelines: Timeline | Sequence[Timeline], path: str | Path) -> None:
    """Write a picture of the timelines; the suffix of ``path`` says whether PNG or SVG.

    Every rank has a band with its lanes: compute, collectives, messages sent. Red in the compute lane is exposed
    communication, grey is idle; stages of one rank differ in shade. Micro-batch numbers stand where they fit. Raises
    ScheduleError for another suffix or no timeline.
    """
    path, chosen = Path(path), as_list(timelines)
    problems = []
    if path.suffix.lower() not in (".png", ".svg"):
        problems.append(Problem("path", str(path), "a name that ends in .png or .svg"))
    if not chosen:
        problems.append(Problem("timelines", [], "at least one timeline"))
    if problems:
        raise ScheduleError.of("picture", problems)
    # Text stays text in SVG, and equal timelines give equal files.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tessera", "font.size": 8.5}):
        figure = _figure(chosen)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
        figure.savefig(path, format=path.suffix.lower()[1:], dpi=_DPI, metadata=metadata)


def _figure(timelines: list[Timeline]) -> Figure:
    step_ms = max(1, *(timeline.step_ns for timeline in timelines)) / 1e6
    ranks = max(timeline.ranks for timeline in timelines)
    width = _page_width(timelines)
    rank_height = _RANK_HEIGHT[0] if ranks <= 8 else _RANK_HEIGHT[1]
    heights = [timeline.ranks * rank_height + 0.05 for timeline in timelines]
    title, axis, legend = 0.42, 0.45, 0.5
    total = sum(heights) + title * len(timelines) + axis + legend
    figure = Figure(figsize=(width, total), facecolor="white")
    FigureCanvasAgg(figure)
    top = total
    for number, (timeline, height) in enumerate(zip(timelines, heights, strict=True)):
        top -= title + height
        left, right = 0.85, 0.4
        area = (left / width, top / total, (width - left - right) / width, height / total)
        axes = figure.add_axes(area)
        _Panel(timeline, axes, (width - left - right) / (step_ms * 1.01)).draw()
        axes.set_xlim(0, step_ms * 1.01)
        if number < len(timelines) - 1:
            axes.tick_params(axis="x", labelbottom=False)
        else:
            axes.set_xlabel("time (ms)", color=_TEXT)
    figure.legend(
        handles=_legend(timelines), loc="lower center", ncols=8, frameon=False, bbox_to_anchor=(0.5, 0.02 / total)
    )
    return figure


def _page_width(timelines: list[Timeline]) -> float:
    """Wide enough for a micro-batch number in most passes, within limits."""
    step = max(1, *(timeline.step_ns for timeline in timelines))
    lengths: Counter[tuple[int, Pass, int, int]] = Counter()
    for number, timeline in enumerate(timelines):
        for spans in by_lane(timeline).values():
            for block in blocks(span for span in spans if span.lane == COMP):
                lengths[number, block.pass_, block.stage, block.microbatch] += block.end_ns - block.start_ns
    ordered = sorted(lengths.values())
    typical = ordered[len(ordered) // 4] if ordered else step
    needed = 0.16 * step / typical + _SIDES
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
        rows = {key: blocks(spans) for key, spans in lanes.items()}
        shown = [lane for lane in LANES if any(rows[rank, lane] for rank in range(timeline.ranks))] or [COMP]
        places = _lane_places(shown)
        shades = _stage_shades(timeline)
        step_ms = timeline.step_ns / 1e6
        for rank in range(timeline.ranks):
            for lane in shown:
                offset, height = places[lane]
                y = rank + offset
                if lane == COMP:
                    axes.add_patch(Rectangle((0, y), step_ms, height, facecolor=_IDLE, linewidth=0))
                    red = [(a / 1e6, (b - a) / 1e6) for a, b in exposed(lanes[rank, COMP], lanes[rank, COMM])]
                    if red:
                        axes.broken_barh(red, (y, height), facecolors=_EXPOSED, alpha=0.75, linewidth=0)
                row = rows[rank, lane]
                if row:
                    self._bars(row, lane, y, height, shades)
                    if lane == COMP:
                        self._numbers(row, y + height / 2, 5.5 if timeline.ranks > 8 else 6.5)
        axes.axvline(step_ms, color=_QUIET, linewidth=0.8, linestyle=(0, (3, 2)))
        axes.set_ylim(timeline.ranks, 0)
        axes.set_yticks([rank + 0.47 for rank in range(timeline.ranks)])
        axes.set_yticklabels([f"rank {rank}" for rank in range(timeline.ranks)], color=_TEXT)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", color=_QUIET, labelcolor=_TEXT)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(_QUIET)
        axes.set_title(f"{timeline.label} ({timeline.source})", loc="left", fontweight="bold", color=_TEXT, pad=5)
        axes.set_title(summary(timeline, timeline.mean_split()), loc="right", fontsize=8.5, color=_TEXT, pad=5)

    def _bars(self, row: list[Block], lane: str, y: float, height: float, shades: dict[int, float]) -> None:
        ranges = [(block.start_ns / 1e6, (block.end_ns - block.start_ns) / 1e6) for block in row]
        colours = [_lighter(_COLOURS[b.pass_], max(shades.get(b.stage, 0.0), _LIGHTER[lane])) for b in row]
        mean_inches = sum(length for _, length in ranges) / len(ranges) * self.inches_per_ms
        edge = 0.4 if mean_inches > 0.05 else 0.15
        self.axes.broken_barh(ranges, (y, height), facecolors=colours, edgecolors="white", linewidth=edge)

    def _numbers(self, row: list[Block], y: float, size: float) -> None:
        for block in row:
            text = str(block.microbatch)
            inches = (block.end_ns - block.start_ns) / 1e6 * self.inches_per_ms
            if inches > (len(text) * 0.62 + 0.25) * size / 72:
                x = (block.start_ns + block.end_ns) / 2e6
                self.axes.text(
                    x, y, text, ha="center", va="center_baseline", fontsize=size, color="white", clip_on=True
                )


def _lane_places(shown: Sequence[str]) -> dict[str, tuple[float, float]]:
    """(offset from the rank's top, height) of each lane in a band of height 1."""
    gap = 0.03
    unit = (0.9 - gap * (len(shown) - 1)) / sum(_LANE_HEIGHT[lane] for lane in shown)
    places, at = {}, 0.04
    for lane in shown:
        places[lane] = (at, unit * _LANE_HEIGHT[lane])
        at += unit * _LANE_HEIGHT[lane] + gap
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
    found = {span.name[0] for timeline in timelines for span in timeline.spans if span.lane != LINK}
    lanes = {span.lane for timeline in timelines for span in timeline.spans if span.end_ns > span.start_ns}
    patches = [
        Patch(facecolor=_COLOURS[pass_], label=f"{pass_}: {meaning}")
        for pass_, meaning in MEANING.items()
        if pass_ in found
    ]
    if COMM in lanes:
        patches.append(Patch(facecolor=_lighter(_COLOURS[Pass.F], 0.35), label="thinner row: collectives"))
        patches.append(Patch(facecolor=_EXPOSED, alpha=0.75, label="exposed communication"))
    if LINK in lanes:
        patches.append(Patch(facecolor=_COLOURS[Pass.F], label="thinnest row: messages sent"))
    patches.append(Patch(facecolor=_IDLE, label="idle"))
    steps = " / ".join(milliseconds(timeline.step_ns) for timeline in timelines)
    patches.append(Patch(facecolor="none", label=f"dashed: end of step ({steps})"))
    return patches
