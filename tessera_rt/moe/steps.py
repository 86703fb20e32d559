"""The task interface: how a model hands its forward pass to the engine, cut into tasks.

A chunk (the items of one virtual stage) is a ``torch.nn.Module`` with a ``Program``: a list of steps over named
values. A compute step is a plain function from tensors to tensors; a communication step issues one collective. Every
value that crosses a task boundary is an input or output of a step, so the engine can run, log, reorder, recompute and
later capture each step by itself, and it derives the backward pass:

- compute: inputs are detached to leaves before the forward; backward is one ``torch.autograd.backward`` over all
  outputs that have a gradient; the leaves' gradients are added to the gradients of the input values;
- communication: no autograd node; backward is the inverse collective (``issue_backward``).

Values the engine provides to every micro-batch: ``tokens`` [b, s] int64; ``labels`` [b, s] int64 (``IGNORED``: none);
``loss_scale`` float, 1 / global valid tokens of the step; ``aux_scale`` float, 1 / number of micro-batches of the step;
``random_key`` int, from which dropout masks are drawn (it does not depend on pp, schedule or overlap).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tessera_rt.errors import PlanError, Problem
from tessera_rt.model_spec import Item, ModelSpec
from tessera_rt.split import GroupedLinear, SplitLinear, WeightGradSink
from tessera_rt.tasks import TaskKind

GIVEN_VALUES = ("tokens", "labels", "loss_scale", "aux_scale", "random_key")
IGNORED = -100
"""Label of a token that has no part in the loss."""


class Pending(Protocol):
    """A collective that was issued. ``wait`` blocks until it is done and returns its output.

    ``output`` is what ``wait`` will return, allocated at issue; it holds garbage until then.
    """

    @property
    def output(self) -> Any: ...

    def wait(self) -> Any: ...


class ReadyPending:
    """A collective whose output is there already: nothing had to be sent, or it was waited for."""

    def __init__(self, output: Any) -> None:
        self.output = output

    def wait(self) -> Any:
        return self.output


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How many rows go where in one dispatch: host-side splits. ``send[i]`` to, ``receive[i]`` from ep rank i.

    ``experts[i][j]``: rows received from ep rank i for local expert j; received rows are ordered by (i, j).
    """

    send: tuple[int, ...]
    receive: tuple[int, ...]
    experts: tuple[tuple[int, ...], ...]


class Transport(Protocol):
    """The collectives of a MoE layer over one rank's groups. All calls return at once; results come with ``wait``.

    ``dp_rank`` and ``ep_rank``: this rank's coordinates; ``ep_size``: number of ranks that share the experts.
    """

    @property
    def dp_rank(self) -> int: ...

    @property
    def ep_rank(self) -> int: ...

    @property
    def ep_size(self) -> int: ...

    def gather_counts(self, counts: Tensor) -> Pending:
        """All-gather of per-expert counts [E] int64 over dp x ep -> [dp, ep, E] int64 on the host."""
        ...

    def dispatch(self, rows: Tensor, layout: RowLayout) -> Pending:
        """Rows [sum(send), H] ordered by destination -> [sum(receive), H] ordered by source."""
        ...

    def combine(self, rows: Tensor, layout: RowLayout) -> Pending:
        """The inverse: [sum(receive), H] ordered by source -> [sum(send), H]; also the backward of ``dispatch``."""
        ...


@dataclass(frozen=True, slots=True)
class Seed:
    """Where gradients start: the gradient of ``output`` is ``fn(*inputs)``; sum(gradient * output) is a loss term.

    ``metric`` names the term in the step's metrics (``loss``, ``aux_loss``).
    """

    output: str
    fn: Callable[..., Tensor]
    inputs: tuple[str, ...]
    metric: str


@dataclass(frozen=True, slots=True)
class ComputeStep:
    """``outputs = fn(*inputs)``. Outputs that need no gradient may be anything; ``fn`` returns a tuple."""

    kind: TaskKind
    label: str
    fn: Callable[..., tuple[Any, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    seeds: tuple[Seed, ...] = ()


@dataclass(frozen=True, slots=True)
class CommStep:
    """One collective. ``issue(transport, *inputs)`` returns a Pending for the one output.

    ``issue_backward(transport, grad, *inputs-after-the-first)`` returns a Pending for the gradient of the first input;
    None where the output carries no gradient. Inputs after the first are layouts, kept for backward.
    """

    kind: TaskKind
    label: str
    issue: Callable[..., Pending]
    issue_backward: Callable[..., Pending] | None
    inputs: tuple[str, ...]
    output: str


Step = ComputeStep | CommStep


@dataclass(frozen=True, slots=True)
class Program:
    """Steps of a chunk in canonical order. ``input``: value from the previous stage, ``output``: value for the next.

    Either is "" at the ends of the model. A chunk without items has no steps and ``input == output``.
    """

    steps: tuple[Step, ...]
    input: str
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterInfo:
    """What the engine must know of a parameter.

    ``name``: layout-free global name (``layers.3.attention.query.weight``). ``experts``: global ids of the experts
    stacked along dimension 0, or None. ``decay``: weight decay applies. ``tied``: name of the weight it is one use of
    ("" = none); all uses hold the same values and receive the sum of all uses' gradients.
    """

    name: str
    parameter: nn.Parameter
    experts: range | None = None
    decay: bool = True
    tied: str = ""


def expert_name(name: str, expert: int) -> str:
    """Name of one expert's slice: ``layers.3.feed_forward.experts.gate_up``, 5 -> ``....experts.5.gate_up``."""
    head, _, last = name.rpartition(".")
    return f"{head}.{expert}.{last}" if head else f"{expert}.{last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a chunk lives: its share of the experts, device and parameter dtype."""

    ep_rank: int = 0
    ep_size: int = 1
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32


class Chunk(nn.Module):
    """Base of a model's chunks. Subclasses set ``program`` and yield their parameters' infos.

    As with any module, ``train()`` and ``eval()`` say whether dropout acts; who runs the program calls them.
    """

    program: Program

    def parameter_infos(self) -> Sequence[ParameterInfo]:
        """One entry per parameter; a weight used twice in the chunk (tied) stands once per use."""
        raise TypeError(f"{type(self).__name__} must define parameter_infos()")

    def set_sink(self, sink: WeightGradSink | None) -> None:
        """Send the weight gradients of every split module to ``sink`` (None: compute them in backward)."""
        for module in self.modules():
            if isinstance(module, SplitLinear | GroupedLinear):
                module.sink = sink


class TaskModel(Protocol):
    """What ``Engine(model, plan)`` needs of a model."""

    @property
    def spec(self) -> ModelSpec: ...

    def build_chunk(self, items: Sequence[Item], placement: Placement) -> Chunk:
        """The chunk holding ``items``; initial weights depend on seed and global names only."""
        ...

    def boundary_shape(self, tokens_shape: tuple[int, int]) -> tuple[int, ...]:
        """Shape of the value between two stages for tokens of shape (b, s)."""
        ...


def check_program(program: Program) -> None:
    """Raises PlanError when a step reads a value nobody made, or two steps make the same one."""
    made = {*GIVEN_VALUES, program.input} - {""}
    problems: list[Problem] = []
    for step in program.steps:
        name = f"{step.kind}:{step.label}"
        problems += [Problem(f"{name}.inputs", i, "a value made before") for i in step.inputs if i not in made]
        outputs = step.outputs if isinstance(step, ComputeStep) else (step.output,)
        problems += [Problem(f"{name}.outputs", o, "made by one step only") for o in outputs if o in made]
        made.update(outputs)
    if program.output and program.output not in made:
        problems.append(Problem("output", program.output, "a value of the program"))
    if problems:
        raise PlanError.of("program", problems)
