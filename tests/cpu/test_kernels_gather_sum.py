"""The weighted gather-sum, its backward and the router-weight gradient against loops over tokens and choices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tessera_rt.kernels.gather_sum import gather_sum, gather_sum_backward, router_weight_gradient
from tessera_rt.kernels.routing import ExpertRows, place
from tessera_rt.testing.kernel_checks import assert_near, poisoned_memory, random_ids

pytestmark = pytest.mark.usefixtures("interpreted")


def _strided(values: Tensor) -> Tensor:
    """The same values between columns of NaN."""
    wide = torch.full((values.shape[0], 2 * values.shape[1] + 1), torch.nan, dtype=values.dtype)
    wide[:, 1::2] = values
    return wide[:, 1::2]


class _Case:
    """A buffer of ``rows`` rows for ``tokens`` x ``top_k`` choices, of which some are dropped. What must not be read is
    NaN: rows of nobody, weights of dropped choices, what lies between the columns."""

    def __init__(self, tokens: int, top_k: int, hidden: int, dtype: torch.dtype, *, spare: int = 0) -> None:
        generator = torch.Generator().manual_seed(tokens + hidden)
        ids = random_ids(tokens, 30, top_k, generator, dropped=0.3)
        position, source, offsets = place(ids, 30)
        self.used, choices = int(offsets[-1]), ids.numel()
        count = self.used if spare < 0 else choices + spare
        self.rows = ExpertRows(count, offsets, ())
        self.source = torch.cat([source, source.new_full((max(count - choices, 0),), -1)])[:count]
        self.position = position.mT.contiguous().mT
        self.y = _strided(torch.randn(count, hidden, generator=generator).to(dtype))
        self.y[self.used :] = torch.nan
        weights = torch.rand(tokens, top_k, generator=generator).masked_fill(position < 0, torch.nan)
        self.weights = weights.mT.contiguous().mT
        self.grad = _strided(torch.randn(tokens, hidden, generator=generator).to(dtype))

    def loop(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sum, d y and d weights in float64, by autograd through the loop."""
        y, weights = self.y.double().requires_grad_(), self.weights.double().requires_grad_()
        total = torch.zeros(self.grad.shape, dtype=torch.float64) + 0 * weights.nan_to_num().sum()
        for t, of_token in enumerate(self.position.tolist()):
            terms = [weights[t, k] * y[row] for k, row in enumerate(of_token) if row >= 0]
            if terms:
                total = total.index_add(0, torch.tensor([t]), torch.stack(terms).sum(0, keepdim=True))
        d_y, d_weights = torch.autograd.grad(total, [y, weights], self.grad.double(), materialize_grads=True)
        return total.detach(), d_y, d_weights.nan_to_num()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("spare", [0, 70, -1], ids=["rows-of-all-choices", "more-rows", "rows-used-only"])
@pytest.mark.parametrize(("tokens", "top_k", "hidden"), [(1, 1, 1), (13, 3, 33), (40, 2, 520)])
def test_sum_and_backward(tokens: int, top_k: int, hidden: int, spare: int, dtype: torch.dtype) -> None:
    """Any number of rows in the buffer, strided operands, nothing read that belongs to nobody."""
    case = _Case(tokens, top_k, hidden, dtype, spare=spare)
    want, want_y, want_weights = case.loop()
    with poisoned_memory():
        out = gather_sum(case.y, case.position, case.weights)
        d_y, d_weights = gather_sum_backward(
            case.grad, case.y, case.source, case.rows, case.position, case.weights
        )  # fmt: skip
    ratio = {torch.float32: 1e-6, torch.float16: 1e-3}[dtype]
    assert out.dtype == d_y.dtype == dtype and d_weights.dtype == torch.float32
    assert_near("out", out, want, ratio=ratio)
    assert_near("d y", d_y, want_y, ratio=ratio)
    assert_near("d weights", d_weights, want_weights, ratio=2e-6)
    assert not d_y[case.used :].any() and not d_weights[case.position < 0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_terms_are_added_in_order_and_rounded_once(dtype: torch.dtype) -> None:
    case = _Case(20, 7, 70, dtype)
    want = torch.zeros(20, 70)
    for k in range(7):
        there = case.position[:, k] >= 0
        want[there] += case.y[case.position[there, k].long()].float() * case.weights[there, k, None]
    assert torch.equal(gather_sum(case.y, case.position, case.weights), want.to(dtype))


@pytest.mark.parametrize(("tokens", "top_k", "hidden"), [(0, 2, 8), (3, 0, 8), (3, 2, 0)])
def test_sums_of_nothing(tokens: int, top_k: int, hidden: int) -> None:
    position = torch.full((tokens, top_k), -1, dtype=torch.int32)
    weights, grad, y = torch.ones(tokens, top_k), torch.ones(tokens, hidden), torch.ones(0, hidden)
    rows, source = ExpertRows(0, torch.zeros(4, dtype=torch.int32), ()), torch.empty(0, dtype=torch.int32)
    with poisoned_memory():
        assert torch.equal(gather_sum(y, position, weights), torch.zeros(tokens, hidden))
        d_y, d_weights = gather_sum_backward(grad, y, source, rows, position, weights)
        assert torch.equal(d_weights, torch.zeros(tokens, top_k)) and d_y.shape == (0, hidden)
        assert torch.equal(router_weight_gradient(torch.ones(0, 3), position), torch.zeros(tokens, top_k))


@pytest.mark.parametrize("tiles", [0, 1, 3, 16, 17, 40])
def test_router_weight_gradient(tiles: int) -> None:
    """More choices than one program takes, strided operands, NaN in rows of nobody and between the columns."""
    generator = torch.Generator().manual_seed(tiles)
    position, _, offsets = place(random_ids(75, 9, 4, generator, dropped=0.2), 9)
    partials = torch.randn(300, tiles, generator=generator)
    partials[int(offsets[-1]) :] = torch.nan
    want = [[sum(partials[row].tolist()) if row >= 0 else 0.0 for row in of_token] for of_token in position.tolist()]
    with poisoned_memory():
        got = router_weight_gradient(_strided(partials), position.mT.contiguous().mT)
    torch.testing.assert_close(got, torch.tensor(want), atol=1e-5, rtol=1e-5)
    assert not got[position < 0].any()
