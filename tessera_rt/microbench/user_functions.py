"""Users' own functions, named ``package.module:function`` on the command line.

The function is called once, as ``function(device)``, and returns the launch: a function of a budget that is timed.
"""

from __future__ import annotations

import importlib

import torch

from tessera_rt.errors import Problem, SpecError
from tessera_rt.microbench.overlap import BudgetedLaunch


def load_launch(option: str, name: str, device: torch.device) -> BudgetedLaunch:
    """The launch that the function named ``module:function`` makes for ``device``.

    Raises SpecError naming ``option`` when there is no such module or function, or it returns nothing to call; what
    the function itself raises is not caught.
    """
    module_name, separator, function_name = name.partition(":")
    if not (module_name and separator and function_name):
        raise _refused(option, name, "package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise _refused(option, name, "a module that can be imported", "set PYTHONPATH, or install it") from error
    factory = getattr(module, function_name, None)
    if not callable(factory):
        raise _refused(option, name, f"a function of {module_name}")
    launch = factory(device)
    if not callable(launch):
        allowed = "a function that returns the launch, a function of a budget"
        raise _refused(option, name, allowed, f"it returned {type(launch).__name__}")
    checked: BudgetedLaunch = launch
    return checked


def _refused(option: str, name: str, allowed: str, remedy: str = "") -> SpecError:
    return SpecError.of("overlap", [Problem(option, name, allowed, remedy)])
