"""Step times by the thousand: the simulator for searches.

A *schedule* (stages, ranks, action lists) is compiled once (``FastSteps``); each partition then only says which *block*
every action key is: the tasks of an action in their order, as numbers (``Blocks``). Times equal ``simulate_schedule``'s
to the nanosecond; what it says about deadlocks it leaves to that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tessera_rt.costs import CostTable
from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.plan import Action
from tessera_rt.scheduler.simulate_program import Passes
from tessera_rt.scheduler.step_kernel import COMM, COMP, DEADLOCK, Ints, run_steps
from tessera_rt.tasks import Pass, Resource, TaskGraph

MOST_PARTS = 3
"""Passes of one action: a forward, a backward and a W."""


class Blocks:
    """Actions as numbers, kept in tables that only grow. A block's number stays valid."""

    def __init__(self) -> None:
        self._rows: list[list[int]] = []
        self._lane_tasks: list[tuple[int, int, int, int, int]] = []
        self._deps: list[int] = []
        self._arrays: tuple[Ints, Ints, Ints] | None = None

    def add(self, parts: Sequence[TaskGraph], order: Sequence[int]) -> int:
        """The number of an action whose passes have these graphs (W tasks of a full backward in its graph).

        ``order``: the action's order, as positions in the graphs put one behind the other.
        """
        names: list[dict[str, int]] = []
        tasks = [(task, part) for part, graph in enumerate(parts) for task in graph.tasks]
        place = {at: i for i, at in enumerate(order)}
        at = 0
        for graph in parts:
            names.append({name: place[at + i] for i, name in enumerate(graph.names)})
            at += len(graph.tasks)
        needed = [{d for task in graph.tasks if task.pass_ is not Pass.W for d in task.deps} for graph in parts]
        last, sinks = [-1] * len(parts), [0] * len(parts)
        lanes: tuple[list[tuple[int, int, int, int, int]], ...] = ([], [])
        for i, number in enumerate(order):
            task, part = tasks[number]
            waits = [names[part][dep] for dep in task.deps]
            sink = -1
            if task.pass_ is not Pass.W:
                waits = waits or [len(order) + part]
                last[part] = i
                if task.name not in needed[part]:
                    sink = part
                    sinks[part] += 1
            first = len(self._deps)
            self._deps += waits
            lane = COMM if task.resource is Resource.COMM else COMP
            lanes[lane].append((i, task.ns, first, len(self._deps), sink))
        row = [len(order)]
        for lane_tasks in lanes:
            row += [len(self._lane_tasks), len(self._lane_tasks) + len(lane_tasks)]
            self._lane_tasks += lane_tasks
        spare = [0] * (MOST_PARTS - len(parts))
        finishing = sorted(range(len(parts)), key=last.__getitem__)
        self._rows.append([*row, *sinks, *spare, *finishing, *(-1 for _ in spare), 0, 0])
        self._arrays = None
        return len(self._rows) - 1

    @property
    def arrays(self) -> tuple[Ints, Ints, Ints]:
        """(blocks, lane tasks, dependencies) as the kernel takes them."""
        if self._arrays is None:
            self._arrays = (
                np.array(self._rows, dtype=np.int64).reshape(-1, 13),
                np.array(self._lane_tasks, dtype=np.int64).reshape(-1, 5),
                np.array(self._deps, dtype=np.int64),
            )
        return self._arrays


@dataclass(frozen=True, slots=True)
class Ran:
    """One simulated step. ``starts``, ``ends``: action by action from ``offsets`` on, one place per task in the order
    of its block and three more; -1 in ``starts`` where there is no task."""

    step_ns: int
    starts: Ints
    ends: Ints
    offsets: Ints

    @property
    def task_ends(self) -> Ints:
        """``ends`` of tasks only, as ``starts[starts >= 0]`` has their starts."""
        return np.asarray(self.ends[self.starts >= 0])


class FastSteps:
    """A schedule ready to be timed under many partitions. ``kinds``: one action of every kind that needs a block.

    Two actions are of one kind if ``kind_of`` gives them the same value (default: their key).
    """

    def __init__(
        self,
        stage_ranks: Sequence[int],
        actions: Sequence[Sequence[Action]],
        *,
        copies: int = 1,
        kind_of: Mapping[Action, str] | None = None,
    ) -> None:
        stages = len(stage_ranks)
        microbatches = 1 + max((part.microbatch for row in actions for a in row for part in a.passes), default=0)
        numbers = Passes(stages, microbatches, copies)
        kinds: dict[str, int] = {}
        samples: list[Action] = []
        action_kind: list[int] = []
        action_pass: list[list[int]] = []
        place = np.full((2 * stages * microbatches, 2), -1, dtype=np.int64)
        edges: dict[tuple[int, int], int] = {}
        edge_of = np.full(2 * stages * microbatches, -1, dtype=np.int64)
        for row in actions:
            for action in row:
                kind = action.key if kind_of is None else kind_of[action]
                if kind not in kinds:
                    kinds[kind] = len(kinds)
                    samples.append(action)
                passes = [numbers.number(part.stage, part.kind, part.microbatch) for part in action.passes]
                if len(passes) > MOST_PARTS:
                    raise ScheduleError.of("step", [Problem("action", str(action), f"at most {MOST_PARTS} passes")])
                for part, number in enumerate(passes):
                    if number < 0:
                        continue
                    place[number] = len(action_kind), part
                    target = numbers.next(number)
                    if target >= 0:
                        pair = stage_ranks[numbers.stage(number)], stage_ranks[numbers.stage(target)]
                        if pair[0] != pair[1]:
                            edge_of[number] = edges.setdefault(pair, len(edges))
                action_kind.append(kinds[kind])
                action_pass.append(passes + [-1] * (MOST_PARTS - len(passes)))
        sent = np.bincount(edge_of[edge_of >= 0], minlength=len(edges)) if edges else np.zeros(0, dtype=np.int64)
        self.kinds = tuple(samples)
        self.stage_ranks = tuple(stage_ranks)
        self._sizes = (stages, microbatches, copies, len(edges))
        self._rank_first = np.cumsum([0, *map(len, actions)], dtype=np.int64)
        self._action_kind = np.array(action_kind, dtype=np.int64)
        self._action_pass = np.array(action_pass, dtype=np.int64).reshape(-1, MOST_PARTS)
        self._place, self._edge_of = place, edge_of
        self._edge_first = np.concatenate([[0], np.cumsum(sent)]).astype(np.int64)

    @property
    def actions(self) -> int:
        """Number of actions of a step."""
        return len(self._action_kind)

    def run(
        self,
        blocks: Blocks,
        block_of: Sequence[int],
        occupancy_ns: Sequence[int],
        *,
        latency_ns: int,
        contention: float,
    ) -> Ran:
        """One step. ``block_of``: block of each of ``kinds``; ``occupancy_ns``: of the message behind each stage.

        Raises ScheduleError for a deadlock; ``simulate_schedule`` says who waits for what.
        """
        rows, lane_tasks, deps = blocks.arrays
        action_block = np.asarray(block_of, dtype=np.int64)[self._action_kind]
        places = int(rows[action_block, 0].sum()) + MOST_PARTS * len(action_block)
        starts, ends = np.empty(places, dtype=np.int64), np.empty(places, dtype=np.int64)
        offsets = np.empty(len(action_block) + 1, dtype=np.int64)
        length = int(
            run_steps(
                (*self._sizes, latency_ns),
                float(contention),
                np.asarray(occupancy_ns, dtype=np.int64),
                self._rank_first,
                action_block,
                self._action_pass,
                self._place,
                self._edge_of,
                self._edge_first,
                rows,
                lane_tasks,
                deps,
                starts,
                ends,
                offsets,
            )
        )
        if length == DEADLOCK:
            raise ScheduleError.of("step", [Problem("order", "deadlock", "an order in which every pass can start")])
        return Ran(length, starts, ends, offsets)

    def waits(self, blocks: Blocks, block_of: Sequence[int], ran: Ran) -> list[list[int]]:
        """Per rank and action: ns for which compute idles in front of it (0 for an action without compute)."""
        rows, lane_tasks, _ = blocks.arrays
        action_block = np.asarray(block_of, dtype=np.int64)[self._action_kind]
        found: list[list[int]] = []
        for first, stop in pairwise(self._rank_first.tolist()):
            free = 0  # since when
            found.append([0] * (stop - first))
            for action in range(first, stop):
                begin, end = rows[action_block[action], 1:3]
                if begin < end:
                    place = ran.offsets[action]
                    found[-1][action - first] = int(ran.starts[place + lane_tasks[begin, 0]]) - free
                    free = int(ran.ends[place + lane_tasks[end - 1, 0]])
        return found


def occupancies(stage_ranks: Sequence[int], bounds: Sequence[int], sizes: Sequence[int], costs: CostTable) -> list[int]:
    """Per stage: ns for which the message to the next stage occupies the link (0 within a rank).

    ``sizes``: bytes of each item's output. An empty stage passes on what came to it.
    """
    found: list[int] = []
    for stage, stop in enumerate(bounds[1:]):
        crosses = stage + 1 < len(stage_ranks) and stage_ranks[stage] != stage_ranks[stage + 1]
        found.append(costs.link.occupancy_ns(sizes[stop - 1]) if crosses and stop else 0)
    return found
