"""The released models: their sizes add up to what their makers say."""

from __future__ import annotations

from collections import Counter

import pytest

from tessera_rt.cost_sources.sizes import item_parameters
from tessera_rt.files.model_files import load_model, model_from_dict, model_to_yaml, preset_ids
from tessera_rt.files.yaml_text import parse_yaml
from tessera_rt.model_spec import AttentionKind, FeedForwardKind, ItemKind, ModelSpec

# Parameters without MTP blocks and layers by kind: (mixer, feed-forward) -> number.
A, F = AttentionKind, FeedForwardKind
RELEASED: dict[str, tuple[float, int, dict[tuple[AttentionKind, FeedForwardKind], int]]] = {
    "mixtral-8x7b": (46.7e9, 0, {(A.SOFTMAX, F.MOE): 32}),
    "qwen3-30b-a3b": (30.5e9, 0, {(A.SOFTMAX, F.MOE): 48}),
    "qwen3-235b-a22b": (235e9, 0, {(A.SOFTMAX, F.MOE): 94}),
    "qwen3-next-80b": (80e9, 1, {(A.GATED_DELTA_NET, F.MOE): 36, (A.SOFTMAX, F.MOE): 12}),
    "deepseek-v3": (671e9, 1, {(A.MLA, F.DENSE): 3, (A.MLA, F.MOE): 58}),
    "gpt-oss-120b": (116.8e9, 0, {(A.SLIDING, F.MOE): 18, (A.SOFTMAX, F.MOE): 18}),
    "kimi-k2": (1.04e12, 0, {(A.MLA, F.DENSE): 1, (A.MLA, F.MOE): 60}),
    "glm-4.5": (355e9, 1, {(A.SOFTMAX, F.DENSE): 3, (A.SOFTMAX, F.MOE): 89}),
    "nemotron-3-nano": (31.6e9, 0, {(A.MAMBA2, F.NONE): 23, (A.NONE, F.MOE): 23, (A.SOFTMAX, F.NONE): 6}),
    "nemotron-3-super": (120.6e9, 1, {(A.MAMBA2, F.NONE): 40, (A.NONE, F.MOE): 40, (A.SOFTMAX, F.NONE): 8}),
    "jamba-1.5-mini": (
        52e9,
        0,
        {(A.MAMBA1, F.DENSE): 12, (A.MAMBA1, F.MOE): 16, (A.SOFTMAX, F.DENSE): 4},
    ),
    "jamba-1.5-large": (
        398e9,
        0,
        {(A.MAMBA1, F.DENSE): 27, (A.MAMBA1, F.MOE): 36, (A.SOFTMAX, F.DENSE): 9},
    ),
}
# What transformers 5.24 builds from the same config.json (on the meta device): every weight, without MTP blocks.
BUILT = {
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-next-80b": 79_674_391_296,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-120b": 116_829_156_672,  # with attention sinks, which are not described
    "kimi-k2": 1_026_408_209_408,
    "glm-4.5": 352_797_814_784,  # without a bias of the output projection, which is described
    "nemotron-3-nano": 31_577_937_344,
    "nemotron-3-super": 120_668_687_360,
    "jamba-1.5-mini": 51_570_323_328,
    "jamba-1.5-large": 398_555_145_696,
}
# Parameters that one token uses, where the maker states them to two digits or more.
ACTIVE = {"mixtral-8x7b": 12.9e9, "qwen3-30b-a3b": 3.3e9, "qwen3-235b-a22b": 22e9, "deepseek-v3": 37e9, "kimi-k2": 32e9}


def parameters(spec: ModelSpec) -> int:
    return sum(item_parameters(spec, item) for item in spec.items if item.kind is not ItemKind.MTP)


def test_every_preset_is_known_here() -> None:
    assert set(preset_ids()) == set(RELEASED)
    assert preset_ids() == tuple(sorted(preset_ids()))


@pytest.mark.parametrize("preset", RELEASED)
def test_sizes_add_up_to_the_released_total(preset: str) -> None:
    spec = load_model(preset)
    total, mtp, kinds = RELEASED[preset]
    assert spec.name == preset
    assert spec.source
    assert parameters(spec) == pytest.approx(total, rel=0.02)
    assert parameters(spec) == pytest.approx(BUILT[preset], rel=2e-6)
    assert Counter((layer.attention.kind, layer.feed_forward.kind) for layer in spec.layers) == kinds
    assert len(spec.mtp) == mtp


@pytest.mark.parametrize("preset", ACTIVE)
def test_active_parameters(preset: str) -> None:
    """Total less the experts that a token does not visit."""
    spec = load_model(preset)
    idle = 0
    for layer in spec.layers:
        moe = layer.feed_forward
        idle += (moe.experts - moe.top_k) * 3 * (moe.latent or spec.hidden) * moe.intermediate
    assert parameters(spec) - idle == pytest.approx(ACTIVE[preset], rel=0.03)


def test_deepseek_mtp_block() -> None:
    """Its own weights are 11.5 billion, without the copies of the embedding and of the head (README_WEIGHTS.md)."""
    spec = load_model("deepseek-v3")
    block = sum(item_parameters(spec, item) for item in spec.items if item.kind is ItemKind.MTP)
    assert block - spec.vocab * spec.hidden == pytest.approx(11.5e9, rel=0.02)


def test_orders_of_layers() -> None:
    letters = {
        (A.MAMBA2, F.NONE): "M",
        (A.NONE, F.MOE): "E",
        (A.SOFTMAX, F.NONE): "*",
    }
    patterns = {
        "nemotron-3-nano": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "nemotron-3-super": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
    }
    for preset, pattern in patterns.items():
        spec = load_model(preset)
        assert "".join(letters[layer.attention.kind, layer.feed_forward.kind] for layer in spec.layers) == pattern
    jamba = load_model("jamba-1.5-large").layers
    assert [index for index, layer in enumerate(jamba) if layer.attention.kind is A.SOFTMAX] == list(range(4, 72, 8))
    assert [index for index, layer in enumerate(jamba) if layer.is_moe] == list(range(1, 72, 2))
    qwen = load_model("qwen3-next-80b").layers
    assert [index for index, layer in enumerate(qwen) if layer.attention.kind is A.SOFTMAX] == list(range(3, 48, 4))
    oss = load_model("gpt-oss-120b").layers
    assert [index for index, layer in enumerate(oss) if layer.attention.kind is A.SLIDING] == list(range(0, 36, 2))
    for preset, dense in (("deepseek-v3", 3), ("kimi-k2", 1), ("glm-4.5", 3)):
        assert [layer.is_moe for layer in load_model(preset).layers].index(True) == dense


def test_fingerprints_differ() -> None:
    assert len({load_model(preset).fingerprint for preset in preset_ids()}) == len(RELEASED)


@pytest.mark.parametrize("preset", RELEASED)
def test_preset_survives_writing(preset: str) -> None:
    spec = load_model(preset)
    assert model_from_dict(parse_yaml(model_to_yaml(spec), preset), preset) == spec
