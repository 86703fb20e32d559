"""`tessera bench` without a GPU: what each command measures, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tessera_rt.cli.app import app
from tessera_rt.cli.output import BAD_INPUT, OK

SMALL = ("--tokens", "2", "--samples", "1")


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", *(str(arg) for arg in args)])


def test_products_and_their_file(tmp_path: Path) -> None:
    path = tmp_path / "gemm.json"
    result = run("gemm", *SMALL, "--ep", "16", "-o", path)
    assert result.exit_code == OK, result.output
    assert "Tessera's Triton products were not timed" in result.stdout and f"wrote {path}" in result.stdout
    data = json.loads(path.read_text())
    assert data["dtype"] == "bf16" and len(data["rows"]) == 8 and list(data["figures"]) == ["gemm_flops_per_s"]
    plan = CliRunner().invoke(app, ["plan", "qwen3-30b-a3b", "--pp", "4", "--ep", "8", "--costs", str(path)])
    assert plan.exit_code == BAD_INPUT and "machine.kind = 'cpu': must be cuda" in plan.output, (
        "a CPU's figures cost no GPU"
    )


def test_dispatch_between_three_ranks() -> None:
    """The model's message first; sizes that three ranks cannot share are rounded up."""
    result = run("dispatch", *SMALL, "--sizes", "0.5", "--ranks", "3", "--json")
    assert result.exit_code == OK, result.output
    data = json.loads(result.stdout)
    names = [(row["problem"].rpartition(", ")[2], row["name"]) for row in data["rows"]]
    assert names == [
        (problem, name) for problem in ("dispatch", "524288 bytes") for name in ("torch all-to-all", "copy")
    ]
    assert data["figures"]["link_bytes_per_s"] > 0
    assert "no GPU: Tessera's dispatch was not timed" in data["notes"]


def test_overlap_with_own_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_kernels.py").write_text("def make(device):\n    return lambda budget: sum(range(1000))\n")
    monkeypatch.syspath_prepend(tmp_path)
    name, picture = "my_kernels:make", tmp_path / "overlap.png"
    result = run("overlap", "--comm", name, "--comp", name, "--samples", "2", "--picture", picture, "--json")
    assert result.exit_code == OK, result.output
    data = json.loads(result.stdout)
    assert [row["name"] for row in data["rows"]] == [name] and set(data["figures"]) <= {"comm_sms", "contention"}
    assert picture.stat().st_size > 5_000


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("overlap", "--comm", "put"), "puts need a GPU"),
        (("overlap", "--comm", "carrier-pigeon"), "put, copy, all-to-all, or module:function"),
        (("overlap", "--comm", "all-to-all", "--ranks", "1"), "between at least two ranks"),
        (("overlap", "--sms", "4"), "a CPU has no SMs"),
        (("overlap", "--sms", "4.5"), "whole numbers"),
        (("overlap", "--sizes", "0"), "numbers above 0"),
        (("overlap", "--comp", "no_such_module:f", "--comm", "copy"), "a module that can be imported"),
        (("dispatch", "--sizes", "1,,2"), "numbers above 0"),
        (("dispatch", "--ep", "7"), "a divisor of the 128 experts"),
        (("gemm", "--model", "qwen"), "one of "),
        (("layer", "--dtype", "fp8"), "one of bf16, fp16, fp32"),
        (("layer", "--timeout", "0"), "a number of seconds above 0"),
    ],
)
def test_what_is_refused(args: tuple[str, ...], text: str) -> None:
    result = run(*args)
    assert result.exit_code == BAD_INPUT and text in result.output, result.output
