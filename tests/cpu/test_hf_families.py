"""Every MoE family of the installed transformers: equal to its eager implementation, or refused with the reason."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera_rt.errors import SpecError
from tessera_rt.integrations.hf import register, swap_moe, unswap_moe
from tessera_rt.integrations.hf_blocks import BLOCKS, EXPERTS_ONLY, REFUSED
from tessera_rt.integrations.hf_layouts import GATES, read_layout
from tessera_rt.testing import hf_models

REFUSED_FAMILIES = {key.partition(".")[0] for key in REFUSED}
COVERED = tuple(family for family in hf_models.families() if family not in REFUSED_FAMILIES)

QUICK = ("aria", "deepseek_v3", "deepseek_v4", "gemma4", "gpt_oss", "nemotron_h", "qwen3_next")  # each layout and gate


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


def test_every_family_is_covered_or_refused_with_its_reason() -> None:
    missing = []
    for family in hf_models.sources():
        held = dict(hf_models.holders(family))
        for block, experts in held.items():
            known = f"{family}.{block}" in (*BLOCKS, *REFUSED) or f"{family}.{experts}" in (*EXPERTS_ONLY, *REFUSED)
            missing += [] if known else [f"{family}.{block}"]
        missing += [f"{family}.{name}" for name in hf_models.decorated(family) if name not in held.values()]
    assert missing == []


def test_no_row_speaks_of_a_class_that_does_not_exist() -> None:
    known = {f"{family}.{name}" for family, classes in hf_models.sources().items() for name in classes}
    assert {*BLOCKS, *EXPERTS_ONLY, *REFUSED, *GATES} - known == set()
    assert all(REFUSED.values()) and all(EXPERTS_ONLY.values())


class Run:
    """Loss, outputs and gradients of one forward and backward pass."""

    def __init__(self, model: nn.Module) -> None:
        model.zero_grad(set_to_none=True)
        tokens = hf_models.tokens()
        causal = type(model).__name__.endswith("ForCausalLM")
        asked: dict[str, Any] = {"labels": tokens} if causal else {}
        out = model(input_ids=tokens, use_cache=False, output_router_logits=True, **asked)
        values = {"out": out.logits if causal else out.last_hidden_state}
        for name in ("loss", "aux_loss"):
            if getattr(out, name, None) is not None:
                values[name] = getattr(out, name)
        router_logits = getattr(out, "router_logits", None) or ()
        values |= {f"router logits {i}": logits for i, logits in enumerate(router_logits) if logits is not None}
        loss = values["loss"] if causal else values["out"].square().sum()
        loss.backward()
        self.values = {name: value.detach() for name, value in values.items()}
        self.gradients = {name: p.grad for name, p in model.named_parameters()}

    def differences(self, other: Run) -> Iterator[tuple[str, float]]:
        assert self.values.keys() == other.values.keys()
        for name, value in self.values.items():
            yield name, difference(value, other.values[name])
        for name, gradient in self.gradients.items():
            if gradient is None or other.gradients[name] is None:
                # Eager leaves experts without a token, and what only they see, without a gradient.
                assert gradient is None, name
                assert other.gradients[name] is None or not other.gradients[name].any(), name
                continue
            yield f"gradient of {name}", difference(gradient, other.gradients[name])


def difference(expected: Tensor, actual: Tensor) -> float:
    """Largest deviation, relative to the largest value or 1."""
    assert expected.shape == actual.shape
    return ((expected - actual).abs().max() / expected.abs().max().clamp(min=1.0)).item()


def assert_equal(expected: Run, actual: Run, tolerance: float, what: str) -> None:
    wrong = {name: found for name, found in expected.differences(actual) if not found <= tolerance}
    assert not wrong, f"{what}: {wrong}"


# Families whose eager experts compute or sum in float32 in a float64 model too.
SINGLE_PRECISION = {"beam": 1e-5, "nemotron_h": 1e-6, "openai_privacy_filter": 1e-4}


@pytest.mark.parametrize("family", COVERED)
def test_models_equal_eager_in_float64(family: str) -> None:
    model = hf_models.tiny_model(family)
    tolerance = SINGLE_PRECISION.get(family, 1e-10)
    eager = Run(model)
    assert any(name.startswith("router logits") for name in eager.values) or family in ("unlimited_ocr",)
    report = swap_moe(model)
    assert report.swapped and not report.kept, str(report)
    assert_equal(eager, Run(model), tolerance, "whole blocks")
    assert sorted(unswap_moe(model)) == sorted(unswap_moe_names(report, model))
    assert_equal(eager, Run(model), 0.0, "after unswap")
    model.set_experts_implementation("tessera")
    assert_equal(eager, Run(model), tolerance, "experts only")


def unswap_moe_names(report: Any, model: nn.Module) -> set[str]:
    blocks = {entry.name for entry in report.swapped if "alone" not in entry.what}
    return blocks | set(hf_models.experts_of(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in COVERED]
)
def test_experts_in_lower_precision(family: str, dtype: torch.dtype) -> None:
    """float32 to 1e-5 of eager; bfloat16 within one place of eager in float32, its gradients within two (2-norms)."""
    name, experts = next(iter(hf_models.experts_of(hf_models.tiny_model(family, dtype)).items()))
    width = read_layout(experts).weights(experts).gate_up.shape[2]
    torch.manual_seed(1)
    x = torch.randn(13, width).to(dtype)
    count = read_layout(experts).weights(experts).gate_up.shape[0]
    ids = torch.rand(13, count).argsort(-1)[:, :2]
    weights = torch.rand(13, 2).softmax(-1).to(dtype)
    reference = copy.deepcopy(experts).float()
    reference.config._experts_implementation = "eager"
    expected = experts_run(reference, x.float(), ids, weights.float())
    experts.config = copy.deepcopy(experts.config)
    experts.config._experts_implementation = "tessera"
    actual = experts_run(experts, x, ids, weights)
    for what, value in expected.items():
        assert actual[what].dtype == dtype
        error = ((actual[what].float() - value).norm() / value.norm()).item()
        place = 1e-5 if dtype == torch.float32 else 2**-7
        assert error <= (place if what == "out" else 2 * place), f"{name}: {what}"


def experts_run(experts: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> dict[str, Tensor]:
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = experts(x, ids, weights)
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype))
    values = {"out": out.detach(), "gradient of x": x.grad, "gradient of weights": weights.grad}
    return values | {f"gradient of {name}": p.grad for name, p in experts.named_parameters()}


@pytest.mark.parametrize("family", sorted(REFUSED_FAMILIES & set(hf_models.families())))
def test_refused_families_are_refused_by_name(family: str) -> None:
    model = hf_models.tiny_model(family, torch.float32)
    with pytest.raises(SpecError) as refused:
        swap_moe(model)
    assert any(reason in str(refused.value) for key, reason in REFUSED.items() if key.startswith(f"{family}."))
    model.set_experts_implementation("tessera")
    with pytest.raises(SpecError, match=r"act_fn|_apply_gate|has_post_expert_norm"):
        model(input_ids=hf_models.tokens(), use_cache=False)
