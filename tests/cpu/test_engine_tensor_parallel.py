"""Plans with tensor parallelism or tapered ends are made and simulated; the engine refuses them by name before any rank
sends a byte."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tessera_rt.cost_sources.device import load_device
from tessera_rt.cost_sources.roofline import roofline_costs
from tessera_rt.costs import Workload
from tessera_rt.engine.engine import _refuse_unrunnable
from tessera_rt.errors import PlanError
from tessera_rt.files.model_files import load_model
from tessera_rt.plan import TAPERED_ENDS, Mesh
from tessera_rt.planner.build import build_plan

MODEL = replace(load_model("qwen3-30b-a3b"), layers=load_model("qwen3-30b-a3b").layers[:4])


@pytest.mark.parametrize("emulated", [False, True])
def test_the_engine_refuses_tensor_parallelism(emulated: bool) -> None:
    plans = {}
    for tp in (1, 2):
        costs = roofline_costs(MODEL, Workload(tokens=512, context=512, tp=tp), load_device("h800"))
        plans[tp] = build_plan(MODEL, Mesh(pp=2, tp=tp), costs, microbatches=2, method="align", objective="serial")
    _refuse_unrunnable(plans[1], MODEL, 2, emulated=emulated)
    with pytest.raises(PlanError) as error:
        _refuse_unrunnable(plans[2], MODEL, 4, emulated=emulated)
    fields = {problem.field: problem for problem in error.value.problems}
    assert fields["mesh.tp"].value == 2 and "no tensor parallelism" in fields["mesh.tp"].remedy
    assert emulated or fields["simulate_only"].value == "tp"


@pytest.mark.parametrize("emulated", [False, True])
def test_the_engine_refuses_tapered_ends_and_halves(emulated: bool) -> None:
    """The emulated device, too: it has one duration for a task, whatever the micro-batch."""
    costs = roofline_costs(MODEL, Workload(tokens=512, context=512), load_device("h800"))
    plan = build_plan(MODEL, Mesh(pp=2), costs, microbatches=3, tapered=1, method="align", objective="serial")
    with pytest.raises(PlanError) as error:
        _refuse_unrunnable(plan, MODEL, 2, emulated=emulated)
    (problem,) = error.value.problems
    assert (problem.field, problem.value) == ("simulate_only", TAPERED_ENDS)
    halved = build_plan(MODEL, Mesh(pp=2), costs, microbatches=3, moe_halves=True, method="align", objective="serial")
    with pytest.raises(PlanError, match="simulate_only = 'moe-halves'"):
        _refuse_unrunnable(halved, MODEL, 2, emulated=emulated)
    with pytest.raises(PlanError, match="simulate_only.*a list with tapered-ends, since tapered is 1"):
        _refuse_unrunnable(replace(plan, simulate_only=()), MODEL, 2, emulated=emulated)
