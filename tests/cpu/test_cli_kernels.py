"""`tessera kernels report`, without compiling: rows, table, JSON, refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from tessera_rt.cli import kernels as cli_kernels
from tessera_rt.cli.app import app
from tessera_rt.errors import SpecError
from tessera_rt.kernels import inspection

ROW = {
    "kernel": "forward", "model": "m", "dtype": "bfloat16", "shape": "N 1 K 2", "size": "large", "load": "tma",
    "config": "128x256x64 w8 s3", "registers": 168, "spills": 0, "shared_bytes": 180248, "mma": "HGMMA", "tma": 6,
    "blocks_per_sm": 1, "store_bytes": 16, "problems": [], "code": "a",
}  # fmt: skip
SHARING = [{"product": "forward/tma 128x256x64 w8 s3", "always": ["wait w1"], "sometimes": ["rows_put w8"]}]


def _fake(monkeypatch: pytest.MonkeyPatch, *rows: dict[str, Any]) -> list[Any]:
    calls: list[Any] = []

    def report(target: Any, *, selection: Any, workers: int) -> dict[str, Any]:
        calls.append((target.name, selection, workers))
        head = {"target": target.name, "triton": "3.9.0", "fingerprint": "f" * 64}
        return head | {"rows": list(rows), "sharing": SHARING}

    monkeypatch.setattr(inspection, "report", report)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return calls


def test_json_has_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _fake(monkeypatch, ROW)
    result = CliRunner().invoke(
        cli_kernels.app, ["report", "--target", "sm90", "--json", "--kernel", "forward", "--model", "a", "--model", "b",
                          "--load", "gather"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["rows"] == [ROW]
    assert calls == [("sm90", inspection.Selection(kernel=("forward",), model=("a", "b"), load=("gather",)), 1)]


def test_text_names_problems_first_and_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a line per configuration, with ranges, or per launch, and what shares an SM."""
    _fake(monkeypatch, ROW, ROW | {"dtype": "float16", "registers": 255, "problems": ["12 spills"], "code": "b"})
    result = CliRunner().invoke(cli_kernels.app, ["report", "--target", "sm100"])
    assert result.exit_code == 1
    head, problem, *table = result.output.splitlines()
    assert "2 launches of 2 codes, 1 with problems" in head and "12 spills" in problem and "float16" in problem
    (line,) = (line for line in table if "128x256x64" in line and "on one SM" not in line)
    assert "bfloat16 float16" in line and "168-255" in line and "180248" in line
    assert table[-1] == "on one SM with forward/tma 128x256x64 w8 s3: wait w1; in some variants: rows_put w8"
    result = CliRunner().invoke(cli_kernels.app, ["report", "--target", "sm100", "--rows"])
    assert sum("N 1 K 2" in line for line in result.output.splitlines()) == 2 + 1  # the problem's line too


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake(monkeypatch)
    with pytest.raises(SpecError, match="sm90, sm100"):
        cli_kernels.compiled_report("sm70")
    with pytest.raises(SpecError, match="selection"):
        cli_kernels.compiled_report("sm90", kernel=["place"], size=["large"])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SpecError, match="TRITON_INTERPRET"):
        cli_kernels.compiled_report("sm90")


def test_unknown_values_are_named_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(inspection, "compile_launches", lambda *_args, **_options: pytest.fail("compiled"))
    with pytest.raises(SpecError) as caught:
        cli_kernels.compiled_report("sm90", kernel=["forward", "forwrd"], dtype=["bf16"], model=["qwen3"])
    found = {problem.field: problem for problem in caught.value.problems}
    assert found.keys() == {"kernel", "dtype", "model"}
    assert found["kernel"].value == "forwrd" and "forward, forward_gate, gate_backward" in found["kernel"].allowed
    assert "bfloat16, float16, float32" in found["dtype"].allowed and "qwen3-30b-a3b" in found["model"].allowed


def test_it_is_a_command_of_tessera(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _fake(monkeypatch, ROW)
    result = CliRunner().invoke(app, ["kernels", "report", "--target", "sm90", "--json"])
    assert result.exit_code == 0 and json.loads(result.output)["rows"] == [ROW] and len(calls) == 1
    refused = CliRunner().invoke(app, ["kernels", "report", "--target", "sm70"])
    assert refused.exit_code == 2 and isinstance(refused.exception, SystemExit)
