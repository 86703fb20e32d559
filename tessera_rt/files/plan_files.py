"""Plan files: YAML that people can read and change, and that gives back exactly the plan it was written from.

Stages name their items (``items: L0..L3``) beside the positions [start, stop) that count; both must agree. Actions
and task orders are texts in the notation of ``plan.py``. A file ends with the line ``...``, so that one that was cut
off is never taken for a shorter plan. Reading checks types, ranges and texts; whether the plan is consistent is for
``check_plan`` to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError

from tessera_rt.costs import Link, Recompute, Workload
from tessera_rt.errors import PlanError, Problem, ScheduleError
from tessera_rt.files.file_checks import StrictModel, part_fault, problems_of, write_atomically
from tessera_rt.files.task_names import expand_names, item_labels, label_range
from tessera_rt.files.yaml_text import Folded, dump_yaml, parse_yaml
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import (
    MOST_ITEMS,
    PLAN_VERSION,
    Action,
    CostAssumptions,
    Interleaving,
    Mesh,
    Plan,
    RankMemory,
    SolverStatus,
    Stage,
)
from tessera_rt.plan_check import action_tasks, check_plan

_HEADER = """\
# A plan of Tessera: which rank runs what, in which order.
# Actions: 0F3 is the forward of micro-batch 3 on stage 0; B backward, I backward for inputs, W for weights;
# (0F4;3B1)OVERLAP_F_B runs two passes together, their tasks in the order given under interleavings, key 0F;3B.
"""
_END = "..."  # YAML's end of a document
_WIDTH = 100


# -- writing ---------------------------------------------------------------------------------------------------------


def plan_to_yaml(plan: Plan) -> str:
    """The plan as text; ``plan_from_yaml`` reads it back equal. Times in ns, memory in bytes."""
    labels = _labels(plan.stages, plan.interleavings)
    data = {
        "version": plan.version,
        "model": plan.model,
        "fingerprint": plan.fingerprint,
        "mesh": asdict(plan.mesh),
        "template": plan.template,
        "microbatches": plan.microbatches,
        "pad": plan.pad,
        "shadows": plan.shadows,
        "tapered": plan.tapered,
        "workload": {**asdict(plan.workload), "recompute": str(plan.workload.recompute)},
        "assumptions": {
            "source": plan.assumptions.source,
            "device": plan.assumptions.device,
            "comm_sms": plan.assumptions.comm_sms,
            "contention": plan.assumptions.contention,
            "link": asdict(plan.assumptions.link),
            "notes": list(plan.assumptions.notes),
        },
        "solver": _solver_data(plan.solver),
        "stages": [
            {
                "index": stage.index,
                "rank": stage.rank,
                "items": label_range(labels, stage.start, stage.stop),
                "start": stage.start,
                "stop": stage.stop,
                "slots": stage.slots,
            }
            for stage in plan.stages
        ],
        "memory": [{"rank": rank, **asdict(memory)} for rank, memory in enumerate(plan.memory)],
        "target_slots": list(plan.target_slots),
        "simulate_only": list(plan.simulate_only),
        "actions": [
            {"rank": rank, "order": Folded(" ".join(map(str, actions)))} for rank, actions in enumerate(plan.actions)
        ],
        "interleavings": {key: _interleaving_data(entry) for key, entry in plan.interleavings.items()},
    }
    return f"{_HEADER}{dump_yaml(data, width=_WIDTH)}{_END}\n"


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan's file, whole or not at all. Raises PlanError, and writes nothing, for an inconsistent plan."""
    check_plan(plan)
    write_atomically(Path(path), plan_to_yaml(plan))


def _solver_data(solver: SolverStatus) -> dict[str, object]:
    return {
        "objective": solver.objective,
        "method": solver.method,
        "status": solver.status,
        "t_dom_ns": solver.t_dom_ns,
        "bound_ns": solver.bound_ns,
        "step_ns": solver.step_ns,
        "bottleneck": solver.bottleneck,
        "seconds": solver.seconds,
        "alternatives": dict(solver.alternatives),
    }


def _interleaving_data(entry: Interleaving) -> dict[str, object]:
    return {
        "order": Folded(" ".join(entry.order)),
        "starts_ns": list(entry.starts_ns),
        "makespan_ns": entry.makespan_ns,
        "comm_sms": entry.comm_sms,
        "method": entry.method,
        "bound_ns": entry.bound_ns,
    }


def _labels(stages: Sequence[Stage], interleavings: Mapping[str, Interleaving]) -> tuple[str, ...]:
    names = (name for entry in interleavings.values() for name in entry.order)
    return item_labels(max((stage.stop for stage in stages), default=0), names)


# -- reading ---------------------------------------------------------------------------------------------------------

_Count = Annotated[int, Field(ge=0)]
_Positive = Annotated[int, Field(ge=1)]
_NotNegative = Annotated[float, Field(ge=0)]


def _tokens(text: str) -> list[str]:
    return re.findall(r"\([^)]*\)\S*|\S+", text)


def _readable_actions(text: str) -> str:
    wrong: list[str] = []
    for token in _tokens(text):
        try:
            Action.parse(token)
        except PlanError as error:
            allowed = error.problems[0].allowed
            wrong.append(token)
    if wrong:
        raise part_fault(" ".join(wrong), allowed)
    return text


def _all_ranks(entries: list[_Ranked]) -> list[_Ranked]:
    for i, entry in enumerate(entries):
        if entry.rank != i:
            raise part_fault(f"rank {entry.rank} as entry {i}", "one entry per rank, in order from 0")
    return entries


class _Mesh(StrictModel):
    pp: _Positive
    vpp: _Positive
    dp: _Positive
    ep: _Positive
    tp: _Positive


class _Workload(StrictModel):
    tokens: _Positive
    context: _Positive
    dp: _Positive
    ep: _Positive
    tp: _Positive
    dtype: Literal["bf16", "fp16", "fp32", "fp64"]
    recompute: Annotated[Recompute, Field(strict=False)]
    optimizer: Literal["adamw", "sgd"]
    momentum: bool = False
    shard_optimizer: bool
    combine: Literal["rows", "reduced"]


class _Link(StrictModel):
    latency_ns: _Count
    bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=True)]


class _Assumptions(StrictModel):
    source: str
    device: str
    comm_sms: _Count
    contention: _NotNegative
    link: _Link
    notes: list[str]


class _Solver(StrictModel):
    objective: str
    method: str
    status: Literal["optimal", "optimal-in-window", "incumbent", "heuristic"]
    t_dom_ns: _Count
    bound_ns: _Count
    step_ns: _Count
    bottleneck: str
    seconds: _NotNegative
    alternatives: dict[str, _Count]


class _Stage(StrictModel):
    index: _Count
    rank: _Count
    items: str | None = None
    start: _Count
    stop: Annotated[int, Field(ge=0, le=MOST_ITEMS)]
    slots: _Count


class _Ranked(StrictModel):
    rank: _Count


class _Memory(_Ranked):
    weights: _Count
    gradients: _Count
    optimizer: _Count
    activations: _Count
    pending_w: _Count
    buffers: _Count
    limit: _Count


class _Actions(_Ranked):
    order: Annotated[str, AfterValidator(_readable_actions)]


class _Interleaving(StrictModel):
    order: str
    starts_ns: tuple[_Count, ...] = Field((), strict=False)
    makespan_ns: _Count = 0
    comm_sms: _Count = 0
    method: str
    bound_ns: _Count = 0


class _Plan(StrictModel):
    version: int
    model: str
    fingerprint: str
    mesh: _Mesh
    template: str
    microbatches: _Positive
    pad: Literal["groups", "shadow"]
    shadows: _Count
    tapered: _Count = 0
    workload: _Workload
    assumptions: _Assumptions
    solver: _Solver
    stages: list[_Stage]
    memory: Annotated[list[_Memory], AfterValidator(_all_ranks)]
    target_slots: list[str]
    simulate_only: list[str]
    actions: Annotated[list[_Actions], AfterValidator(_all_ranks)]
    interleavings: dict[str, _Interleaving]


def load_plan(path: str | Path, *, model: ModelSpec | None = None) -> Plan:
    """The plan in a file, see ``plan_from_yaml``. Raises PlanError also for a file that cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise PlanError.of(str(path), [Problem("file", str(fault), "a readable file in UTF-8")]) from None
    return plan_from_yaml(text, str(path), model=model)


def plan_from_yaml(text: str, where: str = "plan", *, model: ModelSpec | None = None) -> Plan:
    """The plan that a text describes. ``where`` names the text in errors.

    With ``model``, task orders may use the paper's coarser names (``task_names.py``); such an order has no start times.
    Raises PlanError with all faults: syntax with line and column, else every wrong, missing or unknown field.
    """
    data = parse_yaml(text, where, PlanError)
    if isinstance(data, dict) and isinstance(version := data.get("version"), int) and version != PLAN_VERSION:
        remedy = "make the plan again with this version of Tessera, or read it with the one that wrote it"
        raise PlanError.of(where, [Problem("version", version, str(PLAN_VERSION), remedy)])
    problems: list[Problem] = []
    if text.rstrip().rpartition("\n")[2] != _END:
        last = text.rstrip().rpartition("\n")[2].strip()
        problems.append(Problem("end", last, f"the line {_END}", "the file was cut off; if it is whole, add that line"))
    try:
        read = _Plan.model_validate(data)
    except ValidationError as error:
        raise PlanError.of(where, [*problems_of(error, _Plan), *problems]) from None
    if model is not None and read.fingerprint != model.fingerprint:  # else every order would be a problem of its own
        made_for = f"{read.model}, fingerprint {read.fingerprint[:12]}"
        wanted = f"{model.name}, fingerprint {model.fingerprint[:12]}"
        raise PlanError(f"{where}: made for another model ({made_for}), not for {wanted}")
    plan = _plan(read, model, problems)
    if problems:
        raise PlanError.of(where, problems)
    return plan


def _plan(read: _Plan, model: ModelSpec | None, problems: list[Problem]) -> Plan:
    """The plan of checked fields; appends what is wrong with its texts to ``problems``."""
    stages = tuple(Stage(**stage.model_dump(exclude={"items"})) for stage in read.stages)
    interleavings = {
        key: _interleaving(key, entry, stages, model, read.mesh.tp, problems)
        for key, entry in read.interleavings.items()
    }
    labels = tuple(item.label for item in model.items) if model is not None else _labels(stages, interleavings)
    for i, stage in enumerate(read.stages):
        meant = label_range(labels, stage.start, stage.stop)
        if stage.items not in (None, meant):
            allowed = f"{meant}, which start {stage.start} and stop {stage.stop} mean"
            problems.append(Problem(f"stages[{i}].items", stage.items, allowed, "correct one or the other"))
    assumptions = read.assumptions
    return Plan(
        version=read.version,
        model=read.model,
        fingerprint=read.fingerprint,
        mesh=Mesh(**read.mesh.model_dump()),
        template=read.template,
        microbatches=read.microbatches,
        pad=read.pad,
        shadows=read.shadows,
        tapered=read.tapered,
        workload=Workload(**read.workload.model_dump()),
        assumptions=CostAssumptions(
            source=assumptions.source,
            device=assumptions.device,
            comm_sms=assumptions.comm_sms,
            contention=assumptions.contention,
            link=Link(**assumptions.link.model_dump()),
            notes=tuple(assumptions.notes),
        ),
        solver=SolverStatus(**read.solver.model_dump()),
        stages=stages,
        memory=tuple(RankMemory(**entry.model_dump(exclude={"rank"})) for entry in read.memory),
        target_slots=tuple(read.target_slots),
        simulate_only=tuple(read.simulate_only),
        actions=tuple(tuple(map(Action.parse, _tokens(entry.order))) for entry in read.actions),
        interleavings=interleavings,
    )


def _interleaving(
    key: str, entry: _Interleaving, stages: Sequence[Stage], model: ModelSpec | None, tp: int, problems: list[Problem]
) -> Interleaving:
    order = tuple(entry.order.split())
    if model is not None:
        field = f"interleavings.{key}"
        try:
            expanded = expand_names(order, action_tasks(key, stages, model.items, tp=tp))
        except (PlanError, ScheduleError) as error:
            problems += [
                Problem(f"{field}.order", fault.value, fault.allowed, fault.remedy) for fault in error.problems
            ]
        else:
            if expanded != order and entry.starts_ns:
                allowed = "left out where tasks have coarse names"
                problems.append(Problem(f"{field}.starts_ns", f"{len(entry.starts_ns)} numbers", allowed))
            order = expanded
    return Interleaving(
        key=key,
        order=order,
        starts_ns=entry.starts_ns,
        makespan_ns=entry.makespan_ns,
        comm_sms=entry.comm_sms,
        method=entry.method,
        bound_ns=entry.bound_ns,
    )
