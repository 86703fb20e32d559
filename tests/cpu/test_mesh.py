"""Process groups: who is in which, and that a plan for other processes, another model or another plan is refused."""

from __future__ import annotations

import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tessera_rt.costs import Link, Workload
from tessera_rt.engine.mesh import Groups, make_groups, pipeline_edges, ranks_text, tied_pipeline_ranks
from tessera_rt.errors import PlanError, TransportError
from tessera_rt.model_spec import Attention, AttentionKind, FeedForward, FeedForwardKind, LayerSpec, ModelSpec
from tessera_rt.plan import Action, CostAssumptions, Mesh, Plan, SolverStatus, Stage
from tessera_rt.testing.worker_pool import RankContext, WorkerPool

LAYER = LayerSpec(
    attention=Attention(kind=AttentionKind.SOFTMAX, heads=2, kv_heads=2, head_dim=4),
    feed_forward=FeedForward(kind=FeedForwardKind.DENSE, intermediate=16),
)


def spec_of(layers: int, *, tied: bool = False) -> ModelSpec:
    return ModelSpec(name="small", hidden=8, vocab=17, layers=(LAYER,) * layers, tied=tied)


def plan_of(spec: ModelSpec, mesh: Mesh, *, ranks: tuple[int, ...] | None = None, microbatches: int = 2) -> Plan:
    """One item per stage at least; stage s on ``ranks[s]`` (default: s mod pp); all F, then all B."""
    items, stages = len(spec.items), mesh.stages
    ranks = ranks or tuple(s % mesh.pp for s in range(stages))
    cuts = [round(s * items / stages) for s in range(stages + 1)]
    letters = [(s, "F") for s in range(stages)] + [(s, "B") for s in reversed(range(stages))]
    return Plan(
        model=spec.name,
        fingerprint=spec.fingerprint,
        mesh=mesh,
        template="given",
        microbatches=microbatches,
        stages=tuple(
            Stage(index=s, rank=ranks[s], start=cuts[s], stop=cuts[s + 1], slots=microbatches) for s in range(stages)
        ),
        actions=tuple(
            tuple(
                Action.parse(f"{s}{letter}{m}")
                for s, letter in letters
                if ranks[s] == rank
                for m in range(microbatches)
            )
            for rank in range(mesh.pp)
        ),
        interleavings={},
        memory=(),
        workload=Workload(tokens=8, context=8, dp=mesh.dp, ep=mesh.ep, dtype="fp32"),
        assumptions=CostAssumptions(source="table", device="cpu", comm_sms=0, contention=0.0, link=Link()),
        solver=SolverStatus(objective="none", method="given", status="heuristic", t_dom_ns=0, bound_ns=0, step_ns=0),
    )


def members(group: dist.ProcessGroup | None) -> list[int]:
    return [] if group is None else dist.get_process_group_ranks(group)


def test_eight_ranks_in_three_dimensions(pool: WorkerPool) -> None:
    spec = spec_of(2, tied=True)
    plan = plan_of(spec, Mesh(pp=2, dp=2, ep=2))

    def look(ctx: RankContext) -> dict[str, object]:
        groups = make_groups(plan, spec, timeout_s=20)
        total = torch.tensor([float(ctx.rank)])
        assert groups.data is not None
        dist.all_reduce(total, group=groups.data)
        found = {
            "coordinate": (groups.pp_i, groups.dp_i, groups.ep_i),
            "mesh coordinate": tuple(groups.device_mesh.get_local_rank(dim) for dim in ("pp", "dp", "ep")),
            "world": members(groups.world),
            "ep": members(groups.ep),
            "dp": members(groups.dp),
            "data": members(groups.data),
            "edges": {edge: members(group) for edge, group in groups.edges.items()},
            "tied": members(groups.tied),
            "tied_ranks": groups.tied_ranks,
            "column": [groups.global_rank(0), groups.global_rank(1)],
            "sum": total.item(),
        }
        groups.close()
        return found

    results = pool.run(look, 8)
    for rank, found in enumerate(results):
        pp_i, dp_i, ep_i = rank // 4, rank // 2 % 2, rank % 2
        column = [2 * dp_i + ep_i, 4 + 2 * dp_i + ep_i]
        assert found["coordinate"] == found["mesh coordinate"] == (pp_i, dp_i, ep_i)
        assert found["world"] == list(range(8))
        assert found["ep"] == [4 * pp_i + 2 * dp_i, 4 * pp_i + 2 * dp_i + 1]
        assert found["dp"] == [4 * pp_i + ep_i, 4 * pp_i + 2 + ep_i]
        assert found["data"] == [4 * pp_i + i for i in range(4)]
        assert found["edges"] == {(0, 1): column, (1, 0): column}
        assert found["tied"] == found["column"] == column
        assert found["tied_ranks"] == tuple(column)
        assert found["sum"] == sum(range(4 * pp_i, 4 * pp_i + 4))


def test_one_rank_has_no_groups_but_the_world(pool: WorkerPool) -> None:
    spec = spec_of(2, tied=True)
    plan = plan_of(spec, Mesh())

    def look(ctx: RankContext) -> tuple[object, ...]:
        groups = make_groups(plan, spec, timeout_s=20)
        return groups.ep, groups.dp, groups.data, dict(groups.edges), groups.tied, members(groups.world)

    assert pool.run(look, 1) == [(None, None, None, {}, None, [0])]


def test_edges_and_tied_ranks_of_placements() -> None:
    spec = spec_of(4, tied=True)
    loop, v_shape = Mesh(pp=3, vpp=2), Mesh(pp=2, vpp=2)
    assert pipeline_edges(plan_of(spec, loop)) == ((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1))
    v_plan = plan_of(spec, v_shape, ranks=(0, 1, 1, 0))
    assert pipeline_edges(v_plan) == ((0, 1), (1, 0))
    assert tied_pipeline_ranks(v_plan, spec) == (), "embedding and head are on rank 0"
    assert tied_pipeline_ranks(plan_of(spec, loop), spec) == (0, 2)
    assert tied_pipeline_ranks(plan_of(spec, loop), spec_of(4)) == ()


@pytest.mark.parametrize("world", [2, 8])
def test_a_plan_for_four_ranks_on_others_is_refused_before_any_group_is_made(pool: WorkerPool, world: int) -> None:
    spec = spec_of(4)
    plan = plan_of(spec, Mesh(pp=4))

    def begin(ctx: RankContext) -> Groups:
        dist.barrier()  # a rank that ends while others still connect would look like a lost one
        with patch.object(dist, "new_group", side_effect=AssertionError("a group is made")):
            return make_groups(plan, spec, timeout_s=60)

    for result in pool.run(begin, world, expect_failure=True):
        assert result.failure is not None, "every rank refuses"
        assert result.failure.type_name == "PlanError"
        assert f"must be the number of processes, {world}; start 4 processes" in result.failure.message


def test_a_plan_for_another_model_is_refused_by_every_rank(pool: WorkerPool) -> None:
    plan = plan_of(spec_of(4), Mesh(pp=2))
    other = spec_of(5)

    def begin(ctx: RankContext) -> Groups:
        dist.barrier()
        return make_groups(plan, other, timeout_s=60)

    for result in pool.run(begin, 2, expect_failure=True):
        assert result.failure is not None
        assert result.failure.type_name == "PlanError"
        assert f"must be that of model small, {other.fingerprint}" in result.failure.message


def test_different_plans_are_refused_by_every_rank(pool: WorkerPool) -> None:
    spec = spec_of(6)
    plans = [plan_of(spec, Mesh(pp=4), microbatches=2 + (rank == 2)) for rank in range(4)]
    for result in pool.run(lambda ctx: make_groups(plans[ctx.rank], spec, timeout_s=20), 4, expect_failure=True):
        assert result.failure is not None
        assert result.failure.type_name == "PlanError"
        assert "ranks 0, 1 and 3 | rank 2" in result.failure.message


def test_a_rank_that_does_not_take_part_is_noticed(pool: WorkerPool) -> None:
    spec = spec_of(2)
    plan = plan_of(spec, Mesh(pp=2))

    def begin(ctx: RankContext) -> str:
        if ctx.rank == 1:
            time.sleep(2)
            return "absent"
        try:
            make_groups(plan, spec, timeout_s=1)
        except TransportError as error:
            return str(error)
        return "made"

    text, _ = pool.run(begin, 2)
    assert text.startswith("rank 0 could not make the process groups of the plan with all 2 ranks within 1 s")


def test_without_a_process_group_the_remedy_is_named() -> None:
    spec = spec_of(2)
    with pytest.raises(PlanError, match="torchrun"):
        make_groups(plan_of(spec, Mesh()), spec, timeout_s=1)


def test_names_of_ranks() -> None:
    assert ranks_text([]) == "no other rank"
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 2, 3]) == "ranks 0, 2 and 3"
    assert ranks_text(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
