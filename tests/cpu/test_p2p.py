"""Mailbox: order, shapes, bounded buffers, and errors that name message, ranks and the first cause."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tessera_rt.costs import Link, Workload
from tessera_rt.engine.mesh import Groups, make_groups
from tessera_rt.engine.p2p import Mailbox
from tessera_rt.engine.watchdog import FailureReporter
from tessera_rt.errors import ScheduleError, TransportError
from tessera_rt.model_spec import Attention, AttentionKind, FeedForward, FeedForwardKind, LayerSpec, ModelSpec
from tessera_rt.plan import (
    Action,
    ActionKind,
    CostAssumptions,
    Mesh,
    Message,
    Plan,
    SolverStatus,
    Stage,
    messages_from,
    output_of,
)
from tessera_rt.tasks import Pass
from tessera_rt.testing.worker_pool import RankContext, WorkerPool

LAYER = LayerSpec(
    attention=Attention(kind=AttentionKind.SOFTMAX, heads=2, kv_heads=2, head_dim=4),
    feed_forward=FeedForward(kind=FeedForwardKind.DENSE, intermediate=16),
)
SPEC = ModelSpec(name="small", hidden=8, vocab=17, layers=(LAYER,) * 6)


def plan_of(mesh: Mesh, actions: list[str], microbatches: int) -> Plan:
    """Stage s on rank s mod pp; ``actions``: one text per pipeline rank."""
    cuts = [round(s * 8 / mesh.stages) for s in range(mesh.stages + 1)]
    return Plan(
        model=SPEC.name,
        fingerprint=SPEC.fingerprint,
        mesh=mesh,
        template="given",
        microbatches=microbatches,
        stages=tuple(
            Stage(index=s, rank=s % mesh.pp, start=cuts[s], stop=cuts[s + 1], slots=microbatches)
            for s in range(mesh.stages)
        ),
        actions=tuple(tuple(map(Action.parse, text.split())) for text in actions),
        interleavings={},
        memory=(),
        workload=Workload(tokens=8, context=8, dtype="fp32"),
        assumptions=CostAssumptions(source="table", device="cpu", comm_sms=0, contention=0.0, link=Link()),
        solver=SolverStatus(objective="none", method="given", status="heuristic", t_dom_ns=0, bound_ns=0, step_ns=0),
    )


def one_f_one_b(pp: int, microbatches: int) -> Plan:
    lists = []
    for rank in range(pp):
        warm_up = min(pp - rank, microbatches)
        text = [f"{rank}F{m}" for m in range(warm_up)]
        for m in range(microbatches):
            text.append(f"{rank}B{m}")
            if m + warm_up < microbatches:
                text.append(f"{rank}F{m + warm_up}")
        lists.append(" ".join(text))
    return plan_of(Mesh(pp=pp), lists, microbatches)


class Station:
    """A rank with its mailbox. The tensor of a message is filled with a number that only this message has."""

    def __init__(self, plan: Plan, ctx: RankContext, *, timeout_s: float = 20, grace_s: float = 0.3) -> None:
        self.plan = plan
        self.groups: Groups = make_groups(plan, SPEC, timeout_s=timeout_s)
        reporter = FailureReporter.for_group(self.groups.world, grace_s=grace_s)
        cpu = torch.device("cpu")
        self.box = Mailbox(plan, self.groups, reporter, dtype=torch.float64, device=cpu, timeout_s=timeout_s)

    def open(self, shapes: list[tuple[int, ...]]) -> None:
        self.shapes = shapes
        sent = [messages_from(self.plan, rank, overlap=False) for rank in range(self.plan.mesh.pp)]
        me = self.groups.pp_i
        incoming = {source: tuple(m for m in messages if m.target == me) for source, messages in enumerate(sent)}
        self.box.open_step(shapes, sent[me], incoming)

    def content(self, message: Message) -> torch.Tensor:
        number = message.to_stage * 1000 + message.microbatch + (0.5 if message.pass_ is Pass.B else 0.0)
        return torch.full(self.shapes[message.microbatch], number, dtype=torch.float64)

    def act(self, action: Action) -> None:
        """Receive the action's input, check it, send its output."""
        pass_ = Pass.F if action.kind is ActionKind.F else Pass.B
        before = action.stage + (-1 if pass_ is Pass.F else 1)
        if 0 <= before < len(self.plan.stages):
            message = Message(before % self.plan.mesh.pp, self.groups.pp_i, pass_, action.stage, action.microbatch)
            if message.source != message.target:
                assert torch.equal(self.box.receive(message), self.content(message))
        output = output_of(self.plan, action)
        if output is not None:
            self.box.send(output, self.content(output))

    def run(self) -> int:
        """All actions; the most sent tensors held at once."""
        most = 0
        for action in self.plan.actions[self.groups.pp_i]:
            self.act(action)
            most = max(most, self.box.kept)
        self.box.close_step()
        assert self.box.kept == 0
        return most


def shapes_of(microbatches: int, rows: int = 2) -> list[tuple[int, ...]]:
    return [(rows, 3 + m % 3, 8) for m in range(microbatches)]


def test_every_message_arrives_whole_whatever_its_shape_and_memory_is_bounded(pool: WorkerPool) -> None:
    def run(ctx: RankContext) -> list[int]:
        most = []
        for microbatches in (1, 2, 8, 32):
            station = Station(one_f_one_b(3, microbatches), ctx)
            for rows in (2, 1):  # two steps, shapes change from one to the next
                station.open(shapes_of(microbatches, rows))
                most.append(station.run())
            station.groups.close()
        return most

    for most in pool.run(run, 3):
        assert most[4:6] == most[6:8], "the same for 8 and 32 micro-batches"


def test_two_stages_a_rank_send_before_they_receive(pool: WorkerPool) -> None:
    """Both ranks send large messages to each other before either reads one: sends must not wait."""
    order = "{0}F0 {0}F1 {2}F0 {2}F1 {0}F2 {0}F3 {2}F2 {2}F3 {2}B0 {2}B1 {0}B0 {0}B1 {2}B2 {2}B3 {0}B2 {0}B3"
    lists = [order.replace("{0}", str(rank)).replace("{2}", str(rank + 2)) for rank in range(2)]
    plan = plan_of(Mesh(pp=2, vpp=2), lists, 4)

    def run(ctx: RankContext) -> int:
        station = Station(plan, ctx)
        station.open([(4, 100, 1000)] * 4)  # 3 MB each, more than socket buffers hold
        return station.run()

    assert pool.run(run, 2) is not None


def test_messages_can_be_read_out_of_their_edge_s_order(pool: WorkerPool) -> None:
    plan = plan_of(Mesh(pp=2), ["0F0 0F1 0F2 0F3", "1F3 1F1 1F0 1F2"], 4)
    assert all(pool.run(lambda ctx: runs(plan, ctx), 2))


def runs(plan: Plan, ctx: RankContext) -> bool:
    station = Station(plan, ctx)
    station.open(shapes_of(plan.microbatches))
    station.run()
    return True


def test_receives_are_posted_ahead_up_to_the_window(pool: WorkerPool) -> None:
    plan = plan_of(Mesh(pp=2), ["0F0 0F1 0F2 0F3", "1F0 1F1 1F2 1F3"], 4)

    def run(ctx: RankContext) -> list[int]:
        station = Station(plan, ctx)
        station.open(shapes_of(4))
        posted = []
        for action in plan.actions[ctx.rank]:
            posted += [len(edge.posted) for edge in station.box._incoming.values()]
            station.act(action)
        station.box.close_step()
        return posted

    assert pool.run(run, 2) == [[], [2, 2, 2, 1]]


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        (lambda s: s.box.send(output_of(s.plan, Action.parse("0F1")), torch.zeros(2, 4, 8)), "the edge's next message"),
        (lambda s: s.box.send(output_of(s.plan, Action.parse("0F0")), torch.zeros(2, 9, 8)), "(2, 3, 8) torch.float64"),
        (lambda s: s.box.receive(Message(1, 0, Pass.B, 0, 7)), "was not read yet"),
        (lambda s: s.box.close_step(), "not sent = 'F of micro-batch 0 for stage 1'"),
    ],
)
def test_mistakes_are_told(pool: WorkerPool, mistake: Callable[[Station], None], text: str) -> None:
    plan = one_f_one_b(2, 2)

    def run(ctx: RankContext) -> str:
        station = Station(plan, ctx)
        station.open(shapes_of(2))
        dist.barrier()
        told = "nothing"
        if ctx.rank == 0:
            try:
                mistake(station)
            except ScheduleError as error:
                told = str(error)
        dist.barrier()
        return told

    assert text in pool.run(run, 2)[0]


def test_a_time_out_names_the_message_and_both_ranks(pool: WorkerPool) -> None:
    plan = one_f_one_b(2, 4)

    def run(ctx: RankContext) -> str:
        station = Station(plan, ctx, timeout_s=1 if ctx.rank else 20, grace_s=0.1)
        station.open(shapes_of(4))
        if ctx.rank == 0:
            station.act(plan.actions[0][0])
            ctx.store.wait(["told"])
            return ""
        with pytest.raises(TransportError) as caught:
            station.run()
        ctx.store.set("told", "")
        return str(caught.value)

    expected = "rank 1 (pipeline rank 1) waited 1 s for F of micro-batch 1 for stage 1 from rank 0 (pipeline rank 0)"
    assert pool.run(run, 2)[1].splitlines() == [expected, "  rank 0 reported nothing"]


def test_a_killed_rank_ends_all_others_with_its_name(pool: WorkerPool) -> None:
    plan = one_f_one_b(4, 4)

    def run(ctx: RankContext) -> None:
        station = Station(plan, ctx, timeout_s=30, grace_s=0.5)
        station.open(shapes_of(4))
        dist.barrier()
        if ctx.rank == 1:
            station.act(plan.actions[1][0])
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            station.run()
        finally:
            station.groups.close(abort=True)

    results = pool.run(run, 4, expect_failure=True, grace_s=20)
    for rank in (0, 2, 3):
        failure = results[rank].failure
        assert failure is not None and failure.type_name == "TransportError", failure
        assert failure.message.startswith(f"rank {rank} (pipeline rank {rank}) waited for "), failure.message
        assert "rank 1 (pipeline rank 1)" in failure.message, "the true rank"
        assert "lost its connection" in failure.message
    first = [
        r.failure.message for r in results if r.rank != 1 and r.failure and "first failure" not in r.failure.message
    ]
    assert len(first) == 1, "one account is the cause, the others quote it"
    assert "rank 1 reported nothing" in first[0]
