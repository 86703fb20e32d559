"""The SM budget and the bits of the experts' kernels on any device: what their programs write of themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from tessera_rt.kernels.budget import SmBudget, device_budget
from tessera_rt.kernels.expert_mlp import expert_mlp
from tessera_rt.kernels.operands import Run
from tessera_rt.kernels.options import Activation, Gate, RouterRule
from tessera_rt.kernels.routing import route_rows, topk, topk_backward
from tessera_rt.kernels.trace import Trace
from tessera_rt.testing.kernel_checks import map_weights, poisoned_memory, random_weights

OSS = Gate(activation=Activation.SWIGLU_OSS, interleaved=True)


def check_grids(device: torch.device, *, hidden: int, intermediate: int, tokens: int, dtype: torch.dtype) -> None:
    """Router, experts and all gradients within budgets of 1, 3, 7 and all compute SMs: the same bits; every launch's
    programs are those of its grid, each wrote its number once, and they ran on no more SMs than the budget has."""
    every = device_budget(device).total
    want: list[Tensor] = []
    for compute in (every, 1, 3, 7):
        if compute > every:
            continue
        trace, budget = Trace(), SmBudget(every, every - compute)
        got = _layer(device, hidden, intermediate, tokens, dtype, Run(budget, trace=trace))
        want = want or got
        for number, (one, expected) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(one, expected), f"tensor {number} differs with {compute} compute SMs of {every}"
        for launch in trace.launches:
            programs, sms = launch.programs(), launch.sms()
            assert programs == list(range(launch.places.shape[0])), f"{launch.kernel}: programs {programs}"
            assert 1 <= len(sms) <= len(programs) <= compute, f"{launch.kernel}: {len(sms)} SMs, budget {compute}"
            assert sms <= set(range(every)), f"{launch.kernel}: SMs {sorted(sms)}"
        assert max(len(launch.programs()) for launch in trace.launches) == compute


def _layer(
    device: torch.device, hidden: int, intermediate: int, tokens: int, dtype: torch.dtype, run: Run
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = random_weights(6, hidden, intermediate, OSS, dtype, generator, bias=True)
    leaves = map_weights(weights, lambda tensor: tensor.to(device).requires_grad_())
    x = torch.randn(tokens, hidden, generator=generator).to(device, dtype).requires_grad_()
    logits = torch.randn(tokens, 6, generator=generator).to(device)
    rule = RouterRule(top_k=2, renormalize=True)
    with poisoned_memory():
        ids, chosen = topk(logits, rule, budget=run.budget, trace=run.trace)
        router = chosen.detach().requires_grad_()
        out = expert_mlp(x, leaves, route_rows(ids, 6, budget=run.budget, trace=run.trace), router, OSS, run=run)
        torch.autograd.backward(out, out.detach().cos())
        assert router.grad is not None
        d_logits = topk_backward(router.grad, logits, ids, rule, budget=run.budget, trace=run.trace)
    tensors = (x, router, leaves.gate_up, leaves.down, leaves.gate_up_bias, leaves.down_bias)
    gradients = [tensor.grad for tensor in tensors if tensor is not None and tensor.grad is not None]
    assert len(gradients) == 6
    return [out.detach(), d_logits, *gradients]
