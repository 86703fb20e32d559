"""Cost tables with arbitrary numbers, for tests that compare an algorithm with brute force."""

from __future__ import annotations

import random

from tessera_rt.costs import CostTable, ItemMemory, Link, Provenance, TaskCost, Workload
from tessera_rt.model_spec import Item, ModelSpec
from tessera_rt.tasks import Pass, Resource, chunk_tasks


def random_costs(
    model: ModelSpec,
    seed: int,
    *,
    longest: int = 100,
    largest: int = 100,
    kinds: int = 0,
    link: Link | None = None,
    contention: float = 0.0,
    workload: Workload | None = None,
) -> CostTable:
    """Every task takes 0 to ``longest`` ns, every field of an item's memory is 0 to ``largest`` bytes.

    ``kinds``: items with equal specs share their costs with every ``kinds``-th item (0: all items differ). Equal seeds
    give equal tables.
    """
    tasks: dict[str, TaskCost] = {}
    memory: dict[str, ItemMemory] = {}
    for number, item in enumerate(model.items):
        draw = random.Random(f"{seed} {number % kinds if kinds else number} {item.kind}")
        tasks |= _tasks(item, draw, longest, largest)
        memory[item.label] = ItemMemory(
            weights=draw.randint(0, largest),
            gradients=draw.randint(0, largest),
            optimizer=draw.randint(0, largest),
            activations=draw.randint(0, largest),
            pending_w=draw.randint(0, largest),
            transient=draw.randint(0, largest),
            output=draw.randint(0, largest),
        )
    return CostTable(
        fingerprint=model.fingerprint,
        workload=workload or Workload(tokens=64, context=64),
        provenance=Provenance(source="table", device="none", notes=(f"random, seed {seed}",)),
        tasks=tasks,
        memory=memory,
        link=link or Link(),
        contention=contention,
    )


def _tasks(item: Item, draw: random.Random, longest: int, largest: int) -> dict[str, TaskCost]:
    return {
        task.name: TaskCost(
            ns=draw.randint(0, longest), bytes=draw.randint(0, largest) if task.resource is Resource.COMM else 0
        )
        for pass_ in (Pass.F, Pass.B)
        for task in chunk_tasks([item], pass_).tasks
    }
