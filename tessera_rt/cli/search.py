"""`tessera plan --search`: a grid of plans, and the frontier of step time against memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from tessera_rt.cli import context as cli_context
from tessera_rt.cli.output import RequestError, gib, ms
from tessera_rt.costs import Recompute
from tessera_rt.errors import PlanError, Problem
from tessera_rt.plan import Plan
from tessera_rt.planner.plan_grid import AXES, Choice, Tried, choices, search_grid

GRID_EVALUATIONS = 60
"""Partitions that tuning looks at for each plan of a grid; the one that is written is planned in full."""
_DEFAULT_VPP = (1, 2, 4)

Row = dict[str, Any]


def parse_axes(given: Sequence[str]) -> dict[str, list[str | int]]:
    """``vpp=1,2,4`` and the like as axes of a grid. Raises RequestError for anything else."""
    axes: dict[str, list[str | int]] = {}
    problems: list[Problem] = []
    for text in given:
        name, equals, values = text.partition("=")
        listed = [value.strip() for value in values.split(",") if value.strip()]
        if not equals or name not in AXES or not listed or name in axes:
            allowed = f"AXIS=VALUE,... once for an axis, AXIS one of {', '.join(AXES)}"
            problems.append(Problem("--over", text, allowed, "such as --over vpp=1,2,4"))
        elif AXES[name] is int and not all(value.isdecimal() for value in listed):
            problems.append(Problem("--over", text, f"whole numbers for {name}"))
        else:
            axes[name] = [int(value) if AXES[name] is int else value for value in listed]
    if problems:
        raise RequestError.of("search", problems)
    return axes


def searched(request: cli_context.PlanRequest, over: Sequence[str]) -> tuple[list[Tried], cli_context.PlanRequest]:
    """The plans of a grid around a request, and the request of the fastest one.

    Without ``over``: interleaved and V-shaped orders (1F1B with one stage a rank), 1, 2 and 4 stages a rank, half and
    twice the tokens where they divide a step's, and every recomputation policy unless one was asked for. Attention
    looks at as many tokens throughout. Raises RequestError if no point of the grid has a plan.
    """
    tokens = cli_context.DEFAULT_TOKENS if request.tokens is None else request.tokens
    base = replace(request, context=tokens if request.context is None else request.context, partitioner="chain-dp")
    axes = parse_axes(over) or _default_axes(request, tokens)
    first = Choice(
        template=request.template or "interleaved-1f1b",
        vpp=request.vpp,
        tokens=tokens,
        microbatches=request.microbatches,
        recompute=request.recompute,
    )

    def asked(choice: Choice) -> cli_context.PlanRequest:
        return replace(
            base,
            template=choice.template,
            vpp=choice.vpp,
            tokens=choice.tokens,
            microbatches=choice.microbatches,
            recompute=choice.recompute,
            comm_sms=base.comm_sms if choice.comm_sms is None else str(choice.comm_sms),
            evaluations=GRID_EVALUATIONS,
        )

    def build(choice: Choice) -> Plan:
        return cli_context.make_plan(asked(choice)).plan

    try:
        grid = choices(axes, tokens=tokens, microbatches=request.microbatches, default=first)
    except PlanError as error:
        raise RequestError(error.headline, error.problems) from None
    tried = search_grid(grid, build)
    if tried[0].plan is None:
        problems = [Problem(_named(one.choice), "no plan", one.reason) for one in tried]
        raise RequestError.of("search: no point of the grid has a plan", problems)
    full = replace(asked(tried[0].choice), partitioner=request.partitioner, evaluations=request.evaluations)
    return tried, full


def search_rows(tried: Sequence[Tried]) -> list[Row]:
    """One row a point of the grid, fastest first; ``step_ns`` and ``peak_bytes`` are None where there is no plan."""
    return [
        {
            "template": one.choice.template,
            "vpp": one.choice.vpp,
            "tokens": one.choice.tokens,
            "microbatches": one.choice.microbatches,
            "comm_sms": one.choice.comm_sms if one.plan is None else one.plan.assumptions.comm_sms,
            "recompute": one.choice.recompute if one.plan is None else str(one.plan.workload.recompute),
            "step_ns": None if one.plan is None else one.step_ns,
            "peak_bytes": None if one.plan is None else one.peak_bytes,
            "frontier": one.frontier,
            "reason": one.reason,
        }
        for one in tried
    ]


def search_table(tried: Sequence[Tried]) -> Table:
    """The frontier of time against memory for people, and below it the other plans."""
    table = Table(title="Plans of the grid; * no other is as fast and as lean", title_justify="left")
    for name in ("", "template", "vpp", "tokens", "micro-batches", "comm SMs", "recompute", "step ms", "fullest rank"):
        table.add_column(name, justify="left" if name in ("", "template", "recompute") else "right")
    planned = [row for row in search_rows(tried) if row["step_ns"] is not None]
    for row in sorted(planned, key=lambda row: (not row["frontier"], row["step_ns"])):
        table.add_row(
            "*" if row["frontier"] else "",
            *(str(row[name]) for name in ("template", "vpp", "tokens", "microbatches", "comm_sms", "recompute")),
            ms(row["step_ns"]),
            gib(row["peak_bytes"]),
        )
    return table


def refusals(tried: Sequence[Tried]) -> list[str]:
    """A line for each point without a plan."""
    return [f"no plan: {_named(one.choice)}: {one.reason}" for one in tried if one.plan is None]


def _default_axes(request: cli_context.PlanRequest, tokens: int) -> dict[str, list[str | int]]:
    total = tokens * request.microbatches
    sizes = [size for size in (tokens // 2, tokens, 2 * tokens) if size and total % size == 0]
    axes: dict[str, list[str | int]] = {
        "template": [request.template] if request.template else ["interleaved-1f1b", "dualpipe-v"],
        "vpp": list(_DEFAULT_VPP),
        "tokens": [tokens] if request.costs is not None else list(sizes),
    }
    if request.recompute == "auto" and request.costs is None:
        axes["recompute"] = [str(policy) for policy in Recompute]
    return axes


def _named(choice: Choice) -> str:
    budget = "" if choice.comm_sms is None else f", {choice.comm_sms} communication SMs"
    return f"{choice.template}, vpp {choice.vpp}, {choice.tokens} tokens, recompute {choice.recompute}{budget}"
