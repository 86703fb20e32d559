"""check_timeline: whether a timeline can be a step of a plan under the timing contract (docs/timing.md).

Shares no code with the simulators, so that a fault of theirs shows, and takes timelines from anywhere: simulated,
emulated, read from a file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from tessera_rt.costs import CostTable
from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import ActionKind, Plan
from tessera_rt.scheduler.chunked import MOE_HALVES
from tessera_rt.scheduler.graphs import chunk_graph
from tessera_rt.scheduler.part_costs import part_costs
from tessera_rt.tasks import Pass, Resource, Task
from tessera_rt.timeline import Span, Timeline

_Place = tuple[int, int, str]  # stage, micro-batch, task


def check_timeline(
    timeline: Timeline, plan: Plan, model: ModelSpec, costs: CostTable, *, exact: bool = True, most: int = 20
) -> None:
    """Raise a ScheduleError with up to ``most`` of the timeline's contradictions, or return.

    Looked at: every task once and on its rank and lane, one task at a time on a lane, nothing before what it needs, no
    backward before its forward, no pass before the message it waits for. ``exact``: durations too, which are those of
    the costs (compute up to 1 + contention times as long), in a plan with MoE layers in halves or tapered ends of
    those that hold for the pass. For a step with overlap.
    """
    tasks = _tasks(plan, model, costs)
    problems = [*_spans(timeline, plan, tasks)]
    if not problems:
        found = {(s.stage, s.microbatch, s.name): s for s in timeline.spans if s.lane != "LINK"}
        problems += _lanes(timeline)
        problems += _needs(found, tasks)
        problems += _inputs(timeline, found, plan)
        if exact:
            problems += _durations(found, tasks, costs)
            problems += _messages(timeline, plan, model, costs)
    if problems:
        raise ScheduleError.of(f"timeline {timeline.label}".strip(), problems[:most])


def _tasks(plan: Plan, model: ModelSpec, costs: CostTable) -> dict[_Place, Task]:
    tasks: dict[_Place, Task] = {}
    of_parts = part_costs(plan.actions, model, costs, halves=MOE_HALVES in plan.simulate_only, tapered=plan.tapered)
    for action in (action for row in plan.actions for action in row):
        tables = (costs,) * len(action.passes) if of_parts is None else of_parts.tables(action)
        for part, table in zip(action.passes, tables, strict=True):
            stage = plan.stages[part.stage]
            pass_ = Pass.B if part.kind is ActionKind.I else Pass(str(part.kind))
            graph = chunk_graph(model, table, stage.start, stage.stop, pass_, with_w=part.kind is not ActionKind.I)
            for task in graph.tasks:
                tasks[part.stage, part.microbatch, task.name] = task
    return tasks


def _where(span: Span) -> str:
    return f"rank {span.rank}, {span.name} of stage {span.stage}, micro-batch {span.microbatch}"


def _spans(timeline: Timeline, plan: Plan, tasks: dict[_Place, Task]) -> Iterator[Problem]:
    """Every task once, where it belongs, with an end that is not before its start."""
    if timeline.ranks != plan.mesh.pp:
        yield Problem("ranks", timeline.ranks, f"{plan.mesh.pp}, as in the plan")
    times: Counter[_Place] = Counter()
    for span in timeline.spans:
        if span.start_ns < 0 or span.end_ns < span.start_ns:
            yield Problem(
                _where(span), f"{span.start_ns} to {span.end_ns}", "a time from 0 on that does not run backwards"
            )
        if not 0 <= span.stage < len(plan.stages) or span.rank != plan.stages[span.stage].rank:
            yield Problem(_where(span), f"rank {span.rank}", "on the rank of its stage")
        if span.lane == "LINK":
            continue
        place = (span.stage, span.microbatch, span.name)
        times[place] += 1
        if place not in tasks:
            yield Problem(_where(span), span.name, "a task of the plan")
        elif span.lane != tasks[place].resource:
            yield Problem(_where(span), f"lane {span.lane}", f"lane {tasks[place].resource}")
    for (stage, microbatch, name), task in tasks.items():
        number = times[stage, microbatch, name]
        if number != 1:
            field = f"rank {plan.stages[stage].rank}, {task.name} of stage {stage}, micro-batch {microbatch}"
            yield Problem(field, f"{number} spans", "exactly one")


def _lanes(timeline: Timeline) -> Iterator[Problem]:
    for rank in range(timeline.ranks):
        for lane in Resource:
            for first, second in pairwise(timeline.of(rank, lane)):
                if second.start_ns < first.end_ns:
                    allowed = f"at or after {first.end_ns}, when {first.name} of micro-batch {first.microbatch} ends"
                    yield Problem(f"{_where(second)}: start_ns", second.start_ns, f"{allowed} on lane {lane}")


def _needs(found: dict[_Place, Span], tasks: dict[_Place, Task]) -> Iterator[Problem]:
    for (stage, microbatch, name), task in tasks.items():
        span = found[stage, microbatch, name]
        needs = task.deps if task.pass_ is not Pass.W else (f"B{name[1:]}",)
        for need in needs:
            end = found[stage, microbatch, need].end_ns
            if span.start_ns < end:
                allowed = f"at or after {end}, when {need} ends"
                yield Problem(f"{_where(span)}: start_ns", span.start_ns, allowed)


def _inputs(timeline: Timeline, found: dict[_Place, Span], plan: Plan) -> Iterator[Problem]:
    """Passes after the passes, and messages, whose output they take; empty stages hand on what they get."""
    extent: dict[tuple[int, int, str], tuple[Span, int]] = {}
    for (stage, microbatch, name), span in found.items():
        if name[0] != "W":
            first, end = extent.get((stage, microbatch, name[0]), (span, 0))
            first = min(first, span, key=lambda s: s.start_ns)
            extent[stage, microbatch, name[0]] = (first, max(end, span.end_ns))
    arrivals = {(s.stage, s.microbatch, s.name[-1]): s for s in timeline.spans if s.lane == "LINK"}
    for (stage, microbatch, letter), (first, _) in extent.items():
        field = f"{_where(first)}: start_ns"
        if letter == "B" and (own := extent.get((stage, microbatch, "F"))) and first.start_ns < own[1]:
            yield Problem(field, first.start_ns, f"at or after {own[1]}, when the forward of the same micro-batch ends")
        neighbour = stage + (-1 if letter == "F" else 1)
        if not 0 <= neighbour < len(plan.stages):
            continue
        if plan.stages[neighbour].rank != plan.stages[stage].rank:
            message = arrivals.get((neighbour, microbatch, letter))
            if message is None:
                yield Problem(field, first.start_ns, f"behind a SEND_{letter} from stage {neighbour}, which is missing")
            elif first.start_ns < message.end_ns:
                yield Problem(field, first.start_ns, f"at or after {message.end_ns}, when its input arrives")
        elif (other := extent.get((neighbour, microbatch, letter))) and first.start_ns < other[1]:
            yield Problem(field, first.start_ns, f"at or after {other[1]}, when stage {neighbour} ends")
    for (stage, microbatch, letter), message in arrivals.items():
        made = extent.get((stage, microbatch, letter))
        if made is not None and message.start_ns < made[1]:
            yield Problem(
                f"{_where(message)}: start_ns", message.start_ns, f"at or after {made[1]}, when its pass ends"
            )


def _durations(found: dict[_Place, Span], tasks: dict[_Place, Task], costs: CostTable) -> Iterator[Problem]:
    for place, task in tasks.items():
        span = found[place]
        length = span.end_ns - span.start_ns
        most = (
            task.ns
            if task.resource is Resource.COMM
            else round(task.ns * (1 + costs.contention)) + (costs.contention > 0)
        )
        if not task.ns <= length <= most:
            allowed = f"{task.ns}, as its cost" if most == task.ns else f"{task.ns} to {most}, its cost and contention"
            yield Problem(f"{_where(span)}: duration", length, allowed)


def _messages(timeline: Timeline, plan: Plan, model: ModelSpec, costs: CostTable) -> Iterator[Problem]:
    """Each takes its bytes and the latency, and leaves when the one before has left its edge."""
    by_edge: dict[tuple[int, int], list[tuple[Span, int]]] = {}
    for span in timeline.spans:
        if span.lane != "LINK":
            continue
        target = span.stage + (1 if span.name == "SEND_F" else -1)
        boundary = min(span.stage, target)
        stops = [s.stop for s in plan.stages[: boundary + 1] if s.stop > s.start]
        size = costs.memory[model.items[stops[-1] - 1].label].output if stops else 0
        occupied = costs.link.occupancy_ns(size)
        if span.end_ns - span.start_ns != occupied + costs.link.latency_ns:
            allowed = f"{occupied} ns for {size} bytes, and {costs.link.latency_ns} ns latency"
            yield Problem(f"{_where(span)}: duration", span.end_ns - span.start_ns, allowed)
        by_edge.setdefault((span.rank, plan.stages[target].rank), []).append((span, occupied))
    for sent in by_edge.values():
        sent.sort(key=lambda entry: (entry[0].start_ns, entry[0].end_ns))
        for (first, occupied), (second, _) in pairwise(sent):
            if second.start_ns < first.start_ns + occupied:
                allowed = f"at or after {first.start_ns + occupied}, when the message before has left"
                yield Problem(f"{_where(second)}: start_ns", second.start_ns, allowed)
