"""Swapping models whose classes and tensors others have changed: what is silently bypassed elsewhere is told here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from tessera_rt.errors import SpecError
from tessera_rt.integrations.hf import register, swap_moe, unswap_moe
from tessera_rt.integrations.hf_modules import SwappedBlock
from tessera_rt.testing import hf_models


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def logits(model: nn.Module) -> Tensor:
    out: Tensor = model(input_ids=hf_models.tokens(), use_cache=False).logits
    return out.detach()


def blocks(model: Any) -> list[Any]:
    return [layer.mlp for layer in model.model.layers]


# -- forwards that are not transformers' own --------------------------------------------------------------------------


def twice(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: 2 * original(*args)


def subclass(module: nn.Module) -> None:
    own: Any = type(module)
    module.__class__ = type("Mine", (own,), {"forward": twice(own.forward)})


@pytest.mark.parametrize("part", ["experts", "block"])
def test_a_subclass_with_a_forward_of_its_own_is_not_bypassed(part: str) -> None:
    model = hf_models.tiny_model("qwen3_moe")
    for block in blocks(model):
        subclass(block.experts if part == "experts" else block)
    expected = logits(model)
    if part == "experts":
        with pytest.raises(SpecError, match=r"the forward of .*Mine is not that of transformers"):
            swap_moe(model)
    else:
        assert all("the experts alone" in entry.what for entry in swap_moe(model).swapped)
    torch.testing.assert_close(logits(model), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("part", ["experts", "block"])
def test_a_patched_class_is_not_bypassed(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As kernel libraries patch transformers."""
    model = hf_models.tiny_model("qwen3_moe")
    own = type(blocks(model)[0].experts if part == "experts" else blocks(model)[0])
    monkeypatch.setattr(own, "forward", twice(own.forward))
    expected = logits(model)
    with pytest.raises(SpecError, match=rf"the forward of qwen3_moe\.{own.__name__} is not that of transformers"):
        swap_moe(model)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)


# -- what is changed after the swap -----------------------------------------------------------------------------------


def test_an_activation_or_a_limit_set_after_the_swap_counts() -> None:
    for family, name, value in (("qwen3_moe", "act_fn", nn.GELU()), ("gpt_oss", "limit", 0.05)):
        model, eager = hf_models.tiny_model(family), hf_models.tiny_model(family)
        swap_moe(model)
        for each in (model, eager):
            for block in blocks(each):
                setattr(block.experts, name, value)
        torch.testing.assert_close(logits(model), logits(eager), rtol=1e-10, atol=1e-10)
    with pytest.raises(SpecError, match=r"act_fn = 'Tanh'"):
        blocks(model)[0].experts.act_fn = nn.Tanh()


@pytest.mark.parametrize("part", ["block", "experts"])
def test_fsdp_around_swapped_parts(part: str, alone: dist.ProcessGroup) -> None:
    model = hf_models.tiny_model("qwen2_moe", torch.float32)
    expected = logits(model)
    swap_moe(model)
    for block in blocks(model):
        fully_shard(block if part == "block" else block.experts)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(SpecError, match=r"FSDPTessera\w+': must be of Tessera's class; undo what was put around it"):
        unswap_moe(model)


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


def test_parametrizations_before_and_after_the_swap() -> None:
    model, later = hf_models.tiny_model("qwen3_moe"), hf_models.tiny_model("qwen3_moe")
    parametrize.register_parametrization(blocks(model)[0].experts, "down_proj", Half())
    expected = logits(model)
    swap_moe(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-10, atol=1e-10)
    unswap_moe(model)
    assert torch.equal(logits(model), expected)
    swap_moe(later)
    parametrize.register_parametrization(blocks(later)[0].experts, "down_proj", Half())
    torch.testing.assert_close(logits(later), expected, rtol=1e-10, atol=1e-10)
    with pytest.raises(SpecError, match="ParametrizedTessera"):
        unswap_moe(later)
    parametrize.remove_parametrizations(blocks(later)[0].experts, "down_proj")
    assert len(unswap_moe(later)) == 4 and torch.equal(logits(later), expected)


# -- arguments, and experts over a group ------------------------------------------------------------------------------


def test_arguments_that_do_not_fit_are_named(alone: dist.ProcessGroup) -> None:
    model = hf_models.tiny_model("qwen3_moe", torch.float32)
    given: tuple[tuple[Any, dict[str, Any], str], ...] = (
        ("path/to/model", {}, r"model = 'str': must be a torch\.nn\.Module"),
        (model, {"ep_group": "world"}, r"ep_group = 'world': must be a torch\.distributed process group"),
        (model, {"ep_group": dist.GroupMember.NON_GROUP_MEMBER}, "process group that this rank is in"),
        (model, {"average_gradients": True}, "average_gradients = True: must be False without ep_group"),
        (DistributedDataParallel(model), {"ep_group": alone}, "DistributedDataParallel.*and wrap it afterwards"),
    )
    for target, options, message in given:
        with pytest.raises(SpecError, match=message):
            swap_moe(target, **options)
    assert not any(isinstance(module, SwappedBlock) for module in model.modules())


def test_tied_experts_cannot_be_spread(alone: dist.ProcessGroup) -> None:
    model = hf_models.tiny_model("qwen3_moe")
    first, second = (block.experts for block in blocks(model))
    second.down_proj = first.down_proj
    expected = logits(model)
    with pytest.raises(SpecError, match=r"layers\.1\.mlp\.experts\.down_proj = 'the tensor of model\.layers\.0"):
        swap_moe(model, ep_group=alone)
    swap_moe(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-10, atol=1e-10)


# -- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["swapped", "registered"])
def test_compiling_breaks_no_graph(how: str) -> None:
    """At any length, and without ``fullgraph``, where a step that cannot be traced would break the graph."""
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._dynamo.utils import counters

    register()
    torch._dynamo.reset()
    counters.clear()
    model = hf_models.tiny_model("qwen3_moe", torch.float32)
    block, counter = blocks(model)[0], CompileCounterWithBackend("aot_eager")
    if how == "swapped":
        swap_moe(model)
    else:
        model.set_experts_implementation("tessera")
        logits(model)  # the first call reads how the experts lie, which compiled code cannot
    compiled = torch.compile(block, backend=counter)
    for length in (8, 5, 7):
        x, results = torch.randn(2, length, 32), []
        for one in (compiled, block):
            leaf = x.clone().requires_grad_()
            y = one(leaf)
            results.append((y, *torch.autograd.grad(y.square().sum(), [leaf, *block.parameters()])))
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()
    assert not counters["graph_break"] and counter.frame_count <= 2  # one length, and then any
