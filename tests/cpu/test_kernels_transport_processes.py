"""The peer transport between four processes: interpreted kernels, mapped and poisoned memory, against the reference."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tessera_rt.errors import TransportError
from tessera_rt.kernels import transport_reference
from tessera_rt.kernels.peer_memory_mapped import MappedMemory
from tessera_rt.kernels.transport import PeerTransport
from tessera_rt.kernels.transport_layout import Traffic
from tessera_rt.testing.interpreter import install
from tessera_rt.testing.kernel_checks import poisoned_memory
from tessera_rt.testing.peer_calls import FORMS, assert_calls, run_calls, traffic_of
from tessera_rt.testing.peer_ranks import ONE_PROGRAM, POLLS, RankInput, poison, rank_inputs
from tessera_rt.testing.worker_pool import RankContext, WorkerPool

WORLD = 4
Rounds = Sequence[Sequence[RankInput]]


def calls(ctx: RankContext, traffic: Traffic, rounds: Rounds, first_epoch: int, late: int) -> list[tuple[Any, str]]:
    """All calls of every round, and what went wrong in it; rank ``late`` begins a tenth of a second later."""
    install()
    group = dist.group.WORLD
    assert group is not None
    transport = PeerTransport(traffic, MappedMemory(group), run=ONE_PROGRAM, polls=POLLS)
    transport.preset_epochs(first_epoch)
    poison(transport)
    dist.barrier()
    results = []
    for inputs in rounds:
        if ctx.rank == late:
            time.sleep(0.1)
        with poisoned_memory():
            found, message = run_calls(transport, inputs[ctx.rank], ctx.rank), ""
        try:
            transport.check()
        except TransportError as error:
            message = str(error)
            transport.clear_overflow()
        results.append((found, message))
    return results


def run(
    pool: WorkerPool,
    traffic: Traffic,
    rounds: Rounds,
    *,
    first_epoch: int = 0,
    late: int = -1,
    timeout_s: float = 240.0,
) -> list[str]:
    """Every round equals the reference; what the ranks reported, by round and rank."""
    results = pool.run(calls, WORLD, traffic, rounds, first_epoch, late, timeout_s=timeout_s)
    for number, inputs in enumerate(rounds):
        assert_calls(traffic, inputs, [of_rank[number][0] for of_rank in results])
    return [message for number in range(len(rounds)) for _, message in (of_rank[number] for of_rank in results)]


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.slow) if form == "rows-rows" else form for form in FORMS]
)
def test_a_late_rank_a_rank_without_tokens_and_all_tokens_to_one(pool: WorkerPool, form: str) -> None:
    traffic = traffic_of(form, WORLD, 5)
    generator = torch.Generator().manual_seed(31)
    ragged = rank_inputs(traffic, (5, 0, 2, 4), generator, dropped=0.2)
    experts = torch.arange(6, 9, dtype=torch.int32)  # rank 2's
    to_one = [replace(one, ids=experts.expand(len(one.ids), 3)) for one in rank_inputs(traffic, (5,) * 4, generator)]
    assert not any(run(pool, traffic, [ragged, to_one], late=1))


@pytest.mark.parametrize("name", ["capacity", "row_capacity"])
def test_overflow_by_one_row(pool: WorkerPool, name: str) -> None:
    wide = traffic_of("tokens-rows", WORLD, 5)
    inputs = rank_inputs(wide, (5, 3, 0, 4), torch.Generator().manual_seed(32))
    units, choices = transport_reference.overflow([one.ids for one in inputs], wide)
    needed = {"capacity": units, "row_capacity": choices}
    traffic = replace(wide, **{**needed, name: needed[name] - 1})
    for rank, message in enumerate(run(pool, traffic, [inputs])):
        assert message.startswith(f"rank {rank}: expert-parallel transport")
        assert f"\n  {name} = {needed[name] - 1}: must be at least {needed[name]}" in message


def test_epochs_wrap(pool: WorkerPool) -> None:
    traffic = traffic_of("tokens-reduced", WORLD, 2, top_k=2, hidden=16)
    generator = torch.Generator().manual_seed(33)
    rounds = [rank_inputs(traffic, (2, 1, 0, 2), generator) for _ in range(8)]
    assert not any(run(pool, traffic, rounds, first_epoch=(1 << 31) - 3))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_200_dispatches_and_combines_with_changing_routing(pool: WorkerPool) -> None:
    """Two of each in a round."""
    traffic = traffic_of("tokens-rows", WORLD, 2, top_k=2, hidden=16)
    generator = torch.Generator().manual_seed(34)
    tokens = torch.randint(0, 3, (100, WORLD), generator=generator).tolist()
    rounds = [rank_inputs(traffic, of_ranks, generator, dropped=0.2) for of_ranks in tokens]
    assert not any(run(pool, traffic, rounds, timeout_s=500))
