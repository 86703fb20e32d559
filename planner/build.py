"""build_plan: from a model, a mesh and costs to a checked, executable plan.

    template -> overlap graph -> candidates -> partition -> interleavings, slots, memory -> simulated step -> Plan

The communication SM budget comes before all of that (``sm_budget.py``): costs are functions of it.

Everything between is plain immutable data; see the modules of this folder in that order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from tessera_rt.costs import CostTable, Recompute
from tessera_rt.errors import PlanError, Problem, ScheduleError
from tessera_rt.model_spec import ItemKind, ModelSpec
from tessera_rt.plan import TAPERED_ENDS, ActionKind, CostAssumptions, Mesh, Plan, SolverStatus, Stage
from tessera_rt.plan_check import check_plan
from tessera_rt.planner.candidates import Bounds, check_bounds, ranges
from tessera_rt.planner.least import Found, Options, t_dom_bound
from tessera_rt.planner.limits import Fit, fit, infeasible, over_limit
from tessera_rt.planner.partition_milp import Solver, scipy_solver
from tessera_rt.planner.search import search
from tessera_rt.planner.setting import Setting
from tessera_rt.planner.sm_budget import Costs, best_budget
from tessera_rt.planner.weight_pool import with_pools
from tessera_rt.scheduler.chunked import MOE_HALVES
from tessera_rt.scheduler.patterns import Pattern
from tessera_rt.scheduler.templates import Template, build_template, in_flight
from tessera_rt.scheduler.validate import validate_template

OBJECTIVES = ("step", "t_dom", "serial", "memory")
PARTITIONERS = ("threshold", "milp", "chain-dp")
MOST_MICROBATCHES = 65_536
MOST_PASSES = 2**22
"""Micro-batches times stages: a plan lists each of these twice."""
_MOST_RANKS = MappingProxyType({"pp": 4096, "vpp": 4096, "dp": 2**20, "ep": 2**20, "tp": 2**20})


def build_plan(
    model: ModelSpec,
    mesh: Mesh,
    costs: Costs,
    *,
    microbatches: int,
    template: str | Template | None = None,
    memory_limit: int | None = None,
    recompute: str = "auto",
    objective: str = "step",
    partitioner: str = "threshold",
    window: int | None = 2,
    time_limit_s: float = 20.0,
    pad: str = "groups",
    method: str = "exact",
    joint: bool = True,
    fixed_bounds: Sequence[int] | None = None,
    solver: Solver = scipy_solver,
    patterns: Sequence[Pattern] = (),
    comm_sms: Sequence[int] = (),
    group: int | None = None,
    w_pool: int = 0,
    moe_halves: bool = False,
    tapered: int = 0,
    evaluations: int | None = None,
) -> Plan:
    """The plan of one training step; it has passed ``check_plan``.

    ``template``: a name of ``scheduler.templates.TEMPLATES``; None takes 1f1b for one stage a rank, else
    interleaved-1f1b. A Template of one's own (``scheduler.torch_csv`` reads them from files) is taken as it is,
    whatever ``joint`` and ``pad`` say. ``joint``: steady state in overlap pairs. ``pad``: groups | shadow. ``method``:
    fifo | align | defer | exact | megatron; a template that prescribes one (megatron-1f1b) overrules it.

    ``group``: micro-batches of a group, for orders that go through groups. ``w_pool``: bytes on each rank for weight
    gradients held back for gaps and the end of the step (``weight_pool.py``), 0 for none. ``moe_halves``: MoE layers of
    passes that run alone go in two halves; such a plan can only be simulated. ``evaluations``: partitions that tuning
    the step looks at (None: by the step's length).

    ``tapered``: so many micro-batches at either end of the step have half the tokens of a full one: 2 x ``tapered``
    small ones in place of ``tapered`` of the ``microbatches`` full ones. The step keeps its tokens, but divided among
    other micro-batches, and its order is that of ``microbatches`` + ``tapered``, which must suit the template; such a
    plan can only be simulated (``scheduler.part_costs`` says what small ones take).

    ``patterns``: orders given for pairs of chunks (``scheduler.patterns``); the plan notes those that it cannot use.

    ``memory_limit``: bytes per rank (None: no limit). With ``costs`` a function, ``recompute`` is none | selective |
    full | auto, where auto takes the least of them that fits; a plain cost table already says which it is for.
    ``comm_sms``: communication SM budgets to choose from, with ``costs`` a function that has a parameter of that name;
    the best by the simulated step of the serial-balanced partition is taken.

    ``objective``: step (simulated step time) | t_dom | serial | memory. ``partitioner``: threshold (exact) |
    milp (exact) | chain-dp (quick).
    ``window``: how far boundaries may move from the balanced partitions, None for anywhere. ``time_limit_s``: for
    costing pairs and solving, and as long again for tuning the step; when it is up the best partition so far is taken,
    and the plan's ``solver`` says so.
    ``solver`` replaces ``scipy.optimize.milp``. ``fixed_bounds`` takes a given partition instead of searching:
    positions 0 = b_0 <= b_1 <= ... = number of items.

    Raises PlanError for impossible arguments, PartitionInfeasible if nothing keeps the memory limit (naming rank,
    stage, need, limit and the smallest remedy), CostError if costs are missing, ScheduleError for an unknown template.
    """
    began = time.monotonic()
    _check_request(
        mesh,
        microbatches=microbatches,
        memory_limit=memory_limit,
        recompute=recompute,
        objective=objective,
        partitioner=partitioner,
        window=window,
        time_limit_s=time_limit_s,
        w_pool=w_pool,
        tapered=tapered,
        evaluations=evaluations,
    )
    order = _order(template, mesh, microbatches, tapered, joint, pad, group)
    if moe_halves:
        _check_halves(order)
    patterns = tuple(patterns)
    bounds = None if fixed_bounds is None else check_bounds(fixed_bounds, len(model.items), mesh.stages)
    options = Options(
        objective=objective,
        partitioner=partitioner,
        window=window,
        time_limit_s=time_limit_s,
        solver=solver,
        evaluations=evaluations,
    )
    makers = _makers(costs, recompute, comm_sms, model, order, tapered)
    tried: list[tuple[Setting, Fit]] = []
    for make in makers:
        table = make()
        check_costs(model, mesh, table)
        if tapered:
            _check_halvable(tapered, table)
        setting = Setting(
            model,
            table,
            order,
            limit=memory_limit or 0,
            method=order.interleaving or method,
            patterns=patterns,
            halves=moe_halves,
            tapered=tapered,
        )
        if bounds is not None:
            if setting.excess(bounds):
                if len(tried) + 1 == len(makers):
                    raise over_limit(setting, bounds)
                tried.append((setting, Fit(start=None, leanest=bounds, bound=0)))
                continue
            found = Found(bounds=bounds, method="given", status="heuristic", bound_ns=t_dom_bound(setting))
        else:
            fitting = fit(setting, time_limit_s=time_limit_s, solver=solver)
            if fitting.start is None:
                tried.append((setting, fitting))
                continue
            found = search(setting, fitting.start, options)
        if w_pool:
            setting, found = _pooled(setting, found, w_pool)
        plan = _assemble(setting, mesh, found, objective, patterns, time.monotonic() - began)
        check_plan(plan, model)
        return plan
    raise infeasible(tried, stronger=costs if not isinstance(costs, CostTable) else None)


def plan_with(
    bounds: Sequence[int],
    model: ModelSpec,
    mesh: Mesh,
    costs: CostTable,
    *,
    microbatches: int,
    template: str | None = None,
    pad: str = "groups",
    method: str = "exact",
    joint: bool = True,
) -> Plan:
    """The plan of a given partition, for baselines and tests: ``build_plan`` with ``fixed_bounds`` and no limit."""
    return build_plan(
        model,
        mesh,
        costs,
        microbatches=microbatches,
        template=template,
        pad=pad,
        method=method,
        joint=joint,
        fixed_bounds=bounds,
    )


def _pooled(setting: Setting, found: Found, size: int) -> tuple[Setting, Found]:
    """The setting with pools of W in its order, where they make the step shorter."""
    made = with_pools(setting, found.bounds, size)
    before = setting.step_ns(found.bounds)
    if made.step_ns >= before:
        return setting, found
    deferred = ", ".join(str(pool.deferred) for pool in made.pools)
    return setting.with_template(made.template), replace(
        found,
        method=f"{found.method}; W pools of at most {deferred} W",
        alternatives=(*found.alternatives, ("without W pools", before), ("with W pools", made.step_ns)),
    )


def _check_halves(order: Template) -> None:
    if not any(action.kind is ActionKind.OVERLAP for row in order.actions for action in row):
        allowed = "False where no passes run together: halves are for warm-up and cool-down"
        raise PlanError.of("plan request", [Problem("moe_halves", True, allowed, "take an order of joint pairs")])


def _check_halvable(tapered: int, costs: CostTable) -> None:
    tokens = costs.workload.tokens
    if tokens % 2:
        allowed = f"0 with an odd number of tokens of a micro-batch ({tokens}): small ones have half of them"
        raise PlanError.of("plan request", [Problem("tapered", tapered, allowed, "take an even number of tokens")])


def _order(
    template: str | Template | None,
    mesh: Mesh,
    microbatches: int,
    tapered: int,
    joint: bool,
    pad: str,
    group: int | None,
) -> Template:
    passes = microbatches + tapered
    counted = "microbatches + tapered" if tapered else "microbatches"
    if not isinstance(template, Template):
        name = template or ("1f1b" if mesh.vpp == 1 else "interleaved-1f1b")
        try:
            return build_template(
                name, pp=mesh.pp, vpp=mesh.vpp, microbatches=passes, joint=joint, pad=pad, group=group
            )
        except ScheduleError as error:
            if not tapered:
                raise
            problems = [replace(p, field=counted) if p.field == "microbatches" else p for p in error.problems]
            raise ScheduleError.of("template", problems) from None
    problems = [
        Problem(field, asked, f"{has}, as in template {template.name}")
        for field, asked, has in (
            ("mesh.pp", mesh.pp, template.pp),
            ("mesh.vpp", mesh.vpp, template.vpp),
            (counted, passes, template.microbatches),
        )
        if asked != has
    ]
    if problems:
        raise PlanError.of("plan request", problems)
    validate_template(template)
    return template


def _makers(
    costs: Costs, recompute: str, comm_sms: Sequence[int], model: ModelSpec, order: Template, tapered: int
) -> list[Callable[[], CostTable]]:
    """Makers of the cost tables to try, weakest recomputation first."""
    if isinstance(costs, CostTable):
        if comm_sms:
            allowed = "left out with a cost table, which is for one budget"
            remedy = "give costs as a function of recompute and comm_sms"
            raise PlanError.of("plan request", [Problem("comm_sms", tuple(comm_sms), allowed, remedy)])
        return [lambda: costs]
    policies = list(Recompute) if recompute == "auto" else [Recompute(recompute)]
    if not comm_sms:
        return [partial(costs, policy) for policy in policies]
    return [partial(best_budget, costs, policy, comm_sms, model, order, tapered=tapered) for policy in policies]


def size_problems(mesh: Mesh, microbatches: int) -> list[Problem]:
    """Sizes that no plan can have: below 1, or so large that its lists would fill the memory."""
    sizes = {f"mesh.{name}": (getattr(mesh, name), most) for name, most in _MOST_RANKS.items()}
    sizes["microbatches"] = (microbatches, MOST_MICROBATCHES)
    problems = [
        Problem(field, value, f"an integer from 1 to {most}")
        for field, (value, most) in sizes.items()
        if not isinstance(value, int) or not 1 <= value <= most
    ]
    if not problems and microbatches * mesh.stages > MOST_PASSES:
        allowed = f"at most {MOST_PASSES // mesh.stages} with pp x vpp = {mesh.stages} stages"
        problems.append(Problem("microbatches", microbatches, allowed))
    return problems


def _taper_problems(mesh: Mesh, microbatches: int, tapered: int) -> list[Problem]:
    if not isinstance(tapered, int) or isinstance(tapered, bool) or not 0 <= tapered <= microbatches:
        allowed = f"an integer from 0 to microbatches ({microbatches})"
        remedy = "2 x tapered small micro-batches take the place of tapered full ones"
        return [Problem("tapered", tapered, allowed, remedy)]
    too_large = size_problems(mesh, microbatches + tapered)
    return [replace(problem, field="microbatches + tapered") for problem in too_large]


def _check_request(
    mesh: Mesh,
    *,
    microbatches: int,
    memory_limit: int | None,
    recompute: str,
    objective: str,
    partitioner: str,
    window: int | None,
    time_limit_s: float,
    w_pool: int,
    tapered: int,
    evaluations: int | None,
) -> None:
    problems = size_problems(mesh, microbatches) or _taper_problems(mesh, microbatches, tapered)
    if memory_limit is not None and memory_limit < 1:
        problems.append(Problem("memory_limit", memory_limit, "a number of bytes of at least 1, or None"))
    choices = (
        ("recompute", recompute, (*Recompute, "auto")),
        ("objective", objective, OBJECTIVES),
        ("partitioner", partitioner, PARTITIONERS),
    )
    problems += [
        Problem(field, value, f"one of {', '.join(allowed)}")
        for field, value, allowed in choices
        if value not in allowed
    ]
    if window is not None and window < 0:
        problems.append(Problem("window", window, "at least 0 items, or None for any boundary"))
    if not 0 <= time_limit_s < math.inf:
        problems.append(Problem("time_limit_s", time_limit_s, "a finite number of seconds of at least 0"))
    if w_pool < 0:
        problems.append(Problem("w_pool", w_pool, "a number of bytes of at least 0"))
    if evaluations is not None and evaluations < 0:
        problems.append(Problem("evaluations", evaluations, "a number of partitions of at least 0, or None"))
    if problems:
        raise PlanError.of("plan request", problems)


def check_costs(model: ModelSpec, mesh: Mesh, costs: CostTable) -> None:
    """Raises PlanError unless the costs are of this model on such a mesh."""
    problems = []
    if costs.fingerprint != model.fingerprint:
        remedy = "make costs for this model"
        problems.append(Problem("costs.fingerprint", costs.fingerprint[:12], model.fingerprint[:12], remedy))
    problems += [
        Problem(f"costs.workload.{name}", getattr(costs.workload, name), f"{getattr(mesh, name)}, as in the mesh")
        for name in ("dp", "ep", "tp")
        if getattr(costs.workload, name) != getattr(mesh, name)
    ]
    problems += [
        Problem(f"costs.memory.{item.label}", None, "the item's bytes")
        for item in model.items
        if item.label not in costs.memory
    ]
    if problems:
        raise PlanError.of(f"costs for {model.name}", problems)


def _assemble(
    setting: Setting, mesh: Mesh, found: Found, objective: str, patterns: Sequence[Pattern], seconds: float
) -> Plan:
    bounds = found.bounds
    t_dom = setting.t_dom(bounds)
    return Plan(
        model=setting.model.name,
        fingerprint=setting.model.fingerprint,
        mesh=mesh,
        template=setting.template.name,
        microbatches=setting.template.microbatches - setting.tapered,
        stages=_stages(setting.template, bounds),
        actions=setting.template.actions,
        interleavings=setting.interleavings(bounds),
        memory=setting.memory.of(bounds, setting.limit),
        workload=setting.costs.workload,
        assumptions=_assumptions(setting.costs, _unused(setting, bounds, patterns)),
        solver=SolverStatus(
            objective=objective,
            method=found.method,
            status=found.status,
            t_dom_ns=t_dom,
            bound_ns=min(found.bound_ns, t_dom),
            step_ns=setting.step_ns(bounds),
            bottleneck=setting.bottleneck(bounds),
            seconds=seconds,
            alternatives=dict(found.alternatives),
        ),
        pad=setting.template.pad,
        shadows=setting.template.shadows,
        tapered=setting.tapered,
        simulate_only=_simulate_only(setting, mesh),
    )


def _stages(template: Template, bounds: Bounds) -> tuple[Stage, ...]:
    slots = in_flight(template)
    return tuple(
        Stage(index=s, rank=template.stage_ranks[s], start=start, stop=stop, slots=slots[s])
        for s, (start, stop) in enumerate(ranges(bounds))
    )


def _unused(setting: Setting, bounds: Bounds, patterns: Sequence[Pattern]) -> tuple[str, ...]:
    """A note for each pattern whose pair of chunks the plan does not run together."""
    chunks = ranges(bounds)
    paired = {(chunks[edge.forward], chunks[edge.backward]) for edge in setting.edges if edge.overlapped}

    def named(chunk: tuple[int, int]) -> str:
        return ", ".join(item.label for item in setting.model.items[slice(*chunk)])

    return tuple(
        f"pattern in line {p.line} not used: no F of [{named(p.forward)}] runs with B of [{named(p.backward)}]"
        for p in patterns
        if (p.forward, p.backward) not in paired
    )


def _assumptions(costs: CostTable, notes: tuple[str, ...]) -> CostAssumptions:
    return CostAssumptions(
        source=costs.provenance.source,
        device=costs.provenance.device,
        comm_sms=costs.comm_sms,
        contention=costs.contention,
        link=costs.link,
        notes=(*costs.provenance.notes, *notes),
    )


def _simulate_only(setting: Setting, mesh: Mesh) -> tuple[str, ...]:
    """Features of the plan that the engine does not run."""
    features = {
        "mtp": any(item.kind is ItemKind.MTP for item in setting.model.items),
        "tp": mesh.tp > 1,
        MOE_HALVES: setting.alone_pairs is not None,
        TAPERED_ENDS: setting.tapered > 0,
    }
    return tuple(name for name, has in features.items() if has)
