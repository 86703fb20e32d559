"""Kernels of routing and of the gather-sum write their results and nothing beside them: memory before and behind each
result, which a wrong mask would reach, stays as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera_rt.kernels import routing
from tessera_rt.kernels.gather_sum import gather_sum, gather_sum_backward, router_weight_gradient
from tessera_rt.kernels.options import RouterRule
from tessera_rt.testing.kernel_checks import random_ids

pytestmark = pytest.mark.usefixtures("interpreted")

MARGIN = 4096  # elements
UNTOUCHED = 77


@contextmanager
def _guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What ``torch.empty`` makes in this context lies within a wider buffer, whose margins are looked at in the end."""
    wide: list[tuple[Tensor, int]] = []
    plain = torch.empty

    def empty(*size: Any, **options: Any) -> Tensor:
        shape = size if not size or isinstance(size[0], int) else tuple(size[0])
        count = prod(shape)
        buffer = plain(count + 2 * MARGIN, **options).fill_(UNTOUCHED)
        wide.append((buffer, count))
        return buffer[MARGIN : MARGIN + count].view(shape)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        yield
    assert wide
    for buffer, count in wide:
        margins = torch.cat([buffer[:MARGIN], buffer[MARGIN + count :]])
        assert (margins == UNTOUCHED).all(), "written outside a result"


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 1, 1), (5, 11, 3), (70, 33, 5)])
def test_routing(tokens: int, experts: int, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, rule = torch.randn(tokens, experts, generator=generator), RouterRule(top_k=top_k)
    with _guarded(monkeypatch):
        ids, _ = routing.topk(logits, rule)
        routing.topk_backward(torch.ones(tokens, top_k), logits, ids, rule)
        for dropped in (0.0, 0.3, 1.0):
            chosen = random_ids(tokens, experts, top_k, generator, dropped=dropped)
            _, _, offsets = routing.place(chosen, experts)
            routing.tile_table(offsets, tokens * top_k, 16)


@pytest.mark.parametrize(("tokens", "hidden", "top_k"), [(1, 1, 1), (13, 33, 3)])
def test_gather_sum(tokens: int, hidden: int, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = random_ids(tokens, 8, top_k, torch.Generator().manual_seed(0), dropped=0.3)
    position, source, offsets = routing.place(ids, 8)
    rows, weights = routing.ExpertRows(ids.numel(), offsets, ()), torch.ones(tokens, top_k)
    y, grad = torch.ones(ids.numel(), hidden), torch.ones(tokens, hidden)
    with _guarded(monkeypatch):
        gather_sum(y, position, weights)
        gather_sum_backward(grad, y, source, rows, position, weights)
        router_weight_gradient(torch.ones(ids.numel(), 3), position)
