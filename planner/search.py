"""Partitions for every objective, and the baselines they are compared with.

- ``t_dom``, ``serial``, ``memory``: ``least.py``;
- ``step``: the best *simulated* step among all of these and what ``step_tuning.py`` finds from them. T_dom alone leaves
  most boundaries free (one heavy chunk fixes it), so its optimum can be slower than a plain balanced partition.
  Simulated steps are with contention between compute and communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tessera_rt.planner.baselines import balanced, equal_layers, memory_balanced, parameter_balanced
from tessera_rt.planner.candidates import Bounds
from tessera_rt.planner.least import Clock, Found, Options, least_memory, least_serial, least_t_dom, shortest
from tessera_rt.planner.setting import Setting
from tessera_rt.planner.step_tuning import tuned

TUNE_PASSES = 4_000_000
"""Work of tuning a step, in passes simulated: about ten seconds."""
MOST_EVALUATIONS = 4_000
"""Partitions it looks at however short a step is."""
OWN_SHARE = 8
"""One in so many more is timed with the setting's own method."""


def search(setting: Setting, start: Bounds, options: Options) -> Found:
    """The best partition for the objective. ``start``: a serial-balanced partition that keeps the memory limit."""
    match options.objective:
        case "t_dom":
            return least_t_dom(setting, start, options)
        case "serial":
            return least_serial(setting, start, options)
        case "memory":
            return least_memory(setting, start, options)
        case _:
            return _least_step(setting, start, options)


# -- step time -------------------------------------------------------------------------------------


def _least_step(setting: Setting, start: Bounds, options: Options) -> Found:
    """The fastest in simulation: never slower than the equal, balanced and T_dom-optimal partitions that fit."""
    t_dom = least_t_dom(setting, start, options)
    ranks = setting.template.stage_ranks
    named: dict[str, Bounds] = {
        "equal layers": equal_layers(setting.model, setting.stages),
        "parameter-balanced": parameter_balanced(setting.model, setting.costs, setting.stages),
        "serial-balanced": start,
        "memory-balanced": memory_balanced(ranks, setting.memory),
        "overlap-balanced": balanced(setting.quick, ranks, setting.memory, setting.limit) or start,
        "t_dom": t_dom.bounds,
    }
    count = default_evaluations(setting) if options.evaluations is None else options.evaluations
    clock = Clock(options.time_limit_s)
    named["step-tuned"] = step_tuned(setting, [*named.values(), *t_dom.others], count, clock.is_up)
    cut_short = " (the time was up while tuning)" if count and clock.is_up() else ""
    best = min(
        (name for name, bounds in named.items() if not setting.excess(bounds)),
        key=lambda name: (setting.step_ns(named[name]), setting.t_dom(named[name])),
    )
    alternatives = tuple(
        (name if not setting.excess(bounds) else f"{name} (over the memory limit)", setting.step_ns(bounds))
        for name, bounds in named.items()
    )
    same = named[best] == t_dom.bounds
    return Found(
        bounds=named[best],
        method=f"simulated step: {best}{cut_short}; {t_dom.method}",
        status=t_dom.status if same else "heuristic",
        bound_ns=min(t_dom.bound_ns, setting.t_dom(named[best])),
        alternatives=alternatives,
    )


def step_tuned(
    setting: Setting,
    starts: Sequence[Bounds],
    evaluations: int,
    out_of_time: Callable[[], bool] = lambda: False,
    *,
    seeds: int = 1,
) -> Bounds:
    """The fastest partition found in so many evaluations; never slower than the starts that keep the memory limit.

    ``seeds``: so often, with other random numbers each time; where a few heavy layers shape the step, single searches
    end several percent apart. Most evaluations are made with pairs in +Align's order, which takes a tenth of the time
    to find; the setting's own method looks at the starts and around the best.
    """
    quick = setting.with_method("align")
    found = [_tuned_once(setting, quick, starts, evaluations, out_of_time, seed) for seed in range(seeds)]
    return min(found, key=lambda bounds: (setting.excess(bounds), setting.step_ns(bounds), bounds))


def _tuned_once(
    setting: Setting,
    quick: Setting,
    starts: Sequence[Bounds],
    evaluations: int,
    out_of_time: Callable[[], bool],
    seed: int,
) -> Bounds:
    best = tuned(
        quick.step_ns,
        starts,
        shortest=shortest(setting),
        evaluations=evaluations,
        excess=setting.excess,
        seed=seed,
        out_of_time=out_of_time,
    )
    if quick is setting:
        return best
    return tuned(
        setting.step_ns,
        [best, *starts],
        shortest=shortest(setting),
        evaluations=evaluations // OWN_SHARE,
        excess=setting.excess,
        seed=seed,
        out_of_time=out_of_time,
    )


def default_evaluations(setting: Setting) -> int:
    """How many partitions tuning looks at by default: fewer the longer a step is."""
    passes = sum(len(action.passes) for row in setting.template.actions for action in row)
    return min(MOST_EVALUATIONS, TUNE_PASSES // max(1, passes))
