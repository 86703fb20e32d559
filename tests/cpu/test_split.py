"""Split linears: the same numbers as full backward, whatever the shapes, strides, sharing and order of W."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from tessera_rt.errors import SpecError
from tessera_rt.split import (
    GroupedLinear,
    PendingGrad,
    SplitLinear,
    accumulate,
    grouped_linear,
    linear,
    split_linear,
)


class ListSink:
    """Collects pending gradients; ``flush`` runs W for all of them into buffers by parameter."""

    def __init__(self) -> None:
        self.pending: list[PendingGrad] = []

    def defer(self, pending: PendingGrad) -> None:
        self.pending.append(pending)

    def flush(self, dtype: torch.dtype = torch.float64) -> dict[nn.Parameter, Tensor]:
        buffers: dict[nn.Parameter, Tensor] = {}
        for pending in self.pending:
            accumulate(pending, buffers.setdefault(pending.weight, torch.zeros_like(pending.weight, dtype=dtype)))
        return buffers


def double(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN, so that nothing can rely on what it happened to hold."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (0, 4), (2, 0, 4)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_passes_gradcheck(shape: tuple[int, ...], with_bias: bool) -> None:
    x, weight = double(*shape).requires_grad_(), double(5, 4, seed=1).requires_grad_()
    bias = double(5, seed=2).requires_grad_() if with_bias else None
    assert torch.equal(linear(x, weight, bias), functional.linear(x, weight, bias))
    assert torch.autograd.gradcheck(linear, (x, weight, bias))


@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 0], [0, 4, 0], [1, 1, 1]])
def test_grouped_linear_passes_gradcheck(counts: list[int], poisoned_memory: None) -> None:
    offsets = (0, counts[0], counts[0] + counts[1], sum(counts))
    x, weight = double(sum(counts), 4).requires_grad_(), double(3, 5, 4, seed=1).requires_grad_()
    out = grouped_linear(x, weight, offsets)
    for e in range(3):
        rows = slice(offsets[e], offsets[e + 1])
        torch.testing.assert_close(out[rows], x[rows] @ weight[e].T, rtol=1e-14, atol=0)
    assert torch.autograd.gradcheck(lambda x, w: grouped_linear(x, w, offsets), (x, weight))
    (gradient,) = torch.autograd.grad(out.sum(), weight)
    assert all(torch.equal(gradient[e], torch.zeros(5, 4).double()) for e in range(3) if counts[e] == 0)


def strided(gradient: Tensor, kind: str) -> Tensor:
    """The same values (stride-0: one value everywhere) with other strides."""
    match kind:
        case "expanded":
            return gradient.flatten()[:1].sum().expand(gradient.shape)
        case "transposed":
            return gradient.mT.contiguous().mT
        case "part of cat":
            return torch.cat([gradient, gradient], -1)[..., : gradient.shape[-1]]
    return gradient


@given(
    batch=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    inputs=st.integers(1, 5),
    outputs=st.integers(1, 5),
    kind=st.sampled_from(["plain", "expanded", "transposed", "part of cat"]),
    transposed_x=st.booleans(),
)
def test_deferred_linear_equals_full_backward(
    batch: list[int], inputs: int, outputs: int, kind: str, transposed_x: bool
) -> None:
    x = double(*batch, inputs)
    if transposed_x:
        x = x.mT.contiguous().mT
    weight, bias = nn.Parameter(double(outputs, inputs, seed=1)), nn.Parameter(double(outputs, seed=2))
    upstream = strided(double(*batch, outputs, seed=3), kind)

    expected_x = x.clone().requires_grad_()
    functional.linear(expected_x, weight, bias).backward(upstream)
    expected_weight, expected_bias = weight.grad, bias.grad
    weight.grad = bias.grad = None

    sink, leaf = ListSink(), x.detach().requires_grad_()
    linear(leaf, weight, bias, sink).backward(upstream)
    assert weight.grad is None
    torch.testing.assert_close(leaf.grad, expected_x.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(bias.grad, expected_bias, rtol=1e-12, atol=1e-12)
    assert len(sink.pending) == 1
    assert sink.pending[0].x.shape == (upstream.numel() // outputs, inputs)
    torch.testing.assert_close(sink.flush()[weight], expected_weight, rtol=1e-12, atol=1e-12)


@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    kind=st.sampled_from(["plain", "expanded", "transposed", "part of cat"]),
    transposed_x=st.booleans(),
)
def test_deferred_grouped_linear_equals_a_loop(counts: list[int], kind: str, transposed_x: bool) -> None:
    offsets = [sum(counts[:e]) for e in range(len(counts) + 1)]
    x = double(sum(counts), 3)
    if transposed_x:
        x = x.T.contiguous().T
    weight = nn.Parameter(double(len(counts), 2, 3, seed=1))
    upstream = strided(double(sum(counts), 2, seed=3), kind)

    expected_x = x.clone().requires_grad_()
    parts = [expected_x[offsets[e] : offsets[e + 1]] @ weight[e].T for e in range(len(counts))]
    torch.cat(parts).backward(upstream)
    expected_weight, weight.grad = weight.grad, None

    sink, leaf = ListSink(), x.detach().requires_grad_()
    grouped_linear(leaf, weight, offsets, sink).backward(upstream)
    assert weight.grad is None
    torch.testing.assert_close(leaf.grad, expected_x.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sink.flush()[weight], expected_weight, rtol=1e-12, atol=1e-12)


def test_weight_used_twice_is_not_counted_twice() -> None:
    layer, x = SplitLinear(8, 8, dtype=torch.float64), double(3, 8)
    expected = torch.autograd.grad(layer(functional.gelu(layer(x))).square().sum(), [layer.weight, layer.bias])
    layer.sink = sink = ListSink()
    layer(functional.gelu(layer(x))).square().sum().backward()
    assert len(sink.pending) == 2
    torch.testing.assert_close(sink.flush()[layer.weight], expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.bias.grad, expected[1], rtol=1e-12, atol=1e-12)


def test_tied_linears_and_micro_batches_accumulate_onto_what_is_there() -> None:
    first, second = SplitLinear(16, 16, dtype=torch.float64), SplitLinear(16, 16, dtype=torch.float64)
    second.weight, second.bias = first.weight, first.bias

    def loss(microbatch: int) -> Tensor:
        return second(torch.tanh(first(double(2, 16, seed=microbatch)))).square().sum()

    expected = [torch.autograd.grad(loss(m), [first.weight, first.bias]) for m in (0, 1)]
    first.sink = second.sink = sink = ListSink()
    first.bias.grad = torch.ones_like(first.bias)
    main_grad = torch.ones_like(first.weight)
    address = main_grad.data_ptr()
    for m in (0, 1):
        loss(m).backward()
    for pending in sink.pending:
        accumulate(pending, main_grad)
    assert main_grad.data_ptr() == address and not main_grad.requires_grad and len(sink.pending) == 4
    torch.testing.assert_close(main_grad, 1 + expected[0][0] + expected[1][0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(first.bias.grad, 1 + expected[0][1] + expected[1][1], rtol=1e-12, atol=1e-12)


def test_main_gradient_is_accumulated_in_its_own_precision() -> None:
    weight = nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    ones = torch.ones(1, 1, dtype=torch.bfloat16)
    main_grad = torch.full((1, 1), 256.0)
    for _ in range(3):
        accumulate(PendingGrad(weight, ones, ones), main_grad)  # 256 + 1 is 256 in bf16
    assert main_grad.item() == 259.0
    grouped = PendingGrad(nn.Parameter(torch.zeros(2, 1, 1, dtype=torch.bfloat16)), ones, ones, (0, 0, 1))
    buffer = torch.full((2, 1, 1), 256.0)
    accumulate(grouped, buffer)
    assert buffer.flatten().tolist() == [256.0, 257.0]


def test_accumulation_leaves_experts_without_rows_alone(poisoned_memory: None) -> None:
    layer = GroupedLinear(4, 16, 32, dtype=torch.float64)
    nn.init.normal_(layer.weight)
    layer.sink = sink = ListSink()
    layer(double(8, 16).requires_grad_(), (0, 5, 5, 8, 8)).sum().backward()
    gradient = sink.flush()[layer.weight]
    assert torch.equal(gradient[[1, 3]], torch.zeros(2, 32, 16).double())
    assert gradient.isfinite().all() and (gradient[[0, 2]] != 0).all()


def test_frozen_weights_defer_nothing() -> None:
    sink, x = ListSink(), double(2, 4).requires_grad_()
    layer = SplitLinear(4, 4, dtype=torch.float64).requires_grad_(False)
    layer.sink = sink
    weight = nn.Parameter(double(1, 4, 4), requires_grad=False)
    grouped_linear(layer(x), weight, (0, 2), sink).sum().backward()
    assert sink.pending == [] and x.grad is not None


def test_only_the_weight_requires_a_gradient() -> None:
    sink, weight = ListSink(), nn.Parameter(double(3, 4))
    linear(double(2, 4), weight, None, sink).sum().backward()
    assert len(sink.pending) == 1 and sink.pending[0].weight is weight


def test_sink_of_the_forward_call_counts_also_from_another_thread() -> None:
    layer, sink = SplitLinear(4, 4), ListSink()
    layer.sink = sink
    out = layer(torch.ones(2, 4)).sum()
    layer.sink = None
    thread = threading.Thread(target=out.backward)
    thread.start()
    thread.join()
    assert len(sink.pending) == 1 and layer.weight.grad is None


def test_weight_keeps_its_identity_under_saved_tensor_hooks() -> None:
    layer, sink = SplitLinear(4, 4), ListSink()
    layer.sink = sink
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        out = layer(torch.ones(2, 4))
    out.sum().backward()
    assert sink.pending[0].weight is layer.weight


def test_computed_weight_gets_its_gradient_in_backward() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    x, sink = torch.ones(2, 4), ListSink()
    expected = torch.autograd.grad(model(x).sum(), list(model[0].parameters()))
    names = split_linear(model)
    model[1].sink = sink
    model(x).sum().backward()
    assert [p.weight for p in sink.pending] == [model[1].weight]
    assert all(torch.equal(p.grad, g) for p, g in zip(model[0].parameters(), expected, strict=True))
    assert set(names) == {
        "0.bias",
        "0.parametrizations.weight.original0",
        "0.parametrizations.weight.original1",
        "1.bias",
    }
    weight = nn.Parameter(double(3, 4))
    linear(double(2, 4), weight * 2, None, sink).sum().backward()
    assert len(sink.pending) == 1 and weight.grad is not None


def test_bf16_under_autocast_gives_gradients_in_the_parameters_dtype() -> None:
    layer, x = SplitLinear(8, 8), torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    layer.sink = sink = ListSink()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x.requires_grad_())
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert layer.bias.grad is not None and layer.bias.grad.dtype == torch.float32
    expected = torch.autograd.grad((x @ layer.weight.T + layer.bias).square().sum(), layer.weight)[0]
    torch.testing.assert_close(sink.flush(torch.float32)[layer.weight], expected, rtol=0.05, atol=0.05)


class OddLinear(nn.Linear):
    pass


def test_split_linear_replaces_exact_linears_and_lists_the_rest() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "a": nn.Linear(4, 4), "odd": OddLinear(4, 4)})
    model["b"], model["head"] = nn.Linear(4, 4, bias=False), nn.Linear(4, 7, bias=False)
    model["b"].weight = model["a"].weight
    model["head"].weight = model["embed"].weight
    model["odd"].weight.requires_grad_(False)
    parameters = dict(model.named_parameters())
    assert split_linear(model) == ["embed.weight", "a.bias", "odd.bias"]
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    kinds = {name: type(module) for name, module in model.items()}
    assert kinds == {"embed": nn.Embedding, "a": SplitLinear, "odd": OddLinear, "b": SplitLinear, "head": SplitLinear}
    assert model["b"].weight is model["a"].weight and model["head"].weight is model["embed"].weight
    assert split_linear(nn.Linear(2, 2)) == ["bias"]


def test_split_linear_of_a_stock_model_changes_no_number() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)).double()
    x = double(5, 6)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert split_linear(model) == ["0.bias", "2.weight", "2.bias", "3.bias"]
    sink = ListSink()
    for module in model:
        if isinstance(module, SplitLinear):
            module.sink = sink
    model(x).square().sum().backward()
    buffers = sink.flush()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        actual = parameter.grad if parameter.grad is not None else buffers[parameter]
        torch.testing.assert_close(actual, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("offsets", [(0, 2), (0, 2, 3), (1, 2, 4), (0, 5, 4), (0, 2, 2, 4)])
def test_offsets_that_do_not_cover_the_rows_are_refused(offsets: tuple[int, ...]) -> None:
    with pytest.raises(SpecError, match="offsets"):
        grouped_linear(torch.zeros(4, 3), torch.zeros(2, 5, 3), offsets)
