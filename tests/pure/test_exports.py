"""Partitions in the notation of Megatron-Core and torchtitan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.errors import PlanError
from tessera_rt.files.exports import bounds_from_megatron, megatron_layout, torchtitan_modules
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Plan
from tessera_rt.testing.plans import simple_model, simple_plan


def plan_of(model: ModelSpec, cuts: tuple[int, ...], pp: int) -> Plan:
    return simple_plan(model, pp=pp, vpp=(len(cuts) - 1) // pp, cuts=cuts, microbatches=2)


def test_the_documented_layout() -> None:
    """Ettt|(tt|)*29m|L: 61 decoder layers on 32 stages, MTP and loss by themselves."""
    model = simple_model("d" * 61, mtp="m")
    cuts = (0, 4, *range(6, 63, 2), 63, 64)
    layout = megatron_layout(plan_of(model, cuts, 16), model)
    assert layout == "Ettt|(tt|)*29m|L"
    assert bounds_from_megatron(layout, model, pp=16) == cuts
    assert bounds_from_megatron("E, t*3 | (tt|)*29, m | L", model, pp=16) == cuts


def test_empty_stages() -> None:
    model = simple_model("ddd")
    plan = plan_of(model, (0, 0, 2, 2, 2, 2, 5), 2)
    assert megatron_layout(plan, model) == "|Et|(|)*3ttL"
    assert bounds_from_megatron("|Et||||ttL", model, pp=2) == (0, 0, 2, 2, 2, 2, 5)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[ModelSpec, tuple[int, ...], int]:
    model = simple_model("d" * draw(st.integers(1, 12)))
    pp = draw(st.integers(1, 4))
    stages = pp * draw(st.integers(1, 3))
    inner = draw(st.lists(st.integers(0, len(model.items)), min_size=stages - 1, max_size=stages - 1))
    return model, (0, *sorted(inner), len(model.items)), pp


@given(partitions())
def test_layouts_come_back(case: tuple[ModelSpec, tuple[int, ...], int]) -> None:
    model, cuts, pp = case
    layout = megatron_layout(plan_of(model, cuts, pp), model)
    assert bounds_from_megatron(layout, model, pp=pp) == cuts


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Et|tL", "'2 t': must be 3"),
        ("Ettx|tL", "'x': must be E, t, m, L"),
        ("tE|ttL", "E first"),
        ("Et|t|tL", "'3 stages': must be a multiple of pp"),
        ("Ettt|m|L|", "in stage 1': must be in one of the last 2 stages"),
        ("Ett|(t*9|L", "'(': must be E, t"),
        ("E(t|)*99999999999L", "at most 100000 letters"),
        ("", "'0 E': must be 1"),
    ],
)
def test_faulty_layouts_are_refused(layout: str, message: str) -> None:
    model = simple_model("ddd", mtp="d" if "m" in layout else "")
    with pytest.raises(PlanError, match="Megatron-Core layout") as caught:
        bounds_from_megatron(layout, model, pp=2)
    assert any(message in str(problem) for problem in caught.value.problems), str(caught.value)


def test_what_megatron_cannot_hold_is_refused() -> None:
    model = simple_model("dd", mtp="dd")
    with pytest.raises(PlanError, match="all in one stage"):
        megatron_layout(plan_of(model, (0, 4, 6), 2), model)
    v = simple_plan(simple_model("dddd"), pp=2, placement=(0, 1, 1, 0), microbatches=2)
    with pytest.raises(PlanError, match="stages loop over the ranks"):
        megatron_layout(v, simple_model("dddd"))
    with pytest.raises(PlanError, match="another model"):
        megatron_layout(v, simple_model("ddd"))


def test_torchtitan_lists() -> None:
    model = simple_model("dmd")
    plan = plan_of(model, (0, 2, 3, 4, 5), 2)
    assert torchtitan_modules(plan, model) == [
        ["tok_embeddings", "layers.0"],
        ["layers.1"],
        ["layers.2"],
        ["norm", "output"],
    ]
    assert torchtitan_modules(plan, model, head=("norm", "lm_head"))[-1] == ["norm", "lm_head"]
    v = simple_plan(model, pp=2, placement=(0, 1, 1, 0), cuts=(0, 2, 3, 4, 5), microbatches=2)
    assert torchtitan_modules(v, model) == torchtitan_modules(plan, model)  # the schedule knows the V


def test_torchtitan_refusals_come_together() -> None:
    model = simple_model("d", mtp="d")
    plan = replace(plan_of(model, (0, 2, 2, 3, 4), 2), fingerprint="0" * 64)
    with pytest.raises(PlanError) as caught:
        torchtitan_modules(plan, model)
    assert [problem.field for problem in caught.value.problems] == ["fingerprint", "model.mtp", "stages[1]"]
