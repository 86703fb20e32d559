"""Addresses beyond 2^31 elements (case 55), on real tensors of 4 to 9 GB of which few pages are touched.

Where a kernel would go through all of the tensor, its grid has a program per tile and only the last ones are run.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tessera_rt.kernels import gather_sum as gather_sums
from tessera_rt.kernels import reference, routing
from tessera_rt.kernels.budget import SmBudget
from tessera_rt.kernels.config_table import Config
from tessera_rt.kernels.gate_backward import gate_backward
from tessera_rt.kernels.gather_sum import gather_sum, gather_sum_backward, router_weight_gradient
from tessera_rt.kernels.operands import Run
from tessera_rt.kernels.options import Activation, Gate, RouterRule
from tessera_rt.kernels.routing import ExpertRows, TileTable, expert_rows, place, topk, topk_backward
from tessera_rt.kernels.routing_kernels import histogram_kernel, place_kernel, tile_scan_kernel
from tessera_rt.kernels.rows_gemm import rows_gemm, zero_rows_behind
from tessera_rt.kernels.wgrad import bias_gradient, wgrad
from tessera_rt.testing.interpreter import only_programs
from tessera_rt.testing.kernel_checks import assert_near, offsets_of

pytestmark = pytest.mark.usefixtures("interpreted")

A_PROGRAM_PER_TILE = SmBudget(1 << 30)
LIMIT = 1 << 31
FLAT = Config(block_m=16, block_n=32, block_k=256, warps=4, stages=2)
WIDE = Config(block_m=256, block_n=256, block_k=16, warps=4, stages=2)


def _draw(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def test_weights() -> None:
    """E N K and the last expert's address."""
    experts, n, k = 257, 2896, 2912  # 2.17e9 elements
    weight = torch.empty(experts, n, k, dtype=torch.bfloat16)
    weight[-1] = _draw(n, k, dtype=torch.bfloat16)[None]
    counts = [0] * (experts - 1) + [2]
    x = _draw(2, k, dtype=torch.bfloat16, seed=1)
    want = x.double() @ weight[-1].double().mT
    config = Config(block_m=16, block_n=256, block_k=256, warps=4, stages=2)
    rows = expert_rows(offsets_of(counts), 2, (16,))
    aligned, _ = rows_gemm(x, weight, rows, run=Run(config=config))
    assert_near("aligned", aligned, want)
    odd, of_odd = x[:, :2910], weight[:, :, :2910]
    unaligned, _ = rows_gemm(odd, of_odd, rows, run=Run(config=config))
    assert_near("any size", unaligned, odd.double() @ of_odd[-1].double().mT)
    pre, gate = torch.ones(2, n, dtype=torch.bfloat16), Gate(activation=Activation.RELU2)  # of slope 2
    for grad, down in ((x, weight), (odd, of_odd)):
        d_pre, _, _ = gate_backward(grad, down, pre, rows, gate=gate, run=Run(config=config))
        assert_near("d pre", d_pre, 2 * grad.double() @ down[-1].double().mT)


def test_biases() -> None:
    """E N of biases, by the last tile of the last expert."""
    experts, n, end = 1024, 2_099_232, slice(-8, None)
    bias = torch.empty(experts, n, dtype=torch.bfloat16)
    assert (experts - 1) * n > LIMIT
    bias[-1, -512:] = 1.0
    bias[-1, n // 2 - 512 : n // 2] = 1.0
    bias[-1, end] = torch.arange(8)
    x, weight = torch.ones(1, 1, dtype=torch.bfloat16), torch.ones(1, 1, 1, dtype=torch.bfloat16).expand(experts, n, 1)
    run = Run(budget=A_PROGRAM_PER_TILE, config=WIDE)
    rows = expert_rows(offsets_of([0] * (experts - 1) + [1]), 1, (WIDE.block_m,))
    with only_programs((n - 1) // WIDE.block_n):
        out, _ = rows_gemm(x, weight, rows, bias=bias, zero_tail=False, run=run)
    with only_programs((n // 2 - 1) // WIDE.block_n):
        _, pre = rows_gemm(x, weight, rows, bias=bias, gate=Gate(), save_pre=True, zero_tail=False, run=run)
    assert pre is not None
    assert torch.equal(out[0, end], bias[-1, end] + 1) and torch.equal(pre[0, end], bias[-1, end] + 1)


@pytest.mark.parametrize("n", [1040, 1041], ids=["aligned", "any"])
def test_rows_of_products(n: int) -> None:
    """The last rows of outputs, by a tile table that holds their tile only."""
    rows_count, k = 1_050_000, 16  # pre [rows, 2 n]: 2.18e9 elements, of which few pages are touched
    last = rows_count - 5
    offsets = torch.tensor([0, rows_count], dtype=torch.int32)
    block_m = 32
    entry = torch.tensor([(rows_count - 1) // block_m], dtype=torch.int32)
    rows = ExpertRows(rows_count, offsets, (TileTable(block_m, entry, torch.ones(1, dtype=torch.int32)),))
    config = Config(block_m=block_m, block_n=256, block_k=32, warps=4, stages=2)
    x = torch.zeros(rows_count, k, dtype=torch.bfloat16)
    x[last:] = _draw(5, k, dtype=torch.bfloat16)
    gate = Gate()
    weight = _draw(1, 2 * n, k, dtype=torch.bfloat16, seed=1, scale=0.25)
    out, pre = rows_gemm(x, weight, rows, gate=gate, save_pre=True, zero_tail=False, run=Run(config=config))
    assert pre is not None and pre.numel() > LIMIT
    want = x[last:].double() @ weight[0].double().mT
    assert_near("pre", pre[last:], want)
    assert_near("out", out[last:], reference.activate(want, gate))
    product, _ = rows_gemm(x, weight, rows, zero_tail=False, run=Run(config=config))
    assert torch.equal(product[last:], pre[last:])
    down = _draw(1, n, k, dtype=torch.bfloat16, seed=2, scale=0.25)
    d_pre, act, _ = gate_backward(x, down, pre, rows, gate=gate, zero_tail=False, run=Run(config=config))
    want_d_pre, want_act, _ = reference.gate_backward(
        x[last:].double(), down.double(), pre[last:].double(), offsets_of([5]), gate=gate
    )
    assert_near("d pre", d_pre[last:], want_d_pre)
    assert_near("activation", act[last:], want_act)


@pytest.mark.parametrize(
    ("k", "in_columns"), [(2064, False), (2063, False), (2063, True)], ids=["aligned", "any", "mT"]
)
def test_gathered_tokens(k: int, in_columns: bool) -> None:
    """Products read the last token of [1,048,577, 2064], also where its elements lie far apart."""
    tokens, n, gate = 1_048_577, 32, Gate()
    memory = torch.empty(2064 * tokens, dtype=torch.bfloat16)
    assert memory.numel() > LIMIT
    x = memory.view(2064, tokens).mT[:, :k] if in_columns else memory.view(tokens, 2064)[:, :k]
    x[-1] = _draw(k, dtype=torch.bfloat16, scale=0.25)
    index = torch.tensor([tokens - 1, tokens - 1], dtype=torch.int32)
    rows, run = expert_rows(offsets_of([2]), 2, (16,)), Run(config=FLAT)
    weight = _draw(1, n, k, dtype=torch.bfloat16, seed=1)
    out, _ = rows_gemm(x, weight, rows, index=index, run=run)
    seen = x[-1:].double().expand(2, k)
    assert_near("out", out, seen @ weight[0].double().mT)
    pre, side = _draw(2, 2 * n, dtype=torch.bfloat16, seed=2), _draw(2, n, dtype=torch.bfloat16, seed=3)
    d_pre, _, _ = gate_backward(x, weight, pre, rows, gate=gate, index=index, run=run)
    want, _, _ = reference.gate_backward(seen, weight.double(), pre.double(), offsets_of([2]), gate=gate)
    assert_near("d pre", d_pre, want)
    run = Run(config=WIDE)
    d_weight = wgrad(side, x, rows, torch.empty(1, n, k), accumulate=False, index=index, gather_x=True, run=run)
    assert_near("d weight", d_weight[0], side.double().mT @ seen)
    d_other = wgrad(x, side, rows, torch.empty(1, k, n), accumulate=False, index=index, gather_grad=True, run=run)
    assert_near("d weight, other side", d_other[0], seen.mT @ side.double())


def test_rows_that_are_gathered() -> None:
    rows, hidden = 1_048_577, 2056
    y = torch.empty(rows, hidden, dtype=torch.bfloat16)
    y[-1] = torch.arange(hidden) % 97
    y[0] = 1.0
    position = torch.tensor([[rows - 1, 0], [0, -1]], dtype=torch.int32)
    out = gather_sum(y, position)
    assert torch.equal(out[0].float(), torch.arange(hidden) % 97 + 1.0) and torch.equal(out[1], y[0])


def test_sums_of_many_tokens_and_of_rows_in_columns() -> None:
    """T H of the result; and rows whose columns lie far apart, as in a transposed view."""
    tokens, hidden = 1_048_577, 2056
    y, position = _draw(2, hidden, dtype=torch.bfloat16), torch.zeros(tokens, 1, dtype=torch.int32)
    position[-1] = 1
    with only_programs(-1):
        out = gather_sum(y, position, run=Run(budget=A_PROGRAM_PER_TILE))
    assert out.numel() > LIMIT and torch.equal(out[-1, -8:], y[1, -8:])
    columns = torch.empty(hidden, tokens, dtype=torch.bfloat16)
    columns[:, -1] = y[0]
    last = torch.tensor([[tokens - 1]], dtype=torch.int32)
    assert torch.equal(gather_sum(columns.mT, last), y[:1])
    wide = torch.empty(tokens, hidden, dtype=torch.bfloat16)
    wide[-1] = y[0]
    rows = ExpertRows(1, torch.tensor([0, 1], dtype=torch.int32), ())
    source, one = torch.tensor([tokens - 1], dtype=torch.int32), torch.ones(tokens, 1)
    for grad in (columns.mT, wide):
        with only_programs(0):
            d_y, _ = gather_sum_backward(
                grad, y[:1], source, rows, last.expand(tokens, 1), one, run=Run(budget=A_PROGRAM_PER_TILE)
            )
        assert torch.equal(d_y, y[:1])


def test_positions_of_many_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """T K of positions and weights."""
    monkeypatch.setattr(gather_sums, "BLOCK_T", 256)  # fewer programs
    tokens, top_k = (1 << 25) + 3, 64
    position, weights = (torch.empty(tokens, top_k, dtype=dtype) for dtype in (torch.int32, torch.float32))
    assert position.numel() > LIMIT
    y = _draw(5, 1, dtype=torch.float32)
    position[-3:] = torch.randint(-1, 5, (3, top_k), generator=torch.Generator().manual_seed(1))
    weights[-3:] = _draw(3, top_k, dtype=torch.float32, seed=2)
    with only_programs(-1):
        out = gather_sum(y, position, weights, run=Run(budget=A_PROGRAM_PER_TILE))
    assert_near("out", out[-3:], reference.gather_sum(y.double(), position[-3:], weights[-3:].double()), ratio=1e-6)


@pytest.mark.parametrize("accumulate", [False, True], ids=["write", "accumulate"])
@pytest.mark.parametrize("q", [2912, 2911], ids=["aligned", "any"])
def test_weight_gradients(q: int, accumulate: bool) -> None:
    """The first and the last tile of [257, 2896, Q]; nothing else of their experts is touched."""
    experts, p, tile = 257, 2896, 256
    out = torch.empty(experts, p, q, dtype=torch.float32 if accumulate else torch.bfloat16)
    assert out.numel() > LIMIT
    grad, x = _draw(5, p, dtype=torch.bfloat16), _draw(5, q, dtype=torch.bfloat16, seed=1)
    rows = expert_rows(offsets_of([2, *[0] * (experts - 2), 3]), 5, (16,))
    out[0], out[-1] = 7.0, 7.0
    with only_programs(0, -1):
        wgrad(grad, x, rows, out, accumulate=accumulate, run=Run(budget=A_PROGRAM_PER_TILE, config=WIDE))
    for expert, of_rows, corner in (
        (0, slice(0, 2), (slice(0, tile), slice(0, tile))),
        (-1, slice(2, 5), (slice(p // tile * tile, p), slice(q // tile * tile, q))),
    ):
        want = grad[of_rows].double().mT @ x[of_rows].double()
        assert_near("tile", out[expert][corner], (want + 7 * accumulate)[corner])
        out[expert][corner] = 7.0
        assert (out[expert] == 7).all()


@pytest.mark.parametrize("q", [46_400, 46_399], ids=["aligned", "any"])
def test_weight_gradient_of_one_large_expert(q: int) -> None:
    p, corner = 46_400, 60
    out = torch.empty(1, p, q, dtype=torch.bfloat16)
    assert out.numel() > LIMIT
    grad, x = _draw(3, p, dtype=torch.bfloat16), _draw(3, q, dtype=torch.bfloat16, seed=1)
    with only_programs(-1):
        wgrad(
            grad, x, expert_rows(offsets_of([3]), 3, (16,)), out,
            accumulate=False, run=Run(budget=A_PROGRAM_PER_TILE, config=WIDE),
        )  # fmt: skip
    want = grad[:, -corner:].double().mT @ x[:, -corner:].double()
    assert_near("last tile", out[0, -corner:, -corner:], want)


def test_bias_gradient_and_zeroed_rows() -> None:
    rows_count, n = 1_048_577, 2056
    tail = 3
    grad = torch.empty(rows_count, n, dtype=torch.bfloat16)
    assert grad.numel() > LIMIT
    grad[-8:] = _draw(8, n, dtype=torch.bfloat16)
    want = grad[-8:-tail].double().sum(0)
    end = rows_count - tail
    rows = ExpertRows(rows_count, torch.tensor([end - 5, end], dtype=torch.int32), ())
    assert_near("bias", bias_gradient(grad, rows, torch.empty(1, n), accumulate=False)[0], want, ratio=1e-6)
    kept = grad[-8:-tail].clone()
    zero_rows_behind(grad, rows)
    assert torch.equal(grad[-8:-tail], kept) and not grad[-tail:].any()


def test_backward_of_gathered_rows() -> None:
    """d y [R, H] and partials [R, tiles] at the last row."""
    rows_count, hidden = 1_048_577, 2056
    y = torch.empty(rows_count, hidden, dtype=torch.bfloat16)
    y[-1] = _draw(hidden, dtype=torch.bfloat16)
    grad = _draw(1, hidden, dtype=torch.bfloat16, seed=1)
    source = torch.zeros(rows_count, dtype=torch.int32)
    position = torch.tensor([[rows_count - 1]], dtype=torch.int32)
    rows = ExpertRows(rows_count, torch.tensor([rows_count - 1, rows_count], dtype=torch.int32), ())
    with only_programs(-1):
        d_y, d_weights = gather_sum_backward(
            grad, y, source, rows, position, torch.full((1, 1), 0.5), run=Run(budget=A_PROGRAM_PER_TILE)
        )
    assert d_y.numel() > LIMIT and torch.equal(d_y[-1], grad[0] * 0.5)
    assert_near("d weights", d_weights, (y[-1:].double() * grad.double()).sum(-1, keepdim=True), ratio=1e-5)
    partials = torch.empty(rows_count, 2056)
    partials[-1] = torch.arange(2056)
    assert router_weight_gradient(partials, position).item() == 2056 * 2055 / 2


def test_logits_of_many_tokens() -> None:
    tokens, experts, rule = 2_097_155, 1024, RouterRule(top_k=2)
    logits = torch.empty(tokens, experts, dtype=torch.bfloat16)
    assert logits.numel() > LIMIT
    logits[-3:] = _draw(3, experts, dtype=torch.bfloat16)
    with only_programs(-1):
        ids, weights = topk(logits, rule, budget=A_PROGRAM_PER_TILE)
        want_ids, want = reference.topk(logits[-3:], rule)
        assert torch.equal(ids[-3:], want_ids)
        assert_near("weights", weights[-3:], want, ratio=1e-6)
        grad = torch.ones(1, 1).expand(tokens, 2)
        d_logits = topk_backward(grad, logits, ids, rule, budget=A_PROGRAM_PER_TILE)
    want_d = reference.topk_backward(grad[-3:], logits[-3:].float(), want_ids, rule)
    assert_near("d logits", d_logits[-3:].float(), want_d, ratio=1e-2)


def test_choices_of_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """T K of ids, weights and their gradient."""
    monkeypatch.setattr(routing, "BLOCK_T", 256)  # fewer programs
    tokens, experts, rule = (1 << 25) + 3, 64, RouterRule(top_k=64)
    row = _draw(1, experts, dtype=torch.bfloat16)
    logits = row.expand(tokens, experts)
    grad = torch.empty(tokens, experts, dtype=torch.bfloat16)
    grad[-3:] = _draw(3, experts, dtype=torch.bfloat16, seed=1)
    with only_programs(-1):
        ids, weights = topk(logits, rule, budget=A_PROGRAM_PER_TILE)
        assert ids.numel() > LIMIT
        want_ids, want = reference.topk(row.expand(3, experts), rule)
        assert torch.equal(ids[-3:], want_ids)
        assert_near("weights", weights[-3:], want, ratio=1e-6)
        del weights
        d_logits = topk_backward(grad, logits, ids, rule, budget=A_PROGRAM_PER_TILE)
    want_d = reference.topk_backward(grad[-3:].float(), row.float().expand(3, experts), want_ids, rule)
    assert_near("d logits", d_logits[-3:].float(), want_d, ratio=1e-2)


def test_logits_and_gradients_that_lie_far_apart() -> None:
    """Strides of logits [T, E] and of the weights' gradient [T, K] over tokens and over columns."""
    far, rule = 1 << 30, RouterRule(top_k=3)
    memory = torch.empty((1 << 31) + 8, dtype=torch.bfloat16)
    for start in (0, far, 2 * far):
        memory[start : start + 8] = _draw(8, dtype=torch.bfloat16, seed=start % 7)
    for strides in ((far, 1), (1, far)):
        there = memory.as_strided((3, 3), strides)
        ids, weights = topk(there, rule)
        near = there.contiguous()
        assert all(torch.equal(a, b) for a, b in zip((ids, weights), topk(near, rule), strict=True))
        assert torch.equal(topk_backward(there, there, ids, rule), topk_backward(near, near, ids, rule))


def test_choices_whose_ids_lie_far_apart() -> None:
    """Strides of ids [T, K] over tokens and over choices."""
    memory = torch.empty((1 << 31) + 8, dtype=torch.int8)
    far = 1 << 30
    memory[:8], memory[far : far + 8], memory[2 * far :] = 2, 0, 1
    for ids in (memory.as_strided((3, 2), (far, 1)), memory.as_strided((2, 3), (1, far))):
        assert ids.data_ptr() == memory.data_ptr()
        for got, want in zip(place(ids, 3), reference.place(ids.contiguous(), 3), strict=True):
            assert torch.equal(got, want)


def test_counts_of_many_tiles() -> None:
    """Counts [tiles, E] of choices. There are more experts than a router can have, so that few tiles get that far."""
    block, experts = 64, 1 << 18
    tiles = (1 << 31) // experts + 1
    total, last = tiles * block - 3, experts - 1
    counts = torch.empty(tiles, experts, dtype=torch.int32)
    assert counts.numel() > LIMIT
    counts[:, -4:] = 1
    ids = torch.tensor([[last]], dtype=torch.int32).expand(total, 1)
    sizes = (total, tiles, experts, 1, *ids.stride())
    with only_programs(-1):
        histogram_kernel[(tiles,)](ids, counts, None, *sizes, BLOCK=block, BLOCK_E=1 << 14, TRACE=False)
        assert counts[-1, -4:].tolist() == [0, 0, 0, block - 3]
        counts[-1, -4:] = 1
        totals = torch.empty(experts, dtype=torch.int32)
        tile_scan_kernel[(experts // 4,)](counts, totals, None, tiles, experts, BLOCK_T=1024, BLOCK_E=4, TRACE=False)
        assert counts[-1, -4:].tolist() == [tiles - 1] * 4 and totals[-4:].tolist() == [tiles] * 4
        offsets = torch.zeros(experts + 1, dtype=torch.int32)
        offsets[last], offsets[experts] = 5, total
        position, source = (torch.empty(total, dtype=torch.int32) for _ in range(2))
        place_kernel[(tiles,)](ids, counts, offsets, position, source, None, *sizes, BLOCK=block, TRACE=False)
    rows = 5 + tiles - 1 + torch.arange(block - 3)
    assert torch.equal(position[-(block - 3) :].long(), rows)
    assert torch.equal(source[rows].long(), total - (block - 3) + torch.arange(block - 3))
