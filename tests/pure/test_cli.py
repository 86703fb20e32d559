"""The command line without torch: results, exit codes, one JSON object, errors without traceback."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from tessera_rt import load_model, load_plan, save_cost_table
from tessera_rt.cli.app import app
from tessera_rt.cli.output import BAD_INPUT, EXIT_CODES, INFEASIBLE, OK, PLAN_FAULTY, RUN_FAILED, exit_code
from tessera_rt.config import config_from_dict, save_config
from tessera_rt.costs import CostTable, ItemMemory, Provenance, TaskCost, Workload
from tessera_rt.errors import CostError, PartitionInfeasible, PlanError, SpecError, TransportError
from tessera_rt.files.model_files import model_to_yaml
from tessera_rt.files.plan_files import save_plan
from tessera_rt.files.timeline_files import save_timeline
from tessera_rt.model_spec import ModelSpec
from tessera_rt.planner.compare_schedules import SCHEDULES
from tessera_rt.scheduler.simulate import simulate
from tessera_rt.tasks import Pass, chunk_tasks
from tessera_rt.testing.costs import moe_model
from tessera_rt.testing.plans import TASK_NS, simple_plan

SMALL = ("mixtral-8x7b", "--pp", "2", "--vpp", "2", "--ep", "8", "--tokens", "2048", "--partitioner", "chain-dp")
MODEL = replace(moe_model(4, dense_first=1, shared=True), vocab=256, context=64)
COMMANDS = ("train", "plan", "check", "simulate", "show", "profile", "models", "doctor")


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def table_for(model: ModelSpec, *, factor: int = 1) -> CostTable:
    """The costs that ``simple_plan`` has in mind."""
    tasks = [task for pass_ in (Pass.F, Pass.B) for task in chunk_tasks(model.items, pass_).tasks]
    return CostTable(
        fingerprint=model.fingerprint,
        workload=Workload(tokens=64, context=64, dtype="fp32"),
        provenance=Provenance(source="table", device="none"),
        tasks={task.name: TaskCost(ns=factor * TASK_NS[task.resource]) for task in tasks},
        memory={item.label: ItemMemory(weights=64, activations=16, output=8) for item in model.items},
    )


def parsed(result: Result) -> dict[str, Any]:
    """The one JSON object of a command's output."""
    assert result.exit_code == OK, result.output
    data = json.loads(result.stdout)  # fails on anything before or after it
    assert isinstance(data, dict) and isinstance(data["rows"], list) and data["rows"]
    return data


def numbers(data: Any, path: str = "") -> list[tuple[str, float]]:
    """Every number of a JSON value with the name of its field."""
    if isinstance(data, dict):
        return [found for name, value in data.items() for found in numbers(value, name)]
    if isinstance(data, list):
        return [found for value in data for found in numbers(value, path)]
    return [(path, data)] if isinstance(data, int | float) and not isinstance(data, bool) else []


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.yaml"
    assert run("plan", *SMALL, "-o", path).exit_code == OK
    return path


# -- help -------------------------------------------------------------------------------------------------------------


def test_help_lists_commands_and_exit_codes() -> None:
    text = " ".join(run("--help").stdout.split())
    assert all(command in text for command in COMMANDS)
    assert " ".join(EXIT_CODES.split()) in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str) -> None:
    text = run(command, "--help").stdout
    assert "Examples:" in text and f"tessera {command}" in text


def test_no_arguments_show_help_and_unknown_usage_is_bad_input() -> None:
    assert "Commands:" in run().output
    for args in (("plan",), ("plan", "mixtral-8x7b", "--pp", "two"), ("fly",), ("plan", "mixtral-8x7b", "--wings")):
        assert run(*args).exit_code == BAD_INPUT


# -- plan -------------------------------------------------------------------------------------------------------------


def test_plan_prints_stages_memory_bottleneck_solver_and_assumptions() -> None:
    result = run("plan", *SMALL)
    assert result.exit_code == OK
    for part in ("stage", "in flight", "W ms", "GiB", "bottleneck", "T_dom", "gap", "equal layers", "launch_ns"):
        assert part in result.stdout, part
    assert "assumed" in result.stdout and "nothing was measured" in result.stdout


def test_plan_json_has_rows_with_units_and_the_file_loads(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    data = parsed(run("plan", *SMALL, "-o", path, "--json"))
    plan = load_plan(path, model=load_model("mixtral-8x7b"))
    assert [row["stage"] for row in data["rows"]] == [0, 1, 2, 3]
    assert data["solver"]["step_ns"] == plan.solver.step_ns == data["step"]["step_ns"]
    assert [row["peak_bytes"] for row in data["memory"]] == [memory.peak for memory in plan.memory]
    split = data["step"]
    assert split["compute_ns"] + split["exposed_ns"] + split["bubble_ns"] == pytest.approx(split["step_ns"], abs=4)
    assert data["bottleneck"]["makespan_ns"] == plan.solver.t_dom_ns
    for name, value in numbers(data):
        assert name.endswith(("_ns", "_bytes")) or value < 10_000, f"{name} = {value} has no unit"


def test_plan_is_free_of_torch_and_passes_check(tmp_path: Path) -> None:
    """The README's command, with a smaller number of micro-batches, as one process."""
    path = tmp_path / "plan.yaml"
    args = f"plan qwen3-next-80b --pp 8 --vpp 2 --ep 32 --microbatches 16 --tokens 4096 --recompute auto -o {path}"
    others = (["simulate", str(path), "--json"], ["show", str(path), "--json"], ["check", str(path)], ["models"])
    program = """
import json, sys
from typer.testing import CliRunner
from tessera_rt.cli.app import app
for args in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    loaded = sorted({"torch", "triton"} & set(sys.modules))
    assert not loaded, f"{args[0]} loads {loaded}"
"""
    commands = json.dumps([args.split(), *others])
    done = subprocess.run(
        [sys.executable, "-c", program, commands], capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert load_plan(path).workload.recompute == "none"


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["qwen3-next-80b", "deepseek-v3", "qwen3-235b-a22b", "nemotron-3-super", "gpt-oss-120b"]
)
def test_released_models_are_planned_or_told_what_would_fit(model: str, tmp_path: Path) -> None:
    """Where 4096 tokens do not fit, the number of tokens that the remedy names does."""
    path = tmp_path / "plan.yaml"
    args = ["plan", model, "--pp", "8", "--vpp", "2", "--ep", "32", "--microbatches", "64", "--recompute", "auto"]
    args += ["--device", "h800", "-o", str(path)]
    result = run(*args, "--tokens", "4096")
    if result.exit_code == INFEASIBLE:
        remedy = re.search(r"smallest remedy: (?:.*; or )?about (\d+) instead of 4096 tokens", result.stderr)
        assert remedy is not None, result.stderr
        result = run(*args, "--tokens", remedy[1])
    assert result.exit_code == OK, result.output
    assert run("check", path).exit_code == OK
    assert all(0 < memory.peak <= memory.limit == 80_000_000_000 for memory in load_plan(path).memory)


def test_infeasible_plan_names_need_limit_and_remedy() -> None:
    result = run("plan", *SMALL, "--memory-limit", "10")
    assert result.exit_code == INFEASIBLE
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: partition of mixtral-8x7b: no partition fits") and len(lines) == 2
    assert "memory of rank" in lines[1] and "limit of" in lines[1] and "smallest remedy" in lines[1]


def test_bad_requests_list_every_problem_without_traceback() -> None:
    result = run("plan", "mixtral-8x7b", "--pp", "0", "--objective", "luck", "--json")
    assert result.exit_code == BAD_INPUT and result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[0] == "error: plan request: 2 problems"
    assert "mesh.pp = 0" in result.stderr and "objective = 'luck'" in result.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("plan", "mixtral"), "did you mean 'mixtral-8x7b'"),
        (("plan", "mixtral-8x7b", "--ep", "3"), "divisor of 8"),
        (("plan", "mixtral-8x7b", "--device", "abacus"), "h800"),
        (("plan", "mixtral-8x7b", "--template", "dance"), "one of 1f1b"),
        (("plan", "mixtral-8x7b", "--window", "far"), "or any"),
        (("plan", "mixtral-8x7b", "--memory-limit", "nan"), "GiB above 0"),
        (("plan", "mixtral-8x7b", "--tokens", "0"), "workload.tokens"),
        (("plan", "mixtral-8x7b", "--dtype", "fp3"), "workload.dtype"),
        (("plan", "mixtral-8x7b", "-o", "/nowhere/plan.yaml"), "a folder that exists"),
        (("plan", "mixtral-8x7b", "-o", "plan.txt"), "ends in .yaml"),
        (("plan", "mixtral-8x7b", "--costs", "none.yaml"), "a file that exists"),
        (("check", "none.yaml"), "a file that exists"),
        (("simulate", "mixtral-8x7b", "--picture", "x.gif"), ".png or .svg"),
        (("train", "none.yaml"), "a file that exists"),
        (("profile", "none.yaml", "-o", "x.yaml"), "a file that exists"),
    ],
)
def test_bad_input_is_named(args: Sequence[str], words: str) -> None:
    result = run(*args)
    assert result.exit_code == BAD_INPUT, result.output
    assert words in result.stderr and result.stderr.startswith("error: ") and "Traceback" not in result.stderr


def test_costs_from_a_file_and_their_contradictions(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(model_to_yaml(MODEL))
    costs = table_for(MODEL)
    save_cost_table(costs, tmp_path / "costs.yaml")
    args = ("plan", tmp_path / "model.yaml", "--pp", "2", "--costs", tmp_path / "costs.yaml")
    assert len(parsed(run(*args, "--json"))["rows"]) == 2
    wrong = run(*args, "--tokens", "77", "--device", "h800", "--recompute", "full")
    assert wrong.exit_code == BAD_INPUT
    assert all(f"--{name} =" in wrong.stderr for name in ("tokens", "device", "recompute"))


# -- check and show a plan --------------------------------------------------------------------------------------------


def test_check_accepts_a_plan_and_refuses_a_faulty_one(plan_file: Path, tmp_path: Path) -> None:
    assert "is sound and fits mixtral-8x7b" in run("check", plan_file).stdout
    assert parsed(run("check", plan_file, "--json"))["rows"][0]["ok"] is True
    data = yaml.safe_load(plan_file.read_text())
    data["stages"][1]["start"] += 1
    del data["stages"][1]["items"]
    faulty = tmp_path / "faulty.yaml"
    faulty.write_text(yaml.safe_dump(data) + "...\n")
    result = run("check", faulty)
    assert result.exit_code == PLAN_FAULTY and "stages" in result.stderr
    cut_off = tmp_path / "cut.yaml"
    cut_off.write_text(plan_file.read_text()[:2000])
    assert run("check", cut_off).exit_code == PLAN_FAULTY


def test_check_against_another_model(plan_file: Path) -> None:
    result = run("check", plan_file, "--model", "qwen3-30b-a3b")
    assert result.exit_code == PLAN_FAULTY and "fingerprint" in result.stderr


def test_show_plan_with_and_without_its_costs(plan_file: Path, tmp_path: Path) -> None:
    text = run("show", plan_file).stdout
    assert "bottleneck" in text and "F ms" in text and "Overlap edges" in text
    path = tmp_path / "own.yaml"
    save_plan(simple_plan(MODEL, pp=2), path)
    unknown = run("show", path)
    assert unknown.exit_code == OK and "name it with --model" in unknown.stdout
    assert "f_ns" not in parsed(run("show", path, "--json"))["rows"][0]


def test_show_of_a_folder_that_is_no_run(tmp_path: Path) -> None:
    result = run("show", tmp_path)
    assert result.exit_code == BAD_INPUT and "a run folder" in result.stderr


# -- simulate ---------------------------------------------------------------------------------------------------------


def test_simulate_a_plan_with_pictures(plan_file: Path, tmp_path: Path) -> None:
    picture, trace = tmp_path / "step.png", tmp_path / "step.json"
    data = parsed(run("simulate", plan_file, "--picture", picture, "--trace", trace, "--json"))
    assert data["step_ns"] == load_plan(plan_file).solver.step_ns
    assert [row["rank"] for row in data["rows"]] == [0, 1]
    assert picture.read_bytes().startswith(b"\x89PNG") and json.loads(trace.read_text())["traceEvents"]
    serial = parsed(run("simulate", plan_file, "--no-overlap", "--json"))
    assert serial["step_ns"] > data["step_ns"] and not serial["overlap"]
    assert "rank 0" in run("simulate", plan_file).stdout


def test_simulate_a_model_is_planning_it_first(plan_file: Path) -> None:
    assert parsed(run("simulate", *SMALL, "--json"))["step_ns"] == load_plan(plan_file).solver.step_ns


def test_simulate_all_schedules(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(model_to_yaml(MODEL))
    args = ("simulate", tmp_path / "model.yaml", "--pp", "2", "--vpp", "2", "--ep", "2", "--tokens", "64")
    args = (*args, "--schedules", "all")
    data = parsed(run(*args, "--json"))
    fields = {"schedule", "step_ns", "exposed_ns", "bubble_ns", "peak_bytes", "tokens_per_s", "mfu"}
    assert all(set(row) == fields for row in data["rows"])
    shown = [row["schedule"] for row in data["rows"]]
    assert shown == [schedule.name for schedule in SCHEDULES] and data["refused"] == []
    for row in data["rows"]:
        assert row["tokens_per_s"] == pytest.approx(64 * 2 * 8 * 1e9 / row["step_ns"]) and 0 < row["mfu"] < 1
        assert 0 < row["exposed_ns"] + row["bubble_ns"] < row["step_ns"]
    # 7 is no multiple of pp.
    odd = parsed(run(*args, "--microbatches", "7", "--json"))
    assert {row["schedule"] for row in odd["refused"]} == set(shown) - {row["schedule"] for row in odd["rows"]} != set()
    drawn = run(*args, "--microbatches", "7", "--picture", tmp_path / "all.png", "--trace", tmp_path / "all.json")
    text = drawn.stdout
    assert "ZB-H1" in text and "left out: Megatron's fixed pair order" in text
    assert text.count("rank 0") >= len(odd["rows"])  # every timeline is drawn
    assert (tmp_path / "all.png").is_file() and (tmp_path / "all.json").is_file()
    # Costs of a file state no peak.
    save_cost_table(table_for(MODEL), tmp_path / "own.yaml")
    given = ("simulate", tmp_path / "model.yaml", "--costs", tmp_path / "own.yaml", "--pp", "2", "--schedules", "all")
    assert {row["mfu"] for row in parsed(run(*given, "--json"))["rows"]} == {None}


def test_search_prints_the_frontier_and_writes_the_fastest(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(model_to_yaml(MODEL))
    args = ("plan", tmp_path / "model.yaml", "--pp", "2", "--ep", "2", "--tokens", "64", "--search")
    args = (
        *args,
        "--over",
        "vpp=1,2,4",
        "--over",
        "template=1f1b,dualpipe-v,interleaved-1f1b",
        "--over",
        "tokens=32,64",
    )
    data = parsed(run(*args, "--json", "-o", tmp_path / "plan.yaml"))
    rows = data["rows"]
    planned = [row for row in rows if row["step_ns"] is not None]
    assert [row["step_ns"] for row in planned] == sorted(row["step_ns"] for row in planned)
    assert {(row["template"], row["vpp"]) for row in rows} == {
        ("1f1b", 1),
        ("dualpipe-v", 2),
        ("interleaved-1f1b", 1),
        ("interleaved-1f1b", 2),
        ("interleaved-1f1b", 4),
    }
    assert {row["tokens"] * row["microbatches"] for row in rows} == {64 * 8}
    frontier = [row for row in planned if row["frontier"]]
    assert frontier[0] == planned[0]
    peaks = [row["peak_bytes"] for row in frontier]
    assert peaks == sorted(set(peaks), reverse=True)
    for row in planned:
        assert row["frontier"] or any(
            other["step_ns"] <= row["step_ns"] and other["peak_bytes"] <= row["peak_bytes"] for other in frontier
        )
    written = load_plan(tmp_path / "plan.yaml")
    assert (written.template, written.mesh.vpp) == (planned[0]["template"], planned[0]["vpp"])
    text = run(*args).stdout
    assert "dualpipe-v" in text and "*" in text


def test_search_says_what_is_wrong_with_a_grid() -> None:
    for over, message in (
        (("vpp=1", "vpp=2"), "once for an axis"),
        (("speed=1",), "AXIS one of"),
        (("vpp=two",), "whole numbers"),
        (("tokens=1000",), "a divisor of"),
        (("template=none",), "no point of the grid has a plan"),
    ):
        result = run("plan", *SMALL, "--search", *(part for text in over for part in ("--over", text)))
        assert result.exit_code == BAD_INPUT and message in result.stderr, result.output
    lost = run("plan", *SMALL, "--over", "vpp=1")
    assert lost.exit_code == BAD_INPUT and "left out without --search" in lost.stderr


def test_plans_with_w_pools_and_halves(tmp_path: Path) -> None:
    given = ("plan", *SMALL, "--microbatches", "6", "--evaluations", "5")
    target = tmp_path / "plan.yaml"
    plain = parsed(run(*given, "--json"))
    halved = parsed(run(*given, "--moe-halves", "--w-pool", "1", "--json", "-o", target))
    assert (plain["simulate_only"], halved["simulate_only"]) == ([], ["moe-halves"])
    assert halved["step"]["step_ns"] != plain["step"]["step_ns"]  # experts take longer in halves: no gain here
    assert parsed(run("simulate", target, "--json"))["step_ns"] == halved["step"]["step_ns"]
    refused = run("plan", *SMALL, "--template", "gpipe", "--moe-halves")
    assert refused.exit_code == BAD_INPUT and "moe_halves" in refused.stderr


def test_simulate_all_schedules_is_for_models(plan_file: Path) -> None:
    result = run("simulate", plan_file, "--schedules", "some", "--no-overlap", "--template", "1f1b")
    assert result.exit_code == BAD_INPUT
    for name in ("--schedules", "SPEC", "--no-overlap", "--template"):
        assert name in result.stderr
    refused = run("simulate", *SMALL[:-2], "--schedules", "all", "--recompute", "some")
    assert refused.exit_code == BAD_INPUT and "recompute" in refused.stderr


def test_simulate_needs_costs(tmp_path: Path) -> None:
    save_plan(simple_plan(MODEL, pp=2), tmp_path / "plan.yaml")
    (tmp_path / "model.yaml").write_text(model_to_yaml(MODEL))
    save_cost_table(table_for(MODEL), tmp_path / "own.yaml")
    args = ("simulate", tmp_path / "plan.yaml", "--model", tmp_path / "model.yaml")
    result = run(*args)
    assert result.exit_code == BAD_INPUT and "--costs" in result.stderr
    assert parsed(run(*args, "--costs", tmp_path / "own.yaml", "--json"))["step_ns"] > 0


# -- show a run -------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run folder made by hand: measured times are twice the planned ones."""
    plan, costs = simple_plan(MODEL, pp=2), table_for(MODEL)
    folder = tmp_path / "run"
    folder.mkdir()
    config = config_from_dict(
        {"model": yaml.safe_load(model_to_yaml(MODEL)), "mesh": {"pp": 2}, "data": {"sequence": 64}}
    )
    save_config(config, folder / "config.yaml")
    save_plan(plan, folder / "plan.yaml")
    save_cost_table(costs, folder / "costs.yaml")
    doubled = table_for(MODEL, factor=2)
    (folder / "timelines").mkdir()
    save_timeline(simulate(plan, MODEL, doubled, label="step 2"), folder / "timelines" / "step-000002.json")
    rows = [
        {"kind": "evaluate", "step": 0, "held_out_loss": 5.5},
        {"kind": "train", "step": 1, "loss": 5.5, "step_ns": 3000, "skipped": False},
        {"kind": "train", "step": 2, "loss": 4.4, "step_ns": 1000, "skipped": False},
        {"kind": "evaluate", "step": 2, "held_out_loss": 5.0},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "tr')
    return folder


def test_show_run_compares_measured_with_planned(run_folder: Path) -> None:
    data = parsed(run("show", run_folder, "--json"))
    assert all(row["measured_ns"] == 2 * row["planned_ns"] for row in data["rows"])
    assert {(row["stage"], row["pass"]) for row in data["rows"]} == {(s, p) for s in (0, 1) for p in "FBW"}
    assert all(row["measured_ns"] == 2 * row["planned_ns"] for row in data["tasks"])
    planned, measured = data["steps_compared"]
    assert measured["step_ns"] == 2 * planned["step_ns"]
    assert (data["first_loss"], data["last_loss"], data["held_out_after"]) == (5.5, 4.4, 5.0)
    assert data["steps"] == 2 and data["median_step_ns"] == 3000
    text = run("show", run_folder).stdout
    assert "2.00" in text and "loss: 5.5000 -> 4.4000 (-20.0 %)" in text


def test_show_run_names_a_damaged_line(run_folder: Path) -> None:
    (run_folder / "metrics.jsonl").write_text("not json\n{}\n")
    result = run("show", run_folder)
    assert result.exit_code == BAD_INPUT and "line 1" in result.stderr


def test_run_folder_can_be_checked_and_simulated(run_folder: Path) -> None:
    assert "is sound and fits" in run("check", run_folder).stdout
    assert parsed(run("simulate", run_folder, "--json"))["step_ns"] > 0


# -- the rest ---------------------------------------------------------------------------------------------------------


def test_models_lists_presets() -> None:
    rows = parsed(run("models", "--json"))["rows"]
    assert len(rows) == 12 and {"qwen3-next-80b", "jamba-1.5-mini"} <= {row["model"] for row in rows}


def test_doctor_reports_folders(tmp_path: Path) -> None:
    result = run("doctor", "--folder", tmp_path / "runs", "--json")
    rows = {row["check"]: row for row in json.loads(result.stdout)["rows"]}
    assert rows["Python"]["ok"] and rows["run folder"]["ok"] and rows["scipy"]["ok"]
    (tmp_path / "file").touch()
    blocked = json.loads(run("doctor", "--folder", tmp_path / "file" / "runs", "--json").stdout)
    assert not next(row for row in blocked["rows"] if row["check"] == "run folder")["ok"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpecError, BAD_INPUT),
        (CostError, BAD_INPUT),
        (PartitionInfeasible, INFEASIBLE),
        (PlanError, PLAN_FAULTY),
        (TransportError, RUN_FAILED),
    ],
)
def test_exit_codes_by_kind_of_error(error: type[SpecError], code: int) -> None:
    assert exit_code(error("text")) == code
