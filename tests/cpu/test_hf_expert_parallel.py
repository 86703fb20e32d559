"""Swapped models whose experts are spread over ranks (gloo): equal to one process that has all tokens and experts."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tessera_rt.errors import SpecError
from tessera_rt.integrations.hf import gathered_experts, swap_moe, unswap_moe
from tessera_rt.testing import hf_models
from tessera_rt.testing.worker_pool import RankContext, WorkerFailure, WorkerPool

FAMILIES = ("qwen3_moe", "qwen3_next", "deepseek_v3", "gpt_oss", "nemotron_h")


def make_model(family: str) -> Any:
    return hf_models.tiny_model(family)


def make_block(family: str, forced: bool) -> nn.Module:
    block = next(m for m in make_model(family).modules() if hasattr(m, "experts"))
    if forced:  # all tokens go to the first two experts, those of the first rank
        router = block.gate if hasattr(block, "gate") else block.router
        with torch.no_grad():
            router.weight[:, 0] = -5.0
            router.weight[:2, 0] = 5.0
    return block


def make_inputs(counts: tuple[int, ...], forced: bool) -> list[tuple[Tensor, Tensor]]:
    """(x [1, T, 32], gradient of the output) for each rank."""
    generator = torch.Generator().manual_seed(sum(counts))
    inputs = []
    for count in counts:
        x, grad = (torch.randn(1, count, 32, generator=generator, dtype=torch.float64) for _ in range(2))
        x[..., 0] = 10.0 if forced else x[..., 0]
        inputs.append((x, grad))
    return inputs


def run(block: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
    x = x.clone().requires_grad_()
    out = block(x)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(grad)
    assert x.grad is not None
    return out.detach(), x.grad, {name: p.grad for name, p in block.named_parameters()}


def block_over_ranks(ctx: RankContext, family: str, counts: tuple[int, ...], forced: bool) -> Any:
    block = make_block(family, forced)
    swap_moe(block, ep_group=dist.new_group(list(range(ctx.world))))
    for experts in hf_models.experts_of(block).values():
        assert all(p.shape[0] * ctx.world == experts.num_experts for p in experts.parameters())
    results = run(block, *make_inputs(counts, forced)[ctx.rank])
    dist.barrier()
    return results


CASES = (((5,), False), ((5, 3), False), ((9, 0), True), ((0, 0), False), ((3, 1, 0, 6), False), ((2, 2, 2, 1), True))
QUICK = (("deepseek_v3", (5, 3)), ("qwen3_next", (9, 0)), ("gpt_oss", (5, 3)), ("qwen3_moe", (0, 0)))


@pytest.mark.parametrize(
    ("family", "counts", "forced"),
    [
        pytest.param(family, counts, forced, marks=() if (family, counts) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for counts, forced in CASES
    ],
)
def test_blocks_equal_one_process(pool: WorkerPool, family: str, counts: tuple[int, ...], forced: bool) -> None:
    """Cases 53 and 77: unbalanced, ranks without a token, all tokens to one rank, no token at all."""
    results = pool.run(block_over_ranks, len(counts), family, counts, forced)
    whole = make_block(family, forced)
    swap_moe(whole)
    for (out, x_grad, _), inputs in zip(results, make_inputs(counts, forced), strict=True):
        expected = run(whole, *inputs)  # batches as on the ranks: routers in float32 round by their batch's shape
        close(out, expected[0])
        close(x_grad, expected[1])
    for name, parameter in whole.named_parameters():
        parts = [result[2][name] for result in results]
        found = torch.cat(parts) if "experts." in name and "shared" not in name else sum(parts)
        assert parameter.grad is not None
        close(found, parameter.grad)
        assert sum(counts) or not found.any()


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def train_over_ranks(ctx: RankContext, folder: str, checkpointing: bool) -> dict[str, Any]:
    model = make_model("qwen3_moe").train()
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = swap_moe(model, ep_group=dist.new_group(list(range(ctx.world))))
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(SpecError, match=r"experts on this rank.*gathered_experts"):
        model.state_dict()
    with pytest.raises(SpecError, match="unswap_moe"):
        pickle.dumps(model.model.layers[0].mlp)
    with gathered_experts(model):
        assert all(torch.equal(tensor, original[name]) for name, tensor in model.state_dict().items())
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    experts = {p for module in hf_models.experts_of(model).values() for p in module.parameters()}
    losses = []
    for step in range(3):
        tokens = hf_models.tokens(step)[ctx.rank % 2 : ctx.rank % 2 + 1]
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss / ctx.world
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            if parameter not in experts:
                dist.all_reduce(parameter.grad)
        optimizer.step()
        dist.all_reduce(loss)
        losses.append(loss.item())
    with gathered_experts(model):
        if ctx.rank == 0:
            model.save_pretrained(folder)
    shapes = {tuple(p.shape) for p in experts}
    unswap_moe(model)
    return {"losses": losses, "shapes": shapes, "report": str(report), "state": model.state_dict()}


@pytest.mark.parametrize(
    ("world", "checkpointing"),
    [(2, True), pytest.param(2, False, marks=pytest.mark.slow), pytest.param(4, False, marks=pytest.mark.slow)],
)
def test_training_equals_one_process(pool: WorkerPool, tmp_path: Path, world: int, checkpointing: bool) -> None:
    results = pool.run(train_over_ranks, world, str(tmp_path), checkpointing)
    model = make_model("qwen3_moe").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(3):
        tokens = hf_models.tokens(step)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64).state_dict()
    for result in results:
        assert result["losses"] == pytest.approx(losses, abs=1e-6)
        assert {shape[0] for shape in result["shapes"]} == {4 // world}
        for name, expected in model.state_dict().items():
            torch.testing.assert_close(result["state"][name], expected, rtol=1e-6, atol=1e-6, msg=name)
            assert torch.equal(loaded[name], results[0]["state"][name])


def ddp_over_ranks(ctx: RankContext) -> dict[str, Any]:
    model = make_model("gpt_oss").train()
    swap_moe(model, ep_group=dist.new_group(list(range(ctx.world))), average_gradients=True)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        tokens = hf_models.tokens(step)[ctx.rank : ctx.rank + 1]
        optimizer.zero_grad()
        wrapped(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
    unswap_moe(model)
    assert not any(hasattr(parameter, "_ddp_ignored") for parameter in model.parameters())
    return dict(model.state_dict())


def test_data_parallel_training_around_spread_experts(pool: WorkerPool) -> None:
    """DistributedDataParallel averages all gradients but the experts', which are averaged on their way."""
    results = pool.run(ddp_over_ranks, 2)
    model = make_model("gpt_oss").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        tokens = hf_models.tokens(step)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
    for state in results:
        for name, expected in model.state_dict().items():
            torch.testing.assert_close(state[name], expected, rtol=1e-6, atol=1e-6, msg=name)


def refused_over_ranks(ctx: RankContext) -> None:
    model = hf_models.tiny_model("qwen3_moe", num_experts=3, num_local_experts=3)
    swap_moe(model, ep_group=dist.new_group(list(range(ctx.world))))


def test_experts_that_cannot_be_shared_evenly_are_refused(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match=r"experts = 3: must be a multiple of the group's 2 ranks"):
        pool.run(refused_over_ranks, 2)
