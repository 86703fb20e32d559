"""A MoE block's steps on several ranks in one process, with task boundaries as the engine makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tessera_rt.moe.block import MoEBlock
from tessera_rt.moe.steps import CommStep, ComputeStep, Pending, ReadyPending, RowLayout, Step, Transport
from tessera_rt.split import GroupedLinear, PendingGrad, SplitLinear, accumulate

Given = dict[str, Any]


class TogetherTransport:
    """Ranks in one process: all issue a collective, then all wait for it. ``sent``: (rows, splits) by rank."""

    dp_rank = 0

    def __init__(self, sent: list[tuple[Tensor, tuple[int, ...]]], ep_rank: int, ep_size: int) -> None:
        self.sent, self.ep_rank, self.ep_size = sent, ep_rank, ep_size

    def gather_counts(self, counts: Tensor) -> Pending:
        self._send(counts, (len(counts),))
        return WhenAsked(lambda: torch.stack([rows for rows, _ in self.sent]).unsqueeze(0))

    def dispatch(self, rows: Tensor, layout: RowLayout) -> Pending:
        self._send(rows, layout.send)
        return WhenAsked(self._receive)

    def combine(self, rows: Tensor, layout: RowLayout) -> Pending:
        self._send(rows, layout.receive)
        return WhenAsked(self._receive)

    def _send(self, rows: Tensor, splits: tuple[int, ...]) -> None:
        assert len(rows) == sum(splits)
        if len(self.sent) == self.ep_size:
            self.sent.clear()
        self.sent.append((rows.detach(), splits))

    def _receive(self) -> Tensor:
        return torch.cat([torch.split(rows, list(splits))[self.ep_rank] for rows, splits in self.sent])


class WhenAsked(ReadyPending):
    def wait(self) -> Any:
        return self.output()


class Sink:
    """Runs W at once, into buffers that start at zero."""

    def __init__(self, block: MoEBlock) -> None:
        self.buffers: dict[Tensor, Tensor] = {}
        for module in block.modules():
            if isinstance(module, SplitLinear | GroupedLinear):
                module.sink = self
                self.buffers[module.weight] = torch.zeros_like(module.weight)

    def defer(self, pending: PendingGrad) -> None:
        accumulate(pending, self.buffers[pending.weight])


def run_tasks(
    steps: Sequence[Sequence[Step]], transports: Sequence[Transport], given: Sequence[Given], upstream: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], float]:
    """Forward and backward of the same steps on all ranks -> outputs "y", gradients of "x", sum of the seeds' terms."""
    values = [dict(of_rank) for of_rank in given]
    ranks = range(len(values))
    kept: list[list[tuple[dict[str, Tensor], tuple[Any, ...]]]] = [[] for _ in ranks]
    for i, step in enumerate(steps[0]):
        if isinstance(step, CommStep):
            issued = [
                steps[r][i].issue(transports[r], *(values[r][name] for name in step.inputs))  # type: ignore[union-attr]
                for r in ranks
            ]
            for r in ranks:
                values[r][step.output] = issued[r].wait()
                kept[r].append(({}, ()))
            continue
        for r in ranks:
            own = steps[r][i]
            assert isinstance(own, ComputeStep)
            arguments = [values[r][name] for name in own.inputs]
            leaves = {
                name: value.detach().requires_grad_()
                for name, value in zip(own.inputs, arguments, strict=True)
                if isinstance(value, Tensor) and value.is_floating_point()
            }
            outputs = own.fn(*(leaves.get(name, value) for name, value in zip(own.inputs, arguments, strict=True)))
            kept[r].append((leaves, outputs))
            for name, output in zip(own.outputs, outputs, strict=True):
                values[r][name] = output.detach() if isinstance(output, Tensor) else output

    gradients: list[dict[str, Tensor]] = [{"y": upstream[r]} for r in ranks]
    terms = 0.0

    def add(r: int, name: str, gradient: Tensor) -> None:
        gradients[r][name] = gradients[r][name] + gradient if name in gradients[r] else gradient

    for i, step in reversed(list(enumerate(steps[0]))):
        if isinstance(step, CommStep):
            if step.issue_backward is None:
                continue
            issued = [
                step.issue_backward(
                    transports[r], gradients[r].pop(step.output), *(values[r][n] for n in step.inputs[1:])
                )
                for r in ranks
            ]
            for r in ranks:
                add(r, step.inputs[0], issued[r].wait())
            continue
        for r in ranks:
            for seed in step.seeds:
                gradient = seed.fn(*(values[r][name] for name in seed.inputs))
                add(r, seed.output, gradient)
                terms += float((gradient * values[r][seed.output]).sum())
            leaves, outputs = kept[r][i]
            wanted = [
                (out, gradients[r].pop(name))
                for name, out in zip(step.outputs, outputs, strict=True)
                if name in gradients[r]
            ]
            torch.autograd.backward([out for out, _ in wanted], [gradient for _, gradient in wanted])
            for name, leaf in leaves.items():
                if leaf.grad is not None:
                    add(r, name, leaf.grad)
    return [values[r]["y"] for r in ranks], [gradients[r]["x"] for r in ranks], terms


def given_values(x: Tensor, aux_scale: float) -> Given:
    tokens = torch.ones(x.shape[:-1], dtype=torch.int64)
    return {"x": x, "tokens": tokens, "aux_scale": aux_scale, "random_key": 0}
