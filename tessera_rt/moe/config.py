"""MoEConfig: what one MoE layer is made of, as immutable data. No model description and no Hugging Face needed.

Router kinds follow from ``router`` (``kernels.options.RouterRule``) and ``choice_bias``:

    R1  softmax, top k, optional renormalisation      Mixtral, Qwen, OLMoE       score softmax
    R2  top k of the logits, softmax over these       GPT-OSS, Granite           softmax_after_topk
    R3  sigmoid, bias for the choice, groups, scale   DeepSeek-V3, GLM, Kimi     score sigmoid, groups, choice_bias
    R4  R3 without groups                             MiniMax-M2, LFM2           score sigmoid, choice_bias
    R5  softmax, groups by their best, scale          DeepSeek-V2                groups, group_score max
    R6  softmax, bias for the choice                  Ernie-4.5, LongCat         score softmax, choice_bias

Expert kinds follow from ``gate`` (``kernels.options.Gate``), ``expert_bias`` and ``latent``:

    E1  [gate; up], SiLU, GeLU or clamped             most                       Gate()
    E2  interleaved, biases, (up + 1)                 GPT-OSS                    SWIGLU_OSS, interleaved, expert_bias
    E3  E1 stored [E, H, 2 I]                         Aria                       a layout: pass the transposed view
    E4  squared ReLU, optionally on a latent input    NemotronH                  RELU2, latent
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tessera_rt import model_spec
from tessera_rt.errors import Problem, SpecError
from tessera_rt.kernels.options import MAX_EXPERTS, Activation, Gate, RouterRule
from tessera_rt.model_spec import FeedForward

_ACTIVATIONS = {
    model_spec.Activation.SWIGLU: Gate(activation=Activation.SWIGLU),
    model_spec.Activation.GEGLU: Gate(activation=Activation.GEGLU),
    model_spec.Activation.SWIGLU_OSS: Gate(activation=Activation.SWIGLU_OSS, interleaved=True),
    model_spec.Activation.RELU2: Gate(activation=Activation.RELU2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """One MoE layer. Sizes are counts of features; coefficients are plain numbers.

    ``intermediate``: of one expert. ``router.top_k`` experts of ``experts`` run for each token. ``choice_bias``: a
    bias on the scores for the choice only, moved by rule (``bias_update_rate`` a step), not by gradient.
    ``router_bias``: a learned bias on the logits. ``expert_bias``: biases of both expert products. ``latent``: size of
    the experts' input when it is not ``hidden`` (0 = hidden); two projections shared by all experts lead there and
    back. ``shared_intermediate``: width of the shared expert (0 = none), whose activation is that of the experts;
    ``shared_gated``: its output times sigmoid(x @ gate). ``aux_coefficient``: weight of the load-balance loss.
    ``z_coefficient``: weight of the router's z-loss.
    """

    hidden: int
    intermediate: int
    experts: int
    router: RouterRule
    gate: Gate = field(default_factory=Gate)
    choice_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    latent: int = 0
    shared_intermediate: int = 0
    shared_gated: bool = False
    aux_coefficient: float = 0.0
    z_coefficient: float = 0.0
    bias_update_rate: float = 0.001

    @property
    def top_k(self) -> int:
        return self.router.top_k

    @property
    def expert_input(self) -> int:
        """Features that an expert reads and writes."""
        return self.latent or self.hidden

    @property
    def product(self) -> int:
        """Columns of an expert's first product: 2 I with a gate, I without."""
        return 2 * self.intermediate if self.gate.gated else self.intermediate

    @classmethod
    def from_feed_forward(cls, hidden: int, spec: FeedForward) -> MoEConfig:
        """The layer that a model description's MoE feed-forward stands for.

        Groups of softmax scores count as their best expert, those of sigmoid scores as the sum of their best two
        (DeepSeek-V2 and -V3). Sigmoid weights are renormalised with eps 1e-20. Raises SpecError with all problems.
        """
        problems = list(activation_problems(spec))
        if problems:
            raise SpecError.of("MoE layer", problems)
        config = _from_feed_forward(hidden, spec)
        config.check()
        return config

    def check(self) -> None:
        """Raises SpecError with all problems of this configuration."""
        problems = list(self.problems())
        if problems:
            raise SpecError.of("MoE layer", problems)

    def problems(self) -> Iterator[Problem]:
        """Every fault, by field."""
        for name, least in (
            ("hidden", 1), ("intermediate", 1), ("experts", 1), ("latent", 0), ("shared_intermediate", 0)
        ):  # fmt: skip
            value = getattr(self, name)
            if value < least:
                yield Problem(name, value, f"at least {least}")
        if self.experts > MAX_EXPERTS:
            yield Problem("experts", self.experts, f"at most {MAX_EXPERTS}")
        yield from self._router_problems()
        for name in ("aux_coefficient", "z_coefficient", "bias_update_rate"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                yield Problem(name, value, "a number of at least 0")
        if self.gate.activation is Activation.NONE:
            yield Problem("gate.activation", "NONE", "an activation")
        if self.shared_gated and not self.shared_intermediate:
            yield Problem("shared_gated", True, "false without a shared expert", "set shared_intermediate")

    def _router_problems(self) -> Iterator[Problem]:
        rule = self.router
        if 1 <= self.experts <= MAX_EXPERTS:
            try:
                rule.check(self.experts)
            except SpecError as error:
                yield from (Problem(f"router.{p.field}", p.value, p.allowed, p.remedy) for p in error.problems)
        if rule.scale <= 0:
            yield Problem("router.scale", rule.scale, "a positive number")


def gate_of(activation: model_spec.Activation) -> Gate:
    """What runs for an activation of a model description; see ``activation_problems`` for those that cannot."""
    return _ACTIVATIONS[activation]


def activation_problems(spec: FeedForward) -> Iterator[Problem]:
    """An activation whose constants a description does not hold can only be planned."""
    if spec.activation not in _ACTIVATIONS:
        remedy = "a description does not hold this activation's limit, so it can only be planned, not run"
        yield Problem("activation", str(spec.activation), ", ".join(_ACTIVATIONS), remedy)


def feed_forward_problems(spec: FeedForward) -> Iterator[Problem]:
    """What keeps a MoE feed-forward's description from being run, in the description's own fields."""
    problems = list(activation_problems(spec))
    yield from problems
    activation = model_spec.Activation.SWIGLU if problems else spec.activation
    for problem in _from_feed_forward(1, replace(spec, activation=activation)).problems():
        field = {"router.top_k": "top_k", "aux_coefficient": "router.aux_coefficient"}.get(problem.field, problem.field)
        yield replace(problem, field=field)
    if spec.router.choice_bias:
        remedy = "the engine does not move a choice bias yet, so it can only be planned, not run"
        yield Problem("router.choice_bias", True, "false", remedy)


def _from_feed_forward(hidden: int, spec: FeedForward) -> MoEConfig:
    router = spec.router
    sigmoid = router.score == "sigmoid"
    rule = RouterRule(
        top_k=spec.top_k,
        score=router.score,
        softmax_after_topk=router.softmax_after_topk,
        # A softmax over the chosen logits sums to 1 already.
        renormalize=router.renormalize and not router.softmax_after_topk,
        eps=1e-20 if sigmoid else 0.0,
        scale=router.scale,
        groups=router.groups,
        keep_groups=router.keep_groups,
        group_score="top2" if sigmoid else "max",
    )
    return MoEConfig(
        hidden=hidden,
        intermediate=spec.intermediate,
        experts=spec.experts,
        router=rule,
        gate=_ACTIVATIONS[spec.activation],
        choice_bias=router.choice_bias,
        router_bias=spec.bias,
        expert_bias=spec.bias,
        latent=spec.latent,
        shared_intermediate=spec.shared_intermediate,
        shared_gated=spec.shared_gated,
        aux_coefficient=router.aux_coefficient,
    )
