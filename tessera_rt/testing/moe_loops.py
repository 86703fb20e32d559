"""A MoE layer as loops over tokens and experts: every formula written out, nothing shared with what it checks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tessera_rt.kernels.options import Activation, Gate, RouterRule
from tessera_rt.kernels.weights import ExpertWeights
from tessera_rt.moe.layer import MoEParts


@dataclass(frozen=True, slots=True)
class LoopResult:
    """``y`` [T, H]; ``ids``: the chosen experts of each token, best first, None for padding; losses with their
    coefficients."""

    y: Tensor
    ids: list[list[int] | None]
    counts: list[int]
    aux_loss: Tensor
    z_loss: Tensor


def chosen_by_loop(logits: Tensor, rule: RouterRule, bias: Tensor | None) -> tuple[list[int], Tensor]:
    """Experts of one token, best first, and their weights, out of ``logits`` [E]."""
    scores = torch.exp(logits) / torch.exp(logits).sum()
    if rule.score == "sigmoid":
        scores = 1 / (1 + torch.exp(-logits))
    by: list[float] = (scores.detach() if bias is None else scores.detach() + bias).tolist()
    size = len(by) // rule.groups
    groups = [range(g * size, (g + 1) * size) for g in range(rule.groups)]

    def worth(group: range) -> float:
        best = sorted((by[e] for e in group), reverse=True)
        return sum(best[:2]) if rule.group_score == "top2" else best[0]

    open_groups = sorted(groups, key=worth, reverse=True)[: rule.keep_groups]
    candidates = sorted(e for group in open_groups for e in group)
    ids = sorted(candidates, key=lambda e: by[e], reverse=True)[: rule.top_k]
    if rule.softmax_after_topk:
        weights = torch.exp(logits[ids]) / torch.exp(logits[ids]).sum()
    else:
        weights = scores[ids]
    if rule.renormalize:
        weights = weights / (weights.sum() + rule.eps)
    return ids, weights * rule.scale


def activated_by_loop(pre: Tensor, gate: Gate) -> Tensor:
    """[2 I] or [I] -> [I]."""
    if gate.activation is Activation.RELU2:
        return torch.where(pre > 0, pre * pre, 0.0)
    half = len(pre) // 2
    g, u = (pre[0::2], pre[1::2]) if gate.interleaved else (pre[:half], pre[half:])
    if gate.activation in (Activation.SWIGLU_CLAMPED, Activation.SWIGLU_OSS):
        g = torch.where(g > gate.limit, gate.limit, g)
        u = torch.where(u > gate.limit, gate.limit, torch.where(u < -gate.limit, -gate.limit, u))
    match gate.activation:
        case Activation.GEGLU:
            return g * 0.5 * (1 + torch.erf(g / 2**0.5)) * u
        case Activation.GEGLU_TANH:
            return 0.5 * g * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3))) * u
        case Activation.SWIGLU_OSS:
            return g / (1 + torch.exp(-gate.alpha * g)) * (u + 1)
    return g / (1 + torch.exp(-g)) * u


def expert_by_loop(row: Tensor, expert: int, weights: ExpertWeights, gate: Gate) -> Tensor:
    """One row [D] through one expert: [D]."""
    pre = weights.gate_up[expert] @ row
    if weights.gate_up_bias is not None:
        pre = pre + weights.gate_up_bias[expert]
    out = weights.down[expert] @ activated_by_loop(pre, gate)
    return out if weights.down_bias is None else out + weights.down_bias[expert]


def moe_by_loop(parts: MoEParts, x: Tensor, mask: Tensor | None = None) -> LoopResult:
    """The layer of ``parts`` (all experts) for ``x`` [T, H]; differentiable. Work in float64."""
    config, router = parts.config, parts.router
    chosen: list[list[int] | None] = []
    outputs, counts = [], [0] * config.experts
    score_sum, squares, tokens = x.new_zeros(config.experts), x.new_zeros(()), 0
    for t, token in enumerate(x):
        out = torch.zeros_like(token)
        if mask is None or bool(mask[t]):
            tokens += 1
            logits = router.weight @ token
            if router.bias is not None:
                logits = logits + router.bias
            ids, weights = chosen_by_loop(logits, config.router, router.choice_bias)
            row = token if parts.to_latent is None else parts.to_latent.weight @ token
            terms = [
                w * expert_by_loop(row, e, parts.experts.weights, config.gate)
                for e, w in zip(ids, weights, strict=True)
            ]
            total = torch.stack(terms).sum(0)
            out = out + (total if parts.from_latent is None else parts.from_latent.weight @ total)
            for e in ids:
                counts[e] += 1
            exponentials = torch.exp(logits)
            scores = exponentials if config.router.score == "softmax" else 1 / (1 + torch.exp(-logits))
            score_sum = score_sum + scores / scores.sum()
            squares = squares + torch.log(exponentials.sum()) ** 2
            chosen.append(ids)
        else:
            chosen.append(None)
        if parts.shared is not None:
            pre = parts.shared.gate_up.weight @ token
            shared = parts.shared.down.weight @ activated_by_loop(pre, parts.shared.activation)
            if parts.shared.gate is not None:
                shared = shared / (1 + torch.exp(-(parts.shared.gate.weight @ token)))
            out = out + shared
        outputs.append(out)
    share = torch.tensor(counts, dtype=x.dtype) / max(tokens * config.top_k, 1)
    return LoopResult(
        y=torch.stack(outputs) if outputs else x * 0,
        ids=chosen,
        counts=counts,
        aux_loss=config.aux_coefficient * config.experts * (share * score_sum).sum() / max(tokens, 1),
        z_loss=config.z_coefficient * squares / max(tokens, 1),
    )
