"""All schedules side by side: what each line says, and that the lines stand in the relations theory demands."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tessera_rt.costs import CostTable, ItemMemory, Link
from tessera_rt.errors import ScheduleError
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Mesh
from tessera_rt.planner.baselines import serial_balanced
from tessera_rt.planner.build import build_plan
from tessera_rt.planner.compare_schedules import SCHEDULES, Compared, Known, Schedule, compare, lower_bound, refusal
from tessera_rt.scheduler.simulate import simulate
from tessera_rt.scheduler.templates import RULES
from tessera_rt.testing.costs import moe_model, uniform_costs

MODEL = moe_model(14, shared=True)
COSTS = uniform_costs(
    MODEL,
    (100, 100, 100),
    comm_ns=60,
    memory=ItemMemory(weights=1000, activations=100, pending_w=50, output=10),
    link=Link(latency_ns=5),
    contention=0.1,
)


def line(name: str, rows: list[Compared]) -> Compared:
    return next(row for row in rows if row.schedule.name == name)


def all_lines(model: ModelSpec = MODEL, costs: CostTable = COSTS, m: int = 16) -> list[Compared]:
    return list(compare(model, costs, pp=4, vpp=2, microbatches=m, evaluations=40))


def test_every_schedule_is_there_and_no_step_beats_the_lower_bound() -> None:
    rows = all_lines(m=8)
    assert [row.schedule for row in rows] == list(SCHEDULES)
    assert lower_bound(MODEL, COSTS, pp=4, microbatches=8) == 14 * 300 * 8 // 4
    for row in rows:
        assert row.ratio >= 1
        split = row.timeline.mean_split()
        assert split.compute_ns + split.exposed_ns + split.bubble_ns == pytest.approx(row.timeline.step_ns, abs=3)
        assert row.timeline.ranks == 4
    cannot = {row.schedule.template for row in rows if row.schedule.simulate_only and row.schedule.partition != "tuned"}
    assert cannot == {"dualpipe", "chunked"}
    assert all(row.timeline.label == row.schedule.name for row in rows if row.schedule.template in RULES)


def test_lines_stand_in_the_right_relations() -> None:
    rows = all_lines()
    step = {row.schedule.name: row.timeline.step_ns for row in rows}
    held = {row.schedule.name: row.held for row in rows}
    ours = step["interleaved 1F1B in pairs"]
    assert ours < step["interleaved 1F1B, no overlap"]
    assert step["interleaved 1F1B in exact pairs"] <= ours <= step["Megatron's fixed pair order"]
    assert step["chunks within a micro-batch"] < step["interleaved 1F1B, no overlap"]
    assert step["Megatron's fixed pair order, tuned"] <= step["Megatron's fixed pair order"]
    assert held["ZB-H1"] == held["ZB-V"] == held["1F1B"] == 4
    assert held["GPipe"] == 16
    assert (held["DualPipe"], held["DualPipeV"]) == (5, 4.5)
    assert held["interleaved 1F1B in pairs"] == 6
    # Each ingredient of ours is taken only where it helps.
    exact = {"interleaved 1F1B": "interleaved 1F1B in exact pairs", "DualPipeV": "DualPipeV, exact pair orders"}
    for title, before in exact.items():
        assert step[f"{title}, tuned, W pool"] <= step[f"{title}, tuned"] <= step[before]
        assert step[f"{title}, tuned, W pool, MoE halves"] <= step[f"{title}, tuned, MoE halves"] < step[before]
    peak = {row.schedule.name: row.peak_bytes for row in rows}
    assert peak["DualPipe"] > peak["DualPipeV"]  # two copies of the weights


def test_without_communication_splitting_the_backward_pays() -> None:
    costs = uniform_costs(MODEL, (100, 100, 100))
    chosen = [schedule for schedule in SCHEDULES if schedule.name in ("1F1B", "ZB-H1", "ZB-V")]
    rows = list(compare(MODEL, costs, pp=4, vpp=2, microbatches=8, schedules=chosen))
    step = {row.schedule.name: row.timeline.step_ns for row in rows}
    assert step["ZB-V"] < step["ZB-H1"] < step["1F1B"]
    assert {row.timeline.mean_split().exposed_ns for row in rows} == {0}


def test_a_line_is_the_step_of_the_plan_with_the_same_partition() -> None:
    for schedule in SCHEDULES:
        if schedule.simulate_only or schedule.partition != "serial":
            continue
        (row,) = compare(MODEL, COSTS, pp=4, vpp=2, microbatches=8, schedules=[schedule])
        stage_ranks = [rank for half in range(row.vpp) for rank in range(4)]
        if schedule.template in ("zb-v", "dualpipe-v"):
            stage_ranks = [0, 1, 2, 3, 3, 2, 1, 0]
        plan = build_plan(
            MODEL,
            Mesh(pp=4, vpp=row.vpp),
            COSTS,
            microbatches=8,
            template=schedule.template,
            joint=schedule.joint,
            method=schedule.method,
            fixed_bounds=serial_balanced(MODEL, COSTS, stage_ranks),
        )
        assert simulate(plan, MODEL, COSTS, overlap=schedule.overlap).step_ns == row.timeline.step_ns, schedule.name
        assert max(memory.peak for memory in plan.memory) == row.peak_bytes, schedule.name


def test_sizes_that_break_a_schedule_leave_it_out() -> None:
    left_out = {s.name for s in SCHEDULES if refusal(s, pp=4, vpp=2, microbatches=6) is not None}
    assert left_out == {"Megatron's fixed pair order", "Megatron's fixed pair order, tuned", "DualPipe"}
    assert {s.name for s in SCHEDULES} - {row.schedule.name for row in all_lines(m=6)} == left_out
    reason = refusal(Schedule(name="x", template="megatron-1f1b"), pp=4, vpp=2, microbatches=6)
    assert reason is not None and "multiple of pp (4)" in reason
    small = {s.name: refusal(s, pp=4, vpp=2, microbatches=3) for s in SCHEDULES if s.tapered}
    assert small and all("at least pp (4)" in reason for reason in small.values() if reason is not None)
    assert None not in small.values()
    assert len(all_lines(m=3)) > 10
    with pytest.raises(ScheduleError, match="serial, equal or tuned"):
        refusal(replace(SCHEDULES[0], partition="best"), pp=4, vpp=2, microbatches=8)


def test_contention_can_be_overruled() -> None:
    chosen = [schedule for schedule in SCHEDULES if schedule.name == "interleaved 1F1B in pairs"]
    steps = [
        next(compare(MODEL, COSTS, pp=4, vpp=2, microbatches=8, schedules=chosen, contention=c)).timeline.step_ns
        for c in (0.0, None, 1.0)
    ]
    assert steps[0] < steps[1] < steps[2]


def test_held_bytes_count_micro_batches_in_flight_and_pending_w() -> None:
    """14 layers on 4 ranks; the first has one with the embedding (nothing), and 1F1B keeps 4 micro-batches there."""
    chosen = [schedule for schedule in SCHEDULES if schedule.name in ("1F1B", "ZB-H1")]
    one, split = compare(MODEL, COSTS, pp=4, vpp=2, microbatches=8, schedules=chosen)
    sizes = [stop - start for start, stop in pairwise(one.bounds)]
    sizes[0] -= 1  # embedding
    sizes[-1] -= 1  # head
    in_flight = max((4 - rank) * 100 * size for rank, size in enumerate(sizes))
    # A backward holds the pending W of its first item before the item's activations go.
    assert in_flight < one.activation_bytes <= in_flight + 50 * max(sizes)
    assert split.activation_bytes < one.activation_bytes + 4 * 50 * max(sizes)


def test_tapered_ends_do_the_same_work_and_their_overhead() -> None:
    """4 + 4 half-size micro-batches for 4 of 16; compute takes 5 % longer for a token of them."""
    names = tuple(f"interleaved 1F1B, tuned, W pool, MoE halves{end}" for end in ("", ", tapered"))
    chosen = [schedule for schedule in SCHEDULES if schedule.name in names]
    costs = uniform_costs(MODEL, (100, 100, 100))
    full, tapered = compare(MODEL, costs, pp=4, vpp=2, microbatches=16, schedules=chosen, evaluations=20)
    assert (tapered.microbatches, tapered.lower_bound_ns) == (16, full.lower_bound_ns)
    work = [
        [sum(s.end_ns - s.start_ns for s in row.timeline.spans if s.microbatch == k and s.lane == "COMP") for k in ks]
        for row, ks in ((full, range(16)), (tapered, range(16 + 4)))
    ]
    # 14 layers at 300 ns; experts in halves and whole nanoseconds add a little.
    assert work[0] == pytest.approx([4200] * 16, rel=0.03)
    assert work[1] == pytest.approx([2205] * 4 + [4200] * 12 + [2205] * 4, rel=0.03)
    assert tapered.schedule.simulate_only


def test_a_second_comparison_profits_from_the_first() -> None:
    chosen = [schedule for schedule in SCHEDULES if schedule.name == "DualPipeV, tuned"]
    known = Known()
    (first,) = compare(MODEL, COSTS, pp=4, vpp=2, microbatches=8, schedules=chosen, evaluations=60, known=known)
    (again,) = compare(MODEL, COSTS, pp=4, vpp=2, microbatches=12, schedules=chosen, evaluations=0, known=known)
    (alone,) = compare(MODEL, COSTS, pp=4, vpp=2, microbatches=12, schedules=chosen, evaluations=0)
    assert first.bounds in known.starts["dualpipe-v"]
    assert again.timeline.step_ns <= alone.timeline.step_ns
