"""Schedules that are only simulated: DualPipe over two copies, and MoE layers in pieces."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.costs import TaskCost
from tessera_rt.errors import ScheduleError
from tessera_rt.plan import ActionKind
from tessera_rt.scheduler.chunked import alone, chunked_costs, halved_costs
from tessera_rt.scheduler.comparisons import dualpipe_template, simulate_chunked, simulate_dualpipe
from tessera_rt.scheduler.graphs import action_graph
from tessera_rt.scheduler.interleave import interleave
from tessera_rt.scheduler.simulate import simulate_schedule
from tessera_rt.scheduler.templates import build_template, held_chunks
from tessera_rt.testing.costs import dense_model, item_costs, moe_model, uniform_costs

EVEN = st.integers(1, 4).map(lambda half: 2 * half)


@given(EVEN, st.integers(0, 6))
def test_dualpipe_runs_every_pass_once_on_its_copy(pp: int, more: int) -> None:
    m = 2 * pp + 2 * more
    template = dualpipe_template(pp, m)
    for rank, actions in enumerate(template.actions):
        parts = list(chain.from_iterable(action.passes for action in actions))
        assert len(parts) == len(set(parts))
        for stage, mine in ((rank, range(m // 2)), (2 * pp - 1 - rank, range(m // 2, m))):
            assert template.stage_ranks[stage] == rank
            for kinds in ((ActionKind.F,), (ActionKind.B, ActionKind.I)):
                found = [part.microbatch for part in parts if part.stage == stage and part.kind in kinds]
                assert found == list(mine)


def test_both_ends_of_dualpipe_mirror_each_other() -> None:
    """Rank r does on one copy what rank pp-1-r does on the other."""
    template = dualpipe_template(4, 12)
    for rank in range(4):
        mirrored = [
            [((part.stage + 4) % 8, (part.microbatch + 6) % 12, part.kind) for part in action.passes]
            for action in template.actions[3 - rank]
        ]
        mine = [
            [(part.stage, part.microbatch, part.kind) for part in action.passes] for action in template.actions[rank]
        ]
        assert mine == mirrored


def test_dualpipe_step_times() -> None:
    """F = I = W = 1 on every rank: a bubble of pp/2 - 1, however many micro-batches there are.

    The DeepSeek-V3 report (table 2) gives (pp/2 - 1)(F&B + B - 3 W), here twice as much: there a backward's output
    leaves after its W.
    """
    for pp in (2, 4, 8):
        model = dense_model(pp)
        costs = item_costs(model, {f"L{i}": (1, 1, 1) for i in range(pp)})
        bounds = [(1 + s - (s == 0), 2 + s + (s == pp - 1)) for s in range(pp)]
        for m in (2 * pp, 4 * pp):
            timeline = simulate_dualpipe(model, costs, bounds, microbatches=m)
            assert timeline.step_ns == 3 * m + pp // 2 - 1
            assert timeline.label == "dualpipe (simulate-only)"
            assert sum(span.end_ns - span.start_ns for span in timeline.spans) == 3 * m * pp


def test_dualpipe_refusals_come_together() -> None:
    with pytest.raises(ScheduleError) as caught:
        dualpipe_template(3, 5)
    assert [problem.field for problem in caught.value.problems] == ["pp", "microbatches"]
    with pytest.raises(ScheduleError, match="at least 16"):
        dualpipe_template(8, 14)


def test_dualpipe_holds_one_more_than_its_ranks() -> None:
    assert set(held_chunks(dualpipe_template(8, 32), pending_w=1)) == {9}


def test_a_layer_in_two_pieces_by_hand() -> None:
    """Dispatch 10, experts 20, combine 10, in halves: 5 + 20 + 5; 10 of 20 hidden, at contention 0.5 for 5 more."""
    model = moe_model(1)
    costs = uniform_costs(model, (20, 40, 7), comm_ns=10, contention=0.5)
    halves = chunked_costs(model, costs, chunks=2, mlp_overhead=0)
    ns = {name: cost.ns for name, cost in halves.tasks.items()}
    assert [ns[f"F_{kind}:L0"] for kind in ("DISP", "MLP", "COMB")] == [5, 25, 5]
    assert [ns[f"B_{kind}:L0"] for kind in ("COMB", "MLP", "DISP")] == [5, 45, 5]
    assert ns["W_MLP:L0"] == 7 and ns["F_ATTN:L0"] == costs.tasks["F_ATTN:L0"].ns
    assert "simulate-only" in halves.provenance.notes[-1]


def test_a_layer_bound_by_the_network() -> None:
    """Dispatch 40, experts 10, combine 20 in four pieces: the network never rests, the last expert piece waits for it.

    Dispatch ends at 40, the last experts at 43 (2.5 each, cut to whole ns), combine pieces from 40 on: 60.
    """
    model = moe_model(1)
    tasks = dict(uniform_costs(model, (10, 10, 0)).tasks)
    tasks |= {"F_DISP:L0": TaskCost(ns=40), "F_COMB:L0": TaskCost(ns=20)}
    base = uniform_costs(model, (10, 10, 0))
    ns = chunked_costs(model, type(base)(**{**base.__dict__, "tasks": tasks}), chunks=4, mlp_overhead=0).tasks
    assert [ns[f"F_{kind}:L0"].ns for kind in ("DISP", "MLP", "COMB")] == [33, 10, 17]


@given(*(st.integers(0, 100),) * 3, st.integers(1, 8))
def test_pieces_never_lose_without_overhead(experts: int, wait: int, comm: int, chunks: int) -> None:
    model = moe_model(2, shared=True)
    costs = item_costs(model, {"L0": (experts, wait, 5), "L1": (wait, experts, 5)}, comm_ns=comm)
    pieces = chunked_costs(model, costs, chunks=chunks, mlp_overhead=0)
    for label in ("L0", "L1"):
        for pass_ in "FB":
            names = [f"{pass_}_{kind}:{label}" for kind in ("DISP", "MLP", "COMB")]
            whole, cut = (sum(table.tasks[name].ns for name in names) for table in (costs, pieces))
            longest = max(costs.tasks[names[1]].ns, 2 * comm)
            assert longest <= cut <= whole
            assert chunks > 1 or cut == whole


def test_a_chunked_step_lies_between_no_overlap_and_no_communication() -> None:
    model = moe_model(4)
    bounds = [(0, 3), (3, 6)]
    template = build_template("1f1b", pp=2, vpp=1, microbatches=4, joint=False)
    steps = []
    for comm in (0, 6):
        costs = uniform_costs(model, (10, 10, 10), comm_ns=comm)
        steps.append(
            simulate_schedule(template.stage_ranks, template.actions, bounds, {}, model, costs, overlap=False).step_ns
        )
    chunked = simulate_chunked(template.stage_ranks, template.actions, bounds, model, costs, chunks=2, mlp_overhead=0)
    assert chunked.label == "chunked x2 (simulate-only)"
    assert steps[0] < chunked.step_ns < steps[1]
    assert chunked.step_ns - steps[0] == (steps[1] - steps[0]) // 2  # half of every collective is hidden


def test_impossible_chunks_are_refused() -> None:
    model = moe_model(1)
    with pytest.raises(ScheduleError) as caught:
        chunked_costs(model, uniform_costs(model), chunks=0, mlp_overhead=-1)
    assert [problem.field for problem in caught.value.problems] == ["chunks", "mlp_overhead"]


def test_which_actions_run_alone() -> None:
    assert [key for key in ("0F", "3B", "3I;1W", "2W", "0F;3B", "0F;3I", "0F;3I;1W", "0F;1F") if alone(key)] == [
        *("0F", "3B", "3I;1W", "2W", "0F;1F")
    ]


def test_halves_change_only_what_runs_alone() -> None:
    """Warm-up and cool-down of a joint order get the halved layers' times, the pairs do not."""
    model = moe_model(4)
    costs = uniform_costs(model, (20, 40, 7), comm_ns=10)
    template = build_template("1f1b", pp=2, vpp=1, microbatches=6, joint=True)
    bounds = [(0, 3), (3, 6)]
    halved = halved_costs(model, costs)
    keys = {action.key for row in template.actions for action in row}
    orders = {
        key: interleave(action_graph(key, model, halved if alone(key) else costs, bounds), key, method="align")
        for key in keys
    }
    timeline = simulate_schedule(template.stage_ranks, template.actions, bounds, orders, model, costs, halves=True)
    paired = {
        (part.stage, part.microbatch, str(part.kind))
        for row in template.actions
        for action in row
        for part in action.passes
        if len(action.passes) > 1
    }
    lengths = {True: set(), False: set()}
    for span in timeline.spans:
        if span.lane == "COMM" and span.name.startswith(("F_DISP", "B_DISP")):
            lengths[(span.stage, span.microbatch, span.name[0]) in paired].add(span.end_ns - span.start_ns)
    assert lengths == {True: {10}, False: {5}}
