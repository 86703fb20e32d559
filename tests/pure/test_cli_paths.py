"""The command line's edges: files it must not overwrite, faults of the system, sizes and options that cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from tessera_rt import load_model, load_plan, save_cost_table
from tessera_rt.cli.app import app
from tessera_rt.cli.output import BAD_INPUT, OK, PLAN_FAULTY, UNEXPECTED, exit_code
from tessera_rt.config import config_from_dict, save_config
from tessera_rt.cost_sources.device import load_device
from tessera_rt.cost_sources.roofline import roofline_costs
from tessera_rt.costs import CostTable, Workload
from tessera_rt.errors import TesseraError
from tessera_rt.files.model_files import model_to_yaml
from tessera_rt.files.plan_files import save_plan
from tessera_rt.files.timeline_files import save_timeline
from tessera_rt.scheduler.simulate import simulate
from tessera_rt.testing.costs import moe_model
from tessera_rt.testing.plans import simple_plan

MODEL = replace(moe_model(4, dense_first=1, shared=True), vocab=256, context=64)
HUGE = 1_000_000_000


def run(*args: str | Path | int) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def refused(result: Result, *words: str, code: int = BAD_INPUT) -> None:
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("error: ") and "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr, result.stderr


def costs_of(tokens: int = 64) -> CostTable:
    return roofline_costs(MODEL, Workload(tokens=tokens, context=64, dtype="fp32"), load_device("h800"))


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.yaml"
    path.write_text(model_to_yaml(MODEL))
    return path


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run with overlap off and computed costs, which did what the simulation without overlap says."""
    folder = tmp_path / "run"
    (folder / "timelines").mkdir(parents=True)
    data = {"model": yaml.safe_load(model_to_yaml(MODEL)), "mesh": {"pp": 2}, "data": {"sequence": 64}}
    save_config(config_from_dict(data | {"plan": {"overlap": False}}), folder / "config.yaml")
    plan, costs = simple_plan(MODEL, pp=2), costs_of()
    save_plan(plan, folder / "plan.yaml")
    save_cost_table(costs, folder / "costs.yaml")
    measured = replace(simulate(plan, MODEL, costs, overlap=False, label="step 1"), source="measured")
    save_timeline(measured, folder / "timelines" / "step-000001.json")
    row = {"kind": "train", "step": 1, "loss": 5.5, "step_ns": 3000, "skipped": False}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return folder


# -- files that are written -------------------------------------------------------------------------------------------


def test_plan_does_not_overwrite_its_inputs(model_file: Path, tmp_path: Path) -> None:
    text = model_file.read_text()
    refused(run("plan", model_file, "-o", model_file), "--output", "another file than those that are read")
    link = tmp_path / "link.yaml"
    link.symlink_to(model_file)
    refused(run("plan", model_file, "-o", link), "--output")
    costs = tmp_path / "costs.yaml"
    save_cost_table(costs_of(), costs)
    refused(run("plan", model_file, "--costs", costs, "-o", costs), "--output")
    assert model_file.read_text() == text


def test_files_of_another_kind_are_kept(model_file: Path, tmp_path: Path) -> None:
    """A plan replaces a plan, and nothing else."""
    other, plan = tmp_path / "other.yaml", tmp_path / "plan.yaml"
    other.write_text("notes: mine\n")
    args = ("plan", model_file, "--pp", 2, "--partitioner", "chain-dp", "--tokens", 64, "--context", 64)
    refused(run(*args, "-o", other), "one that holds a plan")
    plan.touch()  # an empty file holds nothing that could be lost
    for _ in range(2):
        assert run(*args, "-o", plan).exit_code == OK
    assert load_plan(plan).microbatches == 8
    for name, option, made in (("x.png", "--picture", b"\x89PNG"), ("x.json", "--trace", b'{"traceEvents"')):
        path = tmp_path / name
        path.write_text('{"mine": 1}')
        source = ("simulate", plan, "--model", model_file, option, path)
        refused(run(*source), option)
        path.unlink()
        for _ in range(2):
            result = run(*source)
            assert result.exit_code == OK, result.output
        assert path.read_bytes().startswith(made)
    refused(run("profile", model_file, "-o", plan), "one that holds a cost table")


def test_faults_of_the_system_are_one_line(model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("plan", model_file, "--partitioner", "chain-dp", "--tokens", 64, "--context", 64)

    def fails(fault: OSError) -> Result:
        def save(*_: object) -> None:
            raise fault

        monkeypatch.setattr("tessera_rt.cli.plan.save_plan", save)
        return run(*args, "-o", tmp_path / "plan.yaml")

    full = fails(OSError(28, "No space left on device", "plan.yaml"))
    refused(full, "plan.yaml: No space left on device", code=UNEXPECTED)
    assert len(full.stderr.splitlines()) == 1
    refused(fails(PermissionError(13, "Permission denied", "plan.yaml")), "plan.yaml: Permission denied")


def test_folders_that_cannot_be_written_are_named_before_planning(
    model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera_rt.cli.output.can_write", lambda folder: False)
    monkeypatch.setattr("tessera_rt.cli.plan.cli_context.make_plan", lambda request: pytest.fail("it planned"))
    refused(run("plan", model_file, "-o", tmp_path / "plan.yaml"), "a file that can be written")


def test_failures_while_running_are_no_bad_input() -> None:
    assert exit_code(TesseraError("checkpoint could not be written")) == UNEXPECTED


# -- numbers that are too large ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda data: data.update(microbatches=HUGE), ("microbatches = 1000000000", "at most 4")),
        (lambda data: data["mesh"].update(pp=HUGE), ("actions",)),
        (lambda data: data["stages"][-1].update(stop=HUGE), ("stages",)),
    ],
)
def test_check_counts_up_to_no_edited_number(edit: object, words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    save_plan(simple_plan(MODEL, pp=2, microbatches=4), path)
    data = yaml.safe_load(path.read_text())
    assert callable(edit)
    edit(data)
    for stage in data["stages"]:
        stage.pop("items", None)
    path.write_text(yaml.safe_dump(data) + "...\n")
    refused(run("check", path), *words, code=PLAN_FAULTY)


@pytest.mark.parametrize(
    ("option", "field"),
    [
        ("--tokens", "workload.tokens = 999999999999"),
        ("--context", "workload.context"),
        ("--microbatches", "microbatches"),
        ("--pp", "mesh.pp"),
        ("--dp", "mesh.dp"),
    ],
)
def test_sizes_are_bounded(option: str, field: str, model_file: Path) -> None:
    args = (option, 999999999999)
    refused(run("plan", model_file, "--partitioner", "chain-dp", *args), field, "from 1 to")
    refused(run("simulate", model_file, *args, "--schedules", "all"), "from 1 to")


def test_the_largest_workload_has_times(model_file: Path) -> None:
    args = ("--partitioner", "chain-dp", "--tokens", 2**20, "--context", 2**24, "--memory-limit", 10**9)
    assert run("plan", model_file, "--pp", 2, *args).exit_code == OK


def test_the_passes_of_a_plan_are_bounded(model_file: Path) -> None:
    refused(run("plan", model_file, "--pp", 4096, "--vpp", 4, "--microbatches", 65536), "at most 256 with pp x vpp")


# -- plans and runs ---------------------------------------------------------------------------------------------------


def test_simulating_a_plan_refuses_options_of_models(run_folder: Path) -> None:
    result = run("simulate", run_folder, "--pp", 1, "--microbatches", 4, "--time-limit", 3)
    refused(result, "--pp = 1", "--microbatches = 4", "--time-limit = 3.0")


def test_a_run_without_overlap_is_compared_without(run_folder: Path) -> None:
    data = json.loads(run("show", run_folder, "--json").stdout)
    planned, measured = data["steps_compared"]
    assert planned["step_ns"] == measured["step_ns"] and data["overlap"] is False
    assert "plan.overlap: false" in run("show", run_folder).stdout
    plain = run("simulate", run_folder)
    assert "plan.overlap: false" in plain.stdout and "no overlap" in plain.stdout
    assert json.loads(run("simulate", run_folder, "--json").stdout)["step_ns"] == measured["step_ns"]
    joint = json.loads(run("simulate", run_folder, "--overlap", "--json").stdout)
    assert joint["overlap"] and joint["step_ns"] < measured["step_ns"]


def test_costs_of_another_device_are_noted(run_folder: Path) -> None:
    text = run("show", run_folder).stdout
    assert "computed for device h800, not for the machine that ran" in text


def test_a_device_takes_the_place_of_the_costs_of_a_run(run_folder: Path) -> None:
    own, other = (
        json.loads(run("simulate", run_folder, *options, "--json").stdout)["step_ns"]
        for options in ((), ("--device", "h200"))
    )
    assert own != other


def test_results_of_a_plan_come_first(model_file: Path) -> None:
    text = run("plan", model_file, "--pp", 2, "--partitioner", "chain-dp", "--tokens", 64).stdout
    assert text.startswith("simulated step: ")
    marks = ["bottleneck:", "partition:", "in flight", "workload:", "launch_ns"]
    assert sorted(marks, key=text.index) == marks


def test_upper_bounds_are_said_in_words(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: mixtral-8x7b\ndata: {held_out: 1.5}\n")
    refused(run("train", path), "data.held_out = 1.5: must be less than 1")


def test_preset_names_are_no_files(tmp_path: Path) -> None:
    """Inputs that are names of presets do not disturb the check of outputs."""
    args = ("mixtral-8x7b", "--pp", 2, "--ep", 8, "--tokens", 2048, "--partitioner", "chain-dp")
    assert run("plan", *args, "-o", tmp_path / "plan.yaml").exit_code == OK
    assert load_plan(tmp_path / "plan.yaml", model=load_model("mixtral-8x7b")).mesh.ep == 8
