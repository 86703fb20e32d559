"""Timelines on a terminal: a grid with one row per rank and lane, and a table of where the step time goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.style import Style
from rich.table import Table
from rich.text import Text

from tessera_rt.scheduler.draw_spans import (
    COMM,
    COMP,
    LANES,
    LINK,
    MEANING,
    Block,
    Interval,
    as_list,
    blocks,
    by_lane,
    exposed,
    milliseconds,
    passes,
    summary,
)
from tessera_rt.tasks import Pass
from tessera_rt.timeline import Timeline

_FILL = {Pass.F: "-", Pass.B: "=", Pass.W: "~"}  # what tells passes apart where there are no colours
_COLOURS = {Pass.F: ("#2f5d8c", "#4a7db5"), Pass.B: ("#b35c06", "#cf7a1f"), Pass.W: ("#2f7a2d", "#4f9650")}
_IDLE, _EXPOSED = ".", "x"
_EXPOSED_STYLE = Style(color="#e45756")
_PREFIX = len("rank 00 COMP |")

Cell = Block | str  # a block (its times play no part), or _IDLE, _EXPOSED


def terminal_grid(timelines: Timeline | Sequence[Timeline], width: int = 120) -> RenderableType:
    """A grid of at most ``width`` columns for each timeline, all on one time scale, with a legend.

    Rows F and B show whole passes, from their first task to their last, where they are wide enough; then comes a row
    per lane. A column shows one of the things its time went to, each as often as its share demands. Blocks start with
    torch's notation where it fits (``1F3``: stage 1, forward, micro-batch 3). Without colours passes are told apart by
    letter and fill.
    """
    return _Grid(as_list(timelines), width)


def split_table(timelines: Timeline | Sequence[Timeline]) -> Table:
    """How each step divides, mean over ranks: compute, exposed communication, bubble with its parts; ratio to row 1."""
    table = Table(title="Step time, mean over ranks")
    table.add_column("schedule")
    table.add_column("source")
    names = ("step", "vs first", "compute", "exposed", "bubble", "warm-up", "imbalance", "cool-down")
    for name in names:
        table.add_column(name, justify="right")
    first = 0
    for timeline in as_list(timelines):
        split = timeline.mean_split()
        step = timeline.step_ns
        first = first or step
        parts = (
            split.compute_ns,
            split.exposed_ns,
            split.bubble_ns,
            split.warmup_ns,
            split.imbalance_ns,
            split.cooldown_ns,
        )
        shares = [f"{100 * ns / step:.1f} %" if step else "-" for ns in parts]
        ratio = f"{step / first:.3f}" if first else "-"
        table.add_row(timeline.label, timeline.source, milliseconds(step), ratio, *shares)
    return table


@dataclass(frozen=True, slots=True)
class _Grid:
    timelines: list[Timeline]
    width: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plain = console.color_system is None or console.no_color
        columns = max(10, min(self.width, options.max_width) - _PREFIX - 1)
        step = max((timeline.step_ns for timeline in self.timelines), default=0)
        column_ns = max(1, -(-step // columns))
        for timeline in self.timelines:
            yield Text(f"{timeline.label} ({timeline.source})", style="bold", end="")
            yield Text(f"  {summary(timeline, timeline.mean_split())}")
            yield from _rows(timeline, columns, column_ns, plain)
        yield from _legend(column_ns, plain)


def _rows(timeline: Timeline, columns: int, column_ns: int, plain: bool) -> Iterator[Text]:
    lanes = by_lane(timeline)
    lengths = sorted(block.end_ns - block.start_ns for block in passes(timeline.spans))
    wide = bool(lengths) and lengths[len(lengths) // 2] >= 2 * column_ns
    shown = [lane for lane in LANES if any(blocks(lanes[rank, lane]) for rank in range(timeline.ranks))]
    for rank in range(timeline.ranks):
        comp, comm = lanes[rank, COMP], lanes[rank, COMM]
        rows: list[tuple[str, list[Block], list[Interval]]] = []
        if wide:
            whole = passes([*comp, *comm])
            rows += [(pass_, [block for block in whole if block.pass_ is pass_], []) for pass_ in (Pass.F, Pass.B)]
        rows += [(lane, blocks(lanes[rank, lane]), exposed(comp, comm) if lane == COMP else []) for lane in shown]
        for number, (name, found, hidden) in enumerate(rows):
            row = Text(f"{'' if number else f'rank {rank}':7} {name:4} |", no_wrap=True, overflow="crop")
            _append_cells(row, _cells(found, hidden, columns, column_ns, timeline.step_ns), name, plain)
            row.append("|")
            yield row


def _cells(row: list[Block], hidden: list[Interval], columns: int, column_ns: int, step_ns: int) -> list[Cell]:
    """What to show in each column: F, B, W, exposed and idle in turn, as often as their shares of the time demand.

    Each column adds the time of every kind in it to that kind's credit; among the kinds present the one with the most
    credit is shown and pays with the column's length. So short things between long ones are not lost.
    """
    shares: list[Counter[Cell]] = [Counter() for _ in range(columns)]

    def add(what: Cell, start: int, end: int) -> None:
        for column in range(start // column_ns, min(columns, -(-end // column_ns))):
            left, right = column * column_ns, (column + 1) * column_ns
            shares[column][what] += min(end, right) - max(start, left)

    for block in row:
        add(Block(block.pass_, block.stage, block.microbatch, 0, 0), block.start_ns, block.end_ns)
    for start, end in hidden:
        add(_EXPOSED, start, end)
    cells: list[Cell] = []
    credit: Counter[str] = Counter()
    for column, share in enumerate(shares):
        length = min(step_ns, (column + 1) * column_ns) - column * column_ns
        if length <= 0:
            cells.append(" ")
            continue
        share[_IDLE] = max(0, length - share.total())
        present = [what for what, ns in share.items() if ns > 0]
        for what in present:
            credit[_kind(what)] += share[what]
        chosen = max(present, key=lambda what: (credit[_kind(what)], share[what]))
        credit[_kind(chosen)] -= length
        cells.append(chosen)
    return cells


def _kind(what: Cell) -> str:
    return what.pass_.value if isinstance(what, Block) else what


def _append_cells(row: Text, cells: list[Cell], lane: str, plain: bool) -> None:
    """Neighbouring equal cells become one run with its name in front."""
    start = 0
    while start < len(cells):
        what = cells[start]
        end = start
        while end < len(cells) and cells[end] == what:
            end += 1
        length = end - start
        if isinstance(what, Block):
            shade = (what.microbatch + what.stage) % 2
            style = Style() if plain else Style(color="white", bgcolor=_COLOURS[what.pass_][shade], dim=lane != COMP)
            row.append(_run_text(what, length, plain), style)
        elif what == _EXPOSED:
            row.append(_EXPOSED * length, _EXPOSED_STYLE)
        else:
            row.append((what if lane == COMP else " ") * length, "dim")
        start = end


def _run_text(block: Block, length: int, plain: bool) -> str:
    fill = _FILL[block.pass_] if plain else " "
    short = f"{block.pass_}{block.microbatch}" if plain else str(block.microbatch)
    least = block.pass_.value if plain else str(block.microbatch % 10)
    full = str(block)
    text = full if len(full) < length else short if len(short) <= length else least
    return text.ljust(length, fill)


def _legend(column_ns: int, plain: bool) -> Iterator[Text]:
    kinds = Text("", no_wrap=False)
    for pass_, meaning in MEANING.items():
        style = Style() if plain else Style(color="white", bgcolor=_COLOURS[pass_][0])
        kinds.append(f"{pass_}{_FILL[pass_]}" if plain else f" {pass_} ", style)
        kinds.append(f" {meaning}   ")
    kinds.append(_EXPOSED, _EXPOSED_STYLE)
    kinds.append(" exposed communication (compute waits)   ")
    kinds.append(f"{_IDLE} idle")
    yield kinds
    yield Text(
        f"1F3: stage 1, F, micro-batch 3   {COMP} compute, {COMM} collectives, {LINK} messages sent   "
        f"one column: {milliseconds(column_ns)}",
        style="dim",
    )
