"""Costs from samples: warm-up and outliers must not pollute them, and nothing may be missing silently."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.cost_sources.measured import MEMORY_NOTE, measured_costs, robust_cost
from tessera_rt.cost_sources.sizes import item_memory, task_flops
from tessera_rt.costs import CostTable, Link, Recompute, TaskCost, Workload
from tessera_rt.errors import CostError, SpecError
from tessera_rt.model_spec import ModelSpec
from tessera_rt.tasks import Pass, chunk_tasks
from tessera_rt.testing.costs import moe_model

MODEL = moe_model(3, dense_first=1, shared=True)
WORKLOAD = Workload(tokens=6, context=6, ep=2, dp=2)


def samples_of(model: ModelSpec) -> dict[str, list[float]]:
    names = [name for pass_ in (Pass.F, Pass.B) for name in chunk_tasks(model.items, pass_).names]
    return {name: [9000.0 + i, 100.0 + i, 101.0 + i, 99.0 + i] for i, name in enumerate(names)}


def measure(samples: dict[str, list[float]], workload: Workload = WORKLOAD, contention: float = 0.1) -> CostTable:
    return measured_costs(
        MODEL, workload, samples, device="cpu", versions="torch 2", link=Link(latency_ns=5), contention=contention
    )


def test_the_first_sample_is_dropped_and_the_median_taken() -> None:
    assert robust_cost([900, 10, 11, 10, 9]) == TaskCost(ns=10, spread=pytest.approx(0.05), samples=4)
    assert robust_cost([10, 10, 10, 900]).ns == 10
    assert robust_cost([900, 800, 10, 12], warmup=2) == TaskCost(ns=11, spread=pytest.approx(1 / 11), samples=2)
    assert robust_cost([900, 10], warmup=0).ns == 455


def test_one_sample_counts_and_says_so() -> None:
    assert robust_cost([7]) == TaskCost(ns=7, samples=1)
    assert robust_cost([900, 7], warmup=5) == TaskCost(ns=7, samples=1)
    assert robust_cost([0, 0, 0]) == TaskCost(ns=0, samples=2)


@pytest.mark.parametrize("samples", [[], [1, -1], [1, math.nan], [math.inf, 1]])
def test_what_is_no_sample(samples: list[float]) -> None:
    with pytest.raises(CostError):
        robust_cost(samples)


@given(st.lists(st.floats(0, 1e12), min_size=2, max_size=30))
def test_cost_is_a_median_with_a_finite_spread(samples: list[float]) -> None:
    cost = robust_cost(samples)
    assert cost.ns == round(median(samples[1:]))
    assert cost.spread >= 0 and math.isfinite(cost.spread) and cost.samples == len(samples) - 1
    assert robust_cost([samples[0], *sorted(samples[1:])]) == cost


def test_a_complete_measurement_becomes_a_table() -> None:
    samples = samples_of(MODEL)
    costs = measure(samples)
    assert {name: cost.ns for name, cost in costs.tasks.items()} == {n: round(s[1]) for n, s in samples.items()}
    assert costs.fingerprint == MODEL.fingerprint and costs.provenance.source == "measured"
    assert costs.memory == {item.label: item_memory(MODEL, item, WORKLOAD) for item in MODEL.items}
    assert costs.tasks["F_MLP:L2"].flops == task_flops(MODEL, MODEL.items[3], WORKLOAD)["F_MLP:L2"]
    assert costs.tasks["F_DISP:L2"].bytes == 6 * 2 // 2 * 4 * 2  # half of the 12 rows leave the rank
    assert costs.tasks["F_COUNT:L2"].bytes == 3 * 4 * 8
    assert costs.tasks["F_MLP:L0"].bytes == 0
    again = measure(samples, replace(WORKLOAD, recompute=Recompute.SELECTIVE))
    assert again.tasks["B_MLP:L2"].flops == 2 * costs.tasks["B_MLP:L2"].flops
    assert again.tasks["F_MLP:L2"] == costs.tasks["F_MLP:L2"] and again.tasks["B_ATTN:L2"] == costs.tasks["B_ATTN:L2"]


def test_a_task_missing_in_one_layer_is_named_with_a_layer_that_has_it() -> None:
    samples = samples_of(MODEL)
    del samples["W_MLP:L1"], samples["F_HEAD"]
    with pytest.raises(CostError) as error:
        measure(samples)
    assert {problem.field for problem in error.value.problems} == {"samples.W_MLP:L1", "samples.F_HEAD"}
    assert "L2, an equal layer, has it" in str(error.value)
    assert str(error.value).count("an equal layer") == 1


def test_all_problems_at_once() -> None:
    samples = samples_of(MODEL)
    samples["F_MLP:L9"] = [1.0]
    samples["F_MLP:L0"] = []
    samples["F_MLP:L1"] = [1.0, -2.0, math.nan]
    with pytest.raises(CostError) as error:
        measure(samples, contention=-0.5)
    assert {problem.field for problem in error.value.problems} == {
        "samples.F_MLP:L9",
        "samples.F_MLP:L0",
        "samples.F_MLP:L1[1]",
        "samples.F_MLP:L1[2]",
        "contention",
    }
    with pytest.raises(SpecError, match=r"workload\.ep"):
        measure(samples, replace(WORKLOAD, ep=3))


def test_single_samples_are_flagged_in_the_notes() -> None:
    samples = samples_of(MODEL)
    assert measure(samples).provenance.notes == (MEMORY_NOTE,)
    samples["F_EMBED"] = [5.0]
    assert measure(samples).provenance.notes == (MEMORY_NOTE, "only one sample, spread unknown: F_EMBED")
