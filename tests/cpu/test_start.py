"""From a configuration to plan and run: where costs and plans come from, and the command line's way through it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tessera_rt import load_cost_table, load_plan, save_cost_table, save_plan, start
from tessera_rt.cli.app import app
from tessera_rt.cli.output import BAD_INPUT, RUN_FAILED
from tessera_rt.config import TrainConfig, config_from_dict, config_to_yaml
from tessera_rt.costs import CostTable, Recompute
from tessera_rt.data import open_data
from tessera_rt.errors import CostError, PlanError, SpecError
from tessera_rt.files.model_files import model_to_yaml
from tessera_rt.files.yaml_text import parse_yaml
from tessera_rt.launch import RankFailed
from tessera_rt.start import check_start, how_to_go_on, prepare
from tessera_rt.testing.hybrids import random_costs, tiny_hybrid
from tessera_rt.train import run_info


def tiny_config(folder: Path, *, mesh: dict[str, int] | None = None, **plan: Any) -> TrainConfig:
    text = folder / "data.txt"
    text.write_bytes(bytes(range(256)) * 40)
    data = {
        "model": parse_yaml(model_to_yaml(tiny_hybrid("gSd", vocab=256)), "model"),
        "mesh": mesh or {"pp": 2},
        "data": {"files": str(text), "sequence": 16, "microbatches": 3, "held_out": 0.1},
        "plan": plan,
        "optimizer": {"lr": 0.01},
        "run": {"timeout_s": 60.0, "steps": 2, "folder": str(folder / "run"), "evaluate_batches": 1},
    }
    return config_from_dict(data, "tiny")


def costs_for(config: TrainConfig, policy: Recompute = Recompute.NONE) -> CostTable:
    return random_costs(config.model, config.workload(policy), seed=1)


def test_measured_costs_are_measured_once_for_each_policy_that_is_tried(tmp_path: Path) -> None:
    asked: list[Recompute] = []

    def measure(config: TrainConfig, policy: Recompute) -> CostTable:
        asked.append(policy)
        held = {Recompute.NONE: 1000, Recompute.SELECTIVE: 500, Recompute.FULL: 1}[policy]
        table = costs_for(config, policy)
        memory = {name: replace(item, activations=held) for name, item in table.memory.items()}
        return replace(table, memory=memory)

    prepared = prepare(tiny_config(tmp_path, recompute="auto"), measure=measure)
    assert asked == [Recompute.NONE] and prepared.plan.workload.recompute is Recompute.NONE
    lean = prepare(tiny_config(tmp_path, recompute="selective"), measure=measure).plan
    limit = max(memory.peak for memory in lean.memory)
    asked.clear()
    tight = prepare(tiny_config(tmp_path, recompute="auto", memory_limit=limit), measure=measure)
    assert asked == [Recompute.NONE, Recompute.SELECTIVE]
    assert tight.plan.workload.recompute is Recompute.SELECTIVE
    assert tight.costs is not None and tight.costs.workload.recompute is Recompute.SELECTIVE


def test_costs_of_a_roofline_and_of_a_file(tmp_path: Path) -> None:
    computed = prepare(tiny_config(tmp_path, costs="roofline"))
    assert computed.costs is not None and computed.plan.assumptions.device == "h800"
    config = tiny_config(tmp_path)
    save_cost_table(costs_for(config), tmp_path / "costs.yaml")
    given = prepare(tiny_config(tmp_path, costs=str(tmp_path / "costs.yaml")))
    assert given.costs == load_cost_table(tmp_path / "costs.yaml", model=config.model)


def test_a_cost_file_for_another_workload_is_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, costs=str(tmp_path / "costs.yaml"), recompute="full")
    other = replace(config.workload(), tokens=99, dtype="fp64")
    save_cost_table(random_costs(config.model, other, seed=1), tmp_path / "costs.yaml")
    with pytest.raises(CostError) as caught:
        prepare(config)
    assert {p.field for p in caught.value.problems} == {"workload.tokens", "workload.dtype", "plan.recompute"}


def test_a_plan_file_is_taken_as_it_is_if_it_fits(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    plan = prepare(config, measure=costs_for).plan
    save_plan(plan, tmp_path / "plan.yaml")
    prepared = prepare(tiny_config(tmp_path, file=str(tmp_path / "plan.yaml")))
    assert prepared.plan == plan and prepared.costs is None
    with pytest.raises(PlanError, match="mesh"):
        prepare(tiny_config(tmp_path, mesh={"pp": 3}, file=str(tmp_path / "plan.yaml")))


def test_a_plan_file_for_another_model_is_one_line(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    save_plan(prepare(config, measure=costs_for).plan, tmp_path / "plan.yaml")
    other = replace(
        tiny_config(tmp_path, file=str(tmp_path / "plan.yaml")),
        model=replace(tiny_hybrid("gSdd", vocab=256), name="other"),
    )
    with pytest.raises(PlanError, match=rf"made for another model \({config.model.name}, .*not for other, ") as caught:
        prepare(other)
    assert "\n" not in str(caught.value)


def never(config: TrainConfig, policy: Recompute) -> CostTable:
    raise AssertionError("measured before all was checked")


def with_run(config: TrainConfig, **run: Any) -> TrainConfig:
    return replace(config, run=config.run.model_copy(update=run))


def test_mistakes_are_found_before_anything_is_measured(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    (tmp_path / "file").touch()
    saved = tmp_path / "saved"
    saved.mkdir()
    info = run_info(config, tokens=len(open_data(config.data, vocab=256, seed=0).train.tokens), step=2)
    (saved / "info.json").write_text(json.dumps(asdict(info)))
    ids = np.zeros(500, np.int32)
    ids[400] = 256
    np.save(tmp_path / "ids.npy", ids)
    tokens = config.data.model_copy(update={"files": (), "tokens": str(tmp_path / "ids.npy")})
    empty = config.data.model_copy(update={"files": (str(tmp_path / "file"),)})
    for faulty, field in (
        (replace(config, data=tokens), "token 400"),
        (replace(config, data=empty), "data.files"),
        (with_run(config, folder=str(tmp_path / "file")), "run.folder"),
        (with_run(config, folder=str(tmp_path / "file" / "run")), "run.folder"),
        (with_run(config, resume=str(tmp_path / "nowhere")), "run.resume"),
        (with_run(config, resume=str(saved), seed=7), "seed"),
        (with_run(config, resume=str(saved), dtype="fp64"), "dtype"),
        (with_run(config, resume=str(saved), steps=1), "run.steps"),
    ):
        with pytest.raises(SpecError) as caught:
            prepare(faulty, measure=never)
        assert [p.field for p in caught.value.problems if p.field.endswith(field)], caught.value
    check_start(with_run(config, resume=str(saved), folder=str(tmp_path / "a" / "b")))
    assert not (tmp_path / "run").exists() and not (tmp_path / "a").exists()


def test_empty_stages_are_told(tmp_path: Path) -> None:
    said: list[str] = []
    items = len(tiny_config(tmp_path).model.items)
    prepare(tiny_config(tmp_path, mesh={"pp": items}), measure=costs_for, say=said.append)
    assert said == [text for text in said if "empty" not in text]
    said.clear()
    prepared = prepare(tiny_config(tmp_path, mesh={"pp": items + 2}), measure=costs_for, say=said.append)
    assert prepared.plan.mesh.pp == items + 2
    empty = sum(stage.start == stage.stop for stage in prepared.plan.stages)
    assert empty >= 2
    assert [text for text in said if f"{empty} of {items + 2} stages are empty" in text]


def test_how_a_stopped_run_goes_on(tmp_path: Path) -> None:
    assert how_to_go_on(tmp_path).startswith("before its first step; there is no checkpoint")
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n{"kind": "train", "step": 2}\n')
    saved = tmp_path / "checkpoints" / "step-000001"
    saved.mkdir(parents=True)
    (saved / "info.json").touch()
    (tmp_path / "checkpoints" / "latest").write_text("step-000001\n")
    expected = f"at step 2; resume with run.resume=latest run.folder={tmp_path} (last checkpoint: {saved})"
    assert how_to_go_on(tmp_path) == expected


def test_train_and_show_from_the_command_line(tmp_path: Path) -> None:
    """Two ranks are started; the run folder then holds all that `show` compares, and a second run gets its own."""
    config = tmp_path / "tiny.yaml"
    config.write_text(config_to_yaml(tiny_config(tmp_path, costs="roofline")))
    result = CliRunner().invoke(app, ["train", str(config), "--set", "run.seed=3"])
    assert result.exit_code == 0, result.output
    run = tmp_path / "run"
    assert f"run folder: {run}" in result.stdout
    made = load_plan(run / "plan.yaml")
    assert load_cost_table(run / "costs.yaml").fingerprint == made.fingerprint
    shown = json.loads(CliRunner().invoke(app, ["show", str(run), "--json"]).stdout)
    assert shown["steps"] == 2 and shown["missing"] == ""
    assert all(row["planned_ns"] and row["measured_ns"] for row in shown["rows"])
    assert [row["source"] for row in shown["steps_compared"]] == ["simulated", "measured"]


def test_missing_data_is_bad_input_and_leaves_no_run_folder(tmp_path: Path) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(config_to_yaml(tiny_config(tmp_path, costs="roofline")))
    (tmp_path / "data.txt").unlink()
    result = CliRunner().invoke(app, ["train", str(config)])
    assert result.exit_code == BAD_INPUT and "data.files" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_whose_ranks_fail_ends_with_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(config_to_yaml(tiny_config(tmp_path, costs="roofline")))

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RankFailed.on(1, "2B3", "was killed by signal 9 (SIGKILL)")

    monkeypatch.setattr(start, "run_local", fails)
    result = CliRunner().invoke(app, ["train", str(config)])
    assert result.exit_code == RUN_FAILED
    assert result.stderr.startswith("error: rank 1 was killed by signal 9 (SIGKILL) during 2B3")


@pytest.mark.slow
def test_train_under_torchrun_measures_and_plans_on_its_ranks(tmp_path: Path) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(config_to_yaml(tiny_config(tmp_path)))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    command += ["-m", "tessera_rt.cli", "train", str(config)]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run folder:") == 1
    assert load_cost_table(tmp_path / "run" / "costs.yaml").provenance.source == "measured"
    assert (tmp_path / "run" / "metrics.jsonl").is_file()
