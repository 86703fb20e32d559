"""The search on the step's clock: never behind where it starts, repeatable, within its evaluations."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_rt.planner.baselines import equal_layers, serial_balanced
from tessera_rt.planner.candidates import Bounds
from tessera_rt.planner.search import step_tuned
from tessera_rt.planner.setting import Setting
from tessera_rt.planner.step_tuning import tuned
from tessera_rt.scheduler.templates import build_template
from tessera_rt.testing.costs import moe_model
from tessera_rt.testing.partitions import all_bounds
from tessera_rt.testing.random_costs import random_costs


class Counted:
    """A clock that remembers what it was asked."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.asked: set[Bounds] = set()

    def __call__(self, bounds: Bounds) -> int:
        self.asked.add(bounds)
        return self.setting.step_ns(bounds)


def made(seed: int, pp: int, vpp: int, joint: bool, *, method: str = "align") -> Setting:
    model = moe_model(7, shared=bool(seed % 2))
    costs = random_costs(model, seed, kinds=seed % 4, contention=0.1 * (seed % 3))
    name = "1f1b" if vpp == 1 else "interleaved-1f1b"
    template = build_template(name, pp=pp, vpp=vpp, microbatches=5, joint=joint)
    return Setting(model, costs, template, limit=0, method=method)


@settings(max_examples=8)
@given(st.integers(0, 10_000), st.sampled_from([(2, 1), (3, 1), (2, 2), (1, 1)]), st.booleans(), st.integers(0, 60))
def test_never_slower_than_the_starts_and_repeatable(
    seed: int, mesh: tuple[int, int], joint: bool, evaluations: int
) -> None:
    setting = made(seed, *mesh, joint)
    starts = all_bounds(len(setting.model.items), setting.stages)[:3]
    clock = Counted(setting)
    best = tuned(clock, starts, shortest=1, evaluations=evaluations)
    assert setting.step_ns(best) <= min(map(setting.step_ns, starts))
    assert len(clock.asked) <= evaluations + evaluations // 5 + len(starts) + 1
    assert best == tuned(setting.step_ns, starts, shortest=1, evaluations=evaluations)
    assert best[0] == 0 and best[-1] == len(setting.model.items) and list(best) == sorted(best)


def test_finds_the_best_or_nearly_so_in_a_small_space() -> None:
    ratios = []
    for seed in range(6):
        setting = made(seed, 2, 2, joint=True)
        every = [b for b in all_bounds(len(setting.model.items), 4) if all(q > p for p, q in pairwise(b))]
        start = equal_layers(setting.model, 4)
        best = tuned(setting.step_ns, [start], shortest=1, evaluations=200)
        ratios.append(setting.step_ns(best) / min(map(setting.step_ns, every)))
    assert sum(ratios) / len(ratios) < 1.01 and min(ratios) == 1


def test_memory_comes_first() -> None:
    """A slow partition that keeps the limit beats a fast one that does not."""
    setting = made(3, 2, 1, joint=False)
    every = all_bounds(len(setting.model.items), 2)
    fast = min(every, key=setting.step_ns)
    best = tuned(setting.step_ns, [fast], shortest=0, evaluations=200, excess=lambda bounds: int(bounds == fast))
    assert best != fast
    assert setting.step_ns(best) == min(setting.step_ns(bounds) for bounds in every if bounds != fast)


def test_time_that_is_up_leaves_the_best_start() -> None:
    setting = made(4, 2, 2, joint=True)
    starts = all_bounds(len(setting.model.items), 4)[5:9]
    best = tuned(setting.step_ns, starts, shortest=0, evaluations=100, out_of_time=lambda: True)
    assert best == min(starts, key=lambda bounds: (setting.step_ns(bounds), bounds))


@settings(max_examples=3)
@given(st.integers(0, 10_000))
def test_the_own_method_has_the_last_word(seed: int) -> None:
    setting = made(seed, 2, 2, joint=True, method="exact")
    start = serial_balanced(setting.model, setting.costs, setting.template.stage_ranks)
    assert start is not None
    best = step_tuned(setting, [start], evaluations=80)
    assert setting.step_ns(best) <= setting.step_ns(start)
