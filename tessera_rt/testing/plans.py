"""Small valid plans made by hand, for tests: no planner or scheduler has a part in them.

The order of each rank comes from walking the pipeline in ticks: in every tick each rank takes a pass whose input was
there when the tick began (the oldest backward first). Such an order can always run, whatever the placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tessera_rt.costs import Link, Workload
from tessera_rt.model_spec import (
    Attention,
    AttentionKind,
    FeedForward,
    FeedForwardKind,
    LayerSpec,
    ModelSpec,
)
from tessera_rt.plan import (
    Action,
    ActionKind,
    CostAssumptions,
    Interleaving,
    Mesh,
    Plan,
    RankMemory,
    SolverStatus,
    Stage,
)
from tessera_rt.tasks import Pass, Resource, Task, TaskGraph, chunk_tasks

TASK_NS = {Resource.COMP: 1000, Resource.COMM: 700}
_PASS_OF = {ActionKind.F: Pass.F, ActionKind.B: Pass.B, ActionKind.I: Pass.B, ActionKind.W: Pass.W}


def simple_model(layers: str = "dmsm", *, mtp: str = "", hidden: int = 16, vocab: int = 32) -> ModelSpec:
    """A small model, one letter per layer: d dense, m MoE, s MoE with shared expert, a attention only, f dense only."""
    return ModelSpec(
        name=f"simple-{layers}",
        hidden=hidden,
        vocab=vocab,
        layers=tuple(_layer(letter, hidden) for letter in layers),
        mtp=tuple(_layer(letter, hidden) for letter in mtp),
        context=64,
    )


def even_cuts(items: int, stages: int) -> tuple[int, ...]:
    """Boundaries of ``stages`` stages over ``items`` items, sizes differing by at most one: 0, ..., items."""
    return tuple(stage * items // stages for stage in range(stages + 1))


def simple_plan(
    model: ModelSpec,
    *,
    pp: int = 2,
    vpp: int = 1,
    microbatches: int = 4,
    cuts: Sequence[int] | None = None,
    placement: Sequence[int] | None = None,
    actions: Sequence[Sequence[Action]] | None = None,
    order: str = "1f1b",
    joint: bool = False,
    split_w: bool = False,
    dp: int = 1,
    ep: int = 1,
    tokens: int = 64,
) -> Plan:
    """A valid plan for ``model``.

    ``cuts``: boundaries 0, ..., number of items (default: even; equal neighbours make an empty stage). ``placement``:
    rank of every stage (default: stage s on rank s mod pp). ``order``: 1f1b (backward first, stage s of n holds at
    most n - s micro-batches, one more with ``joint``) or gpipe (every rank does all its forwards first). ``joint``: a
    rank that could do an F and a B does both in one overlap action. ``split_w``: backward as I, then W right behind it.
    ``actions``: the ranks' lists, instead of an order made here. Tasks take ``TASK_NS``; each interleaving takes its
    passes in canonical order, one task of each in turn.
    """
    if cuts is None:
        cuts = even_cuts(len(model.items), pp * vpp if placement is None else len(placement))
    count = len(cuts) - 1
    placement = tuple(placement) if placement is not None else tuple(stage % pp for stage in range(count))
    if actions is None:
        walk = _Walk(placement, microbatches, gpipe=order == "gpipe", joint=joint, split_w=split_w)
        walk.run()
        actions = walk.actions
    interleavings: dict[str, Interleaving] = {}
    for action in (action for rank in actions for action in rank):
        if action.key not in interleavings:
            graphs = [_graph(model, cuts, part) for part in action.passes]
            interleavings[action.key] = _interleaving(action.key, graphs)
    slots = _slots(actions, count)
    memory = RankMemory(
        weights=4096, gradients=8192, optimizer=0, activations=1024, pending_w=256, buffers=512, limit=65536
    )
    return Plan(
        model=model.name,
        fingerprint=model.fingerprint,
        mesh=Mesh(pp=pp, vpp=max(placement.count(rank) for rank in range(pp)), dp=dp, ep=ep),
        template=order,
        microbatches=microbatches,
        stages=tuple(
            Stage(index=s, rank=placement[s], start=cuts[s], stop=cuts[s + 1], slots=slots[s]) for s in range(count)
        ),
        actions=tuple(map(tuple, actions)),
        interleavings=interleavings,
        memory=(memory,) * pp,
        workload=Workload(tokens=tokens, context=tokens, dp=dp, ep=ep, dtype="fp32"),
        assumptions=CostAssumptions(
            source="table", device="none", comm_sms=0, contention=0.0, link=Link(), notes=("made by hand",)
        ),
        solver=SolverStatus(
            objective="step",
            method="given",
            status="heuristic",
            t_dom_ns=max(entry.makespan_ns for entry in interleavings.values()),
            bound_ns=0,
            step_ns=0,
        ),
    )


def _slots(actions: Sequence[Sequence[Action]], stages: int) -> list[int]:
    """Most micro-batches in flight per stage; an overlap holds its F and its B at once."""
    now, most = [0] * stages, [0] * stages
    for action in (action for rank in actions for action in rank):
        for part in action.passes:
            now[part.stage] += part.kind is ActionKind.F
            most[part.stage] = max(most[part.stage], now[part.stage])
        for part in action.passes:
            now[part.stage] -= part.kind in (ActionKind.B, ActionKind.I)
    return most


def _layer(letter: str, hidden: int) -> LayerSpec:
    attention = Attention(kind=AttentionKind.SOFTMAX, heads=2, kv_heads=1, head_dim=hidden // 2, v_dim=hidden // 2)
    dense = FeedForward(kind=FeedForwardKind.DENSE, intermediate=2 * hidden)
    moe = FeedForward(kind=FeedForwardKind.MOE, intermediate=hidden, experts=4, top_k=2)
    nothing = FeedForward(kind=FeedForwardKind.NONE)
    match letter:
        case "d":
            return LayerSpec(attention=attention, feed_forward=dense)
        case "m":
            return LayerSpec(attention=attention, feed_forward=moe)
        case "s":
            return LayerSpec(attention=attention, feed_forward=replace(moe, shared_intermediate=hidden))
        case "a":
            return LayerSpec(attention=attention, feed_forward=nothing)
        case _:
            return LayerSpec(attention=Attention(kind=AttentionKind.NONE), feed_forward=dense)


def _graph(model: ModelSpec, cuts: Sequence[int], part: Action) -> TaskGraph:
    items = model.items[cuts[part.stage] : cuts[part.stage + 1]]
    return chunk_tasks(items, _PASS_OF[part.kind], with_w=part.kind is ActionKind.B)


def _interleaving(key: str, graphs: Sequence[TaskGraph]) -> Interleaving:
    """One task of every pass in turn, each started as soon as its lane and its dependencies allow."""
    queues = [list(graph.tasks) for graph in graphs]
    tasks: list[Task] = []
    while any(queues):
        tasks += [queue.pop(0) for queue in queues if queue]
    free = dict.fromkeys(Resource, 0)
    ends: dict[str, int] = {}
    starts: list[int] = []
    for task in tasks:
        start = max([free[task.resource], *(ends[dep] for dep in task.deps)])
        starts.append(start)
        ends[task.name] = free[task.resource] = start + TASK_NS[task.resource]
    return Interleaving(
        key=key,
        order=tuple(task.name for task in tasks),
        starts_ns=tuple(starts),
        makespan_ns=max(ends.values(), default=0),
        method="fifo",
    )


@dataclass
class _Walk:
    """The pipeline in ticks; ``actions`` per rank are its result."""

    placement: Sequence[int]
    microbatches: int
    gpipe: bool
    joint: bool
    split_w: bool
    actions: list[list[Action]] = field(init=False)

    def __post_init__(self) -> None:
        self.stages = len(self.placement)
        self.actions = [[] for _ in range(max(self.placement) + 1)]
        self.done = {Pass.F: [0] * self.stages, Pass.B: [0] * self.stages}  # micro-batches, in order

    def run(self) -> None:
        while any(done < self.microbatches for done in self.done[Pass.B]):
            chosen = [(rank, self._forward(rank), self._backward(rank)) for rank in range(len(self.actions))]
            for rank, forward, backward in chosen:
                if forward is not None and backward is not None and not self.joint:
                    forward = None
                self._take(rank, forward, backward)

    def _forward(self, rank: int) -> int | None:
        """The stage of the rank whose next forward can run: the one that is furthest behind, then the latest."""
        ready = []
        for stage in self._stages_of(rank):
            done = self.done[Pass.F][stage]
            limit = self.microbatches if self.gpipe else self.stages - stage + self.joint
            if (
                done < self.microbatches
                and (stage == 0 or self.done[Pass.F][stage - 1] > done)
                and done - self.done[Pass.B][stage] < limit
            ):
                ready.append((done, -stage))
        return -min(ready)[1] if ready else None

    def _backward(self, rank: int) -> int | None:
        if self.gpipe and any(self.done[Pass.F][stage] < self.microbatches for stage in self._stages_of(rank)):
            return None
        ready = []
        for stage in self._stages_of(rank):
            done = self.done[Pass.B][stage]
            last = stage == self.stages - 1
            if done < self.done[Pass.F][stage] and (last or self.done[Pass.B][stage + 1] > done):
                ready.append((done, -stage))
        return -min(ready)[1] if ready else None

    def _take(self, rank: int, forward: int | None, backward: int | None) -> None:
        parts: list[Action] = []
        if forward is not None:
            parts.append(Action(ActionKind.F, forward, self.done[Pass.F][forward]))
            self.done[Pass.F][forward] += 1
        if backward is not None:
            kind = ActionKind.I if self.split_w else ActionKind.B
            parts.append(Action(kind, backward, self.done[Pass.B][backward]))
            self.done[Pass.B][backward] += 1
        if not parts:
            return
        self.actions[rank].append(parts[0] if len(parts) == 1 else Action.overlap(*parts))
        if backward is not None and self.split_w:
            self.actions[rank].append(Action(ActionKind.W, backward, self.done[Pass.B][backward] - 1))

    def _stages_of(self, rank: int) -> list[int]:
        return [stage for stage, on in enumerate(self.placement) if on == rank]
