"""Tiny random models of every MoE family in the installed transformers; needs transformers.

Families are found by reading the sources of transformers, so a new one shows up by itself.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

MODELS = Path(transformers.__file__).parent / "models"
TOKENS = (2, 8)

# Sizes under all names that families use; each config takes those that it knows.
SIZES: Mapping[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "moe_intermediate_size": 16, "head_dim": 8},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k"), 2),
    **dict.fromkeys(
        ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"), 24
    ),
    **{"shared_experts_intermediate_size": 24, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    **{"first_k_dense_replace": 0, "decoder_sparse_step": 1, "mlp_only_layers": []},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 8},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"linear_conv_kernel_dim": 2, "index_topk": 4, "index_head_dim": 16, "index_n_heads": 2},
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_num_heads": 4, "mamba_head_dim": 16},
    **{"ssm_state_size": 8, "linear_head_dim": 8, "linear_num_heads": 4, "o_lora_rank": 8, "o_groups": 2},
}


def _mrope(*section: int) -> Mapping[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section)}}


_MLA = {"num_key_value_heads": 4}
_SPARSE = {"mlp_layer_types": ["sparse", "sparse"]}
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v32", "glm_moe_dsa", "mistral_large4"), _MLA),
    # Groups of experts, and the bias for the choice, in the family that brought them.
    "deepseek_v3": {
        **{**_MLA, "n_routed_experts": 8, "num_local_experts": 8},
        **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    },
    "beam": {**_SPARSE, "routed_scaling_factor": 2.5},
    "deepseek_ocr2": _SPARSE,
    "glm4_moe_lite": {**_MLA, **_SPARSE},
    "unlimited_ocr": _SPARSE,
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe"]},
    "dots3_note": _MLA,
    "ernie4_5_vl_moe": {"moe_intermediate_size": [16, 8], **_mrope(1, 1, 2)},
    "gemma4": {"enable_moe_block": True, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 64},
    "glm4v_moe": _mrope(1, 1, 0),
    "glm5_next": {**_MLA, **_SPARSE, "qk_rope_head_dim": 0, "head_dim": 0, "index_kpool": 4},
    "hy_v4_vl": {**_MLA, **_mrope(2, 1, 1)},
    "inkling": {
        **{"rel_extent": 16, "d_rel": 4, "sliding_window_size": 8, "unpadded_vocab_size": 64},
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8},
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    "mistral4": {**_MLA, "head_dim": 16},
    "nemotron_h": {"n_groups": 2, "moe_latent_size": 24, "layers_block_type": ["moe", "full_attention", "moe"]},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}


@cache
def sources() -> Mapping[str, Mapping[str, ast.ClassDef]]:
    """Family -> its modeling classes by name, of the families whose source speaks of experts."""
    families = {}
    for file in sorted(MODELS.glob("*/modeling_*.py")):
        text = file.read_text(encoding="utf-8")
        if "xperts" in text:
            tree = ast.parse(text)
            families[file.parent.name] = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
    return families


def decorated(family: str) -> tuple[str, ...]:
    """Names of the family's classes under ``use_experts_implementation``."""
    return tuple(
        name
        for name, node in sources()[family].items()
        if any("use_experts_implementation" in ast.unparse(decorator) for decorator in node.decorator_list)
    )


def holders(family: str) -> Iterator[tuple[str, str]]:
    """(class, experts class) for every class of the family that keeps something as ``self.experts``."""
    for name, node in sources()[family].items():
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assign) and ast.unparse(inner.targets[0]) == "self.experts":
                made = inner.value.func if isinstance(inner.value, ast.Call) else inner.value
                yield name, ast.unparse(made)


def families() -> tuple[str, ...]:
    return tuple(family for family in sources() if decorated(family))


def modeling(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def model_class(family: str) -> type[PreTrainedModel]:
    """The family's causal language model, or else its text model."""
    module = modeling(family)
    classes = [
        cls
        for cls in vars(module).values()
        if inspect.isclass(cls) and issubclass(cls, PreTrainedModel) and cls.__module__ == module.__name__
    ]
    for ending in ("ForCausalLM", "TextModel", "Model"):
        for cls in classes:
            if cls.__name__.endswith(ending) and not cls.__name__.endswith("PreTrainedModel"):
                return cls
    raise LookupError(family)


def tiny_config(family: str, **overrides: Any) -> Any:
    cls: Any = model_class(family).config_class
    known = set(vars(cls())) | set(inspect.signature(cls).parameters) | set(getattr(cls, "attribute_map", ()))
    sizes = {**SIZES, **OVERRIDES.get(family, {})}
    config = cls(**{name: value for name, value in sizes.items() if name in known} | overrides)
    config._experts_implementation = "eager"
    return config


def tiny_model(family: str, dtype: torch.dtype = torch.float64, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model with random weights of a size at which experts matter; biases for the choice are random too."""
    torch.manual_seed(seed)
    cls: Any = model_class(family)
    model: PreTrainedModel = cls._from_config(tiny_config(family, **overrides))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dim() == 3 or "bias" in name:
                tensor.normal_(0.0, 0.2)
    nn.Module.to(model, dtype)
    nn.Module.eval(model)
    return model


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(3, 64, TOKENS, generator=torch.Generator().manual_seed(seed))


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "_apply_gate")}
