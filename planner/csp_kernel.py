"""Maintaining arc consistency on bit sets: is there a partition whose every pair costs at most T? (compiled)

A problem of binary constraints. Variables are the stages, values the ranges they may hold; two stages are constrained
where they are neighbours (their ranges must meet) or overlap (their pair must cost at most T). Depth-first search with
two-way branching keeps all constraints arc consistent, chooses the stage with the fewest ranges left per failure its
constraints have caused (dom/wdeg: Boussemart et al. 2004), and tries ranges in the order of their numbers. The bytes of
a rank's stages, moment by moment, are bounded by the least that each of its other stages can still have.
"""

from __future__ import annotations

import numpy as np

from tessera_rt.scheduler.compiled_arrays import jit

UNSATISFIABLE, SATISFIED, UNDECIDED = 0, 1, 2
_ONE = np.uint64(1)
_ZERO = np.uint64(0)
_LOW = np.uint64(63)
_HUGE = 2**63 - 1


@jit
def allow(pairs, costs, offsets, sizes, words, at_most, forward, backward):  # type: ignore[no-untyped-def]
    """Fills the bit sets of all constraints: which values of the other stage go with each value.

    ``pairs``: [constraints, 2] stages; ``costs``: their matrices one after the other, from ``offsets`` on;
    ``forward[c, i]``: bits over the second stage's values, ``backward[c, j]``: over the first one's.
    """
    forward[:] = _ZERO
    backward[:] = _ZERO
    for c in range(pairs.shape[0]):
        rows, columns = sizes[pairs[c, 0]], sizes[pairs[c, 1]]
        at = offsets[c]
        for i in range(rows):
            bit, word = _ONE << (np.uint64(i) & _LOW), i >> 6
            for j in range(columns):
                if costs[at + j] <= at_most:
                    forward[c, i, j >> 6] |= _ONE << (np.uint64(j) & _LOW)
                    backward[c, j, word] |= bit
            at += columns


@jit
def _has(domain, value):  # type: ignore[no-untyped-def]
    return (domain[value >> 6] >> (np.uint64(value) & _LOW)) & _ONE != _ZERO


@jit
def _drop(domain, value):  # type: ignore[no-untyped-def]
    domain[value >> 6] &= ~(_ONE << (np.uint64(value) & _LOW))


@jit
def _revise(domains, left, stage, other, allowed, support):  # type: ignore[no-untyped-def]
    """Drops values of ``stage`` that no value of ``other`` goes with. ``support``: the word that last had one."""
    words = domains.shape[1]
    changed = False
    for word in range(words):
        bits = domains[stage, word]
        value = word << 6
        while bits != _ZERO:
            if bits & _ONE:
                kept = support[value]
                if allowed[value, kept] & domains[other, kept] == _ZERO:
                    found = False
                    for w in range(words):
                        if allowed[value, w] & domains[other, w] != _ZERO:
                            support[value] = w
                            found = True
                            break
                    if not found:
                        _drop(domains[stage], value)
                        left[stage] -= 1
                        changed = True
            bits >>= _ONE
            value += 1
    return changed


@jit
def _memory(  # type: ignore[no-untyped-def]
    domains, left, changed, rank, stage_first, stage_of, table_bytes, limit, moments, bytes_of, bytes_first, uses
):
    """Drops ranges with which a rank would exceed its limit at some moment; False if a stage has none left."""
    first, last = stage_first[rank], stage_first[rank + 1]
    count = last - first
    words = domains.shape[1]
    certain = 0  # stages of the rank whose every range uses the embedding table
    for k in range(count):
        s = stage_of[first + k]
        if left[s] > 0:
            every = True
            for value in range(uses.shape[1]):
                if value < words * 64 and _has(domains[s], value) and not uses[s, value]:
                    every = False
                    break
            if every:
                certain += 1
    for moment in range(moments[rank]):
        total = 0
        least = np.zeros(count, dtype=np.int64)
        for k in range(count):
            s = stage_of[first + k]
            at = bytes_first[s] + moment
            step = moments[rank]
            smallest = _HUGE
            for word in range(words):
                bits = domains[s, word]
                value = word << 6
                while bits != _ZERO:
                    if bits & _ONE and bytes_of[at + value * step] < smallest:
                        smallest = bytes_of[at + value * step]
                    bits >>= _ONE
                    value += 1
            least[k] = smallest
            total += smallest
        for k in range(count):
            s = stage_of[first + k]
            at = bytes_first[s] + moment
            step = moments[rank]
            for word in range(words):
                bits = domains[s, word]
                value = word << 6
                while bits != _ZERO:
                    if bits & _ONE:
                        table = table_bytes if certain > 0 or uses[s, value] else 0
                        if total - least[k] + bytes_of[at + value * step] + table > limit:
                            _drop(domains[s], value)
                            left[s] -= 1
                            changed[s] = True
                    bits >>= _ONE
                    value += 1
            if left[s] == 0:
                return False
    return True


@jit
def _propagate(  # type: ignore[no-untyped-def]
    domains,
    left,
    changed,
    pairs,
    of_stage,
    of_first,
    forward,
    backward,
    support_f,
    support_b,
    weights,
    rank_weights,
    rank_of,
    stage_first,
    stage_of,
    table_bytes,
    limit,
    moments,
    bytes_of,
    bytes_first,
    uses,
):
    """Makes all constraints consistent again after ``changed`` stages have lost values; False for a contradiction."""
    stages = domains.shape[0]
    pending = True
    while pending:
        pending = False
        for x in range(stages):
            if not changed[x]:
                continue
            pending = True
            changed[x] = False
            for k in range(of_first[x], of_first[x + 1]):
                c = of_stage[k]
                if pairs[c, 0] == x:
                    y = pairs[c, 1]
                    lost = _revise(domains, left, y, x, backward[c], support_b[c])
                else:
                    y = pairs[c, 0]
                    lost = _revise(domains, left, y, x, forward[c], support_f[c])
                if lost:
                    changed[y] = True
                    if left[y] == 0:
                        weights[c] += 1.0
                        changed[:] = False
                        return False
            if limit > 0 and not _memory(
                domains,
                left,
                changed,
                rank_of[x],
                stage_first,
                stage_of,
                table_bytes,
                limit,
                moments,
                bytes_of,
                bytes_first,
                uses,
            ):
                rank_weights[rank_of[x]] += 1.0
                changed[:] = False
                return False
    return True


@jit
def _choose(left, pairs, of_stage, of_first, weights, rank_weights, rank_of):  # type: ignore[no-untyped-def]
    """The stage with several values left and the least of them per failure; -1 when all are decided."""
    best, chosen = 0.0, -1
    for s in range(left.shape[0]):
        if left[s] <= 1:
            continue
        weight = rank_weights[rank_of[s]]
        for k in range(of_first[s], of_first[s + 1]):
            c = of_stage[k]
            other = pairs[c, 1] if pairs[c, 0] == s else pairs[c, 0]
            if left[other] > 1:
                weight += weights[c]
        score = left[s] / max(weight, 1e-3)
        if chosen < 0 or score < best:
            best, chosen = score, s
    return chosen


@jit
def _first(domain):  # type: ignore[no-untyped-def]
    for word in range(domain.shape[0]):
        bits = domain[word]
        value = word << 6
        while bits != _ZERO:
            if bits & _ONE:
                return value
            bits >>= _ONE
            value += 1
    return -1


@jit
def solve(  # type: ignore[no-untyped-def]
    start,  # [stages, words] bits of the values that each stage may take
    pairs,  # [constraints, 2]
    of_stage,  # constraints of all stages, one stage after the other
    of_first,  # [stages + 1]
    forward,  # [constraints, values, words]
    backward,  # [constraints, values, words]
    weights,  # [constraints] failures so far: kept from one threshold to the next
    rank_weights,  # [ranks]
    rank_of,  # [stages]
    stage_first,  # [ranks + 1]
    stage_of,  # stages of all ranks
    table_bytes,
    limit,  # bytes per rank; 0: none
    moments,  # [ranks]
    bytes_of,  # per stage [values, moments of its rank], from bytes_first on
    bytes_first,  # [stages]
    uses,  # [stages, values] whether the range uses the embedding table
    node_limit,
    chosen,  # out: [stages] values
):
    """(answer, nodes): UNSATISFIABLE, SATISFIED with ``chosen``, or UNDECIDED after ``node_limit`` nodes."""
    stages, words = start.shape
    domains = np.zeros((stages + 1, stages, words), dtype=np.uint64)
    left = np.zeros((stages + 1, stages), dtype=np.int64)
    tried = np.zeros((stages + 1, 2), dtype=np.int64)
    support_f = np.zeros(forward.shape[:2], dtype=np.int64)
    support_b = np.zeros(backward.shape[:2], dtype=np.int64)
    changed = np.ones(stages, dtype=np.bool_)
    domains[0] = start
    for s in range(stages):
        for word in range(words):
            bits = start[s, word]
            while bits != _ZERO:
                left[0, s] += 1
                bits &= bits - _ONE
        if left[0, s] == 0:
            return UNSATISFIABLE, 0
    depth, nodes = 0, 0
    consistent = _propagate(
        domains[0], left[0], changed, pairs, of_stage, of_first, forward, backward, support_f, support_b, weights,
        rank_weights, rank_of, stage_first, stage_of, table_bytes, limit, moments, bytes_of, bytes_first, uses,
    )  # fmt: skip
    while True:
        if not consistent:  # take back the last choice: its value is impossible
            depth -= 1
            if depth < 0:
                return UNSATISFIABLE, nodes
            s, value = tried[depth, 0], tried[depth, 1]
            _drop(domains[depth, s], value)
            left[depth, s] -= 1
            changed[s] = True
            target = depth
            if left[depth, s] == 0:
                changed[s] = False
                continue
        else:
            s = _choose(left[depth], pairs, of_stage, of_first, weights, rank_weights, rank_of)
            if s < 0:
                for s in range(stages):
                    chosen[s] = _first(domains[depth, s])
                return SATISFIED, nodes
            if nodes == node_limit:
                return UNDECIDED, nodes
            nodes += 1
            value = _first(domains[depth, s])
            tried[depth, 0], tried[depth, 1] = s, value
            target = depth + 1
            domains[target] = domains[depth]
            left[target] = left[depth]
            domains[target, s] = _ZERO
            domains[target, s, value >> 6] = _ONE << (np.uint64(value) & _LOW)
            left[target, s] = 1
            changed[s] = True
            depth = target
        consistent = _propagate(
            domains[target], left[target], changed, pairs, of_stage, of_first, forward, backward, support_f, support_b,
            weights, rank_weights, rank_of, stage_first, stage_of, table_bytes, limit, moments, bytes_of, bytes_first,
            uses,
        )  # fmt: skip
