"""`tessera train` and `tessera profile`: the commands that need torch, which they load when they run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tessera_rt.cli.output import UNEXPECTED, RequestError, Written, console, emit, existing_file, ms, output_path
from tessera_rt.cli.plan import Json
from tessera_rt.config import TrainConfig, load_config
from tessera_rt.costs import Recompute
from tessera_rt.errors import Problem
from tessera_rt.files.cost_files import save_cost_table

if TYPE_CHECKING:
    from tessera_rt.train import TrainSummary

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="Training configuration (YAML).")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value, such as run.steps=5. May be repeated."),
]

TRAIN_EXAMPLES = """\
Train a model: costs, plan, then the ranks, which are started on this machine or by torchrun.

Everything a run writes goes to its folder, runs/<name of the configuration> by default. With --demo every station of \
the path is printed, and the run is checked and compared with other schedules.

Examples:

  tessera train examples/hybrid_tiny.yaml

  tessera train my.yaml --set run.steps=100 --set optimizer.lr=1e-3

  tessera train my.yaml --set run.resume=latest --set run.folder=runs/mine

  torchrun --nproc-per-node 4 -m tessera_rt.cli train my.yaml
"""
PROFILE_EXAMPLES = """\
Measure on this machine what every task of a configuration takes, with the ranks that training would have.

Examples:

  tessera profile examples/hybrid_tiny.yaml -o costs.yaml

  tessera train examples/hybrid_tiny.yaml --set plan.costs=$PWD/costs.yaml
"""


def train(
    config: Config,
    overrides: Set = None,
    demo: Annotated[bool, typer.Option("--demo", help="Print every station of the path, check and compare.")] = False,
) -> None:
    settings = load_config(existing_file("CONFIG", config), overrides or ())
    out = console()
    if demo:
        from tessera_rt.demo import run_demo

        if not run_demo(settings, out):
            raise typer.Exit(UNEXPECTED)
        return
    from tessera_rt.launch import under_torchrun
    from tessera_rt.start import prepare, run_training, train_under_torchrun

    if under_torchrun():
        summary = train_under_torchrun(settings)
        if summary is not None:
            print_summary(out, summary)
        return
    prepared = prepare(settings, say=out.print)
    out.print(f"plan: {prepared.plan.template}, {prepared.plan.solver.method}; starting {settings.mesh.world} ranks")
    print_summary(out, run_training(settings, prepared))


def print_summary(out: Console, summary: TrainSummary) -> None:
    """What a run did, for people."""
    for name, before, after in (
        ("loss", summary.first_loss, summary.last_loss),
        ("held-out loss", summary.held_out_before, summary.held_out_after),
    ):
        if before is not None and after is not None:
            out.print(f"{name}: {before:.4f} -> {after:.4f}")
    if summary.step_ns is not None:
        out.print(f"median step: {ms(summary.step_ns)} ms for {summary.tokens_per_step:,} tokens")
    if summary.skipped:
        out.print(f"{summary.skipped} steps were skipped: their gradients were not finite")
    out.print(f"run folder: {summary.folder}  (tessera show {summary.folder})")


def profile(
    config: Config,
    output: Annotated[Path, typer.Option("--output", "-o", help="Cost file to write.")],
    overrides: Set = None,
    recompute: Annotated[
        str, typer.Option("--recompute", help="none, selective or full.", show_default="the configuration's, or none")
    ] = "",
    steps: Annotated[int, typer.Option("--steps", help="Steps to run; the first is dropped.")] = 5,
    json: Json = False,
) -> None:
    target = output_path("--output", output, Written.COSTS, (config,))
    assert target is not None
    settings = load_config(existing_file("CONFIG", config), overrides or ())
    policy = _policy(settings, recompute)
    from tessera_rt.profile import profile_costs

    out = console()
    if not json:
        out.print(f"measuring on {settings.mesh.world} local ranks")
    costs = profile_costs(settings, policy, steps=steps)
    save_cost_table(costs, target)
    if json:
        rows = [
            {"task": name, "duration_ns": cost.ns, "spread": cost.spread, "samples": cost.samples}
            for name, cost in costs.tasks.items()
        ]
        link = {"latency_ns": costs.link.latency_ns, "bytes_per_s": costs.link.bytes_per_s}
        emit({"rows": rows, "link": link, "device": costs.provenance.device, "file": str(target)})
        return
    from tessera_rt.cli.tables import cost_table

    out.print(cost_table(settings.model, costs))
    for note in costs.provenance.notes:
        out.print(f"  {note}")
    out.print(f"wrote {target}")


def _policy(settings: TrainConfig, text: str) -> Recompute:
    chosen = text or (Recompute.NONE if settings.plan.recompute == "auto" else settings.plan.recompute)
    if chosen not in tuple(Recompute):
        raise RequestError.of("profile", [Problem("--recompute", text, " | ".join(Recompute))])
    return Recompute(chosen)
