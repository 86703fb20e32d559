"""What callers choose: activation, gate constants, the rule of the router. Plain data for kernels and reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from tessera_rt.errors import Problem, SpecError

MAX_EXPERTS = 1024  # per rank; the routing kernels hold a row of scores in one block


class Activation(IntEnum):
    """What an expert does between its two products. L is the limit, a the alpha of the clamped kinds."""

    NONE = 0
    SWIGLU = 1  # silu(gate) up
    SWIGLU_CLAMPED = 2  # gate <= L, -L <= up <= L, then as SWIGLU
    SWIGLU_OSS = 3  # clamped likewise; gate sigmoid(a gate) (up + 1)
    GEGLU = 4  # gelu(gate) up, exact
    GEGLU_TANH = 5  # its tanh approximation
    RELU2 = 6  # relu(x)^2, no gate

    @property
    def gated(self) -> bool:
        """Whether the first product has two halves, gate and up."""
        return self not in (Activation.NONE, Activation.RELU2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Activation of the first product. Its 2 I columns are [gate; up], or gate and up in turn when ``interleaved``."""

    activation: Activation = Activation.SWIGLU
    interleaved: bool = False
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        given: object = self.activation
        if not isinstance(given, Activation):
            allowed = ", ".join(f"Activation.{each.name}" for each in Activation)
            raise SpecError.of("gate", [Problem("activation", given, f"one of {allowed}")])
        problems = []
        if not (math.isfinite(self.limit) and self.limit > 0):
            problems.append(Problem("limit", self.limit, "a positive number"))
        if not math.isfinite(self.alpha):
            problems.append(Problem("alpha", self.alpha, "a finite number"))
        if problems:
            raise SpecError.of("gate", problems)

    @property
    def gated(self) -> bool:
        return self.activation.gated

    def width(self, columns: int) -> int:
        """Columns of the activation out of those of the product."""
        return columns // 2 if self.gated else columns


NO_GATE = Gate(activation=Activation.NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRule:
    """How the top ``top_k`` experts of a token and their weights follow from its logits.

    Scores are softmax or sigmoid of the logits. With ``groups`` > 1 only the ``keep_groups`` best groups of experts
    compete; a group counts as the sum of its two best choice scores or as its best one. The choice scores of the others
    then are -inf. ``softmax_after_topk``: softmax over the chosen logits instead of all. ``renormalize``: weights /
    (their sum + eps). Then times ``scale``.
    """

    top_k: int
    score: str = "softmax"  # softmax | sigmoid
    softmax_after_topk: bool = False
    renormalize: bool = False
    eps: float = 0.0
    scale: float = 1.0
    groups: int = 1
    keep_groups: int = 1
    group_score: str = "top2"  # top2 | max

    def check(self, experts: int) -> None:
        """Raises SpecError with all problems of the rule for this number of experts."""
        whole = {name: getattr(self, name) for name in ("top_k", "groups", "keep_groups")}
        problems = [Problem(name, value, "a whole number") for name, value in whole.items() if type(value) is not int]
        if problems:  # the rest compares these numbers
            raise SpecError.of("router rule", problems)
        if not 1 <= experts <= MAX_EXPERTS:
            problems.append(Problem("experts", experts, f"from 1 to {MAX_EXPERTS}"))
        if not 1 <= self.top_k <= max(experts, 1):
            problems.append(Problem("top_k", self.top_k, f"from 1 to the number of experts {experts}"))
        if self.score not in ("softmax", "sigmoid"):
            problems.append(Problem("score", self.score, "softmax or sigmoid"))
        if self.softmax_after_topk and self.score != "softmax":
            problems.append(Problem("softmax_after_topk", True, "false with sigmoid scores"))
        if self.group_score not in ("top2", "max"):
            problems.append(Problem("group_score", self.group_score, "top2 or max"))
        if self.groups < 1 or experts % self.groups:
            problems.append(Problem("groups", self.groups, f"a divisor of the number of experts {experts}"))
        if not 1 <= self.keep_groups <= self.groups:
            problems.append(Problem("keep_groups", self.keep_groups, f"from 1 to groups {self.groups}"))
        elif not problems and self.top_k > (kept := experts // self.groups * self.keep_groups):
            problems.append(Problem("top_k", self.top_k, f"at most the {kept} experts of the groups that are kept"))
        if not math.isfinite(self.scale):
            problems.append(Problem("scale", self.scale, "a finite number"))
        if not (math.isfinite(self.eps) and self.eps >= 0):
            problems.append(Problem("eps", self.eps, "a finite number, at least 0"))
        if problems:
            raise SpecError.of("router rule", problems)

    def chooses_by_logits(self, has_bias: bool) -> bool:
        """Without bias and groups the order of the scores is that of the logits, which has fewer ties."""
        return not has_bias and self.groups == 1
