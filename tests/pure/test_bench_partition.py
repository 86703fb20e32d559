"""bench/bench_partition.py: its oracle, and that its tables and picture come from its rows."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tessera_rt.planner.candidates import candidates
from tessera_rt.planner.edge_costs import edge_costs
from tessera_rt.planner.partition_threshold import threshold_search
from tessera_rt.planner.setting import Setting
from tessera_rt.planner.tables import FORBIDDEN
from tessera_rt.scheduler.templates import build_template
from tessera_rt.testing.costs import moe_model
from tessera_rt.testing.random_costs import random_costs

BENCH = Path(__file__).resolve().parents[2] / "bench" / "bench_partition.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_partition", BENCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("seed", "mesh"), [(1, (3, 2)), (2, (2, 3)), (3, (4, 2)), (4, (3, 1))])
def test_constraint_programming_agrees_with_the_search(bench: ModuleType, seed: int, mesh: tuple[int, int]) -> None:
    pytest.importorskip("ortools")
    pp, vpp = mesh
    model = moe_model(12, dense_first=1)
    name = "1f1b" if vpp == 1 else "interleaved-1f1b"
    template = build_template(name, pp=pp, vpp=vpp, microbatches=6, joint=True)
    setting = Setting(model, random_costs(model, seed), template, limit=0, method="align")
    cands = candidates(len(model.items), setting.stages, window=None)
    made = edge_costs(cands, setting.edges, setting.pairs, at_most=FORBIDDEN - 1)
    assert made is not None
    best = threshold_search(*made)
    assert best.proven
    assert [bench.cp_sat_reaches(*made, best.value - less) for less in (0, 1)] == [True, False]


@pytest.mark.slow
def test_rows_tables_and_picture(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "SIZES", {"M-C2": (12, 2)})
    monkeypatch.setattr(bench, "PP", 2)
    monkeypatch.setattr(bench, "MICROBATCHES", 4)
    monkeypatch.setattr(bench, "EVALUATIONS", 20)
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    row = bench.row_of("M-C2", cp_sat=False)
    assert row["equal_to_highs"] and row["t_dom_free_ns"] <= row["t_dom_window_ns"] <= row["serial_t_dom_ns"]
    assert row["ours_step_ns"] <= min(row["equal_step_ns"], row["serial_step_ns"])
    assert row["loose_status"] == "optimal" and row["infeasible_status"] == "infeasible, proven"
    assert row["tight_gap"] >= 0
    sensitivity = list(bench.sensitivity_of("M-C2"))
    assert len(sensitivity) == 5 and all(entry["serial_over_optimal"] >= 1 for entry in sensitivity)
    for table in (bench.search_table, bench.memory_table, bench.value_table):
        assert table([row]).row_count == 1
    assert bench.sensitivity_table(sensitivity).row_count == 5
    bench.save([row], sensitivity, [])
    assert json.loads((tmp_path / "partition.json").read_text())["sizes"][0]["size"] == "M-C2"
    assert (tmp_path / "partition.png").stat().st_size > 5_000
