"""`tessera bench`: how communication and compute share a device, and what products, traffic and layers reach on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tessera_rt.cli.output import RequestError, Written, console, emit, ms, output_path
from tessera_rt.cli.plan import Json
from tessera_rt.errors import Problem

if TYPE_CHECKING:
    from tessera_rt.bench_ranks import BenchRequest
    from tessera_rt.microbench.results import BenchResult

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Measure kernels and communication here."
)
_MIB = 1 << 20

Model = Annotated[str, typer.Option("--model", help="Released model whose expert layer gives the sizes.")]
Tokens = Annotated[
    int | None, typer.Option("--tokens", min=1, help="Tokens of one rank.", show_default="8192; 256 on a CPU")
]
Ep = Annotated[int, typer.Option("--ep", min=1, help="Ranks that share the experts: one rank's share is measured.")]
Dtype = Annotated[str, typer.Option("--dtype", help="bf16, fp16 or fp32.")]
Samples = Annotated[int, typer.Option("--samples", min=1, help="Samples of each time; medians are shown.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds after which a launch counts as hanging.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="JSON file to write; tessera plan --costs reads a GPU's overlap, gemm, dispatch."
    ),
]
Sizes = Annotated[str, typer.Option("--sizes", help="Message sizes in MiB per rank, by comma.")]
Ranks = Annotated[
    int, typer.Option("--ranks", min=1, help="Local CPU ranks to start for torch's all-to-all (torchrun: its own).")
]

OVERLAP_HELP = """\
Time communication beside compute: alone, together, and for every number of SMs given to communication.

--comm and --comp name built-in functions, or your own as package.module:function. Yours is called once with the torch \
device and returns the launch: a function of a budget (budget.communication, budget.compute and budget.total SMs) that \
puts its work on the current stream. Without a GPU two CPU threads are measured, which is said.

Examples:

  tessera bench overlap --model qwen3-30b-a3b -o overlap.json --picture overlap.png

  tessera bench overlap --comm mine.kernels:all_to_all --comp mine.kernels:grouped_gemm --sms 8,16,24

  tessera plan qwen3-30b-a3b --pp 4 --ep 8 --device h200 --costs overlap.json
"""


@app.callback()
def _bench() -> None:
    """Measure kernels and communication here."""


@app.command(help=OVERLAP_HELP, short_help="Communication beside compute, over a sweep of SMs.")
def overlap(
    model: Model = "qwen3-30b-a3b",
    tokens: Tokens = None,
    ep: Ep = 8,
    dtype: Dtype = "bf16",
    comm: Annotated[
        str,
        typer.Option(
            "--comm",
            help="put (Tessera's dispatch), copy, all-to-all, or module:function.",
            show_default="all-to-all with ranks; put on one GPU",
        ),
    ] = "",
    comp: Annotated[str, typer.Option("--comp", help="gemm, or module:function.")] = "gemm",
    sizes: Sizes = "4,16,64",
    sms: Annotated[
        str | None, typer.Option("--sms", help="SMs for communication, by comma (GPU).", show_default="4 to 32")
    ] = None,
    ranks: Ranks = 2,
    samples: Samples = 20,
    timeout: Timeout = 60.0,
    output: Output = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="Picture to write: .png or .svg.")] = None,
    json: Json = False,
) -> None:
    output = output_path("--output", output, Written.RESULT)
    picture = output_path("--picture", picture, Written.PICTURE)
    from tessera_rt.bench_ranks import BenchRequest

    request = BenchRequest(
        bench="overlap", model=model, tokens=tokens, ep=ep, dtype=dtype, comm=comm, comp=comp,
        sizes=_numbers("--sizes", sizes, _MIB), sms=None if sms is None else _numbers("--sms", sms), ranks=ranks,
        samples=samples, timeout_s=timeout, picture=picture,
    )  # fmt: skip
    _run(request, output, json)


@app.command(short_help="Grouped products of an expert layer against torch's and a dense one.")
def gemm(
    model: Model = "qwen3-30b-a3b",
    tokens: Tokens = None,
    ep: Ep = 8,
    dtype: Dtype = "bf16",
    samples: Samples = 20,
    timeout: Timeout = 60.0,
    output: Output = None,
    json: Json = False,
) -> None:
    """Grouped products of an expert layer, forward and both gradients, against torch._grouped_mm and one dense product
    of equal FLOPs. Without a GPU torch's two are compared, which is said."""
    output = output_path("--output", output, Written.RESULT)
    from tessera_rt.bench_ranks import BenchRequest

    request = BenchRequest(
        bench="gemm", model=model, tokens=tokens, ep=ep, dtype=dtype, samples=samples, timeout_s=timeout
    )
    _run(request, output, json)


@app.command(short_help="Tessera's dispatch and torch's all-to-all against a copy of as many bytes.")
def dispatch(
    model: Model = "qwen3-30b-a3b",
    tokens: Tokens = None,
    ep: Ep = 8,
    dtype: Dtype = "bf16",
    sizes: Sizes = "1,4,16,64",
    ranks: Ranks = 2,
    samples: Samples = 20,
    timeout: Timeout = 60.0,
    output: Output = None,
    json: Json = False,
) -> None:
    """What a rank sends in one dispatch of the model, and messages of the given sizes: Tessera's dispatch (on GPUs; on
    one, between virtual ranks) and torch's all-to-all between the ranks against a plain copy of as many bytes."""
    output = output_path("--output", output, Written.RESULT)
    from tessera_rt.bench_ranks import BenchRequest

    request = BenchRequest(
        bench="dispatch", model=model, tokens=tokens, ep=ep, dtype=dtype, sizes=_numbers("--sizes", sizes, _MIB),
        ranks=ranks, samples=samples, timeout_s=timeout,
    )  # fmt: skip
    _run(request, output, json)


@app.command(short_help="A whole expert layer, forward and backward, against torch's products.")
def layer(
    model: Model = "qwen3-30b-a3b",
    tokens: Tokens = None,
    ep: Ep = 8,
    dtype: Dtype = "bf16",
    samples: Samples = 20,
    timeout: Timeout = 60.0,
    output: Output = None,
    json: Json = False,
) -> None:
    """The experts of a layer with gather and weighted sum, forward and backward, against the same layer written with
    torch._grouped_mm."""
    output = output_path("--output", output, Written.RESULT)
    from tessera_rt.bench_ranks import BenchRequest

    request = BenchRequest(
        bench="layer", model=model, tokens=tokens, ep=ep, dtype=dtype, samples=samples, timeout_s=timeout
    )
    _run(request, output, json)


def _run(request: BenchRequest, output: Path | None, json: bool) -> None:
    from tessera_rt.bench_ranks import run_bench
    from tessera_rt.microbench.results import save_result

    result = run_bench(request)
    if result is None:  # another rank under torchrun reports
        return
    if output is not None:
        save_result(result, output)
    if json:
        emit(result.as_dict())
        return
    _print(result)
    if output is not None:
        console().print(f"wrote {output}")


def _numbers(option: str, text: str, unit: int = 1) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    try:
        numbers = tuple(round(float(part) * unit) if unit > 1 else int(part) for part in parts)
    except (ValueError, OverflowError):
        numbers = ()
    if not numbers or min(numbers) < (1 if unit > 1 else 0):
        kind = "numbers above 0" if unit > 1 else "whole numbers"
        raise RequestError.of("bench", [Problem(option, text, f"{kind}, separated by commas, such as 4,16")])
    return numbers


def _print(result: BenchResult) -> None:
    out = console()
    table = Table(title=f"{result.bench} on {result.machine.name}: {result.machine.versions}")
    columns = _OVERLAP_COLUMNS if result.bench == "overlap" else _COMPARED_COLUMNS
    for title, _, left in columns:
        table.add_column(title, justify="left" if left else "right")
    for row in result.rows:
        table.add_row(*(show(row) for _, show, _ in columns))
    out.print(table)
    for name, figure in result.figures.items():
        out.print(f"  {name}: {figure:.4g}")
    for note in result.notes:
        out.print(f"  {note}")


def _shown(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


_OVERLAP_COLUMNS: tuple[tuple[str, Any, bool], ...] = (
    ("communication", lambda row: row["name"], True),
    ("SMs", lambda row: f"{row['comm_sms']}/{row['sms']}", False),
    ("comm ms", lambda row: ms(row["comm_ns"]), False),
    ("comp ms", lambda row: ms(row["comp_ns"]), False),
    ("both ms", lambda row: ms(row["both_ns"]), False),
    ("efficiency", lambda row: _shown(row["efficiency"], ".2f"), False),
    ("slowdown", lambda row: f"{row['slowdown']:.2f} ({row['fair_slowdown']:.2f})", False),
    ("contention", lambda row: _shown(row["contention"], ".2f"), False),
    ("spread", lambda row: f"{100 * row['spread']:.0f} %", False),
    ("SMs seen", lambda row: _placement(row["placement"]), False),
)
_COMPARED_COLUMNS: tuple[tuple[str, Any, bool], ...] = (
    ("problem", lambda row: row["problem"], True),
    ("", lambda row: row["name"], True),
    ("ms", lambda row: ms(row["duration_ns"]), False),
    ("ratio", lambda row: f"{row['ratio']:.2f}", False),
    ("GFLOP/s", lambda row: _shown(row["flops_per_s"] / 1e9 or None, ",.1f"), False),
    ("GB/s", lambda row: _shown(row["bytes_per_s"] / 1e9 or None, ",.2f"), False),
    ("spread", lambda row: f"{100 * row['spread']:.0f} %", False),
)


def _placement(found: dict[str, int] | None) -> str:
    return "-" if found is None else f"{found['comm_sms']}+{found['comp_sms']}, {found['shared_sms']} shared"
