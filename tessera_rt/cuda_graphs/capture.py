"""``capture``: a module, or a whole training step, as CUDA graphs. docs/capture.md states the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tessera_rt.cuda_graphs.cuda import CudaDevice
from tessera_rt.cuda_graphs.device import GraphDevice
from tessera_rt.cuda_graphs.fallback import Fallback, announce
from tessera_rt.cuda_graphs.function import CapturedFunction
from tessera_rt.cuda_graphs.gradients import Gradients
from tessera_rt.cuda_graphs.module import CapturedModule
from tessera_rt.cuda_graphs.overflow import Overflow
from tessera_rt.cuda_graphs.state import State
from tessera_rt.cuda_graphs.watch import Source
from tessera_rt.errors import CaptureError, Problem


def capture(
    target: Callable[..., Any],
    example_inputs: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    state: Sequence[Source] = (),
    parameters: Sequence[nn.Parameter] = (),
    slots: int = 1,
    overflow: Tensor | None = None,
    agree: Callable[[Tensor], None] | None = None,
    eager: Callable[..., Any] | None = None,
    generators: Sequence[torch.Generator] = (),
    fallback: Literal["error", "eager"] = "error",
    device: GraphDevice | None = None,
) -> Any:
    """Captures ``target`` for arguments like the examples and returns what to call in its place.

    A ``torch.nn.Module`` becomes a ``CapturedModule``: a forward and a backward graph, for gradients of its parameters
    and of the examples that require one. Any other function becomes a ``CapturedFunction``: one graph, backward and
    optimizer step inside it if it has them. The target runs three times before (values it changes are put back).

    ``state``: what a function changes (modules, optimizers, tensors); of a module, what it changes besides its
    buffers. ``parameters``: whose ``.grad`` a function makes or adds to, besides those in ``state``.
    ``slots``: forwards of a module that wait for their backward at the same time.
    ``overflow``: a tensor of which the target makes an element non-zero when a capacity is exceeded. The call is then
    done again by ``eager`` (by default the target itself), from the state before it. ``agree``: makes ranks decide
    alike, see ``Overflow``.
    ``generators``: random generators that the target draws from, besides the device's default.
    ``fallback="eager"``: what cannot be captured is returned as it is, and a call that does not fit runs eagerly, each
    with a CaptureWarning.
    ``device``: by default that of the tensors.

    Raises CaptureError naming the operation, or every argument that does not fit.
    """
    where = f"capture of {getattr(target, '__qualname__', type(target).__qualname__)}"
    problems = list(
        _argument_problems(
            target=target, example_inputs=example_inputs, example_kwargs=example_kwargs, state=state,
            parameters=parameters, slots=slots, overflow=overflow, generators=generators,
        )
    )  # fmt: skip
    if fallback not in ("error", "eager"):
        problems.append(Problem("fallback", fallback, '"error" or "eager"'))
    if overflow is None and (agree is not None or eager is not None):
        problems.append(Problem("overflow", None, "a tensor where agree or eager is given"))
    if problems:
        raise CaptureError.of(where, problems)
    otherwise = Fallback(
        eager or target, None if overflow is None else Overflow(where, overflow, agree), strict=fallback == "error"
    )
    try:
        return _captured(
            where, target, tuple(example_inputs), dict(example_kwargs or {}), device, tuple(state), tuple(parameters),
            slots, tuple(generators), otherwise,
        )  # fmt: skip
    except CaptureError as error:
        if otherwise.strict:
            raise
        announce(error, stacklevel=2)
        return otherwise.eager


def _argument_problems(
    *, target: Any, slots: Any, overflow: Any, example_kwargs: Any, **several: Any
) -> Iterator[Problem]:
    """What is wrong with the arguments of ``capture``; ``several`` are those that hold any number of things."""
    module = isinstance(target, nn.Module)
    if not callable(target):
        yield Problem("target", target, "a module or a function")
    for name, things in several.items():
        if isinstance(things, Tensor | nn.Module | str) or not isinstance(things, Iterable):
            yield Problem(name, type(things).__name__, "a tuple", "one alone is (it,)")
        elif name == "parameters" and module and (count := len(tuple(things))):
            yield Problem("parameters", f"{count} tensors", "empty for a module", "it has its own")
    if example_kwargs is not None and not isinstance(example_kwargs, Mapping):
        yield Problem("example_kwargs", type(example_kwargs).__name__, "a dict")
    if not isinstance(slots, int) or slots < 1:
        yield Problem("slots", slots, "at least 1")
    elif not module and slots > 1:
        yield Problem("slots", slots, "1 for a function", "a call of a function is complete in itself")
    if overflow is not None and not isinstance(overflow, Tensor):
        yield Problem("overflow", type(overflow).__name__, "a tensor")


def _captured(
    where: str,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: GraphDevice | None,
    state: tuple[Source, ...],
    parameters: tuple[nn.Parameter, ...],
    slots: int,
    generators: tuple[torch.Generator, ...],
    fallback: Fallback,
) -> CapturedModule | CapturedFunction:
    if device is None:
        sources = (*state, target) if isinstance(target, nn.Module) else state
        device = _device_of(where, [*tree_leaves((args, kwargs)), *parameters], sources)
    if isinstance(target, nn.Module):
        return CapturedModule(where, target, device, args, kwargs, slots, state, generators, fallback)
    held = State(where, state, (device.default_generator, *generators), parameters)
    trained = {id(p): p for p in (*parameters, *_parameters(state)) if p.requires_grad}
    gradients = Gradients(tuple(trained.values()))
    return CapturedFunction(where, target, device, args, kwargs, held, gradients, generators, fallback)


def _parameters(sources: Sequence[Source]) -> list[Tensor]:
    found: list[Tensor] = []
    for source in sources:
        if isinstance(source, nn.Module):
            found += source.parameters()
        elif isinstance(source, torch.optim.Optimizer):
            found += [parameter for group in source.param_groups for parameter in group["params"]]
    return found


def _device_of(where: str, leaves: Sequence[Any], sources: Sequence[Any]) -> GraphDevice:
    """The CUDA device of the tensors. Raises CaptureError if they have none, or several."""
    tensors = [leaf for leaf in [*leaves, *sources] if isinstance(leaf, Tensor)]
    tensors += _parameters([source for source in sources if not isinstance(source, Tensor)])
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        found = ", ".join(sorted(map(str, devices))) or "none"
        remedy = "CUDA graphs need tensors on one CUDA device"
        raise CaptureError.of(where, [Problem("device", found, "one CUDA device", remedy)])
    return CudaDevice(next(iter(devices)))
