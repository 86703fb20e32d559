"""`tessera kernels report`: what the compiler makes of every shipped kernel, for a GPU that need not be there."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from rich.table import Table

from tessera_rt.cli.output import UNEXPECTED, console, emit
from tessera_rt.errors import Problem, SpecError

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Look at the GPU kernels.")

COLUMNS = (
    "kernel", "model", "dtype", "shape", "size", "load", "config", "registers", "spills", "shared_bytes", "mma", "tma",
    "blocks_per_sm",
)  # fmt: skip
_Only = list[str] | None


@app.callback()
def _kernels() -> None:
    """Look at the GPU kernels."""


@app.command()
def report(
    target: Annotated[str, typer.Option(help="The GPU: sm90 (Hopper) or sm100 (Blackwell).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    kernel: Annotated[_Only, typer.Option(help="Only this kernel (may be repeated).")] = None,
    model: Annotated[_Only, typer.Option(help="Only the shapes of this model (may be repeated).")] = None,
    dtype: Annotated[_Only, typer.Option(help="Only this dtype (may be repeated).")] = None,
    size: Annotated[_Only, typer.Option(help="Only this size class: large, small, any (may be repeated).")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that compile.")] = 1,
) -> None:
    """Compile the kernels' configurations offline: registers, spills, shared memory, tensor cores, TMA.

    Needs Triton but no GPU; the whole takes minutes. Ends with code 1 if a configuration breaks a rule.
    """
    data = compiled_report(target, workers=workers, kernel=kernel, model=model, dtype=dtype, size=size)
    if as_json:
        emit(data)
    else:
        _print(data)
    if any(row["problems"] for row in data["rows"]):
        raise typer.Exit(UNEXPECTED)


def compiled_report(target: str, *, workers: int = 1, **only: list[str] | None) -> dict[str, Any]:
    """``kernels.inspection.report`` of a selection. Raises SpecError for an unknown target, kernel, model, dtype or
    size, or if no launch has all that was asked for."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SpecError.of(
            "kernels report", [Problem("TRITON_INTERPRET", "1", "unset: interpreted kernels have no code")]
        )
    try:
        from tessera_rt.kernels.inspection import Selection, report  # loads Triton
        from tessera_rt.kernels.offline import target_named
    except ModuleNotFoundError as error:
        problem = Problem("triton", None, "installed", "pip install 'tessera-rt[triton]'")
        raise SpecError.of("kernels report", [problem]) from error
    found = target_named(target)
    selection = Selection(**{name: tuple(values or ()) for name, values in only.items()})
    data = report(found, selection=selection, workers=workers)
    if not data["rows"]:
        asked = {name: values for name, values in only.items() if values}
        raise SpecError.of("kernels report", [Problem("selection", asked, "values that a launch has together")])
    return data


def _print(data: dict[str, Any]) -> None:
    out = console()
    table = Table(title=f"{data['target']}, Triton {data['triton']}, configurations {data['fingerprint'][:12]}")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:7] else "right")
    for row in data["rows"]:
        table.add_row(*(str(row[column]) for column in COLUMNS))
    out.print(table)
    broken = [row for row in data["rows"] if row["problems"]]
    for row in broken:
        out.print(f"{row['kernel']} {row['model']} {row['dtype']} {row['config']}: {'; '.join(row['problems'])}")
    out.print(f"{len(data['rows'])} launches, {len(broken)} with problems; nothing was run or timed")
