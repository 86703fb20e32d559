"""Launching where the operands are: Triton launches on the current device, whatever device its arguments are on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def on_operands_device(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, run with the device of its first argument, a tensor, as the current one if it is a CUDA device."""
    first = next(iter(inspect.signature(function).parameters))

    @wraps(function)
    def on_device(*args: P.args, **kwargs: P.kwargs) -> R:
        operand = args[0] if args else kwargs[first]
        with torch.cuda.device_of(operand):  # type: ignore[no-untyped-call]
            return function(*args, **kwargs)

    return on_device
