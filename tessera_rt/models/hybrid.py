"""HybridModel: a decoder of mixed layers that hands its forward pass to the engine as tasks.

Items: embedding; layers with a gated delta net or softmax attention and a dense or MoE feed-forward; head with the
loss. All large linears are split modules, so ATTN, MLP, SHARED and HEAD have weight-gradient tasks; norms, biases,
router, convolutions and gates get their gradients in backward.

Parameter names are those of the module tree and do not depend on the layout: ``embed.weight``,
``layers.3.attention.query.weight``, ``layers.3.feed_forward.experts.gate_up`` (all experts of a rank stacked, with
their global ids beside it), ``head.norm.weight``, ``head.weight``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tessera_rt.errors import PlanError, Problem, SpecError
from tessera_rt.model_spec import AttentionKind, FeedForward, FeedForwardKind, Item, ItemKind, ModelSpec
from tessera_rt.models import initial
from tessera_rt.models.attention import GatedDeltaNet, SoftmaxAttention, attention_problems
from tessera_rt.models.dropout import keyed_dropout
from tessera_rt.moe.block import MoEBlock, moe_steps
from tessera_rt.moe.config import MoEConfig, activation_problems, feed_forward_problems, gate_of
from tessera_rt.moe.experts import DenseFeedForward
from tessera_rt.moe.steps import IGNORED, Chunk, ComputeStep, ParameterInfo, Placement, Program, Seed, Step, expert_name
from tessera_rt.split import SplitLinear
from tessera_rt.tasks import TaskKind

_EXPERTS = ".feed_forward.experts."


class HybridModel:
    """Implements ``moe.steps.TaskModel``.

    ``seed``: of the initial weights, which depend on it and on parameter names only. ``dropout``: probability after the
    embedding and on every branch before its residual, in training mode. ``pad_token``: tokens with this id are not
    routed to experts and do not count in balance losses; they must stand at the ends of sequences and carry the label
    -100. Raises SpecError naming every part of ``spec`` that it cannot run.
    """

    def __init__(self, spec: ModelSpec, *, seed: int = 0, dropout: float = 0.0, pad_token: int | None = None) -> None:
        problems = hybrid_problems(spec)
        if not 0.0 <= dropout < 1.0:
            problems.append(Problem("dropout", dropout, "at least 0 and below 1"))
        if problems:
            raise SpecError.of(f"model {spec.name}", problems)
        self.spec, self.seed, self.dropout, self.pad_token = spec, seed, dropout, pad_token

    def build_chunk(self, items: Sequence[Item], placement: Placement) -> Chunk:
        """The chunk holding ``items``, a contiguous range of the model's items (may be empty)."""
        start = self.spec.items.index(items[0]) if items and items[0] in self.spec.items else 0
        if tuple(items) != self.spec.items[start : start + len(items)]:
            labels = [item.label for item in items]
            raise PlanError.of("chunk", [Problem("items", labels, "a contiguous range of the model's items, in order")])
        return HybridChunk(self, items, placement)

    def boundary_shape(self, tokens_shape: tuple[int, int]) -> tuple[int, ...]:
        """The residual stream [b, s, H]."""
        return (*tokens_shape, self.spec.hidden)


class HybridChunk(Chunk):
    """One virtual stage of a HybridModel."""

    def __init__(self, model: HybridModel, items: Sequence[Item], placement: Placement) -> None:
        super().__init__()
        spec = self.spec = model.spec
        self.dropout = model.dropout
        held = {item.kind for item in items}
        with torch.device("meta"):  # no memory and no random numbers before the real values are known
            embed = nn.Embedding(spec.vocab, spec.hidden, dtype=placement.dtype) if ItemKind.EMBED in held else None
            head = Head(spec, placement.dtype) if ItemKind.HEAD in held else None
            self.embed: nn.Embedding | None = embed
            self.layers = nn.ModuleDict(
                {str(item.index): self._layer(item, placement, model.pad_token) for item in items if item.layer}
            )
            self.head: Head | None = head
        self.to_empty(device=placement.device)
        if spec.tied and embed is not None and head is not None:
            head.weight = embed.weight
        self._initialise(model.seed)
        self.program = self._program(items)

    def parameter_infos(self) -> Sequence[ParameterInfo]:
        infos = []
        for name, parameter in self.named_parameters(remove_duplicate=False):
            experts = None
            if _EXPERTS in name:
                name = name.removesuffix(".weight")
                experts = self._expert_ids(name)
            infos.append(
                ParameterInfo(
                    name=name,
                    parameter=parameter,
                    experts=experts,
                    decay=parameter.ndim > (1 if experts is None else 2),  # not biases and norms
                    tied="embed.weight" if self.spec.tied and name in ("embed.weight", "head.weight") else "",
                )
            )
        return infos

    # -- tasks ------------------------------------------------------------------------------------------------------

    def _embed(self, tokens: Tensor, random_key: int) -> tuple[Tensor]:
        assert self.embed is not None
        return (self._drop("EMBED", self.embed(tokens), random_key),)

    def _add_branch(self, place: str, branch: nn.Module, x: Tensor, random_key: int) -> tuple[Tensor]:
        return (x + self._drop(place, branch(x), random_key),)

    def _loss(self, x: Tensor, labels: Tensor, loss_scale: float) -> tuple[Tensor]:
        """Cross-entropy summed over the labels that are not -100, times ``loss_scale``: [] fp32 or float64."""
        assert self.head is not None
        logits: Tensor = self.head(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        loss = functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return (loss * loss_scale,)

    def _drop(self, place: str, x: Tensor, random_key: int) -> Tensor:
        return keyed_dropout(x, self.dropout, random_key, place) if self.training and self.dropout else x

    def _program(self, items: Sequence[Item]) -> Program:
        steps: list[Step] = []
        value = start = "" if items and items[0].kind is ItemKind.EMBED else "input"
        for item in items:
            if item.kind is ItemKind.EMBED:
                value = "EMBED.out"
                steps.append(ComputeStep(TaskKind.EMBED, item.label, self._embed, ("tokens", "random_key"), (value,)))
            elif item.kind is ItemKind.HEAD:
                seed = Seed(output="loss", fn=torch.ones_like, inputs=("loss",), metric="loss")
                inputs = (value, "labels", "loss_scale")
                steps.append(ComputeStep(TaskKind.HEAD, item.label, self._loss, inputs, ("loss",), (seed,)))
                value = ""
            else:
                layer_steps, value = self._layer_steps(item, value)
                steps += layer_steps
        return Program(tuple(steps), start, value)

    def _layer_steps(self, item: Item, value: str) -> tuple[list[Step], str]:
        steps: list[Step] = []
        label, modules = item.label, dict(self.layers[str(item.index)].named_children())
        for part, kind in (("attention", TaskKind.ATTN), ("feed_forward", TaskKind.MLP)):
            module = modules.get(part)
            if module is None:
                continue
            output = f"{label}.{part}"
            if isinstance(module, MoEBlock):
                steps += moe_steps(label, module, value, output)
            else:
                run = partial(self._add_branch, f"{label}/{part}", module)
                steps.append(ComputeStep(kind, label, run, (value, "random_key"), (output,)))
            value = output
        return steps, value

    # -- modules ------------------------------------------------------------------------------------------------------

    def _layer(self, item: Item, placement: Placement, pad_token: int | None) -> nn.Module:
        assert item.layer is not None
        spec, layer = self.spec, nn.Module()
        sizes: dict[str, Any] = {"norm_eps": spec.norm_eps, "dtype": placement.dtype}
        match item.layer.attention.kind:
            case AttentionKind.GATED_DELTA_NET:
                layer.attention = GatedDeltaNet(spec.hidden, item.layer.attention, **sizes)
            case AttentionKind.SOFTMAX | AttentionKind.SLIDING:
                layer.attention = SoftmaxAttention(
                    spec.hidden, item.layer.attention, rope_theta=spec.rope_theta, **sizes
                )
            case _:
                pass
        match item.layer.feed_forward.kind:
            case FeedForwardKind.DENSE:
                layer.feed_forward = DenseBranch(spec.hidden, item.layer.feed_forward, **sizes)
            case FeedForwardKind.MOE:
                layer.feed_forward = MoEBlock(
                    MoEConfig.from_feed_forward(spec.hidden, item.layer.feed_forward),
                    ep_rank=placement.ep_rank,
                    ep_size=placement.ep_size,
                    pad_token=pad_token,
                    before_residual=partial(self._drop, f"{item.label}/feed_forward"),
                    **sizes,
                )
            case FeedForwardKind.NONE:
                pass
        return layer

    def _expert_ids(self, name: str) -> range:
        block = self.get_submodule(name[: name.index(_EXPERTS)] + ".feed_forward")
        assert isinstance(block, MoEBlock)
        return block.expert_ids

    def _initialise(self, seed: int) -> None:
        for name, parameter in self.named_parameters():
            for tensor, own_name in self._named_slices(name, parameter):
                source = "embed.weight" if self.spec.tied and own_name == "head.weight" else own_name
                initial.fill_named(tensor, _initial_fill(self.spec, source, tensor.shape), seed, source)

    def _named_slices(self, name: str, parameter: Tensor) -> Iterator[tuple[Tensor, str]]:
        """The parameter, or its experts one by one: each has a name with its global id."""
        if _EXPERTS not in name:
            yield parameter, name
            return
        for row, expert in enumerate(self._expert_ids(name)):
            yield parameter.data[row], expert_name(name.removesuffix(".weight"), expert)


class DenseBranch(DenseFeedForward):
    """Norm and dense feed-forward: what is added to x [b, s, H]."""

    def __init__(self, hidden: int, spec: FeedForward, *, norm_eps: float, dtype: torch.dtype) -> None:
        super().__init__(hidden, spec.intermediate, gate_of(spec.activation), bias=spec.bias, dtype=dtype)
        self.norm = nn.RMSNorm(hidden, eps=norm_eps, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Head(SplitLinear):
    """Final norm and logits: [b, s, H] -> [b, s, V]."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__(spec.hidden, spec.vocab, bias=False, dtype=dtype)
        self.norm = nn.RMSNorm(spec.hidden, eps=spec.norm_eps, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(self.norm(input))


def hybrid_problems(spec: ModelSpec) -> list[Problem]:
    """What HybridModel cannot run of a model's description."""
    problems = [Problem(n, getattr(spec, n), "at least 1") for n in ("hidden", "vocab") if getattr(spec, n) < 1]
    if spec.mtp:
        remedy = "multi-token prediction can only be planned, not run"
        problems.append(Problem("mtp", f"{len(spec.mtp)} blocks", "empty", remedy))
    for i, layer in enumerate(spec.layers):
        problems += _within(f"layers[{i}].attention", attention_problems(layer.attention))
        match layer.feed_forward.kind:
            case FeedForwardKind.DENSE:
                found = list(activation_problems(layer.feed_forward))
                if layer.feed_forward.intermediate < 1:
                    found.append(Problem("intermediate", layer.feed_forward.intermediate, "at least 1"))
            case FeedForwardKind.MOE:
                found = list(feed_forward_problems(layer.feed_forward))
            case FeedForwardKind.NONE:
                found = []
                if layer.attention.kind is AttentionKind.NONE:
                    found.append(Problem("kind", "none", "dense or moe where the attention is none"))
        problems += _within(f"layers[{i}].feed_forward", found)
    return problems


def _within(prefix: str, problems: list[Problem]) -> list[Problem]:
    return [Problem(f"{prefix}.{p.field}", p.value, p.allowed, p.remedy) for p in problems]


def _initial_fill(spec: ModelSpec, name: str, shape: torch.Size) -> initial.Fill:
    """How a parameter starts. Logits start small, so that the first loss is close to ln(vocab)."""
    last = name.rsplit(".", 2)[-2:]  # module and parameter; for experts: id and matrix
    if last[-1] == "bias":
        return initial.constant(0.0)
    if last[-1] == "decay_bias":
        return initial.softplus_inverse_time(0.001, 0.1)
    if last[-1] == "decay_log_rate":
        return initial.log_uniform_rate(1.0, 16.0)
    if last[0] == "norm" or last[0].endswith("_norm"):
        return initial.constant(1.0)
    if name == "head.weight" or (name == "embed.weight" and spec.tied):
        return initial.normal(0.2 / math.sqrt(spec.hidden))
    if name == "embed.weight":
        return initial.normal(1.0)
    std = 1.0 / math.sqrt(shape[-1])
    if "output" in last or "down" in last:  # the residual stream sums two branches a layer
        std /= math.sqrt(2 * max(len(spec.layers), 1))
    return initial.normal(std)
