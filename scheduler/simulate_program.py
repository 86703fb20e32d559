"""What the simulator runs: a schedule turned into flat arrays of tasks, lanes, passes and messages.

Built once per simulation from the ranks' action lists, the stages' items, the interleavings and the costs; the event
loop (``simulate_run.py``) then never looks at a graph or a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tessera_rt.costs import CostTable
from tessera_rt.errors import CostError, Problem, ScheduleError
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Action, ActionKind, Interleaving
from tessera_rt.scheduler.graphs import Bounds, chunk_graph, key_parts
from tessera_rt.scheduler.part_costs import PartCosts
from tessera_rt.tasks import Pass, Resource, Task

COMP, COMM = 0, 1
"""Lane numbers. With overlap off everything is in lane COMP."""


@dataclass(frozen=True, slots=True)
class LaneTask:
    """One task in a lane's queue. ``deps``: places in the action's ``ends``; ``sink``: part whose output needs it."""

    index: int
    ns: int
    deps: tuple[int, ...]
    sink: int  # -1: no output waits for this task (a W task, or others of its pass come behind it)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTasks:
    """All that actions of one key have in common.

    ``ends`` of an action has one place per task, then one per part for the arrival of the part's input.
    """

    tasks: tuple[Task, ...]  # in the order in which they are issued
    part_of: tuple[int, ...]  # part of each task
    lanes: tuple[tuple[LaneTask, ...], tuple[LaneTask, ...]]
    sinks: tuple[int, ...]  # per part: tasks its output waits for; 0 = an empty chunk
    finishing: tuple[int, ...]  # parts in the order in which their outputs are sent


@dataclass(slots=True)
class ActionRun:
    """One action while it is simulated. -1 in ``starts`` and ``ends``: not yet."""

    rank: int
    action: Action
    shape: ActionTasks
    starts: list[int]
    ends: list[int]
    passes: tuple[int, ...]  # pass number of each part, -1 for W


@dataclass(slots=True)
class Edge:
    """A directed link between two ranks: pass numbers whose outputs it carries, in order."""

    source: int
    target: int
    sends: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Passes:
    """Numbers for the passes of a step: a *pass* is one F or B of one micro-batch on one stage.

    Forwards have even numbers, and the backward of forward n is n + 1. ``copies``: how many times the stages are the
    whole model one after the other; nothing passes from one copy to the next.
    """

    stages: int
    microbatches: int
    copies: int = 1

    def number(self, stage: int, kind: ActionKind, microbatch: int) -> int:
        """-1 for a W, which is no pass of its own."""
        if kind is ActionKind.W:
            return -1
        return 2 * (stage * self.microbatches + microbatch) + (kind is not ActionKind.F)

    def stage(self, number: int) -> int:
        return number // (2 * self.microbatches)

    def microbatch(self, number: int) -> int:
        return number // 2 % self.microbatches

    def name(self, number: int) -> str:
        """``1F3``, ``0B2``."""
        return f"{self.stage(number)}{'FB'[number % 2]}{self.microbatch(number)}"

    def next(self, number: int) -> int:
        """The pass that takes this pass's output, or -1."""
        backward = number % 2
        if self._at_end(number, first=bool(backward)):
            return -1
        return number + (-2 if backward else 2) * self.microbatches

    def previous(self, number: int) -> int:
        """The pass whose output this pass takes, or -1."""
        backward = number % 2
        if self._at_end(number, first=not backward):
            return -1
        return number + (2 if backward else -2) * self.microbatches

    def _at_end(self, number: int, *, first: bool) -> bool:
        """Whether the pass's stage is the first (else the last) of its copy."""
        length = self.stages // self.copies
        return self.stage(number) % length == (0 if first else length - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A schedule ready to run. ``place``, ``edge_of``: by pass number."""

    passes: Passes
    runs: tuple[tuple[ActionRun, ...], ...]  # per rank
    place: dict[int, tuple[ActionRun, int]]  # its action and part
    edges: tuple[Edge, ...]
    edge_of: dict[int, int]  # the edge its output is sent on; absent: the output stays on the rank
    occupancy_ns: tuple[int, ...]  # per stage: of the message between it and the next stage
    latency_ns: int


def build_program(
    stage_ranks: Sequence[int],
    actions: Sequence[Sequence[Action]],
    bounds: Bounds,
    interleavings: Mapping[str, Interleaving],
    model: ModelSpec,
    costs: CostTable,
    *,
    overlap: bool,
    copies: int = 1,
    part_costs: PartCosts | None = None,
) -> Program:
    """The arrays of a schedule; ``copies``: see ``Passes``. ``part_costs``: of passes, where not all have ``costs``.

    Raises ScheduleError with the problems of the lists, CostError for missing costs.
    """
    shapes: dict[tuple[str, tuple[int, ...]], ActionTasks] = {}
    problems = _list_problems(stage_ranks, actions)
    if overlap:
        keys = sorted({action.key for row in actions for action in row})
        problems += [
            Problem(f"interleavings.{key}", None, "an order for every action of the schedule")
            for key in keys
            if key not in interleavings
        ]
    if problems:
        raise ScheduleError.of("schedule", problems)
    microbatches = 1 + max((part.microbatch for row in actions for a in row for part in a.passes), default=0)
    passes = Passes(len(stage_ranks), microbatches, copies)
    runs: list[tuple[ActionRun, ...]] = []
    place: dict[int, tuple[ActionRun, int]] = {}
    edges: dict[tuple[int, int], Edge] = {}
    for rank, row in enumerate(actions):
        mine: list[ActionRun] = []
        for action in row:
            key = action.key
            tables = (costs,) * len(action.passes) if part_costs is None else part_costs.tables(action)
            kind = key, tuple(map(id, tables))
            if kind not in shapes:
                shapes[kind] = _action_tasks(key, bounds, interleavings[key] if overlap else None, model, tables)
            shape = shapes[kind]
            numbers = tuple(passes.number(part.stage, part.kind, part.microbatch) for part in action.passes)
            size = len(shape.tasks)
            run = ActionRun(rank, action, shape, [-1] * size, [-1] * (size + len(numbers)), numbers)
            mine.append(run)
            place.update((number, (run, part)) for part, number in enumerate(numbers) if number >= 0)
            for part in shape.finishing:
                target = passes.next(numbers[part]) if numbers[part] >= 0 else -1
                if target >= 0 and stage_ranks[passes.stage(target)] != rank:
                    pair = (rank, stage_ranks[passes.stage(target)])
                    edges.setdefault(pair, Edge(*pair)).sends.append(numbers[part])
        runs.append(tuple(mine))
    return Program(
        passes=passes,
        runs=tuple(runs),
        place=place,
        edges=tuple(edges.values()),
        edge_of={number: i for i, edge in enumerate(edges.values()) for number in edge.sends},
        occupancy_ns=_occupancies(stage_ranks, bounds, model, costs),
        latency_ns=costs.link.latency_ns,
    )


def _list_problems(stage_ranks: Sequence[int], actions: Sequence[Sequence[Action]]) -> list[Problem]:
    """What makes the lists meaningless. Passes that are missing show as a deadlock later."""
    problems: list[Problem] = []
    seen: set[tuple[int, str, int]] = set()  # I counts as B: only one of them may run
    split: set[tuple[int, int]] = set()  # (stage, micro-batch) whose I stands in an earlier action
    for rank, row in enumerate(actions):
        for action in row:
            for part in action.passes:
                letter = "B" if part.kind is ActionKind.I else str(part.kind)
                if letter not in ("F", "B", "W"):
                    problems.append(Problem(f"actions[{rank}]", str(action), "a compute action (F, B, I, W)"))
                elif not 0 <= part.stage < len(stage_ranks) or stage_ranks[part.stage] != rank:
                    problems.append(Problem(f"actions[{rank}]", str(action), "of a stage on this rank"))
                elif (part.stage, letter, part.microbatch) in seen:
                    problems.append(Problem(f"actions[{rank}]", str(part), "run once"))
                elif letter == "W" and (part.stage, part.microbatch) not in split:
                    allowed = f"in a later action than {part.stage}I{part.microbatch}"
                    problems.append(Problem(f"actions[{rank}]", str(part), allowed))
                seen.add((part.stage, letter, part.microbatch))
            split.update((part.stage, part.microbatch) for part in action.passes if part.kind is ActionKind.I)
    return problems


def _action_tasks(
    key: str, bounds: Bounds, interleaving: Interleaving | None, model: ModelSpec, costs: Sequence[CostTable]
) -> ActionTasks:
    """``costs``: of each pass. ``interleaving`` None: overlap off, the passes one after the other on one lane, each in
    its canonical order."""
    part_of: dict[str, int] = {}
    tasks: dict[str, Task] = {}
    parts = key_parts(key, len(bounds))
    for number, (stage, kind) in enumerate(parts):
        pass_ = Pass.B if kind == "I" else Pass(kind)
        for task in chunk_graph(model, costs[number], *bounds[stage], pass_, with_w=kind != "I").tasks:
            tasks[task.name] = task
            part_of[task.name] = number
    order = interleaving.order if interleaving else tuple(tasks)
    if sorted(order) != sorted(tasks):
        wrong = sorted(set(order) ^ set(tasks)) or sorted({name for name in order if order.count(name) > 1})
        allowed = "exactly the tasks of the action, once each"
        raise ScheduleError.of("schedule", [Problem(f"interleavings.{key}", wrong, allowed)])

    index = {name: i for i, name in enumerate(order)}
    # A pass's output needs its F_ or B_ tasks; those that another one of them waits for need no look of their own.
    inner = {dep for task in tasks.values() if task.pass_ is not Pass.W for dep in task.deps}
    sinks = [0] * len(parts)
    last = [-1] * len(parts)
    lanes: tuple[list[LaneTask], list[LaneTask]] = ([], [])
    for i, name in enumerate(order):
        task, part = tasks[name], part_of[name]
        deps = tuple(index[dep] for dep in task.deps)
        sink = -1
        if task.pass_ is not Pass.W:
            deps = deps or (len(order) + part,)
            last[part] = i
            if name not in inner:
                sink = part
                sinks[part] += 1
        # W tasks of a separate W action have no dependency here: their B tasks stand before them in the same lane.
        lane = COMM if interleaving and task.resource is Resource.COMM else COMP
        lanes[lane].append(LaneTask(i, task.ns, deps, sink))
    return ActionTasks(
        tasks=tuple(tasks[name] for name in order),
        part_of=tuple(part_of[name] for name in order),
        lanes=(tuple(lanes[COMP]), tuple(lanes[COMM])),
        sinks=tuple(sinks),
        finishing=tuple(sorted(range(len(parts)), key=last.__getitem__) if interleaving else range(len(parts))),
    )


def _occupancies(stage_ranks: Sequence[int], bounds: Bounds, model: ModelSpec, costs: CostTable) -> tuple[int, ...]:
    """Per stage: how long the message between it and the next stage occupies the link (0 within a rank)."""
    result: list[int] = []
    label = ""
    for stage, (start, stop) in enumerate(bounds):
        if stop > start:
            label = model.items[stop - 1].label
        crosses = stage + 1 < len(bounds) and stage_ranks[stage] != stage_ranks[stage + 1]
        if crosses and label and label not in costs.memory:
            problem = Problem(f"memory.{label}", None, "the bytes of this item", "its output crosses to another rank")
            raise CostError.of("cost table", [problem])
        result.append(costs.link.occupancy_ns(costs.memory[label].output) if crosses and label else 0)
    return tuple(result)
