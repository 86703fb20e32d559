"""A MoE layer's second half: norm, router, dispatch, experts, shared expert, combine, residual; whole or as steps.

``MoEBlock`` holds the modules and one method per compute task. ``moe_steps`` turns it into the steps that the engine
runs; ``MoEBlock.forward`` composes the same methods in one process. No method keeps anything on ``self``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from tessera_rt.errors import PlanError, Problem, SpecError
from tessera_rt.model_spec import FeedForward
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
from tessera_rt.moe.experts import Experts, SharedExpert, activation_problems
from tessera_rt.moe.router import TopKRouter, balance_gradient, router_problems
from tessera_rt.moe.steps import CommStep, ComputeStep, Pending, Seed, Step, Transport
from tessera_rt.moe.transport import LocalTransport
from tessera_rt.tasks import TaskKind

ResidualHook = Callable[[Tensor, int], Tensor]  # (branch output [..., H], random_key) -> the same shape


class MoEBlock(nn.Module):
    """y = x + sum over chosen experts of weight * expert(norm(x)) + shared(norm(x)), for x [..., H].

    Holds the experts of ``ep_rank``: global ids ``expert_ids``. Tokens equal to ``pad_token`` are not routed and do not
    count in the balance loss. ``before_residual`` is applied to the sum of the branches (dropout, say). Raises
    SpecError for descriptions it cannot run, PlanError when ``ep_size`` does not divide the experts.
    """

    def __init__(
        self,
        hidden: int,
        spec: FeedForward,
        *,
        norm_eps: float = 1e-6,
        ep_rank: int = 0,
        ep_size: int = 1,
        pad_token: int | None = None,
        before_residual: ResidualHook | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        problems = moe_problems(spec)
        if problems:
            raise SpecError.of("MoE layer", problems)
        if spec.experts % ep_size or not 0 <= ep_rank < ep_size:
            problem = Problem("ep_rank, ep_size", (ep_rank, ep_size), f"a rank and a divisor of {spec.experts} experts")
            raise PlanError.of("MoE layer", [problem])
        local = spec.experts // ep_size
        self.expert_ids = range(ep_rank * local, (ep_rank + 1) * local)
        self.aux_coefficient = spec.router.aux_coefficient
        self.top_k, self.pad_token, self._before_residual = spec.top_k, pad_token, before_residual
        self.norm = nn.RMSNorm(hidden, eps=norm_eps, device=device, dtype=dtype)
        self.router = TopKRouter(hidden, spec, device=device, dtype=dtype)
        self.experts = Experts(local, hidden, spec, device=device, dtype=dtype)
        shared = SharedExpert(hidden, spec, device=device, dtype=dtype) if spec.shared_intermediate else None
        self.shared: SharedExpert | None = shared

    def route(self, x: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """``x`` [..., H], ``tokens`` [...] -> rows [R, H], weights [T, K], order [R], counts [E], prob_sum [E], hidden.

        ``hidden`` [T, H] is the normalised input, for the shared expert.
        """
        hidden = self.norm(x).reshape(-1, x.shape[-1])
        mask = None if self.pad_token is None or tokens is None else tokens.reshape(-1) != self.pad_token
        choice = self.router(hidden, mask)
        order, counts = send_order(choice.ids, self.router.experts)
        rows = gather_rows(hidden, order, self.top_k)
        return rows, choice.weights, order, counts, choice.prob_sum, hidden

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
        """The weighted sum of the returned rows [R, H], plus ``shared`` [T, H], plus the residual ``x`` [..., H]."""
        branch = weighted_sum(returned, weights, order)
        if shared is not None:
            branch = branch + shared
        branch = branch.view(x.shape)
        if self._before_residual is not None:
            branch = self._before_residual(branch, random_key)
        return (x + branch,)

    def forward(
        self, x: Tensor, tokens: Tensor | None = None, *, random_key: int = 0, aux_scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """``x`` [..., H] -> (y [..., H], balance loss []), with all experts in this process."""
        rows, weights, order, counts, prob_sum, hidden = self.route(x, tokens)
        transport = LocalTransport()
        routing: Routing = _issue_count(transport, counts).wait()
        (processed,) = self.run_experts(transport.dispatch(rows, routing.layout).wait(), routing)
        returned = transport.combine(processed, routing.layout).wait()
        shared = None if self.shared is None else self.run_shared(hidden)[0]
        (y,) = self.finish(x, returned, weights, order, random_key, shared)
        aux = balance_gradient(prob_sum, routing.counts, self.aux_coefficient, self.top_k, aux_scale) * prob_sum
        return y, aux.sum()


def moe_steps(label: str, block: MoEBlock, input: str, output: str) -> tuple[Step, ...]:
    """The steps of the block: ROUTE, COUNT, DISP, SHARED (if it has one), MLP, COMB, POST.

    ``input`` and ``output`` name the residual stream before and after; all other values are named ``<label>.<what>``.
    """

    def name(*values: str) -> tuple[str, ...]:
        return tuple(f"{label}.{value}" for value in values)

    rows, weights, order, counts, prob_sum, hidden, routing, received, processed, returned, shared = name(
        "rows", "weights", "order", "counts", "prob_sum", "hidden", "routing", "received", "processed", "returned",
        "shared",
    )  # fmt: skip
    # Outputs that nobody reads are left out: they would only be kept in memory.
    aux, has_shared = block.aux_coefficient > 0, block.shared is not None
    route_outputs = (rows, weights, order, counts, *([prob_sum] if aux else []), *([hidden] if has_shared else []))
    seeds = (
        Seed(
            output=prob_sum,
            fn=partial(_balance_seed, block.aux_coefficient, block.top_k),
            inputs=(prob_sum, routing, "aux_scale"),
            metric="aux_loss",
        ),
    )
    steps: list[Step] = [
        ComputeStep(
            TaskKind.ROUTE,
            label,
            partial(_route, block, aux, has_shared),
            (input, "tokens"),
            route_outputs,
            seeds if aux else (),
        ),
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


def moe_problems(spec: FeedForward) -> list[Problem]:
    """What the block cannot run of a MoE feed-forward's description."""
    problems = [*router_problems(spec), *activation_problems(spec)]
    if spec.intermediate < 1:
        problems.append(Problem("intermediate", spec.intermediate, "at least 1"))
    if spec.shared_intermediate < 0:
        problems.append(Problem("shared_intermediate", spec.shared_intermediate, "at least 0"))
    if spec.bias:
        problems.append(Problem("bias", True, "false", "experts with biases can only be planned, not run"))
    if spec.latent:
        problems.append(Problem("latent", spec.latent, "0", "a latent expert input can only be planned, not run"))
    return problems


def _route(block: MoEBlock, aux: bool, shared: bool, x: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
    *needed, prob_sum, hidden = block.route(x, tokens)
    return (*needed, *([prob_sum] if aux else []), *([hidden] if shared else []))


def _balance_seed(coefficient: float, top_k: int, prob_sum: Tensor, routing: Routing, aux_scale: float) -> Tensor:
    return balance_gradient(prob_sum, routing.counts, coefficient, top_k, aux_scale)


def _issue_count(transport: Transport, counts: Tensor) -> RoutingPending:
    return RoutingPending(transport.gather_counts(counts), transport.dp_rank, transport.ep_rank)


def _issue_dispatch(transport: Transport, rows: Tensor, routing: Routing) -> Pending:
    return transport.dispatch(rows, routing.layout)


def _issue_combine(transport: Transport, rows: Tensor, routing: Routing) -> Pending:
    return transport.combine(rows, routing.layout)
