"""The quick check before every replay: whether everything that a graph depends on is the very object it was.

Walking a model by name costs tens of milliseconds for a thousand parameters. This only compares identities, addresses
and a few flags; where it finds a difference, ``State`` looks closely and says what it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn

Source = nn.Module | torch.optim.Optimizer | Tensor
Entry = tuple[Mapping[Any, Any], Any]  # a container, and a key of it


class Watch:
    """What is in the containers behind ``sources`` now, and where its tensors are."""

    def __init__(self, sources: Sequence[Source]) -> None:
        modules = [m for source in sources if isinstance(source, nn.Module) for m in source.modules()]
        optimizers = [source for source in sources if isinstance(source, torch.optim.Optimizer)]
        entries = [*_module_entries(modules), *_optimizer_entries(optimizers)]
        entries += [({0: source}, 0) for source in sources if isinstance(source, Tensor)]
        held = [(mapping, key, mapping[key]) for mapping, key in entries]
        self._tensors = tuple(
            (mapping, key, value, value.data_ptr(), value.requires_grad)
            for mapping, key, value in held
            if isinstance(value, Tensor)
        )
        self._others = tuple(entry for entry in held if not isinstance(entry[2], Tensor))
        self._sizes = tuple((container, len(container)) for container in _containers(modules, optimizers))
        self._training = tuple((module, module.training) for module in modules)
        self._optimizers = tuple((one, one.state, one.param_groups) for one in optimizers)

    def unchanged(self) -> bool:
        """Nothing came, went, moved, or was set otherwise."""
        return (
            all(
                mapping.get(key) is value and value.data_ptr() == place and value.requires_grad == trained
                for mapping, key, value, place, trained in self._tensors
            )
            and all(
                (now := mapping.get(key)) is value or (not isinstance(now, Tensor) and now == value)
                for mapping, key, value in self._others
            )
            and all(len(container) == size for container, size in self._sizes)
            and all(module.training == mode for module, mode in self._training)
            and all(one.state is state and one.param_groups is groups for one, state, groups in self._optimizers)
        )


def _module_entries(modules: Sequence[nn.Module]) -> Iterator[Entry]:
    for module in modules:
        for mapping in (module._parameters, module._buffers, module._modules):
            yield from ((mapping, key) for key in mapping)


def _optimizer_entries(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Entry]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from ((group, key) for key in group if key != "params")
            yield from (({0: parameter}, 0) for parameter in group["params"])
        for values in optimizer.state.values():
            yield from ((values, key) for key in values)


def _containers(modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Sized]:
    for module in modules:
        yield from (module._parameters, module._buffers, module._modules)
    for optimizer in optimizers:
        yield from (optimizer.state, optimizer.param_groups, *optimizer.state.values())
        yield from (group["params"] for group in optimizer.param_groups)
