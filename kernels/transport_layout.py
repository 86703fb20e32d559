"""What a MoE layer sends between the ranks that share its experts, and where it lies in each rank's peer memory.

A *unit* is what dispatch sends once: a token (form ``tokens``: one copy for each rank that has one of its experts, with
all K expert ids), or one choice of a token (form ``rows``: one copy per chosen expert). A unit has J choices: K or 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import IntEnum, StrEnum

import torch

from tessera_rt.errors import Problem, SpecError
from tessera_rt.kernels.options import MAX_EXPERTS

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_ALIGNMENT = 256  # bytes; every region starts at a multiple
_ROW_ELEMENTS = 16  # rows are padded to a multiple: 16-byte accesses for every dtype


class Dispatch(StrEnum):
    """What is sent to the experts."""

    ROWS = "rows"  # one row per chosen expert
    TOKENS = "tokens"  # one row per token and rank: fewer bytes


class Combine(StrEnum):
    """What comes back from the experts."""

    ROWS = "rows"  # one row per chosen expert; home sums over k in order: bits do not depend on the number of ranks
    REDUCED = (
        "reduced"  # one row per token and rank, the sum over its experts, k in order; home sums over ranks in order
    )


class Channel(IntEnum):
    """Exchanges with flags and epochs of their own. A rank's calls on one have the same order on all ranks."""

    COUNTS = 0
    DISPATCH = 1
    COMBINE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One layer's traffic; every rank must be given the same.

    ``world`` ranks share ``experts`` evenly, in order; each rank has at most ``tokens`` tokens of ``hidden`` features
    and ``top_k`` choices. ``capacity``: units a rank can receive; ``row_capacity``: choices that its experts compute.
    0 stands for the most that can come when a token's choices are distinct. Raises SpecError with all problems.
    """

    world: int
    experts: int
    top_k: int
    hidden: int
    tokens: int
    dtype: torch.dtype = torch.bfloat16
    dispatch: Dispatch = Dispatch.TOKENS
    combine: Combine = Combine.ROWS
    capacity: int = 0
    row_capacity: int = 0

    def __post_init__(self) -> None:
        problems = [
            Problem(name, getattr(self, name), "at least 1")
            for name in ("world", "experts", "top_k", "hidden", "tokens")
            if getattr(self, name) < 1
        ]
        problems += [
            Problem(name, getattr(self, name), "at least 0")
            for name in ("capacity", "row_capacity")
            if getattr(self, name) < 0
        ]
        if not problems and self.experts % self.world:
            problems.append(Problem("experts", self.experts, f"a multiple of the {self.world} ranks"))
        if not problems and self.experts // self.world > MAX_EXPERTS:
            problems.append(Problem("experts", self.experts, f"at most {MAX_EXPERTS} on each of {self.world} ranks"))
        if self.dtype not in DTYPES:
            problems.append(Problem("dtype", str(self.dtype), "bfloat16, float16, float32 or float64"))
        if self.dispatch is Dispatch.ROWS and self.combine is Combine.REDUCED:
            remedy = "a row per choice has nothing to reduce; dispatch tokens"
            problems.append(Problem("combine", str(self.combine), "rows with dispatch = rows", remedy))
        if not problems:
            problems += [
                Problem(name, count, "below 2^31", "use fewer tokens, or a capacity")
                for name, count in (
                    ("received units x their choices", self.units_received * self.choices),
                    ("rows that return to a rank", self.returned),
                    ("choices of a rank", self.tokens * self.top_k),
                )
                if count >= 1 << 31
            ]
        if problems:
            raise SpecError.of("expert-parallel traffic", problems)

    def values(self) -> dict[str, str]:
        """All fields as text, to compare what ranks were given."""
        return {field.name: str(getattr(self, field.name)) for field in fields(self)}

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of the router's weights and their gradients: fp32, or float64 with it."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def local_experts(self) -> int:
        return self.experts // self.world

    @property
    def choices(self) -> int:
        """J, the choices of a unit."""
        return self.top_k if self.dispatch is Dispatch.TOKENS else 1

    @property
    def units_per_token(self) -> int:
        return self.top_k // self.choices

    @property
    def units_received(self) -> int:
        """Units a rank has room for."""
        per_token = 1 if self.dispatch is Dispatch.TOKENS else min(self.top_k, self.local_experts)
        return self.capacity or self.world * self.tokens * per_token

    @property
    def rows(self) -> int:
        """Choices a rank's experts have room for."""
        return self.row_capacity or self.units_received * min(self.choices, self.local_experts)

    @property
    def parts(self) -> int:
        """Rows that return to each token: one per choice, or one per rank."""
        return self.top_k if self.combine is Combine.ROWS else self.world

    @property
    def returned(self) -> int:
        return self.tokens * self.parts

    @property
    def row_stride(self) -> int:
        """Elements from one row to the next in peer memory."""
        return -(-self.hidden // _ROW_ELEMENTS) * _ROW_ELEMENTS

    @property
    def counts_width(self) -> int:
        """Integers in a rank's row of the count slab: choices per expert [E], then units and choices per rank [2 W]."""
        return self.experts + 2 * self.world


@dataclass(frozen=True, slots=True)
class Region:
    """``size`` bytes at ``start`` for even epochs, and as many behind them for odd ones."""

    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + 2 * self.size


@dataclass(frozen=True, slots=True)
class Layout:
    """Byte offsets in each rank's peer memory: flags [channel, rank] int32, and the double-buffered regions.

    ``ready``: set by a source when its data are there; ``free``: set by a consumer when it has read what we sent.
    """

    ready: int
    free: int
    counts: Region  # [W, counts_width] int32, by source
    rows: Region  # [units_received, row_stride]
    origin: Region  # [units_received, 2] int32: source rank, its unit
    ids: Region  # [units_received, J] int32, global
    weights: Region  # [units_received, J] fp32
    returned: Region  # [returned, row_stride]
    gradients: Region  # [tokens, K] fp32, of the router's weights
    total: int

    @classmethod
    def of(cls, traffic: Traffic) -> Layout:
        element, received = traffic.dtype.itemsize, traffic.units_received
        flags = _aligned(4 * len(Channel) * traffic.world)
        sizes = (
            4 * traffic.world * traffic.counts_width,
            received * traffic.row_stride * element,
            8 * received,
            4 * received * traffic.choices,
            4 * received * traffic.choices,
            traffic.returned * traffic.row_stride * element,
            4 * traffic.tokens * traffic.top_k,
        )
        regions: list[Region] = []
        for size in sizes:
            regions.append(Region(regions[-1].end if regions else 2 * flags, _aligned(size)))
        counts, rows, origin, ids, weights, returned, gradients = regions
        return cls(
            ready=0, free=flags, counts=counts, rows=rows, origin=origin, ids=ids, weights=weights, returned=returned,
            gradients=gradients, total=gradients.end,
        )  # fmt: skip


def differences(mine: Mapping[str, str], other: Mapping[str, str], whose: str, remedy: str = "") -> list[Problem]:
    """A problem for each of ``mine`` that is not that of ``other``."""
    return [
        Problem(name, value, f"{other.get(name)}, {whose}", remedy)
        for name, value in mine.items()
        if other.get(name) != value
    ]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
