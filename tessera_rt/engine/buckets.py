"""Buckets: which parameters of a rank are reduced and updated together, and where each one lies in its flat tensor.

A bucket's tensors are alike in what is done to them: parameter dtype, weight decay, and the ranks that reduce them.
Those are dp x ep for ordinary parameters (all of them hold the same ones but see different data) and dp for experts.
Weights that another pipeline rank holds too (a tied embedding and head) have a bucket of their own, so that it looks
the same on both ranks and both come to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tessera_rt.engine.mesh import Groups
from tessera_rt.errors import PlanError, Problem
from tessera_rt.moe.steps import ParameterInfo, expert_name

ALIGN = 64
"""Parameters and shards start at multiples of this many elements: 128 bytes or more."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor that is trained, with all its uses on this rank. ``crossing``: another pipeline rank uses it too."""

    name: str
    uses: tuple[ParameterInfo, ...]
    crossing: bool = False

    @property
    def first(self) -> ParameterInfo:
        return self.uses[0]

    @property
    def shape(self) -> torch.Size:
        return self.first.parameter.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.first.parameter.dtype

    def named(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """``tensor``, of this weight's shape, under layout-free names: one per expert if experts are stacked in it."""
        if self.first.experts is None:
            yield self.name, tensor
        else:
            for expert, of_expert in zip(self.first.experts, tensor.unbind(0), strict=True):
                yield expert_name(self.name, expert), of_expert


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a weight lies in its bucket's flat tensors."""

    weight: Weight
    start: int

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.weight.shape.numel()].view(self.weight.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """``size`` elements in ``parts`` equal shards; this rank owns shard ``part``. ``group`` is None for one part.

    ``dtype``: of the parameters; ``main_dtype``: of gradients, masters and optimizer state. Names of the buckets are
    the same on all ranks of ``group``.
    """

    name: str
    entries: tuple[Entry, ...]
    size: int
    group: dist.ProcessGroup | None
    part: int
    parts: int
    dtype: torch.dtype
    main_dtype: torch.dtype
    device: torch.device
    decay: bool
    crossing: bool

    def own(self, flat: Tensor) -> Tensor:
        """This rank's shard of a flat tensor (a view)."""
        length = self.size // self.parts
        return flat[self.part * length : (self.part + 1) * length]

    def named(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors in ``flat`` (views) under layout-free names."""
        return (pair for entry in self.entries for pair in entry.weight.named(entry.view(flat)))


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """Precision of gradients, masters and optimizer state: float64 for float64 parameters, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def collect_weights(infos: Sequence[ParameterInfo]) -> list[Weight]:
    """One weight per name, in the order of first mention; uses of a tied weight come together.

    Raises PlanError with all faults: a name twice, one parameter under two names, uses that do not match, stacked
    experts that are not as many as their ids, dtypes that are not trained, parameters that FSDP has sharded.
    """
    uses: dict[str, list[ParameterInfo]] = {}
    owners: dict[int, str] = {}
    problems: list[Problem] = []
    for info in infos:
        key = info.tied or info.name
        parameter = info.parameter
        if key in uses and not (info.tied and uses[key][0].tied):
            allowed = "unique, or a use of a tied weight (tied=<its name> on every use)"
            problems.append(Problem("parameter name", info.name, allowed))
        if owners.setdefault(id(parameter), key) != key:
            allowed = f"listed under one name; it is also {owners[id(parameter)]}: set tied on both"
            problems.append(Problem("parameter", info.name, allowed))
        if "DTensor" in {base.__name__ for base in type(parameter.data).__mro__}:
            remedy = "hand the engine plain modules: it shards the optimizer itself"
            problems.append(Problem(info.name, "a DTensor", "a plain tensor", remedy))
        if parameter.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            problems.append(
                Problem(f"{info.name}.dtype", str(parameter.dtype), "float64, float32, bfloat16 or float16")
            )
        if info.experts is not None and (parameter.dim() == 0 or len(info.experts) != parameter.shape[0]):
            allowed = f"{len(info.experts)} along dimension 0, one per expert id"
            problems.append(Problem(f"{info.name}.shape", tuple(parameter.shape), allowed))
        uses.setdefault(key, []).append(info)
    for key, found in uses.items():
        traits = {_traits(info) for info in found}
        if len(traits) > 1:
            shown = " and ".join(sorted(map(str, traits)))
            problems.append(Problem(f"uses of {key}", shown, "alike in shape, dtype, decay, experts and requires_grad"))
    if problems:
        raise PlanError.of("parameters", problems)
    return [Weight(name, tuple(found)) for name, found in uses.items()]


def make_buckets(weights: Iterable[Weight], groups: Groups) -> tuple[Bucket, ...]:
    """Buckets of the weights, in an order that all ranks of a group share."""
    kinds: dict[tuple[str, bool, torch.dtype], list[Weight]] = {}
    for weight in weights:
        kind = "tied" if weight.crossing else "dense" if weight.first.experts is None else "expert"
        kinds.setdefault((kind, weight.first.decay, weight.dtype), []).append(weight)
    buckets: list[Bucket] = []
    for (kind, decay, dtype), members in sorted(kinds.items(), key=lambda item: str(item[0])):
        if kind == "tied":
            members.sort(key=lambda weight: weight.name)
        group = groups.dp if kind == "expert" else groups.data
        parts = 1 if group is None else dist.get_world_size(group)
        start = 0
        entries: list[Entry] = []
        for weight in members:
            entries.append(Entry(weight, start))
            start += _round_up(weight.shape.numel(), ALIGN)
        buckets.append(
            Bucket(
                name=f"{kind} {str(dtype).removeprefix('torch.')} parameters{'' if decay else ' without decay'}",
                entries=tuple(entries),
                size=_round_up(start, parts * ALIGN),
                group=group,
                part=0 if group is None else dist.get_rank(group),
                parts=parts,
                dtype=dtype,
                main_dtype=main_dtype(dtype),
                device=members[0].first.parameter.device,
                decay=decay,
                crossing=kind == "tied",
            )
        )
    return tuple(buckets)


def gathered(bucket: Bucket, shard: Tensor, groups: Groups, what: str) -> Tensor:
    """The whole flat tensor of which every rank of the bucket's group holds a shard (collective); never aliases."""
    if bucket.group is None:
        return shard.clone()
    flat = shard.new_empty(bucket.size)
    groups.wait(all_gather(flat, shard, bucket.group), f"the all-gather of {what} ({bucket.name})", bucket.group)
    return flat


def all_gather(flat: Tensor, shard: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts the all-gather of ``shard`` [n] into ``flat`` [n * ranks]; ``shard`` may be this rank's part of it."""
    # torch 2.13 renamed the function; the old name warns there, the new one is absent before.
    start = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = start(flat, shard, group=group, async_op=True)
    return work


def reduce_scatter(shard: Tensor, flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts the sum of ``flat`` [n * ranks] over the group, of which this rank gets its part in ``shard`` [n]."""
    start = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work = start(shard, flat, group=group, async_op=True)
    return work


def _traits(info: ParameterInfo) -> tuple[object, ...]:
    parameter = info.parameter
    experts = None if info.experts is None else tuple(info.experts)
    return tuple(parameter.shape), str(parameter.dtype), info.decay, experts, parameter.requires_grad


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
