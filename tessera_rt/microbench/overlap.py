"""How well a communication and a compute function share a device, by the SMs that communication is given.

For s communication SMs out of S: t_comm(s) and t_comp(S - s) alone, t_both(s) together. Rounds take one sample of each
in turn, so that drifting clocks meet all of them alike.

    efficiency = (t_comm + t_comp - t_both) / min(t_comm, t_comp)    1: the shorter is hidden, 0: one after the other
    slowdown   = t_comp while both run / t_comp alone on all SMs     at least S / (S - s) for a compute-bound function
    contention = c in "compute runs at rate 1 / (1 + c) while communication runs", which is what the planner uses
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tessera_rt.errors import Problem, SpecError
from tessera_rt.kernels.budget import SmBudget
from tessera_rt.kernels.trace import Trace
from tessera_rt.microbench.machine import ClockReader, Clocks, Machine, machine
from tessera_rt.microbench.timing import Both, Launch, Stopwatch, Timing, slowest_rank, stopwatch

BudgetedLaunch = Callable[[SmBudget], object]
"""Launches its work within a budget. It may return a Trace of where its programs ran."""
SWEEP = (4, 8, 12, 16, 20, 24, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """On how many SMs the programs really ran, from their traces."""

    comm_sms: int
    comp_sms: int
    shared_sms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRow:
    """One point of the sweep. Times are medians in ns; ``comp_all``: compute alone on all SMs. ``clocks``: before,
    between and after the rounds that count; none without a GPU."""

    budget: SmBudget
    comm: Timing
    comp: Timing
    comp_all: Timing
    both: Timing
    comm_in_both_ns: int
    comp_in_both_ns: int
    placement: Placement | None
    clocks: tuple[Clocks, ...]

    @property
    def efficiency(self) -> float:
        return (self.comm.ns + self.comp.ns - self.both.ns) / max(1, min(self.comm.ns, self.comp.ns))

    @property
    def slowdown(self) -> float:
        return self.comp_in_both_ns / max(1, self.comp_all.ns)

    @property
    def contention(self) -> float | None:
        """None where compute ended before communication had run for a tenth of it: too little to tell."""
        together = min(self.comm_in_both_ns, self.comp_in_both_ns)
        undisturbed = self.comp_in_both_ns - together
        work = self.comp_all.ns - undisturbed  # what compute did meanwhile, in ns of an undisturbed device
        if together < self.comp_all.ns / 10 or work <= 0:
            return None
        return max(0.0, together / work - 1)

    def as_row(self) -> dict[str, Any]:
        """For tables and JSON; times in fields that end in ``_ns``."""
        return {
            "comm_sms": self.budget.communication,
            "sms": self.budget.total,
            "comm_ns": self.comm.ns,
            "comp_ns": self.comp.ns,
            "comp_all_ns": self.comp_all.ns,
            "both_ns": self.both.ns,
            "comm_in_both_ns": self.comm_in_both_ns,
            "comp_in_both_ns": self.comp_in_both_ns,
            "efficiency": self.efficiency,
            "slowdown": self.slowdown,
            "fair_slowdown": self.budget.total / self.budget.compute,
            "contention": self.contention,
            "spread": max(self.comm.spread, self.comp.spread, self.both.spread),
            "samples": self.both.samples,
            "placement": None if self.placement is None else asdict(self.placement),
            "clocks": [asdict(clocks) for clocks in self.clocks],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapResult:
    """A sweep. ``notes`` say what was not measured, and why."""

    machine: Machine
    rows: tuple[OverlapRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> OverlapRow:
        """The point at which both are done first."""
        return min(self.rows, key=lambda row: row.both.ns)


def overlap(
    comm_fn: BudgetedLaunch,
    comp_fn: BudgetedLaunch,
    budget: SmBudget | None = None,
    *,
    sweep: Sequence[int] | None = None,
    samples: int = 20,
    warmup: int = 3,
    device: torch.device | None = None,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = 60.0,
) -> OverlapResult:
    """Measure ``comm_fn`` beside ``comp_fn``, each called as ``fn(budget)``.

    ``budget`` is one point; without it ``sweep`` gives the communication SMs to try (on a GPU ``SWEEP`` below its
    number of SMs; a CPU has no SMs to set aside and is measured once). On a GPU a function leaves its work on the
    current stream; on a CPU it returns when it is done, ``comm_fn`` on a thread of its own. ``device``: the GPU if
    there is one. ``group``: ranks that all make this call. Raises SpecError for a request that cannot be,
    TransportError naming the lane that did not finish within ``timeout_s``.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = machine(device)
    budgets = _budgets(found, budget, sweep, samples)
    reader = ClockReader(device)
    notes = [reader.note] if reader.note else []
    if found.kind == "cpu":
        notes.append("no GPU: two CPU threads share the machine, and no SMs are set aside")
    rows = []
    with stopwatch(device, group, timeout_s=timeout_s) as watch:
        for point in budgets:
            rows.append(_measure(watch, reader, comm_fn, comp_fn, point, samples, warmup, group))
    return OverlapResult(machine=found, rows=tuple(rows), notes=tuple(notes))


def _measure(
    watch: Stopwatch,
    reader: ClockReader,
    comm_fn: BudgetedLaunch,
    comp_fn: BudgetedLaunch,
    budget: SmBudget,
    samples: int,
    warmup: int,
    group: dist.ProcessGroup | None,
) -> OverlapRow:
    traces: dict[str, object] = {}
    everything = SmBudget(budget.total)

    def comm() -> None:
        traces["comm"] = comm_fn(budget)

    def comp() -> None:
        traces["comp"] = comp_fn(budget)

    def comp_all() -> None:
        comp_fn(everything)

    clocks: list[Clocks] = []
    alone: dict[Launch, list[int]] = {comm: [], comp: [], comp_all: []}
    together: list[Both] = []
    for round_ in range(warmup + samples):
        if round_ >= warmup:
            clocks += reader.read()
        of_round = {launch: watch.alone(launch) for launch in alone}
        both = watch.both(comm, comp)
        if round_ >= warmup:
            together.append(both)
            for launch, taken in of_round.items():
                alone[launch].append(taken)
    timings = {launch: Timing.of(slowest_rank(taken, group)) for launch, taken in alone.items()}
    return OverlapRow(
        budget=budget,
        comm=timings[comm],
        comp=timings[comp],
        comp_all=timings[comp_all],
        both=Timing.of(slowest_rank([both.total for both in together], group)),
        comm_in_both_ns=round(median(slowest_rank([both.comm for both in together], group))),
        comp_in_both_ns=round(median(slowest_rank([both.comp for both in together], group))),
        placement=_placement(traces["comm"], traces["comp"]),
        clocks=(*clocks, *reader.read()),
    )


def _placement(comm: object, comp: object) -> Placement | None:
    if not isinstance(comm, Trace) or not isinstance(comp, Trace):
        return None
    comm_sms, comp_sms = (set[int]().union(*(launch.sms() for launch in trace.launches)) for trace in (comm, comp))
    return Placement(comm_sms=len(comm_sms), comp_sms=len(comp_sms), shared_sms=len(comm_sms & comp_sms))


def _budgets(
    found: Machine, budget: SmBudget | None, sweep: Sequence[int] | None, samples: int
) -> tuple[SmBudget, ...]:
    problems = []
    if samples < 1:
        problems.append(Problem("samples", samples, "at least 1"))
    if budget is not None and sweep is not None:
        problems.append(Problem("sweep", list(sweep), "left out when budget is given"))
    if found.kind == "cpu" and sweep is not None:
        problems.append(Problem("sweep", list(sweep), "left out: a CPU has no SMs to set aside"))
    if sweep is not None and not sweep:
        problems.append(Problem("sweep", [], "at least one number of SMs"))
    problems += [
        Problem(f"sweep[{index}]", sms, f"from 0 to {found.sms - 1}")
        for index, sms in enumerate(sweep or ())
        if found.kind == "cuda" and not 0 <= sms < found.sms
    ]
    if problems:
        raise SpecError.of("overlap", problems)
    if budget is not None:
        return (budget,)
    if found.kind == "cpu":
        return (SmBudget(found.sms),)
    return tuple(SmBudget(found.sms, sms) for sms in (sweep or SWEEP) if sms < found.sms)
