"""Discrete-event simulator: when every task of a step runs, before anything is executed.

The rules (the emulated device follows the same ones and shares no code with this):

- Each pipeline rank has two lanes, COMP and COMM. Its actions, each expanded to the tasks of its interleaving, fill the
  lanes' queues, first in, first out, without barriers between actions. A task starts when its lane is free and its
  dependencies have ended; the first tasks of a pass also wait for the pass's input. All ranks of the data and expert
  parallel groups are alike, so one stands for all and a collective starts at once.
- The input of F on a stage is the output of F on the stage before; that of B is the output of B on the next stage and
  the end of its own F. A pass's output exists when all its tasks (not its W tasks) have ended. An empty stage passes
  its input on.
- Between ranks an output is a message: it starts when it exists and the messages sent before it on the same directed
  edge have left, occupies the edge for bytes / bandwidth, and arrives a latency later. The sender is free meanwhile.
- With contention c, compute runs at rate 1/(1+c) while a collective of the same rank runs.
- With overlap off, the passes of an action run one after the other in canonical order, one task at a time.

Times are integer nanoseconds; without contention they are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tessera_rt.costs import CostTable
from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Action, Interleaving, Plan
from tessera_rt.scheduler.chunked import MOE_HALVES
from tessera_rt.scheduler.graphs import Bounds
from tessera_rt.scheduler.part_costs import part_costs
from tessera_rt.scheduler.simulate_program import Program, build_program
from tessera_rt.scheduler.simulate_run import Transfer, run_program
from tessera_rt.timeline import Span, Timeline


def simulate(
    plan: Plan,
    model: ModelSpec,
    costs: CostTable,
    *,
    overlap: bool = True,
    contention: float | None = None,
    label: str = "",
) -> Timeline:
    """The timeline of one step of ``plan``. ``contention`` None: that of the cost table; no ``label``: the template's.

    Raises ScheduleError for a deadlock (which rank, action and task waits for what) or an order that does not fit the
    model, CostError when the table lacks a task.
    """
    return simulate_schedule(
        [stage.rank for stage in plan.stages],
        plan.actions,
        [(stage.start, stage.stop) for stage in plan.stages],
        plan.interleavings,
        model,
        costs,
        overlap=overlap,
        contention=contention,
        label=label or plan.template,
        halves=MOE_HALVES in plan.simulate_only,
        tapered=plan.tapered,
    )


def simulate_schedule(
    stage_ranks: Sequence[int],
    actions: Sequence[Sequence[Action]],
    bounds: Bounds,
    interleavings: Mapping[str, Interleaving],
    model: ModelSpec,
    costs: CostTable,
    *,
    overlap: bool = True,
    contention: float | None = None,
    label: str = "",
    copies: int = 1,
    halves: bool = False,
    tapered: int = 0,
) -> Timeline:
    """The same before there is a Plan: ``stage_ranks[s]`` and items ``bounds[s]`` of every stage, ``actions[r]`` of
    every rank, one interleaving per action key (not looked at with overlap off). ``copies``: the stages are that many
    copies of the model one after the other, and each micro-batch goes through one of them. ``halves``: MoE layers of
    actions that run ``chunked.alone`` go in two halves. ``tapered``: so many micro-batches at either end are small
    (``part_costs.py``)."""
    program = build_program(
        stage_ranks,
        actions,
        bounds,
        interleavings,
        model,
        costs,
        overlap=overlap,
        copies=copies,
        part_costs=part_costs(actions, model, costs, halves=halves, tapered=tapered),
    )
    _, transfers = run_program(program, contention_rate(costs, contention))
    spans = tuple(_task_spans(program) + _link_spans(program, transfers))
    return Timeline(label=label, source="simulated", ranks=len(actions), spans=spans)


def step_time(
    stage_ranks: Sequence[int],
    actions: Sequence[Sequence[Action]],
    bounds: Bounds,
    interleavings: Mapping[str, Interleaving],
    model: ModelSpec,
    costs: CostTable,
    *,
    overlap: bool = True,
    contention: float | None = None,
    halves: bool = False,
    tapered: int = 0,
) -> int:
    """``simulate_schedule(...).step_ns`` without building the timeline."""
    program = build_program(
        stage_ranks,
        actions,
        bounds,
        interleavings,
        model,
        costs,
        overlap=overlap,
        part_costs=part_costs(actions, model, costs, halves=halves, tapered=tapered),
    )
    return run_program(program, contention_rate(costs, contention))[0]


def contention_rate(costs: CostTable, contention: float | None) -> float:
    """The contention that counts, ``costs``' where none is given. Raises ScheduleError for what cannot be one."""
    value = costs.contention if contention is None else contention
    if not 0 <= value < float("inf"):
        problem = Problem("contention", value, "a finite number of at least 0", "0.15 = compute 15 % slower")
        raise ScheduleError.of("simulation", [problem])
    return value


def _task_spans(program: Program) -> list[Span]:
    spans: list[Span] = []
    for runs in program.runs:
        for run in runs:
            parts = run.action.passes
            for i, task in enumerate(run.shape.tasks):
                part = parts[run.shape.part_of[i]]
                spans.append(
                    Span(
                        rank=run.rank,
                        lane=task.resource,
                        name=task.name,
                        stage=part.stage,
                        microbatch=part.microbatch,
                        start_ns=run.starts[i],
                        end_ns=run.ends[i],
                    )
                )
    return spans


def _link_spans(program: Program, transfers: Sequence[Transfer]) -> list[Span]:
    return [
        Span(
            rank=transfer.source,
            lane="LINK",
            name="SEND_B" if transfer.number % 2 else "SEND_F",
            stage=program.passes.stage(transfer.number),
            microbatch=program.passes.microbatch(transfer.number),
            start_ns=transfer.start_ns,
            end_ns=transfer.end_ns,
        )
        for transfer in transfers
    ]
