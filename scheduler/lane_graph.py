"""A task graph as plain integers, for schedulers that look at thousands of orders of it."""

from __future__ import annotations

from dataclasses import dataclass

from tessera_rt.scheduler.graphs import tails
from tessera_rt.tasks import Resource, TaskGraph

COMP, COMM = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneGraph:
    """Tasks by their position in the graph, which is topological. ``lane``: COMP or COMM; ``tail``: as in ``tails``."""

    names: tuple[str, ...]
    ns: tuple[int, ...]
    lane: tuple[int, ...]
    movable: tuple[bool, ...]
    deps: tuple[tuple[int, ...], ...]
    followers: tuple[tuple[int, ...], ...]
    tail: tuple[int, ...]

    @classmethod
    def of(cls, graph: TaskGraph) -> LaneGraph:
        index = {name: i for i, name in enumerate(graph.names)}
        deps = tuple(tuple(dict.fromkeys(index[dep] for dep in task.deps)) for task in graph.tasks)
        followers: list[list[int]] = [[] for _ in graph.tasks]
        for i, needed in enumerate(deps):
            for dep in needed:
                followers[dep].append(i)
        after = tails(graph)
        return cls(
            names=graph.names,
            ns=tuple(task.ns for task in graph.tasks),
            lane=tuple(COMM if task.resource is Resource.COMM else COMP for task in graph.tasks),
            movable=tuple(task.movable for task in graph.tasks),
            deps=deps,
            followers=tuple(map(tuple, followers)),
            tail=tuple(after[name] for name in graph.names),
        )

    def __len__(self) -> int:
        return len(self.ns)

    def load(self, lane: int) -> int:
        """Total duration (ns) of a lane's tasks."""
        return sum(ns for ns, on in zip(self.ns, self.lane, strict=True) if on == lane)

    def bound(self) -> int:
        """As ``graphs.lower_bound`` and sharper: a lane starts behind some task's head and ends before some tail."""
        if not self.ns:
            return 0
        head = [0] * len(self)
        for i, needed in enumerate(self.deps):
            head[i] = max((head[dep] + self.ns[dep] for dep in needed), default=0)
        bound = max(self.tail)
        for lane in (COMP, COMM):
            on = [i for i in range(len(self)) if self.lane[i] == lane]
            if on:
                end = min(self.tail[i] - self.ns[i] for i in on)
                bound = max(bound, min(head[i] for i in on) + sum(self.ns[i] for i in on) + end)
        return bound
