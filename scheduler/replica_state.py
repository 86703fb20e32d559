"""The words of the compiled replica loop: columns of operations, what a replica's state is made of, what comes out.

A *lane* is one rank of an expert-parallel group; state arrays are [pipeline ranks, lanes] unless they say otherwise.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

COMP_OP, COMM_OP, BOTH, OUTPUT_OP, SEND_OP = 0, 1, 2, 3, 4
"""Kinds of operation: a task on the compute lane, a collective beside it, a collective on the compute lane (overlap
off), a pass's output coming to exist, a message."""
NO_ROWS, WORK, TRAFFIC = 0, 1, 2
"""How routing scales an operation: not, by rows computed, by rows moved."""
OTHER, FIRST_BACKWARD, LAST_FORWARD = 0, 1, 2
"""Compute tasks beside which idle time is looked at."""
BUSY, OVERLAPPED, WARMUP, COOLDOWN, POOL_PEAK, FILLED, FORCED, INLINE, DRAINED = range(9)
STATISTICS = 9
"""Per replica, rank and lane: compute ns, ns of it beside a collective, bubble before the first backward and behind the
last forward, most pending bytes, and numbers of W tasks: put into slots, put there for want of slack, run in place
because a pool was full, run at the end."""


class C(IntEnum):
    """Columns of an operation."""

    KIND = 0
    RANK = 1
    NS = 2
    DEP_START = 3
    DEP_STOP = 4
    PASS_IN = 5  # pass whose input it waits for; of an output or message: the pass that gets it; -1: none
    PASS_OUT = 6  # pass whose output needs it; of an output or message: the pass that made it; -1: none
    SCALE = 7
    ROWS = 8  # layer x micro-batches + micro-batch
    USE = 9
    PARAM = 10  # of a W task: number of its weight; -1: no W task
    BYTES = 11  # that a deferred W holds
    SLOT = 12  # 1: a compute task that waits for a collective
    PHASE = 13
    EDGE = 14  # of a message
    OWN = 15  # of a forward's output: its backward; -1: none
    EMPTY = 16  # 1: the output of a pass without tasks, which is its input
    GAP = 17  # planned idle time of the compute lane behind the operation
    LEFT = 18  # planned compute of the rank from this operation on
    REMOTE = 19  # 1: its input comes from another rank


COLUMNS = len(C)


class Sizes(NamedTuple):
    """Of a program; ``collectives``: most on one rank."""

    ranks: int
    passes: int
    edges: int
    collectives: int
    latency_ns: int


class State(NamedTuple):
    """A replica while it is timed. Intervals: when collectives of a rank run; two without a gap are one."""

    free: Ints  # when the compute lane is free
    busy: Ints
    beside: Ints
    mark: Ints  # [ranks, lanes, 2] later of first backward and last forward: time, idle time before
    first: Ints  # first interval that can still matter
    starts: Ints  # [ranks, intervals]
    ends: Ints  # [ranks, intervals]
    before: Ints  # [ranks, intervals + 1] collectives before the interval (ns)
    intervals: Ints  # [ranks] how many
    arrival: Ints  # [passes, lanes] of a pass's input
    output: Ints  # [passes, lanes]
    statistics: Ints  # [ranks, lanes, STATISTICS]
    late: Ints  # [ranks] collectives that began before the end of a compute task that was timed without them


class Pools(NamedTuple):
    """Deferred W tasks."""

    tasks: Ints  # [ranks, lanes, pool_tasks + 1, POOL_COLUMNS] in the order in which they came
    size: Ints
    held: Ints  # bytes
    work: Ints  # ns
    gap: Ints  # idle time planned behind the last task that was run


class Durations(NamedTuple):
    """Of the operation at hand, on every lane (ns): by profile and counts, and with jitter."""

    expected: Ints
    actual: Ints


class Noise(NamedTuple):
    """``factors``: jitter's, or none."""

    factors: Floats
    seed: int


class Filling(NamedTuple):
    """See ``BubbleFilling``; ``on`` false: nothing moves."""

    on: bool
    fit: float
    pool_tasks: int
    pool_bytes: int
    deadline: int


class Record(NamedTuple):
    """Start and end of every operation on one lane of one replica; -1 for none."""

    replica: int
    lane: int
    starts: Ints
    ends: Ints
