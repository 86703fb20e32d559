"""The front door of all methods: which is never worse than which, with contention and without."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.errors import ScheduleError
from tessera_rt.scheduler.contention import evaluate_contended
from tessera_rt.scheduler.interleave import METHODS, interleave, prove
from tessera_rt.scheduler.list_schedule import evaluate, list_schedule
from tessera_rt.tasks import TaskGraph
from tessera_rt.testing.pairs import random_pair


@given(st.integers(0, 10**6), st.booleans(), st.sampled_from((0.0, 0.15, 0.5)))
def test_better_methods_are_never_longer_under_contention(seed: int, shared: bool, contention: float) -> None:
    graph = random_pair(seed, most_layers=2, shared=shared)
    lengths = []
    for method in ("fifo", "align", "defer", "exact"):
        made = interleave(graph, "0F;1B", method=method, contention=contention, comm_sms=8)
        assert (made.key, made.comm_sms) == ("0F;1B", 8)
        assert evaluate(made.order, graph)[1] == made.makespan_ns
        lengths.append(evaluate_contended(made.order, graph, contention)[1])
    assert lengths == sorted(lengths, reverse=True)


def test_contention_changes_what_is_best() -> None:
    """Some pair has an optimum that another order beats under contention."""
    gains = []
    for seed in range(40):
        graph = random_pair(seed, most_layers=2)
        plain = interleave(graph, "0F;1B")
        chosen = interleave(graph, "0F;1B", contention=0.5)
        gains.append(evaluate_contended(plain.order, graph, 0.5)[1] - evaluate_contended(chosen.order, graph, 0.5)[1])
    assert min(gains) >= 0 < max(gains)


def test_other_methods_are_refused_by_name() -> None:
    with pytest.raises(ScheduleError, match=", ".join(METHODS)):
        interleave(TaskGraph(()), "0F", method="best")


@pytest.mark.parametrize("method", ["fifo", "megatron"])
def test_fixed_methods_stay_themselves_under_contention(method: str) -> None:
    graph = random_pair(3)
    listed = list_schedule(graph, "0F;1B", method=method)
    assert interleave(graph, "0F;1B", method=method) == listed
    assert interleave(graph, "0F;1B", method=method, contention=0.3) == listed


def test_an_empty_action_has_an_empty_order() -> None:
    for method in METHODS:
        made = interleave(TaskGraph(()), "0F", method=method, contention=0.1)
        assert (made.order, made.makespan_ns) == ((), 0)
    assert prove(TaskGraph(()), "0F").proof.optimal and prove(TaskGraph(()), "0F").gap == 0
