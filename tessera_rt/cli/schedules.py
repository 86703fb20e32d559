"""`tessera simulate SPEC --schedules all`: one simulated step of every schedule, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from tessera_rt.cli import context as cli_context
from tessera_rt.cli import tables as cli_tables
from tessera_rt.cli.output import RequestError, gib, ms
from tessera_rt.errors import Problem
from tessera_rt.planner.compare_schedules import EVALUATIONS, SCHEDULES, compare, refusal
from tessera_rt.timeline import Timeline

Row = dict[str, Any]


def schedule_rows(
    request: cli_context.PlanRequest, contention: float | None
) -> tuple[list[Row], list[Row], list[Timeline]]:
    """One row per schedule, one with the reason per schedule that the sizes do not allow, and the timelines.

    Partitions are serial-balanced unless a schedule's name says otherwise; no memory limit is applied. ``mfu`` is None
    where costs come from a file, which states no peak. Raises RequestError if no schedule can have the sizes.
    """
    model, costs, device = cli_context.model_costs(request)
    pp, vpp, microbatches = request.pp, request.vpp, request.microbatches
    refused = [
        {"schedule": schedule.name, "reason": reason}
        for schedule in SCHEDULES
        if (reason := refusal(schedule, pp=pp, vpp=vpp, microbatches=microbatches)) is not None
    ]
    if len(refused) == len(SCHEDULES):
        raise RequestError.of("simulate", [Problem("--schedules", "all", refused[0]["reason"])])
    rows: list[Row] = []
    timelines: list[Timeline] = []
    evaluations = EVALUATIONS if request.evaluations is None else request.evaluations
    for compared in compare(
        model, costs, pp=pp, vpp=vpp, microbatches=microbatches, contention=contention, evaluations=evaluations
    ):
        timelines.append(compared.timeline)
        split = compared.timeline.mean_split()
        rows.append(
            {
                "schedule": compared.schedule.name,
                "step_ns": compared.timeline.step_ns,
                "exposed_ns": split.exposed_ns,
                "bubble_ns": split.bubble_ns,
                "peak_bytes": compared.peak_bytes,
                **cli_tables.rates(
                    model,
                    costs.workload,
                    microbatches,
                    ranks=pp,
                    step_ns=compared.timeline.step_ns,
                    peak=None if device is None else device.peak_flops[costs.workload.dtype],
                ),
            }
        )
    return rows, refused, timelines


def schedule_table(rows: Sequence[Row]) -> Table:
    """``schedule_rows`` for people."""
    table = Table(title="One simulated step of every schedule; parts are means over ranks", title_justify="left")
    for name in ("schedule", "step ms", "exposed ms", "bubble ms", "fullest rank", "tokens/s", "MFU %"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for row in rows:
        table.add_row(
            row["schedule"],
            *(ms(row[name]) for name in ("step_ns", "exposed_ns", "bubble_ns")),
            gib(row["peak_bytes"]),
            f"{row['tokens_per_s']:,.0f}",
            "" if row["mfu"] is None else f"{100 * row['mfu']:.1f}",
        )
    return table
