"""Schedules of other systems that can be simulated for comparison, but neither planned nor run (simulate-only).

- ``simulate_dualpipe``: DualPipe, the pipeline run from both ends over two copies of the parameters;
- ``simulate_chunked``: communication hidden within one micro-batch, as Comet does: each MoE layer's dispatch, experts
  and combine go in pieces, the pieces of one beside those of another.
"""

from __future__ import annotations

from collections.abc import Sequence

from tessera_rt.costs import CostTable
from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Action
from tessera_rt.scheduler.chunked import SIMULATE_ONLY, chunked_costs
from tessera_rt.scheduler.graphs import Bounds, action_graph
from tessera_rt.scheduler.interleave import interleave
from tessera_rt.scheduler.orders_dualpipe import dualpipe
from tessera_rt.scheduler.simulate import simulate_schedule
from tessera_rt.scheduler.templates import Template
from tessera_rt.timeline import Timeline


def dualpipe_template(pp: int, microbatches: int, *, joint: bool = True) -> Template:
    """DualPipe's order (``orders_dualpipe.dualpipe``). ``stage_ranks`` lists the stages of the first copy, then those
    of the second; a stage is 1/pp of the model, and each runs half of the micro-batches.

    It is no template of ``build_template``: a plan has one copy of the parameters. Raises ScheduleError unless pp and
    the number of micro-batches are even and the latter is at least 2 pp.
    """
    problems = [
        Problem(field, value, f"an even number of at least {least}")
        for field, value, least in (("pp", pp, 2), ("microbatches", microbatches, 2 * pp))
        if value % 2 or value < least
    ]
    if problems:
        raise ScheduleError.of("DualPipe", problems)
    return Template(
        name="dualpipe",
        pp=pp,
        vpp=2,
        microbatches=microbatches,
        stage_ranks=(*range(pp), *reversed(range(pp))),
        actions=tuple(map(tuple, dualpipe(pp, microbatches, joint=joint))),
        joint=joint,
        pad="groups",
        shadows=0,
    )


def simulate_dualpipe(
    model: ModelSpec,
    costs: CostTable,
    bounds: Bounds,
    *,
    microbatches: int,
    joint: bool = True,
    method: str = "align",
    contention: float | None = None,
) -> Timeline:
    """One step of DualPipe. ``bounds``: items of each of the pp stages, the same in both copies.

    ``method``: that orders the tasks of an action (``interleave.py``).

    Not charged: memory of the second copy, and adding up the gradients of both. Raises ScheduleError for sizes it
    cannot have.
    """
    template = dualpipe_template(len(bounds), microbatches, joint=joint)
    both = (*bounds, *bounds)
    keys = {action.key for row in template.actions for action in row}
    return simulate_schedule(
        template.stage_ranks,
        template.actions,
        both,
        {key: interleave(action_graph(key, model, costs, both), key, method=method) for key in keys},
        model,
        costs,
        contention=contention,
        label=f"dualpipe ({SIMULATE_ONLY})",
        copies=2,
    )


def simulate_chunked(
    stage_ranks: Sequence[int],
    actions: Sequence[Sequence[Action]],
    bounds: Bounds,
    model: ModelSpec,
    costs: CostTable,
    *,
    chunks: int = 2,
    mlp_overhead: float = 0.05,
) -> Timeline:
    """One step of any order in which passes do not overlap, each MoE layer in ``chunks`` pieces.

    See ``chunked_costs`` for what that is taken to cost. The passes run one after the other.
    """
    return simulate_schedule(
        stage_ranks,
        actions,
        bounds,
        {},
        model,
        chunked_costs(model, costs, chunks=chunks, mlp_overhead=mlp_overhead),
        overlap=False,
        label=f"chunked x{chunks} ({SIMULATE_ONLY})",
    )
