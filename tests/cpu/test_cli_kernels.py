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
    "blocks_per_sm": 1, "store_bytes": 16, "problems": [],
}  # fmt: skip


def _fake(monkeypatch: pytest.MonkeyPatch, *rows: dict[str, Any]) -> list[Any]:
    calls: list[Any] = []

    def report(target: Any, *, selection: Any, workers: int) -> dict[str, Any]:
        calls.append((target.name, selection, workers))
        return {"target": target.name, "triton": "3.9.0", "fingerprint": "f" * 64, "rows": list(rows), "sharing": []}

    monkeypatch.setattr(inspection, "report", report)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return calls


def test_json_has_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _fake(monkeypatch, ROW)
    result = CliRunner().invoke(
        cli_kernels.app, ["report", "--target", "sm90", "--json", "--kernel", "forward", "--model", "a", "--model", "b"]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["rows"] == [ROW]
    assert calls == [("sm90", inspection.Selection(kernel=("forward",), model=("a", "b")), 1)]


def test_table_names_problems_and_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake(monkeypatch, ROW, ROW | {"problems": ["12 spills"]})
    result = CliRunner().invoke(cli_kernels.app, ["report", "--target", "sm100"])
    assert result.exit_code == 1
    assert "12 spills" in result.output and "2 launches, 1 with problems" in result.output and "180248" in result.output


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
