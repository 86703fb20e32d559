"""Random schedules for hypothesis: any template over random cuts, random orders in its actions, random durations."""

from __future__ import annotations

import random as random_module
from collections.abc import Sequence
from dataclasses import replace

import networkx as nx
from hypothesis import strategies as st

from tessera_rt.costs import ItemMemory, Link, TaskCost
from tessera_rt.plan import Action, ActionKind
from tessera_rt.scheduler.graphs import action_graph, to_networkx
from tessera_rt.scheduler.list_schedule import interleaving
from tessera_rt.scheduler.templates import build_template
from tessera_rt.testing.costs import item_costs, moe_model
from tessera_rt.testing.schedules import Case


@st.composite
def cases(draw: st.DrawFn, scale: int = 1) -> Case:
    """Any template over random cuts (empty stages included), random orders in actions, tasks of 0 to 9 * scale ns."""
    name = draw(st.sampled_from(("gpipe", "1f1b", "interleaved-1f1b")))
    pp = draw(st.integers(1, 3))
    vpp = 1 if name == "1f1b" else draw(st.integers(1, 3))
    template = build_template(
        name,
        pp=pp,
        vpp=vpp,
        microbatches=draw(st.integers(1, 5)),
        joint=draw(st.booleans()),
        placement=draw(st.sampled_from(("loop", "v"))) if name == "gpipe" else "loop",
    )
    model = moe_model(draw(st.integers(1, 4)), dense_first=draw(st.integers(0, 1)), shared=draw(st.booleans()))
    random = random_module.Random(draw(st.integers(0, 10**6)))
    cuts = sorted(random.choices(range(len(model.items) + 1), k=pp * vpp - 1))
    bounds = list(zip([0, *cuts], [*cuts, len(model.items)], strict=True))
    base = item_costs(
        model,
        {},
        {item.label: ItemMemory(output=random.randint(0, 9)) for item in model.items},
        link=Link(latency_ns=random.randint(0, 5) * scale, bytes_per_s=random.choice((1e9, 3e8, float("inf"))) / scale),
    )
    costs = replace(base, tasks={name: TaskCost(ns=random.randint(0, 9) * scale) for name in base.tasks})
    actions = list(template.actions)
    if draw(st.booleans()):
        actions = [tuple(_split_w(row)) for row in actions]
    interleavings = {}
    for key in {action.key for row in actions for action in row}:
        graph = action_graph(key, model, costs, bounds)
        interleavings[key] = interleaving(_random_order(graph.names, to_networkx(graph), random), graph, key)
    return Case(template.stage_ranks, actions, bounds, interleavings, model, costs)


def _split_w(row: Sequence[Action]) -> list[Action]:
    """Every single B as I, its W behind the next action."""
    result: list[Action] = []
    waiting: list[Action] = []
    for action in row:
        late, waiting = waiting, []
        if action.kind is ActionKind.B:
            waiting.append(Action(ActionKind.W, action.stage, action.microbatch))
            action = Action(ActionKind.I, action.stage, action.microbatch)
        result += [action, *late]
    return result + waiting


def _random_order(names: Sequence[str], digraph: nx.DiGraph, random: random_module.Random) -> list[str]:  # type: ignore[type-arg]
    rank = {name: random.random() for name in names}
    return list(nx.lexicographical_topological_sort(digraph, key=rank.__getitem__))
