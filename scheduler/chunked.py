"""MoE layers in pieces: dispatch, experts and combine of one micro-batch cut up, pieces of one beside those of another.

Comet does so everywhere (``comparisons.simulate_chunked``). Where passes run together their partner hides communication
already; in warm-up and cool-down they run alone, and halves pay there (``alone``). Only simulated: pieces of a layer's
experts are other matrix products, so other bits, and the engine has no such tasks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tessera_rt.costs import CostTable
from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.model_spec import ModelSpec
from tessera_rt.tasks import Pass, TaskKind, task_name

SIMULATE_ONLY = "simulate-only"
"""Part of the label of every timeline of an order that cannot be run."""
MOE_HALVES = "moe-halves"
"""In ``Plan.simulate_only``: actions that run ``alone`` have their MoE layers in two halves."""


def alone(key: str) -> bool:
    """Whether an action (by its ``Action.key``) has no forward beside a backward: warm-up, cool-down, or a W."""
    letters = {part[-1] for part in key.split(";")}
    return not ("F" in letters and letters & {"B", "I"})


def halved_costs(model: ModelSpec, costs: CostTable) -> CostTable:
    """Costs of actions that run ``alone`` with their MoE layers in two halves; see ``chunked_costs``."""
    return chunked_costs(model, costs, chunks=2)


def chunked_costs(model: ModelSpec, costs: CostTable, *, chunks: int = 2, mlp_overhead: float = 0.05) -> CostTable:
    """Costs under which each MoE layer run alone takes as long as it would in pieces. For simulations only.

    Dispatch, experts and combine (in backward: combine, experts, dispatch) are cut into ``chunks`` equal pieces. Piece
    i of the experts waits for piece i of the first collective, piece i of the second collective for it; the network
    takes the pieces of the first collective first. The experts take ``mlp_overhead`` longer in pieces, and contention
    on top while communication runs. What is left uncovered of a collective remains as its duration.

    Raises ScheduleError for ``chunks`` below 1 or a negative overhead, CostError when the table lacks a task.
    """
    problems = []
    if chunks < 1:
        problems.append(Problem("chunks", chunks, "at least 1"))
    if mlp_overhead < 0:
        problems.append(Problem("mlp_overhead", mlp_overhead, "at least 0", "0.05 = experts 5 % longer in pieces"))
    if problems:
        raise ScheduleError.of("chunked overlap", problems)
    tasks = dict(costs.tasks)
    for item in model.items:
        if item.layer is None or not item.layer.is_moe or chunks == 1:
            continue
        for pass_, first, second in (
            (Pass.F, TaskKind.DISP, TaskKind.COMB),
            (Pass.B, TaskKind.COMB, TaskKind.DISP),
        ):
            names = [task_name(pass_, kind, item.label) for kind in (first, TaskKind.MLP, second)]
            before, experts, after = (tasks[name] for name in names)
            pieces = _in_pieces(before.ns, round(experts.ns * (1 + mlp_overhead)), after.ns, chunks)
            hidden = before.ns + after.ns - pieces.before - pieces.after
            stretched = pieces.experts + round(costs.contention * hidden)
            found = zip(names, (before, experts, after), (pieces.before, stretched, pieces.after), strict=True)
            tasks.update((name, replace(cost, ns=ns)) for name, cost, ns in found)
    note = f"MoE layers in {chunks} pieces ({SIMULATE_ONLY}): experts {mlp_overhead:.0%} longer"
    return replace(
        costs, tasks=tasks, provenance=replace(costs.provenance, notes=(*costs.provenance.notes, note)), pairs={}
    )


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Time (ns) before, within and behind the experts of a layer in pieces; gaps between pieces count as before."""

    before: int
    experts: int
    after: int


def _in_pieces(before: int, experts: int, after: int, chunks: int) -> _Pieces:
    network = experts_end = 0
    arrived: list[int] = []
    for size in _split(before, chunks):
        network += size
        arrived.append(network)
    done: list[int] = []
    for ready, size in zip(arrived, _split(experts, chunks), strict=True):
        experts_end = max(experts_end, ready) + size
        done.append(experts_end)
    for ready, size in zip(done, _split(after, chunks), strict=True):
        network = max(network, ready) + size
    return _Pieces(experts_end - experts, experts, network - experts_end)


def _split(total: int, chunks: int) -> list[int]:
    return [total * (i + 1) // chunks - total * i // chunks for i in range(chunks)]
