"""Filling of idle time: only W tasks move, in their order, within the pool's bounds; gains are worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_rt.costs import ItemMemory, TaskCost
from tessera_rt.errors import ScheduleError
from tessera_rt.plan import Action
from tessera_rt.scheduler.bubble_filling import BubbleFilling
from tessera_rt.scheduler.noise import Rows, moe_items
from tessera_rt.scheduler.replica_program import ReplicaProgram
from tessera_rt.scheduler.replicas import prepare_schedule, simulate_replicas
from tessera_rt.tasks import Resource
from tessera_rt.testing.costs import item_costs, moe_model
from tessera_rt.testing.schedule_cases import cases
from tessera_rt.testing.schedules import Case, orders
from tessera_rt.timeline import Span, Timeline

LANES = 3


def prepared(case: Case, contention: float = 0.0) -> ReplicaProgram:
    return prepare_schedule(
        case.stage_ranks, case.actions, case.bounds, case.interleavings, case.model, case.costs, contention=contention
    )


def rows_of(program: ReplicaProgram, case: Case, seed: int) -> Rows:
    compute = np.random.default_rng(seed).uniform(0.3, 2.0, (1, program.layers, program.microbatches, LANES))
    layers = {item.label: i for i, item in enumerate(moe_items(case.model))}
    return Rows(layers, compute, np.maximum(compute, 1.0))


def lanes(program: ReplicaProgram, rows: Rows, filling: BubbleFilling | None) -> Iterator[Timeline]:
    for lane in range(LANES):
        run = simulate_replicas(program, rows=rows, filling=filling, record=(0, lane))
        assert run.timeline is not None
        yield run.timeline


def compute_of(timeline: Timeline, rank: int) -> list[Span]:
    """In the order in which they ran, tasks without duration included."""
    chosen = [s for s in timeline.spans if s.rank == rank and s.lane == Resource.COMP]
    return sorted(chosen, key=lambda s: (s.start_ns, s.end_ns))


fillings = st.builds(
    BubbleFilling,
    fit=st.sampled_from((0.0, 0.5, 1.0, 2.0)),
    pool_tasks=st.integers(0, 6),
    pool_bytes=st.sampled_from((None, 0, 25, 60)),
)


@settings(max_examples=40)
@given(cases(scale=100), fillings, st.integers(0, 10**6), st.sampled_from((0.0, 0.3)))
def test_only_w_tasks_move(case: Case, filling: BubbleFilling, seed: int, contention: float) -> None:
    memory = {label: replace(m, pending_w=20) for label, m in case.costs.memory.items()}
    positive = {
        name: TaskCost(ns=cost.ns + 1) for name, cost in case.costs.tasks.items()
    }  # so that starts tell the order
    case = replace(case, costs=replace(case.costs, memory=memory, tasks=positive))
    program = prepared(case, contention)
    rows = rows_of(program, case, seed)
    plain = list(lanes(program, rows, None))
    filled = list(lanes(program, rows, filling))
    for before, after in zip(plain, filled, strict=True):
        assert len(before.spans) == len(after.spans)
        for rank in range(before.ranks):
            was, now = compute_of(before, rank), compute_of(after, rank)
            for a, b in pairwise(now):
                assert a.end_ns <= b.start_ns, (a, b)
            key = [(s.name, s.stage, s.microbatch) for s in now]
            assert [k for k in key if k[0][0] != "W"] == [
                (s.name, s.stage, s.microbatch) for s in was if s.name[0] != "W"
            ]
            if not contention:
                lengths = {(s.name, s.microbatch): s.end_ns - s.start_ns for s in was}
                assert lengths == {(s.name, s.microbatch): s.end_ns - s.start_ns for s in now}
            place = {k: i for i, k in enumerate(key)}
            for name, stage, microbatch in key:
                if name[0] == "W":  # behind the backward whose gradient it is
                    assert place[name, stage, microbatch] > place[f"B{name[1:]}", stage, microbatch]
            for name in {k[0] for k in key if k[0][0] == "W"}:
                order = [k[2] for k in key if k[0] == name]
                assert order == [s.microbatch for s in was if s.name == name]
    run = simulate_replicas(program, rows=rows, filling=filling)
    assert run.pool_peak_bytes <= (20 * filling.pool_tasks if filling.pool_bytes is None else filling.pool_bytes)
    if filling.pool_tasks == 0:
        assert filled == plain


def one_rank(row: str, *, w_ns: int, pending: int = 0) -> tuple[Case, Rows]:
    """One MoE layer: experts of 10 ns (F and B), all-to-alls of 0 ns; two ranks, the second with twice the rows."""
    model = moe_model(1)
    actions = tuple(Action.parse(text) for text in row.split())
    costs = item_costs(model, {"L0": (10, 10, w_ns)}, {"L0": ItemMemory(pending_w=pending)})
    case = Case((0,), (actions,), ((0, 3),), orders([actions], model, costs, ((0, 3),)), model, costs)
    microbatches = 1 + max(a.microbatch for a in actions)
    compute = np.tile(np.array([1.0, 2.0]), (1, 1, microbatches, 1))
    return case, Rows({"L0": 0}, compute, np.ones_like(compute))


def test_the_wait_for_the_slowest_rank_is_filled() -> None:
    """F0 B0 F1 B1: experts take 10 ns here and 20 on the other rank, W 6 and 12.

    In place: 20, 20 and 12 for each micro-batch, on the slowest rank: 104. The waits of the fast rank are 10 ns.
    With a pool the slow rank never waits and does its two W of 12 at the end: 80 + 24; the fast rank's first W is done
    in its wait for F1's combine (F1 starts at 40, its experts end at 50, the combine at 60), its second at the end.
    """
    case, rows = one_rank("0F0 0B0 0F1 0B1", w_ns=6)
    program = prepared(case)
    assert simulate_replicas(program, rows=rows).step_ns == 104
    run = simulate_replicas(program, rows=rows, filling=BubbleFilling(fit=1.0), deadline_ns=1000, record=(0, 0))
    assert run.step_ns == 104 and run.timeline is not None
    done = [(s.start_ns, s.end_ns) for s in run.timeline.spans if s.name == "W_MLP:L0"]
    assert done == [(50, 56), (80, 86)]
    statistics = run.statistics[0, 0]
    assert statistics[:, 5:].tolist() == [[1, 0, 0, 1], [0, 0, 0, 2]]  # filled, forced, in place, left to the end
    # too tight for the window
    run = simulate_replicas(program, rows=rows, filling=BubbleFilling(fit=0.5), deadline_ns=1000)
    assert run.statistics[0, 0, 0, 5:].tolist() == [0, 0, 0, 2]


def test_without_slack_the_oldest_goes_in_whether_it_fits_or_not() -> None:
    case, rows = one_rank("0F0 0B0 0F1 0B1", w_ns=6)
    program = prepared(case)
    run = simulate_replicas(program, rows=rows, filling=BubbleFilling(fit=0.5), deadline_ns=50)
    assert run.statistics[0, 0, 0, 5:].tolist() == [0, 1, 0, 1]


def test_a_full_pool_of_one_rank_lets_all_run_in_place() -> None:
    """The slow rank, which has no waits to fill, keeps its W; with room for one, both ranks run the oldest in place."""
    case, rows = one_rank("0F0 0B0 0F1 0B1 0F2 0B2", w_ns=6, pending=7)
    program = prepared(case)
    for filling in (BubbleFilling(fit=1.0, pool_tasks=1), BubbleFilling(fit=1.0, pool_bytes=7)):
        run = simulate_replicas(program, rows=rows, filling=filling, deadline_ns=1000)
        assert run.statistics[0, 0, 1, 5:].tolist() == [0, 0, 2, 1]
        assert run.statistics[0, 0, 0, 5:].tolist() == [1, 0, 2, 0]
        assert run.pool_peak_bytes == 7


def test_a_wait_for_another_rank_takes_as_many_as_fit() -> None:
    """Two ranks, two micro-batches, all forwards first. Rank 1 has its B early, rank 0 waits for its input."""
    model = moe_model(2)
    costs = item_costs(model, {"L0": (10, 10, 4), "L1": (10, 40, 4)})
    rows = [tuple(map(Action.parse, text.split())) for text in ("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2")]
    bounds = ((0, 2), (2, 4))
    case = Case((0, 1), rows, bounds, orders(rows, model, costs, bounds), model, costs)
    program = prepared(case)
    plain = simulate_replicas(program)
    run = simulate_replicas(program, filling=BubbleFilling(fit=1.0), deadline_ns=10_000, record=(0, 0))
    assert run.timeline is not None and run.step_ns <= plain.step_ns
    moved = [s.start_ns for s in run.timeline.spans if s.name == "W_MLP:L0"]
    waits = [s.start_ns for s in run.timeline.spans if s.name == "B_POST:L0"]
    assert all(start >= 30 for start in moved) and moved[0] < waits[1]


def test_mistakes_are_named() -> None:
    for name, value in (
        ("fit", -1.0),
        ("fit", float("nan")),
        ("pool_tasks", -1),
        ("pool_tasks", 5000),
        ("pool_bytes", -1),
    ):
        with pytest.raises(ScheduleError, match=rf"filling\.{name}"):
            BubbleFilling(**{name: value})  # type: ignore[arg-type]
