"""The transport's dispatch as a launch to measure: virtual ranks on one device, whose kernels obey a budget."""

from __future__ import annotations

import torch

from tessera_rt.kernels.budget import SmBudget
from tessera_rt.kernels.trace import Trace
from tessera_rt.microbench.overlap import BudgetedLaunch
from tessera_rt.microbench.problems import ExpertProblem


def budgeted_puts(problem: ExpertProblem, world: int = 4, *, hidden: int | None = None) -> BudgetedLaunch:
    """launch(budget) -> Trace: one rank's rows of ``problem`` put into ``world`` ranks' memory
    and taken by all of them, within the budget's communication SMs (at least one).

    A transport is made for each budget when it is first seen. Needs a GPU, or interpreted kernels. The bytes stay in
    the device's memory: it says how puts share the SMs, not what a link carries.
    """
    from tessera_rt.kernels.operands import Run  # loads Triton
    from tessera_rt.kernels.peer_memory import virtual_ranks
    from tessera_rt.kernels.transport import PeerTransport
    from tessera_rt.kernels.transport_layout import Traffic

    traffic = Traffic(
        world=world,
        experts=problem.experts * world,
        top_k=problem.shape.top_k,
        hidden=hidden or problem.shape.hidden,
        tokens=problem.tokens,
        dtype=problem.dtype,
    )
    device = problem.device
    generator = torch.Generator(device).manual_seed(11)
    scores = torch.rand(problem.tokens, traffic.experts, device=device, generator=generator)
    weights, ids = scores.topk(traffic.top_k, dim=-1)
    x, ids = problem.random(problem.tokens, traffic.hidden, seed=12), ids.to(torch.int32)
    nothing = x[:0], ids[:0], weights[:0]
    made: dict[SmBudget, tuple[list[PeerTransport], Trace]] = {}

    def launch(budget: SmBudget) -> Trace:
        if budget not in made:
            run = Run(SmBudget(budget.total, max(budget.communication, 1)), trace=Trace())
            assert run.trace is not None
            made[budget] = (
                [PeerTransport(traffic, allocator, run=run) for allocator in virtual_ranks(world, device)],
                run.trace,
            )
        ranks, trace = made[budget]
        trace.launches.clear()
        given = [(x, ids, weights), *[nothing] * (world - 1)]
        placed = [one.wait() for one in [rank.exchange(i) for rank, (_, i, _) in zip(ranks, given, strict=True)]]
        sent = [r.dispatch(a, w, p) for r, (a, _, w), p in zip(ranks, given, placed, strict=True)]
        for one in sent:
            one.wait()
        return trace

    return launch
