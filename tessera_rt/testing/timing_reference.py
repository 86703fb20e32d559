"""The timing rules (docs/timing.md) written once more, slowly: a step as a graph of names, run in exact arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from tessera_rt.plan import Action, ActionKind
from tessera_rt.scheduler.graphs import chunk_graph
from tessera_rt.tasks import Pass
from tessera_rt.testing.schedules import Case


@dataclass(frozen=True)
class Step:
    """A node of the reference: a task, a pass's input or output, or a message."""

    preds: tuple[str, ...]
    ns: int = 0
    lane: str = ""
    ranks: tuple[int, ...] = ()  # of a task: where it runs


def reference_nodes(case: Case, *, overlap: bool) -> dict[str, Step]:
    """The whole step as one graph of names, written straight from the timing rules."""
    nodes: dict[str, Step] = {}
    last = len(case.stage_ranks) - 1
    edge_last: dict[tuple[int, int], str] = {}
    for rank, row in enumerate(case.actions):
        before: dict[str, str] = {}
        for action in row:
            part_of: dict[str, Action] = {}
            canonical: list[str] = []
            by_name = {}
            for part in action.passes:
                pass_ = {"F": Pass.F, "W": Pass.W}.get(str(part.kind), Pass.B)
                graph = chunk_graph(
                    case.model, case.costs, *case.bounds[part.stage], pass_, with_w=part.kind is not ActionKind.I
                )
                canonical += graph.names
                by_name.update(graph.by_name)
                part_of.update(dict.fromkeys(graph.names, part))
            order = case.interleavings[action.key].order if overlap else canonical
            for name in order:
                part, task = part_of[name], by_name[name]
                where = f"{part.stage}.{part.microbatch}"
                preds = [f"{where} {dep}" for dep in task.deps]
                if task.pass_ is Pass.W:
                    preds = [f"{where} B{name[1:]}"]
                elif not preds:
                    preds = [f"{where} {task.pass_} in"]
                lane = str(task.resource) if overlap else "COMP"
                if lane in before:
                    preds.append(before[lane])
                nodes[f"{where} {name}"] = Step(tuple(preds), task.ns, str(task.resource), (rank,))
                before[lane] = f"{where} {name}"
            for part in action.passes:
                if part.kind is ActionKind.W:
                    continue
                pass_ = Pass.F if part.kind is ActionKind.F else Pass.B
                where = f"{part.stage}.{part.microbatch}"
                neighbour = part.stage + (-1 if pass_ is Pass.F else 1)
                inputs = [f"{neighbour}.{part.microbatch} {pass_} sent"] if 0 <= neighbour <= last else []
                if pass_ is Pass.B:
                    inputs.append(f"{where} F out")
                nodes[f"{where} {pass_} in"] = Step(tuple(inputs))
                mine = [f"{where} {n}" for n in order if part_of[n] is part and n[0] == pass_]
                nodes[f"{where} {pass_} out"] = Step((f"{where} {pass_} in", *mine))
            sending = [p for p in action.passes if p.kind is not ActionKind.W]
            if overlap:
                sending.sort(
                    key=lambda p: max((i for i, n in enumerate(order) if part_of[n] is p and n[0] != "W"), default=-1)
                )
            for part in sending:
                pass_ = Pass.F if part.kind is ActionKind.F else Pass.B
                where = f"{part.stage}.{part.microbatch} {pass_}"
                to_stage = part.stage + (1 if pass_ is Pass.F else -1)
                if not 0 <= to_stage <= last:
                    continue
                target = case.stage_ranks[to_stage]
                if target == rank:
                    nodes[f"{where} sent"] = Step((f"{where} out",))
                    continue
                boundary = min(part.stage, to_stage)
                filled = [stop for start, stop in case.bounds[: boundary + 1] if stop > start]
                size = case.costs.memory[case.model.items[filled[-1] - 1].label].output if filled else 0
                leave = [edge_last[rank, target]] if (rank, target) in edge_last else []
                nodes[f"{where} left"] = Step((f"{where} out", *leave), case.costs.link.occupancy_ns(size))
                nodes[f"{where} sent"] = Step((f"{where} left",), case.costs.link.latency_ns)
                edge_last[rank, target] = f"{where} left"
    return nodes


def group_nodes(nodes: Mapping[str, Step], ns: Mapping[str, tuple[int, ...]], lanes: int) -> dict[str, Step]:
    """The graph of an expert-parallel group of ``lanes`` ranks: ``<lane>/<name>``, and collectives once, by their name.

    ``ns[name]``: durations of a task on every lane, where they differ from the node's.
    """
    collective = {name for name, node in nodes.items() if node.lane == "COMM"}
    found: dict[str, Step] = {}
    ranks = 1 + max((rank for node in nodes.values() for rank in node.ranks), default=0)
    for name, node in nodes.items():
        preds = [[p if p in collective else f"{lane}/{p}" for p in node.preds] for lane in range(lanes)]
        on = [tuple(rank + lane * ranks for rank in node.ranks) for lane in range(lanes)]
        if name in collective:
            everywhere = dict.fromkeys(p for mine in preds for p in mine)
            longest = max(ns.get(name, (node.ns,)))
            found[name] = replace(node, preds=tuple(everywhere), ns=longest, ranks=sum(on, ()))
            continue
        for lane in range(lanes):
            mine = ns.get(name, (node.ns,) * lanes)[lane]
            found[f"{lane}/{name}"] = replace(node, preds=tuple(preds[lane]), ns=mine, ranks=on[lane])
    return found


def reference_ends(nodes: Mapping[str, Step], contention: Fraction = Fraction(0)) -> dict[str, Fraction]:
    """End times. All nodes whose predecessors have ended run; time moves to the next end, rates are looked up anew."""
    ends: dict[str, Fraction] = {}
    running: dict[str, Fraction] = {}  # work left
    waiting = dict(nodes)
    now = Fraction(0)
    while waiting or running:
        for name in [n for n, node in waiting.items() if all(p in ends for p in node.preds)]:
            running[name] = Fraction(waiting.pop(name).ns)
        assert running, f"the reference is stuck: {sorted(waiting)[:5]}"
        busy = {rank for n in running if nodes[n].lane == "COMM" and running[n] > 0 for rank in nodes[n].ranks}
        rate = {
            n: 1 / (1 + contention) if nodes[n].lane == "COMP" and busy.issuperset(nodes[n].ranks) else Fraction(1)
            for n in running
        }
        step = min(left / rate[n] for n, left in running.items())
        now += step
        for name in list(running):
            running[name] -= step * rate[name]
            if running[name] == 0:
                ends[name] = now
                del running[name]
    return ends
