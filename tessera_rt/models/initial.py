"""Initial weights that depend on a seed and a tensor's global name only: the same for every parallel layout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

Fill = Callable[[Tensor, torch.Generator], object]  # fills a CPU fp32 tensor in place


def seed_from(*parts: object) -> int:
    """A 63-bit seed from sha256 of the parts' texts."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@torch.no_grad()
def fill_named(target: Tensor, fill: Fill, seed: int, name: str) -> None:
    """Fills ``target`` in place with what ``fill`` draws in fp32 on the CPU for this seed and global name."""
    values = torch.empty(target.shape, dtype=torch.float32)
    fill(values, torch.Generator().manual_seed(seed_from(seed, name)))
    target.copy_(values)


def normal(std: float) -> Fill:
    return lambda values, generator: values.normal_(0.0, std, generator=generator)


def constant(value: float) -> Fill:
    return lambda values, _: values.fill_(value)


def log_uniform_rate(low: float, high: float) -> Fill:
    """log of a rate drawn uniformly from [low, high]: how fast each head of a gated delta net forgets."""
    return lambda values, generator: values.uniform_(low, high, generator=generator).log_()


def softplus_inverse_time(low: float, high: float) -> Fill:
    """softplus^-1 of a time step drawn log-uniformly from [low, high], as Mamba (Gu and Dao 2023) starts."""

    def fill(values: Tensor, generator: torch.Generator) -> None:
        step = values.uniform_(math.log(low), math.log(high), generator=generator).exp()
        values.copy_(step + (-(-step).expm1()).log())

    return fill
