"""Times of thousands of replicas of one step, compiled: the loop behind ``replicas.py``.

A replica is one expert-parallel group of every pipeline rank: its ranks (*lanes*) are pipelines side by side, coupled
by collectives, which start when the last of the group is ready and last as long as the slowest needs. Replicas do not
wait for one another within a step. Rules of timing: ``simulate.py``; of filling: ``bubble_filling.py``. Integer ns.

All of it is in this one file, since numba's cache on disk looks at nothing but the file of the function that is called.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from tessera_rt.scheduler.replica_state import (
    BOTH,
    BUSY,
    COMP_OP,
    COOLDOWN,
    DRAINED,
    FILLED,
    FIRST_BACKWARD,
    FORCED,
    INLINE,
    LAST_FORWARD,
    OUTPUT_OP,
    OVERLAPPED,
    POOL_PEAK,
    SEND_OP,
    WARMUP,
    WORK,
    Durations,
    Pools,
    Record,
    State,
)

# The same as plain numbers, for the compiler.
KIND, RANK, NS, DEP_START, DEP_STOP, PASS_IN, PASS_OUT, SCALE, ROWS, USE = range(10)
PARAM, BYTES, SLOT, PHASE, EDGE, OWN, EMPTY, GAP, LEFT, REMOTE = range(10, 20)
POOLED_NS, WEIGHT, HELD, TASK, EXPECTED = range(5)
POOL_COLUMNS = 5
"""A pooled W task: its duration, number of its weight, bytes held, operation, duration by profile and counts."""


def jit(function: Any) -> Any:
    """Compiled when it is first called, then kept on disk."""
    return numba.njit(cache=True, error_model="numpy")(function)


def inline(function: Any) -> Any:
    """For what is called for every lane: passing a state costs more than most of these functions do."""
    return numba.njit(inline="always", error_model="numpy")(function)


@jit
def jitter_factor(noise, op, stream):  # type: ignore[no-untyped-def]
    """A factor that depends on seed, operation and lane only (SplitMix64; Steele, Lea and Flood 2014)."""
    place = np.uint64(op) * np.uint64(0x100000001) + np.uint64(stream) + np.uint64(1)
    x = np.uint64(noise.seed) + np.uint64(0x9E3779B97F4A7C15) * place
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return noise.factors[np.int64(x >> np.uint64(52))]


@inline
def set_durations(op, ns, shares, replica, row, noise, durations):  # type: ignore[no-untyped-def]
    """``shares`` [replicas, rows, lanes] scales ``ns`` by its entry ``row``; not if that is below 0."""
    lanes = durations.expected.shape[0]
    if row >= 0 and shares.shape[0]:
        for lane in range(lanes):
            ns_here = np.int64(np.rint(ns * shares[replica, row, lane]))
            durations.expected[lane] = durations.actual[lane] = ns_here
    else:
        for lane in range(lanes):
            durations.expected[lane] = durations.actual[lane] = ns
    if noise.factors.shape[0]:
        for lane in range(lanes):
            factor = jitter_factor(noise, op, replica * lanes + lane)
            durations.actual[lane] = np.int64(np.rint(durations.expected[lane] * factor))


@inline
def advance(begin, ns, stretch, starts, ends, count, first):  # type: ignore[no-untyped-def]
    """(end of a compute task that starts at ``begin``, time of it beside collectives, first interval that matters on).

    Compute goes at rate 1 / ``stretch`` beside a collective; its end is rounded whenever the rate changes.
    """
    i = first
    while i < count and ends[i] <= begin:
        i += 1
    first = i
    if i == count or starts[i] >= begin + ns:
        return begin + ns, np.int64(0), first
    inside = starts[i] <= begin
    work, now = float(ns), begin
    end = np.int64(np.rint(begin + ns * stretch)) if inside else begin + ns
    beside = np.int64(0)
    while i < count:
        change = ends[i] if inside else starts[i]
        if change >= end:
            break
        elapsed = change - now
        if inside:
            beside += elapsed
            work = max(0.0, work - elapsed / stretch)
            i += 1
        else:
            work = max(0.0, work - elapsed)
        inside = not inside
        now = change
        end = max(now, np.int64(np.rint(now + work * (stretch if inside else 1.0))))
    if inside:
        beside += end - now
    return end, beside, first


@jit
def idle_before(time, state, rank, lane):  # type: ignore[no-untyped-def]
    """Time before ``time`` in which neither compute nor a collective ran."""
    i, count = state.first[rank, lane], state.intervals[rank]
    while i < count and state.ends[rank, i] <= time:
        i += 1
    active = state.before[rank, i]
    if i < count and state.starts[rank, i] < time:
        active += time - state.starts[rank, i]
    return time - state.busy[rank, lane] - active + state.beside[rank, lane]


@inline
def collective(op, begin, end, state, rank, pass_out, record):  # type: ignore[no-untyped-def]
    """A collective runs on all lanes."""
    if end > begin:
        if begin < state.free[rank].max():
            state.late[rank] += 1
        n = state.intervals[rank]
        if n and state.ends[rank, n - 1] == begin:
            n -= 1
            for lane in range(state.free.shape[1]):
                state.first[rank, lane] = min(state.first[rank, lane], n)
        else:
            state.starts[rank, n] = begin
        state.ends[rank, n] = end
        state.before[rank, n + 1] = state.before[rank, n] + end - state.starts[rank, n]
        state.intervals[rank] = n + 1
    if pass_out >= 0:
        for lane in range(state.free.shape[1]):
            state.output[pass_out, lane] = max(state.output[pass_out, lane], end)
    if record.lane >= 0:
        record.starts[op], record.ends[op] = begin, end


@inline
def compute(op, phase, ready, pass_in, pass_out, durations, stretch, state, rank, record):  # type: ignore[no-untyped-def]
    """Runs a compute task on every lane and returns the latest end."""
    free, busy, beside, first = state.free[rank], state.busy[rank], state.beside[rank], state.first[rank]
    starts, ends, count = state.starts[rank], state.ends[rank], state.intervals[rank]
    latest, last_begin, last_ns = np.int64(0), np.int64(-1), np.int64(-1)
    end = side = now_first = np.int64(0)
    for lane in range(free.shape[0]):
        begin = max(free[lane], ready)
        if pass_in >= 0:
            begin = max(begin, state.arrival[pass_in, lane])
        if phase == FIRST_BACKWARD:
            idle = idle_before(begin, state, rank, lane)
            state.statistics[rank, lane, WARMUP] = idle
            state.mark[rank, lane, 0], state.mark[rank, lane, 1] = begin, idle
        ns = durations.actual[lane]
        if begin != last_begin or ns != last_ns:  # many lanes have just waited for the same collective
            last_begin, last_ns = begin, ns
            end, side, now_first = advance(begin, ns, stretch, starts, ends, count, first[lane])
            latest = max(latest, end)
        first[lane] = now_first
        busy[lane] += end - begin
        beside[lane] += side
        free[lane] = end
        if lane == record.lane:
            record.starts[op], record.ends[op] = begin, end
        if phase == LAST_FORWARD and end > state.mark[rank, lane, 0]:
            state.mark[rank, lane, 0], state.mark[rank, lane, 1] = end, idle_before(end, state, rank, lane)
    if pass_out >= 0:
        for lane in range(free.shape[0]):
            state.output[pass_out, lane] = max(state.output[pass_out, lane], free[lane])
    return latest


@inline
def choose(pools, rank, lane, room, fit, slack):  # type: ignore[no-untyped-def]
    """The pooled W for a window: the longest that fits among the oldest of each weight; without slack the oldest of
    all, fitting or not. -1: none."""
    size = pools.size[rank, lane]
    if slack <= 0:
        return 0 if size else -1
    best, best_ns = -1, np.int64(-1)
    for i in range(size):
        ns = pools.tasks[rank, lane, i, EXPECTED]
        if best_ns < ns <= fit * room:
            older = False
            for j in range(i):
                if pools.tasks[rank, lane, j, WEIGHT] == pools.tasks[rank, lane, i, WEIGHT]:
                    older = True
                    break
            if not older:
                best, best_ns = i, ns
    return best


@inline
def run_pooled(at, stretch, pools, state, rank, lane, record):  # type: ignore[no-untyped-def]
    """Runs a pooled W now, and takes it out of the pool; the others keep their order."""
    which, ns = pools.tasks[rank, lane, at, TASK], pools.tasks[rank, lane, at, POOLED_NS]
    now = state.free[rank, lane]
    starts, ends = state.starts[rank], state.ends[rank]
    end, side, state.first[rank, lane] = advance(
        now, ns, stretch, starts, ends, state.intervals[rank], state.first[rank, lane]
    )
    if lane == record.lane:
        record.starts[which], record.ends[which] = now, end
    state.busy[rank, lane] += end - now
    state.beside[rank, lane] += side
    state.free[rank, lane] = end
    pools.held[rank, lane] -= pools.tasks[rank, lane, at, HELD]
    pools.work[rank, lane] -= pools.tasks[rank, lane, at, EXPECTED]
    pools.size[rank, lane] -= 1
    for i in range(at, pools.size[rank, lane]):
        for j in range(POOL_COLUMNS):
            pools.tasks[rank, lane, i, j] = pools.tasks[rank, lane, i + 1, j]
    return end - now


@inline
def fill_slot(for_collective, foreseen, pass_in, left, filling, stretch, pools, state, rank, record):  # type: ignore[no-untyped-def]
    """W tasks into the wait before a compute task: one if for a collective that ends at ``foreseen`` by profile and
    counts, as many as fit if for another rank, where the plan's idle time is the window. ``left``: compute planned from
    here on."""
    for lane in range(state.free.shape[1]):
        room = foreseen - state.free[rank, lane]
        if not for_collective:
            if state.arrival[pass_in, lane] <= state.free[rank, lane]:
                continue
            room = pools.gap[rank, lane]
        while room >= 0 and pools.size[rank, lane]:
            slack = filling.deadline - state.free[rank, lane] - left - pools.work[rank, lane]
            best = choose(pools, rank, lane, room, filling.fit, slack)
            if best < 0:
                break
            fits = pools.tasks[rank, lane, best, EXPECTED] <= filling.fit * room
            state.statistics[rank, lane, FILLED if fits else FORCED] += 1
            room -= run_pooled(best, stretch, pools, state, rank, lane, record)
            if for_collective or state.arrival[pass_in, lane] <= state.free[rank, lane]:
                break


@inline
def defer(op, weight, size, planned_gap, durations, filling, stretch, pools, state, rank, record):  # type: ignore[no-untyped-def]
    """A W task of ``size`` bytes goes to the pools; if one of them is full, the oldest W of this weight runs in place
    on every lane."""
    full = False
    for lane in range(state.free.shape[1]):
        if pools.size[rank, lane] >= filling.pool_tasks or pools.held[rank, lane] + size > filling.pool_bytes:
            full = True
    for lane in range(state.free.shape[1]):
        last = pools.size[rank, lane]
        expected = durations.expected[lane]
        pools.tasks[rank, lane, last, POOLED_NS], pools.tasks[rank, lane, last, WEIGHT] = durations.actual[lane], weight
        pools.tasks[rank, lane, last, HELD], pools.tasks[rank, lane, last, TASK] = size, op
        pools.tasks[rank, lane, last, EXPECTED] = expected
        pools.size[rank, lane] += 1
        pools.held[rank, lane] += size
        pools.work[rank, lane] += expected
        pools.gap[rank, lane] += expected + planned_gap
        if full:
            at = last
            for i in range(last):
                if pools.tasks[rank, lane, i, WEIGHT] == weight:
                    at = i
                    break
            run_pooled(at, stretch, pools, state, rank, lane, record)
            pools.gap[rank, lane] = planned_gap
            state.statistics[rank, lane, INLINE] += 1
        peak = max(state.statistics[rank, lane, POOL_PEAK], pools.held[rank, lane])
        state.statistics[rank, lane, POOL_PEAK] = peak


@inline
def drain(stretch, pools, state, rank, record):  # type: ignore[no-untyped-def]
    """Behind a rank's last task all W tasks that are left run, in order. Returns the latest end."""
    for lane in range(state.free.shape[1]):
        state.statistics[rank, lane, DRAINED] = pools.size[rank, lane]
        while pools.size[rank, lane]:
            run_pooled(0, stretch, pools, state, rank, lane, record)
    return state.free[rank].max()


@jit
def _scaled(ns, factor):  # type: ignore[no-untyped-def]
    return ns if factor == 1.0 else np.int64(np.rint(ns * factor))


@jit
def _new_state(ranks, lanes, passes, intervals, statistics, late):  # type: ignore[no-untyped-def]
    return State(
        np.zeros((ranks, lanes), np.int64),
        np.zeros((ranks, lanes), np.int64),
        np.zeros((ranks, lanes), np.int64),
        np.zeros((ranks, lanes, 2), np.int64),
        np.zeros((ranks, lanes), np.int64),
        np.zeros((ranks, intervals), np.int64),
        np.zeros((ranks, intervals), np.int64),
        np.zeros((ranks, intervals + 1), np.int64),
        np.zeros(ranks, np.int64),
        np.zeros((passes, lanes), np.int64),
        np.zeros((passes, lanes), np.int64),
        statistics,
        late,
    )


@jit
def _new_pools(ranks, lanes, filling):  # type: ignore[no-untyped-def]
    places = filling.pool_tasks + 1 if filling.on else 0
    tasks = np.zeros((ranks, lanes, places, POOL_COLUMNS), np.int64)
    return Pools(
        tasks,
        np.zeros((ranks, lanes), np.int64),
        np.zeros((ranks, lanes), np.int64),
        np.zeros((ranks, lanes), np.int64),
        np.zeros((ranks, lanes), np.int64),
    )


@inline
def _output(row, state):  # type: ignore[no-untyped-def]
    """The output of a pass exists: its own backward, and the next pass on the same rank, may use it."""
    made, target, own = row[PASS_OUT], row[PASS_IN], row[OWN]
    for lane in range(state.output.shape[1]):
        if row[EMPTY]:
            state.output[made, lane] = state.arrival[made, lane]
        if own >= 0:
            state.arrival[own, lane] = max(state.arrival[own, lane], state.output[made, lane])
        if target >= 0:
            state.arrival[target, lane] = max(state.arrival[target, lane], state.output[made, lane])


@inline
def _send(op, row, occupied, latency, edge_free, state, record):  # type: ignore[no-untyped-def]
    """A message on every lane; returns the latest arrival."""
    made, target, edge = row[PASS_OUT], row[PASS_IN], row[EDGE]
    latest = np.int64(0)
    for lane in range(state.output.shape[1]):
        begin = max(state.output[made, lane], edge_free[edge, lane])
        edge_free[edge, lane] = begin + occupied
        arrival = begin + occupied + latency
        if target >= 0:
            state.arrival[target, lane] = max(state.arrival[target, lane], arrival)
        latest = max(latest, arrival)
        if lane == record.lane:
            record.starts[op], record.ends[op] = begin, arrival
    return latest


@jit
def run_replicas(  # type: ignore[no-untyped-def]
    ops, deps, sizes, stretch, scale, work, traffic, noise, filling, record, steps, statistics, collective_ns, late
):
    """Fills ``steps`` [replicas], ``statistics`` [replicas, ranks, lanes, STATISTICS], ``collective_ns`` [replicas,
    ranks] (time of collectives), ``late`` [ranks] and ``record``.

    ``scale`` [replicas, kinds]; ``work``, ``traffic`` [replicas, layers x micro-batches, lanes], or no replicas.
    """
    lanes = statistics.shape[2]
    nowhere = Record(record.replica, -1, record.starts, record.ends)
    durations = Durations(np.zeros(lanes, np.int64), np.zeros(lanes, np.int64))
    for replica in range(steps.shape[0]):
        state = _new_state(sizes.ranks, lanes, sizes.passes, sizes.collectives, statistics[replica], late)
        pools = _new_pools(sizes.ranks, lanes, filling)
        recorded = record if replica == record.replica else nowhere
        comm_free = np.zeros(sizes.ranks, np.int64)
        edge_free = np.zeros((sizes.edges, lanes), np.int64)
        group_end = np.zeros(ops.shape[0], np.int64)  # latest end on a lane
        expected_end = np.zeros(ops.shape[0], np.int64)  # of collectives, by profile and counts
        began = np.zeros(sizes.ranks, np.bool_)  # backwards
        length = np.int64(0)
        for op in range(ops.shape[0]):
            row = ops[op]
            kind, rank = row[KIND], row[RANK]
            factor = scale[replica, row[SCALE]]
            if kind == OUTPUT_OP:
                _output(row, state)
                continue
            if kind == SEND_OP:
                occupied, latency = _scaled(row[NS], factor), _scaled(sizes.latency_ns, factor)
                length = max(length, _send(op, row, occupied, latency, edge_free, state, recorded))
                continue
            ready, foreseen = np.int64(0), np.int64(0)
            for i in range(row[DEP_START], row[DEP_STOP]):
                ready = max(ready, group_end[deps[i]])
                foreseen = max(foreseen, expected_end[deps[i]])
            shares = work if row[USE] == WORK else traffic
            set_durations(op, _scaled(row[NS], factor), shares, replica, row[ROWS], noise, durations)
            if kind != COMP_OP:
                if kind == BOTH:
                    ready = max(ready, state.free[rank].max())
                if row[PASS_IN] >= 0:
                    ready = max(ready, state.arrival[row[PASS_IN]].max())
                begin = max(ready, comm_free[rank])
                end = begin + durations.actual.max()
                comm_free[rank] = group_end[op] = end
                expected_end[op] = begin + durations.expected.max()
                length = max(length, end)
                collective(op, begin, end, state, rank, row[PASS_OUT], recorded)
                if kind == BOTH:
                    state.free[rank] = end
                continue
            if filling.on:
                if row[SLOT] or row[REMOTE]:
                    fill_slot(
                        row[SLOT], foreseen, row[PASS_IN], row[LEFT], filling, stretch, pools, state, rank, recorded
                    )
                if row[PARAM] >= 0:
                    defer(
                        op,
                        row[PARAM],
                        row[BYTES],
                        row[GAP],
                        durations,
                        filling,
                        stretch,
                        pools,
                        state,
                        rank,
                        recorded,
                    )
                    continue
                pools.gap[rank] = row[GAP]
            began[rank] = began[rank] or row[PHASE] == FIRST_BACKWARD
            group_end[op] = compute(
                op, row[PHASE], ready, row[PASS_IN], row[PASS_OUT], durations, stretch, state, rank, recorded
            )
            length = max(length, group_end[op])
        for rank in range(sizes.ranks):
            if filling.on:
                length = max(length, drain(stretch, pools, state, rank, recorded))
        steps[replica] = length
        for rank in range(sizes.ranks):
            total = state.before[rank, state.intervals[rank]]
            collective_ns[replica, rank] = total
            for lane in range(lanes):
                state.statistics[rank, lane, BUSY] = state.busy[rank, lane]
                state.statistics[rank, lane, OVERLAPPED] = state.beside[rank, lane]
                idle = length - state.busy[rank, lane] - total + state.beside[rank, lane]
                if began[rank]:
                    state.statistics[rank, lane, COOLDOWN] = idle - state.mark[rank, lane, 1]
                else:
                    state.statistics[rank, lane, WARMUP] = idle
