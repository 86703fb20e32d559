"""The hand-made cost tables that other tests stand on."""

from __future__ import annotations

import pytest

from tessera_rt.costs import ItemMemory
from tessera_rt.errors import CostError
from tessera_rt.tasks import Pass, Resource, chunk_tasks
from tessera_rt.testing.costs import dense_model, item_costs, moe_model, uniform_costs


def test_an_items_time_is_the_sum_of_its_tasks() -> None:
    model = moe_model(2, dense_first=1, mtp=1, shared=True)
    times = {"EMBED": (1, 2, 3), "L0": (4, 5, 6), "L1": (7, 8, 9), "M0": (10, 11, 12), "HEAD": (13, 14, 15)}
    costs = item_costs(model, times, {"L1": ItemMemory(weights=5)}, comm_ns=100, count_ns=1, comm_bytes=7)
    for item in model.items:
        f_ns, b_ns, w_ns = times[item.label]
        forward = costs.apply(chunk_tasks([item], Pass.F))
        backward = costs.apply(chunk_tasks([item], Pass.B))
        assert forward.total_ns(Resource.COMP) == f_ns
        assert backward.total_ns(Resource.COMP) == b_ns + w_ns
        assert sum(task.ns for task in backward.tasks if task.pass_ is Pass.W) == (0 if item.label == "EMBED" else w_ns)
        moe = item.label in ("L1", "M0")
        assert forward.total_ns(Resource.COMM) == (201 if moe else 0)
        assert backward.total_ns(Resource.COMM) == (200 if moe else 0)
    assert costs.tasks["F_DISP:L1"].bytes == 7 and costs.tasks["F_COUNT:L1"].bytes == 0
    assert costs.memory["L1"].weights == 5 and costs.memory["L0"] == ItemMemory()


def test_uniform_costs_leave_the_ends_free() -> None:
    costs = uniform_costs(dense_model(3, mtp=1), (1, 2, 3), memory=ItemMemory(activations=4))
    assert costs.tasks["F_MLP:L2"].ns == costs.tasks["F_MLP:M0"].ns == 1 and costs.tasks["F_HEAD"].ns == 0
    assert costs.memory["L0"].activations == 4 and costs.memory["EMBED"].activations == 0


def test_unknown_labels_are_refused() -> None:
    with pytest.raises(CostError) as error:
        item_costs(dense_model(1), {"L1": (1, 1, 1)}, {"M0": ItemMemory()})
    assert {problem.field for problem in error.value.problems} == {"times.L1", "memory.M0"}
