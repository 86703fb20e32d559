"""Inputs and comparisons for tests of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tessera_rt.kernels import reference
from tessera_rt.kernels.expert_mlp import ExpertWeights
from tessera_rt.kernels.options import Gate

RATIOS = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Relative root-mean-square error allowed against float64: a few roundings of each dtype, none of its products."""


def assert_near(name: str, got: Tensor, want: Tensor, *, ratio: float | None = None) -> None:
    """``got`` is finite and within ``ratio`` of ``want`` in relative RMS; the message names the worst element."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if got.numel() == 0:
        return
    error = (got.double() - want.double()).abs()
    assert error.isfinite().all(), f"{name}: not finite at {(~error.isfinite()).nonzero()[0].tolist()}"
    allowed = RATIOS[got.dtype] if ratio is None else ratio
    scale = want.double().square().mean().sqrt().clamp(min=1e-30)
    actual = error.square().mean().sqrt() / scale
    worst = int(error.argmax())
    values = f"{got.flatten()[worst].item()} instead of {want.flatten()[worst].item()} at flat index {worst}"
    assert actual <= allowed, f"{name}: relative RMS error {actual:.2e} over {allowed:.2e}; worst {values}"


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory holds NaN (floats) or the largest integer in this context."""
    filling: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), filling.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    filling.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        filling.fill_uninitialized_memory = before[1]


def offsets_of(counts: Sequence[int]) -> Tensor:
    """[E + 1] int32 of rows per expert."""
    return torch.tensor([0, *counts]).cumsum(0).int()


def random_ids(tokens: int, experts: int, top_k: int, generator: torch.Generator, *, dropped: float = 0.0) -> Tensor:
    """Distinct experts per token, int32 [T, K]; each choice is dropped (-1) with probability ``dropped``."""
    ids = torch.rand(tokens, experts, generator=generator).argsort(dim=-1)[:, :top_k].int()
    return ids.masked_fill(torch.rand(tokens, top_k, generator=generator) < dropped, -1)


def dense_experts(x: Tensor, weights: ExpertWeights, ids: Tensor, router_weights: Tensor, gate: Gate) -> Tensor:
    """The experts by a loop over (choice, expert) with plain autograd, for gradients in float64."""
    out = torch.zeros_like(x)
    for k in range(ids.shape[1]):
        for e in range(weights.gate_up.shape[0]):
            tokens = (ids[:, k] == e).nonzero()[:, 0]
            if tokens.numel() == 0:
                continue
            pre = x[tokens] @ weights.gate_up[e].mT
            if weights.gate_up_bias is not None:
                pre = pre + weights.gate_up_bias[e]
            y = reference.activate(pre, gate) @ weights.down[e].mT
            if weights.down_bias is not None:
                y = y + weights.down_bias[e]
            out = out.index_add(0, tokens, y * router_weights[tokens, k, None])
    return out


def random_weights(
    experts: int, hidden: int, intermediate: int, gate: Gate, dtype: torch.dtype, generator: torch.Generator,
    *, bias: bool = False, transposed: bool = False,
) -> ExpertWeights:  # fmt: skip
    """Weights whose products stay of order one; ``transposed`` stores them [E, K, N]."""
    columns = intermediate * (2 if gate.gated else 1)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    def weight(n: int, k: int) -> Tensor:
        made = draw(experts, n, k, scale=max(k, 1) ** -0.5)
        return made.mT.contiguous().mT if transposed else made

    return ExpertWeights(
        weight(columns, hidden),
        weight(hidden, intermediate),
        draw(experts, columns, scale=0.5) if bias else None,
        draw(experts, hidden, scale=0.5) if bias else None,
    )


def map_weights(weights: ExpertWeights, change: Callable[[Tensor], Tensor]) -> ExpertWeights:
    """The weights with ``change`` applied to each tensor that is there."""
    return ExpertWeights(
        *(
            None if tensor is None else change(tensor)  # type: ignore[arg-type]
            for tensor in (weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias)
        )
    )
