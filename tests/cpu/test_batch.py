"""Batches: splitting, validation, valid tokens, and the agreement of all ranks before a step."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from tessera_rt.costs import Link, Workload
from tessera_rt.engine.batch import Batch, agree, count_valid, split_batch, valid_tokens
from tessera_rt.engine.mesh import make_groups
from tessera_rt.engine.watchdog import FailureReporter
from tessera_rt.errors import SpecError, TransportError
from tessera_rt.model_spec import Attention, AttentionKind, FeedForward, FeedForwardKind, LayerSpec, ModelSpec
from tessera_rt.moe.steps import IGNORED
from tessera_rt.plan import Action, CostAssumptions, Mesh, Plan, SolverStatus, Stage
from tessera_rt.testing.worker_pool import RankContext, WorkerPool

VOCAB = 17
LAYER = LayerSpec(
    attention=Attention(kind=AttentionKind.SOFTMAX, heads=2, kv_heads=2, head_dim=4),
    feed_forward=FeedForward(kind=FeedForwardKind.DENSE, intermediate=16),
)
SPEC = ModelSpec(name="small", hidden=8, vocab=VOCAB, layers=(LAYER,) * 2)


def plan_of(mesh: Mesh) -> Plan:
    actions = tuple(tuple(map(Action.parse, (f"{rank}F0", f"{rank}B0"))) for rank in range(mesh.pp))
    return Plan(
        model=SPEC.name,
        fingerprint=SPEC.fingerprint,
        mesh=mesh,
        template="given",
        microbatches=1,
        stages=tuple(
            Stage(index=s, rank=s, start=s, stop=4 if s + 1 == mesh.pp else s + 1, slots=1) for s in range(mesh.pp)
        ),
        actions=actions,
        interleavings={},
        memory=(),
        workload=Workload(tokens=8, context=8, dtype="fp32"),
        assumptions=CostAssumptions(source="table", device="cpu", comm_sms=0, contention=0.0, link=Link()),
        solver=SolverStatus(objective="none", method="given", status="heuristic", t_dom_ns=0, bound_ns=0, step_ns=0),
    )


def ids(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


# -- splitting ------------------------------------------------------------------------------------------------------


def test_eight_rows_in_three_micro_batches() -> None:
    tokens, labels = ids(8, 5), ids(8, 5, seed=1)
    for batch in ((tokens, labels), {"tokens": tokens, "labels": labels}):
        parts = split_batch(batch, 3, vocab=VOCAB)
        assert [part.tokens.shape[0] for part in parts] == [3, 3, 2]
        assert [part.index for part in parts] == [0, 1, 2]
        assert torch.equal(torch.cat([part.tokens for part in parts]), tokens)
        assert torch.equal(torch.cat([part.labels for part in parts]), labels)


def test_a_list_keeps_its_micro_batches_of_any_size() -> None:
    lengths = [5, 9, 3, 16]
    batch: Batch = [(ids(i + 1, n), ids(i + 1, n)) for i, n in enumerate(lengths)]
    parts = split_batch(batch, 4, vocab=VOCAB)
    assert [tuple(part.tokens.shape) for part in parts] == [(1, 5), (2, 9), (3, 3), (4, 16)]


def problems_of(batch: object, microbatches: int = 1) -> str:
    with pytest.raises(SpecError) as caught:
        split_batch(batch, microbatches, vocab=VOCAB)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("batch", "microbatches", "text"),
    [
        ((ids(2, 4), ids(2, 4)), 3, "batch rows = 2: must be at least 3"),
        ([(ids(2, 4), ids(2, 4))], 2, "batch entries = 1: must be 2"),
        ((ids(2, 4), ids(2, 5)), 1, "batch.labels.shape = (2, 5): must be the shape of the tokens, (2, 4)"),
        ((ids(2, 4).int(), ids(2, 4)), 1, "batch.tokens.dtype = 'torch.int32': must be torch.int64"),
        ((ids(2, 4) + VOCAB, ids(2, 4)), 1, "must be 0 to 16"),
        ((ids(2, 4), ids(2, 4) - 18), 1, "must be 0 to 16, or -100"),
        ((torch.full((2, 4), IGNORED), ids(2, 4)), 1, "batch.tokens = 'ids from -100 to -100'"),
        ((ids(2, 4)[0], ids(2, 4)[0]), 1, "batch.tokens.shape = (4,)"),
        ((ids(0, 4), ids(0, 4)), 1, "batch.tokens.shape = (0, 4)"),
        ({"tokens": ids(2, 4)}, 1, "batch = ['tokens']: must be a mapping with tokens and labels"),
        (ids(2, 4), 1, "batch = 'Tensor': must be (tokens, labels)"),
        ((ids(2, 4).tolist(), ids(2, 4)), 1, "batch.tokens = 'list': must be a tensor"),
    ],
)
def test_faults_of_a_batch(batch: object, microbatches: int, text: str) -> None:
    assert text in problems_of(batch, microbatches)


def test_all_faults_are_told_at_once() -> None:
    text = problems_of([(ids(2, 4).int(), ids(2, 4)), (ids(2, 4), ids(2, 4) + 99), {}], 2)
    assert text.startswith("batch: 4 problems")
    assert "batch[0].tokens.dtype" in text and "batch[1].labels" in text and "batch[2]" in text


def test_ignored_labels_are_legal_and_not_counted() -> None:
    labels = ids(4, 4)
    labels[1] = IGNORED
    labels[3, 2:] = IGNORED
    parts = split_batch((ids(4, 4), labels), 2, vocab=VOCAB)
    assert count_valid(parts) == 10
    assert count_valid(split_batch((ids(4, 4), torch.full((4, 4), IGNORED)), 4, vocab=VOCAB)) == 0


# -- on ranks -------------------------------------------------------------------------------------------------------


def microbatches_with(valid: Sequence[int]) -> Batch:
    batch: Batch = []
    for count in valid:
        labels = torch.full((1, 8), IGNORED)
        labels[0, :count] = 3
        batch.append((ids(1, 8), labels))
    return batch


def test_valid_tokens_of_the_whole_step(pool: WorkerPool) -> None:
    plan = plan_of(Mesh(pp=2, dp=2))
    valid = {0: [7, 1, 0, 8], 1: [8, 8, 0, 1]}

    def run(ctx: RankContext) -> int:
        groups = make_groups(plan, SPEC, timeout_s=20)
        return valid_tokens(split_batch(microbatches_with(valid[groups.dp_i]), 4, vocab=VOCAB), groups)

    assert pool.run(run, 4) == [33] * 4
    single = split_batch(microbatches_with(valid[0]), 4, vocab=VOCAB)
    assert count_valid(single) == 16


class Caller:
    """One rank that agrees on steps."""

    def __init__(self, mesh: Mesh, timeout_s: float = 20) -> None:
        self.groups = make_groups(plan_of(mesh), SPEC, timeout_s=timeout_s)
        self.reporter = FailureReporter.for_group(self.groups.world, grace_s=0.2)
        self.timeout_s = timeout_s

    def __call__(
        self, mode: str, batch: Batch, parts: int, *, step: int = 0, plan: str = "p", settings: str = "on"
    ) -> str:
        try:
            microbatches = split_batch(batch, parts, vocab=VOCAB)
            agree(
                mode,
                step,
                microbatches,
                plan,
                {"overlap": settings},
                self.groups,
                self.reporter,
                timeout_s=self.timeout_s,
            )
        except (SpecError, TransportError) as error:
            return f"{type(error).__name__}: {error}"
        return "agreed"


def test_ranks_that_differ_all_raise_and_can_go_on(pool: WorkerPool) -> None:
    def run(ctx: RankContext) -> list[str]:
        call = Caller(Mesh(pp=2))
        second = ctx.rank == 1
        batch = (ids(6, 4), ids(6, 4))
        longer = (ids(6, 5), ids(6, 5))
        return [
            call("train", batch, 3),
            call("train" if second else "eval", batch, 3),
            call("train", batch, 2 if second else 3),
            call("train", longer if second else batch, 3),
            call("train", (ids(6, 4, seed=9), ids(6, 4)) if second else batch, 3),
            call("train", batch, 3, step=5 if second else 4),
            call("train", batch, 3, plan="q" if second else "p"),
            call("train", batch, 3),
        ]

    first, second = pool.run(run, 2)
    assert (first[0], first[-1], second[0], second[-1]) == ("agreed",) * 4
    for told in (first, second):
        assert "mode = 'eval on rank 0; train on rank 1': must be the same on all ranks" in told[1]
        assert "every rank must call it equally often" in told[1]
        assert "number of micro-batches = '3 on rank 0; 2 on rank 1'" in told[2]
        assert "shapes of micro-batches = '2x4, 2x4, 2x4 on rank 0; 2x5, 2x5, 2x5 on rank 1'" in told[3]
        assert "must be the same on the pipeline ranks of a (dp, ep) column" in told[3]
        assert "shapes" not in told[4] and "digest of the token ids" in told[4]
        assert "step = '4 on rank 0; 5 on rank 1'" in told[5]
        assert "plan = 'p on rank 0; q on rank 1'" in told[6]
        assert all(text.startswith("SpecError") for text in told[1:-1])


def test_columns_may_feed_batches_of_other_shapes(pool: WorkerPool) -> None:
    def run(ctx: RankContext) -> str:
        call = Caller(Mesh(pp=2, ep=2))
        length = 4 + call.groups.ep_i
        return call("train", (ids(6, length), ids(6, length)), 3)

    assert pool.run(run, 4) == ["agreed"] * 4


@pytest.mark.parametrize("ends", [True, False], ids=["the other rank ends", "the other rank hangs"])
def test_evaluation_with_unequal_numbers_of_batches_fails_in_time(pool: WorkerPool, ends: bool) -> None:
    """Three batches on rank 0, two on rank 1: rank 0 is told who is missing."""

    def run(ctx: RankContext) -> list[str]:
        call = Caller(Mesh(pp=2), timeout_s=1.5)
        batch = (ids(2, 4), ids(2, 4))
        told = [call("eval", batch, 2) for _ in range(2 + (ctx.rank == 0))]
        if ctx.rank == 0:
            ctx.store.set("told", "")
        elif ends:
            call.groups.close(abort=True)
        else:
            ctx.store.wait(["told"])
        return told

    first, second = pool.run(run, 2)
    assert first[:2] == second == ["agreed", "agreed"]
    assert first[2].startswith("TransportError: rank 0 (pipeline rank 0) waited ")
    assert "for all ranks to begin eval step 0; rank 1 did not come" in first[2]


def test_a_late_rank_is_waited_for(pool: WorkerPool) -> None:
    def run(ctx: RankContext) -> str:
        call = Caller(Mesh(pp=2))
        dist.barrier()
        time.sleep(0.5 * ctx.rank)
        return call("train", (ids(2, 4), ids(2, 4)), 2)

    assert pool.run(run, 2) == ["agreed", "agreed"]
