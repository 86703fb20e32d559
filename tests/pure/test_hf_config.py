"""Hugging Face configs: the values of released models give the presets; keys mean what they do in transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tessera_rt.errors import Problem, SpecError
from tessera_rt.files.hf_config import from_hf_config
from tessera_rt.files.hf_families import FAMILIES
from tessera_rt.files.model_files import load_model, preset_ids
from tessera_rt.model_spec import Activation, AttentionKind, FeedForwardKind, ModelSpec

CONFIGS = Path(__file__).parent / "data" / "hf_configs"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "vocab_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}
QWEN_MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 6,
}


def config_of(preset: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((CONFIGS / f"{preset}.json").read_text(encoding="utf-8"))
    return data


def faults(config: dict[str, Any]) -> dict[str, Problem]:
    with pytest.raises(SpecError) as caught:
        from_hf_config(config)
    return {problem.field: problem for problem in caught.value.problems}


def mixers(spec: ModelSpec) -> list[str]:
    return [layer.attention.kind.value for layer in spec.layers]


def moe_layers(spec: ModelSpec) -> list[int]:
    return [index for index, layer in enumerate(spec.layers) if layer.is_moe]


@pytest.mark.parametrize("preset", preset_ids())
def test_released_values_give_the_preset(preset: str) -> None:
    config = config_of(preset)
    expected = load_model(preset)
    if preset == "qwen3-next-80b":  # this file does not count the MTP block that the weights have
        assert from_hf_config(config).fingerprint == replace(expected, mtp=()).fingerprint
        config["num_nextn_predict_layers"] = 1
    spec = from_hf_config(config, name=expected.name)
    assert replace(spec, source=expected.source) == expected
    assert spec.fingerprint == expected.fingerprint


def test_files_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    for path in (folder, folder / "config.json"):
        spec = load_model(path)
        assert spec.name == "my-model"
        assert spec.fingerprint == from_hf_config(LLAMA).fingerprint
    (tmp_path / "other.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert load_model(str(tmp_path / "other.json")).name == "other"
    assert from_hf_config(LLAMA | {"_name_or_path": "me/mine"}).name == "me/mine"
    assert from_hf_config(LLAMA).name == "llama"


def test_unknown_model_types_list_the_supported_ones() -> None:
    for config in (LLAMA | {"model_type": "lama"}, {"model_type": 3}, {}):
        problem = faults(config)["model_type"]
        assert all(name in problem.allowed for name in FAMILIES)
    assert faults(LLAMA | {"model_type": "lama"})["model_type"].remedy == "did you mean 'llama'?"


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_all_missing_keys_are_told_at_once(model_type: str) -> None:
    found = faults({"model_type": model_type})
    assert {"hidden_size", "vocab_size", "max_position_embeddings"} <= set(found)
    assert ("num_hidden_layers" in found) or model_type == "nemotron_h"
    assert len(found) >= 4
    assert all(str(problem).startswith(f"{field} = (missing): must be") for field, problem in found.items())


@pytest.mark.parametrize("preset", preset_ids())
def test_every_missing_size_is_told_by_name(preset: str) -> None:
    """Each key is either told when missing, or has no effect on the sizes, or has the documented default."""
    config = config_of(preset)
    full = from_hf_config(config)
    for key in config:
        cut = {name: value for name, value in config.items() if name != key}
        try:
            spec = from_hf_config(cut)
        except SpecError as error:
            assert [problem.field for problem in error.problems] == [key]
            continue
        if spec.fingerprint != full.fingerprint:
            assert key in {
                "rope_theta", "rms_norm_eps", "attention_bias", "use_qk_norm", "router_aux_loss_coef",
                "num_nextn_predict_layers", "num_key_value_heads", "head_dim", "moe_latent_size",
            }, key  # fmt: skip


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4096", [], 2**40])
def test_wrong_values_are_told_with_their_range(value: object) -> None:
    found = faults(LLAMA | {"hidden_size": value, "intermediate_size": value})
    assert set(found) == {"hidden_size", "intermediate_size"}
    assert found["hidden_size"].allowed == "an integer from 1 to 2147483647"


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "x", 10**400])
def test_wrong_numbers(value: object) -> None:
    assert faults(LLAMA | {"rms_norm_eps": value})["rms_norm_eps"].allowed == "a finite number above 0"
    assert set(faults(LLAMA | {"rope_parameters": {"rope_theta": value}})) == {"rope_parameters.rope_theta"}


def test_wrong_names_and_flags() -> None:
    assert faults(LLAMA | {"hidden_act": "tanh"})["hidden_act"].allowed.startswith("one of silu")
    assert faults(LLAMA | {"tie_word_embeddings": 1})["tie_word_embeddings"].allowed == "true or false"


def test_sizes_that_contradict_each_other_are_refused() -> None:
    assert set(faults(LLAMA | {"num_key_value_heads": 3})) == {"layers[0].attention.kv_heads"}
    assert set(faults(QWEN_MOE | {"num_hidden_layers": 1, "num_experts_per_tok": 9})) == {
        "layers[0].feed_forward.top_k"
    }


def test_dense_families() -> None:
    spec = from_hf_config(LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True})
    layer = spec.layers[0]
    assert (layer.attention.head_dim, layer.attention.rope_dim, layer.attention.bias) == (16, 16, True)
    assert (layer.feed_forward.kind, layer.feed_forward.bias, spec.tied) == (FeedForwardKind.DENSE, True, True)
    assert (spec.norm_eps, spec.rope_theta, len(spec.layers)) == (1e-6, 10000.0, 3)
    mistral = from_hf_config(LLAMA | {"model_type": "mistral", "sliding_window": 32, "head_dim": 24})
    assert (mistral.layers[0].attention.kind, mistral.layers[0].attention.window) == (AttentionKind.SLIDING, 32)
    assert mistral.layers[0].attention.head_dim == 24
    assert mixers(from_hf_config(LLAMA | {"model_type": "mistral", "sliding_window": None}))[0] == "softmax"
    assert set(faults(LLAMA | {"model_type": "mistral"})) == {"sliding_window"}  # transformers' default is a window
    qwen = LLAMA | {"model_type": "qwen3", "head_dim": 16}
    assert from_hf_config(qwen).layers[0].attention.qk_norm
    windowed = qwen | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    assert mixers(from_hf_config(windowed)) == ["softmax", "softmax", "sliding"]
    listed = windowed | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    assert mixers(from_hf_config(listed)) == ["sliding", "softmax", "softmax"]


def test_head_dim_null_and_missing() -> None:
    for config in (LLAMA | {"head_dim": None}, LLAMA):
        assert from_hf_config(config).layers[0].attention.head_dim == 16
    assert from_hf_config(LLAMA | {"head_dim": 32}).layers[0].attention.head_dim == 32
    assert set(faults(LLAMA | {"num_attention_heads": 6})) == {"head_dim"}
    assert from_hf_config(LLAMA | {"num_key_value_heads": None}).layers[0].attention.kv_heads == 4
    assert "head_dim" in faults(LLAMA | {"model_type": "qwen3", "head_dim": None})


def test_which_qwen_layers_are_sparse() -> None:
    """As in Qwen3MoeDecoderLayer: not in mlp_only_layers, and (index + 1) % decoder_sparse_step == 0."""
    assert moe_layers(from_hf_config(QWEN_MOE)) == [0, 1, 2, 3, 4, 5]
    assert moe_layers(from_hf_config(QWEN_MOE | {"decoder_sparse_step": 2})) == [1, 3, 5]
    assert moe_layers(from_hf_config(QWEN_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [0, 3]})) == [1, 5]
    assert set(faults(QWEN_MOE | {"mlp_only_layers": [6]})) == {"mlp_only_layers"}
    dense = from_hf_config(QWEN_MOE | {"mlp_only_layers": [2]}).layers[2].feed_forward
    assert (dense.kind, dense.intermediate) == (FeedForwardKind.DENSE, 96)
    # The widths of parts that no layer has are not asked for.
    cut = {key: value for key, value in QWEN_MOE.items() if key != "intermediate_size"}
    assert moe_layers(from_hf_config(cut)) == [0, 1, 2, 3, 4, 5]


def test_qwen2_moe() -> None:
    config = QWEN_MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 48, "norm_topk_prob": False}
    layer = from_hf_config(config).layers[0]
    assert (layer.attention.bias, layer.attention.qk_norm) == (True, False)
    assert (layer.feed_forward.shared_intermediate, layer.feed_forward.shared_gated) == (48, True)
    assert not layer.feed_forward.router.renormalize
    windowed = config | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    assert mixers(from_hf_config(windowed)) == ["sliding", "softmax", "sliding", "softmax", "softmax", "softmax"]


def test_mixtral_sliding_window() -> None:
    config = config_of("mixtral-8x7b")
    assert set(mixers(from_hf_config(config | {"sliding_window": 4096}))) == {"sliding"}


def test_first_dense_layers_and_frequency() -> None:
    config = config_of("deepseek-v3") | {"num_hidden_layers": 6, "first_k_dense_replace": 2}
    assert moe_layers(from_hf_config(config)) == [2, 3, 4, 5]
    assert moe_layers(from_hf_config(config | {"moe_layer_freq": 2})) == [2, 4]
    assert from_hf_config(config | {"first_k_dense_replace": 0}).layers[0].is_moe
    full_rank = from_hf_config(config | {"q_lora_rank": None}).layers[0].attention
    assert full_rank.q_rank == 0
    assert from_hf_config(config | {"n_shared_experts": 2}).layers[2].feed_forward.shared_intermediate == 4096
    assert from_hf_config(config | {"n_shared_experts": None}).layers[2].feed_forward.shared_intermediate == 0
    assert len(from_hf_config(config | {"num_nextn_predict_layers": 2}).mtp) == 2
    softmax = config | {"scoring_func": "softmax", "topk_method": "greedy"}
    router = from_hf_config(softmax).layers[2].feed_forward.router
    assert (router.score, router.choice_bias) == ("softmax", False)


def test_rotation() -> None:
    config = config_of("glm-4.5")
    del config["partial_rotary_factor"]
    assert from_hf_config(config).layers[0].attention.rope_dim == 64  # the default of the class is a half
    del config["rope_theta"]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25}
    spec = from_hf_config(config)
    assert (spec.rope_theta, spec.layers[0].attention.rope_dim) == (5e5, 32)
    nested = LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 7e5}}}
    assert from_hf_config(nested).rope_theta == 7e5


def test_layer_types() -> None:
    config = config_of("gpt-oss-120b")
    del config["layer_types"]
    assert from_hf_config(config).fingerprint == load_model("gpt-oss-120b").fingerprint
    short = config | {"layer_types": ["full_attention"] * 3}
    assert set(faults(short)) == {"layer_types"}
    assert set(faults(config | {"layer_types": ["full"] * 36})) == {"layer_types"}
    assert from_hf_config(config).layers[0].feed_forward.activation is Activation.SWIGLU_OSS
    qwen = config_of("qwen3-next-80b") | {"num_hidden_layers": 4, "full_attention_interval": 2}
    assert mixers(from_hf_config(qwen)) == ["gated_delta_net", "softmax"] * 2
    listed = qwen | {"layer_types": ["full_attention", *["linear_attention"] * 3]}
    assert mixers(from_hf_config(listed)) == ["softmax", *["gated_delta_net"] * 3]


def test_jamba_periods() -> None:
    config = config_of("jamba-1.5-mini") | {"num_hidden_layers": 6}
    config |= {"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 0}
    spec = from_hf_config(config)
    assert mixers(spec) == ["mamba1", "softmax", "mamba1"] * 2
    assert moe_layers(spec) == [0, 2, 4]
    assert from_hf_config(config | {"mamba_dt_rank": "auto"}) == spec
    assert moe_layers(from_hf_config(config | {"num_experts": 1, "num_experts_per_tok": 1})) == []


def test_nemotron_patterns() -> None:
    config = config_of("nemotron-3-super")
    names = {"M": "mamba", "E": "moe", "*": "attention"}
    listed = config | {"layers_block_type": [names[letter] for letter in config["hybrid_override_pattern"]]}
    listed |= {"mtp_layers_block_type": ["attention", "moe"]}
    del listed["hybrid_override_pattern"], listed["mtp_hybrid_override_pattern"], listed["num_hidden_layers"]
    assert from_hf_config(listed).fingerprint == load_model("nemotron-3-super").fingerprint
    small = config | {"hybrid_override_pattern": "M-*", "num_hidden_layers": 3, "num_nextn_predict_layers": 0}
    spec = from_hf_config(small)
    assert mixers(spec) == ["mamba2", "none", "softmax"]
    assert (spec.layers[1].feed_forward.kind, spec.layers[1].feed_forward.intermediate) == (FeedForwardKind.DENSE, 2688)
    assert spec.mtp == ()
    assert set(faults(config | {"hybrid_override_pattern": "MX"})) == {"hybrid_override_pattern"}
    assert set(faults(config | {"num_hidden_layers": 87})) == {"hybrid_override_pattern"}
    long = faults(config | {"mtp_hybrid_override_pattern": "*EME"})
    assert long["mtp_hybrid_override_pattern"].value == "*EME"
    assert from_hf_config(config | {"mtp_hybrid_override_pattern": "E"}).mtp[0].attention.kind is AttentionKind.NONE
    assert from_hf_config(config | {"moe_latent_size": None}).layers[1].feed_forward.latent == 0


def test_text_part_of_a_multimodal_model() -> None:
    text = config_of("kimi-k2")
    wrapped = {"model_type": "kimi_k25", "vision_config": {"hidden_size": 1}, "text_config": text}
    assert from_hf_config(wrapped).fingerprint == load_model("kimi-k2").fingerprint
    assert set(faults({"model_type": "kimi_k25", "text_config": 3})) == {"text_config"}
    tied = {"model_type": "x", "tie_word_embeddings": True, "text_config": LLAMA}
    assert from_hf_config(tied).tied
