"""Memory of every rank over a step: the planner's account, moment by moment, laid over a timeline.

A rank's moments are its actions. From when an action's first task starts until the next action's first task starts, the
rank holds what ``memory.py`` counts for it; of an action with passes of two stages, whichever of them computes needs
more. So the highest point is the plan's memory, by construction; a test holds them together.
"""

from __future__ import annotations

from tessera_rt.costs import CostTable
from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Plan, RankMemory
from tessera_rt.planner.in_flight import stages_on, walk
from tessera_rt.planner.memory import MemoryModel
from tessera_rt.scheduler.templates import Template
from tessera_rt.timeline import MemorySeries, Timeline

PARTS = ("weights", "gradients", "optimizer", "activations", "pending_w", "buffers")


def template_of(plan: Plan) -> Template:
    """The order of a plan."""
    return Template(
        name=plan.template,
        pp=plan.mesh.pp,
        vpp=plan.mesh.vpp,
        microbatches=plan.passes,
        stage_ranks=tuple(stage.rank for stage in plan.stages),
        actions=plan.actions,
        joint=any(action.parts for row in plan.actions for action in row),
        pad=plan.pad,
        shadows=plan.shadows,
    )


def memory_series(plan: Plan, model: ModelSpec, costs: CostTable, timeline: Timeline) -> tuple[MemorySeries, ...]:
    """Bytes on every rank over the timeline of ``plan``, which must hold all of its passes.

    Raises ScheduleError for a timeline of something else.
    """
    memory = MemoryModel(model, costs, template_of(plan))
    bounds = (*(stage.start for stage in plan.stages), plan.stages[-1].stop)
    begins: dict[tuple[int, str, int], int] = {}
    for span in timeline.spans:
        if span.lane != "LINK":
            key = (span.stage, span.name[0], span.microbatch)
            begins[key] = min(begins.get(key, span.start_ns), span.start_ns)
    return tuple(_series(plan, memory, bounds, rank, begins) for rank in range(plan.mesh.pp))


def _series(
    plan: Plan, memory: MemoryModel, bounds: tuple[int, ...], rank: int, begins: dict[tuple[int, str, int], int]
) -> MemorySeries:
    starts: list[int] = []
    moments: list[RankMemory] = []
    now = 0
    last = -1
    for place, state in walk(plan.actions[rank], stages_on(memory.template, rank)):
        found = memory.at(rank, state, bounds)
        if place == last:
            if found.peak > moments[-1].peak:
                moments[-1] = found
            continue
        last = place
        for part in plan.actions[rank][place].passes:
            stage = plan.stages[part.stage]
            letter = "B" if part.kind == "I" else part.kind[0]
            if (part.stage, letter, part.microbatch) not in begins and stage.start < stage.stop and letter != "W":
                allowed = "one with a span for every pass of the plan"
                raise ScheduleError.of("memory", [Problem("timeline", f"without {part}", allowed)])
        known = [
            begins[key]
            for part in plan.actions[rank][place].passes
            if (key := (part.stage, "B" if part.kind == "I" else part.kind[0], part.microbatch)) in begins
        ]
        # Lanes have no barriers: where a collective of the action before is still to start, its moment lasts till then.
        now = max(now, min(known, default=now))
        starts.append(now)
        moments.append(found)
    starts[:1] = [0]
    return MemorySeries(
        rank=rank,
        starts_ns=tuple(starts),
        parts=tuple((part, tuple(getattr(moment, part) for moment in moments)) for part in PARTS),
    )
