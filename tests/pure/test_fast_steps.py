"""The compiled event loop against the simulator: the same step to the nanosecond, whatever the order and the costs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_rt.costs import Link
from tessera_rt.errors import ScheduleError
from tessera_rt.plan import Action, ActionKind
from tessera_rt.planner.candidates import ranges
from tessera_rt.planner.pair_costs import PairCosts
from tessera_rt.planner.step_clock import StepClock
from tessera_rt.scheduler.chunked import alone, halved_costs
from tessera_rt.scheduler.comparisons import dualpipe_template
from tessera_rt.scheduler.fast_steps import Blocks, FastSteps
from tessera_rt.scheduler.interleave import METHODS
from tessera_rt.scheduler.orders_pooled import Pool, passes_of, pooled
from tessera_rt.scheduler.simulate import simulate_schedule, step_time
from tessera_rt.scheduler.templates import RULES, TEMPLATES, build_template
from tessera_rt.testing.costs import dense_model, moe_model, uniform_costs
from tessera_rt.testing.partitions import all_bounds
from tessera_rt.testing.random_costs import random_costs

SEEDS = st.integers(0, 10_000)


@settings(max_examples=60)
@given(SEEDS, st.sampled_from(TEMPLATES), st.integers(1, 4), st.integers(1, 2), st.integers(1, 5), st.data())
def test_equal_to_the_simulator(seed: int, name: str, pp: int, vpp: int, groups: int, data: st.DataObject) -> None:
    """Also with empty stages, pools of W, MoE layers in halves, tapered ends, slow links and any contention."""
    least, most = RULES[name].vpp
    vpp = int(min(max(vpp, least), most))
    template = build_template(
        name, pp=pp, vpp=vpp, microbatches=groups * pp, joint=data.draw(st.booleans()) or RULES[name].joint_only
    )
    model = moe_model(6, shared=bool(seed % 2), dense_first=seed % 3)
    costs = random_costs(
        model,
        seed,
        kinds=seed % 3,
        link=Link(latency_ns=seed % 40, bytes_per_s=data.draw(st.sampled_from([float("inf"), 1e9, 5e7]))),
        contention=data.draw(st.sampled_from([0.0, 0.15, 1.0])),
    )
    rooms = [[data.draw(st.integers(0, 4)) for _ in passes_of(row)] for row in template.actions]
    actions = [
        pooled(row, Pool(tuple(room), data.draw(st.booleans())))
        for row, room in zip(template.actions, rooms, strict=True)
    ]
    pairs = PairCosts(model, costs, method=data.draw(st.sampled_from(METHODS[:2])))
    halves = data.draw(st.booleans())
    alone_pairs = PairCosts(model, halved_costs(model, costs), method="align") if halves else None
    tapered = data.draw(st.integers(0, groups * pp // 2))
    clock = StepClock(template.stage_ranks, actions, pairs, alone_pairs=alone_pairs, tapered=tapered)
    for bounds in random.Random(seed).choices(all_bounds(len(model.items), pp * vpp), k=2):
        orders = {
            action.key: (alone_pairs if alone_pairs and alone(action.key) else pairs).interleaving(
                action, ranges(bounds)
            )
            for row in actions
            for action in row
        }
        expected = step_time(
            template.stage_ranks, actions, ranges(bounds), orders, model, costs, halves=halves, tapered=tapered
        )
        assert clock(bounds) == expected


def test_times_of_every_task_and_two_copies() -> None:
    template = dualpipe_template(2, 6)
    model = moe_model(3)
    costs = random_costs(model, 7, link=Link(latency_ns=3), contention=0.2)
    pairs = PairCosts(model, costs, method="align")
    bounds = ((0, 2), (2, 5), (0, 2), (2, 5))
    steps = FastSteps(template.stage_ranks, template.actions, copies=2)
    blocks = Blocks()
    orders, numbers = {}, []
    for action in steps.kinds:
        orders[action.key] = pairs.interleaving(action, bounds)
        graphs = [pairs.graph(part.kind, bounds[part.stage]) for part in action.passes]
        names = [name for graph in graphs for name in graph.names]
        numbers.append(blocks.add(graphs, [names.index(name) for name in orders[action.key].order]))
    ran = steps.run(blocks, numbers, [0] * 4, latency_ns=3, contention=0.2)
    timeline = simulate_schedule(template.stage_ranks, template.actions, bounds, orders, model, costs, copies=2)
    assert ran.step_ns == timeline.step_ns
    spans = sorted((s.start_ns, s.end_ns) for s in timeline.spans if s.lane != "LINK")
    assert sorted(zip(ran.starts[ran.starts >= 0].tolist(), ran.task_ends.tolist(), strict=True)) == spans


def test_waits_by_hand() -> None:
    """One forward through two ranks and back; W, without a place of its own, in the second rank's wait."""
    model = dense_model(2)
    pairs = PairCosts(model, random_costs(model, 3), method="align")
    bounds = (0, 2, 4)
    texts = [["0F0", "0B0"], ["1F0", "1I0", "1W0"]]
    clock = StepClock((0, 1), [[Action.parse(text) for text in row] for row in texts], pairs)
    there = pairs.solo(ActionKind.F, (0, 2))
    away = pairs.solo(ActionKind.F, (2, 4)) + pairs.solo(ActionKind.I, (2, 4))
    assert pairs.costs.link.latency_ns == 0
    assert clock.waits(bounds) == [[0, away], [there, 0, 0]]


def test_a_deadlock_is_an_error() -> None:
    model = dense_model(2)
    pairs = PairCosts(model, uniform_costs(model), method="align")
    texts = [["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]]
    clock = StepClock((0, 1), [[Action.parse(text) for text in row] for row in texts], pairs)
    with pytest.raises(ScheduleError, match="deadlock"):
        clock((0, 2, 4))


def test_four_passes_in_one_action_are_refused() -> None:
    action = Action.overlap(*(Action.parse(text) for text in ("0F1", "0I0", "1W0", "2W0")))
    with pytest.raises(ScheduleError, match="at most 3 passes"):
        FastSteps((0, 0, 0), [[action]])


def test_more_small_micro_batches_than_there_are_is_an_error() -> None:
    model = dense_model(2)
    pairs = PairCosts(model, uniform_costs(model), method="align")
    template = build_template("1f1b", pp=1, vpp=1, microbatches=3, joint=False)
    with pytest.raises(ScheduleError, match="tapered = 2"):
        StepClock(template.stage_ranks, template.actions, pairs, tapered=2)
