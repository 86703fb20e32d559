"""`tessera simulate`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from tessera_rt.cli import context as cli_context
from tessera_rt.cli import noisy as cli_noisy
from tessera_rt.cli import tables as cli_tables
from tessera_rt.cli.context import OVERLAP_OFF, Opened
from tessera_rt.cli.output import RequestError, Written, console, emit, existing_file, output_path
from tessera_rt.cli.plan import (
    CommSms,
    Context,
    CostsFile,
    DeviceName,
    Dp,
    Dtype,
    Ep,
    Evaluations,
    Group,
    Json,
    Layout,
    MemoryLimit,
    Microbatches,
    ModelName,
    MoeHalves,
    Objective,
    Pad,
    Partitioner,
    Patterns,
    Pp,
    RecomputePolicy,
    TaperedEnds,
    TemplateName,
    TimeLimit,
    Tokens,
    Tp,
    Vpp,
    Window,
    WPool,
)
from tessera_rt.cli.schedules import schedule_rows, schedule_table
from tessera_rt.cost_sources.device import device_ids, load_device
from tessera_rt.costs import CostTable
from tessera_rt.errors import CostError, Problem
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Plan
from tessera_rt.planner.memory_timeline import memory_series
from tessera_rt.scheduler.draw import save_perfetto, save_picture, split_table, terminal_grid
from tessera_rt.scheduler.simulate import simulate as simulate_plan

SIMULATE_EXAMPLES = """\
Simulate one step of a plan and draw it: when every task runs, and where the time goes.

The first argument is a plan file, a run folder, or a model; a model is planned first, with the options of tessera plan.

Examples:

  tessera simulate plan.yaml

  tessera simulate plan.yaml --no-overlap --picture serial.png

  tessera simulate mixtral-8x7b --pp 4 --ep 8 --microbatches 16 --trace step.json

  tessera simulate mixtral-8x7b --pp 4 --vpp 2 --ep 8 --microbatches 16 --schedules all --picture all.png

  tessera simulate plan.yaml --memory --picture step.png

  tessera simulate plan.yaml --noise 0.2 --dbo --replicas 24

  tessera simulate plan.yaml --sensitivity 20

The trace opens in https://ui.perfetto.dev. With noise, ranks of a group receive unequal numbers of rows; a replica is
one group of expert-parallel ranks on every pipeline rank, and the picture shows the first rank of the slowest replica.
"""


_OF_ONE_PLAN = (
    *("template", "objective", "partitioner", "window", "time_limit", "memory_limit", "pad", "comm_sms", "patterns"),
    *("group", "w_pool", "moe_halves", "tapered_ends", "layout"),
)
"""Parameters of planning that a comparison of schedules has settled."""
_OF_MODELS = (
    *("pp", "vpp", "dp", "ep", "tp", "microbatches", "tokens", "context", "recompute", "dtype", "evaluations"),
    *_OF_ONE_PLAN,
)
"""Parameters that a plan has settled."""


def simulate(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(metavar="PLAN|SPEC", help="Plan file, run folder, preset or model file.")],
    pp: Pp = 1,
    vpp: Vpp = 1,
    dp: Dp = 1,
    ep: Ep = 1,
    microbatches: Microbatches = 8,
    tokens: Tokens = None,
    context: Context = None,
    template: TemplateName = None,
    objective: Objective = "step",
    partitioner: Partitioner = "threshold",
    window: Window = "2",
    time_limit: TimeLimit = 20.0,
    memory_limit: MemoryLimit = None,
    recompute: RecomputePolicy = "auto",
    device: DeviceName = None,
    costs: CostsFile = None,
    pad: Pad = "groups",
    dtype: Dtype = None,
    tp: Tp = 1,
    comm_sms: CommSms = "auto",
    patterns: Patterns = None,
    group: Group = None,
    w_pool: WPool = 0.0,
    moe_halves: MoeHalves = False,
    tapered_ends: TaperedEnds = 0,
    evaluations: Evaluations = None,
    layout: Layout = None,
    model: ModelName = None,
    overlap: Annotated[
        bool | None,
        typer.Option(
            "--overlap/--no-overlap",
            help="Whether passes run together, or one after the other.",
            show_default="overlap, or as the run did",
        ),
    ] = None,
    contention: Annotated[
        float | None,
        typer.Option("--contention", help="Slow-down of compute under collectives.", show_default="the costs'"),
    ] = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="Draw to this file (.png or .svg).")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write a Perfetto trace (.json).")] = None,
    schedules: Annotated[
        str | None, typer.Option("--schedules", help="all: every schedule instead of a plan, for a model.")
    ] = None,
    noise: Annotated[
        float | None, typer.Option("--noise", help="Uneven routing: CV of the rows that an EP group's ranks receive.")
    ] = None,
    counts: Annotated[
        Path | None,
        typer.Option("--counts", help="Recorded rows [MoE layers, micro-batches, ep, experts] (.json, .npz)."),
    ] = None,
    jitter: Annotated[
        float | None, typer.Option("--jitter", help="Log-normal factors on durations: their standard deviation.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Of noise and jitter.")] = 0,
    dbo: Annotated[bool, typer.Option("--dbo", help="Move weight gradients into idle time, as at run time.")] = False,
    fit_factor: Annotated[
        float | None,
        typer.Option("--fit-factor", help="Longest W for a gap, in gaps.", show_default="1"),
    ] = None,
    pool_tasks: Annotated[
        int | None, typer.Option("--pool-tasks", help="Most W tasks that wait on a rank.", show_default="32")
    ] = None,
    pool_bytes: Annotated[
        int | None,
        typer.Option("--pool-bytes", help="Most bytes that they hold.", show_default="what the memory limit leaves"),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option("--replicas", help="Data-parallel replicas.", show_default="the plan's dp")
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Memory of every rank over the step.")] = False,
    sensitivity: Annotated[
        float | None, typer.Option("--sensitivity", help="Which cost error of this many % would change the partition.")
    ] = None,
    json: Json = False,
) -> None:
    inputs = (source, costs, device, model, patterns, template)
    picture = output_path("--picture", picture, Written.PICTURE, inputs)
    trace = output_path("--trace", trace, Written.TRACE, inputs)
    noisy_request = cli_noisy.NoiseRequest(
        noise=noise,
        counts=None if counts is None else existing_file("--counts", counts),
        jitter=jitter,
        seed=seed,
        dbo=dbo,
        fit_factor=fit_factor,
        pool_tasks=pool_tasks,
        pool_bytes=pool_bytes,
        replicas=replicas,
    )
    if schedules is not None:
        _check_extras(memory or sensitivity is not None or noisy_request.asked)
        _check_schedules(ctx, schedules, source, overlap=overlap)
    if cli_context.is_plan(source):
        if problems := _given(ctx, _OF_MODELS, "left out: the first argument is a plan, which says it"):
            raise RequestError.of("simulate: options for models only", problems)
        opened, spec, table = _opened(source, model, costs, device)
        plan = opened.plan
        if overlap is None:
            overlap = opened.overlap
            if not overlap and not json:
                console().print(OVERLAP_OFF)
    else:
        request = cli_context.PlanRequest(
            spec=source,
            pp=pp,
            vpp=vpp,
            dp=dp,
            ep=ep,
            microbatches=microbatches,
            tokens=tokens,
            context=context,
            template=template,
            objective=objective,
            partitioner=partitioner,
            window=window,
            time_limit=time_limit,
            memory_limit=memory_limit,
            recompute=recompute,
            device=device,
            costs=costs,
            pad=pad,
            dtype=dtype,
            tp=tp,
            comm_sms=comm_sms,
            patterns=patterns,
            group=group,
            w_pool=w_pool,
            moe_halves=moe_halves,
            tapered_ends=tapered_ends,
            evaluations=evaluations,
            layout=layout,
        )
        if model is not None:
            raise RequestError.of("simulate", [Problem("--model", model, "left out: the first argument is a model")])
        if schedules is not None:
            _print_schedules(request, contention, picture, trace, json=json)
            return
        made = cli_context.make_plan(request)
        plan, spec, table = made.plan, made.model, made.costs
    overlap = overlap is not False
    label = plan.template if overlap else f"{plan.template}, no overlap"
    timeline = simulate_plan(plan, spec, table, overlap=overlap, contention=contention, label=label)
    noisy = None
    if noisy_request.asked:
        noisy = cli_noisy.simulate_noise(noisy_request, plan, spec, table, overlap=overlap, contention=contention)
    held = memory_series(plan, spec, table, timeline) if memory else ()
    effects = () if sensitivity is None else cli_noisy.sensitivity_effects(sensitivity, plan, spec, table, contention)
    shown = [timeline] if noisy is None else [timeline, noisy.timeline]
    if picture is not None:
        save_picture(shown, picture, held)
    if trace is not None:
        save_perfetto(shown, trace)
    files = {name: path for name, path in (("picture", picture), ("trace", trace)) if path is not None}
    rates = _rates(plan, spec, table, timeline.step_ns)
    if json:
        data = {
            "model": plan.model,
            "overlap": overlap,
            **cli_tables.timeline_row(timeline),
            **rates,
            "rows": cli_tables.rank_rows(timeline),
            "files": {name: str(path) for name, path in files.items()},
        }
        if noisy is not None:
            data["noise"] = cli_noisy.noise_row(noisy)
        if held:
            data["peak_bytes"] = max(series.peak_bytes for series in held)
            data["memory"] = cli_noisy.memory_rows(held)
        if effects:
            data["sensitivity"] = cli_noisy.sensitivity_rows(effects)
        emit(data)
        return
    out = console()
    out.print(terminal_grid(timeline, out.width))
    out.print(split_table(timeline))
    if rates["tokens_per_s"] is not None:
        share = "" if rates["mfu"] is None else f", {100 * rates['mfu']:.1f} % of the ranks' peak"
        out.print(f"{rates['tokens_per_s']:,.0f} tokens/s{share}")
    if noisy is not None:
        row = cli_noisy.noise_row(noisy)
        out.print(cli_noisy.noise_table(row))
        for line in cli_noisy.noise_text(row):
            out.print(line)
    if held:
        out.print(cli_noisy.memory_text(held))
    if effects:
        out.print(cli_noisy.sensitivity_table(effects))
    for path in files.values():
        out.print(f"wrote {path}")


def _rates(plan: Plan, model: ModelSpec, costs: CostTable, step_ns: int) -> dict[str, float | None]:
    """``tables.rates`` of a plan; without MFU where the device is not known."""
    peak = None
    if costs.provenance.source == "roofline" and costs.provenance.device in device_ids():
        peak = load_device(costs.provenance.device).peak_flops[plan.workload.dtype]
    return cli_tables.rates(model, plan.workload, plan.microbatches, ranks=plan.mesh.pp, step_ns=step_ns, peak=peak)


def _check_extras(asked: bool) -> None:
    if asked:
        names = "--noise, --counts, --jitter, --dbo, --replicas, --memory, --sensitivity"
        raise RequestError.of("simulate", [Problem(names, "given", "left out with --schedules")])


def _given(ctx: typer.Context, names: Iterable[str], allowed: str) -> list[Problem]:
    """A problem for each option that was given: it would change nothing."""
    return [
        Problem(f"--{name.replace('_', '-')}", ctx.params[name], allowed)
        for name in names
        if (source := ctx.get_parameter_source(name)) is not None and source.name != "DEFAULT"
    ]


def _check_schedules(ctx: typer.Context, schedules: str, source: str, *, overlap: bool | None) -> None:
    problems = []
    if schedules != "all":
        problems.append(Problem("--schedules", schedules, "all"))
    if cli_context.is_plan(source):
        problems.append(Problem("SPEC", source, "a model: a plan has one schedule"))
    if overlap is False:
        problems.append(Problem("--no-overlap", True, "left out with --schedules"))
    problems += _given(ctx, _OF_ONE_PLAN, "left out with --schedules")
    if problems:
        raise RequestError.of("simulate", problems)


def _print_schedules(
    request: cli_context.PlanRequest, contention: float | None, picture: Path | None, trace: Path | None, *, json: bool
) -> None:
    """The comparison, all timelines on one scale, and the files that were asked for."""
    rows, refused, timelines = schedule_rows(request, contention)
    if picture is not None:
        save_picture(timelines, picture)
    if trace is not None:
        save_perfetto(timelines, trace)
    files = {name: str(path) for name, path in (("picture", picture), ("trace", trace)) if path is not None}
    if json:
        emit({"model": request.spec, "rows": rows, "refused": refused, "files": files})
        return
    out = console()
    out.print(terminal_grid(timelines, out.width))
    out.print(schedule_table(rows))
    for row in refused:
        out.print(f"left out: {row['schedule']}: {row['reason']}")
    for path in files.values():
        out.print(f"wrote {path}")


def _opened(
    source: str, model: str | None, costs: Path | None, device: str | None
) -> tuple[Opened, ModelSpec, CostTable]:
    opened = cli_context.open_plan(source, model, costs, device)
    if opened.model is None or opened.costs is None:
        raise CostError.of(str(opened.path), [Problem("costs", None, "known, to simulate the plan", opened.missing)])
    return opened, opened.model, opened.costs
