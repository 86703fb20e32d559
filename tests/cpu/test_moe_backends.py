"""The experts behind one interface: every backend against loops, in outputs and gradients, whatever comes in."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from tessera_rt.errors import SpecError
from tessera_rt.kernels.options import Activation, Gate
from tessera_rt.kernels.weights import ExpertWeights
from tessera_rt.moe.backends import Backend, backend_for, grouped_experts, routed_experts
from tessera_rt.testing.kernel_checks import poisoned_memory
from tessera_rt.testing.moe_loops import expert_by_loop

CPU = torch.device("cpu")
GATES = {
    "swiglu": Gate(),
    "interleaved": Gate(interleaved=True),
    "clamped": Gate(activation=Activation.SWIGLU_CLAMPED, limit=0.5),
    "oss": Gate(activation=Activation.SWIGLU_OSS, interleaved=True, limit=0.6),
    "geglu": Gate(activation=Activation.GEGLU),
    "geglu tanh": Gate(activation=Activation.GEGLU_TANH, interleaved=True),
    "relu2": Gate(activation=Activation.RELU2),
}
ROUTED = [[0, 1], [1, 3], [-1, 0], [5, 1], [3, 0], [4, 4], [0, 3]]  # of 4 experts; nobody chooses expert 2


def made_weights(
    gate: Gate = GATES["swiglu"],
    *,
    experts: int = 4,
    hidden: int = 6,
    intermediate: int = 5,
    bias: bool = False,
    transposed: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 1,
) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)
    product = 2 * intermediate if gate.gated else intermediate

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * 0.7).to(dtype)

    gate_up, down = draw(experts, product, hidden), draw(experts, hidden, intermediate)
    biases = (draw(experts, product), draw(experts, hidden)) if bias else ()
    if transposed:  # stored as [E, H, 2 I] and [E, I, H]; the leaves are what is stored
        stored = [weight.mT.contiguous().requires_grad_() for weight in (gate_up, down)]
        return ExpertWeights(*(weight.mT for weight in stored), *(b.requires_grad_() for b in biases))
    return ExpertWeights(*(weight.requires_grad_() for weight in (gate_up, down, *biases)))


def tensors(weights: ExpertWeights) -> list[Tensor]:
    found = (weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias)
    return [tensor for tensor in found if tensor is not None]


def double(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_loop(x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, gate: Gate) -> Tensor:
    rows = []
    for t, chosen in enumerate(ids.tolist()):
        out = x[t] * 0
        for k, e in enumerate(chosen):
            if 0 <= e < len(experts.gate_up):
                out = out + weights[t, k] * expert_by_loop(x[t], e, experts, gate)
        rows.append(out)
    return torch.stack(rows) if rows else x * 0


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_routed_experts_equal_the_loop(gate: str, bias: bool, transposed: bool) -> None:
    experts = made_weights(GATES[gate], bias=bias, transposed=transposed)
    ids = torch.tensor(ROUTED, dtype=torch.int32)
    x, weights = double(7, 6).requires_grad_(), double(7, 2, seed=2).requires_grad_()
    out = routed_experts(x, ids, weights, experts, GATES[gate])
    expected = by_loop(x, ids, weights, experts, GATES[gate])
    close(out, expected)
    upstream, inputs = double(7, 6, seed=3), [x, weights, *tensors(experts)]
    gradients = torch.autograd.grad(out, inputs, upstream)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, inputs, upstream), strict=True):
        close(gradient, wanted)
    assert (gradients[1][torch.tensor(ROUTED) > 3] == 0).all() and gradients[1][2, 0] == 0
    assert all((gradient[2] == 0).all() for gradient in gradients[2:])  # exact zeros for the expert without tokens


@pytest.mark.parametrize("counts", [[5, 0, 3, 0], [0, 0, 0, 0], [1, 2, 3, 4], [90, 0, 1, 40]])
@pytest.mark.parametrize("gate", ["swiglu", "oss", "relu2"])
def test_grouped_experts_equal_the_loop_and_leave_free_rows_alone(gate: str, counts: list[int]) -> None:
    experts, total = made_weights(GATES[gate], bias=True), sum(counts)
    rows = double(total + 3, 6)
    rows[total:] = float("nan")  # rows of nobody may hold anything
    leaf = rows.clone().requires_grad_()
    out = grouped_experts(leaf, torch.tensor([0, *accumulate(counts)]), experts, GATES[gate])
    expert_of = [e for e, count in enumerate(counts) for _ in range(count)]
    loop_leaf = rows[:total].clone().requires_grad_()
    parts = [expert_by_loop(row, e, experts, GATES[gate]) for row, e in zip(loop_leaf, expert_of, strict=True)]
    expected = torch.stack(parts) if parts else loop_leaf * 0
    close(out[:total], expected)
    assert (out[total:] == 0).all()
    upstream = double(total + 3, 6, seed=3)
    gradients = torch.autograd.grad(out, [leaf, *tensors(experts)], upstream)
    wanted = torch.autograd.grad(expected, [loop_leaf, *tensors(experts)], upstream[:total], allow_unused=True)
    assert (gradients[0][total:] == 0).all()
    close(gradients[0][:total], wanted[0])
    for gradient, of_loop in zip(gradients[1:], wanted[1:], strict=True):
        close(gradient, torch.zeros_like(gradient) if of_loop is None else of_loop)
        assert all((gradient[e] == 0).all() for e, count in enumerate(counts) if count == 0)


@pytest.mark.parametrize("gate", ["swiglu", "oss"])
def test_gradients_pass_gradcheck(gate: str) -> None:
    experts, ids = made_weights(GATES[gate], bias=True, hidden=3, intermediate=2), torch.tensor(ROUTED)

    def run(x: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        return routed_experts(x, ids, weights, ExpertWeights(*parameters), GATES[gate])

    x, weights = double(7, 3).requires_grad_(), double(7, 2, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(run, (x, weights, *tensors(experts)))


# -- the Triton backend through the same interface (in the interpreter) -----------------------------------------------


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("gate", ["swiglu", "oss"])
def test_both_backends_agree(gate: str) -> None:
    experts = made_weights(GATES[gate], bias=gate == "oss", hidden=16, intermediate=16, dtype=torch.float32)
    ids, x = torch.tensor(ROUTED), double(7, 16).float().requires_grad_()
    weights = double(7, 2, seed=2).float().requires_grad_()
    offsets = torch.tensor([0, 2, 2, 5, 6])
    results = []
    for name in ("torch", "triton"):
        for out, inputs in (
            (routed_experts(x, ids, weights, experts, GATES[gate], backend=name), [x, weights, *tensors(experts)]),
            (grouped_experts(x, offsets, experts, GATES[gate], backend=name), [x, *tensors(experts)]),
        ):
            results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for of_torch, of_triton in zip(results[:2], results[2:], strict=True):
        for a, b in zip(of_torch, of_triton, strict=True):
            close(a, b, 1e-4)


def test_backends_are_chosen_by_device_and_by_name() -> None:
    chosen: Backend = backend_for(CPU)
    assert chosen.name == "torch" and repr(chosen) == "TorchBackend()"
    assert backend_for(torch.device("cuda")).name == "triton"  # the choice itself needs no GPU
    with pytest.raises(SpecError, match="torch or triton"):
        backend_for(CPU, "cublas")


# -- what comes in ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 32), (33, 17)])
def test_low_precision_is_within_one_rounding_of_the_exact_result(
    dtype: torch.dtype, hidden: int, intermediate: int
) -> None:
    generator = torch.Generator().manual_seed(5)
    ids = torch.stack([torch.randperm(8, generator=generator)[:4] for _ in range(50)])
    experts = made_weights(experts=8, hidden=hidden, intermediate=intermediate, dtype=dtype)
    x = double(50, hidden).to(dtype).requires_grad_()
    weights = torch.rand(50, 4, generator=generator).requires_grad_()
    exact_experts = ExpertWeights(*(tensor.detach().double().requires_grad_() for tensor in tensors(experts)))
    exact_x, exact_weights = (tensor.detach().double().requires_grad_() for tensor in (x, weights))
    out = routed_experts(x, ids, weights, experts, Gate())
    expected = routed_experts(exact_x, ids, exact_weights, exact_experts, Gate())
    upstream = double(50, hidden, seed=3).to(dtype)
    gradients = torch.autograd.grad(out, [x, weights, *tensors(experts)], upstream)
    wanted = torch.autograd.grad(expected, [exact_x, exact_weights, *tensors(exact_experts)], upstream.double())
    # Output: one rounding of the largest value. Gradients: two, since their factors are rounded too. Fp32 rounds sums.
    unit = torch.finfo(dtype).eps * (32 if dtype == torch.float32 else 1)
    for actual, exact, roundings in zip((out, *gradients), (expected, *wanted), (1, 2, 2, 2, 2), strict=True):
        assert (actual.double() - exact).abs().max() <= roundings * unit * exact.abs().max()
    assert out.dtype == gradients[0].dtype == dtype and gradients[1].dtype == torch.float32


@pytest.mark.parametrize("tokens", [0, 1, 2, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257])
def test_every_token_count(tokens: int) -> None:
    """Experts that are all x |x|, weights of 1 / K: every row comes back, once."""
    eye = torch.eye(6, dtype=torch.float64).expand(8, 6, 6)
    experts = ExpertWeights(torch.cat([eye, -eye], 1), torch.cat([eye, -eye], 2))  # relu(x)^2 - relu(-x)^2 = x |x|
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, 8, generator=generator).argsort(1)[:, :2]
    x, weights = double(tokens, 6), torch.full((tokens, 2), 0.5, dtype=torch.float64)
    close(routed_experts(x, ids, weights, experts, GATES["relu2"]), x * x.abs())


@pytest.mark.parametrize("reduce", ["sum", "cat", "transpose"])
def test_any_strides_in_and_out(reduce: str) -> None:
    def reduced(y: Tensor) -> Tensor:
        if reduce == "sum":
            return y.sum()
        return (torch.cat([y, y], -1) * torch.arange(12)).sum() if reduce == "cat" else (y.mT @ double(7, 3)).sum()

    experts, ids = made_weights(), torch.tensor(ROUTED)
    wide, weights = double(6, 14), double(2, 7, seed=2)
    results = []
    for x, w, i in (
        (wide.mT[::2], weights.mT, ids.mT.contiguous().mT),
        (wide.mT[::2].contiguous(), weights.mT.contiguous(), ids),
    ):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        out = routed_experts(x, i, w, experts, Gate())
        results.append((out, *torch.autograd.grad(reduced(out), [x, w, *tensors(experts)])))
    for a, b in zip(*results, strict=True):
        close(a, b, 1e-13)


def test_no_unwritten_memory_is_read() -> None:
    """Two steps with free rows in the buffers and memory that starts as NaN."""
    experts, ids = made_weights(), torch.tensor(ROUTED)
    x, weights = double(7, 6).requires_grad_(), double(7, 2, seed=2).requires_grad_()
    rows = double(16, 6).requires_grad_()
    offsets = torch.tensor([0, 6, 6, 12, 13])
    with poisoned_memory():
        for _ in range(2):
            total = routed_experts(x, ids, weights, experts, Gate()).sum()
            total = total + grouped_experts(rows, offsets, experts, Gate()).sum()
            gradients = torch.autograd.grad(total, [x, weights, rows, *tensors(experts)])
            assert total.isfinite() and all(gradient.isfinite().all() for gradient in gradients)


def test_gradients_come_only_where_they_are_wanted() -> None:
    experts, ids = made_weights(bias=True), torch.tensor(ROUTED)
    x, weights = double(7, 6).requires_grad_(), double(7, 2, seed=2).requires_grad_()
    leaves = [x, weights, *tensors(experts)]
    whole = torch.autograd.grad(routed_experts(x, ids, weights, experts, Gate()).square().sum(), leaves)
    for wanted in range(len(leaves)):
        for i, leaf in enumerate(leaves):
            leaf.requires_grad_(i == wanted)
        out = routed_experts(x, ids, weights, experts, Gate())
        close(torch.autograd.grad(out.square().sum(), leaves[wanted])[0], whole[wanted])
    for leaf in leaves:
        leaf.requires_grad_(False)
    assert not routed_experts(x, ids, weights, experts, Gate()).requires_grad


def test_a_graph_may_be_walked_twice_but_not_differentiated_twice() -> None:
    experts, ids = made_weights(), torch.tensor(ROUTED)
    x, weights = double(7, 6).requires_grad_(), double(7, 2, seed=2)
    out = routed_experts(x, ids, weights, experts, Gate()).square().sum()
    first = torch.autograd.grad(out, [x, *tensors(experts)], retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(out, [x, *tensors(experts)]), strict=True):
        assert torch.equal(a, b)
    (gradient,) = torch.autograd.grad(routed_experts(x, ids, weights, experts, Gate()).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


def test_a_gradient_becomes_the_parameters_own_without_a_copy() -> None:
    experts = made_weights(experts=8, hidden=512, intermediate=512, dtype=torch.float32)  # large enough for a mapping
    ids, x = torch.arange(8).unsqueeze(1), double(8, 512).float()
    made = []

    def note(gradient: Tensor) -> None:
        made.append(gradient.data_ptr())

    experts.gate_up.register_hook(note)
    routed_experts(x, ids, torch.ones(8, 1), experts, Gate()).sum().backward()
    assert experts.gate_up.grad is not None and made == [experts.gate_up.grad.data_ptr()]


def test_autocast_runs_the_products_in_its_dtype_and_leaves_float64_alone() -> None:
    experts, ids = made_weights(dtype=torch.float32), torch.tensor(ROUTED)
    x, weights = double(7, 6).float().requires_grad_(), double(7, 2, seed=2).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = routed_experts(x, ids, weights, experts, Gate())
    low = ExpertWeights(*(tensor.detach().bfloat16() for tensor in tensors(experts)))
    assert out.dtype == torch.float32
    assert torch.equal(out, routed_experts(x.detach().bfloat16(), ids, weights, low, Gate()).float())
    gradients = torch.autograd.grad(out.sum(), [x, *tensors(experts)])
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    exact = made_weights()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = routed_experts(double(7, 6), ids, double(7, 2), exact, Gate())
    assert torch.equal(inside, routed_experts(double(7, 6), ids, double(7, 2), exact, Gate()))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"x": double(7, 5)}, "x.shape"),
        ({"ids": torch.zeros(6, 2, dtype=torch.int64)}, "ids.shape"),
        ({"ids": torch.zeros(7, 2)}, "ids.dtype"),
        ({"weights": double(7, 3)}, "weights.shape"),
        ({"x": double(7, 6).float()}, "gate_up.dtype"),
        ({"experts": ExpertWeights(double(4, 10, 6), double(4, 5, 6))}, "down.shape"),
        ({"experts": ExpertWeights(double(4, 10, 6), double(4, 6, 5), double(4, 9))}, "gate_up_bias.shape"),
        ({"experts": ExpertWeights(double(4, 9, 6), double(4, 6, 4))}, "gate_up.shape"),
        ({"experts": ExpertWeights(double(10, 6), double(4, 6, 5))}, "gate_up.shape"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(change: dict[str, Any], field: str) -> None:
    given = {"x": double(7, 6), "ids": torch.tensor(ROUTED), "weights": double(7, 2), "experts": made_weights()}
    with pytest.raises(SpecError) as caught:
        routed_experts(**(given | change), gate=Gate())
    assert field in {problem.field for problem in caught.value.problems}


# -- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fullgraph", [True, False])
def test_changing_counts_compile_at_most_twice(fullgraph: bool) -> None:
    """Case 74; without ``fullgraph`` a shape that depends on values would break the graph."""
    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounterWithBackend("aot_eager")
    experts = made_weights(experts=2, dtype=torch.float32)
    gate, weights = Gate(), torch.ones(8, 1)

    def layer(x: Tensor, ids: Tensor) -> Tensor:
        return routed_experts(x * 2, ids, weights, experts, gate) + 1

    compiled = torch.compile(layer, backend=counter, fullgraph=fullgraph)
    for counts in ([8, 0], [0, 8], [4, 4], [1, 7], [3, 5], [8, 0]):
        ids = torch.tensor([0] * counts[0] + [1] * counts[1]).unsqueeze(1)
        x = double(8, 6).float().requires_grad_()
        results = []
        for function in (compiled, layer):
            out = function(x, ids)
            results.append((out, *torch.autograd.grad(out.square().sum(), [x, *tensors(experts)])))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count <= 2 and not counters["graph_break"]


def test_kernels_are_one_step_to_the_compiler(interpreted: None) -> None:
    """It does not look into launches: graphs around them, as many for any number of tokens."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    experts, gate = made_weights(experts=4, dtype=torch.float32), Gate()

    def layer(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return routed_experts(x * 2, ids, weights, experts, gate, backend="triton") + 1

    compiled, made = torch.compile(layer, backend=counter, dynamic=True), []
    for tokens in (8, 5, 7, 6):
        ids, weights = torch.arange(2 * tokens).view(tokens, 2) % 4, torch.rand(tokens, 2)
        x, results = double(tokens, 6).float().requires_grad_(), []
        for function in (compiled, layer):
            out = function(x, ids, weights)
            results.append((out, *torch.autograd.grad(out.square().sum(), [x, *tensors(experts)])))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
        made.append(counter.frame_count)
    torch._dynamo.reset()
    assert made[1] == made[3]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("offsets", [[0, 5, 14], [0, 8, 7], [0, -8, 2], [3, 4, 5]])
def test_offsets_that_do_not_rise_within_the_rows_are_refused(backend: str, offsets: list[int]) -> None:
    experts = ExpertWeights(torch.randn(2, 8, 4), torch.randn(2, 4, 4))
    with pytest.raises(RuntimeError, match="offsets must rise from 0 to at most the 10 rows"):
        grouped_experts(torch.randn(10, 4), torch.tensor(offsets), experts, Gate(), backend=backend)
