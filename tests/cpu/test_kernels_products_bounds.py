"""The grouped products touch the memory of their arguments and nothing else, read or written: a mask that is too wide
reaches results where a neighbour is not finite, or memory of nobody, which the interpreter reads without complaint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter as stock
from triton.tools.tensor_descriptor import TensorDescriptor

from tessera_rt.kernels.gate_backward import gate_backward
from tessera_rt.kernels.options import NO_GATE, Activation, Gate
from tessera_rt.kernels.routing import expert_rows
from tessera_rt.kernels.rows_gemm import rows_gemm
from tessera_rt.kernels.wgrad import bias_gradient, wgrad
from tessera_rt.testing.interpreter import handled_launches, launches
from tessera_rt.testing.kernel_checks import offsets_of

pytestmark = pytest.mark.usefixtures("interpreted")

COUNTS = [5, 0, 40, 3]  # the last tile of the last expert goes far beyond its rows, and they are the last of the buffer
ROWS, CHOICES = 48, 18
GATES = [NO_GATE, Gate(), Gate(activation=Activation.SWIGLU_OSS, interleaved=True), Gate(activation=Activation.RELU2)]


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses of its first byte and behind its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


@contextmanager
def within_arguments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches in this context may touch the memory of the tensors and descriptors that they are given only."""
    allowed: list[tuple[int, int]] = []
    load, store = stock.InterpreterBuilder.create_masked_load, stock.InterpreterBuilder.create_masked_store

    def handle(_kernel: str, launch: Callable[..., None], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        given = (arg.base if isinstance(arg, TensorDescriptor) else arg for arg in args)
        allowed[:] = sorted(_extent(tensor) for tensor in given if isinstance(tensor, Tensor) and tensor.numel())
        launch(*args, **options)

    def check(pointers: Any, mask: Any, what: str) -> None:
        first = np.broadcast_to(pointers.data, mask.data.shape)[mask.data].astype(np.int64)
        begins, ends = (np.array(side, dtype=np.int64) for side in zip(*allowed, strict=True))
        place = np.searchsorted(begins, first, side="right") - 1
        size = pointers.get_element_ty().primitive_bitwidth // 8
        outside = (place < 0) | (first + size > np.maximum.accumulate(ends)[place])
        assert not outside.any(), f"{what} outside of the arguments"

    def checked_load(builder: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        check(pointers, mask, "reads")
        return load(builder, pointers, mask, *rest, **options)

    def checked_store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        check(pointers, mask, "writes")
        return store(builder, pointers, value, mask, *rest, **options)

    with monkeypatch.context() as patch, handled_launches(handle):
        patch.setattr(stock.InterpreterBuilder, "create_masked_load", checked_load)
        patch.setattr(stock.InterpreterBuilder, "create_masked_store", checked_store)
        yield


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize(("n", "k"), [(48, 80), (45, 39)], ids=["aligned", "any"])
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.activation.name)
@pytest.mark.parametrize("gathered", [False, True], ids=["rows", "gathered"])
def test_products(gate: Gate, n: int, k: int, gathered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward with bias, gate backward with scale, both sides of the weight gradient written and accumulated."""
    columns = 2 * n if gate.gated else n
    rows = expert_rows(offsets_of(COUNTS), ROWS)
    index = (torch.arange(ROWS) % CHOICES).int() if gathered else None
    choice: dict[str, Any] = {"index": index, "divisor": 2} if gathered else {}
    tokens = CHOICES // 2 if gathered else ROWS
    x, down = _draw(tokens, k), _draw(4, n, k)
    with within_arguments(monkeypatch), launches() as log:
        _, pre = rows_gemm(x, _draw(4, columns, k), rows, bias=_draw(4, columns), gate=gate, save_pre=True, **choice)
        assert pre is not None
        scale = torch.ones(CHOICES) if gathered else None
        d_pre, act, _ = gate_backward(x, down, pre, rows, gate=gate, scale=scale, partials=True, **choice)
        for accumulate in (False, True):
            of_x, of_grad = torch.ones(4, columns, k), torch.ones(4, k, n)
            wgrad(d_pre, x, rows, of_x, accumulate=accumulate, gather_x=gathered, **choice)
            wgrad(x, act, rows, of_grad, accumulate=accumulate, gather_grad=gathered, **choice)
            bias_gradient(d_pre, rows, torch.ones(4, columns), accumulate=accumulate)
    size = "any" if n == 45 else "aligned"
    ran = {launch.kernel for launch in log} - {"tile_table_kernel"}
    wanted = {f"rows_gemm_{size}", f"gate_backward_{size}", f"wgrad_{size}", "bias_gradient_kernel", "zero_tail_kernel"}
    assert ran == wanted


@pytest.mark.parametrize("n", [130, 7])
def test_zeroed_rows(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = expert_rows(offsets_of([5, 0, 3]), 41)
    with within_arguments(monkeypatch):
        out, _ = rows_gemm(_draw(41, 3), _draw(3, n, 3), rows)
    assert out[:8].any() and not out[8:].any()
