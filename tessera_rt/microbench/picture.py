"""Pictures of overlap sweeps: times against the SMs given to communication, or against the size of the messages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from tessera_rt.microbench.overlap import OverlapResult, OverlapRow

_LINES = (("communication alone", "comm"), ("compute alone", "comp"), ("both", "both"))


def draw_overlap(results: Mapping[str, OverlapResult], path: Path) -> None:
    """One column of axes per sweep: times above, efficiency below. A sweep of one point is drawn as markers."""
    figure = Figure(figsize=(4.5 * len(results), 5.5), layout="constrained")
    axes = figure.subplots(2, len(results), squeeze=False, sharex="col", height_ratios=(2, 1))
    for column, (name, result) in enumerate(results.items()):
        times, efficiency = axes[0][column], axes[1][column]
        sms = [row.budget.communication for row in result.rows]
        for label, field in _LINES:
            times.plot(sms, [_ms(row, field) for row in result.rows], marker="o", label=label)
        serial = [_ms(row, "comm") + _ms(row, "comp") for row in result.rows]
        times.plot(sms, serial, linestyle=":", marker="x", color="grey", label="one after the other")
        efficiency.plot(sms, [row.efficiency for row in result.rows], marker="o", color="black")
        times.set(title=name, ylabel="ms", ylim=(0, None))
        efficiency.set(xlabel="SMs for communication", ylabel="efficiency", ylim=(min(0, *efficiency.get_ylim()), 1.1))
        efficiency.axhline(1.0, linewidth=0.5, color="grey")
    axes[0][0].legend(fontsize="small")
    some = next(iter(results.values())).machine
    figure.suptitle(f"{some.name}, {some.versions}", fontsize="small")
    figure.savefig(path)


def _ms(row: OverlapRow, field: str) -> float:
    return float(getattr(row, field).ns) / 1e6
