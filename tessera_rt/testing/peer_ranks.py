"""Ranks of an expert-parallel layer for tests: inputs, one process's answer to compare with, and runs over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tessera_rt.kernels.budget import SmBudget
from tessera_rt.kernels.operands import Run
from tessera_rt.kernels.options import Gate
from tessera_rt.kernels.peer_memory import PeerAllocator, virtual_ranks
from tessera_rt.kernels.transport import PeerTransport
from tessera_rt.kernels.transport_layout import Layout, Traffic
from tessera_rt.kernels.weights import ExpertWeights
from tessera_rt.moe.expert_parallel import ExpertTransport, expert_parallel_mlp
from tessera_rt.testing.interpreter import run_ranks
from tessera_rt.testing.kernel_checks import dense_experts, map_weights, random_ids, random_weights

ONE_PROGRAM = Run(SmBudget(4, communication=1))
POLLS = 200_000  # interpreted polls take a tenth of a millisecond or more


@dataclass(frozen=True, slots=True)
class RankInput:
    """One rank's tokens: x [T, H], ids [T, K] int32, weights [T, K] fp32, and the gradient of its output [T, H]."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    grad: Tensor


@dataclass(frozen=True, slots=True)
class RankResult:
    """What a rank's layer gave: output, gradients of x, router weights, and of its experts' weights."""

    out: Tensor
    d_x: Tensor
    d_weights: Tensor
    experts: tuple[Tensor, ...]


def rank_inputs(
    traffic: Traffic, tokens: Sequence[int], generator: torch.Generator, *, dropped: float = 0.0
) -> list[RankInput]:
    """Random tokens for every rank, ``tokens`` [W] of them; choices are dropped (-1) with that probability."""
    made = []
    for count in tokens:
        x, grad = (torch.randn(count, traffic.hidden, generator=generator).to(traffic.dtype) for _ in range(2))
        ids = random_ids(count, traffic.experts, traffic.top_k, generator, dropped=dropped)
        made.append(RankInput(x, ids, torch.rand(count, traffic.top_k, generator=generator), grad))
    return made


def redistribute(inputs: Sequence[RankInput], world: int) -> list[RankInput]:
    """The same tokens in the same order, evenly over ``world`` ranks."""
    return [
        RankInput(*parts)
        for parts in zip(
            *(
                torch.cat([getattr(one, name) for one in inputs]).chunk(world)
                for name in ("x", "ids", "weights", "grad")
            ),
            strict=True,
        )
    ]


def all_experts(
    traffic: Traffic, intermediate: int, gate: Gate, generator: torch.Generator, *, bias: bool = False
) -> ExpertWeights:
    """Weights of all E experts in the traffic's dtype."""
    return random_weights(traffic.experts, traffic.hidden, intermediate, gate, traffic.dtype, generator, bias=bias)


def own_experts(experts: ExpertWeights, traffic: Traffic, rank: int) -> ExpertWeights:
    """Rank ``rank``'s share, as leaves that require gradients."""
    local = traffic.local_experts
    own = slice(rank * local, (rank + 1) * local)
    return map_weights(experts, lambda tensor: tensor[own].clone().requires_grad_())


def run_layer(
    transport: ExpertTransport, given: RankInput, experts: ExpertWeights, gate: Gate, **options: Any
) -> RankResult:
    """Forward and backward of the layer on one rank; ``experts``: all of them."""
    own = own_experts(experts, transport.traffic, transport.rank)
    x, weights = given.x.clone().requires_grad_(), given.weights.clone().requires_grad_()
    out = expert_parallel_mlp(x, given.ids, weights, own, gate, transport, **options)
    torch.autograd.backward(out, given.grad)
    transport.check()
    tensors = (own.gate_up, own.down, own.gate_up_bias, own.down_bias)
    gradients = tuple(tensor.grad for tensor in tensors if tensor is not None)
    assert x.grad is not None and weights.grad is not None and all(found is not None for found in gradients)
    return RankResult(out.detach(), x.grad, weights.grad, tuple(found for found in gradients if found is not None))


def poison(transport: PeerTransport) -> None:
    """Everything in a rank's peer memory but the flags becomes NaN (floats) and -1 (integers)."""
    transport._memory.local[Layout.of(transport.traffic).counts.start :].fill_(255)


def run_peers(
    traffic: Traffic,
    function: Callable[[PeerTransport, int], Any],
    *,
    run: Run = ONE_PROGRAM,
    polls: int = POLLS,
    timeout_s: float = 120.0,
) -> list[Any]:
    """``function(transport, rank)`` on ranks that are threads, with poisoned peer memory; results by rank."""
    allocators: list[PeerAllocator] = virtual_ranks(traffic.world)
    transports = [PeerTransport(traffic, allocator, run=run, polls=polls) for allocator in allocators]
    for transport in transports:
        poison(transport)
    return run_ranks(traffic.world, lambda rank: function(transports[rank], rank), timeout_s=timeout_s)


def with_world(traffic: Traffic, world: int) -> Traffic:
    """The traffic for the same tokens in all, over ``world`` ranks."""
    return replace(traffic, world=world, tokens=traffic.tokens * traffic.world // world)


def dense_result(inputs: Sequence[RankInput], experts: ExpertWeights, gate: Gate) -> tuple[list[RankResult], Any]:
    """One process in float64 by plain autograd: per rank's tokens (without weights' gradients), and all weights'
    gradients."""
    high = map_weights(experts, lambda tensor: tensor.double().requires_grad_())
    results = []
    for one in inputs:
        x, weights = one.x.double().requires_grad_(), one.weights.double().requires_grad_()
        out = dense_experts(x, high, one.ids, weights, gate) + 0 * x + 0 * weights.sum()
        torch.autograd.backward(out, one.grad.double())
        assert x.grad is not None and weights.grad is not None
        results.append(RankResult(out.detach(), x.grad, weights.grad, ()))
    tensors = (high.gate_up, high.down, high.gate_up_bias, high.down_bias)
    found = tuple(
        torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in tensors if tensor is not None
    )
    return results, found
