"""`tessera models` and `tessera doctor`."""

from __future__ import annotations

import importlib
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tessera_rt import __version__
from tessera_rt.cli.output import UNEXPECTED, console, emit, gib
from tessera_rt.cli.plan import Json
from tessera_rt.cli.tables import Row, contents
from tessera_rt.cost_sources.sizes import model_parameters
from tessera_rt.files.model_files import load_model, preset_ids

MODELS_EXAMPLES = """\
List the models that come with Tessera.

Examples:

  tessera models

  tessera models --json
"""
DOCTOR_EXAMPLES = """\
Say whether this machine has what Tessera needs. Ends with 1 if something needed is missing.

Examples:

  tessera doctor

  tessera doctor --json
"""
_LIBRARIES = ("numpy", "scipy", "networkx", "pydantic", "PyYAML", "rich", "typer", "matplotlib")


def models(json: Json = False) -> None:
    rows: list[Row] = []
    for name in preset_ids():
        spec = load_model(name)
        rows.append(
            {
                "model": name,
                "parameters": model_parameters(spec),
                "layers": len(spec.layers),
                "mtp": len(spec.mtp),
                "hidden": spec.hidden,
                "experts": max((layer.feed_forward.experts for layer in spec.layers), default=0),
                "top_k": max((layer.feed_forward.top_k for layer in spec.layers), default=0),
                "holds": contents(item for item in spec.items if item.layer is not None),
            }
        )
    if json:
        emit({"rows": rows})
        return
    table = Table()
    for name in rows[0]:
        table.add_column(name, justify="left" if name in ("model", "holds") else "right")
    for row in rows:
        billions = f"{row['parameters'] / 1e9:.1f} B"
        table.add_row(*(billions if name == "parameters" else str(value) for name, value in row.items()))
    console().print(table)


def doctor(
    folder: Annotated[Path, typer.Option("--folder", help="Where runs would be written.")] = Path("runs"),
    json: Json = False,
) -> None:
    rows = list(_checks(folder))
    missing = [row for row in rows if row["needed"] and not row["ok"]]
    if json:
        emit({"rows": rows, "ok": not missing})
    else:
        table = Table(show_header=False)
        for row in rows:
            mark = "ok" if row["ok"] else "missing" if row["needed"] else "none"
            table.add_row(mark, row["check"], row["found"], row["remedy"])
        console().print(table)
    if missing:
        raise typer.Exit(UNEXPECTED)


def _row(check: str, ok: bool, found: str, *, needed: bool = True, remedy: str = "") -> Row:
    return {"check": check, "ok": ok, "found": found, "needed": needed, "remedy": "" if ok else remedy}


def _checks(folder: Path) -> Iterator[Row]:
    yield _row("Tessera", True, __version__)
    yield _row("Python", True, f"{platform.python_version()} on {platform.platform()}")
    cores = len(os.sched_getaffinity(0))
    yield _row("cores", True, f"{cores} of {os.cpu_count()} for this process")
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    yield _row("memory", True, gib(pages * size))
    for library in _LIBRARIES:
        yield _installed(library, needed=True)
    torch = _installed("torch", needed=True, remedy="pip install torch (planning works without it, training does not)")
    yield torch
    yield _installed("triton", needed=False, remedy="pip install 'tessera-rt[triton]'")
    yield _installed("transformers", needed=False, remedy="pip install 'tessera-rt[hf]'")
    if torch["ok"]:
        yield _tried("torch.distributed with gloo", _gloo, needed=True)
        yield _tried("GPU", _gpu, needed=False)
    yield _writable("run folder", folder)
    yield _writable("temporary folder", Path(tempfile.gettempdir()))


def _installed(library: str, *, needed: bool, remedy: str = "") -> Row:
    try:
        return _row(library, True, metadata.version(library), needed=needed)
    except metadata.PackageNotFoundError:
        return _row(library, False, "not installed", needed=needed, remedy=remedy or f"pip install {library}")


def _tried(check: str, attempt: Callable[[], str], *, needed: bool) -> Row:
    """A check that may fail in any way, which is then what was found."""
    try:
        return _row(check, True, attempt(), needed=needed)
    except Exception as error:
        return _row(check, False, str(error).splitlines()[0] if str(error) else type(error).__name__, needed=needed)


def _gloo() -> str:
    """One rank of a process group sums a number."""
    torch = importlib.import_module("torch")
    dist = importlib.import_module("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        total = torch.ones(1)
        dist.all_reduce(total)
        return f"usable, torch {torch.__version__}"
    finally:
        dist.destroy_process_group()


def _gpu() -> str:
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise RuntimeError("none (training runs on the CPU)")
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)} (this version trains on the CPU only)"


def _writable(check: str, folder: Path) -> Row:
    """Whether files can be made in the folder, or in the nearest parent that exists."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            return _row(check, True, f"{folder} can be written")
    except OSError as fault:
        return _row(check, False, f"{place}: {fault.strerror}", remedy="choose another folder, or its rights")
