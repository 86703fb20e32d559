"""bench/bench_simulate.py: what is known on paper is matched, unequal groups cost nothing, gains add up."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "bench_simulate.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_simulate", BENCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_closed_forms_are_matched_exactly(bench: ModuleType) -> None:
    rows = bench.closed_forms()
    assert [row["simulated"] for row in rows] == [33, 33, 28.5, 27, 10, 10]
    assert all(row["equal"] for row in rows)
    bench.form_table(rows)


@pytest.mark.slow
def test_the_quick_form_runs(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in bench.RESULTS.glob("simulate.*")}
    bench.main(["--quick"])
    assert before == {path: path.stat().st_mtime_ns for path in bench.RESULTS.glob("simulate.*")}
    assert "12,288 accelerators" in capsys.readouterr().out
    assert all(abs(row["groups"]) < 1e-12 and row["shadow"] > 0 for row in bench.padding_rows())
    gains = bench.filling_gains(bench.SUBJECTS[1], microbatches=8)
    for row in gains:
        assert row["gain"] == pytest.approx(1 - row["filled_ns"] / row["step_ns"])
        assert row["net_gain"] == pytest.approx(row["gain"] - row["control_gain"])
    bench.draw(gains, tmp_path / "gains.png")
    assert (tmp_path / "gains.png").stat().st_size > 10_000
