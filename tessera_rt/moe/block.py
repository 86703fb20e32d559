"""A MoE layer's second half: norm, router, dispatch, experts, shared expert, combine, residual; whole or as steps.

``MoEBlock`` holds the modules and one method per compute task. ``moe_steps`` turns it into the steps that the engine
runs; ``MoEBlock.forward`` is the same function in one process. No method keeps anything on ``self``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from tessera_rt.moe.config import MoEConfig
from tessera_rt.moe.dispatch import (
    Routing,
    RoutingPending,
    expert_offsets,
    gather_rows,
    group_by_expert,
    group_by_source,
    send_order,
    weighted_sum,
)
from tessera_rt.moe.layer import MoEParts, mixed, routing_of
from tessera_rt.moe.router import Choice, balance_gradient, score_sum, z_gradient, z_sum
from tessera_rt.moe.steps import CommStep, ComputeStep, Pending, Seed, Step, Transport
from tessera_rt.tasks import TaskKind

ResidualHook = Callable[[Tensor, int], Tensor]  # (branch output [..., H], random_key) -> the same shape


@dataclass(frozen=True, slots=True)
class Routed:
    """What the ROUTE task makes. ``mask`` [T] or None; ``hidden`` [T, H], the normalised input; ``rows`` [R, D] in the
    ``order`` [R] in which they leave; ``counts`` [E] int64."""

    choice: Choice
    mask: Tensor | None
    hidden: Tensor
    rows: Tensor
    order: Tensor
    counts: Tensor


class MoEBlock(MoEParts):
    """y = x + sum over chosen experts of weight * expert(norm(x)) + shared(norm(x)), for x [..., H].

    Holds the experts of ``ep_rank``: global ids ``expert_ids``. Tokens equal to ``pad_token`` are not routed and do not
    count in the router's losses. ``before_residual`` is applied to the sum of the branches (dropout, say). Raises
    SpecError for a configuration with faults, PlanError when ``ep_size`` does not divide the experts.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        norm_eps: float = 1e-6,
        ep_rank: int = 0,
        ep_size: int = 1,
        pad_token: int | None = None,
        before_residual: ResidualHook | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, ep_rank=ep_rank, ep_size=ep_size, device=device, dtype=dtype)
        self.pad_token, self._before_residual = pad_token, before_residual
        self.norm = nn.RMSNorm(config.hidden, eps=norm_eps, device=device, dtype=dtype)

    def route(self, x: Tensor, tokens: Tensor | None = None) -> Routed:
        """``x`` [..., H], ``tokens`` [...] -> the choice, and what leaves for the experts."""
        hidden = self.norm(x).reshape(-1, x.shape[-1])
        mask = self._mask(tokens)
        choice = self.router(hidden, mask)
        order, counts = send_order(choice.ids, self.config.experts)
        rows = gather_rows(self.expert_input(hidden), order, self.config.top_k)
        return Routed(choice, mask, hidden, rows, order, counts)

    def run_experts(self, received: Tensor, routing: Routing) -> tuple[Tensor]:
        """Received rows, ordered by (source, expert) -> the experts' outputs in the same order."""
        rows = group_by_expert(received, routing.layout)
        return (group_by_source(self.experts(rows, expert_offsets(routing.layout)), routing.layout),)

    def run_shared(self, hidden: Tensor) -> tuple[Tensor]:
        """``hidden`` [T, H] -> [T, H]."""
        assert self.shared is not None
        return (self.shared(hidden),)

    def finish(
        self, x: Tensor, returned: Tensor, weights: Tensor, order: Tensor, random_key: int, shared: Tensor | None = None
    ) -> tuple[Tensor]:
        """The weighted sum of the returned rows [R, D], plus ``shared`` [T, H], plus the residual ``x`` [..., H]."""
        branch = self.expert_output(weighted_sum(returned, weights, order))
        return (self._residual(x, branch if shared is None else branch + shared, random_key),)

    def forward(
        self, x: Tensor, tokens: Tensor | None = None, *, random_key: int = 0, aux_scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """``x`` [..., H] -> (y [..., H], the router's losses []), with all experts in this process."""
        hidden = self.norm(x).reshape(-1, x.shape[-1])
        mask = self._mask(tokens)
        choice = self.router(hidden, mask)
        y = self._residual(x, mixed(self, hidden, choice), random_key)
        routing = routing_of(self.config, choice, mask)
        return y, (routing.aux_loss + routing.z_loss) * aux_scale

    def _mask(self, tokens: Tensor | None) -> Tensor | None:
        return None if self.pad_token is None or tokens is None else tokens.reshape(-1) != self.pad_token

    def _residual(self, x: Tensor, branch: Tensor, random_key: int) -> Tensor:
        branch = branch.view(x.shape)
        return x + (branch if self._before_residual is None else self._before_residual(branch, random_key))


def moe_steps(label: str, block: MoEBlock, input: str, output: str) -> tuple[Step, ...]:
    """The steps of the block: ROUTE, COUNT, DISP, SHARED (if it has one), MLP, COMB, POST.

    ``input`` and ``output`` name the residual stream before and after; all other values are named ``<label>.<what>``.
    """

    def name(*values: str) -> tuple[str, ...]:
        return tuple(f"{label}.{value}" for value in values)

    rows, weights, order, counts, scores, squares, hidden, routing, received, processed, returned, shared = name(
        "rows", "weights", "order", "counts", "score_sum", "z_sum", "hidden", "routing", "received", "processed",
        "returned", "shared",
    )  # fmt: skip
    # Outputs that nobody reads are left out: they would only be kept in memory.
    config, has_shared = block.config, block.shared is not None
    losses = [
        (output, partial(_loss_gradient, gradient, coefficient, config.top_k))
        for output, gradient, coefficient in (
            (scores, balance_gradient, config.aux_coefficient),
            (squares, z_gradient, config.z_coefficient),
        )
        if coefficient > 0
    ]
    seeds = tuple(Seed(output, fn, (output, routing, "aux_scale"), "aux_loss") for output, fn in losses)
    route_outputs = (rows, weights, order, counts, *(seed.output for seed in seeds), *([hidden] if has_shared else []))
    steps: list[Step] = [
        ComputeStep(TaskKind.ROUTE, label, partial(_route, block), (input, "tokens"), route_outputs, seeds),
        CommStep(TaskKind.COUNT, label, _issue_count, None, (counts,), routing),
        CommStep(TaskKind.DISP, label, _issue_dispatch, _issue_combine, (rows, routing), received),
    ]
    if has_shared:
        steps.append(ComputeStep(TaskKind.SHARED, label, block.run_shared, (hidden,), (shared,)))
    post_inputs = (input, returned, weights, order, "random_key", *([shared] if has_shared else []))
    steps += [
        ComputeStep(TaskKind.MLP, label, block.run_experts, (received, routing), (processed,)),
        CommStep(TaskKind.COMB, label, _issue_combine, _issue_dispatch, (processed, routing), returned),
        ComputeStep(TaskKind.POST, label, block.finish, post_inputs, (output,)),
    ]
    return tuple(steps)


def _route(block: MoEBlock, x: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
    routed, config = block.route(x, tokens), block.config
    return (
        routed.rows,
        routed.choice.weights,
        routed.order,
        routed.counts,
        *([score_sum(routed.choice, config.router, routed.mask)] if config.aux_coefficient > 0 else []),
        *([z_sum(routed.choice, routed.mask)] if config.z_coefficient > 0 else []),
        *([routed.hidden] if block.shared is not None else []),
    )


def _loss_gradient(
    gradient: Callable[[Tensor, Tensor, float, int, float], Tensor],
    coefficient: float,
    top_k: int,
    value: Tensor,
    routing: Routing,
    aux_scale: float,
) -> Tensor:
    return gradient(value, routing.counts, coefficient, top_k, aux_scale)


def _issue_count(transport: Transport, counts: Tensor) -> RoutingPending:
    return RoutingPending(transport.gather_counts(counts), transport.dp_rank, transport.ep_rank)


def _issue_dispatch(transport: Transport, rows: Tensor, routing: Routing) -> Pending:
    return transport.dispatch(rows, routing.layout)


def _issue_combine(transport: Transport, rows: Tensor, routing: Routing) -> Pending:
    return transport.combine(rows, routing.layout)
