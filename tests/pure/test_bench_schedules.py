"""bench/bench_schedules.py: its quick form runs and writes nothing, its picture and ratios come from its rows."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tessera_rt.planner.compare_schedules import SCHEDULES, compare
from tessera_rt.testing.costs import moe_model, uniform_costs

BENCH = Path(__file__).resolve().parents[2] / "bench" / "bench_schedules.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_schedules", BENCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_rows_table_and_picture(bench: ModuleType, tmp_path: Path) -> None:
    model = moe_model(6)
    costs = uniform_costs(model, (100, 100, 100), comm_ns=50)
    subject = bench.Subject("tiny", "none", 1, 1, 2)
    device = bench.load_device(bench.DEVICE)
    found = compare(model, costs, pp=2, vpp=2, microbatches=4, evaluations=5)
    rows = [{**bench.row_of(subject, row, device, model), "held_over_fixed": 1.0} for row in found]
    assert [row["schedule"] for row in rows] == [schedule.name for schedule in SCHEDULES]
    for row in rows:
        assert row["compute_ns"] + row["exposed_ns"] + row["bubble_ns"] == pytest.approx(row["step_ns"], abs=3)
        assert row["ratio"] == row["step_ns"] / row["lower_bound_ns"]
    json.dumps(rows)
    assert bench.table_of(rows).row_count == len(SCHEDULES)
    can_run, simulated = bench.claims(rows)
    step = {row["schedule"]: row["step_ns"] for row in rows}
    best = min(step[row["schedule"]] for row in rows if "tuned" in row["schedule"] and not row["simulate_only"])
    assert f"{step[bench.NO_OVERLAP] / best:.3f} times as fast" in can_run and "halves" in simulated
    too_much = [{**row, "held_over_fixed": 1.26 if "halves" in row["schedule"] else 1.25} for row in rows]
    assert bench.ours(too_much, can_run=False) == bench.ours(too_much, can_run=True)
    bench.draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"


def test_costs_are_scaled_by_lane(bench: ModuleType) -> None:
    model = moe_model(1)
    scaled = bench.scaled_costs(uniform_costs(model, (100, 10, 10), comm_ns=50), 0.8, 1.2)
    assert (scaled.tasks["F_DISP:L0"].ns, scaled.tasks["F_MLP:L0"].ns) == (40, 120)


@pytest.mark.slow
def test_quick_form_writes_nothing(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in bench.RESULTS.glob("*")}
    bench.main(["--quick"])
    text = capsys.readouterr().out
    assert all(schedule.name in text for schedule in SCHEDULES)
    assert {path: path.stat().st_mtime_ns for path in bench.RESULTS.glob("*")} == before
