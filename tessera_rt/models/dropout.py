"""Dropout whose masks depend on a key and a place in the model only, never on torch's global random state.

So masks are the same for every schedule and pipeline layout, and a recomputed forward draws the same mask again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tessera_rt.models.initial import seed_from


def keyed_dropout(x: Tensor, probability: float, random_key: int, place: str) -> Tensor:
    """Zeroes elements with ``probability`` and scales the rest by 1 / (1 - probability)."""
    if probability == 0.0:
        return x
    generator = torch.Generator(device=x.device).manual_seed(seed_from(random_key, place))
    kept = torch.rand(x.shape, generator=generator, device=x.device) >= probability
    return x * (kept.to(x.dtype) / (1.0 - probability))
