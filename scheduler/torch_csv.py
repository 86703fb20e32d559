"""Actions as the CSV files of torch.distributed.pipelining, both ways. Nothing here imports torch.

A file has one row per pipeline rank and one cell per action, in torch's own notation. torch knows two formats:
``compute_only`` (F, B, I, W and overlap pairs) and ``compute_comms`` (with the SEND and RECV of every message, as its
own lowering places them). What of a plan does not fit into either, the interleaving of its pairs, is left out: torch
runs the passes of a pair one after the other.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

from tessera_rt.errors import PlanError, Problem, ScheduleError
from tessera_rt.plan import Action, ActionKind, Plan
from tessera_rt.scheduler.templates import Template
from tessera_rt.scheduler.validate import validate_template

_SHARDING = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")
"""torch's actions for FSDP and gradient reduction: the engine does these by itself."""
_COMPUTE = (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W, ActionKind.OVERLAP)
_BACKWARD = (ActionKind.B, ActionKind.I)

Rows = tuple[tuple[Action, ...], ...]


def plan_to_csv(plan: Plan, *, comms: bool = False) -> str:
    """The action lists of a plan; ``comms``: with messages (torch's format ``compute_comms``).

    Raises PlanError for a plan that can only be simulated, naming what in it.
    """
    if plan.simulate_only:
        remedy = "this feature can only be simulated; plan without it"
        raise PlanError.of(
            "CSV export",
            [Problem("simulate_only", name, "empty for a plan that is run", remedy) for name in plan.simulate_only],
        )
    rows = plan.actions
    if comms:
        rows = add_send_recv(rows, [stage.rank for stage in plan.stages])
    return actions_to_csv(rows)


def actions_to_csv(rows: Sequence[Sequence[Action]]) -> str:
    """One row per rank, one cell per action."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def actions_from_csv(text: str, where: str = "CSV") -> Rows:
    """The compute actions of a CSV in either format. Empty cells, messages and torch's sharding actions are left out.

    Raises PlanError with every cell that is no action.
    """
    problems: list[Problem] = []
    rows: list[tuple[Action, ...]] = []
    for number, cells in enumerate(csv.reader(io.StringIO(text))):
        row: list[Action] = []
        for column, cell in enumerate(cells):
            if not cell.strip() or _SHARDING.fullmatch(cell.strip()):
                continue
            try:
                action = Action.parse(cell)
            except PlanError as error:
                allowed = error.problems[0].allowed
                problems.append(Problem(f"row {number + 1}, column {column + 1}", cell, allowed))
                continue
            if action.kind in _COMPUTE:
                row.append(action)
        rows.append(tuple(row))
    if problems:
        raise PlanError.of(where, problems)
    return tuple(rows)


def template_from_csv(text: str, name: str = "csv") -> Template:
    """A CSV in either format as a template: sizes and the place of every stage are read off its actions.

    Raises PlanError for cells that are no actions, ScheduleError for an order that is incomplete, does not end, or
    leaves ranks with different numbers of stages.
    """
    rows = actions_from_csv(text, name)
    owners: dict[int, set[int]] = {}
    microbatches = 0
    for rank, row in enumerate(rows):
        for action in row:
            for part in action.passes:
                owners.setdefault(part.stage, set()).add(rank)
                microbatches = max(microbatches, part.microbatch + 1)
    stages = max(owners, default=-1) + 1
    problems = [
        Problem(f"stage {stage}", sorted(owners.get(stage, ())), "on one rank")
        for stage in range(stages)
        if len(owners.get(stage, ())) != 1
    ]
    if not stages:
        problems.append(Problem("rows", len(rows), "at least one rank with at least one action"))
    elif stages % len(rows):
        problems.append(Problem("stages", stages, f"as many on each of the {len(rows)} ranks"))
    if problems:
        raise ScheduleError.of(name, problems)
    template = Template(
        name=name,
        pp=len(rows),
        vpp=stages // len(rows),
        microbatches=microbatches,
        stage_ranks=tuple(next(iter(owners[stage])) for stage in range(stages)),
        actions=rows,
        joint=any(action.parts for row in rows for action in row),
        pad="groups",
        shadows=0,
    )
    validate_template(template)
    return template


def add_send_recv(rows: Sequence[Sequence[Action]], stage_ranks: Sequence[int]) -> Rows:
    """The lists with the SEND and RECV of every message, where torch's lowering places them.

    Ranks take turns, one action at a time. Behind an action come the SENDs of its passes, and with each of them the
    RECV at the then end of the receiver's list: so the receiver posts it before any action that waits for it. Raises
    ScheduleError when ranks wait for each other for ever.
    """
    ahead = [list(row) for row in rows]
    lowered: list[list[Action]] = [[] for _ in rows]
    here: list[set[Action]] = [set() for _ in rows]  # what each rank has done and received
    moved = True
    while moved:
        moved = False
        for rank, waiting in enumerate(ahead):
            if not waiting or not all(_has_input(part, stage_ranks, here[rank]) for part in waiting[0].passes):
                continue
            action = waiting.pop(0)
            moved = True
            lowered[rank].append(action)
            for part in action.passes:
                here[rank].add(part)
                message = _message(part, stage_ranks)
                if message is not None:
                    send, recv = message
                    target = stage_ranks[recv.stage]
                    lowered[rank].append(send)
                    lowered[target].append(recv)
                    here[target].add(recv)
    problems = [
        Problem(f"rank {rank}", str(waiting[0]), "reached by its inputs", "the order has a deadlock")
        for rank, waiting in enumerate(ahead)
        if waiting
    ]
    if problems:
        raise ScheduleError.of("send and receive", problems)
    return tuple(map(tuple, lowered))


def _message(part: Action, stage_ranks: Sequence[int]) -> tuple[Action, Action] | None:
    """SEND and RECV of the pass's output, None where it stays on the rank or ends."""
    if part.kind is ActionKind.W:
        return None
    forward = part.kind is ActionKind.F
    target = part.stage + (1 if forward else -1)
    if not 0 <= target < len(stage_ranks) or stage_ranks[target] == stage_ranks[part.stage]:
        return None
    send, recv = (ActionKind.SEND_F, ActionKind.RECV_F) if forward else (ActionKind.SEND_B, ActionKind.RECV_B)
    return Action(send, part.stage, part.microbatch), Action(recv, target, part.microbatch)


def _has_input(part: Action, stage_ranks: Sequence[int], here: set[Action]) -> bool:
    """Whether the pass's input was received, or made on the rank itself."""
    stage, mb = part.stage, part.microbatch
    if part.kind is ActionKind.F:
        return stage == 0 or not here.isdisjoint(
            {Action(ActionKind.RECV_F, stage, mb), Action(ActionKind.F, stage - 1, mb)}
        )
    if part.kind in _BACKWARD:
        made = {Action(kind, stage + 1, mb) for kind in _BACKWARD}
        return stage == len(stage_ranks) - 1 or not here.isdisjoint({Action(ActionKind.RECV_B, stage, mb), *made})
    return True
