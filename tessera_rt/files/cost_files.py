"""Cost table files: YAML that people can read and write, and that gives back exactly the table it was written from.

Tasks and memory stand under their item, so ``F_ATTN`` under ``L3`` is ``F_ATTN:L3``; a task is its ns, or a mapping.
A file made by hand needs ``items`` only::

    items:
      EMBED: {tasks: {F_EMBED: 0, B_EMBED: 0}}
      L0:
        tasks: {F_ATTN: 1000, F_MLP: 2000, B_MLP: 2000, W_MLP: 2000, B_ATTN: 1000, W_ATTN: 1000}
        memory: {weights: 4096, activations: 1024}
      HEAD: {tasks: {F_HEAD: 500, B_HEAD: 500, W_HEAD: 500}}

Saved files begin with ``version`` and end with the line ``...``: one with the first but not the last was cut off.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from tessera_rt.costs import CostTable, ItemMemory, Link, Provenance, Recompute, TaskCost, Workload
from tessera_rt.errors import CostError, Problem, ScheduleError
from tessera_rt.files.file_checks import StrictModel, problems_of, write_atomically
from tessera_rt.files.yaml_text import dump_yaml, parse_yaml
from tessera_rt.model_spec import ModelSpec
from tessera_rt.tasks import Pass, TaskKind, chunk_tasks, parse_task_name, task_name

COSTS_VERSION: Literal[1] = 1
_HEADER = "# Costs for Tessera. Times in ns, memory and payloads in bytes on one rank.\n"
_END = "..."  # YAML's end of a document
_NO_WORKLOAD = "the file states no workload: tokens and context are given as 1"
_LABEL = re.compile(r"EMBED|HEAD|[LM](0|[1-9][0-9]*)")
_OWN_KINDS: Mapping[str, set[TaskKind]] = {
    "EMBED": {TaskKind.EMBED, TaskKind.TP},
    "HEAD": {TaskKind.HEAD, TaskKind.TP_IN},
}
_LAYER_KINDS = set(TaskKind) - {TaskKind.EMBED, TaskKind.HEAD}

_Count = Annotated[int, Field(ge=0)]
_Positive = Annotated[int, Field(ge=1)]
_NotNegative = Annotated[float, Field(ge=0)]


class _Task(StrictModel):
    ns: _Count
    bytes: _Count = 0
    flops: _Count = 0
    spread: _NotNegative = 0.0
    samples: _Count = 0


class _Memory(StrictModel):
    weights: _Count = 0
    gradients: _Count = 0
    optimizer: _Count = 0
    activations: _Count = 0
    pending_w: _Count = 0
    transient: _Count = 0
    output: _Count = 0


class _Item(StrictModel):
    memory: _Memory = _Memory()
    tasks: dict[str, _Task] = Field(default_factory=dict)


class _Workload(StrictModel):
    tokens: _Positive
    context: _Positive
    dp: _Positive = 1
    ep: _Positive = 1
    tp: _Positive = 1
    dtype: Literal["bf16", "fp16", "fp32", "fp64"] = "bf16"
    recompute: Annotated[Recompute, Field(strict=False)] = Recompute.NONE
    optimizer: Literal["adamw", "sgd"] = "adamw"
    momentum: bool = False
    shard_optimizer: bool = True
    combine: Literal["rows", "reduced"] = "rows"


class _Provenance(StrictModel):
    source: str = "table"
    device: str = ""
    versions: str = ""
    notes: list[str] = Field(default_factory=list)


class _Link(StrictModel):
    latency_ns: _Count = 0
    bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=True)] = float("inf")


class _File(StrictModel):
    version: Literal[1] = COSTS_VERSION
    fingerprint: str = ""
    workload: _Workload = _Workload(tokens=1, context=1)
    provenance: _Provenance = _Provenance()
    link: _Link = _Link()
    contention: _NotNegative = 0.0
    comm_sms: _Count = 0
    pairs: dict[str, _Count] = Field(default_factory=dict)
    items: dict[str, _Item]


def cost_table_to_yaml(costs: CostTable) -> str:
    """The table as text; ``cost_table_from_yaml`` reads it back equal. Zeros that are defaults are left out."""
    items: dict[str, dict[str, Any]] = {
        label: {"memory": _set_fields(memory)} for label, memory in costs.memory.items()
    }
    for name, cost in costs.tasks.items():
        pass_, kind, label = parse_task_name(name)
        values = _set_fields(cost)
        item = items.setdefault(label, {})
        item.setdefault("tasks", {})[f"{pass_}_{kind}"] = (
            cost.ns if values.keys() <= {"ns"} else {"ns": cost.ns, **values}
        )
    data = {
        "version": COSTS_VERSION,
        "fingerprint": costs.fingerprint,
        "workload": {**asdict(costs.workload), "recompute": str(costs.workload.recompute)},
        "provenance": {**asdict(costs.provenance), "notes": list(costs.provenance.notes)},
        "link": asdict(costs.link),
        "contention": costs.contention,
        "comm_sms": costs.comm_sms,
        "pairs": dict(costs.pairs),
        "items": items,
    }
    return f"{_HEADER}{dump_yaml(data)}{_END}\n"


def save_cost_table(costs: CostTable, path: str | Path) -> None:
    """Write the table's file, whole or not at all."""
    write_atomically(Path(path), cost_table_to_yaml(costs))


def load_cost_table(path: str | Path, *, model: ModelSpec | None = None) -> CostTable:
    """The table in a file; with ``model``, it must be that model's. Raises CostError with every problem."""
    path = Path(path)
    if not path.is_file():
        raise CostError.of(str(path), [Problem("file", str(path), "a cost table file that exists")])
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise CostError.of(str(path), [Problem("file", str(fault), "a text file that can be read")]) from None
    return cost_table_from_yaml(text, str(path), model=model)


def cost_table_from_yaml(text: str, where: str = "cost table", *, model: ModelSpec | None = None) -> CostTable:
    """The table described by YAML text.

    With ``model``: the fingerprint (if the file states one) and all task names must be the model's, every task must
    have a cost, and a file without a fingerprint gets the model's. Raises CostError with every problem of ``where``.
    """
    data = parse_yaml(text, where, CostError)
    if isinstance(data, dict) and "version" in data and text.rstrip().rpartition("\n")[2] != _END:
        problem = Problem("file", text.rstrip().rpartition("\n")[2], f"ended by the line {_END}", "it was cut off")
        raise CostError.of(where, [problem])
    file: _File | None = None
    problems: list[Problem] = []
    try:
        file = _File.model_validate(_spelled_out(data))
    except ValidationError as error:
        problems += problems_of(error, _File)
    # Names are judged even where figures are wrong, so that one run shows all there is to mend.
    problems += _name_problems(data, model)
    if file and model and file.fingerprint not in ("", model.fingerprint):
        allowed = f"{model.fingerprint}, that of {model.name}"
        problems.append(Problem("fingerprint", file.fingerprint, allowed, "compute or measure costs for this model"))
    if problems:
        raise CostError.of(where, problems)
    assert file is not None
    labels = [item.label for item in model.items] if model else list(file.items)
    notes = file.provenance.notes if "workload" in file.model_fields_set else [*file.provenance.notes, _NO_WORKLOAD]
    return CostTable(
        fingerprint=file.fingerprint or (model.fingerprint if model else ""),
        workload=Workload(**file.workload.model_dump()),
        provenance=Provenance(**{**file.provenance.model_dump(), "notes": tuple(notes)}),
        tasks={name: TaskCost(**cost.model_dump()) for name, cost in _named_tasks(file.items)},
        memory={label: ItemMemory(**file.items.get(label, _Item()).memory.model_dump()) for label in labels},
        link=Link(**file.link.model_dump()),
        contention=file.contention,
        comm_sms=file.comm_sms,
        pairs=file.pairs,
    )


def _set_fields(value: ItemMemory | TaskCost) -> dict[str, Any]:
    """The fields that are not at their default."""
    return {
        field.name: getattr(value, field.name) for field in fields(value) if getattr(value, field.name) != field.default
    }


def _spelled_out(data: object) -> object:
    """A copy in which a task given as a number is the mapping {ns: number}."""
    if not isinstance(data, dict) or not isinstance(data.get("items"), dict):
        return data
    items = {}
    for label, item in data["items"].items():
        if isinstance(item, dict) and isinstance(item.get("tasks"), dict):
            tasks = {name: cost if isinstance(cost, dict) else {"ns": cost} for name, cost in item["tasks"].items()}
            item = {**item, "tasks": tasks}
        items[label] = item
    return {**data, "items": items}


def _named_tasks(items: Mapping[str, _Item]) -> Iterator[tuple[str, _Task]]:
    for label, item in items.items():
        for name, cost in item.tasks.items():
            pass_, kind, _ = parse_task_name(name)
            yield task_name(pass_, kind, label), cost


def _name_problems(data: object, model: ModelSpec | None) -> Iterator[Problem]:
    """Labels and task names that do not exist, and with ``model`` those that it lacks or that are missing."""
    items = data.get("items") if isinstance(data, dict) else None
    if not isinstance(items, dict):
        return
    workload = data.get("workload") if isinstance(data, dict) else None
    tp = workload.get("tp", 1) if isinstance(workload, dict) else 1
    known = (
        {
            item.label: {task.name for p in (Pass.F, Pass.B) for task in chunk_tasks([item], p, tp=tp).tasks}
            for item in model.items
        }
        if model
        else {}
    )
    found: set[str] = set()
    for label, item in items.items():
        if model and label not in known:
            yield Problem(f"items.{label}", label, f"an item of {model.name}: {', '.join(_few(list(known)))}")
            continue
        if not isinstance(label, str) or not _LABEL.fullmatch(label):
            yield Problem(f"items.{label}", label, "EMBED, L0, L1, ..., M0, ..., or HEAD")
            continue
        tasks = item.get("tasks") if isinstance(item, dict) else None
        for name in tasks if isinstance(tasks, dict) else ():
            try:
                pass_, kind, _ = parse_task_name(str(name))
                fits = ":" not in str(name) and kind in _OWN_KINDS.get(label, _LAYER_KINDS)
            except ScheduleError:
                fits = False
            if not fits:
                yield Problem(f"items.{label}.tasks.{name}", name, f"a task of {label}, such as {_example(label)}")
                continue
            full = task_name(pass_, kind, label)
            found.add(full)
            if model and full not in known[label]:
                yield Problem(f"items.{label}.tasks.{name}", name, f"one of {_short(known[label])}")
    for label, names in known.items():
        if missing := sorted(names - found):
            yield Problem(f"items.{label}.tasks", _short(names & found) or None, "complete", f"add {_short(missing)}")


def _example(label: str) -> str:
    return f"F_{label}" if label in _OWN_KINDS else "F_ATTN"


def _short(names: Any) -> str:
    """Task names without their label."""
    return ", ".join(sorted(name.partition(":")[0] for name in names))


def _few(labels: list[str]) -> list[str]:
    return labels if len(labels) <= 8 else [*labels[:3], "...", *labels[-2:]]
