"""The top-k softmax router: which experts each token goes to, and with which weights.

Shapes: T tokens, H hidden, E experts, K experts per token. Scores are computed in fp32 (float64 for float64 inputs).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tessera_rt.errors import Problem, SpecError
from tessera_rt.model_spec import FeedForward


@dataclass(frozen=True, slots=True)
class Choice:
    """What the router decided.

    ``weights`` [T, K] and ``prob_sum`` [E] (softmax probabilities summed over tokens, for the balance loss) are fp32
    or float64 and carry gradients. ``ids`` [T, K] int64 are distinct in each row; rows of tokens that are not routed
    hold E.
    """

    weights: Tensor
    ids: Tensor
    prob_sum: Tensor


class TopKRouter(nn.Module):
    """softmax -> top k -> optional renormalisation -> scale; or top k of the logits -> softmax over these -> scale.

    ``weight`` [E, H] starts uninitialised. Raises SpecError for router kinds it does not have.
    """

    def __init__(
        self,
        hidden: int,
        spec: FeedForward,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        problems = router_problems(spec)
        if problems:
            raise SpecError.of("router", problems)
        self.experts, self.top_k, self.spec = spec.experts, spec.top_k, spec.router
        if self.top_k == 1 and (self.spec.renormalize or self.spec.softmax_after_topk):
            warnings.warn(
                "router: with top_k = 1 and renormalisation every weight is exactly 1, so the router learns nothing "
                "from the model's loss; set renormalize: false (and softmax_after_topk: false)",
                stacklevel=2,
            )
        self.weight = nn.Parameter(torch.empty(spec.experts, hidden, device=device, dtype=dtype))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Choice:
        """``x`` [T, H]; tokens whose ``mask`` [T] is False are not routed and do not count."""
        precision = torch.promote_types(x.dtype, torch.float32)
        logits = x.to(precision) @ self.weight.to(precision).mT
        probabilities = logits.softmax(-1)
        # A stable sort: ids stay distinct and in range for NaN, infinities and ties, which the lowest id wins.
        ids = logits.detach().sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        if self.spec.softmax_after_topk:
            weights = logits.gather(-1, ids).softmax(-1)
        else:
            weights = probabilities.gather(-1, ids)
            if self.spec.renormalize:
                weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * self.spec.scale
        if mask is not None:
            routed = mask.unsqueeze(-1)
            ids = ids.masked_fill(~routed, self.experts)
            weights = weights.masked_fill(~routed, 0.0)
            probabilities = probabilities.masked_fill(~routed, 0.0)
        return Choice(weights, ids, probabilities.sum(0))


def balance_gradient(prob_sum: Tensor, counts: Tensor, coefficient: float, top_k: int, aux_scale: float) -> Tensor:
    """Gradient [E] of the load-balance loss for ``prob_sum`` [E]; its product with ``prob_sum`` is the loss itself.

    loss = coefficient * aux_scale * E * sum over e of (counts_e / (T K)) * (prob_sum_e / T), with ``counts`` [..., E]
    and the number of tokens T summed over all ranks of the micro-batch (Switch Transformer, Fedus et al. 2022, eq. 4,
    for K choices). Zero if no token was routed.
    """
    per_expert = counts.reshape(-1, counts.shape[-1]).sum(0).to(device=prob_sum.device, dtype=torch.float64)
    assignments = per_expert.sum().clamp(min=1.0)  # T K
    factor = coefficient * aux_scale * per_expert.numel()
    return (factor * (per_expert / assignments) / (assignments / top_k)).to(prob_sum.dtype)


def router_problems(spec: FeedForward) -> list[Problem]:
    """What this router cannot do of a MoE feed-forward's description."""
    router, problems = spec.router, []
    if spec.experts < 1:
        problems.append(Problem("experts", spec.experts, "at least 1"))
    if not 1 <= spec.top_k <= max(spec.experts, 1):
        problems.append(Problem("top_k", spec.top_k, f"from 1 to the number of experts {spec.experts}"))
    if router.score != "softmax":
        problems.append(Problem("router.score", router.score, "softmax", "other scores can only be planned, not run"))
    if router.choice_bias:
        problems.append(Problem("router.choice_bias", True, "false", "a choice bias can only be planned, not run"))
    if router.groups != 1 or router.keep_groups != 1:
        given = (router.groups, router.keep_groups)
        problems.append(Problem("router.groups, keep_groups", given, "1, 1", "groups can only be planned, not run"))
    if not (math.isfinite(router.scale) and router.scale > 0):
        problems.append(Problem("router.scale", router.scale, "a positive number"))
    if not (math.isfinite(router.aux_coefficient) and router.aux_coefficient >= 0):
        problems.append(Problem("router.aux_coefficient", router.aux_coefficient, "a number of at least 0"))
    return problems
