"""Task and TaskGraph: the atoms of scheduling and the true data edges between them.

A *task* is one piece of one layer's work in one pass, on one resource. A communication (COMM) task is one collective
and nothing else. Task names are ``<pass>_<kind>:<item label>``, e.g. ``F_ATTN:L3``; embedding and head are just
``F_EMBED``, ``B_HEAD``. This file knows which tasks a chunk (a contiguous range of items) has and how they depend on
each other; durations come from a ``CostTable``.

Forward of a MoE layer:   ATTN -> ROUTE -> COUNT -> DISP -> MLP -> COMB -> POST, with SHARED between ROUTE and POST.
Backward of a MoE layer:  POST -> COMB -> MLP -> DISP -> ROUTE -> ATTN, with SHARED between POST and ROUTE.
Dense layers have ATTN -> MLP. Weight-gradient (W) tasks hang on the backward task of the same kind and are movable.

With tensor and sequence parallelism, ranks hold different tokens between blocks, and tasks whose weights are split over
the ranks (ATTN, a dense MLP, SHARED, EMBED, HEAD) stand between two collectives: TP_IN gathers the tokens for the mixer
or the head, TP sums and scatters what a mixer or the embedding makes; TP_MLP_IN and TP_MLP do so for a feed-forward. In
backward TP and TP_MLP gather gradients, and TP_IN and TP_MLP_IN sum and scatter them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.model_spec import AttentionKind, FeedForwardKind, Item, ItemKind


class Pass(StrEnum):
    """Forward, backward for inputs, backward for weights."""

    F = "F"
    B = "B"
    W = "W"


class Resource(StrEnum):
    """The two lanes of a rank."""

    COMP = "COMP"
    COMM = "COMM"


class TaskKind(StrEnum):
    """What a task does; see the module's docstring for the order."""

    EMBED = "EMBED"
    ATTN = "ATTN"  # norm, mixer, residual
    ROUTE = "ROUTE"  # norm, router, send order
    COUNT = "COUNT"  # all-gather of per-expert counts over dp x ep
    DISP = "DISP"  # all-to-all: rows to their experts
    MLP = "MLP"  # experts, or the whole dense feed-forward with norm and residual
    SHARED = "SHARED"  # shared expert, a branch
    COMB = "COMB"  # all-to-all: rows back
    POST = "POST"  # weighted sum, shared output, residual
    MTP = "MTP"  # joins hidden state and next token's embedding
    HEAD = "HEAD"  # norm, logits, loss
    TP_IN = "TP_IN"  # tensor-parallel collectives: before and behind a mixer,
    TP = "TP"
    TP_MLP_IN = "TP_MLP_IN"  # before and behind a dense feed-forward or a shared expert
    TP_MLP = "TP_MLP"

    @property
    def resource(self) -> Resource:
        return Resource.COMM if self in _COMM_KINDS else Resource.COMP


TP_KINDS = frozenset({TaskKind.TP_IN, TaskKind.TP, TaskKind.TP_MLP_IN, TaskKind.TP_MLP})
_COMM_KINDS = frozenset({TaskKind.COUNT, TaskKind.DISP, TaskKind.COMB}) | TP_KINDS
_SPLIT_KINDS = frozenset({TaskKind.ATTN, TaskKind.MLP, TaskKind.SHARED, TaskKind.MTP, TaskKind.HEAD})


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task. ``deps`` are names of tasks of the same graph; ``ns`` is its duration without contention.

    ``bytes`` is the payload of a COMM task (0 for compute). ``movable`` tasks may run any time after their deps.
    """

    kind: TaskKind
    pass_: Pass
    label: str  # item label
    deps: tuple[str, ...] = ()
    ns: int = 0
    bytes: int = 0
    movable: bool = False

    @property
    def name(self) -> str:
        return task_name(self.pass_, self.kind, self.label)

    @property
    def resource(self) -> Resource:
        return self.kind.resource


def task_name(pass_: Pass, kind: TaskKind, label: str) -> str:
    """``F_ATTN:L3``; the label is left out where it says nothing new (``F_EMBED``, ``B_HEAD``)."""
    return f"{pass_}_{kind}" if label == kind else f"{pass_}_{kind}:{label}"


def parse_task_name(name: str) -> tuple[Pass, TaskKind, str]:
    """Inverse of ``task_name``. Raises ScheduleError for anything else."""
    head, _, label = name.partition(":")
    pass_text, _, kind_text = head.partition("_")
    try:
        pass_, kind = Pass(pass_text), TaskKind(kind_text)
    except ValueError:
        problem = Problem("task", name, "<F|B|W>_<kind>[:<item>] such as F_ATTN:L3", "see the task names in tasks.py")
        raise ScheduleError.of("task name", [problem]) from None
    return pass_, kind, label or kind_text


@dataclass(frozen=True)
class TaskGraph:
    """Tasks of one pass (or of backward with its W tasks) over one chunk, in a canonical topological order.

    Raises ScheduleError when a name stands twice or a dependency is missing or comes later.
    """

    tasks: tuple[Task, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        problems: list[Problem] = []
        for task in self.tasks:
            if task.name in seen:
                problems.append(Problem("task", task.name, "named once in a graph"))
            problems += [
                Problem(f"{task.name}.deps", dep, "an earlier task of the graph")
                for dep in task.deps
                if dep not in seen
            ]
            seen.add(task.name)
        if problems:
            raise ScheduleError.of("task graph", problems)

    @cached_property
    def by_name(self) -> dict[str, Task]:
        return {task.name: task for task in self.tasks}

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(task.name for task in self.tasks)

    def total_ns(self, resource: Resource | None = None) -> int:
        """Sum of durations, of one resource or of both."""
        return sum(task.ns for task in self.tasks if resource is None or task.resource is resource)

    def merged(self, other: TaskGraph) -> TaskGraph:
        """Both graphs side by side, without edges between them (an overlap pair)."""
        return TaskGraph(self.tasks + other.tasks)


def chunk_tasks(items: Sequence[Item], pass_: Pass, *, with_w: bool = True, tp: int = 1) -> TaskGraph:
    """The task graph (durations 0) of one pass over a chunk.

    ``Pass.F``: forward. ``Pass.B``: backward, with its W tasks right behind their parents when ``with_w``.
    ``Pass.W``: the W tasks alone, without dependencies. An empty chunk has an empty graph. ``tp``: tensor-parallel
    ranks; with more than one, their collectives are among the tasks.
    """
    if pass_ is Pass.F:
        forward = _forward(items)
        return TaskGraph(tuple(forward if tp == 1 else _with_tp(forward, items)))
    backward = list(_backward(items) if tp == 1 else _with_tp(_backward(items), items))
    if pass_ is Pass.B:
        return TaskGraph(tuple(task for task in backward if with_w or task.pass_ is Pass.B))
    return TaskGraph(tuple(replace(task, deps=()) for task in backward if task.pass_ is Pass.W))


def _layer_kinds(item: Item) -> list[tuple[TaskKind, tuple[TaskKind, ...]]]:
    """(kind, kinds of the same item it needs) in forward order; an empty tuple means: the previous item's output."""
    if item.kind is ItemKind.EMBED:
        return [(TaskKind.EMBED, ())]
    if item.kind is ItemKind.HEAD:
        return [(TaskKind.HEAD, ())]
    assert item.layer is not None
    kinds: list[tuple[TaskKind, tuple[TaskKind, ...]]] = []

    def after_last() -> tuple[TaskKind, ...]:
        return (kinds[-1][0],) if kinds else ()

    if item.kind is ItemKind.MTP:
        kinds.append((TaskKind.MTP, ()))
    if item.layer.attention.kind is not AttentionKind.NONE:
        kinds.append((TaskKind.ATTN, after_last()))
    feed_forward = item.layer.feed_forward
    if feed_forward.kind is FeedForwardKind.DENSE:
        kinds.append((TaskKind.MLP, after_last()))
    elif feed_forward.kind is FeedForwardKind.MOE:
        kinds.append((TaskKind.ROUTE, after_last()))
        kinds.append((TaskKind.COUNT, (TaskKind.ROUTE,)))
        kinds.append((TaskKind.DISP, (TaskKind.COUNT,)))
        shared = feed_forward.shared_intermediate > 0
        if shared:
            kinds.append((TaskKind.SHARED, (TaskKind.ROUTE,)))
        kinds.append((TaskKind.MLP, (TaskKind.DISP,)))
        kinds.append((TaskKind.COMB, (TaskKind.MLP,)))
        kinds.append((TaskKind.POST, (TaskKind.COMB, TaskKind.SHARED) if shared else (TaskKind.COMB,)))
    return kinds


def _forward(items: Sequence[Item]) -> Iterable[Task]:
    previous: str | None = None
    for item in items:
        name = previous
        for kind, needs in _layer_kinds(item):
            if needs:
                deps = tuple(task_name(Pass.F, need, item.label) for need in needs)
            else:
                deps = (previous,) if previous else ()
            task = Task(kind=kind, pass_=Pass.F, label=item.label, deps=deps)
            name = task.name
            yield task
        previous = name


# COUNT has no backward: counts are integers.
_BACKWARD_NEEDS: dict[TaskKind, tuple[TaskKind, ...]] = {
    TaskKind.COMB: (TaskKind.POST,),
    TaskKind.SHARED: (TaskKind.POST,),
    TaskKind.DISP: (TaskKind.MLP,),
    TaskKind.ROUTE: (TaskKind.DISP, TaskKind.SHARED),
}
_BACKWARD_ORDER = (
    TaskKind.HEAD,
    TaskKind.POST,
    TaskKind.COMB,
    TaskKind.SHARED,
    TaskKind.MLP,
    TaskKind.DISP,
    TaskKind.ROUTE,
    TaskKind.ATTN,
    TaskKind.MTP,
    TaskKind.EMBED,
)


def _backward(items: Sequence[Item]) -> Iterable[Task]:
    previous: str | None = None
    for item in reversed(items):
        kinds = {kind for kind, _ in _layer_kinds(item)}
        moe = TaskKind.POST in kinds
        last = previous
        for kind in _BACKWARD_ORDER:
            if kind not in kinds:
                continue
            if moe and kind in _BACKWARD_NEEDS:
                deps = tuple(task_name(Pass.B, need, item.label) for need in _BACKWARD_NEEDS[kind] if need in kinds)
            elif moe and kind is TaskKind.MLP:
                deps = (task_name(Pass.B, TaskKind.COMB, item.label),)
            else:
                deps = (last,) if last else ()
            task = Task(kind=kind, pass_=Pass.B, label=item.label, deps=deps)
            yield task
            last = task.name
            if kind in _SPLIT_KINDS:
                yield Task(kind=kind, pass_=Pass.W, label=item.label, deps=(task.name,), movable=True)
        previous = last


# Per kind of task whose weights tensor parallelism splits: the collectives before and behind its forward.
_AROUND: dict[TaskKind, tuple[TaskKind | None, TaskKind | None]] = {
    TaskKind.EMBED: (None, TaskKind.TP),
    TaskKind.ATTN: (TaskKind.TP_IN, TaskKind.TP),
    TaskKind.MLP: (TaskKind.TP_MLP_IN, TaskKind.TP_MLP),
    TaskKind.SHARED: (TaskKind.TP_MLP_IN, TaskKind.TP_MLP),
    TaskKind.HEAD: (TaskKind.TP_IN, None),
}


def split_by_tp(item: Item, kind: TaskKind) -> bool:
    """Whether tensor parallelism splits the weights of this task; experts are split by expert parallelism alone."""
    experts = kind is TaskKind.MLP and item.layer is not None and item.layer.is_moe
    return kind in _AROUND and not experts


def _with_tp(tasks: Iterable[Task], items: Sequence[Item]) -> Iterable[Task]:
    """The tasks of a pass with the collectives around those that are split."""
    item_of = {item.label: item for item in items}
    behind: dict[str, str] = {}  # a split task -> the collective that stands for it
    waiting: Task | None = None  # the last such collective: W tasks come before it
    for task in tasks:
        if task.pass_ is Pass.W:
            yield task
            continue
        if waiting is not None:
            yield waiting
            waiting = None
        task = replace(task, deps=tuple(behind.get(dep, dep) for dep in task.deps))
        if not split_by_tp(item_of[task.label], task.kind):
            yield task
            continue
        first, last = _AROUND[task.kind] if task.pass_ is Pass.F else _AROUND[task.kind][::-1]
        if first is not None:
            before = Task(kind=first, pass_=task.pass_, label=task.label, deps=task.deps)
            yield before
            task = replace(task, deps=(before.name,))
        yield task
        if last is not None:
            waiting = Task(kind=last, pass_=task.pass_, label=task.label, deps=(task.name,))
            behind[task.name] = waiting.name
    if waiting is not None:
        yield waiting
