"""A microbenchmark's result as a source of costs: measured figures replace assumed ones, and only these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tessera_rt.cli.app import app
from tessera_rt.cost_sources.benchmarked import benchmarked_device, is_bench_result
from tessera_rt.cost_sources.device import load_device
from tessera_rt.cost_sources.work import WorkKind
from tessera_rt.errors import CostError
from tessera_rt.files.plan_files import load_plan

FIGURES = {
    "comm_sms": 16,
    "contention": 0.3,
    "grouped_gemm_flops_per_s": 3e14,
    "gemm_flops_per_s": 6e14,
    "link_bytes_per_s": 2e11,
}


def write(folder: Path, figures: dict[str, Any] | None = None, **changes: Any) -> Path:
    data = {
        "tessera_bench": 1,
        "bench": "overlap",
        "machine": {"kind": "cuda", "name": "a GPU", "sms": 132, "versions": "torch 2, kernel configurations 1a2b"},
        "notes": [],
        "figures": FIGURES if figures is None else figures,
        "rows": [],
    }
    path = folder / "result.json"
    path.write_text(json.dumps(data | changes))
    return path


def test_measured_figures_replace_assumed_ones(tmp_path: Path) -> None:
    base = load_device("h200")
    device = benchmarked_device(base, write(tmp_path))
    assert device.rate(WorkKind.GROUPED_GEMM, "bf16") == pytest.approx(3e14)
    assert device.rate(WorkKind.GEMM, "bf16") == pytest.approx(6e14)
    assert (device.comm_sms, device.contention) == (16, 0.3)
    assert device.intra_node.bytes_per_s == 2e11 and device.comm_bandwidth(16) >= 2e11
    assert device.intra_node.latency_ns == base.intra_node.latency_ns
    assert device.inter_node == base.inter_node
    assert device.fractions[WorkKind.MEMORY] == base.fractions[WorkKind.MEMORY]
    assert device.name == "h200+bench" and "tessera bench overlap on a GPU" in device.sources["contention"]


def test_what_was_not_measured_stays(tmp_path: Path) -> None:
    base = load_device("h200")
    device = benchmarked_device(base, write(tmp_path, {"contention": 0.0}))
    assert device.contention == 0
    assert (device.comm_sms, device.intra_node, dict(device.fractions)) == (
        base.comm_sms,
        base.intra_node,
        dict(base.fractions),
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (
            {"machine": {"kind": "cpu", "name": "x", "sms": 2, "versions": ""}},
            "machine.kind = 'cpu': must be cuda; a CPU's",
        ),
        ({"machine": {"kind": "cuda", "name": "x", "sms": 148, "versions": ""}}, "machine.sms"),
        ({"figures": {}}, "figures"),
        ({"figures": {"contention": -1}}, "figures.contention"),
        ({"figures": {"speed": 1}}, "speed"),
        ({"figures": {"comm_sms": 132}}, "figures.comm_sms"),
        ({"figures": {"grouped_gemm_flops_per_s": 1e18}}, "figures.grouped_gemm_flops_per_s"),
        ({"tessera_bench": 2}, "tessera_bench"),
        ({"dtype": "fp32"}, "dtype = 'fp32': must be bf16"),
    ],
)
def test_refused_results(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(CostError, match=field):
        benchmarked_device(load_device("h200"), write(tmp_path, **changes))


def test_what_is_a_result(tmp_path: Path) -> None:
    assert is_bench_result(write(tmp_path))
    (tmp_path / "other.json").write_text("[1]")
    (tmp_path / "torn.json").write_text("{")
    assert not any(is_bench_result(tmp_path / name) for name in ("other.json", "torn.json", "missing.json", "a.yaml"))


def test_plans_with_measured_figures(tmp_path: Path) -> None:
    options = ["mixtral-8x7b", "--pp", "2", "--ep", "8", "--microbatches", "4", "--tokens", "2048", "--device", "h200",
               "--window", "1", "--json"]  # fmt: skip
    plans = {}
    for name, more in (("assumed", []), ("measured", ["--costs", str(write(tmp_path))])):
        target = tmp_path / f"{name}.yaml"
        result = CliRunner().invoke(app, ["plan", *options, *more, "-o", str(target)])
        assert result.exit_code == 0, result.output
        plans[name] = json.loads(result.stdout), target.read_text()
    assert "device: h200+bench" in plans["measured"][1] and "device: h200\n" in plans["assumed"][1]
    notes = {name: load_plan(tmp_path / f"{name}.yaml").assumptions.notes for name in plans}
    assert any("nothing was measured" in note for note in notes["assumed"])
    assert not any("nothing was measured" in note for note in notes["measured"])
    assert any("contention" in note and "kernel configurations 1a2b" in note for note in notes["measured"])
    assert plans["measured"][0]["rows"] != plans["assumed"][0]["rows"]
    again = CliRunner().invoke(app, ["simulate", str(tmp_path / "measured.yaml"), "--json"])
    assert again.exit_code != 0 and "--costs" in again.output
    again = CliRunner().invoke(
        app, ["simulate", str(tmp_path / "measured.yaml"), "--costs", str(tmp_path / "result.json"), "--json"]
    )
    assert again.exit_code == 0, again.output
