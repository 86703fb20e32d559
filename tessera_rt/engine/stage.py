"""StageRunner: one virtual stage on this rank. Its passes are generators that yield each task's name before doing it.

The backward pass follows from the program (see ``moe/steps.py``). Gradients of a value are kept by consumer and summed
in program order, so their bits do not depend on the order in which tasks ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from tessera_rt.costs import RECOMPUTED, Recompute
from tessera_rt.engine.events import TaskRef
from tessera_rt.engine.lanes import Lanes
from tessera_rt.moe.steps import Chunk, CommStep, ComputeStep, Pending, Transport, check_program
from tessera_rt.tasks import Pass, task_name


class WeightQueue(Protocol):
    """Deferred weight gradients: ``set_current`` names the W task that the next backward feeds, ``run`` does one."""

    def set_current(self, microbatch: int, w_task: str) -> None: ...

    def run(self, microbatch: int, w_task: str) -> None: ...


@dataclass(slots=True)
class _Issued:
    """The output of a collective nobody has waited for yet."""

    task: TaskRef
    pending: Pending


@dataclass(slots=True)
class _Segment:
    """What the backward of one compute step needs; ``outputs`` is None when the forward is to be done again."""

    arguments: tuple[Any, ...]
    leaves: dict[str, Tensor]
    outputs: tuple[Any, ...] | None


@dataclass(slots=True)
class _MicrobatchState:
    """Everything one micro-batch holds on this stage from its F to its B."""

    microbatch: int
    train: bool
    values: dict[str, Any]
    unread: dict[str, int]
    differentiable: set[str] = field(default_factory=set)
    segments: dict[int, _Segment] = field(default_factory=dict)
    gradients: dict[str, dict[int, Any]] = field(default_factory=dict)
    seeds: dict[str, Tensor] = field(default_factory=dict)


class StageRunner:
    """Runs F, B and W of one chunk. ``metrics`` sums the chunk's loss terms over the micro-batches of a step."""

    def __init__(
        self,
        index: int,
        chunk: Chunk,
        transport: Transport,
        lanes: Lanes,
        queue: WeightQueue,
        recompute: Recompute = Recompute.NONE,
    ) -> None:
        check_program(chunk.program)
        self.index = index
        self.chunk = chunk
        self.program = chunk.program
        self.transport = transport
        self.lanes = lanes
        self.queue = queue
        self.recomputed = RECOMPUTED[recompute]
        self.metrics: dict[str, Tensor] = {}
        self.peak_in_flight = 0
        self._states: dict[int, _MicrobatchState] = {}
        self._step_at = {
            (pass_, task_name(pass_, step.kind, step.label)): i
            for i, step in enumerate(self.program.steps)
            for pass_ in (Pass.F, Pass.B)
        }
        self._reads = self._count_reads()
        self._kept = self._kept_values()

    # -- passes ---------------------------------------------------------------------------------------------------

    def forward(
        self, microbatch: int, given: Mapping[str, Any], x: Tensor | None, order: Sequence[str], *, train: bool
    ) -> Iterator[str]:
        """Forward of one micro-batch: yields each name of ``order``, then does that task."""
        state = _MicrobatchState(microbatch, train, dict(given), dict(self._reads))
        if self.program.input:
            state.values[self.program.input] = x
            if train:
                state.differentiable.add(self.program.input)
        self._states[microbatch] = state
        self.peak_in_flight = max(self.peak_in_flight, len(self._states))
        for name in order:
            yield name
            self._forward_task(self._step_at[Pass.F, name], name, state)
        self._collect_seeds(state)

    def output(self, microbatch: int) -> Tensor | None:
        """What the finished forward hands on [b, s, H]; None behind the head and before the embedding."""
        value: Tensor | None = self._states[microbatch].values.pop(self.program.output, None)
        return value

    def close_evaluation(self, microbatch: int) -> None:
        """Forget a forward that will have no backward."""
        del self._states[microbatch]

    def backward(self, microbatch: int, gradient: Tensor | None, order: Sequence[str]) -> Iterator[str]:
        """Backward for inputs: yields each name of ``order`` (B tasks), then does that task."""
        state = self._states[microbatch]
        if gradient is not None:
            state.gradients.setdefault(self.program.output, {})[len(self.program.steps)] = gradient
        for name in order:
            yield name
            self._backward_task(self._step_at[Pass.B, name], name, state)

    def input_gradient(self, microbatch: int) -> Tensor | None:
        """Gradient for the previous stage [b, s, H] (zeros if nothing depends on it); ends the micro-batch here."""
        state = self._states.pop(microbatch)
        if not self.program.input:
            return None
        gradient = self._take_gradient(self.program.input, state)
        x = state.values.get(self.program.input)
        return torch.zeros_like(x) if gradient is None and x is not None else gradient

    def weight(self, microbatch: int, order: Sequence[str]) -> Iterator[str]:
        """Weight gradients: yields each name of ``order`` (W tasks), then does that task."""
        for name in order:
            yield name
            self.lanes.compute(TaskRef(name, self.index, microbatch), partial(self.queue.run, microbatch, name))

    # -- what is held -----------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Micro-batches between their F and their B."""
        return len(self._states)

    def saved_tensors(self) -> int:
        """Tensors held for backward by all micro-batches in flight."""
        return sum(
            len(segment.leaves) + sum(isinstance(out, Tensor) for out in segment.outputs or ())
            for state in self._states.values()
            for segment in state.segments.values()
        )

    def take_metrics(self) -> dict[str, Tensor]:
        metrics, self.metrics = self.metrics, {}
        return metrics

    # -- forward ----------------------------------------------------------------------------------------------------

    def _forward_task(self, i: int, name: str, state: _MicrobatchState) -> None:
        step = self.program.steps[i]
        task = TaskRef(name, self.index, state.microbatch)
        arguments = [self._read(value, state) for value in step.inputs]
        if isinstance(step, CommStep):
            pending = self.lanes.issue(task, lambda: step.issue(self.transport, *arguments))
            state.values[step.output] = _Issued(task, pending)
            if step.issue_backward is not None and step.inputs[0] in state.differentiable:
                state.differentiable.add(step.output)
            return
        leaves = {
            value: argument.detach().requires_grad_()
            for value, argument in zip(step.inputs, arguments, strict=True)
            if value in state.differentiable
        }
        arguments = [leaves.get(value, argument) for value, argument in zip(step.inputs, arguments, strict=True)]
        again = state.train and step.kind in self.recomputed
        with torch.set_grad_enabled(state.train and not again):
            outputs = self.lanes.compute(task, lambda: step.fn(*arguments))
        for value, output in zip(step.outputs, outputs, strict=True):
            if isinstance(output, Tensor):
                # Also of frozen layers: every rank then does the same backward collectives.
                if state.train and output.is_floating_point():
                    state.differentiable.add(value)
                state.values[value] = output.detach()
            else:
                state.values[value] = output
        if state.train:
            kept = tuple(arguments) if again else ()
            state.segments[i] = _Segment(kept, leaves, None if again else tuple(outputs))

    def _read(self, value: str, state: _MicrobatchState) -> Any:
        """A value for one of its consumers; waits for its collective, and lets go of it after the last one."""
        content = state.values[value]
        if isinstance(content, _Issued):
            content = state.values[value] = self.lanes.wait(content.task, content.pending)
        state.unread[value] -= 1
        if state.unread[value] == 0 and value not in self._kept:
            del state.values[value]
        return content

    def _collect_seeds(self, state: _MicrobatchState) -> None:
        """Loss terms of this chunk: remember the gradient each starts with, and add its value to the metrics."""
        for step in self.program.steps:
            for seed in step.seeds if isinstance(step, ComputeStep) else ():
                gradient = seed.fn(*(self._read(value, state) for value in seed.inputs))
                output = self._read(seed.output, state)
                if state.train:
                    state.seeds[seed.output] = gradient
                term = (gradient * output).sum()
                self.metrics[seed.metric] = self.metrics[seed.metric] + term if seed.metric in self.metrics else term

    # -- backward ---------------------------------------------------------------------------------------------------

    def _backward_task(self, i: int, name: str, state: _MicrobatchState) -> None:
        step = self.program.steps[i]
        task = TaskRef(name, self.index, state.microbatch)
        if isinstance(step, CommStep):
            gradient = self._take_gradient(step.output, state)
            if gradient is None or step.issue_backward is None:
                raise AssertionError(f"{task}: no gradient reached this collective")
            issue_backward = step.issue_backward
            extras = [state.values[value] for value in step.inputs[1:]]
            pending = self.lanes.issue(task, lambda: issue_backward(self.transport, gradient, *extras))
            state.gradients.setdefault(step.inputs[0], {})[i] = _Issued(task, pending)
            return
        segment = state.segments.pop(i)
        gradients = [self._output_gradient(value, state) for value in step.outputs]
        self.queue.set_current(state.microbatch, task_name(Pass.W, step.kind, step.label))

        def run() -> None:
            outputs = segment.outputs
            if outputs is None:
                with torch.enable_grad():
                    outputs = step.fn(*segment.arguments)
            wanted = [
                (out, grad)
                for out, grad in zip(outputs, gradients, strict=True)
                if grad is not None and isinstance(out, Tensor) and out.requires_grad
            ]
            if wanted:
                torch.autograd.backward([out for out, _ in wanted], [grad for _, grad in wanted])

        self.lanes.compute(task, run)
        for value, leaf in segment.leaves.items():
            if leaf.grad is not None:
                state.gradients.setdefault(value, {})[i] = leaf.grad
                leaf.grad = None

    def _output_gradient(self, value: str, state: _MicrobatchState) -> Tensor | None:
        gradient, seed = self._take_gradient(value, state), state.seeds.pop(value, None)
        if gradient is None or seed is None:
            return seed if gradient is None else gradient
        return gradient + seed

    def _take_gradient(self, value: str, state: _MicrobatchState) -> Tensor | None:
        """Sum of the gradients all consumers left, in program order; waits for those that are under way."""
        total: Tensor | None = None
        for _, part in sorted(state.gradients.pop(value, {}).items()):
            if isinstance(part, _Issued):
                part = self.lanes.wait(part.task, part.pending)
            total = part if total is None else total + part
        return total

    # -- the program --------------------------------------------------------------------------------------------------

    def _count_reads(self) -> dict[str, int]:
        reads: dict[str, int] = {}
        for step in self.program.steps:
            names = list(step.inputs)
            for seed in step.seeds if isinstance(step, ComputeStep) else ():
                names += [*seed.inputs, seed.output]
            for name in names:
                reads[name] = reads.get(name, 0) + 1
        return reads

    def _kept_values(self) -> frozenset[str]:
        """Values that outlive their last reader: the chunk's ends, and layouts that backward collectives need."""
        layouts = (value for step in self.program.steps if isinstance(step, CommStep) for value in step.inputs[1:])
        return frozenset({self.program.input, self.program.output, *layouts})
