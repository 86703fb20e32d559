"""Every compute kernel against the plain-torch reference in float64, on this device.

Inputs are random; buffers start as NaN; groups are empty, ragged or one row long; rows that belong to nobody hold NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from gpu_check_parts.check import Check
from tessera_rt.kernels import reference
from tessera_rt.kernels.expert_mlp import expert_mlp
from tessera_rt.kernels.options import NO_GATE, Activation, Gate, RouterRule
from tessera_rt.kernels.routing import expert_rows, place, route_rows, topk
from tessera_rt.kernels.rows_gemm import rows_gemm
from tessera_rt.kernels.wgrad import bias_gradient, wgrad
from tessera_rt.testing.kernel_checks import (
    assert_near,
    dense_experts,
    map_weights,
    poisoned_memory,
    random_ids,
    random_weights,
)
from tessera_rt.testing.kernel_grids import check_grids

GATES = {
    "none": NO_GATE,
    "swiglu": Gate(),
    "clamped": Gate(activation=Activation.SWIGLU_CLAMPED, limit=0.4),
    "gpt-oss": Gate(activation=Activation.SWIGLU_OSS, interleaved=True, limit=0.7),
    "geglu": Gate(activation=Activation.GEGLU),
    "relu2": Gate(activation=Activation.RELU2),
}
COUNTS = (5, 0, 300, 1, 130, 0, 64)
DRY_COUNTS = (5, 0, 40, 3)
TAIL = 13  # rows that belong to nobody
RULES = {
    "softmax": RouterRule(top_k=8, renormalize=True),
    "after top-k": RouterRule(top_k=4, softmax_after_topk=True),
    "sigmoid, groups": RouterRule(top_k=8, score="sigmoid", renormalize=True, scale=2.5, groups=8, keep_groups=4),
}


def run(check: Check) -> None:
    if check.dry_run:
        from tessera_rt.testing.interpreter import install

        install()
    for name, rule in RULES.items():
        with check.case(f"routing, {name}"):
            check_routing(check, rule)
    dtypes = (torch.bfloat16,) if check.dry_run else (torch.bfloat16, torch.float16, torch.float32)
    gates = ("none", "swiglu") if check.dry_run else tuple(GATES)
    for dtype, gate, (n, k) in itertools.product(dtypes, gates, _sizes(check)):
        with check.case(f"products, {gate}, {str(dtype)[6:]}, N {n} K {k}"):
            _products(check, GATES[gate], dtype, n, k)
    for dtype, gate in itertools.product(dtypes, gates[1:]):
        for recompute in (False, True):
            with check.case(f"experts with gradients, {gate}, {str(dtype)[6:]}, recompute {recompute}"):
                _experts(check, GATES[gate], dtype, recompute)
    with check.case(
        "bits and traces over grids of 1, 3, 7 and all SMs, bfloat16"
    ):  # one dtype: traced code compiles anew
        hidden, intermediate, tokens = (32, 48, 20) if check.dry_run else (512, 384, 3000)
        check_grids(check.device, hidden=hidden, intermediate=intermediate, tokens=tokens, dtype=torch.bfloat16)
    if check.dry_run:
        check.skip("a product past 2^31 elements", "the interpreter would take hours; addresses are tested elsewhere")
    else:
        with check.case("a product past 2^31 elements"):
            _past_int32(check.device)


def _sizes(check: Check) -> Iterator[tuple[int, int]]:
    """Tiles that fit, tails of N and K that TMA has to cut off, and widths that it cannot read at all."""
    yield from ((48, 80), (14, 7)) if check.dry_run else ((512, 1024), (2880, 2880), (208, 144), (577, 859))


def _draw(check: Check, *shape: int, seed: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(check.device, dtype)


def check_routing(check: Check, rule: RouterRule) -> None:
    tokens, experts = (37, 32) if check.dry_run else (4001, 256)
    logits = _draw(check, tokens, experts, seed=1, dtype=torch.float32)
    logits[3], logits[4], logits[5, 7] = torch.nan, 1.0, torch.inf
    mask = torch.rand(tokens, generator=torch.Generator().manual_seed(2)).to(check.device) > 0.1
    with poisoned_memory():
        ids, weights = topk(logits, rule, mask=mask)
        position, source, offsets = place(ids, experts)
    want_ids, want_weights = reference.topk(logits.cpu(), rule, mask=mask.cpu())
    assert torch.equal(ids.cpu(), want_ids), "ids differ"
    finite = want_weights.isfinite()
    assert_near("weights", weights.cpu()[finite], want_weights.double()[finite])
    for name, got, want in zip(
        ("position", "source", "offsets"), (position, source, offsets), reference.place(want_ids, experts), strict=True
    ):
        used = slice(None) if name != "source" else slice(0, int(offsets[-1]))
        assert torch.equal(got.cpu()[used], want[used]), f"{name} differs"


def _products(check: Check, gate: Gate, dtype: torch.dtype, n: int, k: int) -> None:
    counts = DRY_COUNTS if check.dry_run else COUNTS
    total, experts = sum(counts), len(counts)
    offsets = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    rows = expert_rows(offsets.to(check.device), total + TAIL)
    columns = 2 * n if gate.gated else n
    x = _draw(check, total + TAIL, k, seed=1, dtype=dtype)
    x[total:] = torch.nan
    weight = _draw(check, experts, columns, k, seed=2, dtype=dtype, scale=k**-0.5)
    bias = _draw(check, experts, columns, seed=3, dtype=dtype)
    with poisoned_memory():
        out, pre = rows_gemm(x, weight, rows, bias=bias, gate=gate, save_pre=True)
    assert pre is not None
    x64, w64, b64 = (tensor.cpu().double() for tensor in (x, weight, bias))
    _, want = reference.rows_gemm(x64, w64, offsets, total + TAIL, bias=b64, gate=gate)
    assert_near("product", pre.cpu(), want)
    assert_near("activation", out.cpu()[:total], reference.activate(pre.cpu()[:total].double(), gate))
    assert not out[total:].any() and not pre[total:].any(), "rows of nobody are not zero"
    grad = _draw(check, total + TAIL, columns, seed=4, dtype=dtype)
    grad[total:] = torch.nan
    main = torch.full(weight.shape, 0.5, dtype=torch.float32, device=check.device)
    written, of_bias = torch.full_like(weight, torch.nan), torch.full_like(bias, torch.nan)
    wgrad(grad, x, rows, main, accumulate=True)
    wgrad(grad, x, rows, written, accumulate=False)
    bias_gradient(grad, rows, of_bias, accumulate=False)
    want = reference.wgrad(grad.cpu().double(), x64, offsets)
    assert_near("weight gradient added", main.cpu() - 0.5, want, ratio=2e-5 if dtype != torch.float32 else None)
    assert_near("weight gradient written", written.cpu(), want)
    assert not written[1].any(), "an expert without rows has a gradient"
    assert_near("bias gradient", of_bias.cpu(), reference.bias_gradient(grad.cpu().double(), offsets))


def _experts(check: Check, gate: Gate, dtype: torch.dtype, recompute: bool) -> None:
    tokens, experts, top_k, hidden, intermediate = (9, 5, 2, 32, 48) if check.dry_run else (700, 23, 4, 512, 416)
    generator = torch.Generator().manual_seed(7)
    weights = random_weights(experts, hidden, intermediate, gate, dtype, generator, bias=gate.interleaved)
    ids = random_ids(tokens, experts, top_k, generator, dropped=0.1)
    ids[ids == 2] = -1  # an expert without tokens
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    router, grad = torch.rand(tokens, top_k, generator=generator), torch.randn(x.shape, generator=generator).to(dtype)

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().to(check.device).requires_grad_()

    ours = leaf(x), leaf(router), map_weights(weights, leaf)
    with poisoned_memory():
        out = expert_mlp(
            ours[0], ours[2], route_rows(ids.to(check.device), experts), ours[1], gate, recompute=recompute
        )
        out.backward(grad.to(check.device))
    theirs = (
        x.double().requires_grad_(),
        router.double().requires_grad_(),
        map_weights(weights, lambda w: w.double().requires_grad_()),
    )
    want = dense_experts(theirs[0], theirs[2], ids, theirs[1], gate)
    want.backward(grad.double())
    ratio = 2.5e-2 if dtype == torch.bfloat16 else 5e-3 if dtype == torch.float16 else 2e-5
    assert_near("out", out.detach().cpu(), want.detach(), ratio=ratio)
    pairs = {"x": (ours[0], theirs[0]), "router": (ours[1], theirs[1])}
    pairs |= {name: (getattr(ours[2], name), getattr(theirs[2], name)) for name in ("gate_up", "down")}
    for name, (got, wanted) in pairs.items():
        assert got.grad is not None and wanted.grad is not None
        assert_near(f"gradient of {name}", got.grad.cpu(), wanted.grad, ratio=ratio)


def _past_int32(device: torch.device) -> None:
    rows, n, k, experts = 1_050_000, 2048, 64, 4
    free, _ = torch.cuda.mem_get_info(device)
    assert free > 8e9, f"needs 8 GB of device memory, {free / 1e9:.1f} are free"
    offsets = torch.tensor([0, 100, rows // 2, rows - 7, rows], dtype=torch.int32, device=device)
    x = torch.randn(rows, k, device=device).bfloat16()
    weight = (torch.randn(experts, n, k, device=device) * k**-0.5).bfloat16()
    out, _ = rows_gemm(x, weight, expert_rows(offsets, rows))
    assert out.numel() > 2**31
    for expert, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        for part in {slice(start, min(start + 50, end)), slice(max(end - 50, start), end)}:
            assert_near(f"rows {part}", out[part], x[part].double() @ weight[expert].double().mT)
