"""Routing kernels: choice and its backward against the reference, placement and tile tables by invariants."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tessera_rt.errors import SpecError
from tessera_rt.kernels import reference, routing
from tessera_rt.kernels.options import RouterRule
from tessera_rt.testing.interpreter import launches
from tessera_rt.testing.kernel_checks import assert_near, offsets_of, poisoned_memory, random_ids
from tessera_rt.testing.moe_loops import chosen_by_loop

pytestmark = pytest.mark.usefixtures("interpreted")

# (experts, rule, choice bias): the router kinds R1 to R6 of released models, and expert counts that are no power of two
RULES = {
    "R1": (128, RouterRule(top_k=8, renormalize=True), False),
    "R1-plain": (60, RouterRule(top_k=4), False),
    "R2": (32, RouterRule(top_k=4, softmax_after_topk=True), False),
    "R3": (
        256,
        RouterRule(top_k=8, score="sigmoid", renormalize=True, eps=1e-20, scale=2.5, groups=8, keep_groups=4),
        True,
    ),
    "R4": (24, RouterRule(top_k=3, score="sigmoid", renormalize=True), True),
    "R5": (160, RouterRule(top_k=6, groups=8, keep_groups=3, group_score="max", scale=16.0), False),
    "R6": (64, RouterRule(top_k=6, renormalize=True, eps=1e-12), True),
    "one-of-one": (1, RouterRule(top_k=1), False),
    "all": (7, RouterRule(top_k=7, score="sigmoid", renormalize=True), False),
    "groups-of-one": (6, RouterRule(top_k=2, groups=6, keep_groups=3), True),
    "512": (512, RouterRule(top_k=10, renormalize=True), False),
    "1000": (1000, RouterRule(top_k=3, renormalize=True), True),
    "1024": (1024, RouterRule(top_k=4, score="sigmoid", groups=4, keep_groups=2), False),
}


def _logits(tokens: int, experts: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", RULES)
def test_topk_and_its_backward(name: str) -> None:
    experts, rule, biased = RULES[name]
    logits = _logits(9, experts)
    bias = _logits(1, experts, 1)[0] * 0.1 if biased else None
    mask = torch.arange(9) != 4
    with poisoned_memory(), launches() as log:
        ids, weights = routing.topk(logits, rule, bias=bias, mask=mask)
        grad = _logits(9, rule.top_k, 2)
        d_logits = routing.topk_backward(grad, logits, ids, rule)
    assert [launch.kernel for launch in log] == ["topk_forward_kernel", "topk_backward_kernel"]
    want_ids, want_weights = reference.topk(logits, rule, bias=bias, mask=mask)
    assert torch.equal(ids, want_ids)
    assert_near("weights", weights, want_weights, ratio=1e-6)
    want = reference.topk_backward(grad.double(), logits.double(), ids, rule)
    torch.testing.assert_close(d_logits.double(), want, atol=1e-6 * rule.scale, rtol=1e-4)
    assert (ids[4] == -1).all() and not weights[4].any() and not d_logits[4].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_of_any_strides(dtype: torch.dtype) -> None:
    rule = RouterRule(top_k=3, renormalize=True)
    base = _logits(20, 40).to(dtype)
    for logits in (base.mT, base[::2], base[:, 3:20], base[:1].expand(5, 40)):
        ids, weights = routing.topk(logits, rule)
        want_ids, want_weights = reference.topk(logits, rule)
        assert torch.equal(ids, want_ids)
        assert_near("weights", weights, want_weights, ratio=1e-6)
        grad = torch.ones(1, 1).expand(logits.shape[0], 3)
        got = routing.topk_backward(grad, logits, ids, rule)
        assert got.dtype == dtype
        torch.testing.assert_close(got, reference.topk_backward(grad, logits, ids, rule), atol=1e-2, rtol=1e-2)


def test_bias_and_mask_of_any_strides() -> None:
    logits, rule = _logits(6, 10), RouterRule(top_k=3)
    table, masks = _logits(10, 2, 1), torch.tensor([[True, False], [False, True]] * 3)
    for bias, mask in (
        (table[:, 1], masks[:, 0]),
        (table[:1, 0].expand(10), masks[1, :1].expand(6)),
        (table[:, 0], None),
    ):
        want = reference.topk(logits, rule, bias=bias, mask=mask)
        ids, weights = routing.topk(logits, rule, bias=bias, mask=mask)
        assert torch.equal(ids, want[0])
        torch.testing.assert_close(weights, want[1])


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_odd_values_give_distinct_ids_in_range() -> None:
    """Case 61: all NaN; all equal; one finite, the rest -inf; +inf twice; and zeros of both signs, mixed NaN."""
    inf, nan = torch.inf, torch.nan
    rows = [
        [nan] * 8, [1.5] * 8, [-inf, -inf, -inf, 2.0, -inf, -inf, -inf, -inf], [0.0, inf, 1.0, inf, 0, 0, 0, 0],
        [-inf] * 8, [0.0, -0.0] * 4, [1.0, nan, inf, nan, 0, 0, 0, 0], [-nan, 3.0, -nan, 0, 0, 0, 0, 0],
    ]  # fmt: skip
    logits = torch.tensor(rows)
    for rule in (RouterRule(top_k=2), RouterRule(top_k=8), RouterRule(top_k=2, score="sigmoid")):
        ids, weights = routing.topk(logits, rule)
        want_ids, want_weights = reference.topk(logits, rule)
        assert torch.equal(ids, want_ids)
        assert ((ids >= 0) & (ids < 8)).all() and all(len(set(row)) == len(row) for row in ids.tolist())
        torch.testing.assert_close(weights, want_weights, equal_nan=True)
    assert weights[0].isnan().all(), "a weight made from NaN must not look like a number"


ODD_VALUES = (torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, 1.0, 2.0)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("group_score", ["top2", "max"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [1, 3, 4])
def test_odd_values_in_groups(groups: int, score: str, group_score: str) -> None:
    """Random rows of NaN, infinities, zeros of both signs and ties, with a choice bias of the same kind."""
    generator = torch.Generator()
    generator.seed()
    values = torch.tensor(ODD_VALUES)
    logits = values[torch.randint(0, 8, (24, 12), generator=generator)]
    logits[0], logits[1] = torch.nan, -torch.inf
    bias = values[torch.randint(0, 8, (12,), generator=generator)]
    top_k = 4 if groups == 3 else 5
    rule = RouterRule(top_k=top_k, score=score, groups=groups, keep_groups=max(1, groups - 2), group_score=group_score)
    for added in (None, bias):
        ids, _ = routing.topk(logits, rule, bias=added)
        want, _ = reference.topk(logits, rule, bias=added)
        # exp and its sum differ in the last place, and with it which of two equal softmax scores is larger.
        exact = score == "sigmoid" or rule.chooses_by_logits(added is not None)
        assert not exact or torch.equal(ids, want), (logits, added)
        assert ((ids >= 0) & (ids < 12)).all() and all(len(set(row)) == top_k for row in ids.tolist())


@pytest.mark.parametrize(
    "rule",
    [
        RouterRule(top_k=3, score=score, renormalize=renormalize, scale=scale, groups=groups, softmax_after_topk=after)
        for score, after in [("softmax", False), ("softmax", True), ("sigmoid", False)]
        for renormalize, scale, groups in itertools.product([False, True], [1.0, 2.5], [1, 2])
    ],
    ids=str,
)
def test_every_combination_of_options_is_that_of_a_loop(rule: RouterRule) -> None:
    """Case 64: the choice, its weights and their gradient, with and without a bias for the choice only."""
    logits, grad = _logits(5, 10) * 2, _logits(5, 3, 1)
    for bias in (None, _logits(1, 10, 2)[0]):
        ids, weights = routing.topk(logits, rule, bias=bias)
        got = routing.topk_backward(grad, logits, ids, rule)
        for t, row in enumerate(logits.double()):
            leaf = row.requires_grad_()
            want_ids, want = chosen_by_loop(leaf, rule, None if bias is None else bias.double())
            assert ids[t].tolist() == want_ids
            assert_near("weights", weights[t], want, ratio=1e-6)
            (d_logits,) = torch.autograd.grad(want, leaf, grad[t].double())
            torch.testing.assert_close(got[t].double(), d_logits, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("eps", [0.0, 1e-20])
@pytest.mark.parametrize("level", [-20.0, -60.0, -80.0])
def test_scores_whose_square_is_zero(level: float, eps: float) -> None:
    """Renormalised weights of tiny scores are ordinary numbers, and so is their gradient."""
    logits = torch.tensor([[0.0, 0.5, 1.0, -0.3, 0.2]]) + level
    above = torch.tensor([[-level, 0.5, 1.0, -0.3, 0.2]])  # the best expert is kept from being chosen
    without_best = torch.tensor([-torch.inf, 0.0, 0.0, 0.0, 0.0])
    for score, x, bias in (("sigmoid", logits, None), ("softmax", above, without_best)):
        rule = RouterRule(top_k=2, score=score, renormalize=True, eps=eps)
        ids, weights = routing.topk(x, rule, bias=bias)
        leaf = x.double().requires_grad_()
        want = _weights_of_present(leaf, ids, ids >= 0, rule)
        assert ids.tolist() == [[2, 1]]
        torch.testing.assert_close(weights.double(), want, atol=0, rtol=1e-5)
        grad = torch.tensor([[1.0, -2.0]])
        (d_logits,) = torch.autograd.grad(want, leaf, grad.double())
        got = routing.topk_backward(grad, x, ids, rule)
        torch.testing.assert_close(got.double(), d_logits, atol=1e-6 * float(d_logits.abs().max()), rtol=1e-4)


def test_scores_of_large_logits_of_either_sign() -> None:
    """Columns behind the last expert take part neither in the maximum nor in the sum of a softmax."""
    spread = torch.tensor([0.0, 2.0, 1.0, -1.0, 0.5])
    logits = torch.stack([spread - 200, spread + 200, spread * 1e30, spread * 1e-40, spread * 0 - 1e30])
    grad = _logits(5, 2, 1)
    for rule in (
        RouterRule(top_k=2),
        RouterRule(top_k=2, renormalize=True),
        RouterRule(top_k=2, softmax_after_topk=True),
    ):
        ids, weights = routing.topk(logits, rule)
        want_ids, want = reference.topk(logits.double(), rule)
        assert torch.equal(ids, want_ids)
        torch.testing.assert_close(weights.double(), want, atol=1e-7, rtol=1e-6)
        got = routing.topk_backward(grad, logits, ids, rule)
        want = reference.topk_backward(grad.double(), logits.double(), ids, rule)
        torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-5)


def test_scores_that_are_equal_in_fp32_are_ordered_by_their_logits() -> None:
    """Sigmoids of 1, softmax scores of 0. With a choice bias the scores decide, and then the lower id."""
    for score, row, by_score in (
        ("sigmoid", [20.0, 30.0, 25.0, 40.0], [0, 1, 2, 3]),
        ("softmax", [-300.0, -200.0, 0.0, -250.0], [2, 0, 1, 3]),
    ):
        rule = RouterRule(top_k=4, score=score)
        ids, _ = routing.topk(torch.tensor([row]), rule)
        assert ids.tolist() == [torch.tensor(row).argsort(descending=True).tolist()]
        ids, _ = routing.topk(torch.tensor([row]), rule, bias=torch.zeros(4))
        assert ids.tolist() == [by_score]


def test_top_1_keeps_its_dimension_and_the_router_learns_without_renormalisation() -> None:
    """Case 59: shape [T, 1]; renormalised weights are exactly 1 and carry no gradient, others do."""
    logits, grad = _logits(6, 4), torch.ones(6, 1)
    plain, fixed = RouterRule(top_k=1), RouterRule(top_k=1, renormalize=True)
    ids, weights = routing.topk(logits, plain)
    assert ids.shape == weights.shape == (6, 1)
    assert routing.topk_backward(grad, logits, ids, plain).abs().max() > 1e-3
    ids, weights = routing.topk(logits, fixed)
    assert torch.equal(weights, torch.ones(6, 1))
    assert routing.topk_backward(grad, logits, ids, fixed).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        (RouterRule(top_k=0), "top_k"),
        (RouterRule(top_k=9), "top_k"),
        (RouterRule(top_k=2.0), r"top_k = 2\.0: must be a whole number"),  # type: ignore[arg-type]
        (RouterRule(top_k=1, groups=4, keep_groups=4 / 2), "keep_groups = 2.0"),  # type: ignore[arg-type]
        (RouterRule(top_k=1, score="tanh"), "score"),
        (RouterRule(top_k=1, groups=3), "groups"),
        (RouterRule(top_k=1, groups=4, keep_groups=5), "keep_groups"),
        (RouterRule(top_k=1, group_score="mean"), "group_score"),
        (RouterRule(top_k=3, groups=4, keep_groups=1), "top_k = 3: must be at most the 2 experts"),
        (RouterRule(top_k=1, scale=float("nan")), "scale = nan: must be a finite number"),
        (RouterRule(top_k=1, eps=-1e-3), "eps = -0.001: must be a finite number, at least 0"),
        (RouterRule(top_k=1, eps=float("inf")), "eps = inf"),
        (RouterRule(top_k=1, score="sigmoid", softmax_after_topk=True), "softmax_after_topk"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rule: RouterRule, field: str) -> None:
    with pytest.raises(SpecError, match=field):
        routing.topk(_logits(2, 8), rule)


def test_too_many_experts_are_refused() -> None:
    with pytest.raises(SpecError, match="experts = 1025: must be from 1 to 1024"):
        routing.topk(_logits(1, 1025), RouterRule(top_k=1))
    with pytest.raises(SpecError, match="experts"):
        routing.place(torch.zeros(1, 1, dtype=torch.int32), 1025)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"logits": torch.zeros(8)}, "logits.shape"),
        ({"logits": torch.zeros(3, 8, dtype=torch.int64)}, "logits.dtype"),
        ({"bias": torch.zeros(7)}, r"bias.shape = \(7,\): must be \[8\]"),
        ({"bias": torch.zeros(8, dtype=torch.int32)}, "bias.dtype"),
        ({"mask": torch.ones(2, dtype=torch.bool)}, r"mask.shape = \(2,\): must be \[3\]"),
        ({"mask": torch.ones(3, dtype=torch.int64)}, "mask.dtype = 'torch.int64': must be one of bool"),
    ],
)
def test_wrong_operands_of_the_choice_are_named(change: dict[str, Tensor], field: str) -> None:
    arguments: dict[str, Any] = {"logits": torch.zeros(3, 8), "rule": RouterRule(top_k=2)}
    with pytest.raises(SpecError, match=field):
        routing.topk(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"grad": torch.zeros(3, 1)}, "grad.shape"),
        ({"grad": torch.zeros(2, 2)}, "grad.shape"),
        ({"grad": torch.zeros(3, 2, dtype=torch.int32)}, "grad.dtype"),
        ({"ids": torch.zeros(3, 1, dtype=torch.int32)}, "ids.shape"),
        ({"ids": torch.zeros(3, 2)}, "ids.dtype"),
    ],
)
def test_wrong_operands_of_the_choices_backward_are_named(change: dict[str, Tensor], field: str) -> None:
    arguments: dict[str, Any] = {
        "grad": torch.zeros(3, 2), "logits": torch.zeros(3, 8), "ids": torch.zeros(3, 2, dtype=torch.int32),
        "rule": RouterRule(top_k=2),
    }  # fmt: skip
    with pytest.raises(SpecError, match=field):
        routing.topk_backward(**(arguments | change))


@pytest.mark.parametrize("name", ["R1-plain", "R2", "R3", "R4"])
def test_backward_of_choices_that_are_partly_absent(name: str) -> None:
    """Ids out of range are no choices: the gradient is that of the weights over the others."""
    experts, rule, _ = RULES[name]
    logits, generator = _logits(30, experts), torch.Generator().manual_seed(1)
    ids, _ = reference.topk(logits, rule)
    absent = torch.rand(ids.shape, generator=generator) < 0.4
    absent[0] = True
    none = torch.tensor([-1, experts, 1 << 20])[torch.randint(0, 3, ids.shape, generator=generator)]
    ids = torch.where(absent, none, ids).int()
    grad = _logits(30, rule.top_k, 2)
    got = routing.topk_backward(grad, logits, ids, rule)
    leaf = logits.double().requires_grad_()
    weights = _weights_of_present(leaf, ids, ~absent, rule)
    (want,) = torch.autograd.grad(weights, leaf, grad.double())
    torch.testing.assert_close(got.double(), want, atol=1e-6 * rule.scale, rtol=1e-4)
    torch.testing.assert_close(reference.topk_backward(grad.double(), logits.double(), ids, rule), want)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("name", ["R1-plain", "R2", "R4"])
def test_padding_that_holds_nan_reaches_nothing(name: str) -> None:
    experts, rule, _ = RULES[name]
    logits, mask = _logits(9, experts), torch.arange(9) % 2 == 0
    logits[1], logits[3], logits[5, 2] = torch.nan, torch.inf, -torch.inf
    ids, weights = routing.topk(logits, rule, mask=mask)
    assert (ids[~mask] == -1).all() and not weights[~mask].any() and weights.isfinite().all()
    d_logits = routing.topk_backward(_logits(9, rule.top_k, 2), logits, ids, rule)
    assert not d_logits[~mask].any() and d_logits[mask].any() and d_logits.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_backward_of_strided_choices(dtype: torch.dtype) -> None:
    rule, logits, grad = RouterRule(top_k=3, renormalize=True), _logits(6, 11), _logits(6, 3, 1)
    ids, _ = routing.topk(logits, rule)
    want = routing.topk_backward(grad, logits, ids, rule)
    wide = torch.full((6, 6), -1, dtype=dtype)
    wide[:, ::2] = ids
    assert torch.equal(routing.topk_backward(grad.mT.contiguous().mT, logits, wide[:, ::2], rule), want)
    if dtype == torch.int64:  # in range only without its upper half
        wide[2] += 1 << 32
        assert not routing.topk_backward(grad, logits, wide[:, ::2], rule)[2].any()


@pytest.mark.parametrize("name", ["R1", "R2", "R4"])
def test_backward_of_an_expert_chosen_twice(name: str) -> None:
    """Both choices reach its logit, as in the reference."""
    experts, rule, _ = RULES[name]
    logits, grad = _logits(6, experts), _logits(6, rule.top_k, 2)
    ids, _ = reference.topk(logits, rule)
    ids[:, 0] = ids[:, -1]
    want = reference.topk_backward(grad.double(), logits.double(), ids, rule)
    got = routing.topk_backward(grad, logits, ids, rule)
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-4)


def _weights_of_present(logits: Tensor, ids: Tensor, present: Tensor, rule: RouterRule) -> Tensor:
    """Token by token, over its present choices only; zeros elsewhere."""
    rows = []
    for row, of_row, there in zip(logits, ids.long(), present, strict=True):
        chosen = of_row[there]
        scores = row.sigmoid() if rule.score == "sigmoid" else row.softmax(-1)
        values = row[chosen].softmax(-1) if rule.softmax_after_topk else scores[chosen]
        if rule.renormalize:
            values = values / (values.sum() + rule.eps)
        rows.append(torch.zeros(ids.shape[1], dtype=row.dtype).masked_scatter(there, values * rule.scale))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("ids", "field"),
    [
        (torch.zeros(4, dtype=torch.int32), "ids.shape"),
        (torch.zeros(2, 2, 2, dtype=torch.int32), "ids.shape"),
        (torch.zeros(2, 2), "ids.dtype"),
        (torch.zeros(2, 2, dtype=torch.bool), "ids.dtype"),
    ],
)
def test_wrong_choices_are_not_placed(ids: Tensor, field: str) -> None:
    with pytest.raises(SpecError, match=field):
        routing.place(ids, 3)


def test_more_rows_than_int32_counts_or_tiles_hold_are_refused() -> None:
    with pytest.raises(SpecError, match=r"tokens x top_k = 2147483648: must be below 2\^31"):
        routing.place(torch.zeros(1, 1, dtype=torch.int8).expand(1 << 30, 2), 3)
    with pytest.raises(SpecError, match="rows = 1048577: must be at most 1048576 with tiles of 16"):
        routing.tile_table(offsets_of([3]), (16 << 16) + 1, 16)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int64])
def test_placement_of_any_integers(dtype: torch.dtype) -> None:
    """Ids that would come into range by being cast to 32 bits are dropped too."""
    info = torch.iinfo(dtype)
    ids = torch.tensor([[0, 1, 2, info.max], [info.min, 2, 3, 1]], dtype=dtype)
    if dtype == torch.int64:
        ids = torch.cat([ids, torch.tensor([[1 << 32, (1 << 32) + 1, -(1 << 32), (1 << 40) + 2]])])
    _check_placement(ids, 3)
    if dtype == torch.uint8:
        _check_placement(ids, 1000)


@pytest.mark.parametrize(
    ("offsets", "field"),
    [
        (torch.zeros(3), "offsets.dtype"),
        (torch.zeros(3, 1, dtype=torch.int32), "offsets.shape"),
        (torch.zeros(1, dtype=torch.int32), "offsets.shape"),
    ],
)
def test_wrong_offsets_are_named(offsets: Tensor, field: str) -> None:
    with pytest.raises(SpecError, match=field):
        routing.tile_table(offsets, 4, 16)
    with pytest.raises(SpecError, match=field):
        routing.expert_rows(offsets, 4, ())


def test_strided_offsets() -> None:
    wide = torch.tensor([0, 99, 20, 99, 21, 99, 70, 99], dtype=torch.int32)
    rows = routing.expert_rows(wide[::2], 70, (16,))
    assert rows.offsets.tolist() == [0, 20, 21, 70] and rows.offsets.is_contiguous()
    assert rows.tables[0].count.tolist() == [2 + 1 + 4]


def _check_placement(ids: Tensor, experts: int) -> None:
    with poisoned_memory():
        position, source, offsets = routing.place(ids, experts)
    for got, want in zip((position, source, offsets), reference.place(ids, experts), strict=True):
        assert got.dtype == torch.int32 and torch.equal(got, want)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "dropped"),
    [(37, 8, 128, 0.0), (300, 10, 512, 0.1), (1, 1, 8, 0.0), (64, 6, 64, 1.0), (0, 2, 4, 0.0), (5, 1, 1, 0.3),
     (70, 3, 1000, 0.0), (3, 22, 1024, 0.0)],
)  # fmt: skip
def test_placement(tokens: int, top_k: int, experts: int, dropped: float) -> None:
    generator = torch.Generator().manual_seed(0)
    _check_placement(random_ids(tokens, experts, top_k, generator, dropped=dropped), experts)


def test_placement_of_one_expert_for_all_and_of_strided_int64_ids_out_of_range() -> None:
    _check_placement(torch.full((100, 2), 5, dtype=torch.int32), 7)
    ids = torch.tensor([[0, 9, -1, 3], [7, 2, 100, -5], [3, 3, 1, 0]])
    _check_placement(ids, 7)
    _check_placement(ids.mT, 7)


@settings(max_examples=15)
@given(st.data())
def test_placement_of_any_choices(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 40))
    top_k = data.draw(st.integers(1, 4))
    flat = data.draw(st.lists(st.integers(-1, experts), min_size=0, max_size=50 * top_k))
    ids = torch.tensor(flat[: len(flat) // top_k * top_k], dtype=torch.int32).view(-1, top_k)
    _check_placement(ids, experts)


@pytest.mark.parametrize("counts", [[0, 7, 1, 13, 0, 11], [0, 0], [64], [16, 17, 15, 0, 1], [500, 0, 3]])
@pytest.mark.parametrize("block_m", [16, 128])
def test_tile_table(counts: list[int], block_m: int) -> None:
    offsets = offsets_of(counts)
    with poisoned_memory():
        table = routing.tile_table(offsets, sum(counts) + 5, block_m)
    want = reference.tile_table(offsets, block_m)
    assert table.count.tolist() == [want.numel()] and table.entries.numel() >= want.numel()
    assert torch.equal(table.entries[: want.numel()], want)


def test_missing_tile_height_is_named() -> None:
    rows = routing.expert_rows(offsets_of([3]), 3, (16,))
    with pytest.raises(SpecError, match="block_m = 64: must be one of 16"):
        rows.table(64)


def test_a_token_is_routed_alike_alone() -> None:
    logits, rule = _logits(30, 24), RouterRule(top_k=3, score="sigmoid", renormalize=True, groups=4, keep_groups=2)
    ids, weights = routing.topk(logits, rule)
    gradient = routing.topk_backward(_logits(30, 3, 1), logits, ids, rule)
    alone, of_one = routing.topk(logits[7:8], rule)
    assert torch.equal(alone[0], ids[7]) and torch.equal(of_one[0], weights[7])
    assert torch.equal(routing.topk_backward(_logits(30, 3, 1)[7:8], logits[7:8], alone, rule)[0], gradient[7])
