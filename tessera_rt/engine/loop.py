"""The driver: one thread that walks a rank's actions and decides which pass does its next task.

Interleaving two passes, moving W about and (later) injecting work at run time are all the same thing here: which
generator is advanced next. Inputs are received when a pass is about to start, outputs are sent as soon as they exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from tessera_rt.engine.stage import StageRunner
from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Action, ActionKind, Message, Plan, output_of
from tessera_rt.tasks import Pass, chunk_tasks


class Mail(Protocol):
    """Messages between stages on different ranks."""

    def send(self, message: Message, tensor: Tensor) -> None: ...

    def receive(self, message: Message) -> Tensor: ...


class _Running:
    """A pass in progress: ``upcoming`` is the task its generator will do next."""

    def __init__(self, names: Iterator[str]) -> None:
        self._names = names
        self.upcoming = next(names, None)

    def advance(self, name: str) -> None:
        if name != self.upcoming:
            allowed = f"the task this pass does next, {self.upcoming}"
            raise ScheduleError.of("interleaving", [Problem("order", name, allowed, "check the plan")])
        self.upcoming = next(self._names, None)


class Driver:
    """Runs the actions of one pipeline rank over its stages.

    ``overlap`` off: the parts of an overlap action run one after the other, in canonical task order. ``note`` is called
    with each action before it starts (for failure reports). ``blank`` makes zeros in the shape of the value between
    stages from a micro-batch's tokens.
    """

    def __init__(
        self,
        plan: Plan,
        spec: ModelSpec,
        rank: int,
        stages: Mapping[int, StageRunner],
        mail: Mail,
        *,
        overlap: bool,
        note: Callable[[str], None],
        blank: Callable[[Tensor], Tensor],
    ) -> None:
        self.plan = plan
        self.spec = spec
        self.rank = rank
        self.stages = stages
        self.mail = mail
        self.overlap = overlap
        self.note = note
        self.blank = blank
        self._local: dict[tuple[Pass, int, int], Tensor] = {}
        self._orders: dict[str, tuple[str, ...]] = {}

    def train(self, given: Sequence[Mapping[str, Any]]) -> None:
        """All actions of a step. ``given[m]``: the values the engine provides to micro-batch m."""
        for action in self.plan.actions[self.rank]:
            self.note(str(action))
            if self.overlap:
                self._run(action.passes, self._planned(action), given)
            else:
                for part in action.passes:
                    self._run((part,), self._canonical(part), given)

    def evaluate(self, given: Sequence[Mapping[str, Any]], microbatches: range) -> None:
        """The forward passes of some micro-batches only, in the plan's order."""
        for action in self.plan.actions[self.rank]:
            for part in action.passes:
                if part.kind is ActionKind.F and part.microbatch in microbatches:
                    self.note(f"{part} (evaluation)")
                    self._run((part,), self._canonical(part), given, train=False)

    # -- one action ---------------------------------------------------------------------------------------------------

    def _run(
        self, parts: Sequence[Action], order: Sequence[str], given: Sequence[Mapping[str, Any]], *, train: bool = True
    ) -> None:
        """Do ``order``, the tasks of all ``parts``; a part starts at its first task and ends with its last one."""
        owner = {letter: part for part in parts for letter in _LETTERS[part.kind]}
        names_of = {letter: [name for name in order if name[0] == letter] for letter in owner}
        running: dict[str, _Running] = {}
        for letter, part in owner.items():
            if letter != Pass.W and not names_of[letter]:
                self._pass_through(part, letter, given, train=train)
        for name in order:
            letter = name[0]
            if letter not in running:
                part = owner[letter]
                running[letter] = _Running(self._start(part, letter, names_of[letter], given, train=train))
            running[letter].advance(name)
            if running[letter].upcoming is None and letter != Pass.W:
                self._finish(owner[letter], given, train=train)

    def _start(
        self, part: Action, letter: str, names: Sequence[str], given: Sequence[Mapping[str, Any]], *, train: bool
    ) -> Iterator[str]:
        stage = self.stages[part.stage]
        if letter == Pass.W:
            return stage.weight(part.microbatch, names)
        if letter == Pass.F:
            x = self._input(Pass.F, part)
            return stage.forward(part.microbatch, given[part.microbatch], x, names, train=train)
        return stage.backward(part.microbatch, self._input(Pass.B, part), names)

    def _pass_through(self, part: Action, letter: str, given: Sequence[Mapping[str, Any]], *, train: bool) -> None:
        """A pass over a chunk without items: input becomes output."""
        for _ in self._start(part, letter, (), given, train=train):
            raise AssertionError("an empty chunk has no tasks")
        self._finish(part, given, train=train)

    def _input(self, pass_: Pass, part: Action) -> Tensor | None:
        """The pass's input: from a stage of this rank, by message, or None at the ends of the model."""
        neighbour = part.stage + (-1 if pass_ is Pass.F else 1)
        if not 0 <= neighbour < len(self.plan.stages):
            return None
        source = self.plan.stages[neighbour].rank
        if source == self.rank:
            return self._local.pop((pass_, part.stage, part.microbatch))
        return self.mail.receive(Message(source, self.rank, pass_, part.stage, part.microbatch))

    def _finish(self, part: Action, given: Sequence[Mapping[str, Any]], *, train: bool) -> None:
        """Hand the finished pass's output to the next stage at once."""
        stage = self.stages[part.stage]
        forward = part.kind is ActionKind.F
        value = stage.output(part.microbatch) if forward else stage.input_gradient(part.microbatch)
        if forward and not train:
            stage.close_evaluation(part.microbatch)
        if part.stage == (len(self.plan.stages) - 1 if forward else 0):
            return
        if value is None:  # nothing flows before the embedding and behind the head, but an empty stage there expects it
            value = self.blank(given[part.microbatch]["tokens"])
        message = output_of(self.plan, part)
        if message is not None:
            self.mail.send(message, value)
        else:
            to_stage = part.stage + (1 if forward else -1)
            self._local[Pass.F if forward else Pass.B, to_stage, part.microbatch] = value

    # -- orders -------------------------------------------------------------------------------------------------------

    def _planned(self, action: Action) -> tuple[str, ...]:
        return self.plan.interleavings[action.key].order

    def _canonical(self, part: Action) -> tuple[str, ...]:
        if part.key not in self._orders:
            stage = self.plan.stages[part.stage]
            pass_ = {ActionKind.F: Pass.F, ActionKind.W: Pass.W}.get(part.kind, Pass.B)
            items = self.spec.items[stage.start : stage.stop]
            graph = chunk_tasks(items, pass_, with_w=part.kind is not ActionKind.I)
            self._orders[part.key] = graph.names
        return self._orders[part.key]


# First letters of the tasks of an action: a full backward does its own W.
_LETTERS = {ActionKind.F: "F", ActionKind.B: "BW", ActionKind.I: "B", ActionKind.W: "W"}
