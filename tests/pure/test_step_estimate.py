"""The block estimate of the step against the simulator."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_rt.costs import Link
from tessera_rt.planner.setting import Setting
from tessera_rt.planner.step_estimate import StepEstimate
from tessera_rt.scheduler.templates import build_template
from tessera_rt.testing.costs import dense_model, moe_model
from tessera_rt.testing.partitions import all_bounds
from tessera_rt.testing.random_costs import random_costs


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 2), st.integers(1, 9))
def test_exact_where_blocks_are_exact(seed: int, pp: int, vpp: int, microbatches: int) -> None:
    """Compute only, classic order, no empty stage: every action is one block for the simulator too."""
    model = dense_model(6)
    costs = random_costs(model, seed, link=Link(latency_ns=seed % 30))
    name = "1f1b" if vpp == 1 else "interleaved-1f1b"
    template = build_template(name, pp=pp, vpp=vpp, microbatches=microbatches, joint=False)
    setting = Setting(model, costs, template, limit=0, method="align")
    bounds = random.Random(seed).choice(all_bounds(len(model.items), pp * vpp))
    assert StepEstimate(setting)(bounds) == setting.step_ns(bounds)


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 2), st.integers(4, 9))
def test_never_far_below_the_simulator_with_overlap(seed: int, pp: int, vpp: int, microbatches: int) -> None:
    """Blocks wait for all inputs and do not run into each other, so without contention they take at least as long."""
    model = moe_model(6, shared=True)
    costs = random_costs(model, seed)
    name = "1f1b" if vpp == 1 else "interleaved-1f1b"
    template = build_template(name, pp=pp, vpp=vpp, microbatches=microbatches, joint=True)
    setting = Setting(model, costs, template, limit=0, method="align")
    bounds = random.Random(seed).choice(all_bounds(len(model.items), pp * vpp))
    estimate, simulated = StepEstimate(setting)(bounds), setting.step_ns(bounds)
    assert simulated <= estimate <= 2 * simulated
    assert StepEstimate(setting).actions == sum(map(len, template.actions))
