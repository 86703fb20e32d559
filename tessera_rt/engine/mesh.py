"""Process groups of one rank: world, mesh dimensions (torch's DeviceMesh), one group per directed pipeline edge.

Every group is made by all ranks in one global order: torch allows groups to be made by their members alone, but that
hangs from three ranks on. An edge has a group of its own, so its messages need no tags: they arrive in the order sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tessera_rt.errors import PlanError, Problem, TransportError
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Mesh, Plan, output_of
from tessera_rt.waits import short_cause, wait

_DIGEST_WORDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups this rank is in. A column is the set of ranks with the same (dp_i, ep_i), one per pipeline rank.

    ``ep``, ``dp``, ``data`` (dp x ep) of this pipeline rank are None when they would hold one rank. ``edges``: those of
    this column that touch this rank, by (source, target) pipeline ranks. ``tied``: the two ranks of this column that
    hold embedding and head of a model that ties them, if this rank is one of two; ``tied_ranks`` are their global
    ranks, embedding first (empty elsewhere).
    """

    mesh: Mesh
    rank: int
    pp_i: int
    dp_i: int
    ep_i: int
    timeout_s: float
    world: dist.ProcessGroup
    device_mesh: DeviceMesh
    ep: dist.ProcessGroup | None
    dp: dist.ProcessGroup | None
    data: dist.ProcessGroup | None
    edges: Mapping[tuple[int, int], dist.ProcessGroup]
    tied: dist.ProcessGroup | None = None
    tied_ranks: tuple[int, ...] = ()

    def global_rank(self, pp_i: int) -> int:
        """The rank of pipeline rank ``pp_i`` in the same column."""
        return self.mesh.rank(pp_i, self.dp_i, self.ep_i)

    @property
    def name(self) -> str:
        """How messages call this rank."""
        return self.name_of(self.pp_i)

    def name_of(self, pp_i: int) -> str:
        return f"rank {self.global_rank(pp_i)} (pipeline rank {pp_i})"

    def wait(self, work: dist.Work, what: str, group: dist.ProcessGroup) -> None:
        """Wait for a collective of ``group``; WaitError (a TransportError) names it and the other members."""
        others = [rank for rank in dist.get_process_group_ranks(group) if rank != self.rank]
        text = f"{what} with {ranks_text(others)}"
        wait(work, self.name, text, others, timeout_s=self.timeout_s)

    def close(self, *, abort: bool = False) -> None:
        """Give the groups back. ``abort``: after a failure, so that peers which still wait learn of it at once."""
        made = [self.world, self.ep, self.dp, self.data, self.tied, *self.edges.values()]
        made += [self.device_mesh.get_group(dim) for dim in ("pp", "dp", "ep")]
        # A set would order the groups by address; all members must take them down in the same order.
        for group in {id(group): group for group in made if group is not None}.values():
            if abort:
                group.abort()
            dist.destroy_process_group(group)


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 2 and 3``, or the first ones of many."""
    shown = [str(rank) for rank in ranks[:8]] + ([f"{len(ranks) - 8} more"] if len(ranks) > 8 else [])
    if len(shown) < 2:
        return f"rank {shown[0]}" if shown else "no other rank"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def make_groups(plan: Plan, spec: ModelSpec, *, timeout_s: float, device_type: str = "cpu") -> Groups:
    """All groups that running ``plan`` needs, with ``timeout_s`` as their time-out. Collective over the default group.

    Raises PlanError on every rank, before any group is made, when the plan is for another number of processes or for
    another model; and when the ranks hold different plans. TransportError when a rank does not take part.
    """
    _check_processes(plan, spec)
    try:
        return _Maker(plan, spec, timeout_s, device_type).make()
    except RuntimeError as error:
        raise TransportError(
            f"rank {dist.get_rank()} could not make the process groups of the plan with all {plan.mesh.world} ranks "
            f"within {timeout_s:g} s: {short_cause(error)}"
        ) from error


def pipeline_edges(plan: Plan) -> tuple[tuple[int, int], ...]:
    """The directed edges (source, target) between pipeline ranks that messages of the plan use, sorted."""
    parts = (part for actions in plan.actions for action in actions for part in action.passes)
    messages = (output_of(plan, part) for part in parts)
    return tuple(sorted({(message.source, message.target) for message in messages if message}))


def tied_pipeline_ranks(plan: Plan, spec: ModelSpec) -> tuple[int, ...]:
    """Pipeline ranks of embedding and head if the model ties them and they are on different ranks, else ()."""
    if not spec.tied:
        return ()
    holders = [_holder(plan, item) for item in (0, len(spec.items) - 1)]
    return tuple(holders) if holders[0] != holders[1] else ()


def _holder(plan: Plan, item: int) -> int:
    for stage in plan.stages:
        if stage.start <= item < stage.stop:
            return stage.rank
    raise PlanError.of("plan", [Problem("stages", f"none holds item {item}", "every item of the model in one stage")])


def _check_processes(plan: Plan, spec: ModelSpec) -> None:
    if not dist.is_initialized():
        allowed = "made before the engine (torch.distributed.init_process_group)"
        raise PlanError.of(
            "plan", [Problem("process group", None, allowed, "start ranks with tessera train or torchrun")]
        )
    problems: list[Problem] = []
    mesh, world = plan.mesh, dist.get_world_size()
    if mesh.tp != 1:
        problems.append(Problem("mesh.tp", mesh.tp, "1", "this engine has no tensor parallelism; plan with tp 1"))
    if mesh.world != world:
        size = f"pp {mesh.pp} x dp {mesh.dp} x ep {mesh.ep} = {mesh.world}"
        remedy = f"start {mesh.world} processes, or plan for {world}"
        problems.append(Problem("mesh", size, f"the number of processes, {world}", remedy))
    if plan.fingerprint != spec.fingerprint:
        remedy = "plan this model, or load the model that the plan was made for"
        problems.append(
            Problem("fingerprint", plan.fingerprint, f"that of model {spec.name}, {spec.fingerprint}", remedy)
        )
    if problems:
        raise PlanError.of(f"plan for {plan.model}", problems)


class _Maker:
    """Makes groups in one global order and keeps those of this rank."""

    def __init__(self, plan: Plan, spec: ModelSpec, timeout_s: float, device_type: str) -> None:
        self.plan, self.spec, self.mesh = plan, spec, plan.mesh
        self.timeout_s, self.device_type = timeout_s, device_type
        self.rank = dist.get_rank()
        self.pp_i, self.dp_i, self.ep_i = self.mesh.coordinate(self.rank)

    def make(self) -> Groups:
        world = self._one_of([list(range(self.mesh.world))])
        assert world is not None
        self._same_plan(world)
        ranks = torch.arange(self.mesh.world).view(self.mesh.pp, self.mesh.dp, self.mesh.ep)
        pp = self._one_of(ranks.flatten(1).T.tolist())
        dp = self._one_of(ranks.transpose(1, 2).flatten(0, 1).tolist())
        ep = self._one_of(ranks.flatten(0, 1).tolist())
        data = self._one_of(ranks.flatten(1).tolist()) if self.mesh.dp * self.mesh.ep > 1 else None
        assert pp and dp and ep
        edges = {}
        for source, target in pipeline_edges(self.plan):
            group = self._one_of(torch.stack([ranks[source].flatten(), ranks[target].flatten()], 1).tolist())
            if group is not None:
                edges[source, target] = group
        tied_ranks = [ranks[i].flatten().tolist() for i in tied_pipeline_ranks(self.plan, self.spec)]
        pairs = [list(pair) for pair in zip(*tied_ranks, strict=True)]
        return Groups(
            mesh=self.mesh,
            rank=self.rank,
            pp_i=self.pp_i,
            dp_i=self.dp_i,
            ep_i=self.ep_i,
            timeout_s=self.timeout_s,
            world=world,
            device_mesh=DeviceMesh.from_group([pp, dp, ep], self.device_type, ranks, mesh_dim_names=("pp", "dp", "ep")),
            ep=ep if self.mesh.ep > 1 else None,
            dp=dp if self.mesh.dp > 1 else None,
            data=data,
            edges=edges,
            tied=self._one_of(pairs) if pairs else None,
            tied_ranks=next((tuple(pair) for pair in pairs if self.rank in pair), ()),
        )

    def _one_of(self, partition: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """Makes a group for each set of ranks; the one that this rank is in, if any."""
        mine: dist.ProcessGroup | None = None
        for ranks in partition:
            group = dist.new_group(list(ranks), timeout=timedelta(seconds=self.timeout_s))
            if self.rank in ranks:
                mine = group
        return mine

    def _same_plan(self, world: dist.ProcessGroup) -> None:
        """The other groups follow from the plan: ranks with different plans would wait for one another for ever."""
        plan = self.plan
        text = repr((plan.fingerprint, plan.mesh, plan.microbatches, plan.stages, plan.actions))
        digest = hashlib.sha256(text.encode()).digest()
        words = [int.from_bytes(digest[8 * i : 8 * i + 8], "big", signed=True) for i in range(_DIGEST_WORDS)]
        all_words = [torch.zeros(_DIGEST_WORDS, dtype=torch.int64) for _ in range(self.mesh.world)]
        mine = torch.tensor(words)
        work = dist.all_gather(all_words, mine, group=world, async_op=True)
        everyone = range(self.mesh.world)
        wait(work, f"rank {self.rank}", "the comparison of plans with all ranks", everyone, timeout_s=self.timeout_s)
        if any(not torch.equal(theirs, all_words[0]) for theirs in all_words):
            ranks: dict[tuple[int, ...], list[int]] = {}
            for rank, theirs in enumerate(all_words):
                ranks.setdefault(tuple(theirs.tolist()), []).append(rank)
            held = " | ".join(ranks_text(of_plan) for of_plan in ranks.values())
            allowed = "the same plan on all ranks (these hold different ones)"
            raise PlanError.of("plan", [Problem("plan held by", held, allowed, "load one plan file on all ranks")])
