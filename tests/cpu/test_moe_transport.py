"""The layer over ranks: its experts behind a transport equal one process, and a capacity that overflows is found."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tessera_rt.cuda_graphs.capture import capture
from tessera_rt.errors import SpecError
from tessera_rt.kernels.transport_layout import Combine, Dispatch, Traffic
from tessera_rt.moe import MoE, MoEConfig, RouterRule
from tessera_rt.moe.checkpointing import save_routing
from tessera_rt.moe.expert_parallel_collective import CollectiveExpertParallel
from tessera_rt.testing.graphs import StandInDevice
from tessera_rt.testing.worker_pool import RankContext, WorkerPool

CONFIG = MoEConfig(
    hidden=16, intermediate=8, experts=8, router=RouterRule(top_k=2, renormalize=True), shared_intermediate=8
)
FORMS = {"rows": (Dispatch.ROWS, Combine.ROWS), "reduced": (Dispatch.TOKENS, Combine.REDUCED)}


def traffic_of(world: int, tokens: int, form: str = "rows", dtype: torch.dtype = torch.float64) -> Traffic:
    dispatch, combine = FORMS[form]
    return Traffic(
        world=world, experts=8, top_k=2, hidden=16, tokens=tokens, dtype=dtype, dispatch=dispatch, combine=combine
    )


def whole_layer(forced: bool) -> MoE:
    torch.manual_seed(3)
    layer = MoE(CONFIG, dtype=torch.float64)
    if forced:  # the experts of the first rank win
        with torch.no_grad():
            layer.router.weight[:, 0] = -9.0
            layer.router.weight[:2, 0] = 9.0
    return layer


def inputs(counts: Sequence[int], forced: bool) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(sum(counts))
    made = [[torch.randn(n, 16, generator=generator, dtype=torch.float64) for _ in range(2)] for n in counts]
    for x, _ in made:
        x[:, 0] = 3.0 if forced else x[:, 0]
    return [(x, grad) for x, grad in made]


def run(layer: MoE, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    assert x.grad is not None
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return y.detach(), x.grad, gradients


def over_ranks(ctx: RankContext, counts: Sequence[int], forced: bool, form: str, padded: bool) -> Any:
    traffic = traffic_of(ctx.world, max(*counts, 1), form)
    room = traffic.tokens * traffic.units_per_token if padded else 0
    transport = CollectiveExpertParallel(traffic, dist.group.WORLD, pair_capacity=room, timeout_s=30)
    torch.manual_seed(3)
    layer = MoE(CONFIG, transport=transport, dtype=torch.float64)
    whole = whole_layer(forced)
    own = slice(layer.expert_ids.start, layer.expert_ids.stop)
    for name, parameter in layer.named_parameters():
        part = whole.get_parameter(name)
        part = part[own] if name.startswith("experts.") else part
        assert torch.equal(parameter, part) or forced, f"{name}: one seed, and the same start as in one process"
        parameter.data.copy_(part)
    results = run(layer, *inputs(counts, forced)[ctx.rank])
    transport.check()
    return results


CASES = (((5, 3), False), ((6, 0), True), ((0, 0), False), ((3, 1, 0, 6), False))


@pytest.mark.parametrize(("form", "padded"), [("rows", False), ("rows", True), ("reduced", True)])
@pytest.mark.parametrize(("counts", "forced"), CASES)
def test_ranks_equal_one_process(
    pool: WorkerPool, counts: tuple[int, ...], forced: bool, form: str, padded: bool
) -> None:
    """Cases 53 and 77: unbalanced, a rank without a token, all tokens to one rank, no token at all."""
    results = pool.run(over_ranks, len(counts), counts, forced, form, padded)
    whole = whole_layer(forced)
    for (y, x_grad, _), (x, grad) in zip(results, inputs(counts, forced), strict=True):
        expected = run(whole, x, grad)
        torch.testing.assert_close(y, expected[0], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(x_grad, expected[1], rtol=1e-10, atol=1e-10)
    for name, parameter in whole.named_parameters():
        parts = [gradients[name] for _, _, gradients in results]
        found = torch.cat(parts) if name.startswith("experts.") else torch.stack(parts).sum(0)
        torch.testing.assert_close(found, parameter.grad, rtol=1e-10, atol=1e-10, msg=name)


def test_a_captured_layer_whose_capacity_overflows_is_run_again(interpreted: None) -> None:
    """Padded all-to-all with room for 5 of 12 choices; how many there are depends on the mask."""
    traffic = traffic_of(1, 6, dtype=torch.float32)
    transport = CollectiveExpertParallel(traffic, None, pair_capacity=5)
    torch.manual_seed(4)
    layer = MoE(CONFIG, backend="triton", transport=transport)
    eager, redone = MoE(CONFIG), []
    eager.load_state_dict(layer.state_dict())

    def without_capacity(x: Tensor, mask: Tensor) -> Tensor:
        redone.append(int(mask.sum()))
        with transport.exact():
            out: Tensor = layer(x, mask)
            return out

    examples = torch.randn(6, 16, requires_grad=True), torch.zeros(6, dtype=torch.bool)
    captured = capture(layer, examples, overflow=transport.overflow, eager=without_capacity, device=StandInDevice())
    for tokens in (2, 6, 1, 3, 0, 2):
        mask = torch.arange(6) < tokens
        x, grad = torch.randn(6, 16), torch.randn(6, 16)
        results = []
        for one in (captured, eager):
            leaf = x.clone().requires_grad_()
            one.zero_grad(set_to_none=True)
            y = one(leaf, mask)
            y.backward(grad)
            results.append((y.detach(), leaf.grad, *(p.grad for p in one.parameters())))
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert redone == [6, 3]


@pytest.mark.parametrize("how", [{}, {"context_fn": save_routing}])
def test_activation_checkpointing(how: dict[str, Any]) -> None:
    layer = MoE(CONFIG, transport=CollectiveExpertParallel(traffic_of(1, 6), None), dtype=torch.float64)
    x = torch.randn(6, 16, dtype=torch.float64, requires_grad=True)
    leaves = [x, *layer.parameters()]
    expected = torch.autograd.grad(layer(x).square().sum(), leaves)
    runs = []
    layer.register_forward_hook(lambda *_: runs.append(1))
    y = checkpoint(layer, x, use_reentrant=False, **how)
    assert all(map(torch.equal, torch.autograd.grad(y.square().sum(), leaves), expected))
    assert len(runs) <= 2, "run again once, not once more for the experts"


def test_what_does_not_fit_is_named_and_copies_share_the_transport() -> None:
    transport = CollectiveExpertParallel(traffic_of(1, 4), None)
    with pytest.raises(SpecError, match=r"(?s)transport\.traffic\.experts = 8: must be 4.*traffic\.hidden = 16"):
        MoE(replace(CONFIG, experts=4, hidden=12), transport=transport)
    layer = MoE(CONFIG, transport=transport, dtype=torch.float64)
    other = copy.deepcopy(layer)
    assert other.transport is transport and other.router.weight is not layer.router.weight
    x = torch.randn(4, 16, dtype=torch.float64)
    assert torch.equal(other(x), layer(x))
