"""What overlaps: the event log by sequence, and a transport that delivers only when it is waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera_rt.costs import Workload
from tessera_rt.engine.batch import Batch
from tessera_rt.engine.engine import Engine
from tessera_rt.engine.events import Event, EventKind, TaskRef, comm_tasks, overlapped_collectives
from tessera_rt.errors import TransportError
from tessera_rt.model_spec import ModelSpec
from tessera_rt.models.hybrid import HybridModel
from tessera_rt.moe.steps import Pending, RowLayout, Transport
from tessera_rt.plan import Mesh, Plan
from tessera_rt.planner.build import plan_with
from tessera_rt.tasks import Pass, Resource, chunk_tasks, parse_task_name
from tessera_rt.testing.hybrids import random_costs, tiny_hybrid, token_batch
from tessera_rt.testing.late_transport import LateTransport
from tessera_rt.testing.worker import RankContext
from tessera_rt.testing.worker_pool import WorkerPool

SHAPES = [(2, 5), (1, 7), (2, 3), (1, 4), (2, 6)]


def make_plan(
    spec: ModelSpec, mesh: Mesh, cuts: Sequence[int], seed: int = 0, *, microbatches: int = len(SHAPES)
) -> Plan:
    costs = random_costs(spec, Workload(tokens=8, context=8, dp=mesh.dp, ep=mesh.ep, dtype="fp64"), seed=seed)
    return plan_with(cuts, spec, mesh, costs, microbatches=microbatches)


def own_batch(ctx: RankContext, spec: ModelSpec, plan: Plan) -> Batch:
    return [*token_batch(spec, SHAPES[: plan.microbatches], seed=ctx.rank % plan.mesh.ep)]


def logged(ctx: RankContext, spec: ModelSpec, plan: Plan, overlap: bool) -> tuple[Event, ...]:
    with Engine(HybridModel(spec), plan, overlap=overlap, timeout_s=60) as engine:
        engine.forward_backward(own_batch(ctx, spec, plan))
        return engine.events()


def planned_overlaps(plan: Plan, spec: ModelSpec, rank: int) -> dict[TaskRef, set[TaskRef]]:
    """For each collective: the compute tasks that the plan puts before the first task that needs its output."""
    found: dict[TaskRef, set[TaskRef]] = {}
    for action in plan.actions[rank]:
        order = plan.interleavings[action.key].order
        owner = {letter: part for part in action.passes for letter in ("F" if part.kind == "F" else "BW")}
        for position, name in enumerate(order):
            part = owner[name[0]]
            if parse_task_name(name)[1].resource is not Resource.COMM:
                continue
            stage = plan.stages[part.stage]
            graph = chunk_tasks(spec.items[stage.start : stage.stop], Pass.F if name[0] == "F" else Pass.B)
            readers = {task.name for task in graph.tasks if name in task.deps}
            between: set[TaskRef] = set()
            for later in order[position + 1 :]:
                if later in readers:
                    break
                if parse_task_name(later)[1].resource is Resource.COMP:
                    between.add(TaskRef(later, owner[later[0]].stage, owner[later[0]].microbatch))
            found[TaskRef(name, part.stage, part.microbatch)] = between
    return found


@pytest.mark.parametrize(
    ("layers", "mesh", "cuts"),
    [
        ("GSgs", Mesh(pp=1, ep=2), (0, 6)),
        ("GSgs", Mesh(pp=2, ep=2), (0, 2, 6)),
        ("GdSsdg", Mesh(pp=2, vpp=2, ep=2), (0, 2, 3, 6, 8)),
    ],
)
def test_compute_runs_between_issue_and_wait_of_every_collective_that_the_plan_overlaps(
    pool: WorkerPool, layers: str, mesh: Mesh, cuts: Sequence[int]
) -> None:
    spec = tiny_hybrid(layers)
    plan = make_plan(spec, mesh, cuts)
    logs = pool.run(logged, mesh.world, spec, plan, True)
    for rank, events in enumerate(logs):
        actions = plan.actions[mesh.coordinate(rank)[0]]
        planned = planned_overlaps(plan, spec, mesh.coordinate(rank)[0])
        executed = overlapped_collectives(events)
        assert set(executed) == set(planned)
        for collective, tasks in planned.items():
            assert set(executed[collective]) == tasks, collective
        pairs = [{(part.stage, part.microbatch) for part in action.parts} for action in actions if action.parts]
        assert pairs, "this plan pairs nothing: the test would show nothing"
        rows = {c: tasks for c, tasks in planned.items() if tasks and ("DISP" in c.name or "COMB" in c.name)}
        assert rows, "this plan overlaps nothing: the test would show nothing"
        of_pairs = [(c, t, pair) for c, tasks in rows.items() for t in tasks for pair in pairs]
        mixed = [
            (c, t)
            for c, t, pair in of_pairs
            if (c.stage, c.microbatch) in pair and (t.stage, t.microbatch) in pair - {(c.stage, c.microbatch)}
        ]
        assert mixed, "no task of one pass runs beside a collective of the other"


def test_without_overlap_nothing_runs_beside_a_collective(pool: WorkerPool) -> None:
    spec = tiny_hybrid("GSgs")
    plan = make_plan(spec, Mesh(pp=2, ep=2), (0, 3, 6))
    for events in pool.run(logged, 4, spec, plan, False):
        executed = overlapped_collectives(events)
        assert executed and not any(executed.values())


@pytest.mark.parametrize(
    ("layers", "cuts", "moe_layers"),
    [("gsSG", (0, 2, 6), (1, 3)), ("gdsSG", (0, 3, 7), (1, 3)), ("gsSGg", (0, 3, 7), (2, 3))],
)
@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_collectives_have_one_order_on_all_ranks_of_a_group(
    pool: WorkerPool, layers: str, cuts: Sequence[int], moe_layers: tuple[int, int], overlap: bool
) -> None:
    """Case 28: four micro-batches, odd and unequal numbers of MoE layers per stage."""
    spec = tiny_hybrid(layers)
    mesh = Mesh(pp=2, ep=2)
    plan = make_plan(spec, mesh, cuts, seed=len(layers), microbatches=4)
    logs = pool.run(logged, 4, spec, plan, overlap)
    for pp_i in range(mesh.pp):
        sequences = [comm_tasks(logs[mesh.rank(pp_i, 0, ep_i)]) for ep_i in range(mesh.ep)]
        assert sequences[0] == sequences[1]
        per_layer = Counter(parse_task_name(task.name)[1:] for task in sequences[0] if task.name.startswith("F_COMB"))
        assert list(per_layer.values()) == [4] * moe_layers[pp_i]
        # Counts, dispatch and combine forward; dispatch and combine backward.
        assert len(set(sequences[0])) == len(sequences[0]) == 5 * 4 * moe_layers[pp_i]


class ForgetfulTransport:
    """Its n-th collective hands out the output without waiting for it."""

    def __init__(self, inner: Transport, forgotten: int) -> None:
        self.inner, self.forgotten, self.calls = inner, forgotten, 0
        self.dp_rank, self.ep_rank, self.ep_size = inner.dp_rank, inner.ep_rank, inner.ep_size

    def gather_counts(self, counts: Tensor) -> Pending:
        return self._maybe(self.inner.gather_counts(counts))

    def dispatch(self, rows: Tensor, layout: RowLayout) -> Pending:
        return self._maybe(self.inner.dispatch(rows, layout))

    def combine(self, rows: Tensor, layout: RowLayout) -> Pending:
        return self._maybe(self.inner.combine(rows, layout))

    def _maybe(self, pending: Pending) -> Pending:
        self.calls += 1
        return NoWait(pending) if self.calls == self.forgotten else pending


class NoWait:
    def __init__(self, inner: Pending) -> None:
        self.inner = inner

    @property
    def output(self) -> Any:
        return self.inner.output

    def wait(self) -> Any:
        return self.inner.output


def through_late_transport(
    ctx: RankContext, spec: ModelSpec, plan: Plan, forgotten: Sequence[int | None]
) -> list[tuple[float, dict[str, Tensor]] | str]:
    """Loss and gradients with a transport that delivers at the wait; ``forgotten``: which wait is left out, if any.

    Counts that nobody waited for are refused: then the error's text.
    """
    batch = own_batch(ctx, spec, plan)
    results: list[tuple[float, dict[str, Tensor]] | str] = []
    for number in forgotten:

        def wrap(inner: Transport, number: int | None = number) -> Transport:
            late = LateTransport(inner)
            return late if number is None else ForgetfulTransport(late, number)

        try:
            with Engine(HybridModel(spec), plan, wrap_transport=wrap, timeout_s=60) as engine:
                results.append(engine.forward_backward(batch))
        except TransportError as error:
            results.append(str(error))
    return results


def exact(ctx: RankContext, spec: ModelSpec, plan: Plan) -> tuple[float, dict[str, Tensor]]:
    with Engine(HybridModel(spec), plan, overlap=False, timeout_s=60) as engine:
        return engine.forward_backward(own_batch(ctx, spec, plan))


def same(one: tuple[float, dict[str, Tensor]] | str, other: tuple[float, dict[str, Tensor]]) -> bool:
    assert not isinstance(one, str), one
    return one[0] == other[0] and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


def test_every_wait_is_needed(pool: WorkerPool) -> None:
    """With outputs that exist only at the wait, all waits give the right bits; leaving out any one does not."""
    spec = tiny_hybrid("GS")
    mesh = Mesh(pp=1, ep=2)
    plan = make_plan(spec, mesh, (0, 4), seed=3, microbatches=2)
    wanted = pool.run(exact, 2, spec, plan)
    events = pool.run(logged, 2, spec, plan, True)[0]
    collectives = comm_tasks(events)
    assert len(collectives) == 2 * 2 * 5  # layers, micro-batches; counts, and rows there and back in F and B
    numbers: list[int | None] = [None, *range(1, len(collectives) + 1)]
    results = pool.run(through_late_transport, 2, spec, plan, numbers, timeout_s=120)
    for rank in range(2):
        assert same(results[rank][0], wanted[rank])
    for number, collective in enumerate(collectives, start=1):
        got = [results[rank][number] for rank in range(2)]
        if "COUNT" in collective.name:
            assert all(isinstance(text, str) and "row counts" in text for text in got), collective
        else:
            assert not all(same(one, other) for one, other in zip(got, wanted, strict=True)), collective


def test_outputs_leave_before_the_pair_ends(pool: WorkerPool) -> None:
    """A message is sent when its pass is done, with tasks of the other pass still to come."""
    spec = tiny_hybrid("GSgs")
    mesh = Mesh(pp=2, ep=2)
    plan = make_plan(spec, mesh, (0, 3, 6), seed=5)
    early = 0
    for rank, events in enumerate(pool.run(logged, 4, spec, plan, True)):
        pairs = [action for action in plan.actions[mesh.coordinate(rank)[0]] if action.parts]
        for pair in pairs:
            tasks = {(part.stage, part.microbatch) for part in pair.parts}
            inside = [e for e in events if (e.task.stage, e.task.microbatch) in tasks]
            sends = [e.seq for e in inside if e.kind is EventKind.SEND]
            starts = [e.seq for e in inside if e.kind is EventKind.START]
            early += any(send < max(starts) for send in sends)
    assert early > 0
