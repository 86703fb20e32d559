"""Which costs a pass has: by its size, and by whether it runs alone."""

from __future__ import annotations

import pytest

from tessera_rt.errors import ScheduleError
from tessera_rt.plan import Action
from tessera_rt.scheduler.part_costs import PartCosts, part_costs, small_costs
from tessera_rt.testing.costs import moe_model, uniform_costs

MODEL = moe_model(1)
COSTS = uniform_costs(MODEL, (100, 200, 40), comm_ns=30)


def test_half_the_network_time_and_a_little_more_of_compute() -> None:
    small = small_costs(COSTS)
    ns = {name: small.tasks[name].ns for name in ("F_MLP:L0", "B_MLP:L0", "W_MLP:L0", "F_DISP:L0", "F_COUNT:L0")}
    assert ns == {"F_MLP:L0": 52, "B_MLP:L0": 105, "W_MLP:L0": 21, "F_DISP:L0": 15, "F_COUNT:L0": 0}
    assert small.memory == COSTS.memory and small.contention == COSTS.contention


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0", ["small_alone"]),
        ("0F1", ["full_alone"]),
        ("0B9", ["small_alone"]),
        ("(0F1;1B0)OVERLAP_F_B", ["full", "small"]),
        ("(0F5;1I4)OVERLAP_F_B", ["full", "full"]),
        ("(1I9;0W8)OVERLAP_F_B", ["small_alone", "full_alone"]),
    ],
)
def test_the_table_of_each_pass(text: str, expected: list[str]) -> None:
    costs = PartCosts.of(MODEL, COSTS, 10, halves=True, tapered=1)
    tables = costs.tables(Action.parse(text))
    assert [next(n for n in PartCosts.__slots__ if getattr(costs, n) is table) for table in tables] == expected


def test_plain_schedules_need_none() -> None:
    rows = [[Action.parse("0F0"), Action.parse("0F1")]]
    assert part_costs(rows, MODEL, COSTS, halves=False, tapered=0) is None
    made = part_costs(rows, MODEL, COSTS, halves=False, tapered=1)
    assert made is not None and made.microbatches == 2 and made.full_alone is made.full
    with pytest.raises(ScheduleError, match="0 to 1, half of the 2"):
        part_costs(rows, MODEL, COSTS, halves=False, tapered=2)
