"""The memory limit: a partition that keeps it is found whenever there is one, and that there is none is proven."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tessera_rt.errors import PartitionInfeasible
from tessera_rt.plan import Mesh
from tessera_rt.planner.build import build_plan
from tessera_rt.planner.limits import fit
from tessera_rt.planner.partition_milp import scipy_solver
from tessera_rt.planner.setting import Setting
from tessera_rt.scheduler.templates import build_template
from tessera_rt.testing.costs import moe_model
from tessera_rt.testing.partitions import all_bounds
from tessera_rt.testing.random_costs import random_costs

MODEL = moe_model(9, dense_first=1, mtp=1, shared=True, tied=True)
ORDERS = (("interleaved-1f1b", 2), ("zb-v", 2), ("interleaved-1f1b", 3))


def setting_of(seed: int, order: tuple[str, int], limit: int = 0) -> Setting:
    name, vpp = order
    template = build_template(name, pp=2, vpp=vpp, microbatches=5, joint=True)
    return Setting(MODEL, random_costs(MODEL, seed, kinds=2), template, limit=limit, method="align")


def least_peak(setting: Setting) -> int:
    return min(max(setting.memory.peaks(bounds)) for bounds in all_bounds(len(MODEL.items), setting.stages))


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.sampled_from(ORDERS))
@example(5008, ORDERS[0])  # in these local search ends far from the partition that fits
@example(5006, ORDERS[1])
@example(5005, ORDERS[2])
def test_the_least_limit_that_can_be_kept_is_kept(seed: int, order: tuple[str, int]) -> None:
    least = least_peak(setting_of(seed, order))
    setting = setting_of(seed, order, least)
    found = fit(setting, time_limit_s=60.0, solver=scipy_solver)
    assert found.start is not None and max(setting.memory.peaks(found.start)) == least
    below = fit(setting_of(seed, order, least - 1), time_limit_s=60.0, solver=scipy_solver)
    assert below.start is None and below.bound == least  # proven


def test_what_one_byte_decides() -> None:
    seed, order = 5008, ORDERS[0]
    costs, least = random_costs(MODEL, seed, kinds=2), least_peak(setting_of(seed, order))
    mesh = Mesh(pp=2, vpp=2)
    for objective in ("step", "t_dom", "serial", "memory"):
        plan = build_plan(
            MODEL, mesh, costs, microbatches=5, memory_limit=least, objective=objective, method="align", evaluations=10
        )
        assert max(memory.peak for memory in plan.memory) == least
    with pytest.raises(PartitionInfeasible, match="no partition fits"):
        build_plan(MODEL, mesh, costs, microbatches=5, memory_limit=least - 1, method="align")
