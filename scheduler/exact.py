"""The shortest interleaving there is, with its proof.

A best-first search (A*) over partial schedules. A state is a set of done tasks with the times that still matter: when
each lane is free, and for every task of the *frontier* (not done, but some of its dependencies are) when the done ones
let it start. From each, the branches are those of *active* schedules (Giffler and Thompson, 1960): of all available
tasks take the one that could end first; only tasks of its lane that could start before that end come next. No schedule
in which some task could start earlier without delaying another is looked at, and at least one of the others is optimal.
Of two states with the same done tasks, one whose times are all at most the other's makes the other superfluous. States
whose lower bound reaches the incumbent are dropped, too:

- for each lane: when it is free or its first task can be ready, plus all it has left, plus the least that follows;
- for each task of the frontier: its ready time plus the longest chain behind it.

States leave the queue by their bound, so the smallest bound in it holds for every schedule: when it reaches the
incumbent, the incumbent is optimal, and when the search ends early, it is what is proven. Two chains with W tasks (for
which this is a dynamic program) and any other graph are treated alike.

*Leaves* are COMP tasks without followers whose dependencies all ran on COMP; in practice the W tasks. COMP is never
free before such a task is ready, so no ready time is kept for it, and leaves of equal duration are interchangeable: a
state counts how many of each duration are done instead of saying which. What is left of them when all other tasks are
done runs at the end without a gap.

The search itself is compiled: ``exact_kernel.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tessera_rt.plan import Interleaving
from tessera_rt.scheduler.exact_kernel import longest_paths, search
from tessera_rt.scheduler.lane_graph import COMP, LaneGraph
from tessera_rt.scheduler.list_schedule import interleaving
from tessera_rt.tasks import TaskGraph

MAX_STATES = 200_000
"""States looked at before the search gives up: a second or two. Pairs of presets need hundreds to thousands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What is known about an interleaving's length: nothing is shorter than ``lower_bound_ns``.

    ``optimal``: the interleaving has that length. ``states``: how many partial schedules were looked at.
    """

    optimal: bool
    lower_bound_ns: int
    states: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """An interleaving and its proof."""

    interleaving: Interleaving
    proof: Proof

    @property
    def gap(self) -> float:
        """Relative distance from the proven bound; 0 when optimal."""
        bound = self.proof.lower_bound_ns
        return self.interleaving.makespan_ns / bound - 1 if bound else 0.0


def improve(incumbent: Interleaving, graph: TaskGraph, *, max_states: int = MAX_STATES) -> Exact:
    """The optimum (method ``exact``), or ``incumbent`` itself when nothing is shorter or the limit comes first.

    ``incumbent``: any interleaving of ``graph``; a good one makes the search short. Equal input gives equal output.
    """
    lanes = LaneGraph.of(graph)
    upper, bound = incumbent.makespan_ns, lanes.bound()
    if upper == bound:
        return Exact(interleaving=incumbent, proof=Proof(optimal=True, lower_bound_ns=bound, states=0))
    found = _search(lanes, bound, upper, max_states)
    proof = Proof(optimal=found.proven, lower_bound_ns=max(bound, found.bound_ns), states=found.states)
    if found.order is None:
        return Exact(interleaving=incumbent, proof=proof)
    order = [lanes.names[i] for i in found.order]
    best = interleaving(order, graph, incumbent.key, method="exact", comm_sms=incumbent.comm_sms)
    assert best.makespan_ns == proof.lower_bound_ns < upper, "the order's length is the bound it was found with"
    return Exact(interleaving=best, proof=proof)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    proven: bool
    bound_ns: int
    states: int
    order: list[int] | None = None  # None: nothing shorter than the incumbent


def _search(lanes: LaneGraph, bound: int, upper: int, max_states: int) -> _Found:
    count = len(lanes)
    leaf = [
        lanes.lane[i] == COMP and not lanes.followers[i] and all(lanes.lane[dep] == COMP for dep in lanes.deps[i])
        for i in range(count)
    ]
    leaves = [i for i in range(count) if leaf[i]]
    backbone = [i for i in range(count) if not leaf[i]]
    leaf_ns = sorted({lanes.ns[i] for i in leaves}, reverse=True)
    place = {task: i for i, task in enumerate(backbone)}
    deps = [[place[dep] for dep in lanes.deps[task]] for task in backbone]
    before: list[set[int]] = []
    for own in deps:
        before.append(set(own).union(*(before[dep] for dep in own)))
    words = max(1, -(-len(backbone) // 64))
    steps = np.zeros(count, dtype=np.int64)
    ns, lane, tail = (
        np.array([values[i] for i in backbone], dtype=np.int64) for values in (lanes.ns, lanes.lane, lanes.tail)
    )
    needs = _bits(deps, words)
    length, proven, states, taken = search(
        ns,
        lane,
        tail,
        needs,
        _bits(before, words),
        longest_paths(ns, lane, needs),
        np.array(leaf_ns, dtype=np.int64),
        np.array([leaf_ns.index(lanes.ns[i]) for i in leaves], dtype=np.int64),
        _bits([[place[dep] for dep in lanes.deps[i]] for i in leaves], words),
        bound,
        upper,
        max_states,
        steps,
    )
    order = _order(lanes, backbone, leaves, leaf_ns, steps[:taken][::-1].tolist()) if taken >= 0 else None
    return _Found(proven=bool(proven), bound_ns=int(length), states=int(states), order=order)


def _bits(members: Sequence[Sequence[int] | set[int]], words: int) -> npt.NDArray[np.uint64]:
    """[len(members), words]: the sets as bits."""
    masks = np.zeros((len(members), words), dtype=np.uint64)
    for i, own in enumerate(members):
        for j in own:
            masks[i, j // 64] |= np.uint64(1 << j % 64)
    return masks


def _order(
    lanes: LaneGraph, backbone: Sequence[int], leaves: Sequence[int], leaf_ns: Sequence[int], steps: Sequence[int]
) -> list[int]:
    """The tasks of a search's steps; leaves that it does not name come last."""
    order: list[int] = []
    done: set[int] = set()
    waiting = list(leaves)
    for step in steps:
        if step < 0:
            ns = leaf_ns[-1 - step]
            task = next(i for i in waiting if lanes.ns[i] == ns and done.issuperset(lanes.deps[i]))
            waiting.remove(task)
        else:
            task = backbone[step]
        order.append(task)
        done.add(task)
    return order + waiting
