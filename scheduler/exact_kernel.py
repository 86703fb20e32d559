"""The exact search in compiled form: partial schedules as rows of arrays. ``exact.py`` says what it does and why.

A *place* is a set of done tasks, leaves apart: what all partial schedules with it have in common is put down once in
``pool``, a place's record beginning at ``at[place]``:

    FRONTIER tasks, AVAILABLE tasks, compute left, communication left (ns), longest tail behind a compute and behind a
    communication source, least ns from the last communication to the end, heads on each lane, where the lists begin,
    whether all tasks are done

and its lists: frontier (task, lane, tail), available (task, lane, ns, slot, next place, plan), leaves per class that
may run, heads (count, then slot and ns of each). A *plan* says for each frontier task of the next place where its ready
time was, whether the task that leads there delays it, and its lane. A *slot* is a column of a state's times: COMP free,
COMM free, ready times of the frontier; -1 stands for time 0.
"""

from __future__ import annotations

import numpy as np

from tessera_rt.scheduler.compiled_arrays import has, hashed, jit, longer, meets, taller, wider, within

_COMP, _COMM = 0, 1
_ONE = np.uint64(1)
_ZERO = np.uint64(0)
_LOW = np.uint64(63)
_HEADER = 14
(
    _FRONTIER,
    _AVAILABLE,
    _COMP_LEFT,
    _COMM_LEFT,
    _COMP_SOURCE,
    _COMM_SOURCE,
    _COMM_END,
    _COMP_HEADS,
    _COMM_HEADS,
    _AT_FRONTIER,
    _AT_AVAILABLE,
    _AT_LEAVES,
    _AT_HEADS,
    _FULL,
) = range(_HEADER)


@jit
def _record(done, ns, lane, tail, needs, before, paths, leaf_class, leaf_needs, classes):  # type: ignore[no-untyped-def]
    """The record of a place with its lists, positions counted from its own beginning."""
    n = ns.shape[0]
    slot = np.full(n, -2, dtype=np.int64)  # of every task that a path can begin with; -2: none
    undone_on = np.zeros((2, done.shape[0]), dtype=np.uint64)
    undone = frontier = available = sources = 0
    for i in range(n):
        if has(done, i):
            continue
        undone += 1
        undone_on[lane[i], i >> 6] |= _ONE << (np.uint64(i) & _LOW)
        if meets(needs[i], done):
            slot[i] = 2 + frontier
            frontier += 1
        elif not needs[i].any():
            slot[i] = lane[i]
            sources += 1
        if within(needs[i], done):
            available += 1
    heads = np.zeros(2, dtype=np.int64)
    size = _HEADER + 3 * frontier + 6 * available + classes
    out = np.zeros(size + undone * (1 + 2 * (frontier + sources)), dtype=np.int64)
    out[_FRONTIER], out[_AVAILABLE] = frontier, available
    out[_AT_FRONTIER] = _HEADER
    out[_AT_AVAILABLE] = _HEADER + 3 * frontier
    out[_AT_LEAVES] = out[_AT_AVAILABLE] + 6 * available
    out[_AT_HEADS] = size
    out[_FULL] = undone == 0
    f, a = out[_AT_FRONTIER], out[_AT_AVAILABLE]
    last = -1
    for i in range(n):
        if has(done, i):
            continue
        out[_COMP_LEFT + lane[i]] += ns[i]
        if lane[i] == _COMM and (last < 0 or tail[i] - ns[i] < last):
            last = tail[i] - ns[i]
        if slot[i] >= 2:
            out[f], out[f + 1], out[f + 2] = i, lane[i], tail[i]
            f += 3
        elif slot[i] >= 0:
            out[_COMP_SOURCE + lane[i]] = max(out[_COMP_SOURCE + lane[i]], tail[i])
        if within(needs[i], done):
            out[a], out[a + 1], out[a + 2] = i, lane[i], ns[i]
            out[a + 3] = slot[i] if slot[i] >= 2 else -1
            out[a + 4] = out[a + 5] = -1
            a += 6
    out[_COMM_END] = max(last, 0)
    for i in range(leaf_class.shape[0]):
        if within(leaf_needs[i], done):
            out[out[_AT_LEAVES] + leaf_class[i]] += 1
    end = size
    for on in range(2):
        for i in range(n):
            if lane[i] != on or has(done, i) or meets(before[i], undone_on[on]):
                continue
            count = end
            end += 1
            for j in range(i + 1):
                if slot[j] > -2 and paths[i, j] >= 0:
                    out[end], out[end + 1] = slot[j], paths[i, j]
                    end += 2
                    out[count] += 1
            heads[on] += 1
    out[_COMP_HEADS], out[_COMM_HEADS] = heads[0], heads[1]
    return out[:end]


@jit
def longest_paths(ns, lane, needs):  # type: ignore[no-untyped-def]
    """[i, j]: ns of the longest chain from the start of j to that of i over tasks of the other lane; -1: none."""
    n = ns.shape[0]
    paths = np.full((n, n), -1, dtype=np.int64)
    for i in range(n):
        paths[i, i] = 0
        for j in range(i - 1, -1, -1):
            if lane[j] == lane[i]:
                continue
            for f in range(j + 1, i + 1):  # the task behind j on such a chain
                if paths[i, f] >= 0 and ns[j] + paths[i, f] > paths[i, j] and has(needs[f], j):
                    paths[i, j] = ns[j] + paths[i, f]
    return paths


@jit
def _bound(pool, base, times, leaf_left, free_leaf):  # type: ignore[no-untyped-def]
    """Least length of all schedules from here on. Raises a lane's free time to when its first task can be ready."""
    at = base + pool[base + _AT_HEADS]
    for on in range(2):
        earliest = -1
        for _ in range(pool[base + _COMP_HEADS + on]):
            ready = 0
            for _ in range(pool[at]):
                ready = max(ready, times[pool[at + 1]] + pool[at + 2])
                at += 2
            at += 1
            if earliest < 0 or ready < earliest:
                earliest = ready
        if (on == _COMM or not free_leaf) and earliest > times[on]:
            times[on] = earliest
    bound = times[_COMP] + max(pool[base + _COMP_LEFT] + leaf_left, pool[base + _COMP_SOURCE])
    bound = max(bound, times[_COMM] + pool[base + _COMM_LEFT] + pool[base + _COMM_END])
    bound = max(bound, times[_COMM] + pool[base + _COMM_SOURCE])
    at = base + pool[base + _AT_FRONTIER]
    for k in range(pool[base + _FRONTIER]):
        bound = max(bound, times[2 + k] + pool[at + 3 * k + 2])
    return bound


@jit
def _before(bound, depth, i, j):  # type: ignore[no-untyped-def]
    """Whether state i leaves the queue before j: least bound, then most tasks done, then the newer one."""
    if bound[i] != bound[j]:
        return bound[i] < bound[j]
    if depth[i] != depth[j]:
        return depth[i] > depth[j]
    return i > j


@jit
def _push(heap, size, bound, depth, state):  # type: ignore[no-untyped-def]
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        if not _before(bound, depth, state, heap[parent]):
            break
        heap[i] = heap[parent]
        i = parent
    heap[i] = state


@jit
def _pop(heap, size, bound, depth):  # type: ignore[no-untyped-def]
    """The first state; the heap has ``size - 1`` afterwards."""
    top = heap[0]
    state = heap[size - 1]
    n = size - 1
    i = 0
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        if child + 1 < n and _before(bound, depth, heap[child + 1], heap[child]):
            child += 1
        if _before(bound, depth, state, heap[child]):
            break
        heap[i] = heap[child]
        i = child
    if n > 0:
        heap[i] = state
    return top


@jit
def search(  # type: ignore[no-untyped-def]
    ns,  # [tasks] without leaves, in topological order
    lane,
    tail,
    needs,  # [tasks, words] bits of the tasks each depends on
    before,  # [tasks, words] of all it depends on, directly or not
    paths,  # [tasks, tasks] ns from the start of j to that of i over tasks of the other lane, -1: no such chain
    leaf_ns,  # [classes] falling
    leaf_class,  # [leaves]
    leaf_needs,  # [leaves, words]
    least,  # a lower bound of every schedule (ns)
    upper,  # the incumbent's length
    max_states,
    steps,  # out: [tasks + leaves]
):
    """(length or bound in ns, whether it is proven, states looked at, steps of a shorter schedule or -1).

    A step is a task, or -1 - c for a leaf of class c; leaves that no step names come last.
    """
    classes = leaf_ns.shape[0]
    words = needs.shape[1]
    # Places.
    pool = np.zeros(4096, dtype=np.int64)
    used = 0
    at = np.zeros(64, dtype=np.int64)
    masks = np.zeros((64, words), dtype=np.uint64)
    places = 0
    place_table = np.full(256, -1, dtype=np.int64)
    # States.
    width = 10
    times = np.zeros((256, width), dtype=np.int64)
    leaves = np.zeros((256, classes), dtype=np.int64)
    place_of = np.zeros(256, dtype=np.int64)
    bound = np.zeros(256, dtype=np.int64)
    depth = np.zeros(256, dtype=np.int64)
    leaf_left = np.zeros(256, dtype=np.int64)
    parent = np.zeros(256, dtype=np.int64)
    step = np.zeros(256, dtype=np.int64)
    dead = np.zeros(256, dtype=np.bool_)
    following = np.zeros(256, dtype=np.int64)  # the next state that was kept with the same place and leaves
    states = 0
    state_table = np.full(1024, -1, dtype=np.int64)  # hash of place and leaves -> the newest such state
    groups = 0
    heap = np.zeros(256, dtype=np.int64)
    queued = 0
    # The first place and state.
    done = np.zeros(words, dtype=np.uint64)
    record = _record(done, ns, lane, tail, needs, before, paths, leaf_class, leaf_needs, classes)
    if record.shape[0] > pool.shape[0]:
        pool = longer(pool, record.shape[0])
    pool[: record.shape[0]] = record
    used = record.shape[0]
    places = 1
    place_table[hashed(done, 1) & np.uint64(255)] = 0
    for i in range(leaf_class.shape[0]):
        leaf_left[0] += leaf_ns[leaf_class[i]]
    bound[0] = least
    parent[0] = -1
    states = 1
    heap[0] = 0
    queued = 1
    looked = 0
    now = np.zeros(width, dtype=np.int64)
    counts = np.zeros(classes, dtype=np.int64)
    while queued > 0:
        state = _pop(heap, queued, bound, depth)
        queued -= 1
        base = at[place_of[state]]
        if pool[base + _FULL]:
            count = 0
            way = state
            while parent[way] >= 0:
                steps[count] = step[way]
                count += 1
                way = parent[way]
            return bound[state], True, looked, count
        if dead[state]:
            continue
        if looked == max_states:
            return bound[state], False, looked, -1
        looked += 1
        # Which task could end first, and on which lane.
        comp_free, comm_free = times[state, _COMP], times[state, _COMM]
        first_end, on, first = -1, _COMP, -1
        frontier = pool[base + _FRONTIER]
        available = pool[base + _AVAILABLE]
        at_available = base + pool[base + _AT_AVAILABLE]
        at_leaves = base + pool[base + _AT_LEAVES]
        for k in range(available):
            entry = at_available + 6 * k
            start = times[state, pool[entry + 1]]
            if pool[entry + 3] >= 0 and times[state, pool[entry + 3]] > start:
                start = times[state, pool[entry + 3]]
            if first_end < 0 or start + pool[entry + 2] < first_end:
                first_end, on, first = start + pool[entry + 2], pool[entry + 1], k
        smallest = -1
        for c in range(classes):
            if pool[at_leaves + c] > leaves[state, c]:
                smallest = c
        if smallest >= 0 and (first_end < 0 or comp_free + leaf_ns[smallest] < first_end):
            first_end, on, first = comp_free + leaf_ns[smallest], _COMP, -1 - smallest
        for k in range(available + classes):
            leaf = k - available
            if leaf < 0:
                entry = at_available + 6 * k
                if pool[entry + 1] != on:
                    continue
                start = times[state, on]
                if pool[entry + 3] >= 0 and times[state, pool[entry + 3]] > start:
                    start = times[state, pool[entry + 3]]
                if start >= first_end and k != first:
                    continue
                task = pool[entry]
                if pool[entry + 4] < 0:  # the way to the next place is new
                    done[:] = masks[place_of[state]]
                    done[task >> 6] |= _ONE << (np.uint64(task) & _LOW)
                    spot = hashed(done, 1) & np.uint64(place_table.shape[0] - 1)
                    while place_table[spot] >= 0 and (masks[place_table[spot]] != done).any():
                        spot = (spot + _ONE) & np.uint64(place_table.shape[0] - 1)
                    following_place = place_table[spot]
                    if following_place < 0:
                        record = _record(done, ns, lane, tail, needs, before, paths, leaf_class, leaf_needs, classes)
                        if used + record.shape[0] > pool.shape[0]:
                            pool = longer(pool, used + record.shape[0])
                        if places == at.shape[0]:
                            at = longer(at, 0)
                            masks = taller(masks)
                        following_place = places
                        at[places] = used
                        masks[places] = done
                        pool[used : used + record.shape[0]] = record
                        used += record.shape[0]
                        places += 1
                        place_table[spot] = following_place
                        if 2 + record[_FRONTIER] > width:
                            width = 2 + record[_FRONTIER]
                            times = wider(times, width)
                            now = np.zeros(width, dtype=np.int64)
                        if 2 * places > place_table.shape[0]:
                            place_table = np.full(2 * place_table.shape[0], -1, dtype=np.int64)
                            for other in range(places):
                                spot = hashed(masks[other], 1) & np.uint64(place_table.shape[0] - 1)
                                while place_table[spot] >= 0:
                                    spot = (spot + _ONE) & np.uint64(place_table.shape[0] - 1)
                                place_table[spot] = other
                    target = at[following_place]
                    size = 3 * pool[target + _FRONTIER]
                    if used + size > pool.shape[0]:
                        pool = longer(pool, used + size)
                    for j in range(pool[target + _FRONTIER]):
                        other = pool[target + pool[target + _AT_FRONTIER] + 3 * j]
                        slot = -1
                        for m in range(frontier):
                            if pool[base + pool[base + _AT_FRONTIER] + 3 * m] == other:
                                slot = 2 + m
                        pool[used + 3 * j] = slot
                        pool[used + 3 * j + 1] = has(needs[other], task)
                        pool[used + 3 * j + 2] = lane[other]
                    pool[entry + 4], pool[entry + 5] = following_place, used
                    used += size
                next_place = pool[entry + 4]
                plan = pool[entry + 5]
                end = start + pool[entry + 2]
                now[0], now[1] = comp_free, comm_free
                now[on] = end
                target = at[next_place]
                for j in range(pool[target + _FRONTIER]):
                    slot = pool[plan + 3 * j]
                    ready = times[state, slot] if slot >= 0 else 0
                    if pool[plan + 3 * j + 1] and end > ready:
                        ready = end
                    now[2 + j] = max(ready, now[pool[plan + 3 * j + 2]])
                counts[:] = leaves[state]
                remaining = leaf_left[state]
                named = task
            else:
                if on != _COMP or pool[at_leaves + leaf] <= leaves[state, leaf]:
                    continue
                if comp_free >= first_end and first != -1 - leaf:
                    continue
                next_place = place_of[state]
                target = base
                end = comp_free + leaf_ns[leaf]
                now[0], now[1] = end, comm_free
                for j in range(frontier):
                    ready = times[state, 2 + j]
                    if pool[base + pool[base + _AT_FRONTIER] + 3 * j + 1] == _COMP and ready < end:
                        ready = end
                    now[2 + j] = ready
                counts[:] = leaves[state]
                counts[leaf] += 1
                remaining = leaf_left[state] - leaf_ns[leaf]
                named = -1 - leaf
            free_leaf = leaf >= 0
            for c in range(classes):
                if pool[target + pool[target + _AT_LEAVES] + c] > counts[c]:
                    free_leaf = True
            bounded = max(bound[state], _bound(pool, target, now, remaining, free_leaf))
            if bounded >= upper:
                continue
            # Keep it unless another state with the same tasks done dominates it; forget those it dominates.
            live = 2 + pool[target + _FRONTIER]
            spot = hashed(counts, next_place + 2) & np.uint64(state_table.shape[0] - 1)
            while True:
                other = state_table[spot]
                if other < 0 or (place_of[other] == next_place and (leaves[other] == counts).all()):
                    break
                spot = (spot + _ONE) & np.uint64(state_table.shape[0] - 1)
            head = state_table[spot]
            dominated = False
            other = head
            while other >= 0:
                if not dead[other]:
                    smaller = True
                    for j in range(live):
                        if times[other, j] > now[j]:
                            smaller = False
                            break
                    if smaller:
                        dominated = True
                        break
                other = following[other]
            if dominated:
                continue
            other, link = head, -1
            while other >= 0:
                larger = True
                for j in range(live):
                    if times[other, j] < now[j]:
                        larger = False
                        break
                if larger:
                    dead[other] = True
                if dead[other] and link >= 0:
                    following[link] = following[other]
                else:
                    link = other
                other = following[other]
            if states == place_of.shape[0]:
                times, leaves, place_of = taller(times), taller(leaves), longer(place_of, 0)
                bound, depth, leaf_left = longer(bound, 0), longer(depth, 0), longer(leaf_left, 0)
                parent, step, dead = longer(parent, 0), longer(step, 0), longer(dead, 0)
                following = longer(following, 0)
            times[states, :live] = now[:live]
            leaves[states] = counts
            place_of[states] = next_place
            bound[states] = bounded
            depth[states] = depth[state] + (leaf < 0)
            leaf_left[states] = remaining
            parent[states] = state
            step[states] = named
            following[states] = head
            state_table[spot] = states
            groups += head < 0
            if queued == heap.shape[0]:
                heap = longer(heap, 0)
            _push(heap, queued, bound, depth, states)
            queued += 1
            states += 1
            if 2 * groups > state_table.shape[0]:
                wanted = state_table
                state_table = np.full(2 * wanted.shape[0], -1, dtype=np.int64)
                for kept in wanted:
                    if kept >= 0:
                        spot = hashed(leaves[kept], place_of[kept] + 2) & np.uint64(state_table.shape[0] - 1)
                        while state_table[spot] >= 0:
                            spot = (spot + _ONE) & np.uint64(state_table.shape[0] - 1)
                        state_table[spot] = kept
    return upper, True, looked, -1
