"""State dicts of a MoE layer, converted between runtimes and our form: exact, both ways, and by expert-parallel share.

    ours = to_ours(state, "hf/qwen2_moe", prefix="model.layers.3.mlp.")
    megatron = from_ours(split_experts(ours, 8)[rank], "megatron/te_grouped", prefix="decoder.layers.3.mlp.")

Nothing is computed: tensors are split, joined, stacked, transposed, interleaved and renamed, in their own dtype.
Layouts are the rows of ``checkpoint_layouts.LAYOUTS``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera_rt.errors import Problem, SpecError
from tessera_rt.integrations.checkpoint_layouts import EXPERT, LAYOUTS, CheckpointLayout, Entry

State = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class EpShare:
    """Which experts one expert-parallel rank holds: rank r of n those from r E/n on, E/n of them."""

    rank: int = 0
    size: int = 1

    def of(self, count: int) -> range:
        """The share of ``count`` experts. Raises SpecError when they cannot be shared evenly."""
        if self.size < 1 or not 0 <= self.rank < self.size or count % self.size:
            problem = Problem("rank, size", (self.rank, self.size), f"a rank and a divisor of {count} experts")
            raise SpecError.of("expert-parallel share", [problem])
        part = count // self.size
        return range(self.rank * part, (self.rank + 1) * part)


WHOLE = EpShare()


def layout_named(layout: str | CheckpointLayout) -> CheckpointLayout:
    """The layout of that name. Raises SpecError with the known ones."""
    if isinstance(layout, CheckpointLayout):
        return layout
    if layout not in LAYOUTS:
        raise SpecError.of("checkpoint layout", [Problem("layout", layout, f"one of {', '.join(LAYOUTS)}")])
    return LAYOUTS[layout]


def to_ours(
    state: State, layout: str | CheckpointLayout, *, prefix: str = "", share: EpShare = WHOLE
) -> dict[str, Tensor]:
    """One layer out of ``state``: the keys under ``prefix``, as our tensors with the experts of ``share``.

    A layout whose expert numbers are local (Megatron-Core's) holds one rank's experts, which are taken as they are.
    Keys elsewhere are ignored. Raises SpecError for missing and unknown keys, and for shapes that do not agree.
    """
    layout = layout_named(layout)
    given = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
    problems, ours, used = [], {}, set()
    count = _expert_count(given, layout)
    taken = range(count) if layout.local_numbers else share.of(count)
    for entry in layout.entries:
        keys = [key for theirs in entry.theirs for key in _keys(theirs, range(count))]
        present = [key for key in keys if key in given]
        if not present and not _required(entry):
            continue
        used.update(keys)
        if len(present) < len(keys):
            missing = [key for key in keys if key not in given]
            problems.append(
                Problem(f"{prefix}{missing[0]}", "missing", f"there, for {entry.ours} ({len(missing)} missing)")
            )
            continue
        try:
            ours[entry.ours] = _joined(entry, given, taken)
        except RuntimeError as error:
            problems.append(
                Problem(f"{prefix}{keys[0]}", tuple(given[keys[0]].shape), f"joinable to {entry.ours}", str(error))
            )
    problems += [
        Problem(f"{prefix}{key}", "unknown", f"a key of layout {layout.name}") for key in sorted(given.keys() - used)
    ]
    problems += _shape_problems(ours)
    problems += _count_problems(ours, 1 if layout.local_numbers else share.size, exact=not layout.local_numbers)
    if problems:
        raise SpecError.of(f"state dict in layout {layout.name}", problems)
    return ours


def from_ours(
    ours: State, layout: str | CheckpointLayout, *, prefix: str = "", share: EpShare = WHOLE
) -> dict[str, Tensor]:
    """The inverse of ``to_ours``: our tensors, holding the experts of ``share``, under the layout's keys.

    Expert numbers in keys are global ones, except in layouts whose numbers are local. Raises SpecError for tensors that
    the layout has no place for.
    """
    layout = layout_named(layout)
    places = {entry.ours: entry for entry in layout.entries}
    problems = [
        Problem(name, "present", f"absent: {layout.name} has no place for it")
        for name in sorted(ours.keys() - places.keys())
    ]
    problems += [
        Problem(name, "missing", "there") for name, entry in places.items() if _required(entry) and name not in ours
    ]
    problems += _shape_problems(ours)
    problems += _count_problems(ours, share.size, exact=not layout.local_numbers)
    if problems:
        raise SpecError.of(f"our state for layout {layout.name}", problems)
    local = ours["experts.down.weight"].shape[0]
    first = 0 if layout.local_numbers else share.of(local * share.size).start
    state: dict[str, Tensor] = {}
    for name, tensor in ours.items():
        state |= _separated(places[name], tensor, first)
    return {f"{prefix}{key}": tensor for key, tensor in state.items()}


def split_experts(ours: State, size: int) -> list[dict[str, Tensor]]:
    """Our tensors of a whole layer -> those of each of ``size`` ranks; what is not of the experts goes to all."""
    count = ours["experts.down.weight"].shape[0]
    shares = [EpShare(rank, size).of(count) for rank in range(size)]
    return [
        {name: tensor[own.start : own.stop].clone() if _of_experts(name) else tensor for name, tensor in ours.items()}
        for own in shares
    ]


def join_experts(ranks: Sequence[State]) -> dict[str, Tensor]:
    """The inverse of ``split_experts``. Raises SpecError when ranks differ in what they should share."""
    problems = [
        Problem(f"rank {rank}: {name}", "different", "the same on all ranks")
        for rank, ours in enumerate(ranks)
        for name in sorted(ranks[0].keys() | ours.keys())
        if name not in ours
        or name not in ranks[0]
        or not (_of_experts(name) or torch.equal(ours[name], ranks[0][name]))
    ]
    if problems:
        raise SpecError.of("expert-parallel ranks", problems)
    return {
        name: torch.cat([ours[name] for ours in ranks]) if _of_experts(name) else tensor
        for name, tensor in ranks[0].items()
    }


def _joined(entry: Entry, given: State, taken: range) -> Tensor:
    """Theirs -> ours."""
    parts = []
    for theirs in entry.theirs:
        if entry.numbered:
            part = torch.stack([given[key] for key in _keys(theirs, taken)])
        else:
            part = given[theirs][taken.start : taken.stop] if entry.of_experts else given[theirs]
        part = part.squeeze(0) if entry.as_row else part
        parts.append(part.mT if entry.transposed else part)
    whole = torch.cat(parts, entry.output_dim) if len(parts) > 1 else parts[0]
    return (_deinterleaved(whole, entry.output_dim) if entry.interleaved else whole).clone(
        memory_format=torch.contiguous_format
    )


def _separated(entry: Entry, tensor: Tensor, first: int) -> dict[str, Tensor]:
    """Ours -> theirs; expert numbers count from ``first``."""
    if entry.interleaved:
        tensor = _interleaved(tensor, entry.output_dim)
    state = {}
    for theirs, part in zip(entry.theirs, tensor.chunk(len(entry.theirs), entry.output_dim), strict=True):
        part = part.mT if entry.transposed else part
        part = part.unsqueeze(0) if entry.as_row else part
        pieces = part.unbind(0) if entry.numbered else (part,)
        for key, piece in zip(_keys(theirs, range(first, first + len(pieces))), pieces, strict=True):
            state[key] = piece.clone(memory_format=torch.contiguous_format)
    return state


def _deinterleaved(tensor: Tensor, dim: int) -> Tensor:
    """a0 b0 a1 b1 ... -> a0 a1 ... b0 b1 ..."""
    return torch.cat([tensor.index_select(dim, _every_other(tensor, dim, start)) for start in (0, 1)], dim)


def _interleaved(tensor: Tensor, dim: int) -> Tensor:
    first, second = tensor.chunk(2, dim)
    return torch.stack([first, second], dim).flatten(dim - 1, dim)


def _every_other(tensor: Tensor, dim: int, start: int) -> Tensor:
    return torch.arange(start, tensor.shape[dim], 2, device=tensor.device)


def _keys(theirs: str, experts: Iterable[int]) -> list[str]:
    return [theirs.replace(EXPERT, str(e)) for e in experts] if EXPERT in theirs else [theirs]


def _required(entry: Entry) -> bool:
    return entry.ours in ("router.weight", "experts.gate_up.weight", "experts.down.weight")


def _of_experts(name: str) -> bool:
    return name.startswith("experts.")


def _expert_count(given: State, layout: CheckpointLayout) -> int:
    """Experts in a state: by the largest number in its keys, or the first dimension of a stacked tensor."""
    down = next(entry for entry in layout.entries if entry.ours == "experts.down.weight")
    if not down.numbered:
        return given[down.theirs[0]].shape[0] if down.theirs[0] in given else 1
    pattern = re.compile(re.escape(down.theirs[0]).replace(re.escape(EXPERT), r"(\d+)"))
    numbers = [int(match[1]) for match in map(pattern.fullmatch, given) if match]
    return max(numbers, default=0) + 1


def _shape_problems(ours: State) -> list[Problem]:
    """Sizes that should be one and are not."""
    sizes: dict[str, tuple[str, int]] = {}
    problems = []
    for name, letters in _SHAPES.items():
        if name not in ours:
            continue
        shape = tuple(ours[name].shape)
        if len(shape) != len(letters):
            problems.append(Problem(f"{name}.shape", shape, f"{len(letters)} dimensions"))
            continue
        for letter, size in zip(letters, shape, strict=True):
            where, known = sizes.setdefault(letter, (name, size))
            if size != known:
                problems.append(Problem(f"{name}.shape", shape, f"of {letter} = {known}, as in {where}"))
    return problems


def _count_problems(ours: State, size: int, *, exact: bool) -> list[Problem]:
    """Experts that the router knows and nobody holds. Not ``exact``: there may be any number of ranks."""
    if "router.weight" not in ours or "experts.down.weight" not in ours:
        return []
    whole, here = ours["router.weight"].shape[0], ours["experts.down.weight"].shape[0]
    if here * size == whole or (not exact and here > 0 and whole % (here * size) == 0):
        return []
    allowed = f"{whole} / {size}, for a router of {whole} experts" if exact else f"a divisor of the router's {whole}"
    return [Problem("experts", here, allowed, "some are missing, or share is that of another number of ranks")]


# E stands for the experts of the whole layer, e for those held here; P for the columns of the first product.
_SHAPES: Mapping[str, str] = {
    "experts.gate_up.weight": "ePx",
    "experts.gate_up.bias": "eP",
    "experts.down.weight": "exI",
    "experts.down.bias": "ex",
    "router.weight": "EH",
    "router.bias": "E",
    "router.choice_bias": "E",
    "shared.gate_up.weight": "QH",
    "shared.down.weight": "HS",
    "shared.gate.weight": "1H",
    "to_latent.weight": "xH",
    "from_latent.weight": "Hx",
}
