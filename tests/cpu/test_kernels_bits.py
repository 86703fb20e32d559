"""Every kernel gives the same bits over grids of 1, 3, 7 and all SMs and in every order of programs; a token has the
same bits whatever its neighbours are."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tessera_rt.kernels import inspection, routing
from tessera_rt.kernels.budget import SmBudget
from tessera_rt.kernels.configs import MINORS
from tessera_rt.kernels.expert_mlp import ExpertWeights, expert_mlp
from tessera_rt.kernels.gate_backward import gate_backward
from tessera_rt.kernels.gather_sum import gather_sum, gather_sum_backward, router_weight_gradient
from tessera_rt.kernels.operands import Run
from tessera_rt.kernels.options import NO_GATE, Activation, Gate, RouterRule
from tessera_rt.kernels.peer_memory import virtual_ranks
from tessera_rt.kernels.routing import ExpertRows, expert_rows, route_rows
from tessera_rt.kernels.rows_gemm import rows_gemm, zero_rows_behind
from tessera_rt.kernels.transport import PeerTransport, route_received
from tessera_rt.kernels.wgrad import bias_gradient, wgrad
from tessera_rt.testing.interpreter import Launch, independent_programs, launches, program_order
from tessera_rt.testing.kernel_checks import map_weights, offsets_of, poisoned_memory, random_ids, random_weights
from tessera_rt.testing.peer_calls import run_calls, traffic_of
from tessera_rt.testing.peer_ranks import rank_inputs, run_peers

pytestmark = pytest.mark.usefixtures("interpreted")
KERNELS = Path(__file__).parents[2] / "kernels"
ALL = 132
# (SMs, order, seed): every grid and every order
QUICK = [(1, "shuffled", 1), (3, "reversed", 0), (7, "parallel", 2), (ALL, "parallel", 3)]
EVERY = list(itertools.product((1, 3, 7, ALL), ("sequential", "reversed", "shuffled", "parallel"), (4,)))
# Kernels of one program, whatever the budget: there is nothing to divide, or only one may wait.
SINGLE = {"offsets_kernel", "tile_table_kernel", "wait_kernel"}

COUNTS = [40, 0, 33, 7]  # 80 rows in a buffer of 100: an empty expert, tails, rows of nobody
ROWS, EXPERTS, TOKENS, DIVISOR = 100, len(COUNTS), 50, 2
SIZES = {"aligned": (48, 48), "any": (46, 37)}
OSS = Gate(activation=Activation.SWIGLU_OSS, interleaved=True)


def _draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """fp32 by default: sums of few bf16 are exact in fp32, and a result in bf16 hides the order of a sum."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _rows() -> ExpertRows:
    return expert_rows(offsets_of(COUNTS), ROWS)


def _index() -> Tensor:
    return torch.randint(0, TOKENS * DIVISOR, (ROWS,), generator=torch.Generator().manual_seed(9)).int()


def _ids(tokens: int = 210, experts: int = 300, top_k: int = 3) -> Tensor:
    return random_ids(tokens, experts, top_k, torch.Generator().manual_seed(3), dropped=0.1)


RULES = [
    (RouterRule(top_k=3, score="sigmoid", renormalize=True, groups=4, keep_groups=2), True),
    (RouterRule(top_k=2), False),
]


def _choice(run: Run) -> list[Tensor]:
    logits, bias, found = _draw(33, 24, seed=0), _draw(24, seed=1), []
    for rule, biased in RULES:
        found += routing.topk(logits, rule, bias=bias if biased else None, budget=run.budget)
    return found


def _choice_backward(run: Run) -> list[Tensor]:
    logits, found = _draw(33, 24, seed=0), []
    for rule, _ in RULES:
        ids = random_ids(33, 24, rule.top_k, torch.Generator().manual_seed(2), dropped=0.2)
        grad = _draw(33, rule.top_k, seed=1)
        found.append(routing.topk_backward(grad, logits, ids, rule, budget=run.budget))
    return found


def _placement(run: Run) -> Sequence[Tensor]:
    return routing.place(_ids(), 300, budget=run.budget)


def _tiles(run: Run) -> list[Tensor]:
    tables = (routing.tile_table(offsets_of(COUNTS), ROWS, block_m, trace=run.trace) for block_m in (16, 128))
    return [part for table in tables for part in (table.count, table.entries[: int(table.count)])]


def _forward(size: str) -> Callable[[Run], list[Tensor]]:
    n, k = SIZES[size]

    def call(run: Run) -> list[Tensor]:
        found: list[Tensor | None] = []
        for gate, gathers in [(Gate(), True), (OSS, False)]:
            columns = 2 * n if gate.gated else n
            x, weight = _draw(TOKENS if gathers else ROWS, k, seed=0), _draw(EXPERTS, columns, k, seed=1)
            found += rows_gemm(
                x, weight, _rows(), index=_index() if gathers else None, divisor=DIVISOR, gate=gate,
                bias=_draw(EXPERTS, columns, seed=2) if gate is OSS else None, save_pre=True, run=run,
            )  # fmt: skip
        found += rows_gemm(_draw(ROWS, n, seed=3), _draw(EXPERTS, n, k, seed=1).mT, _rows(), kind="dgrad", run=run)
        return [tensor for tensor in found if tensor is not None]

    return call


def _gate_backward(size: str) -> Callable[[Run], list[Tensor]]:
    n, k = SIZES[size]

    def call(run: Run) -> list[Tensor]:
        found: list[Tensor] = []
        for gate, gathers in [(Gate(), True), (OSS, False)]:
            pre = _draw(ROWS, 2 * n if gate.gated else n, seed=0)
            d_pre, act, partials = gate_backward(
                _draw(TOKENS if gathers else ROWS, k, seed=1), _draw(EXPERTS, n, k, seed=2), pre, _rows(), gate=gate,
                index=_index() if gathers else None, divisor=DIVISOR,
                scale=_draw(TOKENS * DIVISOR, seed=3) if gathers else None, partials=True, run=run,
            )  # fmt: skip
            assert partials is not None
            found += [d_pre, act, partials[: sum(COUNTS)]]
        return found

    return call


def _wgrad(size: str) -> Callable[[Run], list[Tensor]]:
    n, k = SIZES[size]

    def one(gather: str, accumulate: bool, run: Run) -> Tensor:
        grad, x = (_draw(TOKENS if gather == side else ROWS, w, seed=w) for side, w in (("grad", n), ("x", k)))
        return wgrad(
            grad, x, _rows(), torch.ones(EXPERTS, n, k), accumulate=accumulate, index=_index() if gather else None,
            divisor=DIVISOR if gather else 1, gather_grad=gather == "grad", gather_x=gather == "x", run=run,
        )  # fmt: skip

    return lambda run: [one("", False, run), one("grad", True, run), one("x", True, run)]


def _bias_gradient(run: Run) -> list[Tensor]:
    """Experts with more than the 64 rows of a block."""
    rows, grad = expert_rows(offsets_of([100, 0, 33, 70]), 250), _draw(250, 130, seed=0)
    return [bias_gradient(grad, rows, torch.ones(4, 130), accumulate=add, run=run) for add in (False, True)]


def _zeroing(run: Run) -> list[Tensor]:
    out = torch.ones(400, 130)
    zero_rows_behind(out, expert_rows(offsets_of(COUNTS), 400), run)
    return [out]


def _gathered() -> tuple[Tensor, Tensor, ExpertRows, Tensor, Tensor]:
    """Positions, sources, rows of 70 x 3 choices, some dropped; y and weights."""
    position, source, offsets = routing.place(_ids(70, 30), 30)
    return (
        position,
        source,
        expert_rows(offsets, 210),
        _draw(210, 40, seed=0),
        _draw(70, 3, seed=1),
    )


def _gather_sum(run: Run) -> list[Tensor]:
    position, _, _, y, weights = _gathered()
    return [gather_sum(y, position, weights, run=run), gather_sum(y, position, run=run)]


def _gather_sum_backward(run: Run) -> Sequence[Tensor]:
    """Rows of more than a block of 512."""
    position, source, rows, _, weights = _gathered()
    return gather_sum_backward(
        _draw(70, 520, seed=2), _draw(210, 520, seed=0), source, rows, position, weights, run=run
    )


def _router_gradient(run: Run) -> list[Tensor]:
    partials = _draw(2000, 37, seed=0)
    position = torch.randperm(2000, generator=torch.Generator().manual_seed(1)).int().view(1000, 2)
    return [router_weight_gradient(partials, position.masked_fill(position % 7 == 0, -1), run=run)]


def _limited(run: Run) -> list[Tensor]:
    routed = route_received(_ids(400, 6), 6, 500, run=run)
    return [routed.position, routed.source, routed.rows.offsets]


CALLS: dict[str, tuple[Callable[[Run], Sequence[Tensor]], tuple[str, ...]]] = {
    "choice": (_choice, ("topk_forward_kernel",)),
    "choice-backward": (_choice_backward, ("topk_backward_kernel",)),
    "placement": (_placement, ("histogram_kernel", "tile_scan_kernel", "offsets_kernel", "place_kernel")),
    "tiles": (_tiles, ("tile_table_kernel",)),
    "forward-aligned": (_forward("aligned"), ("rows_gemm_aligned",)),
    "forward-any": (_forward("any"), ("rows_gemm_any",)),
    "gate-backward-aligned": (_gate_backward("aligned"), ("gate_backward_aligned",)),
    "gate-backward-any": (_gate_backward("any"), ("gate_backward_any",)),
    "wgrad-aligned": (_wgrad("aligned"), ("wgrad_aligned",)),
    "wgrad-any": (_wgrad("any"), ("wgrad_any",)),
    "bias-gradient": (_bias_gradient, ("bias_gradient_kernel",)),
    "zeroing": (_zeroing, ("zero_tail_kernel",)),
    "gather-sum": (_gather_sum, ("gather_sum_kernel",)),
    "gather-sum-backward": (_gather_sum_backward, ("gather_sum_backward_kernel",)),
    "router-gradient": (_router_gradient, ("router_weight_gradient_kernel",)),
    "limited-rows": (_limited, ("limit_rows_kernel",)),
}
"""Calls, and the kernels whose bits they check."""

TRANSPORT = {
    "reach_kernel", "slots_kernel", "counts_put_kernel", "counts_take_kernel", "rows_put_kernel", "rows_take_kernel",
    "returns_put_kernel", "returns_take_kernel", "wait_kernel",
}  # fmt: skip


def test_every_kernel_that_is_launched_or_shipped_is_here() -> None:
    """Launched: by ``name[grid](...)``, where ``kernel`` stands for one of two; shipped: compiled offline."""
    here = {kernel for _, kernels in CALLS.values() for kernel in kernels} | TRANSPORT
    lists = itertools.product(inspection.LISTS, ("sm90", "sm100"))
    shipped = {launch.function.__name__ for group, arch in lists for launch in group(arch, MINORS[-1])}
    launched, described = set(), set()
    for file in KERNELS.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Subscript) and ast.unparse(node.slice) == "grid":
                launched.add(ast.unparse(node.value))
            if isinstance(node, ast.FunctionDef) and "launch_metadata=" in "".join(
                map(ast.unparse, node.decorator_list)
            ):
                described.add(node.name)
    assert shipped == here and described == here
    assert launched - {"kernel"} <= here and len(launched) > 15


def _bits(
    call: Callable[[Run], Sequence[Tensor]], sms: int, order: str, seed: int
) -> tuple[list[Tensor], list[Launch]]:
    """Results and launches; where programs are independent of each other, that is checked too."""
    with poisoned_memory(), program_order(order, seed), launches() as log, independent_programs():
        return list(call(Run(SmBudget(sms)))), log


def _check(name: str, variants: list[tuple[int, str, int]]) -> None:
    call, kernels = CALLS[name]
    want, log = _bits(call, ALL, "sequential", 0)
    widest = {kernel: _grid(log, kernel) for kernel in kernels}
    for kernel, grid in widest.items():
        assert grid == 1 if kernel in SINGLE else grid > 7, f"{kernel}: grids of 7 and of all SMs must differ"
    for sms, order, seed in variants:
        got, log = _bits(call, sms, order, seed)
        assert {kernel: _grid(log, kernel) for kernel in kernels} == {k: min(sms, grid) for k, grid in widest.items()}
        for number, (one, expected) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(one, expected), (number, sms, order, seed)


def _grid(log: list[Launch], kernel: str) -> int:
    return max(launch.grid[0] for launch in log if launch.kernel == kernel)


@pytest.mark.parametrize("name", CALLS)
def test_bits_do_not_depend_on_grid_and_order(name: str) -> None:
    _check(name, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_bits_do_not_depend_on_any_grid_in_any_order(name: str) -> None:
    _check(name, EVERY)


def _layer_gradients(
    x: Tensor, weights: ExpertWeights, ids: Tensor, router: Tensor, gate: Gate, run: Run
) -> list[Tensor]:
    """Output and all gradients of the experts; the gradient of the output is the cosine of x."""
    inputs, of_router = x.clone().requires_grad_(), router.clone().requires_grad_()
    leaves = map_weights(weights, lambda tensor: tensor.detach().clone().requires_grad_())
    routed = route_rows(ids, weights.down.shape[0], budget=run.budget)
    out = expert_mlp(inputs, leaves, routed, of_router, gate, run=run)
    out.backward(x.cos())
    tensors = (inputs, of_router, leaves.gate_up, leaves.down, leaves.gate_up_bias, leaves.down_bias)
    found = [out.detach(), *(tensor.grad for tensor in tensors if tensor is not None)]
    return [tensor for tensor in found if tensor is not None]


@pytest.mark.parametrize("size", [(48, 32), (13, 11)], ids=["aligned", "any"])
def test_bits_of_the_layer_do_not_depend_on_grid_and_order(size: tuple[int, int]) -> None:
    intermediate, hidden = size
    weights = random_weights(4, hidden, intermediate, OSS, torch.bfloat16, torch.Generator().manual_seed(0), bias=True)
    ids, x, router = _ids(40, 4, 2), _draw(40, hidden, seed=1, dtype=torch.bfloat16), _draw(40, 2, seed=2)

    def call(run: Run) -> list[Tensor]:
        return _layer_gradients(x, weights, ids, router, OSS, run)

    want, _ = _bits(call, ALL, "sequential", 0)
    assert len(want) == 7
    for variant in QUICK:
        got, _ = _bits(call, *variant)
        assert all(torch.equal(one, expected) for one, expected in zip(got, want, strict=True)), variant


def _transport_bits(form: str, sms: int, order: str, seed: int) -> tuple[list[Tensor], list[Launch]]:
    """What all calls between two ranks give, with ``sms`` SMs for communication."""
    traffic = traffic_of(form, 2, 60, hidden=40)
    inputs = rank_inputs(traffic, (60, 13), torch.Generator().manual_seed(5), dropped=0.1)
    run = Run(SmBudget(ALL + 1, communication=sms))
    with program_order(order, seed), launches() as log:
        found = run_peers(traffic, lambda transport, rank: run_calls(transport, inputs[rank], rank), run=run)
    tensors = []
    for one in found:
        used = int(one["placement"].incoming)
        tensors += [one["out"], one["back"].out, one["back"].router_gradient, one["placement"].slots]
        tensors += [one["received"].x[:used], one["received"].weights[:used], one["grad"][:used]]
    return tensors, log


@pytest.mark.parametrize(
    "form", ["tokens-rows", *(pytest.param(form, marks=pytest.mark.slow) for form in ("tokens-reduced", "rows-rows"))]
)
def test_bits_of_the_transport_do_not_depend_on_grid_and_order(form: str) -> None:
    want, log = _transport_bits(form, ALL, "sequential", 0)
    assert {launch.kernel for launch in log} >= TRANSPORT
    widest = max(launch.grid[0] for launch in log)
    assert widest > 7
    for sms, order, seed in QUICK:
        got, log = _transport_bits(form, sms, order, seed)
        assert max(launch.grid[0] for launch in log) == min(sms, widest)
        assert all(torch.equal(one, expected) for one, expected in zip(got, want, strict=True)), (sms, order)


def test_bits_of_the_exchange_do_not_depend_on_grid_and_order() -> None:
    """Of more tokens than the transport's test has: its kernels take 128 at a time."""
    traffic = traffic_of("tokens-rows", 1, 1100, experts=12, top_k=2)
    ids = _ids(1100, 12, 2)

    def placement(sms: int, order: str, seed: int) -> tuple[list[Tensor], dict[str, int]]:
        run = Run(SmBudget(ALL + 1, communication=sms))
        with program_order(order, seed), launches() as log:
            found = PeerTransport(traffic, virtual_ranks(1)[0], run=run, polls=100).exchange(ids).wait()
        grids = {launch.kernel: launch.grid[0] for launch in log}
        return [found.slots, found.home, found.counts, found.incoming], grids

    want, widest = placement(ALL, "sequential", 0)
    assert widest["reach_kernel"] > 7 and widest["slots_kernel"] > 7
    for variant in QUICK:
        got, grids = placement(*variant)
        assert grids == {kernel: min(variant[0], grid) for kernel, grid in widest.items()}
        assert all(torch.equal(one, expected) for one, expected in zip(got, want, strict=True)), variant


# Where the token is among how many, what the others chose, and whether they hold NaN. Tiles have 32 rows here.
NEIGHBOURS = {
    "alone": (0, 1, (0, 2), False),
    "first of its expert": (0, 40, (0, 2), False),
    "last of a tile": (31, 40, (0, 2), False),
    "first of a tile": (32, 40, (0, 2), False),
    "last of its expert": (39, 40, (2, 0), False),
    "others elsewhere": (5, 33, (1, 3), False),
    "others hold NaN": (17, 34, (0, 1), True),
    "others are absent": (7, 20, (-1, -1), True),
}
GATES = [
    Gate(), Gate(interleaved=True), Gate(activation=Activation.SWIGLU_CLAMPED), OSS, Gate(activation=Activation.GEGLU),
    Gate(activation=Activation.GEGLU_TANH), Gate(activation=Activation.RELU2), NO_GATE,
]  # fmt: skip


def _sweep() -> list[object]:
    """(gate, dtype, size): all of them, most of them slow."""
    cases = []
    for gate, dtype, size in itertools.product(GATES, ("bfloat16", "float16", "float32"), ("aligned", "any")):
        quick = (gate is OSS and dtype == "bfloat16") or (gate is GATES[0] and (dtype, size) == ("float32", "any"))
        name = f"{gate.activation.name}{'-interleaved' if gate.interleaved else ''}-{dtype}-{size}"
        marks = () if quick else pytest.mark.slow
        cases.append(pytest.param(gate, getattr(torch, dtype), size, id=name, marks=marks))
    return cases


@pytest.mark.parametrize(("gate", "dtype", "size"), _sweep())
def test_a_token_has_the_same_bits_under_any_neighbours(gate: Gate, dtype: torch.dtype, size: str) -> None:
    """Its output, its gradient and that of its router weights."""
    intermediate, hidden = {"aligned": (48, 32), "any": (13, 11)}[size]
    generator = torch.Generator().manual_seed(0)
    weights = random_weights(4, hidden, intermediate, gate, dtype, generator, bias=gate is OSS)
    token, own = _draw(1, hidden, seed=1, dtype=dtype), torch.tensor([[0.25, 0.625]])
    results: dict[str, list[Tensor]] = {}
    for name, (place, tokens, chosen, poisoned) in NEIGHBOURS.items():
        x = torch.randn(tokens, hidden, generator=generator).to(dtype)
        if poisoned:
            x.fill_(torch.nan)
        ids = torch.tensor([chosen], dtype=torch.int32).repeat(tokens, 1)
        router = torch.rand(tokens, 2, generator=generator)
        x[place], ids[place], router[place] = token[0], torch.tensor([0, 2]), own[0]
        with poisoned_memory():
            out, d_x, d_router, *_ = _layer_gradients(x, weights, ids, router, gate, Run())
        results[name] = [out[place], d_x[place], d_router[place]]
        assert all(part.isfinite().all() and part.any() for part in results[name]), name
    for name, result in results.items():
        assert all(torch.equal(one, expected) for one, expected in zip(result, results["alone"], strict=True)), name
