"""The expert layers whose products the kernels are built for: sizes of released models, and the batch they are seen at.

Sizes as in tessera_rt/presets (kernels import no other part of ours; a test compares the two).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tessera_rt.kernels.options import Activation, Gate, RouterRule

TOKENS_PER_RANK = 8192
SWIGLU = Gate()
RANKS = 8  # expert-parallel ranks among which the experts are divided


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """One model's expert layer. ``hidden`` is the experts' input size; ``transposed``: weights are stored [E, K, N].

    ``score``, ``groups``: the router's, as in ``RouterRule``; half of the groups are kept.
    """

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    gate: Gate = SWIGLU
    bias: bool = False
    transposed: bool = False
    score: str = "softmax"
    groups: int = 1

    @property
    def local_experts(self) -> int:
        return self.experts // RANKS

    @property
    def rows(self) -> int:
        """Rows of one rank under uniform routing of TOKENS_PER_RANK tokens on each of RANKS ranks."""
        return TOKENS_PER_RANK * self.top_k

    @property
    def product(self) -> int:
        """Columns of the first product."""
        return self.intermediate * (2 if self.gate.gated else 1)

    @property
    def choice_bias(self) -> bool:
        """Whether the router's choice has a bias: that of every model here with sigmoid scores."""
        return self.score == "sigmoid"

    @property
    def rule(self) -> RouterRule:
        """How the model's router chooses; GPT-OSS takes the softmax of the chosen logits."""
        after = self.gate.activation is Activation.SWIGLU_OSS
        return RouterRule(
            top_k=self.top_k, score=self.score, softmax_after_topk=after, renormalize=not after,
            groups=self.groups, keep_groups=max(self.groups // 2, 1),
        )  # fmt: skip

    @property
    def odd(self) -> ExpertShape:
        """Nearly the same layer in the any-size class: no width is a multiple of 16 elements."""
        return replace(self, hidden=self.hidden - 1, intermediate=self.intermediate - 1)


_OSS = Gate(activation=Activation.SWIGLU_OSS, interleaved=True)
_RELU2 = Gate(activation=Activation.RELU2)

SHAPES = (
    ExpertShape(name="qwen3-30b-a3b", hidden=2048, intermediate=768, experts=128, top_k=8),
    ExpertShape(name="qwen3-235b-a22b", hidden=4096, intermediate=1536, experts=128, top_k=8),
    ExpertShape(name="qwen3-next-80b", hidden=2048, intermediate=512, experts=512, top_k=10),
    ExpertShape(
        name="deepseek-v3", hidden=7168, intermediate=2048, experts=256, top_k=8, score="sigmoid", groups=8,
    ),
    ExpertShape(
        name="gpt-oss-120b", hidden=2880, intermediate=2880, experts=128, top_k=4,
        gate=_OSS, bias=True, transposed=True,
    ),
    ExpertShape(
        name="nemotron-3-nano", hidden=2688, intermediate=1856, experts=128, top_k=6, gate=_RELU2, score="sigmoid",
    ),
    ExpertShape(
        name="nemotron-3-super", hidden=1024, intermediate=2688, experts=512, top_k=22, gate=_RELU2, score="sigmoid",
    ),
)  # fmt: skip


def _with_gate(model: str, activation: Activation, layout: str) -> ExpertShape:
    base = next(shape for shape in SHAPES if shape.name == model)
    gate = Gate(activation=activation, interleaved=layout == "interleaved")
    return replace(base, name=f"{model}/{activation.name.lower()}/{layout}", gate=gate)


GATE_SHAPES = (
    _with_gate("qwen3-30b-a3b", Activation.SWIGLU_CLAMPED, "halves"),
    _with_gate("qwen3-30b-a3b", Activation.GEGLU, "halves"),
    _with_gate("qwen3-30b-a3b", Activation.GEGLU_TANH, "halves"),
    _with_gate("gpt-oss-120b", Activation.SWIGLU, "halves"),
    _with_gate("gpt-oss-120b", Activation.SWIGLU_OSS, "halves"),
    _with_gate("gpt-oss-120b", Activation.SWIGLU, "interleaved"),
    _with_gate("gpt-oss-120b", Activation.SWIGLU_CLAMPED, "interleaved"),
    _with_gate("gpt-oss-120b", Activation.GEGLU, "interleaved"),
    _with_gate("gpt-oss-120b", Activation.GEGLU_TANH, "interleaved"),
)
"""The gates that no model of ``SHAPES`` has, at sizes of models; those of GPT-OSS have a bias."""
