"""The launches of the expert-parallel transport that are compiled offline, with arguments of a real call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton

from tessera_rt.kernels.launch import Launch, element_size, kernel_launch, tensor_like
from tessera_rt.kernels.operands import warp_options
from tessera_rt.kernels.shapes import RANKS, SHAPES, TOKENS_PER_RANK, ExpertShape
from tessera_rt.kernels.transport import (
    BLOCK,
    BLOCK_H,
    COUNT_BLOCK,
    COUNT_WARPS,
    POLLS_CUDA,
    REACH_BLOCK,
    REACH_WARPS,
    UNDER_WAY,
    WARPS,
)
from tessera_rt.kernels.transport_kernels import (
    counts_put_kernel,
    counts_take_kernel,
    limit_rows_kernel,
    reach_kernel,
    returns_put_kernel,
    returns_take_kernel,
    rows_put_kernel,
    rows_take_kernel,
    slots_kernel,
)
from tessera_rt.kernels.transport_layout import Combine, Dispatch, Layout, Traffic
from tessera_rt.kernels.transport_signal_kernels import wait_kernel

WIDE = 16  # bytes that one thread must store at once where rows are moved
DTYPES = ("bfloat16", "float16", "float32")
FORMS = (
    (Dispatch.TOKENS, Combine.ROWS),
    (Dispatch.TOKENS, Combine.REDUCED),
    (Dispatch.ROWS, Combine.ROWS),
)


def transport_launches(_arch: str, _minor: str) -> Iterator[Launch]:
    """Every kernel of the transport for RANKS ranks and every form: for every model in bf16, for the first one in the
    other dtypes too (the code depends on a model's top_k, not on its sizes)."""
    for shape in SHAPES:
        for dispatch, combine in FORMS:
            for dtype in DTYPES if shape is SHAPES[0] else DTYPES[:1]:
                traffic = Traffic(
                    world=RANKS, experts=shape.experts, top_k=shape.top_k, hidden=shape.hidden, tokens=TOKENS_PER_RANK,
                    dtype=tensor_like(dtype).dtype, dispatch=dispatch, combine=combine,
                )  # fmt: skip
                if dtype == DTYPES[0]:
                    yield from _counting(shape, traffic)
                yield from _moving(shape, traffic, dtype)


def _counting(shape: ExpertShape, traffic: Traffic) -> Iterator[Launch]:
    ints, table, layout = tensor_like("int32"), tensor_like("int64"), Layout.of(traffic)
    units, e, local, j = (
        traffic.tokens * traffic.units_per_token,
        traffic.experts,
        traffic.local_experts,
        traffic.choices,
    )
    block_w = triton.next_power_of_2(traffic.world)
    reach = {"J": j, "BLOCK": REACH_BLOCK, "BLOCK_W": block_w, "TRACE": False, **warp_options(REACH_WARPS)}
    count = {"BLOCK": COUNT_BLOCK, "BLOCK_W": block_w, "TRACE": False, **warp_options(COUNT_WARPS)}
    sizes = f"E {e} K {traffic.top_k} {traffic.dispatch}"

    def launch(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Launch:
        return kernel_launch(shape.name, "int32", sizes, function, args, options)

    # The first phase is number 1, which the compiler treats apart.
    for lag, phase in ((0, 3), (UNDER_WAY, 3), (UNDER_WAY, 1)):
        yield launch(
            wait_kernel, (ints, ints, ints, None, traffic.world, POLLS_CUDA, phase),
            {"LAG": lag, "TRACE": False, **warp_options(1)},
        )  # fmt: skip
    yield launch(reach_kernel, (ints, ints, None, units, traffic.world, e, local), reach)
    yield launch(
        counts_put_kernel,
        (table, ints, ints, ints, ints, ints, None, layout.counts.start, layout.counts.size, 0, 3, traffic.world, e),
        count,
    )  # fmt: skip
    yield launch(
        counts_take_kernel,
        (table, ints, ints, ints, ints, ints, ints, ints, None, layout.counts.size, layout.free, 3, traffic.world, e,
         traffic.units_received, traffic.rows),
        count,
    )  # fmt: skip
    yield launch(
        slots_kernel,
        (ints, ints, ints, ints, ints, ints, None, units, traffic.world, e, local, traffic.units_received), reach,
    )  # fmt: skip
    yield launch(
        limit_rows_kernel,
        (ints, ints, ints, ints, None, traffic.units_received * j, traffic.rows, local),
        {"BLOCK": 128, "TRACE": False, **warp_options(4)},
    )  # fmt: skip


def _moving(shape: ExpertShape, traffic: Traffic, dtype: str) -> Iterator[Launch]:
    ints, floats, table, x = tensor_like("int32"), tensor_like("float32"), tensor_like("int64"), tensor_like(dtype)
    layout, h, stride, w = Layout.of(traffic), traffic.hidden, traffic.row_stride, traffic.world
    units, j = traffic.tokens * traffic.units_per_token, traffic.choices
    blocks = {
        "BLOCK": BLOCK, "BLOCK_H": BLOCK_H, "BLOCK_W": triton.next_power_of_2(w), "TRACE": False, **warp_options(WARPS),
    }  # fmt: skip
    reduced, element = traffic.combine is Combine.REDUCED, element_size(dtype)
    sizes = f"H {h} K {traffic.top_k} {traffic.dispatch} {traffic.combine}"
    regions = (layout.rows, layout.origin, layout.ids, layout.weights)

    def launch(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Launch:
        return kernel_launch(shape.name, dtype, sizes, function, args, blocks | options, least_store_bytes=WIDE)

    for meta in (True, False):  # tokens, and gradients on the same way
        yield launch(
            rows_put_kernel,
            (table, x, ints, ints, floats if meta else None, ints, ints, ints, None, 3, w, units, h, h,
             traffic.units_per_token, stride, *(number for region in regions for number in (region.start, region.size)),
             0),
            {"J": j, "META": meta},
        )  # fmt: skip
        outputs = (ints, ints, floats) if meta else (None, None, None)
        yield launch(
            rows_take_kernel,
            (table, x, ints, ints, floats, ints, ints, ints, ints, x, *outputs, None, 3, w, traffic.units_received, h,
             stride, traffic.local_experts, *(region.size for region in regions), layout.free),
            {"J": j, "META": meta, "ELEMENT": element},
        )  # fmt: skip
    # Outputs with the router's weights; gradients, with those of the router's weights or without (a frozen router).
    for weighted, with_gradient in ((True, False), (False, True), (False, False)):
        gradient = floats if with_gradient else None
        yield launch(
            returns_put_kernel,
            (table, x, ints, ints, ints, floats, gradient, ints, ints, ints, ints, None, 3, w, h, h, stride,
             layout.returned.start, layout.returned.size, layout.gradients.start, layout.gradients.size, 0),
            {"J": j, "REDUCED": reduced, "HAS_WEIGHTS": reduced and weighted, "HAS_GRADIENT": with_gradient,
             "ELEMENT": element},
        )  # fmt: skip
        at_home = weighted and not reduced
        yield launch(
            returns_take_kernel,
            (table, x, floats, ints, ints, floats if at_home else None, ints, ints, ints, x, gradient, None, 3, w,
             traffic.tokens, h, stride, layout.returned.size, layout.gradients.size, layout.free),
            {"PARTS": traffic.parts, "TOP_K": traffic.top_k, "HAS_WEIGHTS": at_home, "HAS_GRADIENT": with_gradient,
             "ELEMENT": element},
        )  # fmt: skip
