"""StubModel: chunks whose tasks do nothing, for the emulated device. Same task names and data flow as a real model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera_rt.model_spec import Item, ItemKind, ModelSpec
from tessera_rt.moe.steps import (
    Chunk,
    CommStep,
    ComputeStep,
    ParameterInfo,
    Pending,
    Placement,
    Program,
    ReadyPending,
    Seed,
    Step,
)
from tessera_rt.tasks import Pass, Resource, Task, TaskKind, chunk_tasks, task_name


@dataclass(frozen=True)
class StubModel:
    """Implements ``TaskModel`` with empty tensors and no parameters. ``spec`` may hold any kinds, MTP included."""

    spec: ModelSpec

    def build_chunk(self, items: Sequence[Item], placement: Placement) -> Chunk:
        return _StubChunk(_program(items))

    def boundary_shape(self, tokens_shape: tuple[int, int]) -> tuple[int, ...]:
        return (0,)


class _StubChunk(Chunk):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def parameter_infos(self) -> Sequence[ParameterInfo]:
        return ()


def _program(items: Sequence[Item]) -> Program:
    graph = chunk_tasks(items, Pass.F)
    first = "" if items and items[0].kind is ItemKind.EMBED else "x"
    last = "" if items and items[-1].kind is ItemKind.HEAD else (graph.names[-1] if graph.names else first)
    return Program(tuple(_step(task, first) for task in graph.tasks), first, last)


def _step(task: Task, chunk_input: str) -> Step:
    inputs = task.deps or ((chunk_input,) if chunk_input else ())
    if task.resource is Resource.COMM:
        if task.kind is TaskKind.DISP:  # the rows come from ROUTE; the counts only say where they go
            inputs = (task_name(Pass.F, TaskKind.ROUTE, task.label), *task.deps)
        backward = None if task.kind is TaskKind.COUNT else _issue
        return CommStep(task.kind, task.label, _issue, backward, inputs, task.name)
    if task.kind is TaskKind.HEAD:
        seed = Seed("loss", torch.zeros_like, ("loss",), "loss")
        return ComputeStep(task.kind, task.label, _loss, inputs, ("loss",), (seed,))
    return ComputeStep(task.kind, task.label, _touch, inputs, (task.name,))


def _issue(_transport: object, rows: Tensor, *_layout: object) -> Pending:
    return ReadyPending(rows)


def _touch(*inputs: Tensor) -> tuple[Tensor]:
    total = inputs[0] if inputs else torch.zeros(0, requires_grad=True)
    for other in inputs[1:]:
        total = total + other
    return (total * 1.0,)


def _loss(*inputs: Tensor) -> tuple[Tensor]:
    return (_touch(*inputs)[0].sum(),)
