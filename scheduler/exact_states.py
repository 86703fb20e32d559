"""Partial schedules of a task graph on two lanes, as the exact search sees them.

A state is a set of done tasks with the times that still matter: when each lane is free, and for every task of the
*frontier* (not done, but some of its dependencies are) when the done ones let it start. Two states with the same done
set differ in those times only, so one whose times are all at most the other's makes the other superfluous.

*Leaves* are COMP tasks without followers whose dependencies all ran on COMP; in practice the W tasks. COMP is never
free before such a task is ready, so no ready time is kept for it, and leaves of equal duration are interchangeable: a
state counts how many of each duration are done instead of saying which. What is left of them when all other tasks are
done runs at the end without a gap.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tessera_rt.scheduler.lane_graph import COMM, COMP, LaneGraph

Times = tuple[int, ...]
"""[COMP free, COMM free, ready times of the place's frontier] in ns."""


@dataclass(slots=True, kw_only=True)
class Place:
    """What all states with the same done tasks (leaves apart) have in common. ``slot``: where Times has a time."""

    done: int  # bit i: task i
    frontier: tuple[int, ...]
    slot: dict[int, int]
    lanes: tuple[int, ...]  # of the frontier's tasks
    tails: tuple[int, ...]
    available: list[tuple[int, int, int, int]]  # (task, lane, ns, slot; -1: ready at 0)
    left: tuple[int, int]  # duration of what is not done on each lane, leaves apart
    source_tails: tuple[int, int]  # per lane: longest tail of an undone task without dependencies
    heads: tuple[list[list[tuple[int, int]]], ...]
    """Per lane, for each undone task with no undone task of that lane before it: (slot, ns from there to its start)."""
    comm_end: int  # ns from the end of the last COMM task to the end of everything, at least
    leaves: list[int]  # per duration: how many may run or have run
    moves: dict[int, Move] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Move:
    """Where a task leads: the next place, and for each task of its frontier (old slot or -1, depends on it, lane)."""

    place: Place
    plan: tuple[tuple[int, bool, int], ...]


class StateSpace:
    """The places of one graph, made when they are first reached."""

    def __init__(self, lanes: LaneGraph) -> None:
        self.lanes = lanes
        count = len(lanes)
        leaf = [
            lanes.lane[i] == COMP and not lanes.followers[i] and all(lanes.lane[dep] == COMP for dep in lanes.deps[i])
            for i in range(count)
        ]
        self.leaves = [i for i in range(count) if leaf[i]]
        self.leaf_ns = tuple(sorted({lanes.ns[i] for i in self.leaves}, reverse=True))
        self._class_of = {ns: c for c, ns in enumerate(self.leaf_ns)}
        self._backbone = [i for i in range(count) if not leaf[i]]
        self.full = sum(1 << i for i in self._backbone)
        self._needs = [sum(1 << dep for dep in deps) for deps in lanes.deps]
        self._before = [0] * count  # all tasks that a task depends on, directly or not
        for i, deps in enumerate(lanes.deps):
            for dep in deps:
                self._before[i] |= self._before[dep] | 1 << dep
        on_comm = [i for i in self._backbone if lanes.lane[i] == COMM]
        self._comm_by_end = sorted(on_comm, key=lambda i: lanes.tail[i] - lanes.ns[i])
        self._on = ([i for i in self._backbone if lanes.lane[i] == COMP], on_comm)
        self._mask_on = tuple(sum(1 << i for i in tasks) for tasks in self._on)
        self._paths: dict[int, dict[int, int]] = {}
        self._places: dict[int, Place] = {}

    def place(self, done: int) -> Place:
        """The place with this set of done tasks, which must hold every dependency of its tasks."""
        if done not in self._places:
            self._places[done] = self._make(done)
        return self._places[done]

    def move(self, place: Place, task: int) -> Move:
        """The move by an available task."""
        if task not in place.moves:
            after = self.place(place.done | 1 << task)
            lanes = self.lanes
            plan = tuple((place.slot.get(j, -1), task in lanes.deps[j], lanes.lane[j]) for j in after.frontier)
            place.moves[task] = Move(after, plan)
        return place.moves[task]

    def _make(self, done: int) -> Place:
        lanes, needs = self.lanes, self._needs
        undone = [i for i in self._backbone if not done >> i & 1]
        frontier = tuple(i for i in undone if needs[i] & done)
        slot = {i: place for place, i in enumerate(frontier, 2)}
        sources = [i for i in undone if not needs[i]]
        entries = {i: slot.get(i, lanes.lane[i]) for i in (*frontier, *sources)}
        last = next((i for i in self._comm_by_end if not done >> i & 1), None)
        leaves = [0] * len(self.leaf_ns)
        for i in self.leaves:
            if needs[i] & done == needs[i]:
                leaves[self._class_of[lanes.ns[i]]] += 1
        return Place(
            done=done,
            frontier=frontier,
            slot=slot,
            lanes=tuple(lanes.lane[i] for i in frontier),
            tails=tuple(lanes.tail[i] for i in frontier),
            available=[(i, lanes.lane[i], lanes.ns[i], slot.get(i, -1)) for i in undone if needs[i] & done == needs[i]],
            left=(
                sum(lanes.ns[i] for i in undone if lanes.lane[i] == COMP),
                sum(lanes.ns[i] for i in undone if lanes.lane[i] == COMM),
            ),
            source_tails=(
                max((lanes.tail[i] for i in sources if lanes.lane[i] == COMP), default=0),
                max((lanes.tail[i] for i in sources if lanes.lane[i] == COMM), default=0),
            ),
            heads=tuple(self._heads(lane, done, entries) for lane in (COMP, COMM)),
            comm_end=0 if last is None else lanes.tail[last] - lanes.ns[last],
            leaves=leaves,
        )

    def _heads(self, lane: int, done: int, entries: dict[int, int]) -> list[list[tuple[int, int]]]:
        heads = []
        undone = self._mask_on[lane] & ~done
        for i in self._on[lane]:
            if undone >> i & 1 and not self._before[i] & undone:
                paths = self._paths_to(i)
                heads.append([(entries[j], ns) for j, ns in paths.items() if j in entries])
        return heads

    def _paths_to(self, task: int) -> dict[int, int]:
        """Task -> ns of the longest chain from its start to the start of ``task`` over tasks of the other lane."""
        if task not in self._paths:
            lanes = self.lanes
            paths = {task: 0}
            for i in range(task - 1, -1, -1):
                if lanes.lane[i] != lanes.lane[task] and self._before[task] >> i & 1:
                    after = [paths[j] for j in lanes.followers[i] if j in paths]
                    if after:
                        paths[i] = lanes.ns[i] + max(after)
            self._paths[task] = paths
        return self._paths[task]
