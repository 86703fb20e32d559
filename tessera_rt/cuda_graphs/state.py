"""What captured work changes or depends on besides its arguments: parameters, buffers, optimizer state, generators.

A graph holds addresses, so these tensors must stay where they are; ``State`` finds them anew at every call, compares,
and can save and restore their values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tessera_rt.cuda_graphs.inputs import moved
from tessera_rt.cuda_graphs.watch import Source, Watch
from tessera_rt.errors import CaptureError, Problem

_SETTING = re.compile(r"groups\[\d+\]\.\w+$")  # of a parameter group, not of a parameter


@dataclass(frozen=True, slots=True)
class Saved:
    """Values of a ``State`` at one moment."""

    tensors: tuple[tuple[Tensor, Tensor], ...]  # the tensor, a copy of its values
    generators: tuple[tuple[torch.Generator, Tensor], ...]
    optimizers: tuple[tuple[torch.optim.Optimizer, frozenset[tuple[Tensor, str]]], ...]  # the state's keys

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, values in self.tensors:
                tensor.copy_(values)
        for generator, state in self.generators:
            generator.set_state(state)
        for optimizer, keys in self.optimizers:
            for parameter, key in _state_keys(optimizer) - keys:
                del optimizer.state[parameter][key]
                if not optimizer.state[parameter]:
                    del optimizer.state[parameter]


class State:
    """The tensors and generators behind ``sources``: modules (parameters and buffers), optimizers (state, and whatever
    stands in their parameter groups), and single tensors. ``watched`` must stay in place too, but are not saved.

    Raises CaptureError for anything else.
    """

    def __init__(
        self,
        where: str,
        sources: Sequence[Source],
        generators: Sequence[torch.Generator],
        watched: Sequence[nn.Parameter] = (),
    ) -> None:
        unknown = [type(source).__name__ for source in sources if not isinstance(source, Source)]
        if unknown:
            problem = Problem("state", ", ".join(unknown), "modules, optimizers and tensors")
            raise CaptureError.of(where, [problem])
        self._where, self._sources, self._generators = where, tuple(sources), tuple(generators)
        self._watched = tuple(watched)
        self._captured = self._places()
        self._constants = dict(self._found_constants())
        self._watch = Watch((*self._sources, *self._watched))

    def tensors(self) -> list[Tensor]:
        """Those of the sources as they are now, each once."""
        return list({id(tensor): tensor for _, tensor in self._found()}.values())

    def save(self) -> Saved:
        with torch.no_grad():
            tensors = tuple((tensor, tensor.detach().clone()) for tensor in self.tensors())
        generators = tuple((generator, generator.get_state()) for generator in self._generators)
        optimizers = [source for source in self._sources if isinstance(source, torch.optim.Optimizer)]
        return Saved(tensors, generators, tuple((optimizer, _state_keys(optimizer)) for optimizer in optimizers))

    def check(self) -> None:
        """Raises CaptureError naming every tensor that moved, came or went, and every setting that changed."""
        if self._watch.unchanged():
            return
        places, problems = self._places(), []
        for name, place in self._captured.items():
            if places.get(name) != place:
                problems.append(moved(name) if name in places else Problem(name, "gone", "there, as captured"))
        for name in sorted(places.keys() - self._captured.keys()):
            if _SETTING.search(name):
                continue  # the graph cannot know it; schedulers keep theirs there
            remedy = "run the step once eagerly before it is captured, so that all its state exists"
            problems.append(Problem(name, "new", "there when it is captured", remedy))
        constants = dict(self._found_constants())
        for name, value in self._constants.items():
            if name in constants and constants[name] != value:
                remedy = "capture again, or (a number) make it a tensor on the device and change that in place"
                problems.append(Problem(name, constants[name], f"{value!r}, as captured", remedy))
        if problems:
            raise CaptureError.of(self._where, problems)
        self._watch = Watch((*self._sources, *self._watched))  # other objects, but all that matters is as it was

    def _found(self) -> Iterator[tuple[str, Tensor]]:
        for position, source in enumerate(self._sources):
            prefix = f"state[{position}]"
            if isinstance(source, nn.Module):
                yield from ((f"{prefix}.{name}", parameter) for name, parameter in source.named_parameters())
                yield from ((f"{prefix}.{name}", buffer) for name, buffer in source.named_buffers())
            elif isinstance(source, torch.optim.Optimizer):
                yield from ((f"{prefix}.{name}", v) for name, v in _settings(source) if isinstance(v, Tensor))
            else:
                yield prefix, source

    def _found_constants(self) -> Iterator[tuple[str, object]]:
        for position, source in enumerate(self._sources):
            prefix = f"state[{position}]"
            if isinstance(source, torch.optim.Optimizer):
                yield from ((f"{prefix}.{name}", v) for name, v in _settings(source) if not isinstance(v, Tensor))
            elif isinstance(source, nn.Module):
                yield from ((f"{prefix}.{name}.training", module.training) for name, module in source.named_modules())
        yield from ((f"{name}.requires_grad", tensor.requires_grad) for name, tensor in self._found())

    def _places(self) -> dict[str, tuple[object, ...]]:
        watched = ((f"parameters[{position}]", parameter) for position, parameter in enumerate(self._watched))
        return {
            name: (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            for name, tensor in (*self._found(), *watched)
        }


def _settings(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """``groups[0].lr``, ``groups[0].params[2]``, ``groups[0].params[2].exp_avg``, and so on, with their values."""
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                yield f"groups[{number}].{key}", value
        for position, parameter in enumerate(group["params"]):
            name = f"groups[{number}].params[{position}]"
            yield name, parameter
            for key, value in optimizer.state.get(parameter, {}).items():
                yield f"{name}.{key}", value


def _state_keys(optimizer: torch.optim.Optimizer) -> frozenset[tuple[Tensor, str]]:
    return frozenset((parameter, key) for parameter, values in optimizer.state.items() for key in values)
