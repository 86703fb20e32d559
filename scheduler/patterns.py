"""Orders that users write themselves, in the form of the Tessera paper (OSDI '26)::

    overlap_plans:
      - chunk_pair: {fwd_chunk: [Layer0, Layer1], bwd_chunk: [Layer0, Layer1]}
        pattern: [B_COMB:L1, F_ATTN:L0, F_DISP:L0, B_MLP:L1, F_COMB:L0, B_WGRAD:L1]

Chunks name their items (``Layer3`` or ``L3``, ``M0`` for an MTP block, ``EMBED``, ``HEAD``); a pattern names tasks,
also by the coarser names of ``task_names.py``. It need not name all of them: the others are placed around it. Every
fault is reported with its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import networkx as nx
import yaml

from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.files.task_names import expand_each
from tessera_rt.files.yaml_text import parse_yaml
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Interleaving
from tessera_rt.scheduler.graphs import to_networkx
from tessera_rt.scheduler.interleave import interleave
from tessera_rt.scheduler.list_schedule import interleaving
from tessera_rt.tasks import Pass, TaskGraph, chunk_tasks

_LAYER = re.compile(r"[Ll]ayer(\d+)")
_ROOT = "overlap_plans"
_ENTRY = ("chunk_pair", "pattern")
_PAIR = ("fwd_chunk", "bwd_chunk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A given order for F over items [start, stop) of a model with B and W over others. ``line``: where it stands.

    ``order`` has the names of ``tasks.py``, not necessarily of all tasks, each behind what it depends on.
    """

    forward: tuple[int, int]
    backward: tuple[int, int]
    order: tuple[str, ...]
    line: int


def load_patterns(path: str | Path, model: ModelSpec, *, tp: int = 1) -> tuple[Pattern, ...]:
    """The patterns of a file; see ``patterns_from_yaml``. Raises ScheduleError also for a file that cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError.of(str(path), [Problem("file", str(path), "a readable text file", str(error))]) from None
    return patterns_from_yaml(text, model, str(path), tp=tp)


def patterns_from_yaml(text: str, model: ModelSpec, where: str = "patterns", *, tp: int = 1) -> tuple[Pattern, ...]:
    """All patterns of a document, checked against ``model`` on ``tp`` tensor-parallel ranks.

    Raises one ScheduleError with the line of each fault: an unknown key, item or task, a chunk that is not contiguous,
    a task named twice or before something that it depends on, two patterns for one pair.
    """
    parse_yaml(text, where, ScheduleError)  # syntax and keys that stand twice
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    problems: list[Problem] = []
    patterns: list[Pattern] = []
    entries = _mapping(node, (_ROOT,), "document", problems).get(_ROOT)
    for entry in _items(entries, _ROOT, problems):
        pattern = _pattern(entry, model, tp, problems)
        if pattern is None:
            continue
        twin = next((p for p in patterns if (p.forward, p.backward) == (pattern.forward, pattern.backward)), None)
        if twin is not None:
            problems.append(Problem(_at(entry, "chunk_pair"), "again", f"another pair than in line {twin.line}"))
        patterns.append(pattern)
    if problems:
        raise ScheduleError.of(where, problems)
    return tuple(patterns)


def complete(pattern: Pattern, graph: TaskGraph, key: str, *, method: str = "exact", comm_sms: int = 0) -> Interleaving:
    """The pattern with all tasks of ``graph`` (method ``given``): on each lane its own stay in their order.

    ``graph``: the pair's tasks with durations. The missing tasks are placed by ``method`` (``interleave.py``).
    Raises ScheduleError when the pattern names a task that the graph lacks.
    """
    strangers = [name for name in pattern.order if name not in graph.by_name]
    if strangers:
        allowed = f"a task of {key}"
        raise ScheduleError.of(
            f"pattern in line {pattern.line}", [Problem("pattern", name, allowed) for name in strangers]
        )
    made = interleave(_chained(graph, pattern.order), key, method=method, comm_sms=comm_sms)
    return interleaving(made.order, graph, key, method="given", comm_sms=comm_sms)


def _chained(graph: TaskGraph, order: Sequence[str]) -> TaskGraph:
    """The graph in which each given task also depends on the one before it on its lane."""
    extra: dict[str, str] = {}
    last: dict[str, str] = {}
    for name in order:
        lane = graph.by_name[name].resource
        if lane in last:
            extra[name] = last[lane]
        last[lane] = name
    digraph = to_networkx(graph)
    digraph.add_edges_from((before, name) for name, before in extra.items())
    place = {name: i for i, name in enumerate(graph.names)}
    tasks = []
    for name in nx.lexicographical_topological_sort(digraph, key=place.__getitem__):
        task = graph.by_name[name]
        more = (extra[name],) if name in extra and extra[name] not in task.deps else ()
        tasks.append(replace(task, deps=task.deps + more))
    return TaskGraph(tuple(tasks))


# -- reading ---------------------------------------------------------------------------------------------------------


def _pattern(node: yaml.Node, model: ModelSpec, tp: int, problems: list[Problem]) -> Pattern | None:
    """The pattern of an entry; None when something that it cannot do without is wrong."""
    entry = _mapping(node, _ENTRY, "pattern", problems)
    pair = _mapping(entry["chunk_pair"], _PAIR, "chunk_pair", problems) if "chunk_pair" in entry else {}
    chunks = [_chunk(pair[name], name, model, problems) for name in _PAIR if name in pair]
    if "pattern" not in entry or len(chunks) < 2 or chunks[0] is None or chunks[1] is None:
        return None
    forward, backward = chunks[0], chunks[1]
    graph = chunk_tasks(model.items[slice(*forward)], Pass.F, tp=tp)
    graph = graph.merged(chunk_tasks(model.items[slice(*backward)], Pass.B, tp=tp))
    names = [(_text(item), item) for item in _items(entry["pattern"], "pattern", problems)]
    try:
        expanded = expand_each([name for name, _ in names], graph)
    except ScheduleError as error:
        nodes = {name: item for name, item in reversed(names)}
        problems += [replace(p, field=_at(nodes[str(p.value)], "pattern")) for p in error.problems]
        return None
    order = [(fine, item) for fines, (_, item) in zip(expanded, names, strict=True) for fine in fines]
    problems += _order_problems(order, graph)
    return Pattern(
        forward=forward,
        backward=backward,
        order=tuple(name for name, _ in order),
        line=node.start_mark.line + 1,
    )


def _order_problems(order: Sequence[tuple[str, yaml.Node]], graph: TaskGraph) -> Iterator[Problem]:
    digraph = to_networkx(graph)
    later = {name: i for i, (name, _) in enumerate(order)}
    seen: set[str] = set()
    for i, (name, node) in enumerate(order):
        if name in seen:
            yield Problem(_at(node, "pattern"), name, "named once")
        seen.add(name)
        late = [other for other in graph.names if later.get(other, -1) > i and other in nx.ancestors(digraph, name)]
        if late and later[name] == i:
            yield Problem(_at(node, "pattern"), name, f"behind {', '.join(late)}, which it depends on")


def _chunk(node: yaml.Node, field: str, model: ModelSpec, problems: list[Problem]) -> tuple[int, int] | None:
    """The items [start, stop) that a chunk names."""
    labels = [item.label for item in model.items]
    places: list[int] = []
    faults = len(problems)
    for item in _items(node, field, problems):
        text = _text(item)
        match = _LAYER.fullmatch(text)
        label = f"L{int(match[1])}" if match else text
        if label not in labels:
            allowed = f"an item of {model.name}: {labels[0]}, Layer0 to Layer{len(model.layers) - 1}, {labels[-1]}"
            problems.append(Problem(_at(item, field), text, allowed))
            continue
        places.append(labels.index(label))
        if len(places) > 1 and places[-1] != places[-2] + 1:
            allowed = f"{labels[places[-2] + 1]}: a chunk is a contiguous range in the model's order"
            problems.append(Problem(_at(item, field), text, allowed if places[-2] + 1 < len(labels) else "the last"))
    if len(problems) > faults:
        return None
    if not places:
        problems.append(Problem(_at(node, field), "[]", "at least one item"))
        return None
    return places[0], places[-1] + 1


def _mapping(node: yaml.Node | None, keys: Sequence[str], field: str, problems: list[Problem]) -> dict[str, yaml.Node]:
    """The values of a mapping that has exactly these keys."""
    if not isinstance(node, yaml.MappingNode):
        problems.append(Problem(_at(node, field), _text(node), f"a mapping with {' and '.join(keys)}"))
        return {}
    found = {_text(key): (key, value) for key, value in node.value}
    for name, (key, _) in found.items():
        if name not in keys:
            problems.append(Problem(_at(key, name), name, f"left out: known here: {', '.join(keys)}"))
    for name in keys:
        if name not in found:
            problems.append(Problem(_at(node, field), "absent", f"a mapping with {name}"))
    return {name: value for name, (_, value) in found.items() if name in keys}


def _items(node: yaml.Node | None, field: str, problems: list[Problem]) -> list[yaml.Node]:
    if node is None:
        return []  # its absence is reported already
    if not isinstance(node, yaml.SequenceNode):
        problems.append(Problem(_at(node, field), _text(node), "a list"))
        return []
    return list(node.value)


def _text(node: yaml.Node | None) -> str:
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping" if node is not None else "nothing"


def _at(node: yaml.Node | None, field: str) -> str:
    return f"line {node.start_mark.line + 1}, {field}" if node is not None else field
