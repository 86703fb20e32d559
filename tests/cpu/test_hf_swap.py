"""swap_moe, unswap_moe and the registered implementation in a user's hands: checkpoints, hooks, adapters, compilers."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tessera_rt.errors import SpecError
from tessera_rt.integrations.hf import gathered_experts, register, swap_moe, unswap_moe
from tessera_rt.integrations.hf_blocks import form_of
from tessera_rt.integrations.hf_layouts import read_layout
from tessera_rt.integrations.hf_modules import SwappedBlock
from tessera_rt.kernels.options import Activation
from tessera_rt.testing import hf_models


def gradients(model: nn.Module, **inputs: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad(set_to_none=True)
    tokens = hf_models.tokens()
    out = model(input_ids=tokens, labels=tokens, use_cache=False, **inputs)
    out.loss.backward()
    return out.loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same(expected: tuple[Any, Any], actual: tuple[Any, Any], tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual[0], expected[0], rtol=tolerance, atol=tolerance)
    for name, gradient in expected[1].items():
        given = actual[1][name]
        if gradient is None:
            assert given is None or not given.any(), name
        else:
            torch.testing.assert_close(given, gradient, rtol=tolerance, atol=tolerance, msg=f"gradient of {name}")


def moe_block(model: nn.Module) -> nn.Module:
    return next(module for module in model.modules() if form_of(type(module)) or isinstance(module, SwappedBlock))


# -- swapping and going back ------------------------------------------------------------------------------------------


def test_a_swap_changes_nothing_but_classes() -> None:
    model = hf_models.tiny_model("mixtral")
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    modules = {name: (module, type(module)) for name, module in model.named_modules()}
    report = swap_moe(model)
    assert [entry.name for entry in report.swapped] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert "4 experts" in str(report)
    for name, module in model.named_modules():
        assert module is modules[name][0] and isinstance(module, modules[name][1])
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert dict(model.named_buffers()).keys() == buffers.keys()
    names = unswap_moe(model)
    assert sorted(names) == sorted(name for name in modules if name.endswith((".mlp", ".experts")))
    assert all(type(module) is modules[name][1] for name, module in model.named_modules())
    assert unswap_moe(model) == ()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_second_swap_is_told_and_harmless() -> None:
    model = hf_models.tiny_model("qwen3_moe")
    swap_moe(model)
    with pytest.raises(SpecError, match="swapped already"):
        swap_moe(model)
    unswap_moe(model)


def test_models_without_moe_are_refused() -> None:
    with pytest.raises(SpecError, match="use_experts_implementation"):
        swap_moe(nn.Linear(3, 3))


def test_undecorated_families_are_refused_with_the_reason() -> None:
    config = transformers.JetMoeConfig(
        hidden_size=16, num_hidden_layers=1, num_key_value_heads=2, kv_channels=4, intermediate_size=8,
        num_local_experts=2, num_experts_per_tok=2, vocab_size=32,
    )  # fmt: skip
    with pytest.raises(SpecError, match=r"JetMoeMoA.*experts inside attention"):
        swap_moe(transformers.JetMoeForCausalLM(config))


def test_what_cannot_be_reproduced_is_named() -> None:
    experts = moe_block(hf_models.tiny_model("qwen3_moe")).experts
    experts.act_fn = nn.Tanh()
    with pytest.raises(SpecError, match=r"act_fn = 'Tanh': must be one of .*SiLUActivation"):
        read_layout(experts)
    experts.act_fn = nn.SiLU()
    experts.is_concatenated = False
    with pytest.raises(SpecError, match="is_concatenated = False"):
        read_layout(experts)
    experts.is_concatenated, experts.has_post_expert_norm = True, True
    with pytest.raises(SpecError, match="has_post_expert_norm = True"):
        read_layout(experts)
    experts.has_post_expert_norm = False

    class Own(type(experts)):  # type: ignore[misc]
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            return gate_up.chunk(2, -1)[0]

    experts.__class__ = Own
    with pytest.raises(SpecError, match=r"_apply_gate = .*Own.*gpt_oss.GptOssExperts"):
        read_layout(experts)
    with pytest.raises(SpecError, match="class"):
        read_layout(nn.Linear(2, 2))


def test_a_subclass_with_its_own_forward_keeps_it() -> None:
    model = hf_models.tiny_model("qwen3_moe")
    block = moe_block(model)

    class Louder(type(block)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    block.__class__ = Louder
    expected = gradients(model)
    report = swap_moe(model)
    assert "alone" in report.swapped[0].what and report.swapped[0].name.endswith("experts")
    assert_same(expected, gradients(model))


def test_a_forward_replaced_on_the_instance_is_kept() -> None:
    model = hf_models.tiny_model("qwen3_moe")
    block = moe_block(model)
    block.forward = block.forward
    report = swap_moe(model)
    assert [entry.name for entry in report.kept] == ["model.layers.0.mlp"] and "instance" in report.kept[0].why
    assert len(report.swapped) == 1


def test_activations_are_read_from_the_module() -> None:
    for act, expected in (("silu", Activation.SWIGLU), ("gelu", Activation.GEGLU), ("gelu_new", Activation.GEGLU_TANH)):
        model = hf_models.tiny_model("qwen3_moe", hidden_act=act)
        assert read_layout(moe_block(model).experts).gate.activation is expected
        before = gradients(model)
        swap_moe(model)
        assert_same(before, gradients(model))


@pytest.mark.parametrize("intermediate", [16, 32])
@pytest.mark.parametrize("family", ["qwen3_moe", "aria", "gpt_oss"])
def test_the_layout_comes_from_the_class_not_from_shapes(family: str, intermediate: int) -> None:
    """Case 65: 2 I = H and I = H, stored [E, 2 I, H] and [E, H, 2 I]."""
    name = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
    model = hf_models.tiny_model(family, **{name: intermediate})
    shape = moe_block(model).experts.gate_up_proj.shape
    assert shape == ((4, 2 * intermediate, 32) if family == "qwen3_moe" else (4, 32, 2 * intermediate))
    before = gradients(model)
    swap_moe(model)
    assert_same(before, gradients(model))


# -- what must stay as it was -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [True, False])
def test_router_logits_aux_loss_hooks_and_captures_stay(early: bool) -> None:
    """Case 67. ``early``: transformers installed its recording hooks before the swap."""
    model = hf_models.tiny_model("mixtral", torch.float32)
    tokens, seen = hf_models.tokens(), []
    moe_block(model).register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    asked = {"input_ids": tokens, "labels": tokens, "output_hidden_states": True}
    eager = copy.deepcopy(model)(**asked, output_router_logits=True)
    if early:
        model(**asked, output_router_logits=True)
    swap_moe(model)
    out = model(**asked, output_router_logits=True)
    assert len(out.router_logits) == 2 and len(out.hidden_states) == 3
    torch.testing.assert_close(out.aux_loss, eager.aux_loss, rtol=0, atol=1e-6)
    torch.testing.assert_close(out.loss, eager.loss, rtol=0, atol=1e-6)
    for mine, theirs in zip(out.router_logits, eager.router_logits, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    assert model(**asked, output_router_logits=False).router_logits is None
    assert seen and set(seen) == {(2, 8, 32)}


def test_masked_tokens_do_not_enter_the_aux_loss() -> None:
    """Case 71: the family's aux loss keeps its mask; real tokens do not see padded ones."""
    model = hf_models.tiny_model("qwen3_moe", torch.float32)
    tokens, mask = hf_models.tokens(), torch.ones(2, 8, dtype=torch.long)
    mask[1, 3:] = 0
    asked = {"input_ids": tokens, "labels": tokens, "attention_mask": mask, "output_router_logits": True}
    eager = model(**asked)
    swap_moe(model)
    out = model(**asked)
    torch.testing.assert_close(out.aux_loss, eager.aux_loss, rtol=0, atol=1e-6)
    changed = model(**asked | {"input_ids": tokens.where(mask.bool(), 5)})
    torch.testing.assert_close(changed.aux_loss, eager.aux_loss, rtol=0, atol=1e-6)
    torch.testing.assert_close(changed.logits[mask.bool()], eager.logits[mask.bool()], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral", "nemotron_h"])
def test_saving_swapped_and_loading_unswapped_is_exact(family: str, tmp_path: Path) -> None:
    """Case 68, and the other way round."""
    model = hf_models.tiny_model(family, torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    swap_moe(model)
    assert model.state_dict().keys() == before.keys()
    model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert loaded.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.state_dict().items())
    assert not any(isinstance(module, SwappedBlock) for module in loaded.modules())
    register()
    ours = type(model).from_pretrained(tmp_path, experts_implementation="tessera")
    assert ours.config._experts_implementation == "tessera"
    tokens = hf_models.tokens()
    torch.testing.assert_close(ours(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)
    swap_moe(loaded)
    loaded.load_state_dict(before, strict=True)


def test_copies_and_pickles_work_on_their_own() -> None:
    model = hf_models.tiny_model("qwen2_moe")
    before = gradients(model)
    swap_moe(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(moe_block(other), SwappedBlock)
        assert_same(before, gradients(other))
        with torch.no_grad():
            moe_block(other).experts.down_proj.zero_()
        assert unswap_moe(other)
        assert gradients(other)[0] != before[0]
    assert_same(before, gradients(model))


# -- ways of training -------------------------------------------------------------------------------------------------


def test_freezing_can_be_toggled_at_any_time() -> None:
    model = hf_models.tiny_model("deepseek_v3")
    eager = copy.deepcopy(model)
    swap_moe(model)
    for pattern in ("experts.", "gate.weight", "gate_up_proj", "down_proj", "nothing", "."):
        for each in (model, eager):
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(pattern not in name or "lm_head" in name)
        assert_same(gradients(eager), gradients(model), 1e-9)


def test_gradients_accumulate() -> None:
    model = hf_models.tiny_model("qwen3_moe")
    eager = copy.deepcopy(model)
    swap_moe(model)
    for each in (eager, model):
        for seed in range(3):
            tokens = hf_models.tokens(seed)
            each(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    for (name, expected), actual in zip(eager.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-10, atol=1e-10, msg=name)


def test_evaluation_before_and_between_training() -> None:
    model = hf_models.tiny_model("qwen3_moe")
    before = gradients(model)
    swap_moe(model)
    with torch.no_grad():
        assert not model.eval()(hf_models.tokens()).logits.requires_grad
    assert_same(before, gradients(model.train()))
    with torch.inference_mode():
        model.eval()(hf_models.tokens())
    assert_same(before, gradients(model.train()))


def test_generation_with_a_cache() -> None:
    model = hf_models.tiny_model("qwen3_moe", torch.float32)
    asked = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(hf_models.tokens(), **asked)
    swap_moe(model)
    assert torch.equal(model.generate(hf_models.tokens(), **asked), expected)


def test_jitter_draws_what_the_family_draws() -> None:
    model = hf_models.tiny_model("mixtral", router_jitter_noise=0.1).train()
    torch.manual_seed(3)
    before = gradients(model)
    swap_moe(model)
    torch.manual_seed(3)
    assert_same(before, gradients(model))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_autocast(family: str) -> None:
    model = hf_models.tiny_model(family, torch.float32)
    exact = gradients(model)
    with torch.autocast("cpu", torch.bfloat16):
        eager = gradients(model)
    swap_moe(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss, found = gradients(model)
    assert abs(loss - exact[0]) <= 2 * abs(eager[0] - exact[0]) + 2**-7
    for name, gradient in found.items():
        if "experts" in name and exact[1][name] is not None:
            error = (gradient - exact[1][name]).norm()
            assert gradient.dtype == torch.float32
            assert error <= 1.5 * (eager[1][name] - exact[1][name]).norm() + 2**-7 * exact[1][name].norm(), name


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("enable_first", [True, False])
def test_activation_checkpointing(reentrant: bool, enable_first: bool) -> None:
    model = hf_models.tiny_model("deepseek_v3").train()
    before = gradients(model)

    def enable() -> None:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})

    if enable_first:
        enable()
    swap_moe(model)
    if not enable_first:
        enable()
    assert_same(before, gradients(model))
    unswap_moe(model)
    assert_same(before, gradients(model))
    model.activation_checkpointing_disable()
    assert_same(before, gradients(model))


class Tie:
    """A layer norm's output by which experts 0 and 1 tie but for 1e-7, which a recomputation sees the other way."""

    recomputing = False

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        decided = out.new_tensor([-1e-7 if self.recomputing else 1e-7, 1.0])
        return torch.cat([decided.expand(*out.shape[:-1], 2), out[..., 2:]], -1)


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_routing_decision_is_saved_not_redone(reentrant: bool) -> None:
    """Case 72: near ties that fall the other way in the recomputation."""
    model = hf_models.tiny_model("qwen3_moe", num_experts_per_tok=1).train()
    tie = Tie()
    for layer in model.model.layers:
        gate = layer.mlp.gate
        with torch.no_grad():
            gate.weight.copy_(gate.weight[:1].expand_as(gate.weight))
            gate.weight[1, 0] += 1.0
            gate.weight[2:, 1] -= 1.0  # experts 2 and 3 are never chosen
        layer.post_attention_layernorm.register_forward_hook(tie)
    before = gradients(model)
    tie.recomputing = True
    other_way = gradients(model)
    tie.recomputing = False
    assert (other_way[1]["model.embed_tokens.weight"] - before[1]["model.embed_tokens.weight"]).abs().max() > 1e-4
    swap_moe(model)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    tokens = hf_models.tokens()
    # Two passes under way at once, as in gradient accumulation over a pipeline.
    model.zero_grad(set_to_none=True)
    first = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    second = model(input_ids=tokens.flip(0), labels=tokens.flip(0), use_cache=False).loss
    tie.recomputing = True
    first.backward()
    second.backward()
    for name, parameter in model.named_parameters():
        if before[1][name] is not None:
            torch.testing.assert_close(
                parameter.grad, 2 * before[1][name], rtol=1e-5, atol=1e-6, msg=f"gradient of {name}"
            )


# -- other libraries --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swap_first", [True, False])
def test_lora_on_experts_trains_all_adapters(swap_first: bool) -> None:
    """Case 69."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    )
    torch.manual_seed(0)
    eager = peft.get_peft_model(hf_models.tiny_model("qwen3_moe"), config)
    model = hf_models.tiny_model("qwen3_moe")
    if swap_first:
        swap_moe(model)
        model = peft.get_peft_model(model, config)
    else:
        model = peft.get_peft_model(model, config)
        assert len(swap_moe(model).swapped) == 2
    with torch.no_grad():
        for (name, theirs), mine in zip(eager.named_parameters(), model.parameters(), strict=True):
            if "lora" in name:
                theirs.normal_(0, 0.3)
            mine.copy_(theirs)
    assert_same(gradients(eager), gradients(model), 1e-9)
    adapters = {name: p.detach().clone() for name, p in model.named_parameters() if "lora" in name}
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0).step()
    assert len(adapters) == 2 * 2 * 2
    assert all(not torch.equal(dict(model.named_parameters())[name], old) for name, old in adapters.items())
    assert sum(p.requires_grad for p in model.parameters()) == len(adapters)


def test_compiling_needs_few_graphs() -> None:
    """Case 74."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model = hf_models.tiny_model("qwen3_moe", torch.float32, num_experts=2, num_local_experts=2, num_experts_per_tok=1)
    swap_moe(model)
    block, counter = moe_block(model), CompileCounter()
    with torch.no_grad():
        block.gate.weight.zero_()
        block.gate.weight[0, 0], block.gate.weight[1, 0] = 1.0, -1.0
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    for first in (8, 0, 4, 1, 3, 8):  # tokens of expert 0, the others go to expert 1
        x = torch.randn(1, 8, 32)
        x[..., 0] = torch.where(torch.arange(8) < first, 1.0, -1.0)
        x, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        counts = block.gate(x)[2].flatten().bincount(minlength=2).tolist()
        assert counts == [first, 8 - first]
        out, expected = compiled(x), block(other)
        torch.testing.assert_close(out, expected)
        grads = torch.autograd.grad(out.square().sum(), [x, *block.parameters()], allow_unused=True)
        wanted = torch.autograd.grad(expected.square().sum(), [other, *block.parameters()], allow_unused=True)
        for grad, want in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad, want)
    assert counter.frame_count <= 2
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["sum", "cat", "transpose"])
def test_gradients_of_any_strides(how: str) -> None:
    """Case 50."""
    block = moe_block(hf_models.tiny_model("qwen3_moe"))
    x = torch.randn(8, 2, 32, dtype=torch.float64)

    def run() -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        block.zero_grad(set_to_none=True)
        y = block(leaf.transpose(0, 1).contiguous() if how == "sum" else leaf)
        {"sum": y, "cat": torch.cat([y, y]).square(), "transpose": y.mT * 2}[how].sum().backward()
        return [leaf.grad, *(p.grad for p in block.parameters())]

    expected = run()
    holder = nn.ModuleList([block])
    swap_moe(holder)
    for want, have in zip(expected, run(), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-10)
    strided = block(x.transpose(0, 1))
    torch.testing.assert_close(strided, block(x.transpose(0, 1).contiguous()))


def test_gathering_without_ranks_does_nothing() -> None:
    model = hf_models.tiny_model("qwen3_moe")
    swap_moe(model)
    with gathered_experts(model):
        assert model.state_dict()


@pytest.mark.slow
def test_the_example_runs() -> None:
    example = Path(__file__).parents[2] / "examples" / "swap_hf.py"
    result = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("saved and loaded without Tessera") == 2
