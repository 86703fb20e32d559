"""Plans executed on the emulated device by ranks that are started for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tessera_rt.costs import Link, Workload
from tessera_rt.emulate import Emulation, emulate, emulate_many, emulate_rank, one_column
from tessera_rt.errors import PlanError
from tessera_rt.plan import Mesh, Plan
from tessera_rt.planner.build import plan_with
from tessera_rt.scheduler.simulate import simulate
from tessera_rt.testing.hybrids import random_costs, tiny_hybrid
from tessera_rt.testing.worker_pool import WorkerPool

MODEL = tiny_hybrid("gSdg")
COSTS = random_costs(
    MODEL, Workload(tokens=16, context=16, ep=2, dtype="fp32"), seed=5, link=Link(latency_ns=90, bytes_per_s=1e9)
)


def made(cuts: tuple[int, ...] = (0, 2, 3, 4, 6), **options: Any) -> Plan:
    return plan_with(cuts, MODEL, Mesh(pp=2, vpp=2, ep=2), COSTS, microbatches=5, **options)


def test_several_runs_in_one_start_agree_with_the_simulator() -> None:
    plan, unequal = made(), made((0, 1, 1, 4, 6))
    runs = [
        Emulation(plan=plan, label="plan"),
        Emulation(plan=plan, overlap=False),
        Emulation(plan=unequal),
        Emulation(plan=made(joint=False), overlap=False),
    ]
    timelines = emulate_many(runs, MODEL, COSTS)
    assert [timeline.label for timeline in timelines] == ["plan", *["interleaved-1f1b"] * 3]
    for run, timeline in zip(runs, timelines, strict=True):
        expected = simulate(run.plan, MODEL, COSTS, overlap=run.overlap)
        assert timeline.source == "emulated" and timeline.ranks == 2
        assert timeline.step_ns == expected.step_ns
        assert timeline.mean_split() == expected.mean_split()


def test_one_column_stands_for_all_ranks(pool: WorkerPool) -> None:
    plan = made()
    alone = pool.run(lambda ctx: emulate_rank([Emulation(plan=one_column(plan))], MODEL, COSTS, 0.2, 60.0), 2)
    together = pool.run(lambda ctx: emulate_rank([Emulation(plan=plan)], MODEL, COSTS, 0.2, 60.0), 4)
    assert alone[0][0] == together[0][0] and not any([*alone[1:], *together[1:]])
    assert alone[0][0].step_ns == pytest.approx(simulate(plan, MODEL, COSTS, contention=0.2).step_ns, rel=1e-3)


def test_one_column_keeps_everything_but_the_mesh() -> None:
    plan = replace(made(), simulate_only=("tp", "mtp"))
    column = one_column(plan)
    assert (column.mesh, column.workload.ep, column.simulate_only) == (Mesh(pp=2, vpp=2), 1, ("mtp",))
    assert (column.actions, column.stages, column.interleavings) == (plan.actions, plan.stages, plan.interleavings)


def test_what_cannot_be_emulated_is_refused_before_ranks_start() -> None:
    single = plan_with((0, 6), MODEL, Mesh(ep=2), COSTS, microbatches=2)
    with pytest.raises(PlanError, match="one by one"):
        emulate_many([Emulation(plan=made()), Emulation(plan=single)], MODEL, COSTS)
    with pytest.raises(PlanError, match="fingerprint"):
        emulate(made(), tiny_hybrid("gSds"), COSTS)
    assert emulate_many([], MODEL, COSTS) == ()
