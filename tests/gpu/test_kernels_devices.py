"""Operands on another device than the current one; without a GPU: tests/cpu/test_kernels_launching.py."""

from __future__ import annotations

import pytest
import torch

from tessera_rt.kernels.options import RouterRule
from tessera_rt.moe import MoE, MoEConfig


def test_a_layer_on_the_second_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    config = MoEConfig(hidden=256, intermediate=128, experts=8, router=RouterRule(top_k=2))
    torch.manual_seed(0)
    results = []
    layer, x = MoE(config, dtype=torch.bfloat16), torch.randn(300, 256, dtype=torch.bfloat16)
    for device in ("cuda:0", "cuda:1"):
        with torch.cuda.device(0):
            moved = layer.to(device)
            moved.zero_grad()
            inputs = x.to(device).requires_grad_()
            moved(inputs).square().sum().backward()
            gradients = (inputs.grad, *(parameter.grad for parameter in moved.parameters()))
            results.append([gradient.cpu() for gradient in gradients if gradient is not None])
    assert len(results[0]) == len(results[1]) > 3
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))
