"""Training: a run learns, writes its folder, goes on bit for bit; evaluation in any order; mistakes on all ranks."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera_rt.checkpoint import read_info, read_tensors
from tessera_rt.config import OptimizerSection, TrainConfig, config_from_dict, load_config
from tessera_rt.engine.engine import Engine
from tessera_rt.errors import PlanError
from tessera_rt.files.model_files import model_to_yaml
from tessera_rt.files.plan_files import load_plan
from tessera_rt.files.timeline_files import load_timeline
from tessera_rt.files.yaml_text import parse_yaml
from tessera_rt.model_spec import ModelSpec
from tessera_rt.models.hybrid import HybridModel
from tessera_rt.plan import Plan
from tessera_rt.testing.hybrids import random_costs, tiny_hybrid, token_batch
from tessera_rt.testing.worker import RankContext
from tessera_rt.testing.worker_pool import WorkerPool
from tessera_rt.train import TrainSummary, check_plan_fits, learning_rate, make_plan, train

SPEC = tiny_hybrid("gSd", tied=True)


def config_for(tmp_path: Path, spec: ModelSpec = SPEC, **sections: dict[str, Any]) -> TrainConfig:
    """A small run on ids with a pattern that can be learnt: 0, 1, 2, ... with some noise."""
    ids = tmp_path / "ids.npy"
    if not ids.exists():
        draw = np.random.default_rng(0)
        pattern = np.arange(4000) % spec.vocab
        np.save(ids, np.where(draw.random(4000) < 0.1, draw.integers(0, spec.vocab, 4000), pattern).astype(np.uint16))
    data: dict[str, Any] = {
        "model": parse_yaml(model_to_yaml(spec), "model"),
        "mesh": {"pp": 2},
        "data": {"tokens": str(ids), "sequence": 16, "microbatch_size": 2, "microbatches": 3, "held_out": 0.1},
        "optimizer": {"lr": 2e-2, "warmup_steps": 2},
        "run": {"steps": 6, "folder": str(tmp_path / "run"), "timeout_s": 60},
    }
    for name, values in sections.items():
        data[name] = data.get(name, {}) | values
    return config_from_dict(data, "tiny.yaml")


def plan_for(config: TrainConfig) -> Plan:
    return make_plan(config, lambda recompute: random_costs(config.model, config.workload(recompute), seed=2))


def entry(ctx: RankContext, config: TrainConfig, plan: Plan) -> TrainSummary:
    return train(config, plan)


def run(pool: WorkerPool, config: TrainConfig) -> TrainSummary:
    plan = plan_for(config)
    summaries = pool.run(entry, config.mesh.world, config, plan, timeout_s=120)
    assert all(summary == summaries[0] for summary in summaries)
    return summaries[0]


def metrics(folder: str | Path, kind: str = "train") -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def test_a_run_learns_and_writes_its_folder(pool: WorkerPool, tmp_path: Path) -> None:
    config = config_for(tmp_path, optimizer={"lr": 5e-2}, run={"steps": 20, "evaluate_every": 8, "save_every": 12})
    found = run(pool, config)
    assert found.folder == str(tmp_path / "run") and (found.first_step, found.steps) == (0, 20)
    assert found.first_loss is not None and found.last_loss is not None
    assert found.held_out_before is not None and found.held_out_after is not None
    assert found.first_loss < math.log(SPEC.vocab) + 0.5
    assert found.last_loss < 0.8 * found.first_loss and found.held_out_after < 0.8 * found.held_out_before
    assert found.unchanged == () and found.parameters > 40 and found.skipped == 0
    assert found.tokens_per_step == 6 * 16

    folder = Path(found.folder)
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert (rows[0]["loss"], rows[-1]["loss"]) == (found.first_loss, found.last_loss)
    assert all(0 < row["tokens"] <= 96 and row["step_ns"] > 0 and row["grad_norm"] > 0 for row in rows)
    assert [row["lr"] for row in rows] == [learning_rate(config.optimizer, step, 20) for step in range(20)]
    held_out = metrics(folder, "evaluate")
    assert [row["step"] for row in held_out] == [0, 8, 16, 20]
    assert (held_out[0]["held_out_loss"], held_out[-1]["held_out_loss"]) == (
        found.held_out_before,
        found.held_out_after,
    )
    planned, expected = load_plan(folder / "plan.yaml"), plan_for(config)
    assert replace(planned, solver=expected.solver) == expected  # all but the seconds it took
    again = load_config(folder / "config.yaml")
    assert replace(again, name="tiny") == config
    timeline = load_timeline(folder / "timelines" / "step-000020.json")
    assert timeline.source == "measured" and timeline.ranks == 2
    assert {span.microbatch for span in timeline.spans} == {0, 1, 2}
    assert {span.lane for span in timeline.spans} == {"COMP", "COMM", "LINK"}
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["latest", "step-000012", "step-000020"]
    assert found.checkpoint == str(folder / "checkpoints" / "step-000020")
    info = read_info(Path(found.checkpoint))
    assert (info.step, info.rows, info.fingerprint) == (20, 120, SPEC.fingerprint)


def test_a_resumed_run_is_the_straight_run(pool: WorkerPool, tmp_path: Path) -> None:
    run_section = {"steps": 6, "save_every": 3, "evaluate_every": 2, "dropout": 0.2}
    straight = run(pool, config_for(tmp_path, mesh={"pp": 2, "ep": 2}, run=run_section))
    folder = Path(straight.folder)
    expected, tensors = metrics(folder), read_tensors(folder / "checkpoints" / "step-000006")

    # From a named checkpoint, into a folder of its own (the next free one).
    third = str(folder / "checkpoints" / "step-000003")
    other = run(pool, config_for(tmp_path, mesh={"pp": 2, "ep": 2}, run=run_section | {"resume": third}))
    assert other.folder == str(tmp_path / "run-2") and (other.first_step, other.steps) == (3, 6)
    assert [row["loss"] for row in metrics(other.folder)] == [row["loss"] for row in expected[3:]]

    # As if it had been ended after step 3: the folder ends up as if nothing had happened.
    shutil.rmtree(folder / "checkpoints" / "step-000006")
    (folder / "checkpoints" / "latest").write_text("step-000003\n")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tr')
    latest = run(pool, config_for(tmp_path, mesh={"pp": 2, "ep": 2}, run=run_section | {"resume": "latest"}))
    assert latest.folder == str(folder) and latest.first_step == 3
    assert latest.last_loss == straight.last_loss and latest.held_out_after == straight.held_out_after

    def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if k not in ("step_ns", "tokens_per_s")} for row in rows]

    assert without_times(metrics(folder)) == without_times(expected)
    assert [row["step"] for row in metrics(folder, "evaluate")] == [0, 2, 3, 4, 6]
    for path in (Path(other.checkpoint), folder / "checkpoints" / "step-000006"):
        found = read_tensors(path)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_the_data_goes_on_where_it_was_under_another_layout(pool: WorkerPool, tmp_path: Path) -> None:
    """The same rows make the same micro-batches: two ranks with one row each, or one rank with two."""
    run_section = {"steps": 4, "save_every": 2, "dtype": "fp64"}
    straight = run(pool, config_for(tmp_path, run=run_section))
    resume = {"resume": str(Path(straight.folder) / "checkpoints" / "step-000002")}
    for mesh in ({"pp": 1, "dp": 2}, {"pp": 1, "ep": 2}):
        config = config_for(tmp_path, mesh=mesh, data={"microbatch_size": 1}, run=run_section | resume)
        found = metrics(run(pool, config).folder)
        assert [row["loss"] for row in found] == pytest.approx(
            [row["loss"] for row in metrics(straight.folder)[2:]], rel=1e-11
        )


def test_nothing_held_out_and_nothing_to_do(pool: WorkerPool, tmp_path: Path) -> None:
    found = run(pool, config_for(tmp_path, mesh={"pp": 1}, data={"held_out": 0.0}, run={"steps": 0}))
    assert (found.held_out_before, found.held_out_after, found.first_loss, found.checkpoint) == (None, None, None, "")
    assert len(found.unchanged) == found.parameters


def test_mistakes_are_found_on_all_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    saved = run(pool, config_for(tmp_path, run={"steps": 1})).checkpoint
    bad = {
        "run.resume": config_for(tmp_path, run={"resume": str(tmp_path / "nowhere")}),
        "seed": config_for(tmp_path, run={"resume": saved, "seed": 1}),
        "sequence": config_for(tmp_path, run={"resume": saved}, data={"sequence": 8}),
        "run.steps": config_for(tmp_path, run={"resume": saved, "steps": 0}),
        "data.tokens": config_for(tmp_path, data={"tokens": str(tmp_path / "none.npy")}),
    }
    for field, faulty in bad.items():
        for result in pool.run(entry, 2, faulty, plan_for(faulty), timeout_s=120, expect_failure=True):
            assert result.failure is not None and result.failure.type_name == "SpecError", result
            assert f"{field} = " in result.failure.message, result.failure.message
    assert not (tmp_path / "run-2").exists()


@pytest.mark.parametrize("world", [1, pytest.param(3, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_case_16_another_number_of_processes(pool: WorkerPool, tmp_path: Path, world: int) -> None:
    config = config_for(tmp_path, mesh={"pp": 2, "dp": 2})
    for result in pool.run(entry, world, config, plan_for(config), timeout_s=120, expect_failure=True):
        assert result.failure is not None and result.failure.type_name == "PlanError", result
        assert str(world) in result.failure.message and "mesh" in result.failure.message


def test_a_plan_that_is_not_for_the_configuration(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    other = config_for(
        tmp_path, tiny_hybrid("gSdd", tied=True), mesh={"pp": 1}, data={"microbatches": 2}, run={"dtype": "fp64"}
    )
    check_plan_fits(config, plan_for(config))
    with pytest.raises(Exception) as caught:
        check_plan_fits(config, plan_for(other))
    assert type(caught.value).__name__ == "PlanError"
    for field in ("fingerprint", "mesh", "microbatches", "workload.dtype"):
        assert f"{field} = " in str(caught.value)


@pytest.mark.parametrize(
    ("planned", "trained", "wrong"),
    [
        ({}, {"kind": "sgd"}, {"optimizer": ("adamw", "sgd")}),
        ({"kind": "sgd"}, {"kind": "sgd", "momentum": 0.9}, {"momentum": ("False", "True")}),
        ({"kind": "sgd", "momentum": 0.9}, {}, {"optimizer": ("sgd", "adamw"), "momentum": ("True", "False")}),
        ({"kind": "sgd", "momentum": 0.9}, {"kind": "sgd", "momentum": 0.5, "lr": 1e-4}, {}),
    ],
)
def test_a_plan_made_for_another_optimizer(
    tmp_path: Path, planned: dict[str, Any], trained: dict[str, Any], wrong: dict[str, tuple[str, str]]
) -> None:
    """Its state is part of the planned memory; rates and the strength of a momentum are not."""
    plan = plan_for(config_for(tmp_path, optimizer=planned))
    config = config_for(tmp_path, optimizer=trained)
    if not wrong:
        check_plan_fits(config, plan)
        return
    with pytest.raises(PlanError) as caught:
        check_plan_fits(config, plan)
    found = {problem.field: (str(problem.value), problem.allowed) for problem in caught.value.problems}
    assert found == {f"workload.{name}": (was, f"{now}, as configured") for name, (was, now) in wrong.items()}
    assert "costs of tessera profile" in str(caught.value)


def test_learning_rates() -> None:
    section = OptimizerSection(lr=1.0, warmup_steps=4, final_lr=0.1)
    rates = [learning_rate(section, step, 14) for step in range(14)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[4:]))
    assert rates[9] + rates[8] == pytest.approx(1.1)  # half-way down
    constant = OptimizerSection(lr=0.5, schedule="constant")
    assert {learning_rate(constant, step, 9) for step in range(9)} == {0.5}
    assert learning_rate(OptimizerSection(lr=1.0, warmup_steps=1), 0, 1) == 1.0


# -- evaluation in any order (cases 30 and 31) ----------------------------------------------------------------------


def in_order(ctx: RankContext, spec: ModelSpec, plan: Plan, order: str) -> tuple[list[float], list[float], Any]:
    engine = Engine(HybridModel(spec, seed=1, dropout=0.3), plan, timeout_s=60)
    held_out = token_batch(spec, [(2, 8)] * 3, seed=50)
    trained, evaluated = [], []
    for letter in order:
        if letter == "t":
            trained.append(engine.step(token_batch(spec, [(2, 8)] * 3, seed=engine.steps_done)).loss)
        else:
            with torch.no_grad() if letter == "n" else torch.enable_grad():
                evaluated.append(engine.evaluate(held_out))
    loss, gradients = engine.forward_backward(token_batch(spec, [(2, 8)] * 3, seed=99))
    return [*trained, loss], evaluated, gradients


def test_case_31_evaluation_in_any_order_changes_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    plan = plan_for(config_for(tmp_path))
    expected = pool.run(in_order, 2, SPEC, plan, "tt")
    for order in ("etet", "neetnte"):
        for (losses, _, gradients), (wanted, _, wanted_gradients) in zip(
            pool.run(in_order, 2, SPEC, plan, order), expected, strict=True
        ):
            assert losses == wanted and gradients.keys() == wanted_gradients.keys()
            assert all(torch.equal(gradients[name], wanted_gradients[name]) for name in gradients)


def test_evaluation_has_no_dropout(pool: WorkerPool, tmp_path: Path) -> None:
    plan = plan_for(config_for(tmp_path))
    ((_, before, _), _) = pool.run(in_order, 2, SPEC, plan, "en")
    assert before[0] == before[1]

    def without(ctx: RankContext) -> float:
        engine = Engine(HybridModel(SPEC, seed=1), plan, timeout_s=60)
        return engine.evaluate(token_batch(SPEC, [(2, 8)] * 3, seed=50))

    assert pool.run(without, 2) == [before[0]] * 2


def unequal(ctx: RankContext, spec: ModelSpec, plan: Plan, then_train: bool) -> None:
    engine = Engine(HybridModel(spec, seed=1), plan, timeout_s=4)
    batch = token_batch(spec, [(2, 8)] * 3, seed=0)
    for _ in range(3 - ctx.rank):
        engine.evaluate(batch)
    if then_train:
        engine.step(batch)


def test_case_30_unequal_numbers_of_evaluation_batches(pool: WorkerPool, tmp_path: Path) -> None:
    plan = plan_for(config_for(tmp_path))
    first, second = pool.run(unequal, 2, SPEC, plan, then_train=False, timeout_s=60, expect_failure=True)
    assert second.ok  # it believes that all is well; the other one says who is missing
    assert first.failure is not None and first.failure.type_name in ("WaitError", "TransportError")
    assert "rank 0" in first.failure.message and "rank 1 did not come" in first.failure.message
    for result in pool.run(unequal, 2, SPEC, plan, then_train=True, timeout_s=60, expect_failure=True):
        assert result.failure is not None and result.failure.type_name == "SpecError"
        assert "eval on rank 0" in result.failure.message and "train on rank 1" in result.failure.message
