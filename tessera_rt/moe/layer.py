"""MoE: a whole mixture-of-experts layer as an ordinary module, made from the parts that the engine's block uses too.

    layer = MoE(MoEConfig(hidden=512, intermediate=256, experts=64, router=RouterRule(top_k=8, renormalize=True)))
    y = layer(x)                                  # x [..., H]
    y, routing = layer(x, mask, return_routing=True)
    loss = loss_of(y) + routing.aux_loss + routing.z_loss

No method keeps anything on the module: what a forward decided is in the ``MoERouting`` that it returns.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from tessera_rt.errors import PlanError, Problem, SpecError
from tessera_rt.kernels.transport_layout import Traffic
from tessera_rt.moe.backends import Backend, backend_for, routed_experts
from tessera_rt.moe.config import MoEConfig
from tessera_rt.moe.expert_parallel import ExpertTransport, expert_parallel_mlp
from tessera_rt.moe.experts import Experts, SharedExpert
from tessera_rt.moe.router import (
    Choice,
    TopKRouter,
    balance_gradient,
    expert_counts,
    score_sum,
    update_choice_bias,
    z_gradient,
    z_sum,
)


@dataclass(frozen=True, slots=True)
class MoERouting:
    """What one forward decided, for T tokens, K choices, E experts.

    ``logits`` [T, E] and ``weights`` [T, K] are fp32 or float64 and carry gradients; ``ids`` [T, K] int64 hold -1 for
    tokens that the mask left out; ``counts`` [E] int64 says how many choices each expert got. ``aux_loss`` [] and
    ``z_loss`` [] are multiplied by their coefficients already; both are means over the tokens that were routed.
    """

    logits: Tensor
    weights: Tensor
    ids: Tensor
    counts: Tensor
    aux_loss: Tensor
    z_loss: Tensor


class MoEParts(nn.Module):
    """The parameters of a layer: ``router``, ``experts`` (those of ``ep_rank``: global ids ``expert_ids``), ``shared``,
    and, with a latent size D, ``to_latent`` [D, H] and ``from_latent`` [H, D]; all uninitialised.

    Raises SpecError for a configuration with faults, PlanError when ``ep_size`` does not divide the experts.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        ep_rank: int = 0,
        ep_size: int = 1,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        config.check()
        if config.experts % ep_size or not 0 <= ep_rank < ep_size:
            problem = Problem(
                "ep_rank, ep_size", (ep_rank, ep_size), f"a rank and a divisor of {config.experts} experts"
            )
            raise PlanError.of("MoE layer", [problem])
        local = config.experts // ep_size
        self.config = config
        self.expert_ids = range(ep_rank * local, (ep_rank + 1) * local)
        self.router = TopKRouter(config, device=device, dtype=dtype)
        self.experts = Experts(local, config, device=device, dtype=dtype)
        shared = SharedExpert(config, device=device, dtype=dtype) if config.shared_intermediate else None
        self.shared: SharedExpert | None = shared
        self.to_latent: nn.Linear | None = None
        self.from_latent: nn.Linear | None = None
        if config.latent:
            self.to_latent = nn.Linear(config.hidden, config.latent, bias=False, device=device, dtype=dtype)
            self.from_latent = nn.Linear(config.latent, config.hidden, bias=False, device=device, dtype=dtype)

    def expert_input(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, D], what the experts read."""
        return x if self.to_latent is None else self.to_latent(x)

    def expert_output(self, y: Tensor) -> Tensor:
        """[T, D] -> [T, H], from what the experts gave."""
        return y if self.from_latent is None else self.from_latent(y)


class MoE(MoEParts):
    """y = sum over chosen experts of weight * expert(x), plus the shared expert's output, for x [..., H].

    Parameters start as nn.Linear's do. ``backend``: a name, a ``Backend``, or None for the one of the input's device;
    ``repr`` shows it. ``TritonBackend(Run(budget))`` keeps the layer's kernels to the compute SMs of a budget;
    for torch's own products call the layer, and its backward, within ``budget.library_gemms()``.

    All experts are in this process, or with ``transport`` spread over its ranks: this one holds ``expert_ids``. Then
    every rank calls forward and backward, with tokens of its own, or none; counts, losses and gradients are of these
    tokens, so gradients of all but the experts are still to be summed over the ranks. Ranks that start from one seed
    start as one process does. Copies share the transport. Raises SpecError for one that was made for another layer.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        backend: Backend | str | None = None,
        transport: ExpertTransport | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rank, world = (0, 1) if transport is None else (transport.rank, transport.traffic.world)
        if transport is not None:
            _check_traffic(config, transport.traffic)
        super().__init__(config, ep_rank=rank, ep_size=world, device=device, dtype=dtype)
        if isinstance(backend, str):
            backend = backend_for(self.router.weight.device, backend)
        self.backend, self.transport = backend, transport
        self.reset_parameters()

    def __deepcopy__(self, memo: dict[int, Any]) -> MoE:
        memo[id(self.transport)] = self.transport
        memo[id(self)] = other = type(self).__new__(type(self))
        vars(other).update(copy.deepcopy(vars(self), memo))
        return other

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(input features), as nn.Linear; router and expert biases and choice bias zero."""
        for parameter in (self.router.weight, self.experts.gate_up.weight, self.experts.down.weight):
            bound = 1.0 / math.sqrt(parameter.shape[-1])
            if parameter is self.router.weight:
                parameter.uniform_(-bound, bound)
                continue
            for expert in range(self.config.experts):  # also those of other ranks, so that all ranks draw alike
                drawn = torch.empty_like(parameter[0]).uniform_(-bound, bound)
                if expert in self.expert_ids:
                    parameter[expert - self.expert_ids.start] = drawn
        for zero in (self.router.bias, self.router.choice_bias, self.experts.gate_up.bias, self.experts.down.bias):
            if zero is not None:
                zero.zero_()
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()

    @overload
    def forward(self, x: Tensor, mask: Tensor | None = None, *, return_routing: Literal[False] = False) -> Tensor: ...

    @overload
    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, return_routing: Literal[True]
    ) -> tuple[Tensor, MoERouting]: ...

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, return_routing: bool = False
    ) -> Tensor | tuple[Tensor, MoERouting]:
        """``x`` [..., H] -> [..., H]. Where ``mask`` [...] (bool) is False, a token is padding.

        Padding is not routed to experts and counts in no loss and no counter; the shared expert sees it.
        """
        rows, of_tokens = checked(x, mask, self.config.hidden)
        choice = self.router(rows, of_tokens, budget=None if self.backend is None else self.backend.budget)
        y = mixed(self, rows, choice, self.backend, self.transport).view(x.shape)
        return (y, routing_of(self.config, choice, of_tokens)) if return_routing else y

    def update_choice_bias(self, counts: Tensor) -> None:
        """The rule of the choice bias, once a step: ``counts`` [E] of all micro-batches and ranks of the step.

        Does nothing without a choice bias.
        """
        if self.router.choice_bias is not None:
            update_choice_bias(self.router.choice_bias, counts, self.config.bias_update_rate)

    def extra_repr(self) -> str:
        where = "" if self.transport is None else f", transport={type(self.transport).__name__}"
        return f"backend={'by device' if self.backend is None else self.backend.name}{where}"


def mixed(
    parts: MoEParts,
    x: Tensor,
    choice: Choice,
    backend: Backend | None = None,
    transport: ExpertTransport | None = None,
) -> Tensor:
    """Experts (in this process, or behind ``transport``) and shared expert of ``x`` [T, H] for a choice: [T, H]."""
    given = (parts.expert_input(x), choice.ids, choice.weights, parts.experts.weights, parts.experts.gate)
    if transport is None:
        of_experts = routed_experts(*given, backend=backend)
    else:
        # A backend that has a form of its own behind a transport keeps what it was made with: the SM budget.
        compute = None if backend is None else getattr(backend, "rows", backend.name)
        of_experts = expert_parallel_mlp(*given, transport, compute=compute)
    y = parts.expert_output(of_experts)
    return y if parts.shared is None else y + parts.shared(x)


def _check_traffic(config: MoEConfig, traffic: Traffic) -> None:
    of_config = {"experts": config.experts, "top_k": config.top_k, "hidden": config.expert_input}
    problems = [
        Problem(f"transport.traffic.{name}", getattr(traffic, name), f"{wanted}, as in the configuration")
        for name, wanted in of_config.items()
        if getattr(traffic, name) != wanted
    ]
    if problems:
        raise SpecError.of("MoE layer", problems)


def routing_of(config: MoEConfig, choice: Choice, mask: Tensor | None) -> MoERouting:
    """The choice with its counts and losses, over the tokens that ``mask`` [T] keeps."""
    counts = expert_counts(choice.ids, config.experts)
    aux_loss = z_loss = choice.logits.new_zeros(())
    if config.aux_coefficient:
        scores = score_sum(choice, config.router, mask)
        aux_loss = (balance_gradient(scores, counts, config.aux_coefficient, config.top_k, 1.0) * scores).sum()
    if config.z_coefficient:
        squares = z_sum(choice, mask)
        z_loss = z_gradient(squares, counts, config.z_coefficient, config.top_k, 1.0) * squares
    return MoERouting(choice.logits, choice.weights, choice.ids, counts, aux_loss, z_loss)


def checked(x: Tensor, mask: Tensor | None, hidden: int) -> tuple[Tensor, Tensor | None]:
    """``x`` [..., H] as [T, H] and ``mask`` [...] as [T]. Raises SpecError when they do not fit."""
    problems = []
    if x.dim() < 1 or x.shape[-1] != hidden:
        problems.append(Problem("x.shape", tuple(x.shape), f"[..., {hidden}]"))
    if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:-1]):
        given = (str(mask.dtype), tuple(mask.shape))
        problems.append(Problem("mask", given, f"torch.bool {tuple(x.shape[:-1])}", "True where a token is real"))
    if problems:
        raise SpecError.of("MoE layer", problems)
    return x.reshape(-1, hidden), None if mask is None else mask.reshape(-1)
