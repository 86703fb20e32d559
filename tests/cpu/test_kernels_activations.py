"""Activations in the epilogues of the products, forward and backward: far from zero, at the limits, NaN."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tessera_rt.kernels import reference
from tessera_rt.kernels.configs import GATES
from tessera_rt.kernels.gate_backward import gate_backward
from tessera_rt.kernels.options import Activation, Gate
from tessera_rt.kernels.routing import expert_rows
from tessera_rt.kernels.rows_gemm import rows_gemm
from tessera_rt.testing.kernel_checks import offsets_of

pytestmark = pytest.mark.usefixtures("interpreted")

FAR = (-1e37, -1e14, -30.0, 30.0, 1e14, 1e37)
CLAMPED = (Activation.SWIGLU_CLAMPED, Activation.SWIGLU_OSS)
WIDTH = 16


def _gate_id(gate: Gate) -> str:
    return f"{gate.activation.name}{'-interleaved' if gate.interleaved else ''}"


def _pairs(gate: Gate, gates: tuple[float, ...], ups: tuple[float, ...]) -> Tensor:
    """A product [R, WIDTH or 2 WIDTH]: a row for each of ``gates`` with each of ``ups``, or for each of both alone."""
    pairs = torch.tensor(list(itertools.product(gates, ups)))
    left, right = (column[:, None].expand(-1, WIDTH) for column in pairs.unbind(1))
    if not gate.gated:
        return torch.tensor([*gates, *ups])[:, None].repeat(1, WIDTH)
    return torch.stack([left, right], dim=-1).flatten(1) if gate.interleaved else torch.cat([left, right], dim=1)


def _check(gate: Gate, pre: Tensor) -> Tensor:
    """The forward's activation, the backward's, and d pre for a gradient of ones, all as in float64; the first one.

    The product of the forward is its bias: each row has an expert of its own.
    """
    count = pre.shape[0]
    rows = expert_rows(offsets_of([1] * count), count)
    zeros, weight = torch.zeros(count, WIDTH), torch.zeros(1, 1, 1).expand(count, pre.shape[1], WIDTH)
    out, _ = rows_gemm(zeros, weight, rows, bias=pre, gate=gate)
    rows = expert_rows(offsets_of([count]), count)
    d_pre, act, _ = gate_backward(torch.ones(count, WIDTH), torch.eye(WIDTH)[None], pre, rows, gate=gate)
    leaf = pre.double().requires_grad_()
    want = reference.activate(leaf, gate)
    (want_d,) = torch.autograd.grad(want.sum(), leaf)
    for got, expected in ((out, want.detach()), (act, want.detach()), (d_pre, want_d)):
        torch.testing.assert_close(got, expected.float(), equal_nan=True, rtol=1e-5, atol=1e-5)
    return out


@pytest.mark.parametrize("gate", GATES, ids=_gate_id)
def test_far_from_zero_and_at_the_limits(gate: Gate) -> None:
    """The slopes of gates far out are 0 and 1, or 0 beyond a limit; at exactly the limit it is that of the inside."""
    ups = (-gate.limit, gate.limit, 0.0, 1.0) + ((-30.0, 30.0) if gate.activation in CLAMPED else ())
    assert not _check(gate, _pairs(gate, (*FAR, gate.limit, -1.0, 0.0), ups)).isnan().any()


@pytest.mark.parametrize("gate", GATES, ids=_gate_id)
def test_nan_and_infinity_are_what_they_are_in_torch(gate: Gate) -> None:
    """NaN passes every clamp; an infinite product, the overflow of fp16, is what its limit makes of it."""
    values = (torch.nan, -2.0, 0.5) + ((torch.inf,) if gate.activation in CLAMPED else ())
    out = _check(gate, _pairs(gate, values, values))
    assert out.isnan().any() and not out.isnan().all()
