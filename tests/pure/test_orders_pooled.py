"""W pools: what moves, that nothing else does, and that every order with pools can run."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.errors import ScheduleError
from tessera_rt.plan import Action, ActionKind
from tessera_rt.scheduler.orders_pooled import Pool, late_room, own_room, passes_of, pending, pooled, taken_room
from tessera_rt.scheduler.templates import RULES, TEMPLATES, build_template
from tessera_rt.scheduler.validate import validate_template


def actions(text: str) -> list[Action]:
    return [Action.parse(word) for word in text.split()]


def texts(order: tuple[Action, ...]) -> str:
    return " ".join(map(str, order)).replace("OVERLAP_F_B", "")


ORDER = "0F0 (0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B 0B2"


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        (Pool(), "0F0 (0F1;0B0) (0F2;0B1) 0B2"),
        (Pool((0, 0, 0, 1)), "0F0 (0F1;0B0) (0F2;0B1) 0I2 0W2"),
        (Pool((0, 0, 1, 2)), "0F0 (0F1;0B0) (0F2;0I1) 0I2 0W1 0W2"),
        (Pool((0, 0, 1, 1)), "0F0 (0F1;0B0) (0F2;0I1) (0I2;0W1) 0W2"),
        (Pool((0, 1, 0, 0)), "0F0 (0F1;0I0) 0W0 (0F2;0B1) 0B2"),
        (Pool((0, 1, 1, 0)), "0F0 (0F1;0I0) 0W0 (0F2;0I1) 0W1 0B2"),
        (Pool((0, 1, 1, 0), beside=True), "0F0 (0F1;0I0) (0F2;0I1;0W0) 0W1 0B2"),
        (Pool((9, 9, 9, 9)), "0F0 (0F1;0I0) (0F2;0I1) 0I2 0W0 0W1 0W2"),
    ],
)
def test_by_hand(pool: Pool, expected: str) -> None:
    assert texts(pooled(actions(ORDER), pool)) == expected


def test_passes_of_one_micro_batch_do_not_run_together() -> None:
    order = actions("0F0 1F0 1B0 0B0")
    assert texts(pooled(order, Pool((0, 0, 1, 1), beside=True))) == "0F0 1F0 1I0 1W0 0I0 0W0"


def test_room_at_the_end_by_hand() -> None:
    order = actions(ORDER)
    assert [late_room(order, count) for count in (0, 1, 2, 9)] == [[0] * 4, [0, 0, 0, 1], [0, 0, 1, 2], [0, 1, 2, 3]]
    assert [late_room(order, count, steady=True) for count in (1, 2)] == [[0, 0, 0, 1], [0, 0, 1, 1]]
    split = actions("0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2")
    assert own_room(split) == late_room(split, 0) == [0, 0, 1, 1, 2, 2]
    assert late_room(split, 1) == [0, 0, 1, 1, 2, 3]
    assert texts(pooled(split, Pool(tuple(late_room(split, 1))))) == "0F0 0F1 0I0 0F2 0I1 0I2 0W0 0W1 0W2"
    assert taken_room(split, [5, 5, 5, 0, 1, 9]) == (0, 0, 1, 0, 1, 2)


def test_pending_bytes_by_hand() -> None:
    order = pooled(actions(ORDER), Pool((0, 0, 1, 1)))
    assert pending(order, [7]) == 7  # the W beside an I goes before its own comes
    assert pending(pooled(actions(ORDER), Pool((3, 3, 3, 3))), [7]) == 21
    assert pending(actions(ORDER), [7]) == 0


@pytest.mark.parametrize(("room", "field"), [((0, 0, -1, 0), r"room\[2\]"), ((0, 0, 0), "room = 3")])
def test_bad_room_is_refused(room: tuple[int, ...], field: str) -> None:
    with pytest.raises(ScheduleError, match=field):
        pooled(actions(ORDER), Pool(room))


@given(st.sampled_from(TEMPLATES), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.booleans(), st.data())
def test_every_pass_once_in_its_order(
    name: str, pp: int, vpp: int, beside: bool, joint: bool, data: st.DataObject
) -> None:
    """Whatever the room: orders that can run, with gradients summed in the order of their backwards."""
    least, most = RULES[name].vpp
    template = build_template(
        name, pp=pp, vpp=int(min(max(vpp, least), most)), microbatches=2 * pp, joint=joint or RULES[name].joint_only
    )
    rows = []
    for before in template.actions:
        count = len(passes_of(before))
        room = tuple(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
        after = pooled(before, Pool(room, beside))
        rows.append(after)
        assert passes_of(after) == passes_of(before)
        assert tuple(own_room(after)) == taken_room(before, room)
        passes = list(chain.from_iterable(action.passes for action in after))
        assert len(passes) == len(set(passes))
        place = {part: i for i, action in enumerate(after) for part in action.passes}
        done: dict[int, list[int]] = {}
        for part, at in place.items():
            if part.kind is ActionKind.I:
                weight = place[Action(ActionKind.W, part.stage, part.microbatch)]
                assert weight > at
                done.setdefault(part.stage, []).append(weight)
            elif part.kind is ActionKind.B:
                done.setdefault(part.stage, []).append(at)
        assert all(order == sorted(order) for order in done.values())  # gradients keep their order
    validate_template(replace(template, actions=tuple(rows)))
