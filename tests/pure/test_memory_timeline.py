"""Memory over a step: its highest point is the plan's account, and by hand where it is small."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_rt.costs import ItemMemory
from tessera_rt.errors import ScheduleError
from tessera_rt.plan import Mesh
from tessera_rt.planner.build import plan_with
from tessera_rt.planner.memory_timeline import PARTS, memory_series
from tessera_rt.scheduler.simulate import simulate
from tessera_rt.testing.costs import dense_model, item_costs, moe_model

TEMPLATES = (("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2))


@settings(max_examples=40)
@given(st.sampled_from(TEMPLATES), st.integers(1, 3), st.integers(1, 6), st.randoms(), st.booleans())
def test_the_highest_point_is_the_plans_memory(template: tuple[str, int], pp: int, m: int, random, tied: bool) -> None:  # type: ignore[no-untyped-def]
    name, vpp = template
    if name == "dualpipe-v":
        m = max(m, 2 * pp)
    model = moe_model(pp * vpp + 1, dense_first=1, shared=True, tied=tied)
    names = ("weights", "gradients", "optimizer", "activations", "pending_w", "transient", "output")
    memory = {item.label: ItemMemory(**{part: random.randint(0, 99) for part in names}) for item in model.items}
    costs = item_costs(model, {}, memory, default=(30, 40, 20), comm_ns=10, comm_bytes=7)
    count = len(model.items)
    cuts = sorted(random.choices(range(count + 1), k=pp * vpp - 1))
    plan = plan_with((0, *cuts, count), model, Mesh(pp=pp, vpp=vpp), costs, microbatches=m, template=name)
    series = memory_series(plan, model, costs, simulate(plan, model, costs))
    assert [one.rank for one in series] == list(range(pp))
    for one, planned in zip(series, plan.memory, strict=True):
        assert one.peak_bytes == planned.peak
        assert one.starts_ns[0] == 0 and all(a <= b for a, b in pairwise(one.starts_ns))
        highest = one.bytes.index(one.peak_bytes)
        assert sum(values[highest] for _, values in one.parts) == planned.peak
        for part in ("weights", "gradients", "optimizer"):
            assert set(dict(one.parts)[part]) == {getattr(planned, part)}
        assert tuple(part for part, _ in one.parts) == PARTS


def test_one_rank_by_hand() -> None:
    """GPipe, 2 micro-batches of F 10 and B 20 (W within): 5 bytes each in flight, 3 pending within a backward."""
    model = dense_model(1)
    costs = item_costs(model, {"L0": (10, 15, 5)}, {"L0": ItemMemory(weights=100, activations=5, pending_w=8)})
    plan = plan_with((0, 3), model, Mesh(), costs, microbatches=2, template="gpipe")
    series = memory_series(plan, model, costs, simulate(plan, model, costs))[0]
    assert series.starts_ns == (0, 10, 20, 40)
    assert dict(series.parts)["activations"] == (5, 10, 10, 5)
    assert dict(series.parts)["pending_w"] == (0, 0, 8, 8)
    assert series.bytes == (105, 110, 118, 113)
    assert series.peak_bytes == plan.memory[0].peak == 118


def test_another_timeline_is_refused() -> None:
    model = dense_model(2)
    costs = item_costs(model, {}, default=(1, 1, 1))
    plan = plan_with((0, 2, 4), model, Mesh(pp=2), costs, microbatches=2)
    timeline = simulate(plan, model, costs)
    kept = tuple(span for span in timeline.spans if span.microbatch == 0)
    with pytest.raises(ScheduleError, match="timeline.*without 0F1"):
        memory_series(plan, model, costs, replace(timeline, spans=kept))
