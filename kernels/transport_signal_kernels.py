"""Flags between ranks: signalling what was written, and waiting for what others write.

A flag holds the epoch (number) of its channel's newest call, int32, which wraps. Epochs live in device memory and are
counted by the kernels, so a captured graph can be replayed. Every signal is a release at system scope behind a barrier
of the block (Triton 3.6 to 3.8 put none there), every wait an acquire at system scope.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from tessera_rt.kernels.tile_loop import write_trace
from tessera_rt.kernels.work import Work, launch_metadata


def _wait_work(args: Mapping[str, Any]) -> Work:
    return Work(0, 4 * args["world"])


@triton.jit
def is_behind(value, epoch):
    """Whether ``value`` comes before ``epoch`` on the circle of int32."""
    return (value.to(tl.int64) - epoch.to(tl.int64)).to(tl.int32) < 0


@triton.jit(launch_metadata=launch_metadata(_wait_work))
def wait_kernel(counter, flags, words, trace, world, polls, phase, LAG: tl.constexpr, TRACE: tl.constexpr):
    """Begins the counter's next epoch and waits until every rank's flag has reached it (LAG epochs before it).

    One program. Polls at most ``polls`` times in all; then words [0:4] become (phase, rank, epoch, its flag), unless an
    earlier failure is written there already, after which nothing is waited for any more.
    """
    if TRACE:
        write_trace(trace)
    epoch = tl.load(counter).to(tl.int64) + 1
    failed = tl.load(words)
    tl.debug_barrier()  # every thread has read the counter before one writes it
    tl.store(counter, epoch.to(tl.int32))
    wanted = (epoch - LAG).to(tl.int32)
    left = tl.where(failed == 0, polls, 0)
    for peer in range(world):
        value = tl.atomic_add(flags + peer, 0, sem="acquire", scope="sys")
        while is_behind(value, wanted) & (left > 0):
            value = tl.atomic_add(flags + peer, 0, sem="acquire", scope="sys")
            left -= 1
        if is_behind(value, wanted) & (failed == 0):
            failed = phase
            tl.store(words, phase)
            tl.store(words + 1, peer)
            tl.store(words + 2, wanted)
            tl.store(words + 3, value)


@triton.jit
def signal_when_last(arrivals, bases, flag, rank, epoch, healthy, world, BLOCK_W: tl.constexpr):
    """The last program of the grid to come here sets this rank's flag to ``epoch`` on every rank (if ``healthy``).

    ``flag``: byte offset of the channel's flags; ``arrivals`` [1] int32 counts programs and is 0 again afterwards. The
    counter's acquire and release make all programs' writes precede the signal, whatever the grid.
    """
    tl.debug_barrier()
    before = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="sys")
    if before == tl.num_programs(0) - 1:
        tl.store(arrivals, 0)
        if healthy:
            peers = tl.arange(0, BLOCK_W)
            base = tl.load(bases + peers, mask=peers < world, other=0)
            place = (base + flag + rank * 4).to(tl.pointer_type(tl.int32))
            value = tl.zeros((BLOCK_W,), tl.int32) + epoch
            tl.debug_barrier()
            tl.atomic_xchg(place, value, mask=peers < world, sem="release", scope="sys")
