"""W pools: what moves, that nothing else does, and that every order with pools can run."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.errors import ScheduleError
from tessera_rt.plan import Action, ActionKind
from tessera_rt.scheduler.orders_pooled import Pool, pending, pooled
from tessera_rt.scheduler.templates import RULES, TEMPLATES, build_template


def actions(text: str) -> list[Action]:
    return [Action.parse(word) for word in text.split()]


def texts(order: tuple[Action, ...]) -> str:
    return " ".join(map(str, order)).replace("OVERLAP_F_B", "")


ORDER = "0F0 (0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B 0B2"


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        (Pool(), "0F0 (0F1;0B0) (0F2;0B1) 0B2"),
        (Pool(1), "0F0 (0F1;0B0) (0F2;0B1) 0I2 0W2"),
        (Pool(2), "0F0 (0F1;0B0) (0F2;0I1) 0I2 0W1 0W2"),
        (Pool(2, beside=True), "0F0 (0F1;0B0) (0F2;0I1) (0I2;0W1) 0W2"),
        (Pool(99), "0F0 (0F1;0I0) (0F2;0I1) 0I2 0W0 0W1 0W2"),
    ],
)
def test_by_hand(pool: Pool, expected: str) -> None:
    assert texts(pooled(actions(ORDER), pool)) == expected


def test_w_of_the_order_itself_stay_until_the_pool_opens() -> None:
    order = actions("0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2")
    assert texts(pooled(order, Pool(1))) == "0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2"
    assert texts(pooled(order, Pool(1, beside=True))) == "0F0 0F1 0I0 0F2 0I1 0W0 (0I2;0W1) 0W2"
    assert texts(pooled(order, Pool(2))) == "0F0 0F1 0I0 0F2 0I1 0I2 0W0 0W1 0W2"


def test_pending_bytes_by_hand() -> None:
    order = pooled(actions(ORDER), Pool(2, beside=True))
    assert pending(order, [7]) == 7  # the W beside an I goes before its own comes
    assert pending(pooled(actions(ORDER), Pool(3)), [7]) == 21
    assert pending(actions(ORDER), [7]) == 0


def test_a_negative_pool_is_refused() -> None:
    with pytest.raises(ScheduleError, match="deferred"):
        pooled([], Pool(-1))


@given(
    st.sampled_from(TEMPLATES), st.integers(1, 4), st.integers(1, 3), st.integers(0, 40), st.booleans(), st.booleans()
)
def test_every_pass_once_in_its_order(name: str, pp: int, vpp: int, deferred: int, beside: bool, joint: bool) -> None:
    least, most = RULES[name].vpp
    template = build_template(
        name, pp=pp, vpp=int(min(max(vpp, least), most)), microbatches=2 * pp, joint=joint or RULES[name].joint_only
    )
    for before in template.actions:
        after = pooled(before, Pool(deferred, beside))
        passes = list(chain.from_iterable(action.passes for action in after))
        assert len(passes) == len(set(passes))
        old = list(chain.from_iterable(action.passes for action in before))
        for kinds in ((ActionKind.F,), (ActionKind.B, ActionKind.I)):
            assert [(p.stage, p.microbatch) for p in passes if p.kind in kinds] == [
                (p.stage, p.microbatch) for p in old if p.kind in kinds
            ]
        place = {part: i for i, action in enumerate(after) for part in action.passes}
        done: dict[int, list[int]] = {}
        for part, at in place.items():
            if part.kind is ActionKind.I:
                weight = place[Action(ActionKind.W, part.stage, part.microbatch)]
                assert weight > at
                done.setdefault(part.stage, []).append(weight)
            elif part.kind is ActionKind.B:
                assert not deferred or part not in passes[-deferred:]
                done.setdefault(part.stage, []).append(at)
        assert all(order == sorted(order) for order in done.values())  # gradients keep their order
        assert sum(action.kind is ActionKind.OVERLAP for action in after) >= sum(
            action.kind is ActionKind.OVERLAP for action in before
        )
