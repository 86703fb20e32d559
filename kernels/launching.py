"""What every launch needs of its operands: their device as the current one, and values that lie in their storage."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def launching(function: Callable[P, R]) -> Callable[P, R]:
    """For a function that launches kernels, and whose first argument is a tensor.

    Triton launches on the current device, whatever device its arguments are on: the first argument's becomes the
    current one. Kernels read storages: operands with torch's lazy negation (``z.conj().imag``) are resolved, all but
    ``out``, which the function must refuse.
    """
    names = list(inspect.signature(function).parameters)
    first, destination = names[0], names.index("out") if "out" in names else -1

    @wraps(function)
    def launch(*args: P.args, **kwargs: P.kwargs) -> R:
        values: list[Any] = [value if i == destination else _stored(value) for i, value in enumerate(args)]
        named: dict[str, Any] = {name: value if name == "out" else _stored(value) for name, value in kwargs.items()}
        with torch.cuda.device_of(values[0] if values else named[first]):  # type: ignore[no-untyped-call]
            return function(*values, **named)

    return launch


def _stored(value: Any) -> Any:
    return value.resolve_neg() if isinstance(value, Tensor) else value
