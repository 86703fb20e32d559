"""One process, plain autograd: what a training step's loss and gradients must be.

Runs the steps of chunks in their canonical order without detaching anything, so the graph goes through the whole model,
and lets autograd do the rest. It shares the model's step functions with the engine and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessera_rt.moe.steps import IGNORED, Chunk, CommStep, Pending, ReadyPending, Seed, Step, expert_name
from tessera_rt.moe.transport import LocalTransport

Part = tuple[Tensor, Tensor]  # tokens [b, s], labels [b, s]


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """``metrics``: loss terms by name, of each micro-batch. ``gradients``: by global parameter name, experts singly.

    All uses of a tied weight have the sum of the uses' gradients. Parameters that nothing depends on have zeros.
    """

    metrics: tuple[dict[str, float], ...]
    gradients: dict[str, Tensor]

    def total(self, metric: str) -> float:
        return sum(of_microbatch.get(metric, 0.0) for of_microbatch in self.metrics)


def reference_step(
    chunks: Sequence[Chunk],
    microbatches: Sequence[Sequence[Part]],
    *,
    random_key: Callable[[int, int], int] = lambda microbatch, part: 0,
) -> ReferenceResult:
    """Forward and backward of all micro-batches through ``chunks``, which hold the whole model in order, all experts.

    ``microbatches[i][p]``: what the rank with dp x ep coordinate p has in micro-batch i, all in this process. Counts of
    balance losses are summed over the parts, as over ranks. ``random_key``: from micro-batch and part.
    """
    for chunk in chunks:
        chunk.set_sink(None)
        chunk.zero_grad(set_to_none=True)
    valid = sum(int((labels != IGNORED).sum()) for parts in microbatches for _, labels in parts)
    metrics = []
    for i, parts in enumerate(microbatches):
        given = [
            {
                "tokens": tokens,
                "labels": labels,
                "loss_scale": 1.0 / max(valid, 1),
                "aux_scale": 1.0 / len(microbatches),
                "random_key": random_key(i, p),
            }
            for p, (tokens, labels) in enumerate(parts)
        ]
        terms = _forward(chunks, given)
        torch.autograd.backward([term for _, term in terms])
        metrics.append({name: sum(term.item() for n, term in terms if n == name) for name, _ in terms})
    gradients = _gradients(chunks)
    for chunk in chunks:
        chunk.zero_grad(set_to_none=True)
    return ReferenceResult(tuple(metrics), gradients)


class _PartTransport(LocalTransport):
    """One part of a micro-batch: rows stay in it, counts of all parts are stacked like those of dp ranks."""

    def __init__(self, part: int, counts: list[Tensor]) -> None:
        self.dp_rank = part
        self._counts = counts

    def gather_counts(self, counts: Tensor) -> Pending:
        self._counts.append(counts.detach())
        return _Stacked(self._counts)


class _Stacked(ReadyPending):
    def wait(self) -> Tensor:
        return torch.stack(self.output).unsqueeze(1)


def _forward(chunks: Sequence[Chunk], given: Sequence[dict[str, Any]]) -> list[tuple[str, Tensor]]:
    """Loss terms (metric, scalar) of one micro-batch; its parts go through every step side by side."""
    terms: list[tuple[str, Tensor]] = []
    carried: list[Any] = [None] * len(given)
    for chunk in chunks:
        program = chunk.program
        values = [{**of_part, program.input: x} for of_part, x in zip(given, carried, strict=True)]
        seeds: list[Seed] = []
        for step in program.steps:
            _run(step, values)
            seeds += () if isinstance(step, CommStep) else step.seeds
        for seed in seeds:
            for of_part in values:
                gradient = seed.fn(*(of_part[name] for name in seed.inputs)).detach()
                terms.append((seed.metric, (gradient * of_part[seed.output]).sum()))
        carried = [of_part.get(program.output) for of_part in values]
    return terms


def _run(step: Step, values: Sequence[dict[str, Any]]) -> None:
    inputs = [[of_part[name] for name in step.inputs] for of_part in values]
    if isinstance(step, CommStep):
        counts: list[Tensor] = []
        issued = [step.issue(_PartTransport(p, counts), *arguments) for p, arguments in enumerate(inputs)]
        for of_part, pending in zip(values, issued, strict=True):
            of_part[step.output] = pending.wait()
        return
    for of_part, arguments in zip(values, inputs, strict=True):
        of_part.update(zip(step.outputs, step.fn(*arguments), strict=True))


def _gradients(chunks: Sequence[Chunk]) -> dict[str, Tensor]:
    infos = [info for chunk in chunks for info in chunk.parameter_infos()]
    uses: dict[str, dict[int, Tensor]] = {}
    for info in infos:
        gradient = info.parameter.grad
        gradient = torch.zeros_like(info.parameter) if gradient is None else gradient
        uses.setdefault(info.tied or info.name, {})[id(info.parameter)] = gradient
    gradients: dict[str, Tensor] = {}
    for info in infos:
        first, *others = uses[info.tied or info.name].values()
        total = sum(others, first)
        if info.experts is None:
            gradients[info.name] = total
        else:
            gradients |= {expert_name(info.name, e): total[row] for row, e in enumerate(info.experts)}
    return gradients
