"""`tessera simulate` with noise, filling, memory and sensitivity: numbers add up, mistakes are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from tessera_rt.cli.app import app
from tessera_rt.cli.output import BAD_INPUT, OK

SMALL = (
    *("mixtral-8x7b", "--pp", "2", "--vpp", "2", "--ep", "8", "--dp", "2", "--tokens", "1024"),
    *("--microbatches", "4", "--partitioner", "chain-dp", "--objective", "serial"),
)


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    assert run("plan", *SMALL, "-o", path).exit_code == OK
    return path


def parsed(result: Result) -> dict[str, Any]:
    assert result.exit_code == OK, result.output
    data = json.loads(result.stdout)
    assert isinstance(data, dict)
    return data


def test_noise_and_filling(plan: Path, tmp_path: Path) -> None:
    plain = parsed(run("simulate", plan, "--json"))
    assert not {"noise", "memory", "peak_bytes", "sensitivity"} & set(plain)
    assert plain["tokens_per_s"] == pytest.approx(1024 * 16 * 4 * 1e9 / plain["step_ns"])
    assert 0.1 < plain["mfu"] < 0.7
    args = ("simulate", plan, "--noise", "0.2", "--dbo", "--replicas", "3", "--pool-tasks", "4", "--json")
    data = parsed(run(*args, "--trace", tmp_path / "t.json"))
    noise, dbo = data["noise"], data["noise"]["dbo"]
    assert data["step_ns"] == plain["step_ns"] == noise["planned_step_ns"] < noise["step_ns"]
    assert noise["replicas"] == 3 and noise["lane_cv"] == pytest.approx(0.2, rel=0.2)
    assert dbo["gain"] == pytest.approx(1 - dbo["step_ns"] / noise["step_ns"])
    assert dbo["net_gain"] == pytest.approx(dbo["gain"] - dbo["control_gain"])
    assert dbo["fit_factor"] == 1.0 and dbo["pool_tasks"] == 4 and dbo["pool_peak_bytes"] > 0
    for row, step in ((noise, noise["mean_step_ns"]), (dbo, dbo["step_ns"])):
        parts = row["compute_ns"] + row["exposed_ns"] + row["bubble_ns"]
        assert parts == pytest.approx(step, rel=0.05)
    assert parsed(run(*args)) == {**data, "files": {}}  # the seed decides
    other = parsed(run(*args, "--seed", "7"))
    assert other["noise"]["step_ns"] != noise["step_ns"]
    text = run("simulate", plan, "--noise", "0.2", "--dbo").output
    assert "2 replicas" in text and "net" in text


def test_jitter_alone(plan: Path) -> None:
    noise = parsed(run("simulate", plan, "--jitter", "0.1", "--json"))["noise"]
    assert noise["replicas"] == 2 and "lane_cv" not in noise and "dbo" not in noise
    assert noise["planned_step_ns"] < noise["step_ns"] < 1.5 * noise["planned_step_ns"]


def test_recorded_counts(plan: Path, tmp_path: Path) -> None:
    """Balanced counts change nothing; the plan's 32 layers, 4 micro-batches, 8 ranks, 8 experts, 2 of them a token."""
    balanced = np.full((32, 4, 8, 8), 1024 * 2 // 8)
    np.savez(tmp_path / "even.npz", counts=balanced)
    even = parsed(run("simulate", plan, "--counts", tmp_path / "even.npz", "--json"))["noise"]
    assert even["step_ns"] == even["planned_step_ns"] and even["lane_cv"] == 0
    np.savez(tmp_path / "short.npz", counts=balanced[:, :3])
    refused = run("simulate", plan, "--counts", tmp_path / "short.npz")
    assert refused.exit_code != OK and "32 x 4 x 8 x 8" in refused.output


def test_memory_and_sensitivity(plan: Path, tmp_path: Path) -> None:
    picture = tmp_path / "p.png"
    data = parsed(run("simulate", plan, "--memory", "--sensitivity", "30", "--picture", picture, "--json"))
    assert picture.stat().st_size > 10_000
    assert data["peak_bytes"] == max(row["peak_bytes"] for row in data["memory"])
    for row in data["memory"]:
        assert len(row["starts_ns"]) == len(row["held_bytes"]) and max(row["held_bytes"]) == row["peak_bytes"]
    rows = data["sensitivity"]
    assert {(row["kind"], row["error"]) for row in rows} >= {("MLP", 0.3), ("MLP", -0.3), ("LINK", 0.3), ("HEAD", -0.3)}
    assert all(row["best_step_ns"] <= row["step_ns"] for row in rows)
    longer = next(row for row in rows if row["kind"] == "MLP" and row["error"] > 0)
    assert longer["step_ns"] > data["step_ns"]
    text = run("simulate", plan, "--memory").output
    assert "fullest rank" in text


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--noise", "-1"), "noise.lane_cv"),
        (("--noise", "0.2", "--counts", "PLAN"), "left out when --counts is given"),
        (("--fit-factor", "2"), "left out without --dbo"),
        (("--dbo", "--pool-bytes", "-5"), "filling.pool_bytes"),
        (("--replicas", "0"), "replicas = 0"),
        (("--jitter", "-0.1"), "jitter.amount"),
        (("--sensitivity", "0"), "a percentage above 0"),
        (("--counts", "nowhere.json"), "--counts"),
    ],
)
def test_mistakes_are_refused(plan: Path, args: tuple[str, ...], said: str) -> None:
    result = run("simulate", plan, *(str(plan) if arg == "PLAN" else arg for arg in args))
    assert result.exit_code not in (OK, 1), result.output
    assert said in " ".join(result.output.split())


def test_not_with_a_comparison() -> None:
    result = run("simulate", *SMALL[:-4], "--schedules", "all", "--memory")
    assert result.exit_code == BAD_INPUT and "left out with --schedules" in " ".join(result.output.split())
