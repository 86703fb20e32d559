"""Checkpoints: a run goes on under any other layout; they are whole or not there; what does not fit is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera_rt.checkpoint import (
    MUST_MATCH,
    CheckpointInfo,
    check_resumable,
    find_checkpoint,
    load_checkpoint,
    read_info,
    read_tensors,
    save_checkpoint,
)
from tessera_rt.costs import Workload
from tessera_rt.engine.engine import Engine
from tessera_rt.engine.optim import OptimizerConfig
from tessera_rt.errors import SpecError
from tessera_rt.model_spec import ModelSpec
from tessera_rt.models.hybrid import HybridModel
from tessera_rt.plan import Mesh, Plan
from tessera_rt.planner.baselines import equal_layers
from tessera_rt.planner.build import plan_with
from tessera_rt.testing.hybrids import random_costs, tiny_hybrid, token_batch
from tessera_rt.testing.worker import RankContext
from tessera_rt.testing.worker_pool import WorkerPool

MICROBATCHES = 4
INFO = CheckpointInfo(
    model="tiny", fingerprint="f", step=3, rows=24, dtype="fp64", optimizer="adamw", seed=0, sequence=8, tokens=99
)


def plan_for(spec: ModelSpec, mesh: Mesh, dtype: str = "fp64") -> Plan:
    workload = Workload(tokens=16, context=16, dp=mesh.dp, ep=mesh.ep, dtype=dtype)
    costs = random_costs(spec, workload, seed=1)
    return plan_with(equal_layers(spec, mesh.stages), spec, mesh, costs, microbatches=MICROBATCHES)


def batch_of(spec: ModelSpec, step: int, data_rank: int, data_ranks: int) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of two rows; each of ``data_ranks`` ranks has its part of every one."""
    whole = token_batch(spec, [(2, 8)] * MICROBATCHES, seed=100 + step)
    rows = slice(2 * data_rank // data_ranks, 2 * (data_rank + 1) // data_ranks)
    return [(tokens[rows], labels[rows]) for tokens, labels in whole]


def run(
    ctx: RankContext,
    spec: ModelSpec,
    plan: Plan,
    config: OptimizerConfig,
    *,
    start: Path | None,
    stop: int,
    folder: Path,
) -> list[float]:
    """Train to step ``stop`` from the beginning or a checkpoint, and save; the losses."""
    engine = Engine(HybridModel(spec, seed=5), plan, optimizer=config, timeout_s=60)
    if start is not None:
        engine.load_state_dict(load_checkpoint(start, engine.state_dict()))
    groups, mesh = engine.groups, plan.mesh
    losses = []
    while engine.steps_done < stop:
        data_rank = groups.dp_i * mesh.ep + groups.ep_i
        losses.append(engine.step(batch_of(spec, engine.steps_done, data_rank, mesh.dp * mesh.ep)).loss)
    save_checkpoint(folder, engine.state_dict(), replace(INFO, step=engine.steps_done))
    return losses


def train(
    pool: WorkerPool, spec: ModelSpec, mesh: Mesh, folder: Path, stop: int, start: Path | None = None, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    plan = plan_for(spec, mesh, options.pop("dtype", "fp64"))
    config = OptimizerConfig(lr=1e-2, **options)
    losses = pool.run(run, mesh.world, spec, plan, config, start=start, stop=stop, folder=folder, timeout_s=120)
    assert all(of_rank == losses[0] for of_rank in losses)
    return losses[0], read_tensors(folder / f"step-{stop:06d}")


def assert_equal_state(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    ("kind", "meshes"),
    [
        ("adamw", [Mesh(pp=2, vpp=2), Mesh(ep=2), Mesh(dp=2), Mesh(pp=2, ep=2), Mesh()]),
        ("sgd", [Mesh(pp=2, vpp=2), Mesh(dp=2)]),
    ],
)
def test_case_48_three_steps_then_another_layout(
    pool: WorkerPool, tmp_path: Path, kind: str, meshes: list[Mesh]
) -> None:
    spec = tiny_hybrid("gSds", tied=True)
    options = {"kind": kind, "momentum": 0.9 if kind == "sgd" else 0.0}
    first, saved = train(pool, spec, Mesh(pp=4), tmp_path / "a", 3, **options)
    straight, expected = train(pool, spec, Mesh(pp=4), tmp_path / "b", 5, **options)
    start = tmp_path / "a" / "step-000003"
    assert any(not torch.equal(saved[name], expected[name]) for name in saved)
    for mesh in meshes:
        folder = tmp_path / f"{mesh.pp}{mesh.vpp}{mesh.dp}{mesh.ep}"
        last, found = train(pool, spec, mesh, folder, 5, start, **options)
        assert first + last == pytest.approx(straight, rel=1e-11)
        assert_equal_state(found, expected, 1e-10)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_same_layout_goes_on_with_the_same_bits(pool: WorkerPool, tmp_path: Path, dtype: str) -> None:
    spec, mesh = tiny_hybrid("Sg"), Mesh(pp=2, dp=2)
    first, _ = train(pool, spec, mesh, tmp_path / "a", 2, dtype=dtype)
    straight, expected = train(pool, spec, mesh, tmp_path / "b", 4, dtype=dtype)
    last, found = train(pool, spec, mesh, tmp_path / "c", 4, tmp_path / "a" / "step-000002", dtype=dtype)
    assert first + last == straight
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert any(name.startswith("optimizer.master/") for name in found) == (dtype == "bf16")


def test_every_expert_is_in_the_file_once_with_its_own_values(pool: WorkerPool, tmp_path: Path) -> None:
    spec = tiny_hybrid("gs")
    _, found = train(pool, spec, Mesh(ep=2), tmp_path, 1)
    for layer in (0, 1):
        for part in ("model.", "optimizer.exp_avg/", "optimizer.exp_avg_sq/"):
            for weight in ("gate_up", "down"):
                prefix, suffix = f"{part}layers.{layer}.feed_forward.experts.", f".{weight}"
                experts = [t for name, t in found.items() if name.startswith(prefix) and name.endswith(suffix)]
                assert len(experts) == 4, sorted(found)
                assert all(not torch.equal(a, b) for a, b in combinations(experts, 2))


# -- whole or not at all --------------------------------------------------------------------------------------------


def save_values(ctx: RankContext, folder: Path, value: float, step: int, bad_rank: int = -1) -> str:
    state: dict[str, Any] = {"model": {f"w{ctx.rank}": torch.full((3,), value), "shared": torch.full((2,), value)}}
    if ctx.rank == bad_rank:
        state["model"]["broken"] = torch.empty(3, device="meta")
    return str(save_checkpoint(folder, state | {"steps": step}, replace(INFO, step=step)))


def test_a_failed_save_leaves_the_checkpoint_before_it(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "step-000001"
    assert pool.run(save_values, 2, tmp_path, 1.0, 1) == [str(path)] * 2
    for result in pool.run(save_values, 2, tmp_path, 2.0, 2, bad_rank=1, expect_failure=True):
        assert result.failure is not None and result.failure.type_name == "TesseraError"
        assert "step-000002 could not be written" in result.failure.message and "rank 1" in result.failure.message
    assert find_checkpoint(tmp_path) == path and not (tmp_path / "step-000002").exists()
    assert read_tensors(path)["model.w1"].tolist() == [1.0] * 3
    # The rest of the failed one is no obstacle, and a step may be saved again.
    pool.run(save_values, 2, tmp_path, 3.0, 2)
    pool.run(save_values, 2, tmp_path, 4.0, 2)
    found = find_checkpoint(tmp_path)
    assert found == tmp_path / "step-000002"
    assert read_tensors(found)["model.shared"].tolist() == [4.0] * 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step-000001", "step-000002"]


def test_a_folder_that_cannot_be_made_fails_on_all_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for result in pool.run(save_values, 2, tmp_path / "file", 1.0, 1, expect_failure=True):
        assert result.failure is not None and result.failure.type_name == "TesseraError"
        assert "could not be begun" in result.failure.message


def load_values(ctx: RankContext, path: Path, names: dict[str, int]) -> dict[str, list[float]]:
    state = {"model": {name: torch.zeros(size) for name, size in names.items()}, "steps": 0}
    found = load_checkpoint(path, state)
    assert all(not tensor.any() for tensor in state["model"].values()), "the given tensors are left alone"
    return {name: tensor.tolist() for name, tensor in found["model"].items()} | {"steps": [int(found["steps"])]}


def test_each_rank_loads_what_it_asks_for(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(save_values, 2, tmp_path, 1.5, 7)
    path = tmp_path / "step-000007"
    assert pool.run(load_values, 3, path, {"w1": 3}) == [{"w1": [1.5] * 3, "steps": [7]}] * 3
    for names in ({"w1": 3, "no": 2}, {"w1": 4}):
        for result in pool.run(load_values, 2, path, names, expect_failure=True):
            assert result.failure is not None and result.failure.type_name == "SpecError", result.failure
            assert "could not be read" in result.failure.message


# -- finding and refusing -------------------------------------------------------------------------------------------


def test_finding_the_newest(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path) is None and find_checkpoint(tmp_path / "no") is None
    path = tmp_path / "checkpoints" / "step-000003"
    path.mkdir(parents=True)
    (path / "info.json").write_text("{}")
    assert find_checkpoint(tmp_path) is None  # no pointer: it may not be whole
    assert find_checkpoint(path) == path
    (tmp_path / "checkpoints" / "latest").write_text("step-000003\n")
    assert find_checkpoint(tmp_path) == find_checkpoint(tmp_path / "checkpoints") == path
    (tmp_path / "checkpoints" / "latest").write_text("step-000009\n")
    with pytest.raises(SpecError, match="latest = 'step-000009'"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 2}', '{"version": 1, "step": 3}'])
def test_damaged_descriptions(tmp_path: Path, text: str) -> None:
    (tmp_path / "info.json").write_text(text)
    with pytest.raises(SpecError, match="info.json"):
        read_info(tmp_path)


def test_descriptions_are_read_back(tmp_path: Path) -> None:
    info = replace(INFO, mesh={"pp": 2, "ep": 4}, config="model: x\n")
    (tmp_path / "info.json").write_text(json.dumps(asdict(info)))
    assert read_info(tmp_path) == info


def test_everything_that_does_not_fit_is_named(tmp_path: Path) -> None:
    check_resumable(tmp_path, INFO, replace(INFO, step=9, rows=0, mesh={"pp": 9}, config="other"))
    other = replace(INFO, fingerprint="g", dtype="bf16", optimizer="sgd", seed=1, sequence=9, tokens=98)
    with pytest.raises(SpecError) as caught:
        check_resumable(tmp_path, INFO, other)
    assert {problem.field for problem in caught.value.problems} == set(MUST_MATCH)
    assert "dtype = 'bf16': must be 'fp64', as in the checkpoint" in str(caught.value)
