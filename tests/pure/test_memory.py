"""Planned memory: the true simultaneous maximum over the order, and what to do about a limit."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.costs import CostTable, ItemMemory, Recompute, Workload
from tessera_rt.errors import PartitionInfeasible
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import ActionKind, Mesh
from tessera_rt.planner.build import build_plan
from tessera_rt.planner.candidates import Bounds, ranges
from tessera_rt.planner.memory import MemoryModel
from tessera_rt.planner.memory_bound import memory_bound
from tessera_rt.scheduler.templates import Template, build_template, in_flight
from tessera_rt.tasks import Pass, chunk_tasks
from tessera_rt.testing.costs import dense_model, item_costs, moe_model, uniform_costs
from tessera_rt.testing.partitions import all_bounds
from tessera_rt.testing.random_costs import random_costs

SEEDS = st.integers(0, 10_000)


def template(pp: int, vpp: int, microbatches: int, joint: bool = True) -> Template:
    name = "1f1b" if vpp == 1 else "interleaved-1f1b"
    return build_template(name, pp=pp, vpp=vpp, microbatches=microbatches, joint=joint)


def naive_peak(rank: int, made: Template, model: ModelSpec, costs: CostTable, bounds: Bounds) -> int:
    """Walks a rank's order item by item: every item's activations, pending W, and the one task that runs."""
    items = model.items
    chunks = ranges(bounds)
    stages = [s for s, owner in enumerate(made.stage_ranks) if owner == rank]
    held = [item for s in stages for item in items[slice(*chunks[s])]]
    memory = costs.memory
    static = sum(memory[item.label].static for item in held)
    users = [item.label for item in held if item.label[0] in "EM" or (item.label == "HEAD" and model.tied)]
    tables = [memory[item.label] for item in items if item.label[0] in "EM" or (item.label == "HEAD" and model.tied)]
    if users:
        copy = min(m.weights for m in tables) + min(m.optimizer for m in tables)
        static -= (len(users) - 1) * copy
    for s in stages:
        for neighbour, position in ((s - 1, chunks[s][0]), (s + 1, chunks[s][1])):
            if 0 <= neighbour < len(chunks) and made.stage_ranks[neighbour] != rank and 0 < position < len(items):
                static += 2 * memory[items[position - 1].label].output

    def payload(stage: int, pass_: Pass) -> int:
        tasks = (t for item in items[slice(*chunks[stage])] for t in chunk_tasks([item], pass_).tasks)
        return 2 * max((costs.tasks[t.name].bytes for t in tasks), default=0)

    peak, flying = 0, dict.fromkeys(stages, 0)
    for action in made.actions[rank]:
        for part in action.passes:
            flying[part.stage] += part.kind is ActionKind.F
        now = static + sum(flying[s] * memory[i.label].activations for s in stages for i in items[slice(*chunks[s])])
        now += sum(payload(p.stage, Pass.F if p.kind is ActionKind.F else Pass.B) for p in action.passes)
        growth = 0
        for part in action.passes:
            if part.kind is ActionKind.B:
                gone = pending = 0
                for item in reversed(items[slice(*chunks[part.stage])]):
                    pending += memory[item.label].pending_w
                    growth = max(growth, pending - gone)
                    gone += memory[item.label].activations
                flying[part.stage] -= 1
        working = [memory[i.label].transient for p in action.passes for i in items[slice(*chunks[p.stage])]]
        peak = max(peak, now + growth + max(working, default=0))
    return peak


@given(SEEDS, st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.booleans(), st.booleans(), st.integers(0, 1))
def test_peaks_are_the_fullest_moment_of_the_order(
    seed: int, pp: int, vpp: int, microbatches: int, joint: bool, tied: bool, mtp: int
) -> None:
    model = moe_model(4, dense_first=1, shared=True, tied=tied, mtp=mtp)
    costs = random_costs(model, seed)
    made = template(pp, vpp, microbatches, joint)
    memory = MemoryModel(model, costs, made)
    bounds = random.Random(seed).choice(all_bounds(len(model.items), pp * vpp, shortest=0))
    expected = tuple(naive_peak(rank, made, model, costs, bounds) for rank in range(pp))
    assert memory.peaks(bounds) == expected
    planned = memory.of(bounds, 7)
    assert tuple(m.peak for m in planned) == expected
    assert {m.limit for m in planned} == {7}
    for rank in range(pp):
        assert memory.moments(rank, bounds).max() == expected[rank]


@given(SEEDS, st.integers(1, 4), st.integers(1, 2), st.integers(1, 9))
def test_a_rank_is_the_sum_of_its_stages(seed: int, pp: int, vpp: int, microbatches: int) -> None:
    """The integer program relies on it: bytes are linear in the choice of ranges, apart from the embedding table."""
    model = moe_model(4, tied=True)
    memory = MemoryModel(model, random_costs(model, seed), template(pp, vpp, microbatches))
    bounds = random.Random(seed).choice(all_bounds(len(model.items), pp * vpp, shortest=0))
    chunks = ranges(bounds)
    for rank in range(pp):
        stages = [s for s, owner in enumerate(memory.template.stage_ranks) if owner == rank]
        parts = [memory.stage_bytes(s, np.array(chunks[s][0]), np.array(chunks[s][1])) for s in stages]
        table = memory.table_bytes * any(memory.uses_table(chunks[s]) for s in stages)
        assert (np.sum(parts, axis=0) + table == memory.moments(rank, bounds)).all()


def test_stages_of_a_rank_do_not_peak_at_the_same_time() -> None:
    model = dense_model(8)
    costs = uniform_costs(model, memory=ItemMemory(activations=1))
    made = template(4, 2, 16)
    memory = MemoryModel(model, costs, made)
    bounds = (0, 2, 3, 4, 5, 6, 7, 8, 10)  # one layer a stage
    own_maxima = [max(state.in_flight[i] for state in memory.states[1]) for i in (0, 1)]
    assert own_maxima == [8, 4] == [in_flight(made)[s] for s in (1, 5)]
    assert memory.peaks(bounds)[1] == 10


def test_a_tied_weight_is_counted_once_on_one_rank_but_each_use_has_its_gradients() -> None:
    model = dense_model(2, tied=True)
    table = ItemMemory(weights=100, gradients=200, optimizer=300)
    costs = item_costs(model, {}, {"EMBED": table, "HEAD": table})
    alone = MemoryModel(model, costs, template(1, 1, 2)).of((0, 4))[0]
    assert (alone.weights, alone.gradients, alone.optimizer) == (100, 400, 300)
    apart = MemoryModel(model, costs, template(2, 1, 2)).of((0, 2, 4))
    assert [(m.weights, m.gradients, m.optimizer) for m in apart] == [(100, 200, 300)] * 2
    untied = dense_model(2)
    both = MemoryModel(untied, replace(costs, fingerprint=untied.fingerprint), template(1, 1, 2)).of((0, 4))[0]
    assert (both.weights, both.optimizer) == (200, 600)


def test_a_tied_weight_has_one_shard_of_reduced_gradients_on_a_rank() -> None:
    model = dense_model(2, tied=True)
    table = ItemMemory(gradients=4 * 12 + 4 * 12 // 3)  # 12 weights, and the shard of one of 3 ranks
    costs = item_costs(model, {}, {"EMBED": table, "HEAD": table})
    costs = replace(costs, workload=replace(costs.workload, dp=3))
    memory = MemoryModel(model, costs, template(1, 1, 2))
    assert memory.of((0, 4))[0].gradients == 2 * 4 * 12 + 4 * 12 // 3
    assert memory.table_bytes == 4 * 12 // 3


def test_an_mtp_block_shares_the_embedding_of_its_rank() -> None:
    """Case 9, memory part: the copy is counted once per rank."""
    model = dense_model(2, mtp=1)
    costs = item_costs(model, {}, {"EMBED": ItemMemory(weights=100), "M0": ItemMemory(weights=130)})
    assert MemoryModel(model, costs, template(1, 1, 2)).of((0, 5))[0].weights == 130
    assert [m.weights for m in MemoryModel(model, costs, template(2, 1, 2)).of((0, 2, 5))] == [100, 130]


@given(SEEDS, st.integers(1, 3), st.integers(1, 2), st.integers(1, 8))
def test_the_memory_bound_holds_for_every_partition(seed: int, pp: int, vpp: int, microbatches: int) -> None:
    model = moe_model(4, tied=True)
    memory = MemoryModel(model, random_costs(model, seed), template(pp, vpp, microbatches))
    least = min(max(memory.peaks(b)) for b in all_bounds(len(model.items), pp * vpp))
    found = memory_bound(memory)
    assert found.bound <= least <= found.peak == max(memory.peaks(found.bounds))
    if vpp == 1:
        assert found.bound == least, "exact with one stage a rank"


def by_policy(model: ModelSpec) -> dict[Recompute, CostTable]:
    sizes = {Recompute.NONE: 100, Recompute.SELECTIVE: 40, Recompute.FULL: 10}
    return {
        policy: replace(
            uniform_costs(model, memory=ItemMemory(weights=50, activations=size)),
            workload=Workload(tokens=640, context=640, recompute=policy),
        )
        for policy, size in sizes.items()
    }


# 8 layers over 2 ranks, 1f1b in joint pairs: rank 0 has 4 micro-batches in flight, rank 1 has 2.
@pytest.mark.parametrize(
    ("limit", "policy"),
    [(None, Recompute.NONE), (1400, Recompute.NONE), (1100, Recompute.SELECTIVE), (360, Recompute.FULL)],
)
def test_auto_recomputation_takes_the_least_that_fits(limit: int | None, policy: Recompute) -> None:
    model = dense_model(8)
    tables = by_policy(model)
    plan = build_plan(model, Mesh(pp=2), tables.__getitem__, microbatches=8, memory_limit=limit)
    assert plan.workload.recompute is policy
    assert all(memory.peak <= (limit or 10**9) for memory in plan.memory)


def test_an_infeasible_limit_names_rank_stage_need_limit_and_a_remedy_that_helps() -> None:
    model = dense_model(8)
    tables = by_policy(model)
    with pytest.raises(PartitionInfeasible) as caught:
        build_plan(model, Mesh(pp=2), tables.__getitem__, microbatches=8, memory_limit=1000, recompute="none")
    text = str(caught.value)
    (problem,) = caught.value.problems
    assert "rank 0" in problem.field and "stage 0" in problem.field and "L" in problem.field
    assert "1000 bytes" in problem.allowed
    assert "recomputation selective" in problem.remedy and "tokens" in problem.remedy
    # Every remedy helps: the stronger policy, the larger limit, fewer tokens.
    build_plan(model, Mesh(pp=2), tables.__getitem__, microbatches=8, memory_limit=1000, recompute="selective")
    need = int(str(problem.value).split()[0])
    assert f"a limit of {need} bytes" in text
    build_plan(model, Mesh(pp=2), tables[Recompute.NONE], microbatches=8, memory_limit=need)
    with pytest.raises(PartitionInfeasible):
        build_plan(model, Mesh(pp=2), tables[Recompute.NONE], microbatches=8, memory_limit=need - 1)
    tokens = int(problem.remedy.split("about ")[1].split()[0])
    assert 0 < tokens < 640
    fewer = replace(
        tables[Recompute.NONE],
        memory={
            label: replace(item, activations=round(item.activations * tokens / 640))
            for label, item in tables[Recompute.NONE].memory.items()
        },
    )
    build_plan(model, Mesh(pp=2), fewer, microbatches=8, memory_limit=1000)


def test_weights_that_do_not_fit_ask_for_more_stages() -> None:
    model = dense_model(8)
    with pytest.raises(PartitionInfeasible, match="more pipeline stages") as caught:
        build_plan(model, Mesh(pp=2), by_policy(model).__getitem__, microbatches=8, memory_limit=150)
    assert "tokens per micro-batch" not in str(caught.value)
    assert "none, selective, full tried" in str(caught.value)


def test_given_bounds_over_the_limit_are_refused_rank_by_rank() -> None:
    model = dense_model(8)
    costs = uniform_costs(model, memory=ItemMemory(weights=10))
    with pytest.raises(PartitionInfeasible) as caught:
        build_plan(model, Mesh(pp=2), costs, microbatches=2, memory_limit=45, fixed_bounds=(0, 7, 10))
    assert [problem.field for problem in caught.value.problems] == ["memory of rank 0 (stage 0: EMBED to L5)"]
