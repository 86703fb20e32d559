"""Pools chosen by the simulated step: never slower, within their bytes and the memory limit, in plans that can run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_rt.costs import ItemMemory
from tessera_rt.plan import ActionKind, Mesh
from tessera_rt.plan_check import check_plan
from tessera_rt.planner import weight_pool
from tessera_rt.planner.baselines import serial_balanced
from tessera_rt.planner.build import build_plan
from tessera_rt.planner.candidates import ranges
from tessera_rt.planner.setting import Setting
from tessera_rt.planner.weight_pool import with_pools
from tessera_rt.scheduler.orders_pooled import pending
from tessera_rt.scheduler.simulate import simulate
from tessera_rt.scheduler.templates import build_template
from tessera_rt.scheduler.validate import validate_template
from tessera_rt.testing.costs import moe_model, uniform_costs
from tessera_rt.testing.random_costs import random_costs

MODEL = moe_model(8)
HEAVY_W = uniform_costs(
    MODEL, (10, 10, 10), comm_ns=4, memory=ItemMemory(weights=100, activations=40, pending_w=20, output=5)
)


@pytest.fixture(autouse=True, scope="module")
def few_simulations() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_pool, "MOST_SIMULATIONS", 200)
        yield


def test_without_overlap_a_pool_shortens_the_end() -> None:
    """1F1B on 4 ranks with F = I = W: I hand on earlier, and the last ranks have time for their W."""
    template = build_template("1f1b", pp=4, vpp=1, microbatches=8, joint=False)
    setting = Setting(MODEL, HEAVY_W, template, limit=0, method="align")
    bounds = serial_balanced(MODEL, HEAVY_W, template.stage_ranks)
    assert bounds is not None
    none = with_pools(setting, bounds, 0)
    assert none.template.actions == template.actions and none.step_ns == setting.step_ns(bounds)
    small, large = (with_pools(setting, bounds, size) for size in (39, 10_000))
    assert large.step_ns < none.step_ns
    assert small.template.actions == template.actions  # no W is that small
    sizes = [setting.memory.pending_bytes(chunk) for chunk in ranges(bounds)]
    assert min(sizes) >= 40
    one = with_pools(setting, bounds, max(sizes))
    assert large.step_ns <= one.step_ns < none.step_ns
    assert max(pending(row, sizes) for row in one.template.actions) == max(sizes)


@settings(max_examples=3)
@given(st.integers(0, 10_000), st.integers(0, 400), st.sampled_from(["interleaved-1f1b", "dualpipe-v", "zb-v"]))
def test_plans_with_pools_are_sound_and_never_slower(seed: int, size: int, template: str) -> None:
    model = moe_model(7)
    costs = random_costs(model, seed, contention=0.1)
    plans = [
        build_plan(
            model,
            Mesh(pp=2, vpp=2),
            costs,
            microbatches=5,
            template=template,
            evaluations=10,
            method="align",
            partitioner="chain-dp",
            w_pool=pool,
        )
        for pool in (0, size)
    ]
    without, pooled = plans
    assert pooled.solver.step_ns <= without.solver.step_ns
    assert pooled.solver.step_ns == simulate(pooled, model, costs).step_ns
    assert pooled.simulate_only == ()
    check_plan(pooled, model)


def test_w_run_where_a_rank_waits_in_the_steady_state() -> None:
    """Layers of unequal length in groups of micro-batches: ranks wait between pairs, not only in the cool-down."""
    template = build_template("interleaved-1f1b", pp=2, vpp=2, microbatches=8, joint=True)
    costs = random_costs(MODEL, 5, contention=0.1)
    setting = Setting(MODEL, costs, template, limit=0, method="align")
    bounds = serial_balanced(MODEL, costs, template.stage_ranks)
    assert bounds is not None
    sizes = [setting.memory.pending_bytes(chunk) for chunk in ranges(bounds)]
    size = 4 * max(sizes)
    found = with_pools(setting, bounds, size)
    assert found == with_pools(setting, bounds, size)
    assert found.step_ns == setting.with_template(found.template).step_ns(bounds) < setting.step_ns(bounds)
    assert all(pending(row, sizes) <= size for row in found.template.actions)
    validate_template(found.template)
    last = [max(i for i, a in enumerate(row) if "F" in a.key) for row in found.template.actions]
    early = [a for row, stop in zip(found.template.actions, last, strict=True) for a in row[:stop] if "W" in a.key]
    assert any(action.kind is ActionKind.W for action in early)


def test_the_memory_limit_holds_with_pools() -> None:
    costs = uniform_costs(
        MODEL, (10, 10, 10), comm_ns=4, memory=ItemMemory(weights=100, activations=40, pending_w=300, output=5)
    )

    def plan(w_pool: int, limit: int | None) -> tuple[int, int, int]:
        made = build_plan(
            MODEL,
            Mesh(pp=4, vpp=1),
            costs,
            microbatches=8,
            joint=False,
            memory_limit=limit,
            w_pool=w_pool,
            evaluations=50,
        )
        deferred = sum(part.kind is ActionKind.W for row in made.actions for a in row for part in a.passes)
        return made.solver.step_ns, max(rank.peak for rank in made.memory), deferred

    plain, free = plan(0, None), plan(10_000, None)
    assert free[0] < plain[0] and free[1] > plain[1] and plain[2] == 0
    tight = plan(10_000, plain[1])
    assert tight[1] <= plain[1]
    assert free[0] <= tight[0] <= plain[0]
