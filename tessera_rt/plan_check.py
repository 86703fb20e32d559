"""check_plan: every way in which a plan can contradict itself, its model, or the processes it is started on.

Checks build on one another: task orders are looked at once the stages are right, messages once the action lists are.
Whatever can be looked at is, and one PlanError lists all of it. All dp x ep ranks of a pipeline rank run the same list,
so the order of collectives within their group is the same by construction; nothing in a plan could make it differ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from tessera_rt.errors import PlanError, Problem, ScheduleError
from tessera_rt.files.task_names import item_labels
from tessera_rt.model_spec import (
    Attention,
    AttentionKind,
    FeedForward,
    FeedForwardKind,
    Item,
    ItemKind,
    LayerSpec,
    ModelSpec,
)
from tessera_rt.plan import (
    MOST_ITEMS,
    PLAN_VERSION,
    SOLVER_STATUSES,
    TAPERED_ENDS,
    Action,
    ActionKind,
    Interleaving,
    Plan,
    Stage,
)
from tessera_rt.rendezvous import find_stuck, pass_events
from tessera_rt.tasks import Pass, Resource, TaskGraph, chunk_tasks, parse_task_name

_PASS_OF = {ActionKind.F: Pass.F, ActionKind.B: Pass.B, ActionKind.I: Pass.B, ActionKind.W: Pass.W}


def check_plan(plan: Plan, model: ModelSpec | None = None, *, world: int | None = None) -> None:
    """Raise one PlanError with every inconsistency of the plan, or return.

    ``model``: also hold the plan against the model it is to run. ``world``: number of processes that were started; must
    be the mesh's. Without a model its items are read off the plan's task names, which shows everything but a task that
    is missing throughout.
    """
    problems = [*_figures(plan), *_world(plan, world)]
    stage_problems = [*_stage_list(plan), *_cover(plan, model)]
    problems += stage_problems
    if not stage_problems:
        items = model.items if model is not None else _items_of(plan)
        problems += _interleavings(plan, items)
        action_problems = list(_actions(plan))
        problems += action_problems
        missing = list(_missing_interleavings(plan))
        problems += missing
        if not action_problems and not missing:
            problems += _slots(plan)
            problems += _messages(plan)
    if problems:
        raise PlanError.of(f"plan for {plan.model}", problems)


def action_tasks(key: str, stages: Sequence[Stage], items: Sequence[Item], *, tp: int = 1) -> TaskGraph:
    """The tasks of an action by its key (``0F;3B``): its passes side by side, each in canonical order.

    ``tp``: as in ``chunk_tasks``.

    Raises PlanError for a key that is none, names a stage that is not there or passes that cannot run together.
    """
    parts = [Action.parse(f"{part}0") for part in key.split(";")]
    problems = _parts(key, parts)
    problems += [
        Problem(key, f"stage {part.stage}", f"a stage from 0 to {len(stages) - 1}")
        for part in parts
        if part.stage >= len(stages)
    ]
    if problems:
        raise PlanError.of("action", problems)
    graph = TaskGraph(())
    for part in parts:
        stage = stages[part.stage]
        chunk = items[stage.start : stage.stop]
        graph = graph.merged(chunk_tasks(chunk, _PASS_OF[part.kind], with_w=part.kind is ActionKind.B, tp=tp))
    return graph


# -- figures ----------------------------------------------------------------------------------------------------------


def _at_least(least: int, prefix: str, values: object, names: Iterable[str]) -> Iterator[Problem]:
    for name in names:
        value = getattr(values, name)
        if not value >= least:  # also catches NaN
            yield Problem(f"{prefix}{name}", value, f"at least {least}")


def _figures(plan: Plan) -> Iterator[Problem]:
    """Everything that is a number or a choice by itself, and what two places of the plan say twice."""
    if plan.version != PLAN_VERSION:
        yield Problem("version", plan.version, str(PLAN_VERSION), "make the plan again with this version of Tessera")
    yield from _at_least(1, "mesh.", plan.mesh, ("pp", "vpp", "dp", "ep", "tp"))
    yield from _at_least(1, "", plan, ("microbatches",))
    yield from _at_least(0, "", plan, ("shadows", "tapered"))
    yield from _taper(plan)
    if plan.pad not in ("groups", "shadow"):
        yield Problem("pad", plan.pad, "groups or shadow")
    if plan.shadows and plan.pad != "shadow":
        yield Problem("shadows", plan.shadows, f"0 with pad {plan.pad}")
    yield from _at_least(1, "workload.", plan.workload, ("tokens", "context", "dp", "ep", "tp"))
    for name in ("dp", "ep", "tp"):
        said, meant = getattr(plan.workload, name), getattr(plan.mesh, name)
        if said != meant:
            yield Problem(f"workload.{name}", said, f"{meant}, as in the mesh", "the costs were made for another mesh")
    for name in ("actions", "memory"):
        if len(getattr(plan, name)) != plan.mesh.pp:
            value = f"{len(getattr(plan, name))} entries"
            yield Problem(name, value, f"one entry for each of {plan.mesh.pp} pipeline ranks")
    for rank, memory in enumerate(plan.memory):
        names = ("weights", "gradients", "optimizer", "activations", "pending_w", "buffers", "limit")
        yield from _at_least(0, f"memory[{rank}].", memory, names)
        if memory.peak > memory.limit > 0:
            remedy = "use more stages, fewer tokens or recomputation, or correct the limit"
            allowed = f"at most its limit of {memory.limit} bytes"
            yield Problem(f"memory[{rank}]", f"{memory.peak} bytes", allowed, remedy)
    assumptions, solver = plan.assumptions, plan.solver
    yield from _at_least(0, "assumptions.", assumptions, ("comm_sms",))
    if not 0 <= assumptions.contention < math.inf:
        yield Problem("assumptions.contention", assumptions.contention, "a finite number of at least 0")
    yield from _at_least(0, "assumptions.link.", assumptions.link, ("latency_ns",))
    if not assumptions.link.bytes_per_s > 0:
        yield Problem("assumptions.link.bytes_per_s", assumptions.link.bytes_per_s, "more than 0")
    yield from _at_least(0, "solver.", solver, ("t_dom_ns", "bound_ns", "step_ns", "seconds"))
    if solver.status not in SOLVER_STATUSES:
        yield Problem("solver.status", solver.status, f"one of {', '.join(SOLVER_STATUSES)}")
    if solver.bound_ns > solver.t_dom_ns:
        yield Problem("solver.bound_ns", solver.bound_ns, f"at most t_dom_ns ({solver.t_dom_ns}), which it bounds")
    if solver.bottleneck and solver.bottleneck not in plan.interleavings:
        yield Problem("solver.bottleneck", solver.bottleneck, "the key of an interleaving of this plan, or empty")


def _taper(plan: Plan) -> Iterator[Problem]:
    """Small micro-batches at the ends: no more than take the place of all full ones, of half their tokens, marked."""
    tapered, marked = plan.tapered, TAPERED_ENDS in plan.simulate_only
    if tapered > plan.microbatches >= 1:
        allowed = f"at most microbatches ({plan.microbatches}), the full ones that 2 x tapered small ones replace"
        yield Problem("tapered", tapered, allowed)
    if marked and not tapered:
        remedy = f"{TAPERED_ENDS} in simulate_only says that there are small micro-batches"
        yield Problem("tapered", tapered, f"at least 1 with {TAPERED_ENDS}", remedy)
    if tapered and not marked:
        allowed = f"a list with {TAPERED_ENDS}, since tapered is {tapered}"
        yield Problem("simulate_only", list(plan.simulate_only), allowed, "such a step can only be simulated")
    if tapered and plan.workload.tokens % 2:
        allowed = "an even number with tapered ends: a small micro-batch has half of them"
        yield Problem("workload.tokens", plan.workload.tokens, allowed)


def _world(plan: Plan, world: int | None) -> Iterator[Problem]:
    if world is not None and plan.mesh.world != world:
        mesh = plan.mesh
        sizes = [f"pp {mesh.pp}", f"dp {mesh.dp}", f"ep {mesh.ep}"] + ([f"tp {mesh.tp}"] if mesh.tp > 1 else [])
        remedy = f"start {mesh.world} processes, or make a plan for {world}"
        value = f"{' x '.join(sizes)} = {mesh.world} processes"
        yield Problem("mesh", value, f"the number of processes that were started, {world}", remedy)


# -- stages -----------------------------------------------------------------------------------------------------------


def _stage_list(plan: Plan) -> Iterator[Problem]:
    """Numbers, ranks and count of the stages."""
    pp, vpp = plan.mesh.pp, plan.mesh.vpp
    if not plan.stages:
        yield Problem("stages", "none", "at least one stage")
        return
    ranks_known = True
    for position, stage in enumerate(plan.stages):
        field = f"stages[{position}]"
        if stage.index != position:
            yield Problem(f"{field}.index", stage.index, f"{position}: stages are listed in order from 0")
        if not 0 <= stage.rank < pp:
            ranks_known = False
            yield Problem(f"{field}.rank", stage.rank, f"a pipeline rank from 0 to {pp - 1}")
        yield from _at_least(0, f"{field}.", stage, ("slots",))
    held = Counter(stage.rank for stage in plan.stages)
    for rank in range(min(pp, len(plan.stages) + 1)):  # one of these has none where pp is more than the stages
        if ranks_known and not held[rank]:
            yield Problem("stages", f"none on rank {rank}", "at least one stage on every pipeline rank")
    looped = all(stage.rank == position % pp for position, stage in enumerate(plan.stages)) if pp >= 1 else False
    if looped and len(plan.stages) != plan.mesh.stages:
        yield Problem("stages", f"{len(plan.stages)} stages", f"pp x vpp = {pp} x {vpp} = {plan.mesh.stages} stages")
    elif ranks_known and not looped and max(held.values()) != vpp:
        yield Problem("mesh.vpp", vpp, f"the most stages on a rank, {max(held.values())}")


def _cover(plan: Plan, model: ModelSpec | None) -> Iterator[Problem]:
    """The cuts: every item of the model in exactly one stage, in order."""
    if model is not None and plan.fingerprint != model.fingerprint:
        value, allowed = f"{plan.fingerprint[:12]}... ({plan.model})", f"{model.fingerprint[:12]}... ({model.name})"
        yield Problem("fingerprint", value, allowed, "the plan was made for another model; plan this one")
    count = len(model.items) if model is not None else max((stage.stop for stage in plan.stages), default=0)
    if count > MOST_ITEMS:  # an edited number: nothing is counted up to it
        yield Problem("stages", f"items up to {count}", f"at most {MOST_ITEMS} items")
        return
    if model is not None:
        labels = tuple(item.label for item in model.items)
    else:
        labels = item_labels(count, _task_names(plan))
    homes: list[list[int]] = [[] for _ in range(count)]
    sound = True
    for position, stage in enumerate(plan.stages):
        if not 0 <= stage.start <= stage.stop <= count:
            sound = False
            allowed = f"a range within the model's items 0 to {count}"
            yield Problem(f"stages[{position}]", f"items {stage.start} to {stage.stop}", allowed)
        for item in range(max(0, stage.start), min(count, stage.stop)):
            homes[item].append(position)
    for item, stages in enumerate(homes):
        if not stages:
            yield Problem("stages", f"{labels[item]} in no stage", "every item in one stage", "correct start and stop")
        elif len(stages) > 1:
            value = f"{labels[item]} in stages {', '.join(map(str, stages))}"
            yield Problem("stages", value, "every item in one stage", "correct start and stop")
    if sound and all(len(stages) == 1 for stages in homes):
        end = 0
        for position, stage in enumerate(plan.stages):
            if stage.start != end:
                allowed = f"{end}, where stage {position - 1} ends" if position else "0"
                remedy = f"{labels[stage.start] if stage.start < count else 'the stage'} is out of order"
                yield Problem(f"stages[{position}].start", stage.start, allowed, remedy)
            end = stage.stop


def _task_names(plan: Plan) -> Iterator[str]:
    return (name for interleaving in plan.interleavings.values() for name in interleaving.order)


def _items_of(plan: Plan) -> tuple[Item, ...]:
    """The model's items as far as the plan's task names tell: with these, its chunks have the same tasks."""
    kinds: dict[str, set[str]] = {}
    for name in set(_task_names(plan)):
        head, _, label = name.partition(":")
        pass_, _, kind = head.partition("_")
        if pass_ != Pass.W:
            kinds.setdefault(label, set()).add(kind)
    items = []
    for label in item_labels(max(stage.stop for stage in plan.stages), _task_names(plan)):
        if label in ("EMBED", "HEAD"):
            items.append(Item(ItemKind(label.lower()), 0, None))
            continue
        has = kinds.get(label, set())
        feed_forward = (
            FeedForwardKind.MOE if "ROUTE" in has else FeedForwardKind.DENSE if "MLP" in has else FeedForwardKind.NONE
        )
        layer = LayerSpec(
            attention=Attention(kind=AttentionKind.SOFTMAX if "ATTN" in has else AttentionKind.NONE),
            feed_forward=FeedForward(kind=feed_forward, shared_intermediate=int("SHARED" in has)),
        )
        items.append(Item(ItemKind.LAYER if label[0] == "L" else ItemKind.MTP, int(label[1:]), layer))
    return tuple(items)


# -- actions ----------------------------------------------------------------------------------------------------------


def _parts(field: str, parts: Sequence[Action]) -> list[Problem]:
    """What may run together: at most one F, one B or I, one W; a full backward brings its own W."""
    kinds = Counter("B" if part.kind is ActionKind.I else part.kind.value for part in parts)
    problems = [
        Problem(field, part.kind.value, "F, B, I or W: messages follow from these")
        for part in parts
        if part.kind not in _PASS_OF
    ]
    if any(number > 1 for number in kinds.values()):
        problems.append(Problem(field, ";".join(map(str, parts)), "at most one F, one B or I, and one W together"))
    if any(part.kind is ActionKind.B for part in parts) and kinds["W"]:
        problems.append(Problem(field, ";".join(map(str, parts)), "a W beside I, not beside B, which does its own W"))
    return problems


def _actions(plan: Plan) -> Iterator[Problem]:
    """Every pass exactly once, on its stage's rank, F before B (or I before W)."""
    count, microbatches = len(plan.stages), plan.passes
    if plan.tapered and (listed := _listed_everywhere(plan)) not in (None, microbatches):
        allowed = f"{listed}, the micro-batches of every stage in the action lists, small ones counted"
        yield Problem("microbatches + tapered", microbatches, allowed, "correct either number")
        return
    places: dict[tuple[int, ActionKind], dict[int, list[int]]] = {}
    for rank, actions in enumerate(plan.actions):
        for position, action in enumerate(actions):
            field = f"actions[{rank}][{position}]"
            yield from _parts(field, action.passes)
            for part in action.passes:
                if not 0 <= part.stage < count:
                    yield Problem(field, str(action), f"a stage from 0 to {count - 1}")
                elif plan.stages[part.stage].rank != rank:
                    allowed = f"on rank {plan.stages[part.stage].rank}, which has stage {part.stage}"
                    yield Problem(field, str(action), allowed)
                elif not 0 <= part.microbatch < microbatches:
                    yield Problem(field, str(action), f"a micro-batch from 0 to {microbatches - 1}")
                else:
                    places.setdefault((part.stage, part.kind), {}).setdefault(part.microbatch, []).append(position)
    # An edited number is compared with what is listed before anything is counted up to it.
    listed = max((sum(map(len, found.values())) for found in places.values()), default=0)
    if microbatches > listed:
        remedy = "the action lists have no more passes of one kind on one stage"
        yield Problem("microbatches", microbatches, f"at most {listed}", remedy)
        return
    for stage in range(count):
        found = {kind: places.get((stage, kind), {}) for kind in _PASS_OF}
        yield from _passes_of_stage(plan, stage, found)


def _listed_everywhere(plan: Plan) -> int | None:
    """How many F the lists have on every stage, None where not the same ones on all."""
    parts = (part for actions in plan.actions for action in actions for part in action.passes)
    forwards = {(part.stage, part.microbatch) for part in parts if part.kind is ActionKind.F}
    number = 1 + max((microbatch for _, microbatch in forwards), default=-1)
    return number if len(forwards) == number * len(plan.stages) else None


def _passes_of_stage(plan: Plan, stage: int, found: dict[ActionKind, dict[int, list[int]]]) -> Iterator[Problem]:
    """``found[kind][microbatch]``: positions in the rank's list of the stage's passes."""
    field = f"actions[{plan.stages[stage].rank}]"
    forward, backward, inputs, weights = (found[kind] for kind in _PASS_OF)

    def report(bad: Callable[[int], bool], what: str, allowed: str) -> Iterator[Problem]:
        numbers = [m for m in range(plan.passes) if bad(m)]
        if numbers:
            yield Problem(field, f"stage {stage}: {what} of micro-batch {_number_ranges(numbers)}", allowed)

    def times(passes: dict[int, list[int]], m: int) -> int:
        return len(passes.get(m, ()))

    yield from report(lambda m: times(forward, m) == 0, "no F", "exactly one F of every micro-batch")
    yield from report(lambda m: times(forward, m) > 1, "several F", "exactly one F of every micro-batch")
    once = "exactly one B, or one I and one W, of every micro-batch"
    yield from report(lambda m: times(backward, m) + times(inputs, m) == 0, "no backward", once)
    yield from report(lambda m: times(backward, m) + times(inputs, m) > 1, "several backwards", once)
    yield from report(lambda m: times(inputs, m) > 0 and times(weights, m) == 0, "I without W", once)
    yield from report(lambda m: times(weights, m) > 0 and times(inputs, m) == 0, "W without I", once)
    yield from report(lambda m: times(weights, m) > 1, "several W", once)

    def not_before(first: dict[int, list[int]], second: dict[int, list[int]]) -> Callable[[int], bool]:
        return lambda m: bool(first.get(m) and second.get(m)) and first[m][0] >= second[m][0]

    later = "in a later action than {} of the same micro-batch"
    for name, passes in (("B", backward), ("I", inputs)):
        yield from report(not_before(forward, passes), name, later.format("F"))
    yield from report(not_before(inputs, weights), "W", later.format("I"))
    yield from _weight_order(field, stage, backward, inputs, weights)


def _weight_order(
    field: str, stage: int, backward: dict[int, list[int]], inputs: dict[int, list[int]], weights: dict[int, list[int]]
) -> Iterator[Problem]:
    """W in the order of the backward passes, where a full B does its own W in its place."""
    began, done = inputs | backward, weights | backward
    order = sorted(began.keys() & done.keys(), key=lambda m: began[m][0])
    for earlier, m in pairwise(order):
        if done[earlier][0] > done[m][0]:
            allowed = f"after W of micro-batch {earlier}, whose I came first: weight gradients keep that order"
            yield Problem(
                field, f"stage {stage}: W of micro-batch {m}{' (in its B)' if m in backward else ''}", allowed
            )


def _number_ranges(numbers: Sequence[int]) -> str:
    """``0-3, 7``"""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


# -- interleavings ----------------------------------------------------------------------------------------------------


def _missing_interleavings(plan: Plan) -> Iterator[Problem]:
    keys = dict.fromkeys(action.key for actions in plan.actions for action in actions)
    for key in keys:
        if key not in plan.interleavings:
            yield Problem(f"interleavings.{key}", None, "given, since the action lists contain this action")


def _interleavings(plan: Plan, items: Sequence[Item]) -> Iterator[Problem]:
    known: set[str] = set()
    for key, interleaving in plan.interleavings.items():
        field = f"interleavings.{key}"
        if interleaving.key != key:
            yield Problem(f"{field}.key", interleaving.key, key)
        try:
            graph = action_tasks(key, plan.stages, items, tp=plan.mesh.tp)
        except (PlanError, ScheduleError) as error:
            yield Problem(field, key, "the key of an action such as 0F or 0F;3B", str(error.problems[0]))
            continue
        known.update(graph.names)
        order_problems = list(_order(f"{field}.order", interleaving, graph))
        yield from order_problems
        yield from _times(field, interleaving, None if order_problems else graph)
        yield from _at_least(0, f"{field}.", interleaving, ("makespan_ns", "comm_sms", "bound_ns"))
        if interleaving.bound_ns > interleaving.makespan_ns and interleaving.starts_ns:
            allowed = f"at most makespan_ns ({interleaving.makespan_ns}), which it bounds"
            yield Problem(f"{field}.bound_ns", interleaving.bound_ns, allowed)
    for position, name in enumerate(plan.target_slots):
        if name not in known:
            yield Problem(f"target_slots[{position}]", name, "a task of this plan, such as F_MLP:L3")


def _order(field: str, interleaving: Interleaving, graph: TaskGraph) -> Iterator[Problem]:
    """A permutation of the graph's tasks in which none comes before what it needs."""
    times = Counter(interleaving.order)
    twice = [name for name, number in times.items() if number > 1]
    unknown = [name for name in times if name not in graph.by_name]
    missing = [name for name in graph.names if name not in times]
    if twice:
        yield Problem(field, " ".join(twice), "named once each")
    if unknown:
        yield Problem(field, " ".join(unknown), "tasks of this action", "see the names in tasks.py")
    if missing:
        yield Problem(field, f"without {' '.join(missing)}", "all tasks of this action")
    position = {name: i for i, name in enumerate(interleaving.order)}
    for name, i in position.items():
        for dep in graph.by_name[name].deps if name in graph.by_name else ():
            if position.get(dep, -1) > i:
                yield Problem(field, f"{name} before {dep}", f"{dep} first, which {name} needs")


def _times(field: str, interleaving: Interleaving, graph: TaskGraph | None) -> Iterator[Problem]:
    """One start per task within the makespan, rising on each lane; an order given by hand may have none."""
    starts = interleaving.starts_ns
    if not starts and interleaving.method == "given":
        return
    if len(starts) != len(interleaving.order):
        yield Problem(f"{field}.starts_ns", f"{len(starts)} numbers", f"one per task, {len(interleaving.order)}")
        return
    outside = [start for start in starts if not 0 <= start <= interleaving.makespan_ns]
    if outside:
        yield Problem(f"{field}.starts_ns", outside[0], f"from 0 to the makespan, {interleaving.makespan_ns}")
    elif graph is not None:
        last: dict[Resource, int] = {}
        for name, start in zip(interleaving.order, starts, strict=True):
            lane = parse_task_name(name)[1].resource
            if start < last.get(lane, 0):
                yield Problem(f"{field}.starts_ns", start, f"at least {last[lane]} for {name}: a lane keeps the order")
                return
            last[lane] = start


# -- what follows from the lists --------------------------------------------------------------------------------------


def _slots(plan: Plan) -> Iterator[Problem]:
    """Micro-batches between the start of F and the end of B (or I), with overlap and without."""
    need = [0] * len(plan.stages)
    for overlap in (True, False):
        for rank in range(plan.mesh.pp):
            flying: Counter[int] = Counter()
            for event in pass_events(plan, rank, overlap=overlap):
                stage = event.part.stage
                if event.part.kind is ActionKind.F and event.starts:
                    flying[stage] += 1
                    need[stage] = max(need[stage], flying[stage])
                elif event.part.kind in (ActionKind.B, ActionKind.I) and not event.starts:
                    flying[stage] -= 1
    for stage, most in enumerate(need):
        if plan.stages[stage].slots < most:
            allowed = f"at least {most}, the micro-batches its rank's list keeps in flight"
            yield Problem(f"stages[{stage}].slots", plan.stages[stage].slots, allowed)


def _messages(plan: Plan) -> Iterator[Problem]:
    """No rank waits for ever, with overlap and without."""
    for overlap in (True, False):
        stuck = find_stuck(plan, overlap=overlap)
        mode = "on" if overlap else "off"
        for entry in stuck:
            field = f"actions[{entry.rank}][{entry.index}]"
            yield Problem(field, str(entry.action), f"reached by its input (overlap {mode})", entry.reason)
        if stuck:
            return
