"""What the engine holds between F and B: recomputation frees it, and its peak does not grow with micro-batches."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tessera_rt.costs import Recompute, Workload
from tessera_rt.engine.engine import Engine
from tessera_rt.model_spec import ModelSpec
from tessera_rt.models.hybrid import HybridModel
from tessera_rt.plan import ActionKind, Mesh, Plan
from tessera_rt.planner.build import plan_with
from tessera_rt.tasks import TaskKind
from tessera_rt.testing.hybrids import random_costs, tiny_hybrid, token_batch
from tessera_rt.testing.worker import RankContext
from tessera_rt.testing.worker_pool import WorkerPool


class Saved:
    """A tensor that autograd keeps for backward."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an operation may save its own output, which would hold the operation


def held_between_passes(ctx: RankContext, spec: ModelSpec, plan: Plan) -> tuple[set[tuple[TaskKind, bool]], int, int]:
    """After F and before B of one micro-batch: (kind of task, whether its outputs were dropped) of all segments, the
    number of saved tensors of the stage, and the number of tensors that autograd holds."""
    alive: weakref.WeakSet[Saved] = weakref.WeakSet()
    found: list[tuple[set[tuple[TaskKind, bool]], int, int]] = []

    def pack(tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        alive.add(saved)
        return saved

    with Engine(HybridModel(spec, dropout=0.1), plan, timeout_s=60) as engine:
        (stage,) = engine.stages.values()

        def watch(action: str) -> None:
            if action == "0B0":
                steps, (state,) = stage.program.steps, stage._states.values()
                dropped = {(steps[i].kind, segment.outputs is None) for i, segment in state.segments.items()}
                found.append((dropped, stage.saved_tensors(), len(alive)))

        engine._driver.note = watch
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            engine.forward_backward([*token_batch(spec, [(2, 6)], seed=0)])
        assert stage.saved_tensors() == 0
        assert len(alive) == 0
    (only,) = found
    return only


def test_recomputation_drops_what_it_can_make_again(pool: WorkerPool) -> None:
    """H11: selective drops the outputs of feed-forwards and shared experts, full those of attention too."""
    spec = tiny_hybrid("GdS")
    counts = []
    recomputed: dict[Recompute, set[TaskKind]] = {
        Recompute.NONE: set(),
        Recompute.SELECTIVE: {TaskKind.MLP, TaskKind.SHARED},
        Recompute.FULL: {TaskKind.ATTN, TaskKind.MLP, TaskKind.SHARED},
    }
    kinds = {TaskKind.EMBED, TaskKind.ATTN, TaskKind.ROUTE, TaskKind.SHARED, TaskKind.MLP, TaskKind.POST, TaskKind.HEAD}
    for recompute, dropped in recomputed.items():
        workload = Workload(tokens=12, context=6, dtype="fp64", recompute=recompute)
        plan = plan_with((0, 5), spec, Mesh(), random_costs(spec, workload), microbatches=1)
        [(segments, of_stage, of_autograd)] = pool.run(held_between_passes, 1, spec, plan)
        assert segments == {(kind, kind in dropped) for kind in kinds}, recompute
        counts.append((of_stage, of_autograd))
    none, selective, full = counts
    # One output each of 3 feed-forwards and 2 shared experts, then of 3 attentions.
    assert [of_stage for of_stage, _ in counts] == [none[0], none[0] - 5, none[0] - 8]
    assert none[1] > selective[1] > full[1] > 0


def held(ctx: RankContext, spec: ModelSpec, plan: Plan) -> tuple[int, int, int]:
    """The most micro-batches in flight, saved tensors, and bytes of pending weight gradients on one rank."""
    with Engine(HybridModel(spec), plan, timeout_s=60) as engine:
        peak_saved = 0
        stages = list(engine.stages.values())

        def watch(_: str) -> None:
            nonlocal peak_saved
            peak_saved = max(peak_saved, sum(stage.saved_tensors() for stage in stages))

        engine._driver.note = watch
        engine.forward_backward([*token_batch(spec, [(1, 4)] * plan.microbatches, seed=0)])
        in_flight = sum(stage.peak_in_flight for stage in stages)
        assert all(stage.in_flight == 0 and stage.saved_tensors() == 0 for stage in stages)
        assert engine.gradients.queue.pending_bytes == engine.gradients.queue.pending_count == 0
        return in_flight, peak_saved, engine.gradients.queue.peak_bytes


@pytest.mark.parametrize(("template", "deferred"), [("1f1b", False), ("zb-h1", True)])
def test_peak_does_not_grow_with_micro_batches(pool: WorkerPool, template: str, deferred: bool) -> None:
    """Case 35: saved tensors and waiting weight gradients are the same whether 4 or 32 micro-batches run."""
    spec = tiny_hybrid("gS")
    peaks = []
    for m in (4, 32):
        costs = random_costs(spec, Workload(tokens=4, context=4), seed=1)
        plan = plan_with((0, 2, 4), spec, Mesh(pp=2), costs, microbatches=m, template=template)
        plan = replace(plan, workload=replace(plan.workload, dtype="fp32"))
        kinds = [part.kind for of_rank in plan.actions for action in of_rank for part in action.passes]
        assert (ActionKind.W in kinds) == deferred
        peaks.append(pool.run(held, 2, spec, plan))
    assert peaks[0] == peaks[1]
    assert all(min(of_rank) > 0 for of_rank in peaks[0])
