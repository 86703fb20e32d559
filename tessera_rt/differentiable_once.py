"""Backward passes that cannot be differentiated themselves, and say so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

Gradients = TypeVar("Gradients", bound="Tensor | tuple[Tensor | None, ...]")


def differentiable_once(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """For the ``backward`` of a torch.autograd.Function: differentiating what it returns raises RuntimeError.

    torch's ``once_differentiable`` raises only where the incoming gradient can be differentiated itself. Behind
    ``out.sum()`` it cannot, and a penalty on gradients would lose this function's share without a word.
    """

    @wraps(backward)
    def refusing(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # nobody asked for create_graph
            return found
        return _final(found) if isinstance(found, Tensor) else tuple(_final(each) for each in found)

    return refusing


def _final(gradient: Any) -> Any:
    if not isinstance(gradient, Tensor) or not gradient.is_floating_point():
        return gradient
    return _Final.apply(torch.zeros((), requires_grad=True), gradient)  # type: ignore[no-untyped-call]


class _Final(torch.autograd.Function):
    """The second argument; the first, which requires a gradient, makes autograd call ``backward``."""

    @staticmethod
    def forward(_ctx: Any, _anchor: Tensor, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(_ctx: Any, *_grads: Any) -> Any:
        raise RuntimeError("this function is differentiable once: no gradient of its gradients (create_graph) exists")
