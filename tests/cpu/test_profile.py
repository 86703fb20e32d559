"""Measured costs: what is read off the logs, and a measurement on real ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tessera_rt.cli.app import app
from tessera_rt.config import TrainConfig, config_from_dict, config_to_yaml
from tessera_rt.costs import CostTable, Recompute
from tessera_rt.engine.events import Event, EventKind, TaskRef
from tessera_rt.errors import SpecError
from tessera_rt.files.cost_files import cost_table_from_yaml, cost_table_to_yaml, load_cost_table
from tessera_rt.files.model_files import model_to_yaml
from tessera_rt.files.yaml_text import parse_yaml
from tessera_rt.plan import Mesh
from tessera_rt.profile import (
    RankSamples,
    cost_table,
    profile_costs,
    profile_on_ranks,
    profile_plan,
    profile_rank,
    task_durations,
    task_samples,
)
from tessera_rt.tasks import Pass, Resource, chunk_tasks, parse_task_name
from tessera_rt.testing.hybrids import tiny_hybrid
from tessera_rt.testing.worker_pool import WorkerPool
from tessera_rt.train import make_plan


def tiny_config(
    folder: Path,
    *,
    layers: str = "gS",
    mesh: Mapping[str, int],
    microbatches: int = 2,
    plan: Mapping[str, str] | None = None,
) -> TrainConfig:
    text = folder / "data.txt"
    text.write_bytes(bytes(range(256)) * 40)
    data = {
        "model": parse_yaml(model_to_yaml(tiny_hybrid(layers, vocab=256)), "model"),
        "mesh": dict(mesh),
        "plan": dict(plan or {}),
        "data": {"files": str(text), "sequence": 16, "microbatches": microbatches, "held_out": 0.1},
        "run": {"timeout_s": 60.0, "steps": 3, "folder": str(folder / "run")},
    }
    return config_from_dict(data, "tiny")


def event(seq: int, kind: EventKind, name: str, ns: int, microbatch: int = 0) -> Event:
    return Event(seq, kind, TaskRef(name, 0, microbatch), ns)


def test_durations_are_start_to_end_and_issue_to_done() -> None:
    log = [
        event(0, EventKind.START, "F_ATTN:L0", 10),
        event(1, EventKind.END, "F_ATTN:L0", 25),
        event(2, EventKind.ISSUE, "F_DISP:L0", 30),
        event(3, EventKind.START, "F_ATTN:L0", 31, microbatch=1),
        event(4, EventKind.END, "F_ATTN:L0", 38, microbatch=1),
        event(5, EventKind.WAIT, "F_DISP:L0", 40),
        event(6, EventKind.DONE, "F_DISP:L0", 50),
        event(7, EventKind.SEND, "SEND_F", 51),
    ]
    assert task_durations(log) == {("F_ATTN:L0", 0): 15, ("F_ATTN:L0", 1): 7, ("F_DISP:L0", 0): 20}


def test_a_collective_takes_what_its_fastest_member_saw() -> None:
    """dp 2 x ep 2 on one pipeline rank: dispatches are of the ep groups {0, 1} and {2, 3}, counts of all four."""
    run = (1, "F_DISP:L0", 0)
    count = (1, "F_COUNT:L0", 0)
    compute = (1, "F_MLP:L0", 0)
    found = [
        RankSamples(rank=rank, durations={run: ns, count: 10 * ns, compute: 100 * ns}, link=None)
        for rank, ns in enumerate((7, 5, 3, 4))
    ]
    samples = task_samples(found, Mesh(pp=1, dp=2, ep=2))
    assert sorted(samples["F_DISP:L0"]) == [3, 5]
    assert samples["F_COUNT:L0"] == [30]
    assert sorted(samples["F_MLP:L0"]) == [300, 400, 500, 700]


def test_fewer_than_two_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="at least 2"):
        profile_costs(tiny_config(tmp_path, mesh={}), steps=1)


@pytest.mark.parametrize("policy", list(Recompute))
def test_the_measured_plan_has_equal_layers(tmp_path: Path, policy: Recompute) -> None:
    config = tiny_config(tmp_path, layers="gSdg", mesh={"pp": 2, "ep": 2}, microbatches=9)
    plan = profile_plan(config, policy)
    assert [(stage.start, stage.stop) for stage in plan.stages] == [(0, 3), (3, 6)]
    assert plan.microbatches == 4 and plan.workload.recompute is policy


@pytest.mark.parametrize(
    ("section", "vpp", "plain"),
    [
        ({"template": "megatron-1f1b"}, 2, "interleaved-1f1b"),  # wants multiples of pp
        ({"template": "interleaved-1f1b", "pad": "shadow"}, 2, "interleaved-1f1b"),
        ({"template": "dualpipe-v"}, 2, "interleaved-1f1b"),  # wants 2 pp micro-batches
        ({"template": "zb-h1"}, 1, "1f1b"),
        ({}, 1, "1f1b"),
    ],
)
def test_what_is_measured_has_the_plain_order(tmp_path: Path, section: dict[str, str], vpp: int, plain: str) -> None:
    config = tiny_config(tmp_path, layers="gSdg", mesh={"pp": 3, "vpp": vpp}, microbatches=9, plan=section)
    plan = profile_plan(config)
    assert (plan.template, plan.microbatches) == (plain, 4)
    names = {task.name for pass_ in (Pass.F, Pass.B) for task in chunk_tasks(config.model.items, pass_).tasks}
    assert {name for entry in plan.interleavings.values() for name in entry.order} == names


def check_table(config: TrainConfig, table: CostTable, ranks: int, steps: int, microbatches: int) -> None:
    names = {task.name for pass_ in (Pass.F, Pass.B) for task in chunk_tasks(config.model.items, pass_).tasks}
    assert set(table.tasks) == names
    for name, cost in table.tasks.items():
        members = ranks if parse_task_name(name)[1].resource is Resource.COMP else 1
        assert cost.ns > 0 and cost.samples == members * (steps - 1) * microbatches, name
    assert table.provenance.source == "measured" and table.provenance.device
    assert "torch" in table.provenance.versions
    assert any("contention" in note for note in table.provenance.notes) and table.contention == 0
    assert cost_table_from_yaml(cost_table_to_yaml(table), model=config.model) == table
    assert make_plan(config, table).assumptions.source == "measured"


def test_measured_on_two_ranks_of_an_expert_group(pool: WorkerPool, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, mesh={"ep": 2})
    plan = profile_plan(config)
    found = pool.run(lambda ctx: profile_rank(config, plan, 3), 2, timeout_s=120)
    table = cost_table(config, plan, found, 3)
    check_table(config, table, ranks=2, steps=3, microbatches=2)
    assert table.link.latency_ns == 0 and any("no link" in note for note in table.provenance.notes)


def test_ranks_that_exist_all_get_the_same_table(pool: WorkerPool, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, layers="gS", mesh={"pp": 2})
    first, second = pool.run(lambda ctx: profile_on_ranks(config, Recompute.FULL, steps=2), 2, timeout_s=120)
    assert first == second
    check_table(config, first, ranks=1, steps=2, microbatches=2)
    assert first.link.latency_ns > 0 and 0 < first.link.bytes_per_s < 1e13
    assert first.workload.recompute is Recompute.FULL


def test_profile_command_measures_on_ranks_that_it_starts(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, mesh={"pp": 2})
    (tmp_path / "tiny.yaml").write_text(config_to_yaml(config))
    target = tmp_path / "costs.yaml"
    args = ["profile", str(tmp_path / "tiny.yaml"), "-o", str(target), "--steps", "2", "--json"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    table = load_cost_table(target, model=config.model)
    check_table(config, table, ranks=1, steps=2, microbatches=2)
    shown = json.loads(result.stdout)
    assert {row["task"]: row["duration_ns"] for row in shown["rows"]} == {n: c.ns for n, c in table.tasks.items()}


def test_data_that_is_missing_is_named(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, mesh={})
    section = config.data.model_copy(update={"files": (str(tmp_path / "none"),)})
    with pytest.raises(SpecError, match=r"data\.files"):
        profile_costs(replace(config, data=section))
