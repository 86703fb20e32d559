"""The simulator's event loop in compiled form, for searches that look at thousands of schedules.

Same rules as ``simulate_run`` and, to the nanosecond, the same times; it knows nothing of names and explains nothing:
``fast_steps`` fills its arrays. Events are handled in the order (time, code, subject), as there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tessera_rt.scheduler.compiled_arrays import jit

Ints = npt.NDArray[np.int64]

COMP, COMM = 0, 1
_ARRIVAL = 2
DEADLOCK = -1
"""Returned instead of a step time when ranks wait for each other for ever."""


@jit
def _push(heap_time, heap_code, size, time, code):  # type: ignore[no-untyped-def]
    i = size[0]
    size[0] += 1
    while i > 0:
        parent = (i - 1) >> 1
        if heap_time[parent] < time or (heap_time[parent] == time and heap_code[parent] <= code):
            break
        heap_time[i], heap_code[i] = heap_time[parent], heap_code[parent]
        i = parent
    heap_time[i], heap_code[i] = time, code


@jit
def _pop(heap_time, heap_code, size):  # type: ignore[no-untyped-def]
    """Takes the first event out; the caller has read it from place 0."""
    size[0] -= 1
    n = size[0]
    time, code = heap_time[n], heap_code[n]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        right = child + 1
        if right < n and (
            heap_time[right] < heap_time[child]
            or (heap_time[right] == heap_time[child] and heap_code[right] < heap_code[child])
        ):
            child = right
        if time < heap_time[child] or (time == heap_time[child] and code <= heap_code[child]):
            break
        heap_time[i], heap_code[i] = heap_time[child], heap_code[child]
        i = child
    heap_time[i], heap_code[i] = time, code


@jit
def _next_pass(number, stages, microbatches, copies):  # type: ignore[no-untyped-def]
    """As ``Passes.next``."""
    length = stages // copies
    place = number // (2 * microbatches) % length
    if number % 2:
        return -1 if place == 0 else number - 2 * microbatches
    return -1 if place == length - 1 else number + 2 * microbatches


@jit
def run_steps(  # type: ignore[no-untyped-def]
    sizes,  # stages, microbatches, copies, edges, latency ns
    contention,
    occupancy,  # [stages] ns, of the message between a stage and the next
    rank_first,  # [ranks + 1] first action of each rank
    action_block,  # [actions]
    action_pass,  # [actions, 3] pass numbers, -1: none
    place,  # [passes, 2] action and part, -1: no such pass
    edge_of,  # [passes] -1: the output stays on the rank
    edge_first,  # [edges + 1]
    blocks,  # [blocks, 13] tasks, (first, last) of COMP, of COMM, sinks of 3 parts, finishing order of 3 parts, unused
    lane_tasks,  # [lane tasks, 5] index, ns, first dependency, last dependency, sink
    deps,  # [dependencies] places in the action's ends
    starts,  # [places] out; -1: never
    ends,  # [places] out
    offsets,  # [actions + 1] out: first place of each action
):
    """Length of the step in ns, or DEADLOCK. An action has a place per task, then three for its parts' inputs."""
    stages, microbatches, copies, edges, latency = sizes
    ranks = rank_first.shape[0] - 1
    actions = action_block.shape[0]
    passes = place.shape[0]
    stretch = 1.0 + contention
    offsets[0] = 0
    for a in range(actions):
        offsets[a + 1] = offsets[a] + blocks[action_block[a], 0] + 3
    for i in range(offsets[actions]):
        starts[i] = -1
        ends[i] = -1

    signals = np.zeros(passes, dtype=np.int64)
    sinks_left = np.zeros(passes, dtype=np.int64)
    length_of_copy = stages // copies
    for number in range(passes):
        if place[number, 0] < 0:
            continue
        at = number // (2 * microbatches) % length_of_copy
        first = at == (length_of_copy - 1 if number % 2 else 0)
        signals[number] = number % 2 + (0 if first else 1)
        sinks_left[number] = blocks[action_block[place[number, 0]], 5 + place[number, 1]]

    edge_next = edge_first[:-1].copy()
    edge_free = np.zeros(edges, dtype=np.int64)
    sends = np.empty(edge_first[edges], dtype=np.int64)
    for a in range(actions):
        for k in range(3):
            part = blocks[action_block[a], 8 + k]
            if part >= 0 and action_pass[a, part] >= 0 and edge_of[action_pass[a, part]] >= 0:
                edge = edge_of[action_pass[a, part]]
                sends[edge_next[edge]] = action_pass[a, part]
                edge_next[edge] += 1
    edge_next = edge_first[:-1].copy()
    ready_at = np.full(passes, -1, dtype=np.int64)

    capacity = 3 * offsets[actions] + passes + 2 * ranks  # one event a task, a change of rate for either end of one
    heap_time = np.empty(capacity, dtype=np.int64)
    heap_code = np.empty(capacity, dtype=np.int64)
    heap_size = np.zeros(1, dtype=np.int64)
    base = np.int64(passes + ranks + 1)
    stack = np.empty(passes + 1, dtype=np.int64)

    current = np.empty((ranks, 2), dtype=np.int64)  # action whose task a lane does next
    cursor = np.empty((ranks, 2), dtype=np.int64)  # that lane task
    running = np.full((ranks, 2), -1, dtype=np.int64)  # lane task that runs
    running_action = np.zeros((ranks, 2), dtype=np.int64)
    end_of = np.full((ranks, 2), -1, dtype=np.int64)
    work_left = np.zeros(ranks)
    work_seen = np.zeros(ranks, dtype=np.int64)
    for rank in range(ranks):
        for lane in range(2):
            current[rank, lane] = rank_first[rank]
            if rank_first[rank] < rank_first[rank + 1]:
                cursor[rank, lane] = blocks[action_block[rank_first[rank]], 1 + 2 * lane]

    # Forwards of the first stage; an empty one passes its input on at once.
    now = np.int64(0)
    top = 0
    for number in range(passes):
        if place[number, 0] >= 0 and signals[number] == 0:
            a = place[number, 0]
            ends[offsets[a] + blocks[action_block[a], 0] + place[number, 1]] = 0
            if sinks_left[number] == 0:
                stack[top] = number
                top += 1
    length = np.int64(0)
    rank = -1
    comm_ended = False
    while True:
        # Outputs that exist from now on.
        while top:
            top -= 1
            number = stack[top]
            for step in range(2):
                if step == 0:
                    target = number + 1 if number % 2 == 0 else -1
                elif edge_of[number] < 0:
                    target = _next_pass(number, stages, microbatches, copies)
                else:
                    target = -1
                    ready_at[number] = now
                    edge = edge_of[number]
                    while edge_next[edge] < edge_first[edge + 1] and ready_at[sends[edge_next[edge]]] >= 0:
                        sent = sends[edge_next[edge]]
                        boundary = sent // (2 * microbatches) - sent % 2
                        edge_free[edge] = max(ready_at[sent], edge_free[edge]) + occupancy[boundary]
                        arrival = edge_free[edge] + latency
                        following = _next_pass(sent, stages, microbatches, copies)
                        _push(heap_time, heap_code, heap_size, arrival, _ARRIVAL * base + following)
                        edge_next[edge] += 1
                if target < 0 or place[target, 0] < 0:
                    continue
                signals[target] -= 1
                if signals[target] == 0:
                    a = place[target, 0]
                    ends[offsets[a] + blocks[action_block[a], 0] + place[target, 1]] = now
                    if sinks_left[target] == 0:
                        stack[top] = target
                        top += 1
        # Idle lanes of the event's rank (of all at the start).
        low, high = (0, ranks) if rank < 0 else (rank, rank + 1)
        for subject in range(low, high):
            for turn in range(2):
                # At the start COMP comes first, afterwards COMM: as in the simulator.
                lane = turn if rank < 0 else 1 - turn
                started = False
                if end_of[subject, lane] < 0:
                    a = current[subject, lane]
                    while (
                        a < rank_first[subject + 1] and cursor[subject, lane] == blocks[action_block[a], 2 + 2 * lane]
                    ):
                        a += 1
                        if a < rank_first[subject + 1]:
                            cursor[subject, lane] = blocks[action_block[a], 1 + 2 * lane]
                    current[subject, lane] = a
                    if a < rank_first[subject + 1]:
                        task = cursor[subject, lane]
                        ready = True
                        for d in range(lane_tasks[task, 2], lane_tasks[task, 3]):
                            if ends[offsets[a] + deps[d]] < 0:
                                ready = False
                                break
                        if ready:
                            cursor[subject, lane] += 1
                            starts[offsets[a] + lane_tasks[task, 0]] = now
                            end = now + lane_tasks[task, 1]
                            if contention > 0 and lane == COMP:
                                work_left[subject] = lane_tasks[task, 1]
                                work_seen[subject] = now
                                if end_of[subject, COMM] >= 0:
                                    end = np.int64(np.rint(now + lane_tasks[task, 1] * stretch))
                            end_of[subject, lane] = end
                            running[subject, lane] = task
                            running_action[subject, lane] = a
                            _push(heap_time, heap_code, heap_size, end, lane * base + subject)
                            started = True
                if lane == COMM and contention > 0:
                    changed = started != comm_ended if rank >= 0 else started
                    if changed and end_of[subject, COMP] >= 0:
                        elapsed = now - work_seen[subject]
                        left = work_left[subject] - (elapsed if started else elapsed / stretch)
                        work_left[subject] = max(0.0, left)
                        work_seen[subject] = now
                        end = np.int64(np.rint(now + work_left[subject] * (stretch if started else 1.0)))
                        end_of[subject, COMP] = max(now, end)
                        _push(heap_time, heap_code, heap_size, end_of[subject, COMP], COMP * base + subject)
        # The next event.
        found = False
        while heap_size[0] and not found:
            now = heap_time[0]
            code = heap_code[0] // base
            subject = heap_code[0] % base
            _pop(heap_time, heap_code, heap_size)
            comm_ended = False
            if code == _ARRIVAL:
                length = now
                if place[subject, 0] < 0:
                    continue
                found = True
                signals[subject] -= 1
                a = place[subject, 0]
                if signals[subject] == 0:
                    ends[offsets[a] + blocks[action_block[a], 0] + place[subject, 1]] = now
                    if sinks_left[subject] == 0:
                        stack[top] = subject
                        top += 1
                rank = 0
                while rank_first[rank + 1] <= a:
                    rank += 1
            else:
                if end_of[subject, code] != now:
                    continue  # its end was planned anew when the rate changed
                found = True
                rank = subject
                length = now
                end_of[rank, code] = -1
                comm_ended = code == COMM
                task, a = running[rank, code], running_action[rank, code]
                ends[offsets[a] + lane_tasks[task, 0]] = now
                part = lane_tasks[task, 4]
                if part >= 0:
                    number = action_pass[a, part]
                    sinks_left[number] -= 1
                    if sinks_left[number] == 0:
                        stack[top] = number
                        top += 1
        if not found:
            break
    for number in range(passes):
        if place[number, 0] >= 0 and (signals[number] > 0 or sinks_left[number] > 0):
            return np.int64(DEADLOCK)
    for subject in range(ranks):
        for lane in range(2):
            a = current[subject, lane]
            while a < rank_first[subject + 1]:
                if cursor[subject, lane] != blocks[action_block[a], 2 + 2 * lane]:
                    return np.int64(DEADLOCK)
                a += 1
                if a < rank_first[subject + 1]:
                    cursor[subject, lane] = blocks[action_block[a], 1 + 2 * lane]
    return length
