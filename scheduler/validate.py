"""Checks that every schedule passes before anything uses it: one action's interleaving, and a template's order.

They share no code with what builds schedules, and report all problems of a schedule at once.
"""

from __future__ import annotations

from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.plan import Action, ActionKind, Interleaving
from tessera_rt.scheduler.templates import Template
from tessera_rt.tasks import Resource, TaskGraph


def validate(interleaving: Interleaving, graph: TaskGraph) -> None:
    """Raises ScheduleError with all problems unless the interleaving is a correct schedule of the graph.

    Order: every task once, behind its dependencies. Times: no task starts before its dependencies end; on each lane the
    tasks follow one another in the listed order without overlap; the makespan is the last end.
    """
    problems: list[Problem] = []
    where = f"interleaving {interleaving.key}"
    names = set(graph.names)
    seen: set[str] = set()
    for name in interleaving.order:
        if name not in names:
            problems.append(Problem("order", name, "a task of the action"))
        elif name in seen:
            problems.append(Problem("order", name, "named once"))
        seen.add(name)
    problems += [Problem("order", None, f"complete: {name} is missing") for name in graph.names if name not in seen]
    if len(interleaving.starts_ns) != len(interleaving.order):
        allowed = f"one start per task ({len(interleaving.order)})"
        problems.append(Problem("starts_ns", len(interleaving.starts_ns), allowed))
    if problems:
        raise ScheduleError.of(where, problems)  # without a full order the times mean nothing

    place = {name: i for i, name in enumerate(interleaving.order)}
    start = dict(zip(interleaving.order, interleaving.starts_ns, strict=True))
    end = {name: start[name] + graph.by_name[name].ns for name in interleaving.order}
    before: dict[Resource, str] = {}
    for name in interleaving.order:
        task = graph.by_name[name]
        if start[name] < 0:
            problems.append(Problem(f"{name}.start", start[name], "0 or later"))
        for dep in task.deps:
            if place[dep] > place[name]:
                problems.append(Problem("order", name, f"behind {dep}, which it depends on"))
            if start[name] < end[dep]:
                problems.append(Problem(f"{name}.start", start[name], f"at least {end[dep]}, the end of {dep}"))
        previous = before.get(task.resource)
        if previous is not None and start[name] < end[previous]:
            allowed = f"at least {end[previous]}, the end of {previous} on lane {task.resource}"
            problems.append(Problem(f"{name}.start", start[name], allowed))
        before[task.resource] = name
    last = max(end.values(), default=0)
    if interleaving.makespan_ns != last:
        problems.append(Problem("makespan_ns", interleaving.makespan_ns, f"{last}, the end of the last task"))
    if problems:
        raise ScheduleError.of(where, problems)


def validate_template(template: Template) -> None:
    """Raises ScheduleError with all problems unless the template's order can be executed whatever the durations are.

    Every stage runs one forward and one full backward (``B``, or ``I`` and later ``W``) of every micro-batch, on its
    own rank. The passes of an overlap belong to different micro-batches. And the order ends: with each action taking
    all its inputs before it starts and giving its outputs only when it is done, which is the strictest any
    interleaving can be, no rank waits for ever.
    """
    problems: list[Problem] = []
    where = f"template {template.name}"
    if len(template.stage_ranks) != template.pp * template.vpp:
        allowed = f"one rank for each of {template.pp * template.vpp} stages"
        problems.append(Problem("stage_ranks", template.stage_ranks, allowed))
    if len(template.actions) != template.pp:
        problems.append(Problem("actions", len(template.actions), f"one list for each of {template.pp} ranks"))
    for rank in range(template.pp):
        held = template.stage_ranks.count(rank)
        if held != template.vpp:
            problems.append(Problem("stage_ranks", held, f"{template.vpp} stages on rank {rank}"))
    if problems:
        raise ScheduleError.of(where, problems)
    problems = _pass_problems(template)
    if not problems:
        problems = _deadlocks(template)
    if problems:
        raise ScheduleError.of(where, problems)


def _pass_problems(template: Template) -> list[Problem]:
    problems: list[Problem] = []
    runs: dict[tuple[int, int, ActionKind], int] = {}
    for rank, actions in enumerate(template.actions):
        for action in actions:
            if len({part.microbatch for part in action.passes}) != len(action.passes):
                problems.append(Problem(f"rank {rank}", str(action), "an overlap of different micro-batches"))
            for part in action.passes:
                if not (0 <= part.stage < len(template.stage_ranks) and 0 <= part.microbatch < template.microbatches):
                    problems.append(Problem(f"rank {rank}", str(action), "of a stage and a micro-batch that exist"))
                elif part.kind not in (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W):
                    problems.append(Problem(f"rank {rank}", str(action), "a compute action (F, B, I, W)"))
                else:
                    if template.stage_ranks[part.stage] != rank:
                        allowed = f"on rank {template.stage_ranks[part.stage]}, where stage {part.stage} is"
                        problems.append(Problem(f"rank {rank}", str(action), allowed))
                    key = (part.stage, part.microbatch, part.kind)
                    runs[key] = runs.get(key, 0) + 1
    for stage in range(len(template.stage_ranks)):
        for mb in range(template.microbatches):
            f, b, i, w = (
                runs.get((stage, mb, kind), 0) for kind in (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)
            )
            if f != 1:
                problems.append(Problem(f"{stage}F{mb}", f, "run once"))
            if (b, i, w) not in ((1, 0, 0), (0, 1, 1)):
                text = f"B {b}, I {i}, W {w} times"
                problems.append(Problem(f"{stage}B{mb}", text, "one B, or one I and one W"))
    return problems


def _deadlocks(template: Template) -> list[Problem]:
    """Runs all ranks action by action; one problem for each rank that is stuck in the end."""
    last = len(template.stage_ranks) - 1
    done: set[tuple[int, str, int]] = set()

    def missing(part: Action) -> str:
        """The first pass that ``part`` waits for, or an empty text."""
        stage, mb = part.stage, part.microbatch
        needs: list[tuple[int, str, int]] = []
        if part.kind is ActionKind.F:
            needs += [(stage - 1, "F", mb)] if stage else []
        elif part.kind is ActionKind.W:
            needs.append((stage, "I", mb))
        else:
            needs.append((stage, "F", mb))
            needs += [(stage + 1, "I", mb)] if stage < last else []
        return next((f"{s}{'B' if kind == 'I' else kind}{m}" for s, kind, m in needs if (s, kind, m) not in done), "")

    position = [0] * template.pp
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(template.actions):
            while position[rank] < len(actions) and not any(map(missing, actions[position[rank]].passes)):
                for part in actions[position[rank]].passes:
                    # B gives the same output as I
                    done.add((part.stage, "I" if part.kind is ActionKind.B else str(part.kind), part.microbatch))
                position[rank] += 1
                moved = True
    problems = []
    for rank, actions in enumerate(template.actions):
        if position[rank] < len(actions):
            action = actions[position[rank]]
            waited = next(filter(None, map(missing, action.passes)))
            problems.append(
                Problem(f"rank {rank}", str(action), f"runnable in this order: it waits for {waited} for ever")
            )
    return problems
