"""Which partitions the search for the fastest step starts from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tessera_rt.planner import search as module
from tessera_rt.planner.baselines import equal_layers, serial_balanced
from tessera_rt.planner.candidates import Bounds
from tessera_rt.planner.least import Options, least_t_dom
from tessera_rt.planner.partition_milp import scipy_solver
from tessera_rt.planner.setting import Setting
from tessera_rt.scheduler.templates import build_template
from tessera_rt.testing.costs import moe_model
from tessera_rt.testing.random_costs import random_costs


def test_the_first_partition_with_the_least_t_dom_is_a_start_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaking ties by loads can make a step longer, and no plan is slower than one that was met on the way."""
    model = moe_model(16)
    order = build_template("interleaved-1f1b", pp=3, vpp=2, microbatches=8, joint=True)
    setting = Setting(model, random_costs(model, 18, kinds=6), order, limit=0, method="align")
    options = Options(objective="step", partitioner="threshold", window=None, time_limit_s=1000.0, solver=scipy_solver)
    start = serial_balanced(model, setting.costs, order.stage_ranks)
    assert start is not None
    t_dom = least_t_dom(setting, start, options)
    (first,) = t_dom.others
    assert setting.t_dom(first) == setting.t_dom(t_dom.bounds) and setting.step_ns(first) < setting.step_ns(
        t_dom.bounds
    )
    tuned_from: list[Bounds] = []

    def tuned(setting: Setting, starts: Sequence[Bounds], *_: Any) -> Bounds:
        tuned_from.extend(starts)
        return min(starts, key=setting.step_ns)

    monkeypatch.setattr(module, "step_tuned", tuned)
    found = module.search(setting, start, options)
    assert {first, t_dom.bounds, start, equal_layers(model, 6)} <= set(tuned_from)
    assert setting.step_ns(found.bounds) == min(map(setting.step_ns, tuned_from))
