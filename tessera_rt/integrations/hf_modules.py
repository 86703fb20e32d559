"""The classes that a swapped model's modules get: Tessera's forward in front of the family's own class.

A swap changes nothing but the class of a module, as ``torch.distributed.fsdp.fully_shard`` does: parameters, buffers,
hooks, children, names and everybody's references stay, and going back is exact. The classes are made from the family's
on demand; pickling and copying name the family's class and make Tessera's again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, SupportsIndex, cast

import torch
from torch import Tensor, nn

from tessera_rt.errors import Problem, SpecError
from tessera_rt.integrations.hf_blocks import BlockForm, Returns, form_of
from tessera_rt.integrations.hf_layouts import LAYOUT_ATTRIBUTES, ExpertsLayout, read_layout
from tessera_rt.integrations.hf_sharding import ExpertShard, sharded_experts
from tessera_rt.integrations.routing_replay import choosing
from tessera_rt.moe.backends import routed_experts


def experts_forward(module: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The experts of ``module`` (any class under ``use_experts_implementation``): hidden [T, H], ids [T, K] int64,
    weights [T, K] -> [T, H].

    Ids from ``num_experts`` on are not routed: transformers' expert parallelism marks other ranks' experts so. Raises
    SpecError, naming the flag, for what Tessera cannot reproduce.
    """
    layout = getattr(module, "tessera_layout", None) if torch.compiler.is_compiling() else None
    return _computed(module, layout or _layout_now(module), hidden, ids, weights)


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator, unused-ignore]
    reason="the first call of transformers' experts reads their layout: make one before compiling"
)
def _layout_now(module: nn.Module) -> Any:
    """The module's layout, which compiled code finds on it from the next call on."""
    layout = vars(module)["tessera_layout"] = read_layout(module)
    return layout


def _computed(module: nn.Module, layout: ExpertsLayout, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return routed_experts(hidden, ids, _at_least_fp32(weights, hidden), layout.weights(module), layout.gate)


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def _computed_by_ranks(
    module: nn.Module, layout: ExpertsLayout, hidden: Tensor, ids: Tensor, weights: Tensor, shard: ExpertShard
) -> Any:
    """Token counts are read on the host here: to the compiler this is one opaque step."""
    return sharded_experts(hidden, ids, _at_least_fp32(weights, hidden), layout.weights(module), layout.gate, shard)


def _at_least_fp32(weights: Tensor, hidden: Tensor) -> Tensor:
    """Router weights in float32, or in float64 beside a float64 input, whatever the family rounded them to."""
    return weights.to(torch.promote_types(hidden.dtype, torch.float32))


class SwappedModule(nn.Module):
    """In front of a family's class. ``restored`` names that class."""

    @classmethod
    def restored(cls) -> type[nn.Module]:
        """The class behind Tessera's, also when others (FSDP, a parametrization) put theirs in front."""
        own: Any = cls.__mro__[cls.__mro__.index(SwappedModule) + 1]
        return cast(type[nn.Module], own)

    @classmethod
    def covered(cls) -> bool:
        """Whether another class stands in front of Tessera's."""
        return not any(cls is swapped_class(mixin, cls.restored()) for mixin in (SwappedExperts, SwappedBlock))

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        mixin, own = type(self).__bases__[0], type(self).restored()
        if type(self) is not swapped_class(mixin, own):
            return super().__reduce_ex__(protocol)  # a parametrised module: torch says what it thinks of it
        return _rebuild, (mixin, own), self.__dict__


class SwappedExperts(SwappedModule):
    """Experts computed by Tessera: all of them, or those of this rank (``tessera_shard``). The layout is read at the
    swap, and again when what it was read from changes."""

    tessera_layout: ExpertsLayout
    tessera_shard: ExpertShard | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in LAYOUT_ATTRIBUTES:
            vars(self)["tessera_layout"] = read_layout(self)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        given = (self, self.tessera_layout, hidden_states, top_k_index, top_k_weights)
        if self.tessera_shard is None:
            return _computed(*given)
        out: Tensor = _computed_by_ranks(*given, self.tessera_shard)
        return out

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._check_whole("state_dict")
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self._check_whole("load_state_dict")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _check_whole(self, what: str) -> None:
        if self.tessera_shard is not None:
            held = f"experts {self.tessera_shard.own.start} to {self.tessera_shard.own.stop - 1}"
            remedy = "call it on every rank inside `with gathered_experts(model):`"
            raise SpecError.of(what, [Problem("experts on this rank", held, f"all of {self._where()}", remedy)])

    def _where(self) -> str:
        return f"a {type(self).restored().__name__}"


class SwappedBlock(SwappedModule):
    """A MoE block put together by its ``BlockForm``, out of the family's own parts and swapped experts."""

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None, **_: Any) -> Any:
        form = form_of(type(self).restored())
        assert form is not None
        return _run_block(self, form, hidden_states, input_ids)


def _run_block(block: nn.Module, form: BlockForm, hidden: Tensor, token_ids: Tensor | None) -> Any:
    part: Callable[[str], Any] = lambda name: getattr(block, name, None) if name else None  # noqa: E731
    shape, noise = hidden.shape, part(form.jitter)
    if block.training and noise:
        hidden = hidden * torch.empty_like(hidden).uniform_(1.0 - noise, 1.0 + noise)
    rows = hidden.reshape(-1, shape[-1])
    arguments = [part(name) for name in form.router_arguments]
    if part(form.token_ids_if):
        arguments.append(token_ids)
    with choosing():
        logits, weights, ids, *_ = part(form.router)(rows if form.router_rows else hidden, *arguments)
    routed = rows
    for name in form.before:
        routed = part(name)(routed)
    routed = part("experts")(routed, ids, weights)
    for name in form.after:
        routed = part(name)(routed)
    if form.scale:
        routed = routed * part(form.scale)
    out = _combined(routed, _shared(part, form, rows, hidden), part, form).view(shape)
    if form.finish:
        out = part(form.finish)(out)
    if form.returns is Returns.OUTPUT_AND_WEIGHTS:
        return out, weights
    if form.returns is Returns.FLAT_OUTPUT_AND_LOGITS:
        return out.flatten(), logits.flatten()
    return out


def _shared(part: Callable[[str], Any], form: BlockForm, rows: Tensor, hidden: Tensor) -> Tensor | None:
    module = part(form.shared)
    if module is None:
        return None
    out: Tensor = module(rows if form.shared_rows else hidden).reshape(rows.shape)
    return out if not form.shared_gate else torch.sigmoid(part(form.shared_gate)(rows)) * out


def _combined(routed: Tensor, shared: Tensor | None, part: Callable[[str], Any], form: BlockForm) -> Tensor:
    if shared is None:
        return routed
    if part(form.fp32_combine):
        return (routed.float() + shared.float()).to(shared.dtype)
    return (routed + shared) / 2 if part(form.average) == "average" else routed + shared


def swapped_class(mixin: type[SwappedModule], own: type[nn.Module]) -> type[nn.Module]:
    """The class of a swapped module whose family's class is ``own``; always the same one."""
    return cast(type[nn.Module], _made(cast(Any, mixin), cast(Any, own)))


@cache
def _made(mixin: Any, own: Any) -> Any:
    return type(f"Tessera{own.__name__}", (mixin, own), {"__module__": own.__module__, "__doc__": own.__doc__})


def _rebuild(mixin: type[SwappedModule], own: type[nn.Module]) -> nn.Module:
    cls = swapped_class(mixin, own)
    return cls.__new__(cls)
