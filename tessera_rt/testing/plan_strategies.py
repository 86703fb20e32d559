"""Hypothesis strategies for small valid plans, see ``plans.py``."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st

from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Plan
from tessera_rt.testing.plans import simple_model, simple_plan


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    return simple_model(draw(st.text("dmsaf", min_size=1, max_size=6)), mtp=draw(st.text("ms", max_size=2)), hidden=16)


@st.composite
def plans(draw: st.DrawFn, split: bool = True) -> tuple[Plan, ModelSpec]:
    """Any cuts (empty stages too) and any placement: looped, V, or ranks with different numbers of stages."""
    model = draw(models())
    pp = draw(st.integers(1, 4))
    vpp = draw(st.integers(1, 3))
    placement = tuple(stage % pp for stage in range(pp * vpp))
    if draw(st.booleans()):
        extra = draw(st.lists(st.integers(0, pp - 1), max_size=5))
        placement = tuple(draw(st.permutations([*range(pp), *extra])))
        looped = all(rank == stage % pp for stage, rank in enumerate(placement))
        assume(not looped or len(placement) % pp == 0)
    count = len(placement)
    inner = draw(st.lists(st.integers(0, len(model.items)), min_size=count - 1, max_size=count - 1))
    plan = simple_plan(
        model,
        pp=pp,
        microbatches=draw(st.integers(1, 6)),
        cuts=(0, *sorted(inner), len(model.items)),
        placement=placement,
        order=draw(st.sampled_from(["1f1b", "gpipe"])),
        joint=draw(st.booleans()),
        split_w=split and draw(st.booleans()),
        dp=draw(st.integers(1, 2)),
        ep=draw(st.integers(1, 3)),
    )
    return plan, model
