"""The router against the formulas written per token, on odd inputs, and the kinds it refuses."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tessera_rt.errors import SpecError
from tessera_rt.model_spec import FeedForward, FeedForwardKind, Router
from tessera_rt.moe.router import Choice, TopKRouter, balance_gradient


def moe(experts: int, top_k: int, **router: object) -> FeedForward:
    kind = FeedForwardKind.MOE
    return FeedForward(kind=kind, intermediate=4, experts=experts, top_k=top_k, router=Router(**router))  # type: ignore[arg-type]


def random_router(spec: FeedForward, hidden: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> TopKRouter:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        router = TopKRouter(hidden, spec, dtype=dtype)
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(seed))
    return router


def of_logits(logits: Tensor, top_k: int, **router: object) -> Choice:
    """What a router chooses for given logits: its weight is the identity."""
    made = random_router(moe(logits.shape[1], top_k, **router), logits.shape[1], dtype=logits.dtype)
    torch.nn.init.eye_(made.weight)
    return made(logits)


@given(
    experts=st.integers(1, 9),
    tokens=st.integers(0, 5),
    data=st.data(),
    renormalize=st.booleans(),
    after=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
)
def test_weights_and_ids_follow_the_formula(
    experts: int, tokens: int, data: st.DataObject, renormalize: bool, after: bool, scale: float
) -> None:
    top_k = data.draw(st.integers(1, experts))
    spec = moe(experts, top_k, renormalize=renormalize, softmax_after_topk=after, scale=scale)
    router = random_router(spec, 6)
    x = torch.randn(tokens, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    choice = router(x)
    assert choice.weights.shape == choice.ids.shape == (tokens, top_k)
    probability_sum = torch.zeros(experts, dtype=torch.float64)
    for t in range(tokens):
        logits = [(router.weight[e] @ x[t]).item() for e in range(experts)]
        probabilities = torch.tensor(logits, dtype=torch.float64).softmax(0)
        probability_sum += probabilities
        best = sorted(range(experts), key=lambda e: -logits[e])[:top_k]
        assert choice.ids[t].tolist() == best
        expected = probabilities[best]
        if after:
            expected = torch.tensor(logits, dtype=torch.float64)[best].softmax(0)
        elif renormalize:
            expected = expected / expected.sum()
        torch.testing.assert_close(choice.weights[t], scale * expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(choice.prob_sum, probability_sum, rtol=1e-12, atol=1e-15)


def test_scores_are_computed_in_fp32_for_low_precision_inputs() -> None:
    router = random_router(moe(4, 2), 64, dtype=torch.bfloat16)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    choice = router(x)
    exact = random_router(moe(4, 2), 64, dtype=torch.float32)
    exact.weight.data.copy_(router.weight)
    assert choice.weights.dtype == choice.prob_sum.dtype == torch.float32
    assert torch.equal(choice.weights, exact(x.float()).weights)
    assert random_router(moe(4, 2), 8)(torch.zeros(1, 8, dtype=torch.float64)).weights.dtype == torch.float64


def test_gradients_reach_router_and_input() -> None:
    router = random_router(moe(5, 2, renormalize=False), 3)
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def outputs(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        choice = torch.func.functional_call(router, {"weight": weight}, (x,))
        return choice.weights, choice.prob_sum

    assert torch.autograd.gradcheck(outputs, (x, router.weight.detach().clone().requires_grad_()))


INF, NAN = float("inf"), float("nan")
ODD_ROWS = {
    "all NaN": [NAN] * 8,
    "all equal": [0.5] * 8,
    "one finite": [-INF] * 3 + [1.0] + [-INF] * 4,
    "all -inf": [-INF] * 8,
    "+inf twice": [0.0, INF, 1.0, 2.0, INF, 0.0, 0.0, 0.0],
    "one NaN": [0.0, 1.0, NAN, 3.0, 0.0, 0.0, 0.0, 0.0],
}


@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("row", ODD_ROWS.values(), ids=ODD_ROWS.keys())
def test_ids_are_distinct_and_in_range_whatever_the_logits(row: list[float], top_k: int) -> None:
    # The identity as weight would turn inf into NaN (0 * inf): feed the logits in by a router of width 1 per row.
    router = random_router(moe(8, top_k, renormalize=False), 1)
    router.weight.data = torch.tensor(row, dtype=torch.float64).unsqueeze(1)
    choice = router(torch.ones(3, 1, dtype=torch.float64))
    for ids in choice.ids.tolist():
        assert len(set(ids)) == top_k and all(0 <= e < 8 for e in ids)
        best = [e for e in range(8) if row[e] == INF]
        assert set(best[:top_k]) <= set(ids) or len(best) > top_k
    if all(map(math.isfinite, row)):
        assert choice.weights.isfinite().all()


def test_ties_go_to_the_lowest_ids_in_any_batch() -> None:
    logits = torch.zeros(50, 200, dtype=torch.float64)  # so many experts that an unstable sort would show
    assert torch.equal(of_logits(logits, 3).ids, torch.tensor([[0, 1, 2]]).expand(50, 3))


def test_a_finite_row_beside_a_nan_row_is_untouched() -> None:
    logits = torch.tensor([[NAN] * 4, [1.0, 3.0, 2.0, 0.0]], dtype=torch.float64)
    choice = of_logits(logits, 2)
    assert choice.weights[0].isnan().all()  # stays visible: nothing hides a broken token
    assert choice.ids[1].tolist() == [1, 2] and choice.weights[1].isfinite().all()


@pytest.mark.parametrize("router", [{"renormalize": True}, {"renormalize": False, "softmax_after_topk": True}])
def test_one_expert_with_renormalisation_warns_and_weighs_exactly_one(router: dict[str, bool]) -> None:
    with pytest.warns(UserWarning, match="learns nothing"):
        made = TopKRouter(6, moe(4, 1, **router))
    torch.nn.init.normal_(made.weight)
    choice = made(torch.randn(7, 6))
    assert choice.weights.shape == choice.ids.shape == (7, 1)
    assert torch.equal(choice.weights, torch.ones(7, 1))


def test_one_expert_without_renormalisation_learns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        router = TopKRouter(6, moe(4, 1, renormalize=False))
    torch.nn.init.normal_(router.weight)
    router(torch.randn(7, 6)).weights.sum().backward()
    assert router.weight.grad is not None and (router.weight.grad != 0).any()


def test_masked_tokens_are_not_routed_and_do_not_count() -> None:
    router = random_router(moe(5, 2), 3)
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([True, False, True, True, False, True])
    masked, alone = router(x, mask), router(x[mask])
    assert torch.equal(masked.ids[mask], alone.ids) and torch.equal(masked.weights[mask], alone.weights)
    assert (masked.ids[~mask] == 5).all() and (masked.weights[~mask] == 0).all()
    torch.testing.assert_close(masked.prob_sum, alone.prob_sum, rtol=1e-14, atol=0)


def test_balance_loss_follows_its_formula() -> None:
    counts = torch.tensor([[[3, 0, 1]], [[2, 1, 1]]])  # dp 2, ep 1, E 3; K 2: 4 tokens
    prob_sum = torch.tensor([1.0, 0.5, 0.5], dtype=torch.float64)
    gradient = balance_gradient(prob_sum, counts, coefficient=0.1, top_k=2, aux_scale=0.25)
    expected = [0.1 * 0.25 * 3 * count / 8 / 4 for count in (5, 1, 2)]
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)
    # Balanced counts and probabilities give the coefficient itself.
    even = balance_gradient(torch.ones(3), torch.tensor([2, 2, 2]), coefficient=0.1, top_k=2, aux_scale=1.0)
    assert float(even.sum()) == pytest.approx(0.1)
    nothing = balance_gradient(prob_sum, torch.zeros(1, 1, 3, dtype=torch.int64), 0.1, 2, 1.0)
    assert torch.equal(nothing, torch.zeros(3, dtype=torch.float64))


def test_all_unsupported_parts_are_named_at_once() -> None:
    spec = moe(4, 5, score="sigmoid", choice_bias=True, groups=2, scale=float("nan"), aux_coefficient=-1.0)
    with pytest.raises(SpecError) as caught:
        TopKRouter(6, spec)
    fields = {problem.field for problem in caught.value.problems}
    assert fields == {
        "top_k",
        "router.score",
        "router.choice_bias",
        "router.groups, keep_groups",
        "router.scale",
        "router.aux_coefficient",
    }
    with pytest.raises(SpecError, match="experts"):
        TopKRouter(6, replace(moe(1, 1), experts=0, top_k=0))
