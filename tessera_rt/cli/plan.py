"""`tessera plan` and `tessera check`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tessera_rt.cli import context as cli_context
from tessera_rt.cli import tables as cli_tables
from tessera_rt.cli.output import RequestError, Written, console, emit, gib, ms, output_path
from tessera_rt.cli.search import refusals, search_rows, search_table, searched
from tessera_rt.errors import Problem
from tessera_rt.files.plan_files import save_plan
from tessera_rt.planner.explain import explain, microbatches_text
from tessera_rt.planner.memory import MemoryModel
from tessera_rt.planner.memory_timeline import template_of
from tessera_rt.planner.plan_grid import AXES
from tessera_rt.scheduler.draw import split_table
from tessera_rt.scheduler.simulate import simulate
from tessera_rt.scheduler.templates import TEMPLATES

Pp = Annotated[int, typer.Option("--pp", help="Pipeline ranks.")]
Vpp = Annotated[int, typer.Option("--vpp", help="Virtual stages on each pipeline rank.")]
Dp = Annotated[int, typer.Option("--dp", help="Data-parallel ranks.")]
Ep = Annotated[int, typer.Option("--ep", help="Expert-parallel ranks.")]
Tp = Annotated[int, typer.Option("--tp", help="Tensor-parallel ranks (costs and memory only: the engine runs tp 1).")]
Microbatches = Annotated[int, typer.Option("--microbatches", "-m", help="Micro-batches of a step.")]
Tokens = Annotated[
    int | None,
    typer.Option("--tokens", help="Tokens of a micro-batch on a rank.", show_default=f"{cli_context.DEFAULT_TOKENS}"),
]
Context = Annotated[
    int | None, typer.Option("--context", help="Tokens that attention looks at.", show_default="--tokens")
]
TemplateName = Annotated[
    str | None,
    typer.Option(
        "--template",
        help=f"{', '.join(TEMPLATES)}, or a CSV file of torch.distributed.pipelining.",
        show_default="1f1b, interleaved with --vpp",
    ),
]
Objective = Annotated[str, typer.Option("--objective", help="step, t_dom, serial or memory.")]
Partitioner = Annotated[
    str, typer.Option("--partitioner", "--solver", help="threshold or milp (both exact), or chain-dp (quick).")
]
CommSms = Annotated[
    str, typer.Option("--comm-sms", help="SMs for communication; auto: the best of the device file's candidates.")
]
Patterns = Annotated[
    Path | None, typer.Option("--patterns", help="YAML file with orders for pairs of chunks (overlap_plans).")
]
Window = Annotated[
    str, typer.Option("--window", help="Items by which boundaries may move from balanced partitions, or any.")
]
TimeLimit = Annotated[float, typer.Option("--time-limit", help="Seconds for the partition.")]
MemoryLimit = Annotated[
    float | None,
    typer.Option("--memory-limit", help="GiB on a rank.", show_default="the device's; none with --costs"),
]
RecomputePolicy = Annotated[
    str, typer.Option("--recompute", help="none, selective, full, or auto: the least of these that fits.")
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Device that costs are computed for: h800, h200, or a file.",
        show_default=cli_context.DEFAULT_DEVICE,
    ),
]
CostsFile = Annotated[
    Path | None,
    typer.Option("--costs", help="Cost table to use instead (tessera profile), or a GPU's figures (tessera bench)."),
]
Pad = Annotated[
    str, typer.Option("--pad", help="groups or shadow: how micro-batches that pp does not divide are ordered.")
]
Group = Annotated[
    int | None,
    typer.Option("--group", help="Micro-batches of a group in interleaved orders.", show_default="--pp or a bit more"),
]
WPool = Annotated[
    float, typer.Option("--w-pool", help="GiB on a rank for weight gradients held back for gaps and the step's end.")
]
MoeHalves = Annotated[
    bool, typer.Option("--moe-halves", help="MoE layers in halves where passes run alone (a plan to simulate only).")
]
TaperedEnds = Annotated[
    int,
    typer.Option(
        "--tapered-ends",
        help="Half-size micro-batches at either end, in place of half as many full ones (a plan to simulate only).",
    ),
]
Evaluations = Annotated[
    int | None,
    typer.Option("--evaluations", help="Partitions tried to shorten the step.", show_default="by the step's length"),
]
Layout = Annotated[
    str | None,
    typer.Option(
        "--layout",
        help="Partition to take, as Megatron-Core's --pipeline-model-parallel-layout says it.",
        show_default="the best found",
    ),
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="bf16, fp16, fp32 or fp64.", show_default="bf16")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
ModelName = Annotated[
    str | None, typer.Option("--model", help="The plan's model, where it is neither a preset nor that of a run.")
]

PLAN_EXAMPLES = """\
Plan the training of a model: which rank holds which layers, and how passes are interleaved.

SPEC is a preset (see tessera models), a YAML description, or the config.json of a Hugging Face model.

Examples:

  tessera plan qwen3-next-80b --pp 8 --vpp 2 --ep 32 --microbatches 64 --tokens 4096 --device h800

  tessera plan my_model.yaml --pp 4 --costs costs.yaml -o plan.yaml

  tessera plan deepseek-v3 --pp 16 --ep 32 --tokens 2048 --memory-limit 74 --json

  tessera plan mixtral-8x7b --pp 2 --ep 8 --layout "E(t)*16|(t)*16L" --template order.csv

  tessera plan qwen3-next-80b --pp 8 --ep 32 --microbatches 32 --search --over vpp=1,2 --over template=1f1b,dualpipe-v
"""
CHECK_EXAMPLES = """\
Check a plan file, also against its model where that is known. Ends with 4 and every problem if it is faulty. Memory \
and step time that its order and costs no longer give, as after an edit, are noted.

Examples:

  tessera check plan.yaml

  tessera check plan.yaml --model my_model.yaml
"""


def plan(
    spec: Annotated[str, typer.Argument(help="Preset, YAML description, or config.json.")],
    pp: Pp = 1,
    vpp: Vpp = 1,
    dp: Dp = 1,
    ep: Ep = 1,
    tp: Tp = 1,
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
    comm_sms: CommSms = "auto",
    patterns: Patterns = None,
    group: Group = None,
    w_pool: WPool = 0.0,
    moe_halves: MoeHalves = False,
    tapered_ends: TaperedEnds = 0,
    evaluations: Evaluations = None,
    layout: Layout = None,
    search: Annotated[
        bool, typer.Option("--search", help="Plan a grid of choices; print time against memory.")
    ] = False,
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over", help=f"An axis of the grid, such as vpp=1,2,4: {', '.join(AXES)}.", show_default="a small grid"
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan to this file.")] = None,
    json: Json = False,
) -> None:
    target = output_path("--output", output, Written.PLAN, (spec, costs, device, patterns, template))
    request = cli_context.PlanRequest(
        spec=spec,
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
    if over and not search:
        raise RequestError.of("plan request", [Problem("--over", over[0], "left out without --search")])
    if search and layout is not None:
        raise RequestError.of("plan request", [Problem("--layout", layout, "left out with --search")])
    if search:
        _search(request, over or (), target, json=json)
        return
    made = cli_context.make_plan(request)
    timeline = simulate(made.plan, made.model, made.costs, label=made.plan.template)
    if target is not None:
        save_plan(made.plan, target)
    if json:
        data = cli_tables.plan_data(made.plan, made.model, made.costs)
        emit(data | {"step": cli_tables.timeline_row(timeline), "file": str(target) if target else None})
        return
    out = console()
    out.print(explain(made.plan, made.model, made.costs))
    out.print(cli_tables.edge_table(made.plan))
    out.print(split_table(timeline))
    if made.device is not None:
        out.print(f"figures of {made.device.title} that costs were computed with:")
        for line in cli_tables.figure_lines(made.device):
            out.print(f"  {line}")
    if target is not None:
        out.print(f"wrote {target}")


def _search(request: cli_context.PlanRequest, over: Sequence[str], target: Path | None, *, json: bool) -> None:
    """Prints the grid; with a target the fastest choice is planned in full and written."""
    tried, fastest = searched(request, over)
    if target is not None:
        save_plan(cli_context.make_plan(fastest).plan, target)
    if json:
        emit({"model": request.spec, "rows": search_rows(tried), "file": str(target) if target else None})
        return
    out = console()
    out.print(search_table(tried))
    for line in refusals(tried):
        out.print(line)
    if target is not None:
        out.print(f"wrote {target}, the fastest")


def check(
    plan: Annotated[str, typer.Argument(help="Plan file, or a run folder.")],
    model: ModelName = None,
    json: Json = False,
) -> None:
    opened = cli_context.open_plan(plan, model)
    held = f"and fits {opened.model.name}" if opened.model else f"(model {opened.plan.model} not at hand: not compared)"
    notes = _stale_figures(opened)
    if json:
        row = {"plan": str(opened.path), "ok": True, "model_compared": opened.model is not None, "notes": notes}
        emit({"rows": [row]})
        return
    made = opened.plan
    step = f", simulated step {ms(made.solver.step_ns)} ms" if made.solver.step_ns else ""
    console().print(
        f"{opened.path} is sound {held}: {len(made.stages)} stages on {made.mesh.pp} pipeline ranks, "
        f"{made.mesh.world} ranks in all, {microbatches_text(made)}{step}"
    )
    for note in notes:
        console().print(f"note: {note}")


def _stale_figures(opened: cli_context.Opened) -> list[str]:
    """What a plan says of its memory and step, where its order and costs (if they are at hand) give something else."""
    made, model, costs = opened.plan, opened.model, opened.costs
    if model is None or costs is None:
        return []
    notes = []
    bounds = (*(stage.start for stage in made.stages), made.stages[-1].stop)
    for rank, found in enumerate(MemoryModel(model, costs, template_of(made)).of(bounds)):
        said = made.memory[rank]
        if said.peak != found.peak:
            over = f", more than its limit of {gib(said.limit)}" if found.peak > said.limit > 0 else ""
            notes.append(f"memory of rank {rank} is {gib(found.peak)}{over}; the plan says {gib(said.peak)}")
    step_ns = simulate(made, model, costs).step_ns
    if step_ns != made.solver.step_ns:
        notes.append(f"the simulated step is {ms(step_ns)} ms; the plan says {ms(made.solver.step_ns)} ms")
    return notes
