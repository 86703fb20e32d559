"""What `tessera plan`, `simulate` and `show` share: options, exports and imports, tokens per second and MFU."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tessera_rt import load_device, load_plan, roofline_costs, save_cost_table
from tessera_rt.cli.app import app
from tessera_rt.cli.output import BAD_INPUT, OK, PLAN_FAULTY
from tessera_rt.cli.plan import plan
from tessera_rt.cli.simulate import simulate
from tessera_rt.cli.tables import rates
from tessera_rt.costs import Recompute, Workload
from tessera_rt.files.model_files import model_to_yaml
from tessera_rt.files.plan_files import save_plan
from tessera_rt.plan import Plan
from tessera_rt.scheduler.templates import build_template
from tessera_rt.testing.costs import moe_model

MODEL = replace(moe_model(6, dense_first=1, shared=True), vocab=256, context=64)
EDGES = ("--pp", 2, "--vpp", 2, "--ep", 2, "--tokens", 64, "--context", 64, "--evaluations", 2)


def run(*args: str | Path | int) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def parsed(result: Result) -> dict[str, Any]:
    assert result.exit_code == OK, result.output
    data = json.loads(result.stdout)
    assert isinstance(data, dict)
    return data


def refused(result: Result, *words: str, code: int = BAD_INPUT) -> None:
    assert result.exit_code == code and "Traceback" not in result.output, result.output
    for word in words:
        assert word in result.stderr, result.stderr


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.yaml"
    path.write_text(model_to_yaml(MODEL))
    return path


def bounds(made: Plan) -> list[int]:
    return [stage.stop for stage in made.stages]


# -- options ----------------------------------------------------------------------------------------------------------


def test_simulate_plans_with_the_options_of_plan() -> None:
    of_plan = set(inspect.signature(plan).parameters) - {"spec", "search", "over", "output"}
    assert of_plan <= set(inspect.signature(simulate).parameters)


def test_simulate_makes_the_plan_that_plan_makes(model_file: Path, tmp_path: Path) -> None:
    given = (*EDGES, "--tp", 2, "--comm-sms", 12, "--group", 3, "--w-pool", 0.001, "--moe-halves", "--tapered-ends", 2)
    # One attention head cannot be shared; eight can.
    heads = replace(MODEL.layers[0].attention, heads=8)
    layers = tuple(replace(layer, attention=heads) for layer in MODEL.layers)
    model_file.write_text(model_to_yaml(replace(MODEL, layers=layers)))
    made = parsed(run("plan", model_file, *given, "--json"))
    assert made["simulate_only"] == ["tp", "moe-halves", "tapered-ends"]
    assert parsed(run("simulate", model_file, *given, "--json"))["step_ns"] == made["step"]["step_ns"]


def test_tapered_ends_keep_the_steps_tokens(model_file: Path, tmp_path: Path) -> None:
    """8 micro-batches' worth of tokens in 2 + 2 small and 6 full ones; files, tables and rates say so."""
    path = tmp_path / "plan.yaml"
    plain = parsed(run("plan", model_file, *EDGES, "--json"))
    made = parsed(run("plan", model_file, *EDGES, "--tapered-ends", 2, "-o", path, "--json"))
    assert [(data["microbatches"], data["tapered"]) for data in (plain, made)] == [(8, 0), (8, 2)]
    assert made["step"]["step_ns"] not in (plain["step"]["step_ns"], 0)
    read = ("--model", model_file)
    simulated = parsed(run("simulate", path, *read, "--json"))
    assert simulated["step_ns"] == made["step"]["step_ns"]
    assert simulated["tokens_per_s"] == pytest.approx(64 * 2 * 8 * 1e9 / simulated["step_ns"])
    before = parsed(run("simulate", model_file, *EDGES, "--json"))
    assert simulated["mfu"] * simulated["step_ns"] == pytest.approx(before["mfu"] * before["step_ns"])
    text = "8 micro-batches, the ends tapered: 10 in all, 2 of half size at either end"
    shown = " ".join(run("show", path, *read).stdout.split())
    assert text in shown and "tapered ends: 4 micro-batches of 32 tokens in place of 2 full ones" in shown
    assert "can be simulated, not run yet: tapered-ends" in shown
    assert text in " ".join(run("check", path, *read).stdout.split())
    assert parsed(run("check", path, *read, "--json"))["rows"][0]["notes"] == []
    assert "tapered ends: 4" in " ".join(run("show", path).stdout.split())  # without its model
    noisy = parsed(run("simulate", path, *read, "--noise", 0.2, "--dbo", "--memory", "--json"))
    assert noisy["noise"]["planned_step_ns"] == made["step"]["step_ns"] < noisy["noise"]["step_ns"]
    assert noisy["peak_bytes"] == max(row["peak_bytes"] for row in made["memory"])
    (tmp_path / "counts.json").write_text("[]")
    counts = run("simulate", path, *read, "--counts", tmp_path / "counts.json")
    refused(counts, "--counts = ", "left out for a plan with tapered ends", "use --noise")


def test_tapered_ends_that_cannot_be(model_file: Path) -> None:
    for command in ("plan", "simulate"):
        refused(run(command, model_file, *EDGES, "--tapered-ends", 9), "tapered = 9: must be an integer from 0 to")
        refused(run(command, model_file, *EDGES, "--tapered-ends", -1), "tapered = -1: must be")
    odd = ("--tokens", 63, "--context", 63)
    refused(
        run("plan", model_file, "--pp", 2, "--ep", 2, *odd, "--tapered-ends", 1), "tapered = 1: must be 0 with an odd"
    )
    refused(
        run("simulate", model_file, "--pp", 2, "--schedules", "all", "--tapered-ends", 1), "--tapered-ends", "left out"
    )


def test_a_comparison_takes_no_options_of_one_plan(model_file: Path) -> None:
    given = ("--memory-limit", 3, "--pad", "shadow", "--objective", "serial", "--w-pool", 1, "--layout", "E|L")
    result = run("simulate", model_file, "--pp", 2, "--schedules", "all", *given)
    refused(result, *(name for name in given if str(name).startswith("--")), "left out with --schedules")


def test_a_comparison_takes_costs_of_its_own_mesh_only(model_file: Path, tmp_path: Path) -> None:
    workload = Workload(tokens=64, context=64, ep=2)
    save_cost_table(roofline_costs(MODEL, workload, load_device("h800")), tmp_path / "costs.yaml")
    given = ("simulate", model_file, "--pp", 2, "--costs", tmp_path / "costs.yaml", "--schedules", "all")
    refused(run(*given, "--ep", 4, "--dp", 2), "costs.workload.ep = 2: must be 4", "costs.workload.dp = 1: must be 2")
    assert run(*given, "--ep", 2, "--evaluations", 1).exit_code == OK


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("plan", "--w-pool", "nan"), "--w-pool = nan: must be a number of GiB"),
        (("plan", "--w-pool", "inf"), "--w-pool = inf"),
        (("plan", "--w-pool", "-1"), "--w-pool = -1.0"),
        (("simulate", "--seed", "-1", "--noise", "0.2"), "--seed"),
        (("simulate", "--replicas", "2000000"), "replicas = 2000000: must be at most 65536"),
        (("simulate", "--replicas", "60000000", "--noise", "0.2"), "replicas = 60000000: must be at most"),
        (("plan", "--search", "--layout", "E|L"), "left out with --search"),
    ],
)
def test_numbers_that_cannot_be(model_file: Path, args: tuple[str, ...], words: str) -> None:
    refused(run(args[0], model_file, *EDGES, *args[1:]), words)


# -- exports and imports ----------------------------------------------------------------------------------------------


def test_what_is_exported_can_be_planned_with(model_file: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    assert run("plan", model_file, *EDGES, "--microbatches", 5, "-o", first).exit_code == OK
    show = ("show", first, "--model", model_file, "--export")
    layout = run(*show, "megatron").stdout.strip()
    assert layout.startswith("E") and layout.endswith("L") and layout.count("|") == 3
    orders = []
    for form in ("csv", "csv-comms"):
        orders.append(tmp_path / f"{form}.csv")
        orders[-1].write_text(run(*show, form).stdout)
        again = ("--microbatches", 5, "--layout", layout, "--template", orders[-1], "-o", second)
        assert run("plan", model_file, *EDGES, *again).exit_code == OK
        a, b = load_plan(first), load_plan(second)
        assert (a.actions, bounds(a), b.template) == (b.actions, bounds(b), form)
    assert "SEND_F" in orders[1].read_text() and "SEND_F" not in orders[0].read_text()
    lists = json.loads(run(*show, "torchtitan").stdout)
    assert lists == parsed(run(*show, "torchtitan", "--json"))["value"]
    assert [name for part in lists for name in part] == [
        "tok_embeddings",
        *(f"layers.{i}" for i in range(6)),
        "norm",
        "output",
    ]


def test_exports_and_imports_that_cannot_be(model_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "v.yaml"
    assert run("plan", model_file, *EDGES, "--template", "dualpipe-v", "-o", path).exit_code == OK
    refused(run("show", path, "--export", "prose"), "one of megatron, torchtitan, csv, csv-comms")
    refused(run("show", path, "--export", "megatron"), "name it with --model")
    looped = run("show", path, "--model", model_file, "--export", "megatron")
    refused(looped, "stages loop over the ranks", code=PLAN_FAULTY)
    plan_it = ("plan", model_file, *EDGES)
    refused(run(*plan_it, "--layout", "Ettt|tttL"), "--vpp = 2: must be 1")
    refused(run(*plan_it, "--layout", "Ettt|t|t|L"), "one for each layer item")
    refused(run(*plan_it, "--template", tmp_path / "none.csv"), "--template", "a file that exists")
    (tmp_path / "bad.csv").write_text("0F0,hello\n")
    refused(run(*plan_it, "--template", tmp_path / "bad.csv"), "row 1, column 2", "hello")


# -- checking ---------------------------------------------------------------------------------------------------------


def test_figures_that_an_edit_left_behind_are_noted(model_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    assert run("plan", model_file, *EDGES, "--template", "interleaved-1f1b", "-o", path).exit_code == OK
    check = ("check", path, "--model", model_file)
    assert parsed(run(*check, "--json"))["rows"][0]["notes"] == [] and "note:" not in run(*check).stdout
    made = load_plan(path)
    gpipe = build_template("gpipe", pp=2, vpp=2, microbatches=8, joint=False)
    stages = tuple(replace(stage, slots=8) for stage in made.stages)
    memory = tuple(replace(rank, limit=rank.peak) for rank in made.memory)
    save_plan(replace(made, actions=gpipe.actions, stages=stages, memory=memory), path)
    said = run(*check).stdout
    assert "is sound" in said and said.count("more than its limit of") == 2 and "the simulated step is" in said
    notes = parsed(run(*check, "--json"))["rows"][0]["notes"]
    assert len(notes) == 3 and "memory of rank 0 is" in notes[0]


# -- rates ------------------------------------------------------------------------------------------------------------


def test_every_tensor_parallel_rank_has_tokens_of_its_own(model_file: Path) -> None:
    heads = replace(MODEL.layers[0].attention, heads=8)
    layers = tuple(replace(layer, attention=heads) for layer in MODEL.layers)
    model_file.write_text(model_to_yaml(replace(MODEL, layers=layers)))
    for more in ((), ("--schedules", "all")):
        data = parsed(run("simulate", model_file, *EDGES, "--tp", 2, *more, "--json"))
        for row in data["rows"] if more else [data]:
            assert row["tokens_per_s"] == pytest.approx(64 * 2 * 2 * 8 * 1e9 / row["step_ns"])


def test_recomputation_is_no_work_of_the_model(model_file: Path) -> None:
    workload = Workload(tokens=64, context=64)
    found = {
        policy: rates(MODEL, replace(workload, recompute=policy), 8, ranks=2, step_ns=1000, peak=1e15)["mfu"]
        for policy in Recompute
    }
    assert len(set(found.values())) == 1 and found[Recompute.NONE] > 0
    shown = [
        parsed(run("simulate", model_file, *EDGES, "--recompute", policy, "--json")) for policy in ("none", "full")
    ]
    work = [data["mfu"] * data["step_ns"] for data in shown]
    assert work[0] == pytest.approx(work[1])
