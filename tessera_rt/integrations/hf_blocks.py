"""The MoE blocks of transformers, as data: which parts a block has and how it puts them together.

Every row was read from ``models/<family>/modeling_<family>.py``. The parts themselves (router, shared experts,
projections, norms) stay the family's own modules; only the order in which they are called is described here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from torch import nn

from tessera_rt.integrations.hf_layouts import class_key


class Returns(StrEnum):
    """What a block gives back besides its output."""

    OUTPUT = "output"
    OUTPUT_AND_WEIGHTS = "output, router weights"
    FLAT_OUTPUT_AND_LOGITS = "output and router logits, both flattened"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockForm:
    """out = finish(scale * after(experts(before(x))) + sigmoid(shared_gate(x)) * shared(x)), names of attributes.

    Attributes that a block lacks count as absent (an optional shared expert, say). ``router_rows``, ``shared_rows``:
    the part is given [T, H] instead of the block's own shape. ``router_arguments``: buffers passed to the router.
    ``jitter``: noise on the input while training. ``fp32_combine``: the flag that adds routed and shared in float32.
    ``average``: the attribute that says "average" where routed and shared are averaged.
    """

    router: str = "gate"
    router_rows: bool = True
    router_arguments: tuple[str, ...] = ()
    token_ids_if: str = ""
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    scale: str = ""
    shared: str = ""
    shared_rows: bool = True
    shared_gate: str = ""
    jitter: str = ""
    fp32_combine: str = ""
    average: str = ""
    finish: str = ""
    returns: Returns = Returns.OUTPUT


_PLAIN = BlockForm()
_ROUTER = BlockForm(router="router")
_DEEPSEEK = BlockForm(router_rows=False, shared="shared_experts", shared_rows=False)
_QWEN = BlockForm(shared="shared_expert", shared_gate="shared_expert_gate")
_MIXTRAL = BlockForm(jitter="jitter_noise")
_SHARED = BlockForm(shared="shared_experts")
_CHOICE_BIAS = ("e_score_correction_bias",)

BLOCKS: Final[Mapping[str, BlockForm]] = {
    "afmoe.AfmoeSparseMoeBlock": replace(
        _SHARED, router="router", router_rows=False, router_arguments=("expert_bias",)
    ),
    "aria.AriaTextMoELayer": replace(_ROUTER, shared="shared_experts", shared_rows=False),
    "axk1.AXK1MoE": replace(_DEEPSEEK, finish="post_mlp_layernorm"),
    "axk2.AXK2MoE": _DEEPSEEK,
    "bailing_hybrid.BailingHybridMoE": _DEEPSEEK,
    "beam.BeamMoE": BlockForm(scale="routed_scaling_factor"),
    "cohere2_moe.Cohere2MoeSparseMoeBlock": replace(_SHARED, average="shared_expert_combination_strategy"),
    "deepseek_ocr2.DeepseekOcr2TextMoe": _DEEPSEEK,
    "deepseek_v2.DeepseekV2Moe": _DEEPSEEK,
    "deepseek_v3.DeepseekV3MoE": _DEEPSEEK,
    "deepseek_v32.DeepseekV32MoE": _DEEPSEEK,
    "deepseek_v4.DeepseekV4SparseMoeBlock": replace(_DEEPSEEK, token_ids_if="is_hash"),
    "dots1.Dots1MoE": _DEEPSEEK,
    "dots3_note.Dots3NoteTextMoE": _DEEPSEEK,
    "dots3_note.Dots3NoteVisionMoE": BlockForm(router_rows=False, router_arguments=_CHOICE_BIAS),
    "ernie4_5_moe.Ernie4_5_MoeSparseMoeBlock": _SHARED,
    "ernie4_5_vl_moe.Ernie4_5_VLMoeSparseMoeBlock": BlockForm(returns=Returns.FLAT_OUTPUT_AND_LOGITS),
    "exaone_moe.ExaoneMoeSparseMoEBlock": _DEEPSEEK,
    "flex_olmo.FlexOlmoSparseMoeBlock": _PLAIN,
    "flint.FlintSparseMoeBlock": BlockForm(shared="shared_expert"),
    "glm4_moe.Glm4MoeMoE": _DEEPSEEK,
    "glm4_moe_lite.Glm4MoeLiteMoE": _DEEPSEEK,
    "glm4v_moe.Glm4vMoeTextMoE": _DEEPSEEK,
    "glm5_next.Glm5NextTextMoE": _DEEPSEEK,
    "glm_moe_dsa.GlmMoeDsaMoE": _DEEPSEEK,
    "gpt_oss.GptOssMLP": replace(_ROUTER, returns=Returns.OUTPUT_AND_WEIGHTS),
    "granitemoe.GraniteMoeMoE": _ROUTER,
    "granitemoe_swa.GraniteMoeSWAMoE": _ROUTER,
    "granitemoehybrid.GraniteMoeHybridMoE": _ROUTER,
    "granitemoeshared.GraniteMoeSharedMoE": _ROUTER,
    "hunyuan_v1_moe.HunYuanMoEV1Moe": BlockForm(shared="shared_mlp", shared_rows=False),
    "hy_v3.HYV3MoE": replace(_SHARED, router_arguments=_CHOICE_BIAS, fp32_combine="enable_moe_fp32_combine"),
    "hy_v4.HYV4MoE": _DEEPSEEK,
    "hy_v4_vl.HYV4VLMoE": _DEEPSEEK,
    "jamba.JambaSparseMoeBlock": _ROUTER,
    "kimi_linear.KimiLinearMoE": _DEEPSEEK,
    "kolibri1.Kolibri1SparseMoeBlock": _DEEPSEEK,
    "laguna.LagunaSparseMoeBlock": replace(_SHARED, scale="routed_scaling_factor"),
    "lara_mini.LaraMiniSparseMoeBlock": BlockForm(shared="shared_expert"),
    "lfm2_moe.Lfm2MoeSparseMoeBlock": BlockForm(router_arguments=("expert_bias",)),
    "mellum.MellumSparseMoeBlock": _PLAIN,
    "mimo_v2_flash.MiMoV2FlashMoE": BlockForm(router_rows=False),
    "minimax.MiniMaxSparseMoeBlock": _MIXTRAL,
    "minimax_m2.MiniMaxM2SparseMoeBlock": replace(_MIXTRAL, router_arguments=_CHOICE_BIAS),
    "minimax_m3_vl.MiniMaxM3VLSparseMoeBlock": replace(_SHARED, scale="routed_scaling_factor"),
    "mistral4.Mistral4MoE": _DEEPSEEK,
    "mistral_large4.MistralLarge4TextMoE": _DEEPSEEK,
    "mixtral.MixtralSparseMoeBlock": _MIXTRAL,
    "nemotron_h.NemotronHMoE": replace(_DEEPSEEK, before=("fc1_latent_proj",), after=("fc2_latent_proj",)),
    "olmoe.OlmoeSparseMoeBlock": _PLAIN,
    "openai_privacy_filter.OpenAIPrivacyFilterMLP": replace(
        _ROUTER, scale="num_experts", returns=Returns.OUTPUT_AND_WEIGHTS
    ),
    "phimoe.PhimoeSparseMoeBlock": replace(_ROUTER, jitter="input_jitter_noise"),
    "qwen2_moe.Qwen2MoeSparseMoeBlock": _QWEN,
    "qwen3_5_moe.Qwen3_5MoeSparseMoeBlock": _QWEN,
    "qwen3_moe.Qwen3MoeSparseMoeBlock": _PLAIN,
    "qwen3_next.Qwen3NextSparseMoeBlock": _QWEN,
    "qwen3_omni_moe.Qwen3OmniMoeTalkerTextSparseMoeBlock": _QWEN,
    "qwen3_omni_moe.Qwen3OmniMoeThinkerTextSparseMoeBlock": _PLAIN,
    "qwen3_vl_moe.Qwen3VLMoeTextSparseMoeBlock": _PLAIN,
    "qwen4_exp.Qwen4ExpTextSparseMoeBlock": _QWEN,
    "solar_open.SolarOpenMoE": _DEEPSEEK,
    "unlimited_ocr.UnlimitedOcrTextMoe": _DEEPSEEK,
}

# Experts whose surroundings are not a block of the form above: their experts alone are replaced.
EXPERTS_ONLY: Final[Mapping[str, str]] = {
    "diffusion_gemma.DiffusionGemmaTextExperts": "router and experts are parts of the decoder layer itself",
    "gemma4.Gemma4TextExperts": "router and experts are parts of the decoder layer itself",
    "inkling.InklingExperts": "the router also weighs the shared experts",
    "zaya.ZayaExperts": "the router hands a state from layer to layer",
}

# MoE that Tessera does not compute, with the reason.
REFUSED: Final[Mapping[str, str]] = {
    "dbrx.DbrxFFN": "experts stored as [E F, H] matrices (MegaBlocks layout), outside use_experts_implementation",
    "doge.DogeCDMoE": "experts are rows of an embedding",
    "inkling2.Inkling2SparseMoeBlock": "softcapped SwiGLU between the products",
    "inkling2_loop.Inkling2LoopSparseMoeBlock": "softcapped SwiGLU between the products",
    "jetmoe.JetMoeMoE": "experts outside use_experts_implementation",
    "jetmoe.JetMoeMoA": "experts inside attention",
    "llama4.Llama4TextMoe": "router weights are applied to the experts' input, and every expert sees every token",
    "longcat_flash.LongcatFlashMoE": "some experts are the identity",
    "muse_spark.MuseSparkMoE": "a norm behind each expert",
    "nllb_moe.NllbMoeSparseMLP": "experts with a capacity, as separate modules",
    "step3p7.Step3p7SparseMoeBlock": "clamps behind the SiLU, outside use_experts_implementation",
    "switch_transformers.SwitchTransformersSparseMLP": "experts with a capacity, as separate modules",
    "vitpose_backbone.VitPoseBackboneMoeMLP": "experts are chosen by data set, not by a router",
}


def form_of(cls: type[nn.Module]) -> BlockForm | None:
    """The form of a block's class. A subclass has its parent's form, unless it brings a ``forward`` of its own."""
    for ancestor in cls.__mro__:
        if class_key(ancestor) in BLOCKS:
            return BLOCKS[class_key(ancestor)]
        if "forward" in vars(ancestor):
            return None
    return None
