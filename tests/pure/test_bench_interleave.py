"""bench/bench_interleave.py: its pairs are what it says, its table and picture come from its rows."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tessera_rt.scheduler.interleave import interleave
from tessera_rt.tasks import Pass, Task, TaskGraph, TaskKind
from tessera_rt.testing.pairs import random_pair

BENCH = Path(__file__).resolve().parents[2] / "bench" / "bench_interleave.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_interleave", BENCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_rows_table_and_picture(bench: ModuleType, tmp_path: Path) -> None:
    solved = [bench.solve(random_pair(seed, most_layers=2)) for seed in range(4)]
    row = bench.row_of("random EP8", solved)
    assert row["proven"] == row["pairs"] == 4
    assert row["fifo_mean"] >= row["align_mean"] >= row["defer_mean"] >= 0
    summary = bench.summary_of("random", solved)
    assert summary["ms_mean"] <= summary["ms_max"]
    json.dumps([row, summary, bench.sensitivity_of("random EP8", solved)])
    assert bench.table_of([row]).row_count == 1
    bench.draw([row, {**row, "set": "general"}], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5_000


def test_pairs_differ_and_say_whether_they_branch(bench: ModuleType) -> None:
    chains = list(bench.realistic_pairs("qwen3-235b-a22b", 8, 6))
    branched = list(bench.realistic_pairs("deepseek-v3", 32, 6))
    for pairs in (chains, branched):
        assert len(pairs) == 6
        assert len({tuple((task.name.partition(":")[0], task.ns) for task in pair.tasks) for pair in pairs}) == 6
    assert all(map(bench.is_chain, chains)) and not all(map(bench.is_chain, branched))
    general = list(bench.general_pairs(4))
    assert len(general[1].tasks) == 36 and not any(map(bench.is_chain, general))


def test_fusing_joins_what_follows_on_a_lane_and_nothing_else(bench: ModuleType) -> None:
    graph = TaskGraph(
        (
            Task(kind=TaskKind.ATTN, pass_=Pass.B, label="L0", ns=1),
            Task(kind=TaskKind.ATTN, pass_=Pass.W, label="L0", ns=2, deps=("B_ATTN:L0",), movable=True),
            Task(kind=TaskKind.MLP, pass_=Pass.B, label="L1", ns=4, deps=("B_ATTN:L0",)),
            Task(kind=TaskKind.COUNT, pass_=Pass.B, label="L1", ns=8, deps=("B_MLP:L1",)),
            Task(kind=TaskKind.DISP, pass_=Pass.B, label="L1", ns=16, deps=("B_COUNT:L1",)),
            Task(kind=TaskKind.MLP, pass_=Pass.B, label="L2", ns=32, deps=("B_DISP:L1",)),
            Task(kind=TaskKind.SHARED, pass_=Pass.B, label="L2", ns=64, deps=("B_DISP:L1",)),
        )
    )
    made = bench.fused(graph)
    assert [(task.name, task.ns, task.deps) for task in made.tasks] == [
        ("B_ATTN:L0", 5, ()),
        ("W_ATTN:L0", 2, ("B_ATTN:L0",)),
        ("B_COUNT:L1", 24, ("B_ATTN:L0",)),
        ("B_MLP:L2", 32, ("B_COUNT:L1",)),
        ("B_SHARED:L2", 64, ("B_COUNT:L1",)),
    ]
    for seed in range(5):
        pair = random_pair(seed, most_layers=2)
        coarse = bench.fused(pair)
        assert coarse.total_ns() == pair.total_ns()
        assert interleave(coarse, "0F;1B").makespan_ns >= interleave(pair, "0F;1B").makespan_ns
