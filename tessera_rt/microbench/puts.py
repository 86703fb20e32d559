"""The transport's dispatch as a launch to measure: virtual ranks on one device, whose kernels obey a budget."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tessera_rt.kernels.budget import SmBudget
from tessera_rt.kernels.trace import Trace
from tessera_rt.kernels.transport_layout import Traffic
from tessera_rt.microbench.compare import Contender
from tessera_rt.microbench.overlap import BudgetedLaunch
from tessera_rt.microbench.problems import ExpertProblem


def budgeted_puts(problem: ExpertProblem, world: int = 4, *, hidden: int | None = None) -> BudgetedLaunch:
    """launch(budget) -> Trace: one rank's rows of ``problem`` put into ``world`` ranks' memory
    and taken by all of them, within the budget's communication SMs (at least one).

    A transport is made when the budget changes, and that of the budget before is freed. Needs a GPU, or interpreted
    kernels. The bytes stay in the device's memory: it says how puts share the SMs, not what a link carries.
    """
    from tessera_rt.kernels.operands import Run  # loads Triton
    from tessera_rt.kernels.peer_memory import virtual_ranks
    from tessera_rt.kernels.transport import PeerTransport

    traffic, device = _traffic(problem, world, hidden), problem.device
    x, ids, weights = _tokens(problem, traffic)
    nothing = x[:0], ids[:0], weights[:0]
    made: dict[SmBudget, tuple[list[PeerTransport], Trace]] = {}

    def launch(budget: SmBudget) -> Trace:
        if budget not in made:
            run = Run(SmBudget(budget.total, max(budget.communication, 1)), trace=Trace())
            assert run.trace is not None
            made.clear()  # a large model's peer memory, once for each of a sweep, would fill a device
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


def dispatched_bytes(problem: ExpertProblem, world: int) -> int:
    """Bytes of the rows that one rank sends in a dispatch to ``world`` ranks (itself among them), each once a rank."""
    traffic = _traffic(problem, world)
    _, ids, _ = _tokens(problem, traffic)
    owners = (ids // traffic.local_experts).long()
    copies = torch.zeros(problem.tokens, world, device=problem.device).scatter_(1, owners, 1.0).sum()
    return int(copies) * traffic.hidden * problem.dtype.itemsize


def peer_dispatch(problem: ExpertProblem, world: int, group: dist.ProcessGroup | None = None) -> Contender:
    """Tessera's dispatch of one rank's tokens over peer memory, put and taken, to places known beforehand.

    ``group``: its ranks, on a GPU each, all send; without one the other ranks are virtual and send nothing. Needs GPUs,
    or interpreted kernels for virtual ranks. Collective.
    """
    from tessera_rt.kernels.peer_memory import PeerAllocator, SymmetricMemory, virtual_ranks
    from tessera_rt.kernels.transport import PeerTransport  # loads Triton

    traffic = _traffic(problem, world)
    x, ids, weights = _tokens(problem, traffic)
    allocators: list[PeerAllocator]
    allocators = virtual_ranks(world, problem.device) if group is None else [SymmetricMemory(group, problem.device)]
    given = [(x, ids, weights), *[(x[:0], ids[:0], weights[:0])] * (len(allocators) - 1)]
    ranks = [PeerTransport(traffic, allocator) for allocator in allocators]
    placed = [one.wait() for one in [rank.exchange(i) for rank, (_, i, _) in zip(ranks, given, strict=True)]]

    def launch() -> None:
        sent = [r.dispatch(a, w, p) for r, (a, _, w), p in zip(ranks, given, placed, strict=True)]
        for one in sent:
            one.wait()

    return Contender(name="Tessera dispatch", launch=launch, bytes=dispatched_bytes(problem, world))


def _traffic(problem: ExpertProblem, world: int, hidden: int | None = None) -> Traffic:
    return Traffic(
        world=world,
        experts=problem.experts * world,
        top_k=problem.shape.top_k,
        hidden=hidden or problem.shape.hidden,
        tokens=problem.tokens,
        dtype=problem.dtype,
    )


def _tokens(problem: ExpertProblem, traffic: Traffic) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and router weights of one rank: experts of all ranks are equally likely."""
    generator = torch.Generator(problem.device).manual_seed(11)
    scores = torch.rand(problem.tokens, traffic.experts, device=problem.device, generator=generator)
    weights, ids = scores.topk(traffic.top_k, dim=-1)
    return problem.random(problem.tokens, traffic.hidden, seed=12), ids.to(torch.int32), weights
