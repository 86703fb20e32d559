"""MoEConfig: what it says of itself, every fault at once, and how it follows from model descriptions."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from tessera_rt import model_spec
from tessera_rt.errors import SpecError
from tessera_rt.files.model_files import load_model
from tessera_rt.model_spec import FeedForward, FeedForwardKind, Router
from tessera_rt.moe import Activation, Gate, MoEConfig, RouterRule
from tessera_rt.moe.config import feed_forward_problems

PLAIN = MoEConfig(hidden=8, intermediate=6, experts=4, router=RouterRule(top_k=2))
PRESETS = sorted((Path(model_spec.__file__).parent / "presets").glob("*.yaml"))


def test_sizes_follow_and_nothing_can_be_changed() -> None:
    assert (PLAIN.top_k, PLAIN.expert_input, PLAIN.product) == (2, 8, 12)
    relu = replace(PLAIN, gate=Gate(activation=Activation.RELU2), latent=3)
    assert (relu.expert_input, relu.product) == (3, 6)
    with pytest.raises(FrozenInstanceError):
        PLAIN.hidden = 3  # type: ignore[misc]
    assert len({PLAIN, replace(PLAIN), relu}) == 2


def test_every_fault_is_named_at_once() -> None:
    config = MoEConfig(
        hidden=0,
        intermediate=0,
        experts=4,
        router=RouterRule(top_k=3, groups=2, keep_groups=1, scale=float("nan"), eps=-1.0),
        gate=Gate(activation=Activation.NONE),
        latent=-1,
        shared_intermediate=-1,
        aux_coefficient=-1.0,
        z_coefficient=float("inf"),
        bias_update_rate=float("nan"),
    )
    with pytest.raises(SpecError) as caught:
        config.check()
    assert {problem.field for problem in caught.value.problems} == {
        "hidden", "intermediate", "router.top_k", "router.scale", "router.eps", "gate.activation", "latent",
        "shared_intermediate", "aux_coefficient", "z_coefficient", "bias_update_rate",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"experts": 0}, "experts"),
        ({"experts": 2000}, "experts"),
        ({"router": RouterRule(top_k=5)}, "router.top_k"),
        ({"router": RouterRule(top_k=0)}, "router.top_k"),
        ({"router": RouterRule(top_k=1, score="relu")}, "router.score"),
        ({"router": RouterRule(top_k=1, groups=3)}, "router.groups"),
        ({"shared_gated": True}, "shared_gated"),
    ],
)
def test_single_faults(change: dict[str, object], field: str) -> None:
    assert field in {problem.field for problem in replace(PLAIN, **change).problems()}  # type: ignore[arg-type]
    assert list(PLAIN.problems()) == []


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_released_models_have_a_configuration(path: Path) -> None:
    model = load_model(str(path))
    for layer in {layer.feed_forward for layer in model.layers if layer.is_moe}:
        config = MoEConfig.from_feed_forward(model.hidden, layer)
        assert (config.experts, config.top_k, config.intermediate) == (layer.experts, layer.top_k, layer.intermediate)
        assert config.choice_bias == layer.router.choice_bias and config.latent == layer.latent
        engine = {problem.field for problem in feed_forward_problems(layer)}
        assert engine == ({"router.choice_bias"} if layer.router.choice_bias else set())


def test_descriptions_map_to_the_rules_of_their_families() -> None:
    deepseek = FeedForward(
        kind=FeedForwardKind.MOE, intermediate=6, experts=8, top_k=2,
        router=Router(score="sigmoid", scale=2.5, choice_bias=True, groups=4, keep_groups=2),
    )  # fmt: skip
    rule = MoEConfig.from_feed_forward(8, deepseek).router
    assert rule == RouterRule(
        top_k=2, score="sigmoid", renormalize=True, eps=1e-20, scale=2.5, groups=4, keep_groups=2, group_score="top2"
    )
    v2 = replace(deepseek, router=Router(renormalize=False, scale=16.0, groups=4, keep_groups=2))
    assert MoEConfig.from_feed_forward(8, v2).router.group_score == "max"
    oss = replace(
        deepseek, router=Router(softmax_after_topk=True), activation=model_spec.Activation.SWIGLU_OSS, bias=True
    )
    config = MoEConfig.from_feed_forward(8, oss)
    assert config.gate == Gate(activation=Activation.SWIGLU_OSS, interleaved=True)
    assert config.router_bias and config.expert_bias and not config.router.renormalize


def test_what_a_description_lacks_is_named_in_its_own_fields() -> None:
    spec = FeedForward(
        kind=FeedForwardKind.MOE, intermediate=0, experts=4, top_k=5,
        activation=model_spec.Activation.SWIGLU_CLAMPED, latent=-1,
        router=Router(scale=-1.0, aux_coefficient=-1.0, choice_bias=True),
    )  # fmt: skip
    assert {problem.field for problem in feed_forward_problems(spec)} == {
        "activation", "intermediate", "top_k", "latent", "router.scale", "router.aux_coefficient", "router.choice_bias",
    }  # fmt: skip
    with pytest.raises(SpecError, match="limit"):
        MoEConfig.from_feed_forward(8, spec)
