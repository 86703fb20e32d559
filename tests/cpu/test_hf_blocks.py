"""Blocks whose form has options: each option equal to the family's own forward, in float64."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera_rt.integrations.hf import swap_moe
from tessera_rt.integrations.hf_blocks import BLOCKS, form_of
from tessera_rt.integrations.hf_layouts import class_key
from tessera_rt.testing import hf_models

OPTIONS = (
    ("axk2", {"n_group": 2, "topk_group": 1, "norm_topk_prob": True}),
    ("cohere2_moe", {"num_shared_experts": 1, "shared_expert_combination_strategy": "sum"}),
    ("cohere2_moe", {"num_shared_experts": 2, "shared_expert_combination_strategy": "average"}),
    ("cohere2_moe", {"num_shared_experts": 0}),
    (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5},
    ),
    ("deepseek_v3", {"norm_topk_prob": False}),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0}),
    ("ernie4_5_moe", {"moe_num_shared_experts": 2}),
    ("hy_v3", {"enable_moe_fp32_combine": True}),
    ("hy_v3", {"enable_moe_fp32_combine": False}),
    ("lfm2_moe", {"use_expert_bias": False}),
    ("lfm2_moe", {"use_expert_bias": True, "norm_topk_prob": True}),
    ("minimax", {"router_jitter_noise": 0.1}),
    ("minimax_m2", {"router_jitter_noise": 0.1}),
    ("mixtral", {"num_experts_per_tok": 1}),
    ("mixtral", {"num_experts_per_tok": 4}),
    ("nemotron_h", {"moe_latent_size": None}),
    ("olmoe", {"norm_topk_prob": True}),
    ("phimoe", {"input_jitter_noise": 0.1}),
    ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}),
    ("qwen3_next", {"norm_topk_prob": True}),
)
# Blocks that the families' language models do not contain.
APART = ("dots3_note.Dots3NoteVisionMoE", "qwen3_omni_moe.Qwen3OmniMoeTalkerTextSparseMoeBlock")


def run(block: nn.Module, training: bool) -> dict[str, Tensor | None]:
    torch.manual_seed(5)
    x = torch.randn(2, 6, 32, dtype=torch.float64).requires_grad_()
    block.zero_grad(set_to_none=True)
    block.train(training)
    out = block(x * 1.0)
    outputs = out if isinstance(out, tuple) else (out,)
    sum(o.double().square().sum() for o in outputs).backward()
    values: dict[str, Tensor | None] = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    return values | {"gradient of x": x.grad} | {f"gradient of {n}": p.grad for n, p in block.named_parameters()}


def assert_equal_to_eager(block: nn.Module, training: bool, tolerance: float) -> None:
    eager = run(copy.deepcopy(block), training)
    assert swap_moe(block).swapped[0].what.endswith("experts")
    for name, value in run(block, training).items():
        expected = eager[name]
        if expected is None or value is None:
            assert expected is None and (value is None or not value.any()), name
        else:
            torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("family", "options"), OPTIONS)
def test_options_of_blocks(family: str, options: dict[str, Any], training: bool) -> None:
    model = hf_models.tiny_model(family, **options)
    block = next(module for module in model.modules() if form_of(type(module)))
    for name, value in options.items():
        assert getattr(model.config, name) == value
    assert_equal_to_eager(block, training, 1e-5 if family in ("nemotron_h", "hy_v3") else 1e-10)


@pytest.mark.parametrize("key", APART)
def test_blocks_of_other_models(key: str) -> None:
    family, _, name = key.partition(".")
    config = hf_models.tiny_config("qwen2_moe" if "Talker" in name else "deepseek_v3")
    config.router_scaling_factor = 2.5
    arguments: tuple[Any, ...] = (config,)
    if "Vision" in name:
        arguments = (SimpleNamespace(per_layer_config=[config]), 0)
    torch.manual_seed(0)
    block = getattr(hf_models.modeling(family), name)(*arguments).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.2)
    assert_equal_to_eager(block, False, 1e-10)


@pytest.mark.slow
def test_every_form_is_exercised() -> None:
    """By the sweep over families, or by the tests here."""
    found = set(APART)
    for family in hf_models.families():
        model = hf_models.tiny_model(family, torch.float32)
        found |= {class_key(type(module)) for module in model.modules() if form_of(type(module))}
    assert set(BLOCKS) - found == set()
