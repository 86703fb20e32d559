"""Candidates: windows around partitions, only ranges that lead somewhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.errors import PlanError
from tessera_rt.planner.candidates import candidates, check_bounds, ranges
from tessera_rt.testing.partitions import all_bounds


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 3), st.data())
def test_the_window_holds_exactly_the_partitions_near_the_center(
    items: int, stages: int, window: int, data: st.DataObject
) -> None:
    center = data.draw(st.sampled_from(all_bounds(items, stages)))
    cands = candidates(items, stages, [center], window=window)
    near = [
        bounds
        for bounds in all_bounds(items, stages)
        if all(abs(b - c) <= window for b, c in zip(bounds, center, strict=True))
    ]
    assert [bounds for bounds in all_bounds(items, stages, shortest=0) if cands.allows(bounds)] == near
    for s, own in enumerate(cands.ranges):
        assert set(own) == {ranges(bounds)[s] for bounds in near}, "no range without a complete partition"


@given(st.integers(1, 7), st.integers(1, 4))
def test_free_candidates_hold_every_partition(items: int, stages: int) -> None:
    cands = candidates(items, stages, window=None)
    assert all(map(cands.allows, all_bounds(items, stages)))


def test_a_center_with_an_empty_stage_stays_possible() -> None:
    center = (0, 3, 3, 8)
    assert candidates(8, 3, [center], window=0).allows(center)
    near = candidates(8, 3, [center], window=1)
    assert near.allows(center) and near.allows((0, 2, 4, 8))
    assert not near.allows((0, 2, 2, 8)), "planned stages hold an item"


def test_dropping_a_range_drops_what_depended_on_it() -> None:
    cands = candidates(4, 2, window=None)
    left = cands.without([(0, (0, 1))])
    assert not left.allows((0, 1, 4)) and left.allows((0, 2, 4))
    assert (1, 4) not in left.ranges[1]


@pytest.mark.parametrize("bounds", [(0, 5), (0, 3, 4), (1, 3, 5), (0, 6, 5), ()])
def test_bounds_that_are_no_partition_are_refused(bounds: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="bounds"):
        check_bounds(bounds, items=5, stages=2)
    assert check_bounds([0, 2, 5], items=5, stages=2) == (0, 2, 5)
