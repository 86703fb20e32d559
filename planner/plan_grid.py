"""`--search`: plans for a grid of choices, and the frontier of step time against memory.

Every choice does the same work a step: micro-batches of more tokens are fewer. A choice that no plan satisfies keeps
its reason; nothing is left out silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType

from tessera_rt.errors import PlanError, Problem, TesseraError
from tessera_rt.plan import Plan
from tessera_rt.scheduler.templates import RULES

AXES: Mapping[str, type] = MappingProxyType(
    {"template": str, "vpp": int, "tokens": int, "comm_sms": int, "recompute": str}
)
"""What a grid may vary: tokens are those of a micro-batch, comm_sms the communication SM budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One point of the grid. ``comm_sms`` None: whatever is planned without a choice."""

    template: str
    vpp: int
    tokens: int
    microbatches: int
    recompute: str
    comm_sms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A choice with its plan, or with the reason why it has none.

    ``frontier``: no other plan is as fast and as lean.
    """

    choice: Choice
    plan: Plan | None = None
    reason: str = ""
    frontier: bool = False

    @property
    def step_ns(self) -> int:
        assert self.plan is not None
        return self.plan.solver.step_ns

    @property
    def peak_bytes(self) -> int:
        """Planned memory of the fullest rank."""
        assert self.plan is not None
        return max(memory.peak for memory in self.plan.memory)


def choices(
    axes: Mapping[str, Sequence[str | int]], *, tokens: int, microbatches: int, default: Choice
) -> list[Choice]:
    """The grid over ``axes`` (keys of AXES), everything else as in ``default``, in the axes' order.

    ``tokens`` x ``microbatches`` are a step's tokens on a rank. A template's number of stages a rank is moved to what
    its rules allow, and points that become equal are one. Raises PlanError for an unknown axis, an empty one, or tokens
    that do not divide a step's.
    """
    problems = [Problem("axis", name, f"one of {', '.join(AXES)}") for name in axes if name not in AXES]
    problems += [Problem(name, (), "at least one value") for name, values in axes.items() if not values]
    total = tokens * microbatches
    problems += [
        Problem("tokens", value, f"a divisor of the {total} tokens of a step on a rank")
        for value in axes.get("tokens", ())
        if not isinstance(value, int) or value < 1 or total % value
    ]
    if problems:
        raise PlanError.of("search", problems)
    found: dict[Choice, None] = {}
    for values in product(*axes.values()):
        choice = replace(default, **dict(zip(axes, values, strict=True)))  # type: ignore[arg-type]
        least, most = RULES[choice.template].vpp if choice.template in RULES else (1, choice.vpp)
        vpp = int(max(least, min(most, choice.vpp)))
        found[replace(choice, vpp=vpp, microbatches=total // choice.tokens)] = None
    return list(found)


def search_grid(grid: Iterable[Choice], build: Callable[[Choice], Plan]) -> list[Tried]:
    """Plans of all choices, fastest first (of equally fast ones the leanest), then those without one.

    ``build`` makes a choice's plan; errors that name a reason (TesseraError) become that choice's ``reason``.
    """
    made = list(_built(grid, build))
    planned = sorted(
        (tried for tried in made if tried.plan is not None), key=lambda tried: (tried.step_ns, tried.peak_bytes)
    )
    ranked: list[Tried] = []
    leanest: int | None = None
    for tried in planned:
        on_it = leanest is None or tried.peak_bytes < leanest
        leanest = min(tried.peak_bytes, tried.peak_bytes if leanest is None else leanest)
        ranked.append(replace(tried, frontier=on_it))
    return ranked + [tried for tried in made if tried.plan is None]


def _built(grid: Iterable[Choice], build: Callable[[Choice], Plan]) -> Iterator[Tried]:
    for choice in grid:
        try:
            yield Tried(choice=choice, plan=build(choice))
        except TesseraError as error:
            yield Tried(choice=choice, reason="; ".join(map(str, error.problems)) or error.headline)
