"""Overlap pairs with random durations, and random task graphs of any shape, to try schedulers on."""

from __future__ import annotations

import random

from tessera_rt.scheduler.graphs import chunk_graph
from tessera_rt.tasks import Pass, Task, TaskGraph, TaskKind
from tessera_rt.testing.costs import moe_model
from tessera_rt.testing.random_costs import random_costs


def random_pair(seed: int, *, most_layers: int = 4, shared: bool = True) -> TaskGraph:
    """F over 1 to ``most_layers`` MoE layers with B and W over others; every task takes 0 to 20, 100 or 1000 ns.

    ``shared``: with shared experts, a branch beside the routed ones; without them both passes are chains.
    """
    draw = random.Random(f"{seed} {shared}")
    model = moe_model(2 * most_layers, shared=shared)
    costs = random_costs(model, draw.randrange(10**9), longest=draw.choice((20, 100, 1000)))
    first, second = draw.randint(1, most_layers), draw.randint(1, most_layers)
    forward = chunk_graph(model, costs, 1, 1 + first, Pass.F)
    return forward.merged(chunk_graph(model, costs, 1 + most_layers, 1 + most_layers + second, Pass.B))


def random_graph(seed: int, *, tasks: int, density: float = 0.25, longest: int = 9) -> TaskGraph:
    """Any acyclic graph of COMP, COMM and movable tasks; W tasks may have followers and wait for communication."""
    draw = random.Random(seed)
    made: list[Task] = []
    for i in range(tasks):
        lane = draw.choice(("comp", "comm", "w"))
        made.append(
            Task(
                kind=TaskKind.DISP if lane == "comm" else TaskKind.MLP,
                pass_=Pass.W if lane == "w" else Pass.B,
                label=f"L{i}",
                deps=tuple(task.name for task in made if draw.random() < density),
                ns=draw.randint(0, longest),
                movable=lane == "w",
            )
        )
    return TaskGraph(tuple(made))
