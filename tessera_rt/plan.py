"""Plan: the only thing handed from planning to running. Immutable, printable, checkable (``plan_check.py``).

Text form: YAML both ways (``plan_files.py``). Actions use torch.distributed.pipelining's notation
``<stage><type><micro-batch>``: ``0F3`` forward, ``0B2`` full backward (inputs and weights), ``0I2`` backward for
inputs, ``0W2`` backward for weights, ``0SEND_F3``/``1RECV_F3``/``1SEND_B3``/``0RECV_B3`` messages, and
``(0F4;3B1)OVERLAP_F_B`` for two passes run together. A plan's action lists hold compute actions; its messages follow
from them (``messages_from``), since every output is sent as soon as it exists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType

from tessera_rt.costs import Link, Workload
from tessera_rt.errors import PlanError, Problem
from tessera_rt.tasks import Pass

PLAN_VERSION = 1
MOST_ITEMS = 65_536
"""Items a plan's stages may name: far beyond any model, so that nobody counts up to an edited number."""
TAPERED_ENDS = "tapered-ends"
"""In ``Plan.simulate_only``: the step has small micro-batches at its ends (``Plan.tapered``)."""
SOLVER_STATUSES = ("optimal", "optimal-in-window", "incumbent", "heuristic")


class ActionKind(StrEnum):
    """Types of actions, by torch's letters."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - torch's letter
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    OVERLAP = "OVERLAP_F_B"


_SINGLE = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)")
_OVERLAP = re.compile(r"\(([^()]+)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a rank's list. ``parts`` holds the passes of an overlap (then stage = microbatch = -1)."""

    kind: ActionKind
    stage: int = -1
    microbatch: int = -1
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.kind is ActionKind.OVERLAP:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def passes(self) -> tuple[Action, ...]:
        """The single passes: itself, or the parts of an overlap."""
        return self.parts or (self,)

    @property
    def key(self) -> str:
        """The action without micro-batches, e.g. ``0F`` or ``0F;3B``: the key of its interleaving."""
        return ";".join(f"{part.stage}{part.kind}" for part in self.passes)

    @classmethod
    def overlap(cls, *parts: Action) -> Action:
        return cls(ActionKind.OVERLAP, parts=parts)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Inverse of ``str``. Raises PlanError for anything else."""
        text = text.strip()
        if match := _OVERLAP.fullmatch(text):
            parts = tuple(cls.parse(part) for part in match[1].split(";"))
            if len(parts) >= 2 and all(part.kind in "FBIW" for part in parts):
                return cls.overlap(*parts)
        elif match := _SINGLE.fullmatch(text):
            return cls(ActionKind(match[2]), int(match[1]), int(match[3]))
        allowed = "an action such as 0F3, 2B1, 0I2, 0W2 or (0F4;3B1)OVERLAP_F_B"
        raise PlanError.of("action", [Problem("action", text, allowed)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Ranks: world = pp * dp * ep; rank = (pp_i * dp + dp_i) * ep + ep_i. ``vpp``: virtual stages per pipeline rank."""

    pp: int = 1
    vpp: int = 1
    dp: int = 1
    ep: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.ep * self.tp

    @property
    def stages(self) -> int:
        return self.pp * self.vpp

    def rank(self, pp_i: int, dp_i: int, ep_i: int) -> int:
        return (pp_i * self.dp + dp_i) * self.ep + ep_i

    def coordinate(self, rank: int) -> tuple[int, int, int]:
        """(pp_i, dp_i, ep_i) of a rank."""
        return rank // (self.dp * self.ep), rank // self.ep % self.dp, rank % self.ep


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A virtual stage: items [start, stop) of the model on pipeline rank ``rank``; may be empty or hold no layer.

    ``slots``: how many micro-batches are in flight at most (between the start of F and the end of B).
    """

    index: int
    rank: int
    start: int
    stop: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Interleaving:
    """Order of the tasks of one action. ``key`` is the action without micro-batches (``Action.key``).

    ``starts_ns``: predicted start of each task relative to the action's start; ``makespan_ns``: predicted length;
    ``comm_sms``: the communication SM budget it was made for; ``method``: fifo | align | defer | exact (the proven
    optimum) | contended (made for compute that communication slows down) | megatron | given (by a user) | serial.
    ``bound_ns``: proven: no order of these tasks is shorter (0: nothing is proven).
    """

    key: str
    order: tuple[str, ...]
    starts_ns: tuple[int, ...]
    makespan_ns: int
    comm_sms: int = 0
    method: str = "align"
    bound_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Planned bytes on one pipeline rank (each of its dp x ep ranks alike); ``limit`` 0 means none was given."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    pending_w: int
    buffers: int  # transient working set and point-to-point buffers
    limit: int = 0

    @property
    def peak(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.pending_w + self.buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverStatus:
    """How the partition was found. ``t_dom_ns``: largest pair cost of the plan; ``bound_ns``: no partition has less.

    ``status``, of what the objective minimizes (``step``: of T_dom): optimal (proven among all partitions) |
    optimal-in-window (proven among those whose boundaries are near the balanced ones) | incumbent (the time was up,
    the solver's best so far) | heuristic (nothing is proven). ``step_ns``: simulated step time; ``alternatives``:
    simulated step time of the other partitions that were looked at (name -> ns). ``bottleneck``: the interleaving key
    that costs ``t_dom_ns``. T_dom, its bound and makespans are without contention; step times are with it.
    """

    objective: str
    method: str
    status: str
    t_dom_ns: int
    bound_ns: int
    step_ns: int
    bottleneck: str = ""
    seconds: float = 0.0
    alternatives: Mapping[str, int] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """Relative distance of ``t_dom_ns`` from its proven bound."""
        return (self.t_dom_ns - self.bound_ns) / self.t_dom_ns if self.t_dom_ns else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostAssumptions:
    """What the plan was computed with, so that a reader can judge it and the emulated device can find its table."""

    source: str
    device: str
    comm_sms: int
    contention: float
    link: Link
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who runs what in which order. ``actions[r]``: compute actions of pipeline rank r, executed in order.

    ``pad``: groups | shadow (how micro-batch counts that pp does not divide are handled); ``shadows``: micro-batches of
    the padded order that were left out. ``tapered``: so many micro-batches at either end of the step have half the
    tokens, 2 x ``tapered`` small ones in place of ``tapered`` of the full ones; the step keeps the tokens of
    ``microbatches`` full ones, and every stage has ``passes`` F. Interleavings and memory are those of full ones (no
    small one needs more). ``target_slots``: task names behind which run-time work may be injected.
    ``simulate_only``: features that can be simulated but not run yet; the engine refuses them by name.
    """

    model: str
    fingerprint: str
    mesh: Mesh
    template: str
    microbatches: int
    stages: tuple[Stage, ...]
    actions: tuple[tuple[Action, ...], ...]
    interleavings: Mapping[str, Interleaving]
    memory: tuple[RankMemory, ...]
    workload: Workload
    assumptions: CostAssumptions
    solver: SolverStatus
    pad: str = "groups"
    shadows: int = 0
    tapered: int = 0
    target_slots: tuple[str, ...] = ()
    simulate_only: tuple[str, ...] = ()
    version: int = PLAN_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "interleavings", MappingProxyType(dict(self.interleavings)))

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "interleavings": dict(self.interleavings)}  # a view cannot be pickled

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    @property
    def passes(self) -> int:
        """Micro-batches that go through every stage, full and small; actions number them from 0."""
        return self.microbatches + self.tapered

    @cached_property
    def stages_of(self) -> tuple[tuple[Stage, ...], ...]:
        """Stages of each pipeline rank, by index."""
        return tuple(tuple(s for s in self.stages if s.rank == rank) for rank in range(self.mesh.pp))


@dataclass(frozen=True, slots=True)
class Message:
    """One activation (F) or gradient (B) between two pipeline ranks."""

    source: int  # pipeline rank
    target: int
    pass_: Pass  # F or B
    to_stage: int
    microbatch: int

    @property
    def from_stage(self) -> int:
        return self.to_stage + (-1 if self.pass_ is Pass.F else 1)


def output_of(plan: Plan, part: Action) -> Message | None:
    """The message a finished pass sends, or None (last stage, first stage, W, or the neighbour is on the same rank)."""
    if part.kind not in (ActionKind.F, ActionKind.B, ActionKind.I):
        return None
    pass_ = Pass.F if part.kind is ActionKind.F else Pass.B
    to_stage = part.stage + (1 if pass_ is Pass.F else -1)
    if not 0 <= to_stage < len(plan.stages):
        return None
    source, target = plan.stages[part.stage].rank, plan.stages[to_stage].rank
    return None if source == target else Message(source, target, pass_, to_stage, part.microbatch)


def finishing_order(plan: Plan, action: Action, *, overlap: bool = True) -> tuple[Action, ...]:
    """The passes of an action by when their output exists: as interleaved, or as listed when overlap is off."""
    if not overlap or len(action.passes) == 1:
        return action.passes
    order = plan.interleavings[action.key].order

    def last_task(part: Action) -> int:
        letter = "F_" if part.kind is ActionKind.F else "W_" if part.kind is ActionKind.W else "B_"
        return max((i for i, name in enumerate(order) if name.startswith(letter)), default=-1)

    return tuple(sorted(action.passes, key=last_task))


def messages_from(plan: Plan, rank: int, *, overlap: bool = True) -> tuple[Message, ...]:
    """All messages pipeline rank ``rank`` sends in a step, in the order in which they are sent."""
    parts = (part for action in plan.actions[rank] for part in finishing_order(plan, action, overlap=overlap))
    return tuple(message for message in (output_of(plan, part) for part in parts) if message)
