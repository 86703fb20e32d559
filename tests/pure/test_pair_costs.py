"""Post-overlap costs of pairs: bounds, reuse by equal items, measured figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.errors import CostError
from tessera_rt.plan import Action, ActionKind
from tessera_rt.planner.overlap_graph import cost_edges
from tessera_rt.planner.pair_costs import PairCosts, pair_key
from tessera_rt.scheduler.graphs import action_graph, chunk_graph
from tessera_rt.scheduler.interleave import interleave
from tessera_rt.scheduler.list_schedule import list_schedule
from tessera_rt.scheduler.templates import build_template
from tessera_rt.scheduler.validate import validate
from tessera_rt.tasks import Pass
from tessera_rt.testing.costs import dense_model, moe_model, uniform_costs
from tessera_rt.testing.random_costs import random_costs

MODEL = moe_model(6, dense_first=1, shared=True)
RANGE = st.tuples(st.integers(0, 8), st.integers(0, 8)).map(lambda r: (min(r), max(r)))


@given(st.integers(0, 10_000), RANGE, RANGE)
def test_a_pair_costs_what_list_scheduling_says_and_stays_within_its_limits(
    seed: int, forward: tuple[int, int], backward: tuple[int, int]
) -> None:
    costs = random_costs(MODEL, seed, kinds=2)
    pairs = PairCosts(MODEL, costs, method="align")
    action = Action.parse("(0F1;1B0)OVERLAP_F_B")
    graph = action_graph(action.key, MODEL, costs, [forward, backward])
    alone = [chunk_graph(MODEL, costs, *c, p).total_ns() for c, p in ((forward, Pass.F), (backward, Pass.B))]
    cost = pairs.pair(forward, backward)
    assert cost == list_schedule(graph, action.key).makespan_ns
    assert max(pairs.solo(ActionKind.F, forward), 0) <= sum(alone) and cost <= sum(alone)
    made = pairs.interleaving(action, [forward, backward])
    validate(made, graph)
    assert (made.key, made.makespan_ns) == ("0F;1B", cost)
    edge = cost_edges(build_template("1f1b", pp=1, vpp=1, microbatches=4, joint=True))[0]
    least, most = pairs.limits(edge, [forward], [backward])
    assert least[0, 0] <= cost <= most[0, 0]
    # Outputs of both passes lie within the action; without contention the length is the makespan.
    length, outputs = pairs.timing(action, [forward, backward])
    assert length == cost and all(0 <= output <= length for output in outputs)


def test_chunks_of_equal_items_are_scheduled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(args)
        return interleave(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("tessera_rt.planner.pair_costs.interleave", counted)
    model = moe_model(12)
    pairs = PairCosts(model, uniform_costs(model, comm_ns=7))
    costs = {pairs.pair((i, i + 2), (j, j + 3)) for i in range(1, 10) for j in range(1, 9)}
    assert len(costs) == 1
    assert len(calls) == 1
    names = pairs.interleaving(Action.parse("(0F1;1B0)OVERLAP_F_B"), [(3, 5), (8, 11)]).order
    assert {name.partition(":")[2] for name in names} == {"L2", "L3", "L7", "L8", "L9"}


def test_a_measured_pair_replaces_the_scheduled_one_if_it_is_possible() -> None:
    costs = uniform_costs(MODEL, comm_ns=7)
    forward, backward = (1, 3), (3, 5)
    graph = action_graph("0F;1B", MODEL, costs, [forward, backward])
    scheduled = PairCosts(MODEL, costs, method="align").pair(forward, backward)
    measured = replace(costs, pairs={pair_key(graph): scheduled + 1})
    assert PairCosts(MODEL, measured).pair(forward, backward) == scheduled + 1
    impossible = replace(costs, pairs={pair_key(graph): graph.total_ns() + 1})
    with pytest.raises(CostError, match="measure this pair again"):
        PairCosts(MODEL, impossible).pair(forward, backward)


def test_better_methods_cost_no_more() -> None:
    forward, backward = (2, 5), (3, 6)
    gains = []
    for seed in range(14, 20):
        costs = random_costs(MODEL, seed)
        align, defer, exact = (
            PairCosts(MODEL, costs, method=method).pair(forward, backward) for method in ("align", "defer", "exact")
        )
        assert align >= defer >= exact
        gains.append(align - exact)
    assert max(gains) > 0


def test_contention_stretches_the_estimate_by_the_overlap_only() -> None:
    action = Action.parse("(0F1;1B0)OVERLAP_F_B")
    chunks = [(1, 3), (3, 5)]
    model = moe_model(6)
    plain = uniform_costs(model, comm_ns=7)
    calm, _ = PairCosts(model, plain).timing(action, chunks)
    slow, _ = PairCosts(model, replace(plain, contention=0.5)).timing(action, chunks)
    busy = 8 * 7  # all communication of two layers' F and two layers' B, at most all of it hidden
    assert calm < slow <= calm + busy // 2
    dense = dense_model(6)
    alone = uniform_costs(dense)
    assert PairCosts(dense, replace(alone, contention=0.5)).timing(action, chunks) == PairCosts(dense, alone).timing(
        action, chunks
    )
