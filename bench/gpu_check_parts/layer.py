"""A whole MoE block in a Hugging Face model: eager, grouped_mm and Tessera, forward and backward, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gpu_check_parts.check import Check
from tessera_rt.microbench.compare import Contender, compare
from tessera_rt.testing.kernel_checks import assert_near

IMPLEMENTATIONS = ("tessera", "grouped_mm", "eager")
# name: (hidden, intermediate, experts, top k, tokens)
SIZES = {
    "qwen3-30b-a3b": (2048, 768, 128, 8, 8192),
    "qwen3-next-80b": (2048, 512, 512, 10, 8192),
    "deepseek-v3, a rank's 32 experts": (7168, 2048, 32, 8, 8192),
}
DRY = {"tiny": (64, 32, 8, 2, 16)}
EAGER_AT_MOST = 128  # experts; transformers' eager loop over more takes seconds


def run(check: Check) -> None:
    try:
        from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        from tessera_rt.integrations.hf import register
    except ModuleNotFoundError as error:
        check.skip("whole block against Hugging Face", f"{error.name} is not installed (pip install 'tessera-rt[hf]')")
        return
    register()
    for name, (hidden, intermediate, experts, top_k, tokens) in (DRY if check.dry_run else SIZES).items():
        with check.case(f"whole block, {name}") as figures:
            config = Qwen3MoeConfig(
                hidden_size=hidden, moe_intermediate_size=intermediate, num_experts=experts, num_experts_per_tok=top_k,
                norm_topk_prob=True,
            )  # fmt: skip
            torch.manual_seed(0)
            with check.device:
                block = Qwen3MoeSparseMoeBlock(config).to(torch.bfloat16)
            with torch.no_grad():
                for parameter in block.parameters():
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
            x = torch.randn(1, tokens, hidden, device=check.device).bfloat16()
            figures["rows"] = _compare(check, name, config, block, x)


def _compare(check: Check, name: str, config: Any, block: nn.Module, x: Tensor) -> list[dict[str, Any]]:
    used = [one for one in IMPLEMENTATIONS if one != "eager" or config.num_experts <= EAGER_AT_MOST]
    outs = {}
    for implementation in used:
        with _implementation(config, implementation), torch.no_grad():
            outs[implementation] = block(x)
    assert_near("Tessera against grouped_mm", outs["tessera"], outs["grouped_mm"].double(), ratio=2e-2)
    rows = []
    for what, call in (("forward", _forward), ("forward and backward", _forward_backward)):
        contenders = [Contender(name=one, launch=_launch(config, one, call, block, x)) for one in used]
        samples = 1 if check.dry_run else 10
        rows += [row.as_row() for row in compare(f"{name}, {what}", contenders, device=check.device, samples=samples)]
    return rows


def _launch(
    config: Any, implementation: str, call: Callable[[nn.Module, Tensor], None], block: nn.Module, x: Tensor
) -> Callable[[], None]:
    def launch() -> None:
        with _implementation(config, implementation):
            call(block, x)

    return launch


def _forward(block: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        block(x)


def _forward_backward(block: nn.Module, x: Tensor) -> None:
    block.zero_grad(set_to_none=True)
    block(x.requires_grad_()).square().mean().backward()


@contextmanager
def _implementation(config: Any, name: str) -> Iterator[None]:
    before = config._experts_implementation
    config._experts_implementation = name
    try:
        yield
    finally:
        config._experts_implementation = before
