"""Kernels are launched on the device of their operands, which may not be the current one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tessera_rt.errors import SpecError
from tessera_rt.kernels.gather_sum import gather_sum
from tessera_rt.kernels.peer_memory import virtual_ranks
from tessera_rt.kernels.transport import PeerTransport
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
                launching[file.name, function.name] = "on_operands_device" in guards
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
