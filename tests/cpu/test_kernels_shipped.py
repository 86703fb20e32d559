"""The launches that are compiled offline are those that the wrappers make, argument by argument.

Wrappers are called with tensors without memory (device meta), at the models' sizes, as if on the target; their launches
are recorded instead of run. Two launches count as equal when Triton compiles the same code for them (``Launch.key``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera_rt.kernels import configs, inspection, operands, routing
from tessera_rt.kernels.config_table import Config
from tessera_rt.kernels.expert_mlp import expert_mlp
from tessera_rt.kernels.gate_backward import gate_backward
from tessera_rt.kernels.launch import Launch
from tessera_rt.kernels.offline import target_named
from tessera_rt.kernels.peer_memory import virtual_ranks
from tessera_rt.kernels.routing import ExpertRows, Routed, expert_rows, route_rows, topk, topk_backward
from tessera_rt.kernels.rows_gemm import rows_gemm
from tessera_rt.kernels.shapes import GATE_SHAPES, RANKS, SHAPES, ExpertShape
from tessera_rt.kernels.shipped_transport import FORMS
from tessera_rt.kernels.transport import PeerTransport
from tessera_rt.kernels.transport_layout import Traffic
from tessera_rt.kernels.weights import NO_MAIN_GRADS, ExpertWeights, MainGrads
from tessera_rt.kernels.wgrad import wgrad
from tessera_rt.testing.interpreter import handled_launches

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FLAGS = (False, True)
MANY, FEW = 8192, 64  # tokens: of the large and the small size class at every shape
meta = partial(torch.empty, device="meta")

pytestmark = pytest.mark.usefixtures("interpreted")


def code_key(kernel: str, args: tuple[Any, ...], options: dict[str, Any]) -> str:
    """``Launch.key``. FP fusion is on where a launch does not name it. Whether a size is beyond 32 bits depends on the
    batch, so both count as one here."""
    stand_in = Launch("", "", "", "", "", "", NO_CONFIG, _Named(kernel), args, {"enable_fp_fusion": True} | options)
    return stand_in.key.replace(" int64", "")


NO_CONFIG = Config(block_m=0, block_n=0, block_k=0, warps=0, stages=0)


class _Named:
    def __init__(self, name: str) -> None:
        self.__name__ = name


@contextmanager
def recorded(arch: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The launches in this context, as if on ``arch``: key -> kernel."""
    found: dict[str, str] = {}

    def record(kernel: str, _run: Callable[..., None], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        for arg in args:  # the compiler is told that every address is a multiple of 16 bytes
            if isinstance(arg, Tensor):
                assert arg.storage_offset() * arg.element_size() % 16 == 0, kernel
        found[code_key(kernel, args, options)] = kernel

    for module in (configs, operands, routing):
        monkeypatch.setattr(module, "architecture", lambda _device: arch)
    with handled_launches(record):
        yield found


def shipped(arch: str, wanted: Callable[[Launch], bool]) -> dict[str, str]:
    """What is compiled offline: key -> a text that names it."""
    return {
        code_key(one.function.__name__, one.args, one.options): f"{one.kernel} {one.model} {one.size} {one.sizes}"
        for one in inspection.all_launches(target_named(arch))
        if wanted(one)
    }


def parameters(shape: ExpertShape, dtype: torch.dtype) -> ExpertWeights:
    e, bias = shape.local_experts, shape.bias
    n, i, h = shape.product, shape.intermediate, shape.hidden

    def weight(rows: int, columns: int) -> Tensor:
        made = meta(e, columns, rows, dtype=dtype).mT if shape.transposed else meta(e, rows, columns, dtype=dtype)
        return made.requires_grad_()

    biases = [meta(e, width, dtype=dtype, requires_grad=True) if bias else None for width in (n, h)]
    return ExpertWeights(weight(n, h), weight(h, i), *biases)


def main_grads(weights: ExpertWeights) -> MainGrads:
    """fp32 buffers with the strides of the weights."""
    given = (getattr(weights, field.name) for field in fields(MainGrads))
    return MainGrads(*(None if weight is None else torch.empty_like(weight.detach(), dtype=torch.float32)
                       for weight in given))  # fmt: skip


def placed(shape: ExpertShape, tokens: int, top_k: int) -> Routed:
    position, source = meta(tokens, top_k, dtype=torch.int32), meta(tokens * top_k, dtype=torch.int32)
    return Routed(position, source, rows_of(shape, tokens * top_k))


def rows_of(shape: ExpertShape, rows: int) -> ExpertRows:
    return expert_rows(meta(shape.local_experts + 1, dtype=torch.int32), rows)


def train_layer(shape: ExpertShape, dtype: torch.dtype, tokens: int, top_k: int, *, sparing: bool) -> None:
    """Forward and backward of a layer; all that changes a launch in one way, or (``sparing``) in the other: the product
    made again instead of saved, gradients of weights written instead of added, a frozen router."""
    weights, x = parameters(shape, dtype), meta(tokens, shape.hidden, dtype=dtype, requires_grad=True)
    out = expert_mlp(
        x, weights, placed(shape, tokens, top_k), meta(tokens, top_k, requires_grad=not sparing), shape.gate,
        main_grads=NO_MAIN_GRADS if sparing else main_grads(weights), recompute=sparing,
    )  # fmt: skip
    out.backward(torch.empty_like(out))  # type: ignore[no-untyped-call]


def every_load(shape: ExpertShape, dtype: torch.dtype, tokens: int, *, single: bool) -> None:
    """Each product called by itself, its rows in order or gathered: layers do not use every combination. ``single``:
    also gathered by one choice per token."""
    weights, rows = parameters(shape, dtype), rows_of(shape, tokens * shape.top_k)
    up, down, h, i, n = weights.gate_up, weights.down, shape.hidden, shape.intermediate, shape.product
    index = meta(rows.rows, dtype=torch.int32)
    for gather, choices in ((False, 1), (True, shape.top_k), *(((True, 1),) if single else ())):
        of_rows = {"index": index, "divisor": choices} if gather else {}

        def tokens_of(width: int, count: int = rows.rows // choices) -> Tensor:
            return meta(count, width, dtype=dtype)

        pre, scale = meta(rows.rows, n, dtype=dtype), meta(rows.rows) if gather else None
        rows_gemm(tokens_of(h), up, rows, bias=weights.gate_up_bias, gate=shape.gate, save_pre=True, **of_rows)
        for partials in (True,) if gather and shape.bias else FLAGS if gather else (False,):
            gate_backward(tokens_of(h), down.mT, pre, rows, gate=shape.gate, scale=scale, partials=partials, **of_rows)
        for accumulate in FLAGS:
            d_up, d_down = (torch.empty_like(w, dtype=torch.float32 if accumulate else dtype) for w in (up, down))
            wgrad(pre, tokens_of(h), rows, d_up, accumulate=accumulate, gather_x=gather, **of_rows)
            act = meta(rows.rows, i, dtype=dtype)
            wgrad(tokens_of(h), act, rows, d_down, accumulate=accumulate, gather_grad=gather, **of_rows)
        if choices > 1 or not gather:
            rows_gemm(tokens_of(i), down, rows, bias=weights.down_bias, **of_rows)
            rows_gemm(tokens_of(n), up.mT, rows, kind="dgrad", **of_rows)


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_products_of_the_models_are_compiled_and_nothing_else(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every dtype, both aligned size classes and widths of the any-size class, recomputed or saved products, added or
    written gradients, frozen or trained router, tokens or single choices, fp32 with and without tf32."""
    with recorded(arch, monkeypatch) as found:
        for shape, dtype, (tokens, odd) in product(SHAPES, DTYPES, ((MANY, False), (FEW, False), (MANY, True))):
            sized = shape.odd if odd else shape
            single = dtype == torch.bfloat16 and not odd
            for top_k, sparing in product((shape.top_k, 1) if single else (shape.top_k,), FLAGS):
                train_layer(sized, dtype, tokens, top_k, sparing=sparing)
            every_load(sized, dtype, tokens, single=single)
        for module in ("rows_gemm", "gate_backward", "wgrad"):  # as if torch allowed tf32
            monkeypatch.setattr(f"tessera_rt.kernels.{module}.precision", lambda _dtype: "tf32")
        for shape in SHAPES:
            for sparing in FLAGS:
                train_layer(shape, torch.float32, MANY, shape.top_k, sparing=sparing)
            every_load(shape, torch.float32, MANY, single=False)
    names = {shape.name for shape in SHAPES}
    _assert_equal(_of(PRODUCTS, found), shipped(arch, lambda one: one.is_product and one.model in names))


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_products_of_the_other_gates_are_compiled(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded(arch, monkeypatch) as found:
        for shape in GATE_SHAPES:
            for sparing in FLAGS:
                train_layer(shape, torch.bfloat16, MANY, shape.top_k, sparing=sparing)
            train_layer(shape, torch.bfloat16, FEW, shape.top_k, sparing=False)
    compiled = shipped(arch, lambda one: one.is_product)
    gated = _of(("rows_gemm_aligned", "gate_backward_aligned"), found)
    assert set(gated.values()) == {"rows_gemm_aligned", "gate_backward_aligned"} and gated.keys() <= compiled.keys()


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_routing_and_sums_of_the_models_are_compiled(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded(arch, monkeypatch) as found:
        for shape in SHAPES:
            logits, bias = meta(MANY, shape.experts), meta(shape.experts) if shape.choice_bias else None
            for mask in (None, meta(MANY, dtype=torch.bool)):
                ids, weights = topk(logits, shape.rule, bias=bias, mask=mask)
            topk_backward(weights, logits, ids, shape.rule)
            for experts, top_k, dtype in (
                (shape.experts, shape.top_k, torch.int32), (shape.experts, shape.top_k, torch.int64),
                (shape.local_experts, shape.top_k, torch.int32), (shape.local_experts, 1, torch.int32),
            ):  # fmt: skip
                route_rows(meta(MANY, top_k, dtype=dtype), experts)
            for dtype, sized, top_k, sparing in product(DTYPES, (shape, shape.odd), (shape.top_k, 1), FLAGS):
                train_layer(sized, dtype, MANY, top_k, sparing=sparing)
                rows_gemm(meta(MANY, 16, dtype=dtype), meta(shape.local_experts, sized.hidden, 16, dtype=dtype),
                          rows_of(shape, MANY))  # fmt: skip
    names = {shape.name for shape in SHAPES}
    data = _of(DATA, found)
    assert set(data.values()) == set(DATA)
    _assert_equal(data, shipped(arch, lambda one: one.function.__name__ in DATA and one.model in names))


PRODUCTS = (
    "rows_gemm_aligned", "rows_gemm_any", "gate_backward_aligned", "gate_backward_any", "wgrad_aligned", "wgrad_any",
)  # fmt: skip
DATA = (
    "topk_forward_kernel", "topk_backward_kernel", "histogram_kernel", "place_kernel", "tile_scan_kernel",
    "offsets_kernel", "tile_table_kernel", "gather_sum_kernel", "gather_sum_backward_kernel", "zero_tail_kernel",
    "bias_gradient_kernel", "router_weight_gradient_kernel",
)  # fmt: skip


def _of(kernels: tuple[str, ...], found: dict[str, str]) -> dict[str, str]:
    return {key: kernel for key, kernel in found.items() if kernel in kernels}


def _assert_equal(found: dict[str, str], compiled: dict[str, str]) -> None:
    missing = [key for key in found if key not in compiled]
    assert not missing, f"launched, but not compiled offline ({len(missing)}):\n" + "\n".join(missing[:5])
    never = {text for key, text in compiled.items() if key not in found and "('TRACE', True)" not in key}
    assert not never, f"compiled offline, but never launched ({len(never)}):\n" + "\n".join(sorted(never)[:20])


def test_transport_of_the_models_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, on a rank that is neither 0 nor 1 (the compiler treats these numbers apart). The scans of so few tokens
    have numbers of tiles that are no multiples of 16; those of the layer are compiled."""
    with recorded("sm90", monkeypatch) as found:
        for shape, (dispatch, combine) in product(SHAPES, FORMS):
            traffic = Traffic(
                world=RANKS, experts=shape.experts, top_k=shape.top_k, hidden=512, tokens=32, dispatch=dispatch,
                combine=combine,
            )  # fmt: skip
            end = PeerTransport(traffic, virtual_ranks(RANKS)[3])
            x, weights = torch.empty(32, 512, dtype=torch.bfloat16), torch.empty(32, shape.top_k)
            placement = end.exchange(torch.empty(32, shape.top_k, dtype=torch.int32)).wait()
            received = end.dispatch(x, weights, placement).wait()
            end.dispatch_gradient(x, received).wait()
            units = received.ids.shape
            position = torch.empty(units, dtype=torch.int32)
            end.combine(x, position, received).wait()
            end.combine(x, position, received, weighted=False).wait()
            end.combine(x, position, received, weighted=False, router_gradient=torch.empty(units)).wait()
    compiled = shipped("sm90", lambda one: not one.is_product)
    missing = [key for key in found if key not in compiled and not key.startswith(("tile_scan", "histogram"))]
    assert not missing, "\n".join(missing[:5])
