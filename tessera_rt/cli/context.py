"""From what a user names (a preset, a file, a plan, a run folder) to a model, costs and a plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tessera_rt.cli.output import RequestError, existing_file
from tessera_rt.config import TrainConfig, load_config
from tessera_rt.cost_sources.benchmarked import BENCHMARKED, benchmarked_device, is_bench_result
from tessera_rt.cost_sources.device import DeviceSpec, device_ids, load_device
from tessera_rt.cost_sources.roofline import roofline_costs
from tessera_rt.costs import CostTable, Recompute, Workload
from tessera_rt.errors import PlanError, Problem, TesseraError
from tessera_rt.files.cost_files import load_cost_table
from tessera_rt.files.exports import bounds_from_megatron
from tessera_rt.files.model_files import load_model, preset_ids
from tessera_rt.files.plan_files import load_plan
from tessera_rt.files.yaml_text import parse_yaml
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Mesh, Plan
from tessera_rt.plan_check import check_plan
from tessera_rt.planner.build import build_plan, check_costs, size_problems
from tessera_rt.planner.sm_budget import Costs
from tessera_rt.scheduler.patterns import load_patterns
from tessera_rt.scheduler.templates import Template
from tessera_rt.scheduler.torch_csv import template_from_csv

PLAN_FILE, CONFIG_FILE, COSTS_FILE, METRICS_FILE, TIMELINES = (
    "plan.yaml",
    "config.yaml",
    "costs.yaml",
    "metrics.jsonl",
    "timelines",
)
"""Names in a run folder."""
OVERLAP_OFF = "the run's configuration has plan.overlap: false, so the plan is simulated without overlap"
DEFAULT_DEVICE, DEFAULT_TOKENS = "h800", 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What `tessera plan` was asked for; None: not said. ``memory_limit``, ``w_pool``: GiB. ``template``: a name, or a
    CSV file of torch.distributed.pipelining. ``layout``: Megatron-Core's, for a given partition."""

    spec: str
    pp: int
    vpp: int
    dp: int
    ep: int
    microbatches: int
    tokens: int | None
    context: int | None
    template: str | None
    objective: str
    partitioner: str
    window: str
    time_limit: float
    memory_limit: float | None
    recompute: str
    device: str | None
    costs: Path | None
    pad: str
    dtype: str | None
    tp: int = 1
    comm_sms: str = "auto"
    patterns: Path | None = None
    group: int | None = None
    w_pool: float = 0.0
    moe_halves: bool = False
    tapered_ends: int = 0
    evaluations: int | None = None
    layout: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan with what it was made from. ``device``: of computed costs."""

    model: ModelSpec
    plan: Plan
    costs: CostTable
    device: DeviceSpec | None


def make_plan(request: PlanRequest) -> Planned:
    """The plan a request asks for. Raises RequestError for what cannot be asked, PartitionInfeasible, SpecError, ..."""
    mesh = Mesh(pp=request.pp, vpp=request.vpp, dp=request.dp, ep=request.ep, tp=request.tp)
    model = load_model(request.spec)
    window = _window(request.window)
    patterns = () if request.patterns is None else load_patterns(request.patterns, model, tp=request.tp)
    device: DeviceSpec | None = None
    limit = _limit(request.memory_limit)
    pool = _pool(request.w_pool)
    table: Costs
    if _has_cost_table(request):
        table = _given_costs(request, model)
    else:
        device = _device(request)
        limit = device.hbm_bytes if limit is None else limit
        table = _computed_costs(request, model, device)
    budgets = _budgets(request.comm_sms, device)
    try:
        bounds = None if request.layout is None else _layout_bounds(request.layout, model, mesh)
        plan = build_plan(
            model,
            mesh,
            table,
            microbatches=request.microbatches,
            template=_template(request.template),
            fixed_bounds=bounds,
            memory_limit=limit,
            recompute=request.recompute,
            objective=request.objective,
            partitioner=request.partitioner,
            window=window,
            time_limit_s=request.time_limit,
            pad=request.pad,
            patterns=patterns,
            comm_sms=budgets,
            group=request.group,
            w_pool=pool,
            moe_halves=request.moe_halves,
            tapered=request.tapered_ends,
            evaluations=request.evaluations,
        )
    except PlanError as error:  # of the request: a plan that was made is never faulty
        raise RequestError(error.headline, error.problems) from None
    made_for = {"comm_sms": plan.assumptions.comm_sms} if budgets else {}
    costs = table if isinstance(table, CostTable) else table(plan.workload.recompute, **made_for)
    return Planned(model=model, plan=plan, costs=costs, device=device)


def model_costs(request: PlanRequest) -> tuple[ModelSpec, CostTable, DeviceSpec | None]:
    """The model and costs of a request without a plan, and the device of computed costs; ``auto`` recomputes nothing.

    Raises as ``make_plan`` does for what cannot be asked.
    """
    model = load_model(request.spec)
    mesh = Mesh(pp=request.pp, vpp=request.vpp, dp=request.dp, ep=request.ep, tp=request.tp)
    if problems := size_problems(mesh, request.microbatches):
        raise RequestError.of("request", problems)
    if _has_cost_table(request):
        table = _given_costs(request, model)
        try:
            check_costs(model, mesh, table)
        except PlanError as error:
            raise RequestError(error.headline, error.problems) from None
        return model, table, None
    if request.recompute not in ("auto", *Recompute):
        allowed = f"one of {', '.join((*Recompute, 'auto'))}"
        raise RequestError.of("request", [Problem("recompute", request.recompute, allowed)])
    device = _device(request)
    policy = Recompute.NONE if request.recompute == "auto" else Recompute(request.recompute)
    return model, _computed_costs(request, model, device)(policy), device


def _template(name: str | None) -> Template | str | None:
    """The order in a CSV file, or the name of a template."""
    if name is None or not name.endswith(".csv"):
        return name
    path = existing_file("--template", Path(name))
    try:
        return template_from_csv(path.read_text(encoding="utf-8"), path.stem)
    except UnicodeDecodeError as fault:
        raise RequestError.of("input", [Problem("--template", name, "a text file", str(fault))]) from None


def _layout_bounds(layout: str, model: ModelSpec, mesh: Mesh) -> tuple[int, ...] | None:
    """The boundaries of a Megatron-Core layout; None if the mesh is impossible, which is for ``build_plan`` to say."""
    if mesh.pp < 1 or mesh.vpp < 1:
        return None
    bounds = bounds_from_megatron(layout, model, pp=mesh.pp)
    stages = len(bounds) - 1
    if stages != mesh.stages:
        allowed = f"{stages // mesh.pp}: the layout has {stages} stages for {mesh.pp} ranks"
        raise RequestError.of("plan request", [Problem("--vpp", mesh.vpp, allowed)])
    return bounds


def _has_cost_table(request: PlanRequest) -> bool:
    """Whether --costs names a cost table, and not a microbenchmark's result."""
    return request.costs is not None and not is_bench_result(request.costs)


def _device(request: PlanRequest) -> DeviceSpec:
    """The device that costs are computed for, with the figures of a microbenchmark if --costs names one's result."""
    device = load_device(request.device or DEFAULT_DEVICE)
    return device if request.costs is None else benchmarked_device(device, request.costs, request.dtype or "bf16")


def _computed_costs(request: PlanRequest, model: ModelSpec, device: DeviceSpec) -> Callable[..., CostTable]:
    tokens = DEFAULT_TOKENS if request.tokens is None else request.tokens
    workload = Workload(
        tokens=tokens,
        context=tokens if request.context is None else request.context,
        dp=request.dp,
        ep=request.ep,
        tp=request.tp,
        dtype=request.dtype or "bf16",
    )

    def costs(policy: Recompute, comm_sms: int | None = None) -> CostTable:
        return roofline_costs(model, replace(workload, recompute=policy), device, comm_sms=comm_sms)

    return costs


def _budgets(text: str, device: DeviceSpec | None) -> tuple[int, ...]:
    """Communication SM budgets to choose from: those of the device's file, or the one that was asked for."""
    if text == "auto":
        return () if device is None else device.comm_sms_candidates
    if not text.isdecimal() or device is None:
        allowed = "auto, or a number of SMs" if device is not None else "auto: a cost table is for one budget"
        raise RequestError.of("plan request", [Problem("--comm-sms", text, allowed)])
    return (int(text),)


def _limit(gib: float | None) -> int | None:
    """Bytes of --memory-limit."""
    if gib is None:
        return None
    if not 0 < gib < math.inf:
        raise RequestError.of("plan request", [Problem("--memory-limit", gib, "a number of GiB above 0")])
    return round(gib * 2**30)


def _pool(gib: float) -> int:
    """Bytes of --w-pool."""
    if not 0 <= gib < math.inf:
        raise RequestError.of("plan request", [Problem("--w-pool", gib, "a number of GiB of at least 0")])
    return round(gib * 2**30)


def _window(text: str) -> int | None:
    if text == "any":
        return None
    if not text.isdecimal():
        raise RequestError.of("plan request", [Problem("--window", text, "a number of items, or any")])
    return int(text)


def _given_costs(request: PlanRequest, model: ModelSpec) -> CostTable:
    """The table of --costs. What else was said of the workload must be what it is for."""
    assert request.costs is not None
    table = load_cost_table(existing_file("--costs", request.costs), model=model)
    said: dict[str, Any] = {"tokens": request.tokens, "context": request.context, "dtype": request.dtype}
    problems = [
        Problem(f"--{name}", value, f"{getattr(table.workload, name)}, as in the cost table", "leave it out")
        for name, value in said.items()
        if value not in (None, getattr(table.workload, name))
    ]
    if request.recompute not in ("auto", table.workload.recompute):
        allowed = f"auto or {table.workload.recompute}, as in the cost table"
        problems.append(Problem("--recompute", request.recompute, allowed))
    if request.device is not None:
        problems.append(Problem("--device", request.device, "left out when --costs is given"))
    if problems:
        raise RequestError.of("plan request", problems)
    return table


# -- plans that exist -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A plan from a file, with its model and costs where they could be found. ``missing``: what to say if not.

    ``overlap``: as the configuration of its run says; on for a plan alone.
    """

    plan: Plan
    path: Path
    model: ModelSpec | None
    costs: CostTable | None
    missing: str = ""
    overlap: bool = True


def is_plan(text: str) -> bool:
    """Whether what a user names is a plan file or a run folder, and not a model."""
    if text in preset_ids():
        return False
    path = Path(text)
    if path.is_dir():
        return (path / PLAN_FILE).is_file()
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return False
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"), text)
    except (OSError, UnicodeDecodeError, TesseraError):
        return False
    return isinstance(data, dict) and "actions" in data


def open_plan(text: str, model: str | None = None, costs: Path | None = None, device: str | None = None) -> Opened:
    """A plan file or the plan of a run folder, checked against its model where that is known.

    The model is ``model``, that of the run the plan lies in, or the preset of its name. Costs are ``costs``, those of
    the run, or computed again if the plan's were. Raises PlanError for a faulty plan.
    """
    path = Path(text)
    if path.is_dir():
        path = path / PLAN_FILE
    existing_file("plan", path)
    config = _config_beside(path)
    spec = load_model(model) if model is not None else config.model if config is not None else None
    plan = load_plan(path, model=spec if spec is not None and _is_for(path, spec) else None)
    if spec is None and plan.model in preset_ids():
        spec = load_model(plan.model)
        if spec.fingerprint != plan.fingerprint:  # another model of that name
            spec = None
    check_plan(plan, spec)
    table, missing = _costs_of(plan, path, spec, costs, device)
    overlap = config is None or config.plan.overlap
    return Opened(plan=plan, path=path, model=spec, costs=table, missing=missing, overlap=overlap)


def _is_for(path: Path, model: ModelSpec) -> bool:
    """Whether a plan file says that it is for the model: else its task names would only seem to be wrong."""
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, TesseraError):
        return True  # what is wrong is for load_plan to say
    return not isinstance(data, dict) or data.get("fingerprint") == model.fingerprint


def _config_beside(path: Path) -> TrainConfig | None:
    """The configuration of the run that a plan lies in."""
    config = path.parent / CONFIG_FILE
    if not config.is_file():
        return None
    try:
        return load_config(config)
    except TesseraError:
        return None  # a file of that name that is no configuration of a run


def _costs_of(
    plan: Plan, path: Path, model: ModelSpec | None, costs: Path | None, device: str | None
) -> tuple[CostTable | None, str]:
    """The costs a plan was made with, or None and why not."""
    if model is None:
        return None, f"the model {plan.model} is not known here; name it with --model"
    if costs is not None and is_bench_result(costs):
        base = load_device(device or plan.assumptions.device.removesuffix(BENCHMARKED))
        measured = benchmarked_device(base, costs, plan.workload.dtype)
        return roofline_costs(model, plan.workload, measured, comm_sms=plan.assumptions.comm_sms), ""
    if costs is not None:
        return load_cost_table(existing_file("--costs", costs), model=model), ""
    beside = path.parent / COSTS_FILE
    if beside.is_file() and device is None:
        return load_cost_table(beside, model=model), ""
    name = device or plan.assumptions.device
    computed = plan.assumptions.source == "roofline"
    if device is not None or (computed and name in device_ids()):
        sms = plan.assumptions.comm_sms if computed else None
        return roofline_costs(model, plan.workload, load_device(name), comm_sms=sms), ""
    return None, f"its costs ({plan.assumptions.source}, {name}) are not at hand; name a cost file with --costs"
