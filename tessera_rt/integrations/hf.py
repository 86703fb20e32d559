"""Tessera's experts in Hugging Face models (transformers 5).

    from tessera_rt.integrations.hf import swap_moe
    print(swap_moe(model))            # the MoE blocks of ``model`` are Tessera's from here on; unswap_moe goes back

or through transformers' own switch, without touching the model:

    register()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="tessera")

Both keep parameters, names, checkpoints, routers, recorded router logits and hooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import unwrap
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers.integrations import moe as hf_moe
from transformers.integrations.moe import ExpertsInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from tessera_rt.errors import Problem, SpecError
from tessera_rt.integrations.hf_blocks import EXPERTS_ONLY, REFUSED, form_of
from tessera_rt.integrations.hf_layouts import class_key, is_experts, read_layout
from tessera_rt.integrations.hf_modules import (
    SwappedBlock,
    SwappedExperts,
    SwappedModule,
    experts_forward,
    swapped_class,
)
from tessera_rt.integrations.hf_sharding import ExpertShard
from tessera_rt.integrations.routing_replay import SavedRouting

__all__ = ["NAME", "Kept", "SwapReport", "Swapped", "gathered_experts", "register", "swap_moe", "unswap_moe"]

NAME: Final = "tessera"


def register() -> None:
    """Makes ``experts_implementation="tessera"`` and ``model.set_experts_implementation("tessera")`` work."""
    ExpertsInterface.register(NAME, experts_forward)


@dataclass(frozen=True, slots=True)
class Swapped:
    """A module that Tessera computes now: its name in the model, its family's class, and how much of it."""

    name: str
    kind: str
    what: str


@dataclass(frozen=True, slots=True)
class Kept:
    """A MoE module left as it was, and why."""

    name: str
    kind: str
    why: str


@dataclass(frozen=True, slots=True)
class SwapReport:
    """What ``swap_moe`` did."""

    swapped: tuple[Swapped, ...]
    kept: tuple[Kept, ...]

    def __str__(self) -> str:
        lines = [f"swapped {entry.name} ({entry.kind}): {entry.what}" for entry in self.swapped]
        return "\n".join([*lines, *(f"kept {entry.name} ({entry.kind}): {entry.why}" for entry in self.kept)])


def swap_moe(
    model: nn.Module, ep_group: dist.ProcessGroup | None = None, *, average_gradients: bool = False
) -> SwapReport:
    """Replaces the MoE blocks of ``model`` in place by Tessera's; with ``ep_group`` their experts are spread over it.

    The family's router, shared experts and all other parts stay. Whole blocks are replaced where the family's block is
    known, else the experts alone. Under transformers' activation checkpointing a replaced block keeps its routing
    decision; around a checkpoint function of your own put ``routing_replay.SavedRouting``.

    With ``ep_group`` every rank passes the same model; each keeps its share of every layer's experts (the parameters
    get shorter in place), so build the optimizer and wrap in DistributedDataParallel afterwards, which then leaves the
    experts alone. Ranks bring different tokens. An expert's gradient is that of the sum of the group's losses, or with
    ``average_gradients`` of their mean, which is what DistributedDataParallel makes of all other gradients.

    ``torch.nn.utils.clip_grad_norm_`` sees this rank's experts only; with spread experts use a norm over the group.

    Raises SpecError for arguments that do not fit, when there is nothing to swap, and when the group's size does not
    divide a layer's experts.
    """
    _check_arguments(model, ep_group, average_gradients)
    found = _scan(model, ep_group)
    if not found.blocks and not found.experts:
        kept = [Problem(entry.name or "model", entry.kind, "a MoE block", entry.why) for entry in found.kept]
        nothing = Problem("model", type(model).__name__, "a model with MoE layers under use_experts_implementation")
        raise SpecError.of("swap_moe", kept or [nothing])
    for module in found.experts.values():
        if ep_group is not None:
            _take_share(module, ExpertShard(ep_group, _count(module), average_gradients))
        vars(module)["tessera_layout"] = read_layout(module)
        _become(module, swapped_class(SwappedExperts, type(module)))
    for module in found.blocks.values():
        _become(module, swapped_class(SwappedBlock, type(module)))
    for layer in _checkpointed_layers(model):
        layer.register_forward_pre_hook(_save_routing)
    if ep_group is not None:
        _hide_from_ddp(model, True)
    return SwapReport(tuple(found.report), tuple(found.kept))


def unswap_moe(model: nn.Module) -> tuple[str, ...]:
    """Undoes ``swap_moe`` exactly and returns the names of the modules. Experts spread over a group are gathered, so
    every rank of the group calls it. Does nothing on a model without swapped modules."""
    names = []
    _check_gatherable(model)
    _check_uncovered(model)
    _hide_from_ddp(model, False)
    layers = _checkpointed_layers(model)
    for name, module in model.named_modules():
        if isinstance(module, SwappedModule):
            if isinstance(module, SwappedExperts) and module.tessera_shard is not None:
                _gather(module)
            vars(module).pop("tessera_layout", None)
            _become(module, type(module).restored())
            names.append(name)
    for layer in layers:
        for key in [key for key, hook in layer._forward_pre_hooks.items() if hook is _save_routing]:
            del layer._forward_pre_hooks[key]
        function = vars(layer).get("_gradient_checkpointing_func")
        if isinstance(function, SavedRouting):
            vars(layer)["_gradient_checkpointing_func"] = function.checkpoint
    return tuple(names)


@contextmanager
def gathered_experts(model: nn.Module) -> Iterator[None]:
    """Inside, every rank holds all experts: for state_dict, save_pretrained, load_state_dict. Every rank enters.

    Leaving, each rank keeps its share of what the parameters hold then. Gradients are set aside meanwhile. Forward
    passes inside run all experts on their own rank. Nothing happens in a model whose experts are not spread.
    """
    _check_gatherable(model)
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, SwappedExperts) and (shard := module.tessera_shard) is not None:
                gradients = [parameter.grad for parameter in _expert_parameters(module)]
                _gather(module)
                stack.callback(_shard_again, module, shard, gradients)
        yield


@dataclass(frozen=True, slots=True)
class _Found:
    blocks: dict[str, nn.Module]
    experts: dict[str, nn.Module]
    report: list[Swapped]
    kept: list[Kept]


def _scan(model: nn.Module, ep_group: dist.ProcessGroup | None) -> _Found:
    found = _Found({}, {}, [], [])
    divisibility: list[Problem] = []
    refused: list[str] = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        form = form_of(type(module))
        refusal = next((REFUSED[key] for key in map(class_key, type(module).__mro__) if key in REFUSED), None)
        if isinstance(module, SwappedModule):
            found.kept.append(Kept(name, type(module).restored().__name__, "swapped already"))
        elif refusal is not None:
            found.kept.append(Kept(name, kind, refusal))
            refused.append(name)
        elif form is not None:
            if (why := _replaced_forward(module)) or (why := _experts_problem(module)):
                found.kept.append(Kept(name, kind, why))
                refused.append(name)
            else:
                found.blocks[name] = module
        elif is_experts(module) and not any(_inside(name, outer) for outer in refused):
            if why := _replaced_forward(module) or _layout_problem(module):
                found.kept.append(Kept(name, kind, why))
                continue
            found.experts[name] = module
            divisibility += _division_problems(name, module, ep_group)
            within = next((block for block in found.blocks if _inside(name, block)), None)
            if within is None:
                why = EXPERTS_ONLY.get(class_key(type(module)), "its surroundings are not a block that Tessera knows")
                found.report.append(Swapped(name, kind, f"the experts alone, {why}"))
            else:
                block = found.blocks[within]
                found.report.append(Swapped(within, type(block).__name__, f"{_count(module)} experts"))
    if divisibility:
        raise SpecError.of("swap_moe", divisibility)
    return found


def _check_arguments(model: Any, ep_group: Any, average_gradients: bool) -> None:
    problems = []
    if not isinstance(model, nn.Module):
        problems.append(Problem("model", type(model).__name__, "a torch.nn.Module"))
    if average_gradients and ep_group is None:
        problems.append(Problem("average_gradients", True, "False without ep_group"))
    if ep_group is not None and not isinstance(ep_group, dist.ProcessGroup):
        remedy = "dist.group.WORLD, dist.new_group(ranks) or mesh.get_group()"
        problems.append(Problem("ep_group", ep_group, "a torch.distributed process group that this rank is in", remedy))
    elif ep_group is not None and isinstance(model, nn.Module):
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            remedy = "swap the model itself, and wrap it afterwards"
            problems.append(Problem("model", "DistributedDataParallel", "a model that is not wrapped", remedy))
        problems += _tied_experts(model)
    if problems:
        raise SpecError.of("swap_moe", problems)


def _tied_experts(model: nn.Module) -> list[Problem]:
    first: dict[int, str] = {}
    problems = []
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False) if is_experts(module) else ():
            other = first.setdefault(id(parameter), f"{name}.{key}")
            if other != f"{name}.{key}":
                problems.append(Problem(f"{name}.{key}", f"the tensor of {other}", "its own where ep_group is given"))
    return problems


def _inside(name: str, outer: str) -> bool:
    """Whether the module called ``name`` stands below the one called ``outer`` ("" is the whole model)."""
    return not outer or name.startswith(f"{outer}.")


def _experts_problem(block: nn.Module) -> str:
    """Why a known block cannot be replaced: what its experts (perhaps inside an adapter's wrapper) ask for."""
    experts = [module for module in getattr(block, "experts", block).modules() if is_experts(module)]
    if len(experts) != 1:
        return f"{len(experts)} experts modules in it, where one is expected"
    return _replaced_forward(experts[0]) or _layout_problem(experts[0])


def _layout_problem(module: nn.Module) -> str:
    try:
        read_layout(module)
    except SpecError as error:
        return "; ".join(map(str, error.problems))
    return ""


def _replaced_forward(module: nn.Module) -> str:
    """Why the module's forward is not the one that transformers gave its class, if it is not."""
    if "forward" in vars(module):
        return "its forward was replaced on the instance (by accelerate's hooks, say), which would bypass the swap"
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    forward = vars(owner)["forward"]
    own = forward.__globals__ is vars(hf_moe) if is_experts(module) else unwrap(forward).__module__ == owner.__module__
    return "" if own else f"the forward of {class_key(owner)} is not that of transformers, and the swap would bypass it"


def _count(module: nn.Module) -> int:
    return int(getattr(module, read_layout(module).first).shape[0])


def _division_problems(name: str, module: nn.Module, ep_group: dist.ProcessGroup | None) -> list[Problem]:
    size = 1 if ep_group is None else dist.get_world_size(ep_group)
    count = _count(module)
    problems = []
    if count % size:
        problems.append(Problem(f"{name}: experts", count, f"a multiple of the group's {size} ranks"))
    if ep_group is not None and getattr(module, "_is_expert_parallel", False):
        problems.append(
            Problem(f"{name}._is_expert_parallel", True, "false where ep_group is given", "use one of them")
        )
    return problems


def _become(module: nn.Module, cls: type[nn.Module]) -> None:
    module.__class__ = cls


def _take_share(module: nn.Module, shard: ExpertShard) -> None:
    for parameter in _expert_parameters(module):
        parameter.data = parameter.data[shard.own.start : shard.own.stop].clone()
        parameter.grad = None
    module.tessera_shard = shard  # type: ignore[assignment]


def _gather(module: SwappedExperts) -> None:
    shard = module.tessera_shard
    assert shard is not None
    for parameter in _expert_parameters(module):
        parameter.grad = None
        parameter.data = shard.gather(parameter.data)
    del module.tessera_shard


def _shard_again(module: nn.Module, shard: ExpertShard, gradients: list[Tensor | None]) -> None:
    _take_share(module, shard)
    for parameter, gradient in zip(_expert_parameters(module), gradients, strict=True):
        parameter.grad = gradient


def _expert_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [getattr(module, name) for name in read_layout(module).parameters]


def _hide_from_ddp(model: nn.Module, hidden: bool) -> None:
    """DistributedDataParallel would copy rank 0's experts to all ranks, and average what are different experts."""
    ours = {
        f"{name}.{parameter}".lstrip(".")
        for name, module in model.named_modules()
        if isinstance(module, SwappedExperts) and module.tessera_shard is not None
        for parameter in read_layout(module).parameters
    }
    already = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    if ours:
        ignored = sorted(already | ours if hidden else already - ours)
        tell: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        tell(model, ignored)
        for parameter in () if hidden else map(model.get_parameter, ours):
            vars(parameter).pop("_ddp_ignored", None)


def _check_uncovered(model: nn.Module) -> None:
    problems = [
        Problem(name, type(module).__name__, "of Tessera's class", "undo what was put around it after the swap first")
        for name, module in model.named_modules()
        if isinstance(module, SwappedModule) and module.covered()
    ]
    if problems:
        raise SpecError.of("unswap_moe", problems)


def _check_gatherable(model: nn.Module) -> None:
    """Adapters made on this rank's share have its size, and do not fit all experts."""
    problems = [
        Problem(name, type(module).__name__, "absent", "merge and unload the adapters first")
        for name, module in model.named_modules()
        if isinstance(getattr(module, "base_layer", None), SwappedExperts)
        and module.base_layer.tessera_shard is not None
    ]
    if problems:
        raise SpecError.of("gathering experts", problems)


def _checkpointed_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """Layers that transformers can checkpoint and that hold a swapped block."""
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, GradientCheckpointingLayer)
        and any(isinstance(module, SwappedBlock) for module in layer.modules())
    ]


def _save_routing(layer: Any, _: Any) -> None:
    """Forward pre-hook of a layer: the checkpoint function that a user has set on it saves the routing from now on."""
    function: Any = getattr(layer, "_gradient_checkpointing_func", None)
    if layer.training and layer.gradient_checkpointing and not isinstance(function, SavedRouting):
        layer._gradient_checkpointing_func = SavedRouting(function)


# It changes how a layer is recomputed, never what it computes, so a captured graph needs no call of it.
_save_routing.no_part_of_graphs = True  # type: ignore[attr-defined]
