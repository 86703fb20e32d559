"""Converters of MoE state dicts: exact both ways, true to what each runtime stores, by expert-parallel share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from tessera_rt.errors import SpecError
from tessera_rt.integrations.checkpoint_layouts import FAMILIES, LAYOUTS
from tessera_rt.integrations.converters import EpShare, from_ours, join_experts, split_experts, to_ours
from tessera_rt.kernels.options import Activation, Gate, RouterRule
from tessera_rt.moe.config import MoEConfig
from tessera_rt.moe.layer import MoE
from tessera_rt.testing import hf_models

E, H, WIDTH, S = 4, 6, 5, 7


def our_state(layout: str, experts: int = E, dtype: torch.dtype = torch.float32, hidden: int = H) -> dict[str, Tensor]:
    """Random tensors for all that the layout has a place for."""
    plain = "nemotron" in layout
    latent = 3 if any(entry.ours.startswith("to_latent") for entry in LAYOUTS[layout].entries) else hidden
    shapes: Mapping[str, tuple[int, ...]] = {
        "router.weight": (experts, hidden),
        "router.bias": (experts,),
        "router.choice_bias": (experts,),
        "experts.gate_up.weight": (experts, WIDTH if plain else 2 * WIDTH, latent),
        "experts.gate_up.bias": (experts, 2 * WIDTH),
        "experts.down.weight": (experts, latent, WIDTH),
        "experts.down.bias": (experts, latent),
        "shared.gate_up.weight": (S if plain else 2 * S, hidden),
        "shared.down.weight": (hidden, S),
        "shared.gate.weight": (1, hidden),
        "to_latent.weight": (latent, hidden),
        "from_latent.weight": (hidden, latent),
    }
    return {entry.ours: torch.randn(shapes[entry.ours]).to(dtype) for entry in LAYOUTS[layout].entries}


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name
        assert actual[name].is_contiguous(), name


@pytest.mark.parametrize("layout", LAYOUTS)
@given(
    experts=st.integers(1, 12),
    hidden=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
)
@settings(max_examples=10, deadline=None)
def test_every_layout_comes_back_exactly(layout: str, experts: int, hidden: int, dtype: torch.dtype) -> None:
    ours = our_state(layout, experts, dtype, hidden)
    theirs = from_ours(ours, layout, prefix="model.layers.3.mlp.")
    assert all(key.startswith("model.layers.3.mlp.") for key in theirs)
    elsewhere = {"model.layers.4.mlp.gate.weight": torch.zeros(1)}
    assert_same(to_ours(theirs | elsewhere, layout, prefix="model.layers.3.mlp."), ours)
    assert_same(from_ours(to_ours(theirs, layout, prefix="model.layers.3.mlp."), layout), from_ours(ours, layout))


def test_what_each_runtime_stores() -> None:
    ours = our_state("hf/qwen2_moe")
    gate, up = ours["experts.gate_up.weight"].chunk(2, 1)
    down = ours["experts.down.weight"]
    hf = from_ours(ours, "hf/qwen2_moe")
    assert torch.equal(hf["experts.2.gate_proj.weight"], gate[2]) and torch.equal(hf["experts.2.up_proj.weight"], up[2])
    assert torch.equal(hf["experts.3.down_proj.weight"], down[3])
    assert torch.equal(hf["shared_expert.up_proj.weight"], ours["shared.gate_up.weight"][S:])
    routed = {name: tensor for name, tensor in ours.items() if not name.startswith("shared")}
    mixtral = from_ours(routed, "hf/mixtral")
    assert torch.equal(mixtral["experts.1.w1.weight"], gate[1]) and torch.equal(mixtral["experts.1.w3.weight"], up[1])
    titan = from_ours(routed, "torchtitan")
    assert torch.equal(titan["routed_experts.inner_experts.w1_EFD"], gate)
    assert torch.equal(titan["routed_experts.inner_experts.w3_EFD"], up)
    megatron = from_ours(ours, "megatron/te_grouped")
    assert torch.equal(megatron["experts.linear_fc1.weight1"], torch.cat([gate[1], up[1]]))
    assert torch.equal(megatron["shared_experts.gate_weight"], ours["shared.gate.weight"])
    sequential = from_ours(ours, "megatron/sequential")
    assert torch.equal(sequential["experts.local_experts.3.linear_fc2.weight"], down[3])
    oss = from_ours(our := our_state("hf-fused/gpt_oss"), "hf-fused/gpt_oss")
    gate, up = our["experts.gate_up.weight"].chunk(2, 1)
    assert oss["experts.gate_up_proj"].shape == (E, H, 2 * WIDTH)
    assert torch.equal(oss["experts.gate_up_proj"][..., ::2], gate.mT)
    assert torch.equal(oss["experts.gate_up_proj"][..., 1::2], up.mT)
    assert torch.equal(oss["experts.gate_up_proj_bias"][:, 1::2], our["experts.gate_up.bias"][:, WIDTH:])


def test_round_the_runtimes_through_expert_parallel_shares() -> None:
    start = from_ours(our_state("hf/qwen2_moe"), "hf/qwen2_moe")
    ranks = [
        from_ours(part, "megatron/te_grouped", prefix="mlp.")
        for part in split_experts(to_ours(start, "hf/qwen2_moe"), 2)
    ]
    assert all(
        "mlp.experts.linear_fc1.weight1" in rank and "mlp.experts.linear_fc1.weight2" not in rank for rank in ranks
    )
    other = [from_ours(to_ours(rank, "megatron/te_grouped", prefix="mlp."), "megatron/sequential") for rank in ranks]
    whole = join_experts([to_ours(rank, "megatron/sequential") for rank in other])
    fused = from_ours(whole, "hf-fused/qwen2_moe")
    assert_same(from_ours(to_ours(fused, "hf-fused/qwen2_moe"), "hf/qwen2_moe"), start)


@pytest.mark.parametrize("layout", ["hf/qwen2_moe", "hf-fused/qwen2_moe", "torchtitan"])
def test_a_share_of_a_whole_checkpoint(layout: str) -> None:
    ours = our_state(layout)
    whole = from_ours(ours, layout)
    for rank, part in enumerate(split_experts(ours, 2)):
        share = EpShare(rank, 2)
        assert_same(to_ours(whole, layout, share=share), part)
        theirs = from_ours(part, layout, share=share)
        if layout == "hf/qwen2_moe":  # experts keep their numbers
            assert all(torch.equal(whole[key], tensor) for key, tensor in theirs.items())
            assert f"experts.{2 * rank + 1}.up_proj.weight" in theirs
    assert_same(join_experts(split_experts(ours, 4)), ours)


def test_errors_name_the_key() -> None:
    ours = our_state("hf/qwen2_moe")
    hf = from_ours(ours, "hf/qwen2_moe", prefix="m.")
    with pytest.raises(SpecError, match=r"m\.experts\.1\.up_proj\.weight = 'missing'.*1 missing"):
        to_ours({key: t for key, t in hf.items() if "1.up_proj" not in key}, "hf/qwen2_moe", prefix="m.")
    for layout in ("hf/qwen2_moe", "hf-fused/qwen2_moe"):  # the last experts, of which no key tells
        whole = from_ours(ours, layout)
        short = {key: t[:2] if "experts.gate_up" in key or "experts.down" in key else t for key, t in whole.items()}
        short = {key: t for key, t in short.items() if "experts.3." not in key}
        with pytest.raises(SpecError, match=r"experts = [23]: must be 4 / 1, for a router of 4 experts; some are miss"):
            to_ours(short, layout)
    with pytest.raises(SpecError, match=r"experts = 2: must be 4 / 1, for a router"):
        from_ours(split_experts(ours, 2)[1], "hf/qwen2_moe")
    with pytest.raises(SpecError, match=r"experts = 3: must be a divisor of the router's 4"):
        from_ours(
            {name: t[:3] if name.startswith("experts.") else t for name, t in ours.items()}, "megatron/te_grouped"
        )
    with pytest.raises(SpecError, match=r"m\.experts\.0\.w9 = 'unknown'"):
        to_ours(hf | {"m.experts.0.w9": torch.zeros(1)}, "hf/qwen2_moe", prefix="m.")
    with pytest.raises(SpecError, match=r"m\.experts\.0\.gate_proj\.weight"):
        to_ours(hf | {"m.experts.2.gate_proj.weight": torch.zeros(2, 2)}, "hf/qwen2_moe", prefix="m.")
    with pytest.raises(SpecError, match=r"shared\.down\.weight\.shape = \(3, 7\): must be of H = 6"):
        to_ours(hf | {"m.shared_expert.down_proj.weight": torch.zeros(3, S)}, "hf/qwen2_moe", prefix="m.")
    with pytest.raises(SpecError, match=r"gate\.weight = 'missing'"):
        to_ours({}, "hf/mixtral")
    with pytest.raises(SpecError, match=r"layout = 'hf/qwen9'.*hf/qwen2_moe"):
        to_ours(hf, "hf/qwen9")
    with pytest.raises(SpecError, match=r"shared\.gate\.weight = 'present': must be absent: torchtitan has no place"):
        from_ours(ours, "torchtitan")
    with pytest.raises(SpecError, match=r"router\.weight = 'missing'"):
        from_ours({name: t for name, t in ours.items() if name != "router.weight"}, "hf/qwen2_moe")
    with pytest.raises(SpecError, match=r"a divisor of 4 experts"):
        split_experts(ours, 3)
    left, right = split_experts(ours, 2)
    with pytest.raises(SpecError, match=r"rank 1: router\.weight = 'different'"):
        join_experts([left, right | {"router.weight": torch.zeros(E, H)}])


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in hf_models.families()])
def test_checkpoints_that_transformers_writes(family: str, tmp_path: Path) -> None:
    """What save_pretrained writes and what the modules hold are the same tensors of ours."""
    model = hf_models.tiny_model(family, torch.float32)
    name, block = next((n, m) for n, m in model.named_modules() if hasattr(m, "experts"))
    row = FAMILIES[family]
    memory = to_ours(block.state_dict(), f"hf-fused/{row}") if f"hf-fused/{row}" in LAYOUTS else None
    if f"hf/{row}" not in LAYOUTS:
        assert memory is not None
        assert_same(from_ours(memory, f"hf-fused/{row}"), dict(block.state_dict()))
        return
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    layer = f".{'.'.join(name.split('.')[1:3])}."  # checkpoints may call the model otherwise
    down = next(key for key in sorted(saved) if layer in key and ".experts.0." in key)
    ours = to_ours(saved, f"hf/{row}", prefix=down.partition("experts.0.")[0])
    experts = dict(block.experts.named_parameters())
    assert torch.equal(ours["experts.gate_up.weight"], experts.get("gate_up_proj", experts.get("up_proj")))
    assert torch.equal(ours["experts.down.weight"], experts["down_proj"])
    if memory is not None:
        assert_same(ours, memory)


RULES = {
    "qwen2_moe": MoEConfig(
        hidden=32, intermediate=16, experts=4, router=RouterRule(top_k=2), shared_intermediate=24, shared_gated=True
    ),
    "gpt_oss": MoEConfig(
        hidden=32, intermediate=16, experts=4, router=RouterRule(top_k=2, softmax_after_topk=True), router_bias=True,
        gate=Gate(activation=Activation.SWIGLU_OSS), expert_bias=True,
    ),
    "deepseek_v3": MoEConfig(
        hidden=32, intermediate=16, experts=8, shared_intermediate=16, choice_bias=True,
        router=RouterRule(
            top_k=2, score="sigmoid", renormalize=True, eps=1e-20, scale=2.5, groups=4, keep_groups=2
        ),
    ),
    "nemotron_h": MoEConfig(
        hidden=32, intermediate=16, experts=4, shared_intermediate=24, choice_bias=True, latent=24,
        gate=Gate(activation=Activation.RELU2),
        router=RouterRule(top_k=2, score="sigmoid", renormalize=True, eps=1e-20),
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", RULES)
def test_converted_weights_make_our_layer_compute_the_same(family: str) -> None:
    model = hf_models.tiny_model(family, torch.float32)
    block = next(module for module in model.modules() if hasattr(module, "experts"))
    layer = MoE(RULES[family])
    layer.load_state_dict(to_ours(block.state_dict(), f"hf-fused/{FAMILIES[family]}"), strict=True)
    x = torch.randn(2, 7, 32)
    expected = block(x)
    torch.testing.assert_close(layer(x), expected[0] if isinstance(expected, tuple) else expected, rtol=1e-5, atol=1e-5)
