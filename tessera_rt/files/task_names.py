"""Names of items and tasks as people write them: ranges of item labels, and the coarser task names of the paper.

The paper knows four tasks per layer and pass and one weight gradient. Such an order is accepted where it can mean only
one thing; each coarse name stands for its own task and for those beside it (tensor-parallel collectives included) that
the order does not name itself::

    F_ATTN  ATTN ROUTE      F_DISP  COUNT DISP      F_MLP  MLP SHARED      F_COMB or F_COMBINE  COMB POST
    B_COMB or B_COMBINE  POST COMB      B_MLP  MLP SHARED      B_DISP  DISP      B_ATTN  ROUTE ATTN
    B_WGRAD  all W tasks of the layer
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.tasks import Pass, TaskGraph, TaskKind

_SYNONYMS = {"COMBINE": "COMB", "DISPATCH": "DISP"}
_WGRAD = "WGRAD"
_STANDS_FOR: dict[tuple[str, str], tuple[TaskKind, ...]] = {
    ("F", "ATTN"): (TaskKind.TP_IN, TaskKind.ATTN, TaskKind.TP, TaskKind.ROUTE),
    ("F", "DISP"): (TaskKind.COUNT, TaskKind.DISP),
    ("F", "MLP"): (TaskKind.TP_MLP_IN, TaskKind.MLP, TaskKind.SHARED, TaskKind.TP_MLP),
    ("F", "COMB"): (TaskKind.COMB, TaskKind.POST),
    ("B", "COMB"): (TaskKind.POST, TaskKind.COMB),
    ("B", "MLP"): (TaskKind.TP_MLP, TaskKind.MLP, TaskKind.SHARED, TaskKind.TP_MLP_IN),
    ("B", "ATTN"): (TaskKind.ROUTE, TaskKind.TP, TaskKind.ATTN, TaskKind.TP_IN),
}
_LABEL = re.compile(r"([LM])(\d+)")


def expand_names(order: Sequence[str], graph: TaskGraph) -> tuple[str, ...]:
    """The order in the names of ``graph``, with every coarse name replaced by the tasks it stands for.

    The label may be left out where the graph has one item with such a task. Whether the result is complete and in a
    possible order is for ``check_plan`` to say. Raises ScheduleError naming every name that fits nothing or several.
    """
    return tuple(name for names in expand_each(order, graph) for name in names)


def expand_each(order: Sequence[str], graph: TaskGraph) -> tuple[tuple[str, ...], ...]:
    """``expand_names`` with the tasks of each name of the order kept apart."""
    problems: list[Problem] = []
    expanded: list[tuple[str, ...]] = []
    resolved = [_resolve(name, graph, problems) for name in order]
    if problems:
        raise ScheduleError.of("order", problems)
    named = {f"{head}:{label}" if label else head for head, label in resolved}
    for head, label in resolved:
        pass_, _, kind = head.partition("_")
        suffix = f":{label}" if label else ""
        if kind == _WGRAD:
            fine = [task.name for task in graph.tasks if task.pass_ is Pass.W and task.label == label]
            expanded.append(tuple(name for name in fine if name not in named))
            continue
        own = f"{head}{suffix}"
        parts = [f"{pass_}_{part}{suffix}" for part in _STANDS_FOR.get((pass_, kind), ())] or [own]
        expanded.append(tuple(name for name in parts if name == own or (name in graph.by_name and name not in named)))
    return tuple(expanded)


def _resolve(name: str, graph: TaskGraph, problems: list[Problem]) -> tuple[str, str]:
    """(``<pass>_<kind>``, label) of a name with synonyms replaced and a missing label filled in."""
    head, _, label = name.partition(":")
    pass_, _, kind = head.partition("_")
    head = f"{pass_}_{_SYNONYMS.get(kind, kind)}"
    if head == f"{Pass.W}_{_WGRAD}":
        head = f"{Pass.B}_{_WGRAD}"
    if head == f"{Pass.B}_{_WGRAD}":
        labels = dict.fromkeys(task.label for task in graph.tasks if task.pass_ is Pass.W)
    elif not label and head in graph.by_name:  # F_EMBED, B_HEAD
        return head, ""
    else:
        labels = dict.fromkeys(task.label for task in graph.tasks if task.name == f"{head}:{task.label}")
    if label in labels:
        return head, label
    if not label and len(labels) == 1:
        return head, next(iter(labels))
    if not label and labels:
        problems.append(Problem("task", name, "a name with its layer", f"name one of {', '.join(labels)}"))
    elif labels:
        problems.append(Problem("task", name, f"on one of {', '.join(labels)}"))
    else:
        kinds = ", ".join(dict.fromkeys(task.name.partition(":")[0] for task in graph.tasks))
        problems.append(Problem("task", name, f"one of {kinds or 'no tasks'}"))
    return head, label


def item_labels(count: int, task_names: Iterable[str]) -> tuple[str, ...]:
    """Labels of a model's ``count`` items (EMBED, L0, ..., M0, ..., HEAD); its tasks tell how many are MTP blocks."""
    mtp = 0
    for label in {name.partition(":")[2] for name in task_names}:
        if (match := _LABEL.fullmatch(label)) and match[1] == "M":
            mtp = max(mtp, int(match[2]) + 1)
    layers = max(0, count - 2 - mtp)
    labels = ("EMBED", *(f"L{i}" for i in range(layers)), *(f"M{i}" for i in range(count - 2 - layers)), "HEAD")
    return labels[:count]


def label_range(labels: Sequence[str], start: int, stop: int) -> str:
    """``L0..L3`` for items [start, stop), the label alone for one item, ``none`` for no item."""
    chosen = labels[start:stop]
    if not chosen:
        return "none"
    return chosen[0] if len(chosen) == 1 else f"{chosen[0]}..{chosen[-1]}"
