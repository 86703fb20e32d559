"""Which compiled kernels can run on one SM at the same time.

A smaller grid reserves no SM by itself: another kernel's block fits beside ours wherever registers, shared memory and
threads allow it. To reserve SMs for communication, its configuration must be one that cannot share (or is meant to).
Not counted: the tensor memory of Blackwell, which holds accumulators there; two products may fit less often than said.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera_rt.kernels.offline import RESERVED_SHARED, Target

_REGISTERS_PER_ALLOCATION = 256  # registers are given out per warp in this many


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one block takes of an SM."""

    registers: int
    shared_bytes: int
    threads: int

    @classmethod
    def of(cls, registers: int, shared_bytes: int, threads: int) -> Footprint:
        """From the registers of one thread, and the block's own shared memory and threads."""
        warps = threads // 32
        per_warp = -(-registers * 32 // _REGISTERS_PER_ALLOCATION) * _REGISTERS_PER_ALLOCATION
        return cls(per_warp * warps, shared_bytes + RESERVED_SHARED, threads)


def can_share(first: Footprint, second: Footprint, target: Target) -> bool:
    """Whether a block of each fits on one SM together."""
    return (
        first.registers + second.registers <= target.registers_per_sm
        and first.shared_bytes + second.shared_bytes <= target.shared_per_sm
        and first.threads + second.threads <= target.threads_per_sm
    )


def blocks_per_sm(block: Footprint, target: Target) -> int:
    """How many equal blocks fit on one SM."""
    return min(
        target.registers_per_sm // max(block.registers, 1),
        target.shared_per_sm // max(block.shared_bytes, 1),
        target.threads_per_sm // block.threads,
        target.blocks_per_sm,
    )
