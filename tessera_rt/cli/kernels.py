"""`tessera kernels report`: what the compiler makes of every shipped kernel, for a GPU that need not be there."""

from __future__ import annotations

import os
from functools import partial
from typing import Annotated, Any

import typer

from tessera_rt.cli.output import UNEXPECTED, console, emit
from tessera_rt.errors import Problem, SpecError

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Look at the GPU kernels.")

COLUMNS = (
    "kernel", "model", "dtype", "shape", "size", "load", "config", "registers", "spills", "shared_bytes", "mma", "tma",
    "store_bytes", "blocks_per_sm",
)  # fmt: skip
GROUPED = ("kernel", "size", "load", "config")  # one line of the summary each
NUMBERS = ("registers", "spills", "shared_bytes", "tma", "store_bytes", "blocks_per_sm")
_Only = list[str] | None


@app.callback()
def _kernels() -> None:
    """Look at the GPU kernels."""


@app.command()
def report(
    target: Annotated[str, typer.Option(help="The GPU: sm90 (Hopper) or sm100 (Blackwell).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    rows: Annotated[bool, typer.Option("--rows", help="Print a line per launch, not per configuration.")] = False,
    kernel: Annotated[_Only, typer.Option(help="Only this kernel (may be repeated).")] = None,
    model: Annotated[_Only, typer.Option(help="Only the shapes of this model (may be repeated).")] = None,
    dtype: Annotated[_Only, typer.Option(help="Only this dtype (may be repeated).")] = None,
    size: Annotated[_Only, typer.Option(help="Only this size class: large, small, any (may be repeated).")] = None,
    load: Annotated[_Only, typer.Option(help="Only rows read by this: tma, gather, pointer (may be repeated).")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that compile.")] = 1,
) -> None:
    """Compile the kernels' configurations offline: registers, spills, shared memory, tensor cores, TMA.

    Needs Triton but no GPU; the whole takes many minutes, one --model and --dtype a few. Ends with code 1 if a
    configuration breaks a rule.
    """
    data = compiled_report(target, workers=workers, kernel=kernel, model=model, dtype=dtype, size=size, load=load)
    if as_json:
        emit(data)
    else:
        _print(data, rows=rows)
    if any(row["problems"] for row in data["rows"]):
        raise typer.Exit(UNEXPECTED)


def compiled_report(target: str, *, workers: int = 1, **only: list[str] | None) -> dict[str, Any]:
    """``kernels.inspection.report`` of a selection. Raises SpecError for an unknown target, kernel, model, dtype, size
    or load, or if no launch has all that was asked for."""
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


def _print(data: dict[str, Any], *, rows: bool) -> None:
    """What breaks a rule first, then a line per launch or configuration, then what shares an SM with the products."""
    out, launches = partial(console().print, soft_wrap=True), data["rows"]
    broken = [row for row in launches if row["problems"]]
    codes = len({row["code"] for row in launches})
    out(
        f"{data['target']}, Triton {data['triton']}, configurations {data['fingerprint'][:12]}: {len(launches)} "
        f"launches of {codes} codes, {len(broken)} with problems; nothing was run or timed"
    )
    for row in broken:
        names = " ".join(str(row[name]) for name in ("kernel", "model", "dtype", "shape", "size", "load", "config"))
        out(f"{names}: {'; '.join(row['problems'])}")
    columns = COLUMNS if rows else (*GROUPED, "dtype", "launches", "mma", *NUMBERS)
    lines = [{name: str(line[name]) for name in columns} for line in (launches if rows else _summary(launches))]
    width = {name: max(len(name), *(len(line[name]) for line in lines)) for name in columns}
    for line in [{name: name for name in columns}, *lines]:
        padded = (line[name].rjust if name in (*NUMBERS, "launches") else line[name].ljust for name in columns)
        out("  ".join(pad(width[name]) for name, pad in zip(columns, padded, strict=True)).rstrip())
    for entry in data["sharing"]:
        always, sometimes = ([other for other in entry[which] if "/" not in other] for which in ("always", "sometimes"))
        some = f"; in some variants: {', '.join(sometimes)}" if sometimes else ""
        out(f"on one SM with {entry['product']}: {', '.join(always) or 'no kernel that is no product'}{some}")


def _summary(launches: list[dict[str, Any]]) -> list[dict[str, str]]:
    """A line per kernel, size class, load and configuration, with the range of each number."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in launches:
        groups.setdefault(tuple(row[name] for name in GROUPED), []).append(row)
    lines = []
    for key, members in groups.items():
        line = dict(zip(GROUPED, key, strict=True)) | {"launches": str(len(members))}
        for name in ("dtype", "mma"):
            line[name] = " ".join(sorted({row[name] for row in members}))
        for name in NUMBERS:
            least, most = (pick(row[name] for row in members) for pick in (min, max))
            line[name] = str(least) if least == most else f"{least}-{most}"
        lines.append(line)
    return lines
