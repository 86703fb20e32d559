"""Tessera: pipeline- and expert-parallel training of mixture-of-experts models, planned together with its overlap.

What is named here loads when it is first used, and needs neither torch nor triton, except ``capture``. Running a plan:
``from tessera_rt.engine import Engine``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tessera_rt.cost_sources.device import load_device
    from tessera_rt.cost_sources.roofline import roofline_costs
    from tessera_rt.costs import CostTable, Recompute, Workload
    from tessera_rt.cuda_graphs.capture import capture
    from tessera_rt.errors import TesseraError
    from tessera_rt.files.cost_files import load_cost_table, save_cost_table
    from tessera_rt.files.model_files import load_model, preset_ids
    from tessera_rt.files.plan_files import load_plan, save_plan
    from tessera_rt.model_spec import ModelSpec
    from tessera_rt.plan import Mesh, Plan
    from tessera_rt.plan_check import check_plan
    from tessera_rt.planner.build import build_plan
    from tessera_rt.planner.explain import explain
    from tessera_rt.scheduler.draw import save_perfetto, save_picture, split_table, terminal_grid
    from tessera_rt.scheduler.simulate import simulate
    from tessera_rt.timeline import Timeline

__version__ = "0.1.0"

_MODULES: Final = {
    "files.cost_files": ("load_cost_table", "save_cost_table"),
    "costs": ("CostTable", "Recompute", "Workload"),
    "cuda_graphs.capture": ("capture",),
    "cost_sources.device": ("load_device",),
    "errors": ("TesseraError",),
    "files.model_files": ("load_model", "preset_ids"),
    "model_spec": ("ModelSpec",),
    "plan": ("Mesh", "Plan"),
    "plan_check": ("check_plan",),
    "files.plan_files": ("load_plan", "save_plan"),
    "planner.build": ("build_plan",),
    "planner.explain": ("explain",),
    "cost_sources.roofline": ("roofline_costs",),
    "scheduler.draw": ("save_perfetto", "save_picture", "split_table", "terminal_grid"),
    "scheduler.simulate": ("simulate",),
    "timeline": ("Timeline",),
}

__all__ = [
    "CostTable",
    "Mesh",
    "ModelSpec",
    "Plan",
    "Recompute",
    "TesseraError",
    "Timeline",
    "Workload",
    "__version__",
    "build_plan",
    "capture",
    "check_plan",
    "explain",
    "load_cost_table",
    "load_device",
    "load_model",
    "load_plan",
    "preset_ids",
    "roofline_costs",
    "save_cost_table",
    "save_perfetto",
    "save_picture",
    "save_plan",
    "simulate",
    "split_table",
    "terminal_grid",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
