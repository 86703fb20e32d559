"""Capture around Tessera's experts inside transformers: a decoder layer and a whole training step of swapped models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera_rt.cuda_graphs.capture import capture
from tessera_rt.integrations.hf import swap_moe
from tessera_rt.moe import backends
from tessera_rt.testing import hf_models
from tessera_rt.testing.graphs import StandInDevice

FAMILIES = ("qwen3_moe", "deepseek_v3")


@pytest.fixture(autouse=True)
def _kernels(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels, as on a GPU: the CPU's own backend reads counts on the host."""
    by_device: Callable[..., Any] = backends.backend_for
    monkeypatch.setattr(backends, "backend_for", lambda device, name=None: by_device(device, name or "triton"))


def swapped(family: str) -> Any:
    model = hf_models.tiny_model(family, torch.float32, num_hidden_layers=1).train()
    swap_moe(model)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_layer(family: str) -> None:
    """Also one that keeps its routing decision under checkpointing, for which the swap put a hook on the layer."""
    model, given = swapped(family), {}
    layer = model.model.layers[0]
    handle = layer.register_forward_pre_hook(
        lambda _, args, kwargs: given.update(x=args[0], **kwargs), with_kwargs=True
    )
    model(input_ids=hf_models.tokens(), use_cache=False)
    handle.remove()
    assert layer._forward_pre_hooks
    eager, x = copy.deepcopy(layer), given.pop("x").detach()
    captured = capture(layer, (x.clone().requires_grad_(),), given, device=StandInDevice())
    for _ in range(3):
        x, results = torch.randn_like(x), []
        for one in (captured, eager):
            leaf = x.clone().requires_grad_()
            one.zero_grad(set_to_none=True)
            y = one(leaf, **given)
            y.square().sum().backward()
            results.append([y.detach(), leaf.grad, *(p.grad for p in one.parameters())])
        for mine, theirs in zip(*results, strict=True):
            assert mine is theirs is None or torch.equal(mine, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_step(family: str) -> None:
    """With a mask of four dimensions: without one, transformers looks for packed sequences on the host."""
    mask = torch.ones(8, 8, dtype=torch.bool).tril().expand(2, 1, 8, 8).contiguous()

    def training(model: nn.Module) -> tuple[torch.optim.Optimizer, Callable[[Tensor], Tensor]]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)

        def step(tokens: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss: Tensor = model(input_ids=tokens, labels=tokens, attention_mask=mask, use_cache=False).loss
            loss.backward()
            optimizer.step()
            return loss.detach()

        return optimizer, step

    model = swapped(family)
    other = copy.deepcopy(model)
    (optimizer, step), (theirs, eager) = training(model), training(other)
    step(hf_models.tokens())
    eager(hf_models.tokens())
    captured = capture(step, (hf_models.tokens(),), state=(model, optimizer), device=StandInDevice())
    for number in range(3):
        for each in (optimizer, theirs):
            each.param_groups[0]["lr"].fill_(0.01 / (1 + number))
        assert torch.equal(captured(hf_models.tokens(number)), eager(hf_models.tokens(number)))
        assert all(map(torch.equal, model.parameters(), other.parameters()))
