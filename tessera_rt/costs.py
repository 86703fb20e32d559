"""CostTable: what every task takes and what every item holds, wherever the figures come from.

Three sources give the same table: a roofline (``roofline.py``), a file, a measurement (``measured.py``). Durations are
integer nanoseconds without contention, for the communication SM budget ``comm_sms``; memory is bytes on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from tessera_rt.errors import CostError, Problem
from tessera_rt.tasks import TaskGraph, TaskKind


class Recompute(StrEnum):
    """Which compute tasks keep only their inputs and run again in backward."""

    NONE = "none"
    SELECTIVE = "selective"  # feed-forwards: MLP and SHARED
    FULL = "full"  # ATTN, MLP, SHARED, MTP (ROUTE is never done twice: its decision is kept)


RECOMPUTED: Mapping[Recompute, frozenset[TaskKind]] = MappingProxyType(
    {
        Recompute.NONE: frozenset(),
        Recompute.SELECTIVE: frozenset({TaskKind.MLP, TaskKind.SHARED}),
        Recompute.FULL: frozenset({TaskKind.ATTN, TaskKind.MLP, TaskKind.SHARED, TaskKind.MTP}),
    }
)
"""The compute tasks that each policy runs again in backward: what costs assume and what the engine does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one rank processes, and how the model is spread.

    ``tokens``: tokens of one micro-batch on one rank. ``context``: length of the sequence they attend to (equal to
    ``tokens`` per sequence without context parallelism; larger means context parallelism, whose traffic is not
    charged).
    ``shard_optimizer``: optimizer state is sharded over the ranks that reduce the same gradients. ``momentum``: sgd has
    some (adamw has its moments anyway).
    """

    tokens: int
    context: int
    dp: int = 1
    ep: int = 1
    tp: int = 1
    dtype: str = "bf16"  # bf16 | fp16 | fp32 | fp64
    recompute: Recompute = Recompute.NONE
    optimizer: str = "adamw"  # adamw | sgd
    momentum: bool = False
    shard_optimizer: bool = True
    combine: str = "rows"  # rows | reduced


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCost:
    """``ns``: duration. ``bytes``: payload a COMM task sends off the rank. ``flops``: of a compute task.

    ``spread``: relative distance between the quartiles of the samples, 0 for computed costs. ``samples``: their number.
    """

    ns: int
    bytes: int = 0
    flops: int = 0
    spread: float = 0.0
    samples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemMemory:
    """Bytes one item needs on its rank.

    ``weights``, ``gradients``, ``optimizer``: always. ``activations``: per micro-batch between its F and its B.
    ``pending_w``: per micro-batch between B and W. ``transient``: largest working set of one task, recomputation
    included.
    ``output``: what crosses to the next stage, per micro-batch, when a stage ends with this item.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    pending_w: int = 0
    transient: int = 0
    output: int = 0

    @property
    def static(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Point-to-point link between neighbouring stages: time = latency + bytes / bandwidth, FIFO per directed edge."""

    latency_ns: int = 0
    bytes_per_s: float = float("inf")

    def occupancy_ns(self, size: int) -> int:
        """Nanoseconds for which ``size`` bytes occupy the edge (latency not included), rounded up."""
        if size == 0 or self.bytes_per_s == float("inf"):
            return 0
        return -int(-size * 1_000_000_000 // self.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where the figures come from: ``source`` is roofline, table or measured; ``notes`` state assumptions."""

    source: str
    device: str
    versions: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Costs of one model under one workload.

    ``tasks``: task name (``F_ATTN:L3``) -> cost. ``memory``: item label -> bytes. ``contention`` c: compute runs at
    rate 1/(1+c) while a collective of the same rank runs. ``pairs``: measured post-overlap ns of an overlap pair,
    keyed by its interleaving's tasks in canonical form (empty unless measured).
    """

    fingerprint: str  # of the model
    workload: Workload
    provenance: Provenance
    tasks: Mapping[str, TaskCost]
    memory: Mapping[str, ItemMemory]
    link: Link = Link()
    contention: float = 0.0
    comm_sms: int = 0
    pairs: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tasks", "memory", "pairs"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __getstate__(self) -> dict[str, object]:
        views = {name: dict(getattr(self, name)) for name in ("tasks", "memory", "pairs")}
        return self.__dict__ | views  # a view cannot be pickled

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def apply(self, graph: TaskGraph) -> TaskGraph:
        """The graph with this table's durations and payloads. Raises CostError naming every task it lacks."""
        missing = [name for name in graph.names if name not in self.tasks]
        if missing:
            raise CostError.of(
                "cost table",
                [
                    Problem(f"tasks.{name}", None, "a cost", "profile or compute costs for this model")
                    for name in missing
                ],
            )
        return TaskGraph(
            tuple(replace(task, ns=self.tasks[task.name].ns, bytes=self.tasks[task.name].bytes) for task in graph.tasks)
        )
