"""The demo as a user runs it, with its own checks; and its parts that need no ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tessera_rt import load_cost_table, load_plan
from tessera_rt.config import load_config
from tessera_rt.demo import checks, pair_timeline, run_demo
from tessera_rt.errors import SpecError
from tessera_rt.scheduler.graphs import action_graph
from tessera_rt.scheduler.list_schedule import list_schedule
from tessera_rt.testing.hybrids import random_costs, tiny_hybrid
from tessera_rt.train import TrainSummary

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "examples" / "hybrid_tiny.yaml"

STATIONS = (
    "1. model description",
    "2. costs",
    "3. overlap graph",
    "4. interleavings",
    "5. partition",
    "6. plan",
    "7. engine",
    "8. schedules on the emulated device",
    "9. timelines",
)


def summary(**changes: object) -> TrainSummary:
    fields: dict[str, object] = {
        "folder": "run",
        "first_step": 0,
        "steps": 30,
        "first_loss": 5.6,
        "last_loss": 2.4,
        "held_out_before": 5.6,
        "held_out_after": 2.5,
        "step_ns": 1,
        "tokens_per_step": 4096,
        "skipped": 0,
        "parameters": 3,
        "unchanged": (),
        "checkpoint": "",
    }
    return TrainSummary(**(fields | changes))  # type: ignore[arg-type]


def test_the_example_is_what_the_issue_asks_for() -> None:
    config = load_config(CONFIG)
    kinds = [str(layer.attention.kind) for layer in config.model.layers]
    assert kinds == ["gated_delta_net", "gated_delta_net", "gated_delta_net", "softmax"] * 2
    assert all((ff.experts, ff.top_k) == (16, 2) for layer in config.model.layers for ff in [layer.feed_forward])
    assert (config.model.hidden, config.data.sequence, config.data.microbatches) == (128, 128, 8)
    assert (config.mesh.pp, config.mesh.vpp, config.mesh.ep, config.mesh.world) == (2, 2, 2, 4)
    assert (config.run.steps, config.run.dtype, config.plan.costs) == (30, "fp32", "measured")


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({}, []),
        ({"first_loss": 5.9}, ["first loss"]),
        ({"last_loss": 4.0}, ["loss falls"]),
        ({"held_out_after": 4.0}, ["held-out loss falls"]),
        ({"held_out_after": None}, ["held-out loss falls"]),
        ({"unchanged": ("layers.0.norm",)}, ["every parameter"]),
    ],
)
def test_every_check_can_fail(changes: dict[str, object], failing: list[str]) -> None:
    found = [check.claim for check in checks(load_config(CONFIG), summary(**changes), []) if not check.passed]
    assert len(found) == len(failing)
    assert all(claim.startswith(start) for claim, start in zip(found, failing, strict=True))


def test_a_pair_is_drawn_with_its_two_passes() -> None:
    model = tiny_hybrid("gSdg")
    costs = random_costs(model, seed=2)
    graph = action_graph("0F;1B", model, costs, [(0, 3), (3, 6)])
    made = list_schedule(graph, "0F;1B")
    timeline = pair_timeline(made, graph, "pair")
    assert timeline.step_ns == made.makespan_ns and len(timeline.spans) == len(graph.tasks)
    assert {(span.name[0], span.stage, span.microbatch) for span in timeline.spans} == {
        ("F", 0, 1),
        ("B", 1, 0),
        ("W", 1, 0),
    }


def test_a_plan_from_a_file_is_refused(tmp_path: Path) -> None:
    config = load_config(CONFIG, [f"plan={{file: {tmp_path / 'none.yaml'}}}", f"run.folder={tmp_path / 'run'}"])
    with pytest.raises(SpecError, match=r"plan\.file"):
        run_demo(config, Console(file=(tmp_path / "out").open("w")))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_make_demos_command_passes_its_checks(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tessera_rt.cli",
            "train",
            str(CONFIG),
            "--demo",
            "--set",
            f"run.folder={tmp_path / 'run'}",
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=850,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for station in STATIONS:
        assert station in done.stdout
    assert done.stdout.count("ok     ") == 5 and "FAILED" not in done.stdout
    assert "Emulated device, virtual time" in done.stdout and "serial-balanced" in done.stdout
    folder = tmp_path / "run"
    for name in ("planned", "emulated", "measured", "timelines"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    plan = load_plan(folder / "plan.yaml")
    assert plan.assumptions.source == "measured" and plan.mesh.world == 4
    assert load_cost_table(folder / "costs.yaml").fingerprint == plan.fingerprint
