"""The router: which experts each token goes to and with which weights, its losses, and the rule of its choice bias.

Logits, scores and weights are fp32 (float64 for float64 inputs), whatever the model's dtype.

Shapes: T tokens, H hidden, E experts, K experts per token.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tessera_rt.kernels import reference
from tessera_rt.kernels.budget import SmBudget
from tessera_rt.kernels.options import RouterRule
from tessera_rt.moe.config import MoEConfig


@dataclass(frozen=True, slots=True)
class Choice:
    """What the router decided. ``weights`` [T, K] and ``logits`` [T, E] are fp32 or float64 and carry gradients.

    ``ids`` [T, K] int64 are distinct in each row, best first; rows of tokens that are not routed hold -1.
    """

    weights: Tensor
    ids: Tensor
    logits: Tensor


class TopKRouter(nn.Module):
    """Linear logits and ``config.router``'s rule. ``weight`` [E, H] and ``bias`` [E] start uninitialised.

    ``choice_bias`` [E] is a buffer that starts at zero, in fp32 (float64 for float64 parameters); it is part of the
    state dict, gets no gradient, and is moved by ``update_choice_bias``.
    """

    bias: nn.Parameter | None
    choice_bias: Tensor | None

    def __init__(
        self, config: MoEConfig, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        config.check()
        self.experts, self.rule = config.experts, config.router
        if self.rule.top_k == 1 and (self.rule.renormalize or self.rule.softmax_after_topk):
            warnings.warn(
                "router: with top_k = 1 and renormalisation every weight is exactly 1, so the router learns nothing "
                "from the model's loss; set renormalize: false (and softmax_after_topk: false)",
                stacklevel=2,
            )
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden, device=device, dtype=dtype))
        bias = nn.Parameter(torch.empty(config.experts, device=device, dtype=dtype)) if config.router_bias else None
        self.register_parameter("bias", bias)
        precision = torch.promote_types(self.weight.dtype, torch.float32)
        zeros = torch.zeros(config.experts, device=device, dtype=precision) if config.choice_bias else None
        self.register_buffer("choice_bias", zeros)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, budget: SmBudget | None = None) -> Choice:
        """``x`` [T, H]; tokens whose ``mask`` [T] is False are not routed. ``budget``: the SMs that the choice has."""
        precision = torch.promote_types(x.dtype, torch.float32)
        if mask is not None:  # whatever padding holds, it reaches no gradient
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
        with torch.autocast(x.device.type, enabled=False):
            logits = x.to(precision) @ self.weight.to(precision).mT
            if self.bias is not None:
                logits = logits + self.bias.to(precision)
            bias = None if self.choice_bias is None else self.choice_bias.to(precision)
            ids, weights = choose(logits, self.rule, bias=bias, mask=mask, budget=budget)
        return Choice(weights, ids.long(), logits)

    def extra_repr(self) -> str:
        return f"experts={self.experts}, hidden={self.weight.shape[1]}, {self.rule}"


def choose(
    logits: Tensor,
    rule: RouterRule,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    budget: SmBudget | None = None,
) -> tuple[Tensor, Tensor]:
    """``kernels.reference.topk``: ids [T, K] int32 and weights [T, K] of fp32 or float64 ``logits`` [T, E].

    One operator (``tessera::topk``), so that activation checkpointing can save the decision (``save_routing``). On CUDA
    the Triton kernel decides, in the compute SMs of ``budget``, elsewhere plain torch. Differentiable once, in the
    logits.
    """
    ids, weights = _topk(
        logits, bias, mask, rule.top_k, rule.score, rule.softmax_after_topk, rule.renormalize, rule.eps, rule.scale,
        rule.groups, rule.keep_groups, rule.group_score, 0 if budget is None else budget.compute,
    )  # fmt: skip
    return ids, weights


def score_sum(choice: Choice, rule: RouterRule, mask: Tensor | None = None) -> Tensor:
    """[E]: every expert's scores, normalised to sum 1 per token, summed over the tokens that ``mask`` [T] keeps."""
    if rule.score == "sigmoid":
        scores = choice.logits.sigmoid()
        scores = scores / scores.sum(-1, keepdim=True)
    else:
        scores = choice.logits.softmax(-1)
    return _kept(scores, mask).sum(0)


def z_sum(choice: Choice, mask: Tensor | None = None) -> Tensor:
    """[]: logsumexp(logits)^2, summed over the tokens that ``mask`` [T] keeps."""
    return _kept(choice.logits.logsumexp(-1).square(), mask).sum()


def balance_gradient(score_sum: Tensor, counts: Tensor, coefficient: float, top_k: int, aux_scale: float) -> Tensor:
    """Gradient [E] of the load-balance loss for ``score_sum`` [E]; its product with ``score_sum`` is the loss itself.

    loss = coefficient * aux_scale * E * sum over e of (counts_e / (T K)) * (score_sum_e / T), with ``counts`` [..., E]
    and the number of tokens T summed over all ranks of the micro-batch (Switch Transformer, Fedus et al. 2022, eq. 4,
    for K choices; sigmoid scores normalised as in DeepSeek-V3, eq. 18). Zero if no token was routed.
    """
    per_expert = counts.reshape(-1, counts.shape[-1]).sum(0).to(device=score_sum.device, dtype=torch.float64)
    assignments = per_expert.sum().clamp(min=1.0)  # T K
    factor = coefficient * aux_scale * per_expert.numel()
    return (factor * (per_expert / assignments) / (assignments / top_k)).to(score_sum.dtype)


def z_gradient(z_sum: Tensor, counts: Tensor, coefficient: float, top_k: int, aux_scale: float) -> Tensor:
    """Gradient [] of the router's z-loss for ``z_sum``: coefficient * aux_scale / T, T as in ``balance_gradient``.

    The loss is the mean over tokens of logsumexp(logits)^2 (ST-MoE, Zoph et al. 2022, eq. 5).
    """
    tokens = counts.sum().to(device=z_sum.device, dtype=torch.float64).clamp(min=1.0) / top_k
    return (coefficient * aux_scale / tokens).to(z_sum.dtype)


def expert_counts(ids: Tensor, experts: int) -> Tensor:
    """[E] int64, on the device of ``ids`` [T, K]: how many choices each expert got. No host read."""
    flat = ids.reshape(-1).long()
    there = (flat >= 0) & (flat < experts)
    return flat.new_zeros(experts).scatter_add_(0, flat.where(there, 0), there.long())


@torch.no_grad()
def update_choice_bias(bias: Tensor, counts: Tensor, rate: float) -> None:
    """Moves ``bias`` [E] in place by ``rate``: up for experts with fewer choices than the mean, down for more.

    Auxiliary-loss-free balancing (Wang et al. 2024; DeepSeek-V3, section 2.1.2). To be called once a step, with
    ``counts`` [E] summed over the step's micro-batches and over all ranks that hold other tokens.
    """
    load = counts.to(device=bias.device, dtype=torch.float64)
    bias += (rate * torch.sign(load.mean() - load)).to(bias.dtype)


def _kept(of_tokens: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return of_tokens
    return of_tokens.masked_fill(~mask.view(-1, *[1] * (of_tokens.dim() - 1)), 0.0)


# -- the operator -----------------------------------------------------------------------------------------------------


@torch.library.custom_op("tessera::topk", mutates_args=())
def _topk(
    logits: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    top_k: int,
    score: str,
    softmax_after_topk: bool,
    renormalize: bool,
    eps: float,
    scale: float,
    groups: int,
    keep_groups: int,
    group_score: str,
    sms: int,  # that the kernel may use; 0: all
) -> tuple[Tensor, Tensor]:
    rule = _rule(top_k, score, softmax_after_topk, renormalize, eps, scale, groups, keep_groups, group_score)
    if _on_gpu(logits):
        from tessera_rt.kernels import routing  # an optional package, loaded where there is a GPU

        return routing.topk(logits, rule, bias=bias, mask=mask, budget=SmBudget(sms) if sms else None)
    return reference.topk(logits, rule, bias=bias, mask=mask)


@_topk.register_fake
def _(logits: Tensor, bias: Tensor | None, mask: Tensor | None, top_k: int, *rule: object) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)


@torch.library.custom_op("tessera::topk_backward", mutates_args=())
def _topk_backward(
    grad: Tensor,
    logits: Tensor,
    ids: Tensor,
    top_k: int,
    score: str,
    softmax_after_topk: bool,
    renormalize: bool,
    eps: float,
    scale: float,
    groups: int,
    keep_groups: int,
    group_score: str,
    sms: int,
) -> Tensor:
    rule = _rule(top_k, score, softmax_after_topk, renormalize, eps, scale, groups, keep_groups, group_score)
    if _on_gpu(logits):
        from tessera_rt.kernels import routing  # an optional package, loaded where there is a GPU

        return routing.topk_backward(grad, logits, ids, rule, budget=SmBudget(sms) if sms else None)
    return _gradient_of_logits(grad, logits, ids, rule)


def _gradient_of_logits(grad: Tensor, logits: Tensor, ids: Tensor, rule: RouterRule) -> Tensor:
    """``kernels.reference.topk_backward`` written out: autograd does not work inside an operator."""
    absent = (ids < 0) | (ids >= logits.shape[1])
    routed, at = ~absent, ids.masked_fill(absent, 0).long()
    d_weights = (grad * rule.scale).masked_fill(absent, 0.0)
    of_chosen = torch.zeros_like(logits)
    if rule.softmax_after_topk:
        weights = logits.gather(-1, at).masked_fill(absent, -torch.inf).softmax(-1)
        d_chosen = _renormalized_gradient(d_weights, weights, rule)
        d_chosen = weights * (d_chosen - (d_chosen * weights).sum(-1, keepdim=True))
        d_logits = of_chosen.scatter_add_(-1, at, d_chosen)
    else:
        scores = logits.sigmoid() if rule.score == "sigmoid" else logits.softmax(-1)
        weights = scores.gather(-1, at).masked_fill(absent, 0.0)
        d_chosen = _renormalized_gradient(d_weights, weights, rule).masked_fill(absent, 0.0)
        d_scores = of_chosen.scatter_add_(-1, at, d_chosen)
        if rule.score == "sigmoid":
            d_logits = d_scores * scores * (1 - scores)
        else:
            d_logits = scores * (d_scores - (d_scores * scores).sum(-1, keepdim=True))
    return d_logits.masked_fill(~routed.any(-1, keepdim=True), 0.0)  # whatever a token that is left out holds


def _renormalized_gradient(grad: Tensor, weights: Tensor, rule: RouterRule) -> Tensor:
    if not rule.renormalize:
        return grad
    total = weights.sum(-1, keepdim=True) + rule.eps
    return (grad - (grad * weights).sum(-1, keepdim=True) / total) / total


@_topk_backward.register_fake
def _(grad: Tensor, logits: Tensor, *args: object) -> Tensor:
    return logits.new_empty(logits.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[0])
    ctx.rule = inputs[3:]
    ctx.mark_non_differentiable(output[0])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, _: None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    logits, ids = ctx.saved_tensors
    return (None if grad is None else _topk_backward(grad, logits, ids, *ctx.rule), *[None] * (2 + len(ctx.rule)))


_topk.register_autograd(_backward, setup_context=_save)


def _rule(
    top_k: int,
    score: str,
    softmax_after_topk: bool,
    renormalize: bool,
    eps: float,
    scale: float,
    groups: int,
    keep_groups: int,
    group_score: str,
) -> RouterRule:
    return RouterRule(
        top_k=top_k, score=score, softmax_after_topk=softmax_after_topk, renormalize=renormalize, eps=eps,
        scale=scale, groups=groups, keep_groups=keep_groups, group_score=group_score,
    )  # fmt: skip


def _on_gpu(logits: Tensor) -> bool:
    """Whether Triton decides: it works in fp32."""
    return logits.device.type == "cuda" and logits.dtype == torch.float32


ROUTING_DECISION = torch.ops.tessera.topk.default
"""The operator that decides, as activation checkpointing sees it."""
