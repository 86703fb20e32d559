"""The experts as one function, the weighted gather-sum, and the gradient contract."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tessera_rt.errors import SpecError
from tessera_rt.kernels import reference
from tessera_rt.kernels.budget import SmBudget
from tessera_rt.kernels.expert_mlp import NO_MAIN_GRADS, ExpertWeights, MainGrads, expert_mlp
from tessera_rt.kernels.expert_rows import expert_rows as rows_of_experts
from tessera_rt.kernels.expert_rows import expert_rows_backward
from tessera_rt.kernels.gather_sum import gather_sum, gather_sum_backward, router_weight_gradient
from tessera_rt.kernels.operands import Run
from tessera_rt.kernels.options import Activation, Gate, RouterRule
from tessera_rt.kernels.routing import expert_rows, place, route_rows, topk, topk_backward
from tessera_rt.kernels.row_gradients import Needs, RowGradients
from tessera_rt.kernels.rows_gemm import rows_gemm, zero_rows_behind
from tessera_rt.kernels.trace import Trace
from tessera_rt.testing.interpreter import launches, program_order
from tessera_rt.testing.kernel_checks import (
    assert_near,
    dense_experts,
    map_weights,
    poisoned_memory,
    random_ids,
    random_weights,
)

pytestmark = pytest.mark.usefixtures("interpreted")

# The limit is out of reach: in bf16 a rounded product may cross it, where the derivative jumps.
OSS = Gate(activation=Activation.SWIGLU_OSS, interleaved=True, limit=7.0)
# tokens, experts, hidden, intermediate, top_k, gate, bias, transposed, recompute
LAYERS = {
    "swiglu": (17, 4, 64, 32, 2, Gate(), False, False, False),
    "recomputed-transposed": (17, 5, 64, 48, 3, Gate(), False, True, True),
    "gpt-oss": (33, 5, 32, 48, 3, OSS, True, True, False),
    "geglu-odd": (9, 7, 11, 13, 3, Gate(activation=Activation.GEGLU), True, False, True),
    "relu2": (20, 3, 32, 80, 2, Gate(activation=Activation.RELU2), False, False, False),
    "relu2-odd-biased": (9, 6, 11, 13, 3, Gate(activation=Activation.RELU2), True, True, False),
    "one-token": (1, 8, 16, 16, 1, Gate(), False, False, False),
    "no-token": (0, 8, 16, 16, 2, Gate(), True, False, False),
}
FIELDS = ("gate_up", "down", "gate_up_bias", "down_bias")


def _tensors(weights: ExpertWeights | MainGrads) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name in FIELDS if (tensor := getattr(weights, name)) is not None)


def _layer(name: str, dtype: torch.dtype) -> tuple[Tensor, ExpertWeights, Tensor, Tensor, Gate, bool]:
    tokens, experts, hidden, intermediate, top_k, gate, bias, transposed, recompute = LAYERS[name]
    generator = torch.Generator().manual_seed(len(name))
    weights = random_weights(
        experts, hidden, intermediate, gate, dtype, generator, bias=bias, transposed=transposed
    )  # fmt: skip
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    ids = random_ids(tokens, experts, top_k, generator, dropped=0.1)
    return x, weights, ids, torch.rand(tokens, top_k, generator=generator), gate, recompute


@pytest.mark.parametrize(
    ("dtype", "main"),
    [
        pytest.param(torch.bfloat16, False, id="bfloat16-grad"),
        pytest.param(torch.bfloat16, True, id="bfloat16-main-grad"),
        pytest.param(torch.float32, False, id="float32-grad"),
        pytest.param(torch.float32, True, id="float32-main-grad", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_all_gradients(name: str, dtype: torch.dtype, main: bool) -> None:
    x, weights, ids, router, gate, recompute = _layer(name, dtype)
    low = [tensor.clone().requires_grad_() for tensor in (x, router)]
    low_weights = map_weights(weights, lambda tensor: tensor.detach().clone().requires_grad_())
    high = [tensor.double().requires_grad_() for tensor in (x, router)]
    high_weights = map_weights(weights, lambda tensor: tensor.double().requires_grad_())
    buffers = NO_MAIN_GRADS
    if main:
        buffers = MainGrads(**{name: torch.ones_like(t, dtype=torch.float32) for name, t in _tensors(weights)})
    with poisoned_memory():
        routed = route_rows(ids, weights.down.shape[0])
        out = expert_mlp(low[0], low_weights, routed, low[1], gate, main_grads=buffers, recompute=recompute)
        grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
        out.backward(grad)
    want = dense_experts(high[0], high_weights, ids, high[1], gate) + 0 * high[0]
    want.backward(grad.double())
    ratio = {torch.float32: 1e-5, torch.bfloat16: 2.5e-2}[dtype]
    assert_near("out", out, want, ratio=ratio)
    for what, got, expected in (("x", low[0], high[0]), ("router weights", low[1], high[1])):
        assert got.grad is not None
        assert_near(f"d {what}", got.grad, _grad(expected), ratio=ratio)
    for what, expected in _tensors(high_weights):
        parameter = getattr(low_weights, what)
        if main:
            assert parameter.grad is None, "a weight with a main gradient must not get a .grad too"
            assert_near(f"d {what}", getattr(buffers, what) - 1, _grad(expected), ratio=ratio)
        else:
            assert parameter.grad.dtype == dtype
            assert_near(f"d {what}", parameter.grad, _grad(expected), ratio=ratio)


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def test_empty_experts_get_exact_zeros_in_both_contracts() -> None:
    """Case 51: counts [5, 0, 3, 0]. Memory for .grad is full of NaN beforehand; main gradients keep what they hold."""
    ids = torch.tensor([[0]] * 5 + [[2]] * 3, dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    weights = random_weights(4, 16, 32, Gate(), torch.float32, generator, bias=True)
    x = torch.randn(8, 16, generator=generator)
    main = map_weights(weights, lambda tensor: torch.randn(tensor.shape, generator=generator))
    before = map_weights(main, Tensor.clone)
    with poisoned_memory():
        for buffers in (NO_MAIN_GRADS, MainGrads(*(tensor for _, tensor in _tensors(main)))):
            leaves = map_weights(weights, lambda tensor: tensor.clone().requires_grad_())
            routed = route_rows(ids, 4)
            expert_mlp(x, leaves, routed, torch.ones(8, 1), Gate(), main_grads=buffers).sum().backward()
            for name, leaf in _tensors(leaves):
                assert (leaf.grad is None) == (buffers is not NO_MAIN_GRADS)
                grad = getattr(main, name) - getattr(before, name) if leaf.grad is None else leaf.grad
                assert grad.isfinite().all(), name
                assert not grad[1].any() and not grad[3].any() and grad[0].any() and grad[2].any(), name


def test_rows_of_nobody_never_reach_the_graph() -> None:
    """Case 52: 13 chosen rows in a buffer of 16, NaN in fresh memory, two steps of training."""
    generator = torch.Generator().manual_seed(0)
    weights = map_weights(
        random_weights(4, 16, 24, Gate(), torch.float32, generator), lambda tensor: tensor.requires_grad_()
    )
    x = torch.randn(8, 16, generator=generator)
    ids = random_ids(8, 4, 2, generator)
    ids[[1, 4, 6], 1] = -1
    with poisoned_memory():
        for _ in range(2):
            routed = route_rows(ids, 4)
            assert int(routed.rows.offsets[-1]) == 13 and routed.rows.rows == 16
            loss = expert_mlp(x, weights, routed, torch.full((8, 2), 0.5), Gate()).square().sum()
            loss.backward()
            assert loss.isfinite()
            for name, leaf in _tensors(weights):
                assert leaf.grad is not None and leaf.grad.isfinite().all(), name
                leaf.data -= 0.01 * leaf.grad
                leaf.grad = None


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257])
def test_identity_experts_give_the_input_back(tokens: int) -> None:
    """Case 56: every count of tokens; relu2 experts that are identities on 0 and 1, weights 1/k."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randint(0, 2, (tokens, 16), generator=generator).float()
    eye = torch.eye(16).expand(8, 16, 16).contiguous()
    routed = route_rows(random_ids(tokens, 8, 2, generator), 8)
    gate = Gate(activation=Activation.RELU2)
    out = expert_mlp(x, ExpertWeights(eye, eye), routed, torch.full((tokens, 2), 0.5), gate)
    assert torch.equal(out, x)


def test_gradients_of_any_strides() -> None:
    """Case 50: output reduced by sum, by cat, by transpose; input a transposed view."""
    x, weights, ids, router, gate, _ = _layer("swiglu", torch.float32)
    reductions = {
        "sum": lambda y: y.sum(),
        "cat": lambda y: torch.cat([y, y], dim=1).square().sum(),
        "transpose": lambda y: (y.mT * torch.arange(y.shape[0] * 1.0)).sum(),
    }
    for what, reduce in reductions.items():
        low = x.mT.contiguous().mT.requires_grad_()
        high = x.double().requires_grad_()
        reduce(expert_mlp(low, weights, route_rows(ids, 4), router, gate)).backward()
        reduce(dense_experts(high, map_weights(weights, Tensor.double), ids, router.double(), gate)).backward()
        assert low.grad is not None and high.grad is not None
        assert_near(what, low.grad, high.grad, ratio=1e-5)


def _all_gradients(
    x: Tensor, weights: ExpertWeights, ids: Tensor, router: Tensor, gate: Gate, grad: Tensor
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """What belongs to tokens (output, gradients of x and of the router's weights), and the gradients of weights."""
    leaves = map_weights(weights, lambda tensor: tensor.detach().clone().requires_grad_())
    inputs, weight = x.clone().requires_grad_(), router.clone().requires_grad_()
    out = expert_mlp(inputs, leaves, route_rows(ids, weights.down.shape[0]), weight, gate)
    out.backward(grad)
    return [out.detach(), inputs.grad, weight.grad], [leaf.grad for _, leaf in _tensors(leaves)]


@pytest.mark.parametrize(("name", "value"), [("swiglu", torch.nan), ("gpt-oss", torch.inf), ("geglu-odd", torch.nan)])
def test_a_token_that_is_not_finite_spoils_only_itself(name: str, value: float) -> None:
    """Its neighbours keep every bit, and so do the experts that it does not reach: as input and as gradient. It is
    token 0, which gathers read where they are masked."""
    x, weights, ids, router, gate, _ = _layer(name, torch.bfloat16)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    ids[0] = torch.arange(ids.shape[1])
    of_tokens, of_weights = _all_gradients(x, weights, ids, router, gate, grad)
    others, away = slice(1, None), slice(ids.shape[1], None)
    for bad_input in (True, False):
        spoiled = (x if bad_input else grad).clone()
        spoiled[0] = value
        got, got_weights = _all_gradients(
            spoiled if bad_input else x, weights, ids, router, gate, grad if bad_input else spoiled
        )
        for a, b in zip(got, of_tokens, strict=True):
            assert a is not None and b is not None and torch.equal(a[others], b[others])
        for a, b in zip(got_weights, of_weights, strict=True):
            assert a is not None and b is not None and torch.equal(a[away], b[away])
        spoiled_result = got[0] if bad_input else got[1]
        assert spoiled_result is not None and not spoiled_result[0].isfinite().any()


def test_autograd_modes() -> None:
    """The same bits under autocast and without gradients; a second derivative is refused."""
    x, weights, ids, router, gate, _ = _layer("swiglu", torch.bfloat16)
    routed, inputs = route_rows(ids, 4), x.clone().requires_grad_()
    out = expert_mlp(inputs, weights, routed, router, gate)
    (want,) = torch.autograd.grad(out.square().sum(), inputs)
    with torch.autocast("cpu", dtype=torch.float16):
        mixed = expert_mlp(inputs, weights, routed, router, gate)
        (got,) = torch.autograd.grad(mixed.square().sum(), inputs, create_graph=True)
    assert torch.equal(mixed, out) and torch.equal(got, want)
    with pytest.raises(RuntimeError, match="differentiable once"):
        got.sum().backward()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            plain = expert_mlp(x, weights, routed, router, gate)
            assert torch.equal(plain, out) and not plain.requires_grad


@pytest.mark.parametrize("name", ["geglu-odd", "swiglu"])
def test_what_is_frozen_gets_nothing(name: str) -> None:
    """Each of the inputs alone has the gradient it has with all of them; main gradients of frozen weights stay."""
    x, weights, ids, router, gate, _ = _layer(name, torch.bfloat16)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    (_, d_x, d_router), of_weights = _all_gradients(x, weights, ids, router, gate, grad)
    names = [field for field, _ in _tensors(weights)]
    want = {"x": d_x, "router": d_router, **dict(zip(names, of_weights, strict=True))}
    routed = route_rows(ids, weights.down.shape[0])
    for wanted, expected in want.items():
        buffers = map_weights(weights, lambda tensor: torch.zeros(tensor.shape))
        inputs, weight = x.clone().requires_grad_(wanted == "x"), router.clone().requires_grad_(wanted == "router")
        leaves = ExpertWeights(**{
            field: tensor.detach().clone().requires_grad_(field == wanted) for field, tensor in _tensors(weights)
        })  # fmt: skip
        main = MainGrads(**{field: tensor for field, tensor in _tensors(buffers) if field != wanted})
        expert_mlp(inputs, leaves, routed, weight, gate, main_grads=main).backward(grad)
        got = {"x": inputs.grad, "router": weight.grad, **{field: leaf.grad for field, leaf in _tensors(leaves)}}
        assert torch.equal(got.pop(wanted), expected), wanted  # type: ignore[arg-type]
        assert all(other is None for other in got.values())
        assert not any(tensor.any() for _, tensor in _tensors(buffers))


@pytest.mark.parametrize(
    ("name", "launched"),
    [("geglu-odd", ["gather_sum_backward_kernel", "gate_backward_any"]), ("relu2", ["gate_backward_aligned"])],
)
def test_what_is_not_wanted_is_not_computed(name: str, launched: list[str]) -> None:
    x, weights, ids, router, gate, _ = _layer(name, torch.float32)
    routed = route_rows(ids, weights.down.shape[0])
    y, pre = rows_of_experts(x, weights, routed, gate, save_pre=True)
    with launches() as log:
        found = expert_rows_backward(
            x, x, weights, routed, router, gate, pre=pre, y=None if weights.down_bias is None else y,
            needs=Needs(**dict.fromkeys(Needs.__slots__, False)),
        )  # fmt: skip
    assert found == RowGradients(**dict.fromkeys(RowGradients.__slots__))  # type: ignore[arg-type]
    assert [launch.kernel for launch in log] == launched


def test_gradients_of_transposed_weights_are_transposed() -> None:
    """Autograd would copy others when it puts them into .grad."""
    x, weights, ids, router, gate, _ = _layer("recomputed-transposed", torch.float32)
    found = expert_rows_backward(x, x, weights, route_rows(ids, 5), router, gate, pre=None, y=None)
    for name in ("gate_up", "down"):
        assert getattr(found, name).stride() == getattr(weights, name).stride()


def test_the_kernels_run_and_not_the_reference() -> None:
    x, weights, ids, router, gate, _ = _layer("swiglu", torch.float32)
    leaves = map_weights(weights, lambda tensor: tensor.clone().requires_grad_())
    inputs, weight = x.clone().requires_grad_(), router.clone().requires_grad_()
    routed = route_rows(ids, 4)
    with launches() as log:
        out = expert_mlp(inputs, leaves, routed, weight, gate)
    assert [launch.kernel for launch in log] == ["rows_gemm_aligned", "rows_gemm_aligned", "gather_sum_kernel"]
    with launches() as log:
        out.sum().backward()
    assert [launch.kernel for launch in log] == [
        "gate_backward_aligned", "router_weight_gradient_kernel", "wgrad_aligned", "wgrad_aligned",
        "rows_gemm_aligned", "gather_sum_kernel",
    ]  # fmt: skip


def test_wrong_main_gradients_are_named() -> None:
    x, weights, ids, router, gate, _ = _layer("swiglu", torch.bfloat16)
    for buffers in (
        MainGrads(gate_up=torch.zeros(1)),
        MainGrads(gate_up=torch.zeros_like(weights.gate_up)),
        MainGrads(gate_up_bias=torch.zeros(4, 64)),
        MainGrads(gate_up=torch.zeros(*weights.gate_up.shape, 2)[..., 0]),
    ):
        with pytest.raises(SpecError, match="main_grads.gate_up"):
            expert_mlp(x, weights, route_rows(ids, 4), router, gate, main_grads=buffers)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"x": torch.zeros(1, 32)}, r"x.shape = \(1, 32\): must be \[5, any\]"),
        ({"x": torch.zeros(9, 32)}, "x.shape"),
        ({"router_weights": torch.zeros(5, 1)}, "router_weights.shape"),
        ({"gate_up": torch.zeros(3, 96, 32)}, "gate_up.shape"),
        ({"gate_up": torch.zeros(4, 95, 32)}, "even with a gated activation"),
        ({"down": torch.zeros(4, 16, 48)}, r"down.shape = \(4, 16, 48\): must be \[4, 32, 48\]"),
        ({"down": torch.zeros(4, 32, 48, dtype=torch.bfloat16)}, "down.dtype = 'torch.bfloat16'.*like x"),
        ({"gate_up_bias": torch.zeros(4, 95)}, "gate_up_bias.shape"),
        ({"down_bias": torch.zeros(4, 31)}, "down_bias.shape"),
        ({"down_bias": torch.zeros(4, 32, dtype=torch.float16)}, "down_bias.dtype"),
    ],
)
def test_wrong_operands_are_named_before_any_launch(change: dict[str, Tensor], field: str) -> None:
    given = {"gate_up": torch.zeros(4, 96, 32), "down": torch.zeros(4, 32, 48)} | {
        name: tensor for name, tensor in change.items() if name not in ("x", "router_weights")
    }
    routed = route_rows(torch.zeros(5, 2, dtype=torch.int32), 4)
    with launches() as log, pytest.raises(SpecError, match=field):
        expert_mlp(
            change.get("x", torch.zeros(5, 32)), ExpertWeights(**given), routed,
            change.get("router_weights", torch.ones(5, 2)), Gate(),
        )  # fmt: skip
    assert not log


def test_a_gate_names_its_activations() -> None:
    for wrong in ("SWIGLU", 1):
        with pytest.raises(SpecError, match=r"activation = .*: must be one of Activation\.NONE, .*Activation\.RELU2"):
            Gate(activation=wrong)  # type: ignore[arg-type]


def test_wrong_operands_of_the_sums_are_named() -> None:
    position, source = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    y, weights, rows = torch.zeros(6, 4), torch.ones(3, 2), expert_rows(torch.tensor([0, 6], dtype=torch.int32), 6)
    for field, call in {
        "position.shape": lambda: gather_sum(y, position.flatten()),
        "position.dtype": lambda: gather_sum(y, position.float()),
        "weights.shape": lambda: gather_sum(y, position, weights[:2]),
        "weights.dtype": lambda: gather_sum(y, position, weights.int()),
        "source.shape": lambda: gather_sum_backward(y[:3], y, source[:5], rows, position, weights),
        "source.dtype": lambda: gather_sum_backward(y[:3], y, source.float(), rows, position, weights),
        r"y\.dtype.*like grad": lambda: gather_sum_backward(y[:3], y.half(), source, rows, position, weights),
        "partials.shape": lambda: router_weight_gradient(torch.zeros(6), position),
        "partials.dtype": lambda: router_weight_gradient(torch.zeros(6, 2, dtype=torch.float16), position),
        "position.shape = ": lambda: router_weight_gradient(torch.zeros(6, 2), position.flatten()),
        "position.dtype = ": lambda: router_weight_gradient(torch.zeros(6, 2), position.float()),
    }.items():
        with pytest.raises(SpecError, match=field):
            call()


def test_strided_sources_give_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    position, source, offsets = place(random_ids(9, 5, 2, generator), 5)
    rows, y, grad = (
        expert_rows(offsets, 18),
        torch.randn(18, 7, generator=generator),
        torch.randn(9, 7, generator=generator),
    )
    weights, wide = torch.rand(9, 2, generator=generator), source.repeat_interleave(2)
    wide[1::2] = 1
    want = gather_sum_backward(grad, y, source, rows, position, weights)
    got = gather_sum_backward(grad, y, wide[::2], rows, position, weights)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("tokens", "hidden", "top_k"), [(1, 1, 1), (9, 33, 3), (20, 520, 2), (5, 64, 22)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather_sum_and_its_backward(tokens: int, hidden: int, top_k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = random_ids(tokens, 30, top_k, generator, dropped=0.2)
    position, source, offsets = place(ids, 30)
    rows = expert_rows(offsets, ids.numel())
    y = torch.randn(ids.numel(), hidden, generator=generator).to(dtype)
    y[int(offsets[-1]) :] = torch.nan
    router, grad = torch.rand(tokens, top_k, generator=generator), torch.randn(tokens, hidden, generator=generator)
    grad = grad.to(dtype)
    for weights in (router, None):
        with poisoned_memory():
            out = gather_sum(y, position, weights)
        want = reference.gather_sum(y.double(), position, None if weights is None else weights.double())
        assert_near("out", out, want, ratio={torch.float32: 1e-6, torch.bfloat16: 3e-3}[dtype])
    with poisoned_memory():
        d_y, d_router = gather_sum_backward(grad, y, source, rows, position, router)
    want_y, want_router = reference.gather_sum_backward(
        grad.double(), y.double(), source, offsets, position, router.double()
    )
    assert_near("d y", d_y, want_y, ratio=3e-3)
    assert_near("d weights", d_router, want_router, ratio=1e-5)
    assert torch.equal(gather_sum(y.mT.contiguous().mT, position, router), gather_sum(y, position, router))
    expanded = gather_sum_backward(grad[:1].expand(tokens, hidden), y, source, rows, position, router)
    plain = gather_sum_backward(grad[:1].repeat(tokens, 1), y, source, rows, position, router)
    assert all(torch.equal(a, b) for a, b in zip(expanded, plain, strict=True))


def test_router_weight_gradient_sums_in_order() -> None:
    partials = torch.randn(12, 37, generator=torch.Generator().manual_seed(0))
    position = torch.tensor([[3, -1], [0, 11], [-1, 5]], dtype=torch.int32)
    got = router_weight_gradient(partials, position)
    assert_near("d weights", got, reference.router_weight_gradient(partials.double(), position), ratio=1e-6)
    assert got[0, 1] == 0 and got[2, 0] == 0


def _every_kernel(budget: SmBudget, trace: Trace) -> None:
    """Routing, both classes of products, forward and backward, and the zeroing of rows that belong to nobody."""
    logits, rule = torch.randn(33, 5), RouterRule(top_k=3)
    run = Run(budget=budget, trace=trace)
    chosen, _ = topk(logits, rule, budget=budget, trace=trace)
    topk_backward(torch.ones(33, 3), logits, chosen, rule, budget=budget, trace=trace)
    for hidden, intermediate, bias in [(32, 48, True), (11, 13, False)]:
        generator = torch.Generator().manual_seed(0)
        weights = random_weights(5, hidden, intermediate, Gate(), torch.float32, generator, bias=bias)
        leaves = map_weights(weights, lambda tensor: tensor.requires_grad_())
        x = torch.randn(33, hidden, generator=generator).requires_grad_()
        router = torch.rand(33, 3, generator=generator).requires_grad_()
        routed = route_rows(chosen, 5, budget=budget, trace=trace)
        expert_mlp(x, leaves, routed, router, Gate(), run=run).sum().backward()
        rows_gemm(torch.randn(99, hidden), weights.gate_up.detach(), routed.rows, run=run)


def test_every_grid_obeys_the_budget_and_can_be_read_back() -> None:
    """Case: a sweep over SMs that silently ran the default grid. The trace is what the programs themselves wrote."""
    kernels = set()
    for budget in (SmBudget(132, 127), SmBudget(3, 2), SmBudget(1)):
        trace = Trace()
        with launches() as log:
            _every_kernel(budget, trace)
        assert max(launch.grid[0] for launch in log) == budget.compute
        assert [(entry.kernel, len(entry.programs())) for entry in trace.launches] == [
            (launch.kernel, launch.grid[0]) for launch in log
        ]
        for entry in trace.launches:
            assert entry.programs() == list(range(entry.places.shape[0])) and entry.sms() == set(entry.programs())
        kernels |= {launch.kernel for launch in log}
    assert kernels == _kernels_in_sources()


def test_zeroing_rows_of_nobody_obeys_the_budget() -> None:
    """More blocks of rows than SMs: every row behind the end is zero and no other is touched, in any order."""
    rows = expert_rows(torch.tensor([0, 3], dtype=torch.int32), 300)
    for sms, order in [(1, "sequential"), (3, "reversed"), (7, "shuffled"), (132, "parallel")]:
        out, trace = torch.ones(300, 130), Trace()
        with program_order(order, seed=sms):
            zero_rows_behind(out, rows, Run(budget=SmBudget(sms), trace=trace))
        assert trace.launches[0].programs() == list(range(min(sms, 10)))
        assert out[:3].all() and not out[3:].any()


def _kernels_in_sources() -> set[str]:
    """Names of the kernels that host code launches, of everything but the transport."""
    found: set[str] = set()
    for file in (Path(__file__).parents[2] / "kernels").glob("*_kernels.py"):
        if not file.name.startswith(("transport", "peer")):
            text = file.read_text(encoding="utf-8")
            found |= set(re.findall(r"@triton\.jit\(launch_metadata=.*\)\ndef (\w+)", text))
    return found
