"""The chunked gated delta rule against its step-by-step recurrence, and the recurrence against its formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tessera_rt.models.delta_rule import delta_rule_chunked, delta_rule_recurrent


def inputs(
    b: int,
    s: int,
    heads: int,
    key: int,
    value: int,
    *,
    seed: int = 0,
    decay: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """q, k (of length 1), v, log_decay in [-decay, 0], beta in [0, 1], state."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    k = functional.normalize(normal(b, s, heads, key), dim=-1)
    rest = (-decay * uniform(b, s, heads), uniform(b, s, heads), normal(b, heads, key, value))
    return [x.to(dtype) for x in (normal(b, s, heads, key), k, normal(b, s, heads, value), *rest)]


def with_gradients(rule: Callable[..., tuple[Tensor, Tensor]], tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """Output, final state and the gradients of all inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, state = rule(*leaves, **options)
    (out.cos().sum() + state.square().sum()).backward()
    return [out, state, *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def test_recurrence_follows_the_formula() -> None:
    q, k, v, log_decay, beta, state = inputs(1, 6, 1, 3, 2)
    out, final = delta_rule_recurrent(q, k, v, log_decay, beta, state)
    s = state[0, 0]
    for t in range(6):
        key, strength = k[0, t, 0], beta[0, t, 0]
        # S (decayed) -> (1 - beta k k^T) S + beta k v^T
        s = (torch.eye(3) - strength * torch.outer(key, key)) @ (log_decay[0, t, 0].exp() * s)
        s = s + strength * torch.outer(key, v[0, t, 0])
        torch.testing.assert_close(out[0, t, 0], s.T @ q[0, t, 0], rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(final[0, 0], s, rtol=1e-13, atol=1e-14)


@given(
    b=st.integers(1, 2),
    s=st.integers(0, 40),
    heads=st.integers(1, 2),
    key=st.integers(1, 5),
    value=st.integers(1, 5),
    chunk=st.sampled_from([1, 2, 7, 16, 64]),
    decay=st.sampled_from([0.0, 0.1, 5.0, 200.0]),
    seed=st.integers(0, 10),
)
def test_chunks_equal_the_recurrence_in_outputs_and_gradients(
    b: int, s: int, heads: int, key: int, value: int, chunk: int, decay: float, seed: int
) -> None:
    tensors = inputs(b, s, heads, key, value, seed=seed, decay=decay)
    chunked = with_gradients(delta_rule_chunked, tensors, chunk=chunk)
    recurrent = with_gradients(delta_rule_recurrent, tensors)
    for name, actual, expected in zip(
        ("out", "state", "q", "k", "v", "log_decay", "beta", "first state"), chunked, recurrent, strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("cut", [1, 16, 21, 36])
def test_a_sequence_may_be_continued_from_its_state(cut: int) -> None:
    *sequence, state = inputs(2, 37, 2, 4, 3)
    whole, final = delta_rule_chunked(*sequence, state, chunk=16)
    first, middle = delta_rule_chunked(*(x[:, :cut] for x in sequence), state, chunk=16)
    second, end = delta_rule_chunked(*(x[:, cut:] for x in sequence), middle, chunk=16)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(end, final, rtol=1e-11, atol=1e-12)


def test_no_state_means_zeros() -> None:
    *sequence, state = inputs(1, 9, 2, 4, 3)
    for rule in (delta_rule_chunked, delta_rule_recurrent):
        for a, b in zip(rule(*sequence), rule(*sequence, torch.zeros_like(state)), strict=True):
            assert torch.equal(a, b)


def test_strong_decay_and_long_sequences_stay_finite_in_fp32() -> None:
    tensors = inputs(1, 300, 1, 8, 8, decay=80.0, dtype=torch.float32)  # products of decays underflow within a chunk
    for tensor in with_gradients(delta_rule_chunked, tensors):
        assert tensor.isfinite().all()
    exact = with_gradients(delta_rule_recurrent, [x.double() for x in tensors])
    for actual, expected in zip(with_gradients(delta_rule_chunked, tensors), exact, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-3)


def test_low_precision_inputs_are_computed_in_fp32() -> None:
    tensors = inputs(1, 70, 2, 8, 4, decay=0.1, dtype=torch.bfloat16)
    out, state = delta_rule_chunked(*tensors)
    exact, exact_state = delta_rule_recurrent(*(x.double() for x in tensors))
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32
    torch.testing.assert_close(state.double(), exact_state, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)


def test_outputs_do_not_depend_on_the_future() -> None:
    *sequence, state = inputs(1, 20, 1, 4, 3)
    before, _ = delta_rule_chunked(*sequence, state, chunk=8)
    for x in sequence:
        x[:, 13:] += 0.1
    after, _ = delta_rule_chunked(*sequence, state, chunk=8)
    assert torch.equal(before[:, :8], after[:, :8])  # an earlier chunk: the same bits
    torch.testing.assert_close(before[:, 8:13], after[:, 8:13], rtol=1e-13, atol=1e-14)
    assert not torch.allclose(before[:, 13:], after[:, 13:])
