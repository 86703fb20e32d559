"""The router by itself: precision, ties, odd logits, gradients, and the formulas of its losses and its bias rule."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tessera_rt.kernels import reference
from tessera_rt.kernels.options import RouterRule
from tessera_rt.moe.config import MoEConfig
from tessera_rt.moe.router import (
    Choice,
    TopKRouter,
    _gradient_of_logits,
    balance_gradient,
    choose,
    expert_counts,
    score_sum,
    update_choice_bias,
    z_gradient,
    z_sum,
)
from tessera_rt.testing.moe_loops import chosen_by_loop

RULES = {
    "softmax": RouterRule(top_k=2),
    "renormalised": RouterRule(top_k=3, renormalize=True, eps=0.1, scale=2.5),
    "after": RouterRule(top_k=2, softmax_after_topk=True, scale=1.5),
    "after, renormalised": RouterRule(top_k=2, softmax_after_topk=True, renormalize=True, eps=0.1),
    "sigmoid": RouterRule(top_k=2, score="sigmoid", renormalize=True, eps=1e-20, scale=2.5),
    "sigmoid groups": RouterRule(top_k=2, score="sigmoid", groups=3, keep_groups=2),
    "groups by maximum": RouterRule(top_k=2, groups=3, keep_groups=1, group_score="max"),
    "all": RouterRule(top_k=6, renormalize=True),
}


def config(experts: int, rule: RouterRule, hidden: int, **options: Any) -> MoEConfig:
    return MoEConfig(hidden=hidden, intermediate=4, experts=experts, router=rule, **options)


def random_router(
    experts: int, rule: RouterRule, hidden: int, dtype: torch.dtype = torch.float64, **options: Any
) -> TopKRouter:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        router = TopKRouter(config(experts, rule, hidden, **options), dtype=dtype)
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    return router


def double(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(experts=st.integers(1, 9), tokens=st.integers(0, 5), data=st.data())
def test_weights_and_ids_follow_the_formula(experts: int, tokens: int, data: st.DataObject) -> None:
    groups = data.draw(st.sampled_from([g for g in (1, 2, 3, 4) if experts % g == 0]))
    keep = data.draw(st.integers(1, groups))
    score = data.draw(st.sampled_from(["softmax", "sigmoid"]))
    rule = RouterRule(
        top_k=data.draw(st.integers(1, keep * (experts // groups))),
        score=score,
        softmax_after_topk=score == "softmax" and data.draw(st.booleans()),
        renormalize=data.draw(st.booleans()),
        scale=data.draw(st.sampled_from([1.0, 2.5])),
        groups=groups,
        keep_groups=keep,
        group_score=data.draw(st.sampled_from(["top2", "max"])),
    )
    bias = double(experts, seed=3) if data.draw(st.booleans()) else None
    logits = double(tokens, experts)
    ids, weights = choose(logits, rule, bias=bias)
    assert weights.shape == ids.shape == (tokens, rule.top_k)
    for t in range(tokens):
        best, expected = chosen_by_loop(logits[t], rule, bias)
        assert ids[t].tolist() == best
        torch.testing.assert_close(weights[t], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("rule", RULES)
def test_the_written_gradient_is_that_of_autograd(rule: str) -> None:
    logits = double(7, 6).requires_grad_()
    mask = torch.tensor([True, True, False, True, True, False, True])
    bias = double(6, seed=3) if "groups" in rule else None
    assert torch.autograd.gradcheck(lambda x: choose(x, RULES[rule], bias=bias)[1], (logits,))
    ids, weights = choose(logits, RULES[rule], mask=mask)
    upstream = double(*weights.shape, seed=2)
    (gradient,) = torch.autograd.grad(weights, logits, upstream)
    torch.testing.assert_close(
        gradient, reference.topk_backward(upstream, logits, ids, RULES[rule]), rtol=1e-11, atol=1e-13
    )
    assert (gradient[~mask] == 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_choices_that_are_absent_get_no_gradient(rule: str) -> None:
    """Ids outside 0 .. E - 1 beside others of the same token: as the kernels, and their reference."""
    logits, top_k = double(4, 6), RULES[rule].top_k
    ids, _ = choose(logits, RULES[rule])
    ids[0, 0], ids[1, -1], ids[2] = -1, 6, -1
    upstream = double(4, top_k, seed=2)
    torch.testing.assert_close(
        _gradient_of_logits(upstream, logits, ids, RULES[rule]),
        reference.topk_backward(upstream, logits, ids, RULES[rule]),
        rtol=1e-11, atol=1e-13,
    )  # fmt: skip


def test_gradients_reach_router_bias_and_input() -> None:
    router = random_router(5, RouterRule(top_k=2), 3, router_bias=True)

    def outputs(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        choice = torch.func.functional_call(router, {"weight": weight, "bias": bias}, (x,))
        return choice.weights, score_sum(choice, router.rule), z_sum(choice)

    leaves = (double(4, 3), *(p.detach().clone() for p in router.parameters()))
    assert torch.autograd.gradcheck(outputs, tuple(leaf.requires_grad_() for leaf in leaves))


def test_scores_are_computed_in_fp32_for_low_precision_inputs() -> None:
    router = random_router(4, RouterRule(top_k=2), 64, torch.bfloat16, choice_bias=True)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    choice = router(x)
    exact = random_router(4, RouterRule(top_k=2), 64, torch.float32)
    exact.weight.data.copy_(router.weight)
    assert choice.weights.dtype == choice.logits.dtype == torch.float32
    assert router.choice_bias is not None and router.choice_bias.dtype == torch.float32
    assert torch.equal(choice.weights, exact(x.float()).weights)
    assert (
        random_router(4, RouterRule(top_k=2), 8)(torch.zeros(1, 8, dtype=torch.float64)).weights.dtype == torch.float64
    )


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
    ids, weights = choose(torch.tensor([row] * 3, dtype=torch.float64), RouterRule(top_k=top_k))
    for chosen in ids.tolist():
        assert len(set(chosen)) == top_k and all(0 <= e < 8 for e in chosen)
        best = [e for e in range(8) if row[e] == INF]
        assert set(best[:top_k]) <= set(chosen) or len(best) > top_k
    if all(map(math.isfinite, row)):
        assert weights.isfinite().all()


def test_ties_go_to_the_lowest_ids_in_any_batch() -> None:
    logits = torch.zeros(50, 200, dtype=torch.float64)  # so many experts that an unstable sort would show
    ids, _ = choose(logits, RouterRule(top_k=3))
    assert torch.equal(ids, torch.tensor([[0, 1, 2]], dtype=torch.int32).expand(50, 3))


def test_a_finite_row_beside_a_nan_row_is_untouched() -> None:
    ids, weights = choose(torch.tensor([[NAN] * 4, [1.0, 3.0, 2.0, 0.0]]), RouterRule(top_k=2))
    assert weights[0].isnan().all()  # stays visible: nothing hides a broken token
    assert ids[1].tolist() == [1, 2] and weights[1].isfinite().all()


@pytest.mark.parametrize("rule", [RouterRule(top_k=1, renormalize=True), RouterRule(top_k=1, softmax_after_topk=True)])
def test_one_expert_with_renormalisation_warns_and_weighs_exactly_one(rule: RouterRule) -> None:
    with pytest.warns(UserWarning, match="learns nothing"):
        made = TopKRouter(config(4, rule, 6))
    torch.nn.init.normal_(made.weight)
    choice = made(torch.randn(7, 6))
    assert choice.weights.shape == choice.ids.shape == (7, 1)
    assert torch.equal(choice.weights, torch.ones(7, 1))


def test_masked_tokens_are_not_routed_and_do_not_count() -> None:
    router = random_router(5, RouterRule(top_k=2), 3)
    mask = torch.tensor([True, False, True, True, False, True])
    x = double(6, 3)
    masked, alone = router(x, mask), router(x[mask])
    assert torch.equal(masked.ids[mask], alone.ids)
    # A library product of fewer rows may sum in another order.
    torch.testing.assert_close(masked.weights[mask], alone.weights, rtol=1e-14, atol=0)
    assert (masked.ids[~mask] == -1).all() and (masked.weights[~mask] == 0).all()
    for total in (lambda c, m: score_sum(c, router.rule, m), z_sum):
        torch.testing.assert_close(total(masked, mask), total(alone, None), rtol=1e-14, atol=0)
    assert torch.equal(expert_counts(masked.ids, 5), expert_counts(alone.ids, 5))


def test_balance_loss_follows_its_formula() -> None:
    counts = torch.tensor([[[3, 0, 1]], [[2, 1, 1]]])  # dp 2, ep 1, E 3; K 2: 4 tokens
    scores = torch.tensor([1.0, 0.5, 0.5], dtype=torch.float64)
    gradient = balance_gradient(scores, counts, coefficient=0.1, top_k=2, aux_scale=0.25)
    expected = [0.1 * 0.25 * 3 * count / 8 / 4 for count in (5, 1, 2)]
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)
    # Balanced counts and scores give the coefficient itself.
    even = balance_gradient(torch.ones(3), torch.tensor([2, 2, 2]), coefficient=0.1, top_k=2, aux_scale=1.0)
    assert float(even.sum()) == pytest.approx(0.1)
    nothing = balance_gradient(scores, torch.zeros(1, 1, 3, dtype=torch.int64), 0.1, 2, 1.0)
    assert torch.equal(nothing, torch.zeros(3, dtype=torch.float64))


def test_z_loss_and_scores_follow_their_formulas() -> None:
    logits = double(4, 3)
    choice = Choice(logits, torch.zeros(4, 2, dtype=torch.int64), logits)
    squares = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits.tolist())
    assert float(z_sum(choice)) == pytest.approx(squares, rel=1e-12)
    gradient = z_gradient(z_sum(choice), torch.tensor([[[5, 1, 2]]]), coefficient=0.01, top_k=2, aux_scale=0.5)
    assert float(gradient) == pytest.approx(0.01 * 0.5 / 4, rel=1e-12)
    for score in ("softmax", "sigmoid"):
        total = score_sum(choice, RouterRule(top_k=2, score=score))
        assert float(total.sum()) == pytest.approx(4.0, rel=1e-12)  # one for each token


def test_the_bias_moves_by_the_rate_against_the_load() -> None:
    bias = torch.tensor([0.5, 0.0, 0.0, -0.25])
    update_choice_bias(bias, torch.tensor([7, 1, 4, 4]), 0.125)
    assert bias.tolist() == [0.375, 0.125, 0.0, -0.25]


def test_counts_ignore_what_is_not_routed() -> None:
    ids = torch.tensor([[0, 2], [-1, 5], [2, 4]])
    assert expert_counts(ids, 4).tolist() == [1, 0, 2, 0]
    assert expert_counts(torch.zeros(0, 2, dtype=torch.int32), 3).tolist() == [0, 0, 0]
