"""Kernels are launched on the device of their operands, which may not be the current one, and see their values."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tessera_rt.errors import SpecError
from tessera_rt.kernels import routing
from tessera_rt.kernels.budget import SmBudget
from tessera_rt.kernels.config_table import Config
from tessera_rt.kernels.expert_mlp import expert_mlp
from tessera_rt.kernels.gate_backward import gate_backward
from tessera_rt.kernels.gather_sum import gather_sum, gather_sum_backward
from tessera_rt.kernels.operands import Run
from tessera_rt.kernels.options import Gate, RouterRule
from tessera_rt.kernels.peer_memory import virtual_ranks
from tessera_rt.kernels.routing import Routed, route_rows
from tessera_rt.kernels.rows_gemm import rows_gemm
from tessera_rt.kernels.transport import PeerTransport
from tessera_rt.kernels.weights import ExpertWeights, MainGrads
from tessera_rt.kernels.wgrad import bias_gradient, wgrad
from tessera_rt.moe.triton_backend import TritonBackend
from tessera_rt.testing.peer_calls import traffic_of

KERNELS = Path(__file__).parents[2] / "kernels"


@pytest.mark.usefixtures("interpreted")
def test_the_first_operand_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[Tensor] = []

    @contextmanager
    def device_of(operand: Tensor) -> Iterator[None]:
        inside.append(operand)
        yield
        inside.append(operand)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    y, position = torch.ones(2, 4), torch.zeros(3, 1, dtype=torch.int32)
    gather_sum(y, position)
    gather_sum(position=position, y=y)
    assert len(inside) == 4 and all(operand is y for operand in inside)


def test_every_function_that_launches_is_guarded() -> None:
    launching = {}
    for file in sorted(KERNELS.glob("*.py")):
        for function in ast.parse(file.read_text(encoding="utf-8")).body:
            # The transport's methods refuse another device than the current one.
            if isinstance(function, ast.FunctionDef) and any(map(_is_launch, ast.walk(function))):
                guards = [ast.unparse(decorator) for decorator in function.decorator_list]
                launching[file.name, function.name] = "launching" in guards
    assert len(launching) >= 13 and all(launching.values()), launching


def _is_launch(node: ast.AST) -> bool:
    """kernel[grid](...)"""
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and ast.unparse(node.func.slice) == "grid"
    )


def test_a_transport_refuses_another_device_than_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = PeerTransport(traffic_of("tokens-rows", 1, 8, experts=2, top_k=1, hidden=16), virtual_ranks(1)[0])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    transport.device = torch.device("cuda", 1)
    with pytest.raises(SpecError, match=r"current device = 0: must be cuda:1.*set_device\(1\)"):
        transport._grid(None, 1)


def _negated(values: Tensor) -> Tensor:
    """Equal to ``values``, with torch's lazy negation."""
    view = torch._neg_view(-values)  # type: ignore[attr-defined, unused-ignore]
    assert view.is_neg() and torch.equal(view, values)
    return view


NEGATED: dict[str, Callable[[Callable[[Tensor], Tensor], Routed], Sequence[Tensor | None]]] = {
    "topk": lambda of, routed: routing.topk(of(torch.randn(5, 6)), RouterRule(top_k=2)),
    "topk_backward": lambda of, routed: (
        routing.topk_backward(of(torch.randn(5, 2)), of(torch.randn(5, 6)), torch.tensor([[0, 5]] * 5),
                              RouterRule(top_k=2)),
    ),
    "gather_sum": lambda of, routed: (gather_sum(of(torch.randn(26, 32)), routed.position, of(torch.rand(13, 2))),),
    "gather_sum_backward": lambda of, routed: gather_sum_backward(
        of(torch.randn(13, 32)), of(torch.randn(26, 32)), routed.source, routed.rows, routed.position,
        of(torch.rand(13, 2)),
    ),
    "bias_gradient": lambda of, routed: (
        bias_gradient(of(torch.randn(26, 32)), routed.rows, torch.zeros(5, 32), accumulate=True),
    ),
    "wgrad": lambda of, routed: (
        wgrad(of(torch.randn(26, 17)), of(torch.randn(26, 32)), routed.rows, torch.zeros(5, 17, 32), accumulate=True),
    ),
    "rows_gemm": lambda of, routed: rows_gemm(
        of(torch.randn(26, 32)), of(torch.randn(5, 48, 32)), routed.rows, bias=of(torch.randn(5, 48)), save_pre=True
    ),
    "gate_backward": lambda of, routed: gate_backward(
        of(torch.randn(13, 32)), of(torch.randn(5, 16, 32)), of(torch.randn(26, 32)), routed.rows, gate=Gate(),
        index=routed.source, divisor=2, scale=of(torch.rand(26)), partials=True,
    ),
}  # fmt: skip


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", NEGATED)
def test_operands_that_are_negated_lazily(name: str) -> None:
    routed = route_rows(torch.arange(26, dtype=torch.int32).view(13, 2) % 5, 5)
    results = []
    for of in (torch.clone, _negated):
        torch.manual_seed(0)
        results.append([tensor for tensor in NEGATED[name](of, routed) if tensor is not None])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.usefixtures("interpreted")
def test_destinations_that_are_negated_lazily_are_refused() -> None:
    routed, out = route_rows(torch.zeros(3, 1, dtype=torch.int32), 2), torch._neg_view(torch.zeros(2, 4, 4))
    with pytest.raises(SpecError, match="out = 'a lazily negated view'"):
        wgrad(torch.ones(3, 4), torch.ones(3, 4), routed.rows, out, accumulate=True)
    with pytest.raises(SpecError, match=r"main_grads\.down = 'a lazily negated view'"):
        expert_mlp(
            torch.ones(3, 4), ExpertWeights(torch.ones(2, 8, 4), torch.ones(2, 4, 4)), routed, torch.ones(3, 1),
            Gate(), main_grads=MainGrads(down=out),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Run(budget=4), "budget = 4: must be a SmBudget or None"),
        (lambda: Run(trace=[]), r"trace = \[\]: must be a Trace or None"),
        (lambda: TritonBackend(SmBudget(4)), r"run = SmBudget.*Run\(budget\)"),
        (lambda: Run(config=_config(block_k=24)), r"config\.block_k = 24: must be a power of 2 from 16"),
        (lambda: Run(config=_config(warps=3)), r"config\.warps = 3: must be a power of 2"),
        (lambda: Run(config=_config(group_m=0)), r"config\.group_m = 0: must be a whole number, at least 1"),
        (lambda: Run(config=_config(slices=0)), r"config\.slices = 0: must be a power of 2 from 4"),
        (lambda: Gate(limit=float("nan")), "limit = nan: must be a positive number"),
        (lambda: Gate(limit=-1.0, alpha=float("inf")), "(?s)limit = -1.0.*alpha = inf: must be a finite number"),
    ],
)
def test_settings_that_cannot_be_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()


def _config(**change: int) -> Config:
    return Config(**({"block_m": 32, "block_n": 32, "block_k": 32, "warps": 4, "stages": 2} | change))
