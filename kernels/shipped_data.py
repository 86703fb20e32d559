"""The launches of routing and of the kernels that only move or sum rows that are compiled offline, with arguments of a
real call. As for the products, the code depends on which sizes are 1 or multiples of 16 (numbers of tokens are)."""

from __future__ import annotations

from collections.abc import Iterator

import triton

from tessera_rt.kernels import gather_sum, routing
from tessera_rt.kernels.config_table import HALF
from tessera_rt.kernels.configs import Choice, config_for, layout_of, tile_heights
from tessera_rt.kernels.gather_sum_kernels import (
    gather_sum_backward_kernel,
    gather_sum_kernel,
    router_weight_gradient_kernel,
)
from tessera_rt.kernels.launch import Launch, kernel_launch, tensor_like
from tessera_rt.kernels.operands import warp_options
from tessera_rt.kernels.routing_kernels import (
    histogram_kernel,
    offsets_kernel,
    place_kernel,
    tile_scan_kernel,
    tile_table_kernel,
    topk_backward_kernel,
    topk_forward_kernel,
)
from tessera_rt.kernels.rows_gemm_kernels import zero_tail_kernel
from tessera_rt.kernels.shapes import SHAPES, TOKENS_PER_RANK, ExpertShape
from tessera_rt.kernels.wgrad_kernels import bias_gradient_kernel

DTYPES = (*HALF, "float32")
WIDE = 16  # bytes that one thread must store at once where rows of an aligned width are written


def data_launches(arch: str, minor: str, *, shapes: tuple[ExpertShape, ...] = SHAPES) -> Iterator[Launch]:
    """Every kernel that is no grouped product, for every model."""
    for shape in shapes:
        for dtype in DTYPES:
            for sized in (shape, shape.odd):
                yield from _rows(sized, dtype)
        yield from _choice(shape)
        yield from _placement(shape, arch)
        yield from _router_gradient(shape, arch, minor)


def _rows(shape: ExpertShape, dtype: str) -> Iterator[Launch]:
    x, ints, floats, h = tensor_like(dtype), tensor_like("int32"), tensor_like("float32"), shape.hidden
    least = 0 if h % 16 else WIDE
    blocks = {"BLOCK_H": gather_sum.BLOCK_H, "TRACE": False, **warp_options(gather_sum.WARPS)}
    for k in (shape.top_k, 1):
        for weighted in (True, False):
            yield kernel_launch(
                shape.name, dtype, f"H {h} K {k}{'' if weighted else ', plain sum'}", gather_sum_kernel,
                (x, ints, floats if weighted else None, x, None, TOKENS_PER_RANK, h, h, 1),
                {"TOP_K": k, "HAS_WEIGHTS": weighted, "BLOCK_T": gather_sum.BLOCK_T, **blocks}, least_store_bytes=least,
            )  # fmt: skip
        yield kernel_launch(
            shape.name, dtype, f"H {h} K {k}", gather_sum_backward_kernel,
            (x, x, floats, ints, ints, ints, x, floats, None, shape.rows, shape.rows, h, k, h, 1, h, 1),
            {"BLOCK_R": gather_sum.BLOCK_T, **blocks}, least_store_bytes=least,
        )  # fmt: skip
    for accumulate in (True, False):
        yield kernel_launch(
            shape.name, dtype, f"N {h}{'' if accumulate else ', written'}", bias_gradient_kernel,
            (x, floats if accumulate else x, ints, None, shape.local_experts, h, h, 1),
            {"BLOCK_R": 64, "BLOCK_N": 64, "ACCUMULATE": accumulate, "TRACE": False, **warp_options(4)},
        )  # fmt: skip
    for traced in (False, True):  # the trace itself must compile
        yield kernel_launch(
            shape.name, dtype, f"N {h}{', traced' if traced else ''}", zero_tail_kernel,
            (x, ints, ints if traced else None, shape.rows, h),
            {"BLOCK_M": 32, "BLOCK_N": 128, "TRACE": traced, **warp_options(8)}, least_store_bytes=least,
        )  # fmt: skip


def _choice(shape: ExpertShape) -> Iterator[Launch]:
    """The choice of experts, of all tokens or (``masked``) of some, and its backward."""
    floats, ints, bools = tensor_like("float32"), tensor_like("int32"), tensor_like("int8")
    e, k, tokens, rule = shape.experts, shape.top_k, TOKENS_PER_RANK, shape.rule
    block_e = triton.next_power_of_2(e)
    both = {
        "EXPERTS": e, "TOP_K": k, "SIGMOID": rule.score == "sigmoid", "AFTER_TOPK": rule.softmax_after_topk,
        "RENORMALIZE": rule.renormalize, "BLOCK_T": routing.BLOCK_T, "BLOCK_E": block_e,
        "BLOCK_K": triton.next_power_of_2(k), "TRACE": False, **warp_options(routing.topk_warps(block_e)),
    }  # fmt: skip
    for masked in (False, True):
        forward = {
            "GROUPS": rule.groups, "KEEP": rule.keep_groups, "TOP2": rule.group_score == "top2",
            "BY_LOGITS": rule.chooses_by_logits(shape.choice_bias), "HAS_BIAS": shape.choice_bias, "HAS_MASK": masked,
            "BLOCK_G": triton.next_power_of_2(rule.groups),
        }  # fmt: skip
        yield kernel_launch(
            shape.name, "float32", f"E {e} K {k}{', masked' if masked else ''}", topk_forward_kernel,
            (floats, floats if shape.choice_bias else None, bools if masked else None, ints, floats, None, tokens, e, 1,
             rule.eps, rule.scale),
            both | forward,
        )  # fmt: skip
    yield kernel_launch(
        shape.name, "float32", f"E {e} K {k}", topk_backward_kernel,
        (floats, floats, ints, floats, None, tokens, k, 1, e, 1, rule.eps, rule.scale), both,
    )  # fmt: skip


def _placement(shape: ExpertShape, arch: str) -> Iterator[Launch]:
    """Placement of the tokens' own choices (also int64, as torch counts) among all experts, and of received ones, of
    whole tokens or of one choice each, among a rank's experts."""
    for e, k, dtype in (
        (shape.experts, shape.top_k, "int32"), (shape.experts, shape.top_k, "int64"),
        (shape.local_experts, shape.top_k, "int32"), (shape.local_experts, shape.top_k, "int64"),
        (shape.local_experts, 1, "int32"),
    ):  # fmt: skip
        ints, ids, total = tensor_like("int32"), tensor_like(dtype), TOKENS_PER_RANK * k
        tiles = total // routing.PLACE_BLOCK
        sizes, flat = f"E {e} K {k}", (total, tiles, e, k, k, 1)
        block = {"BLOCK": routing.PLACE_BLOCK, "TRACE": False, **warp_options(4)}
        yield kernel_launch(
            shape.name, dtype, sizes, histogram_kernel, (ids, ints, None, *flat), block | {"BLOCK_E": 32}
        )
        yield kernel_launch(shape.name, dtype, sizes, place_kernel, (ids, ints, ints, ints, ints, None, *flat), block)
        if dtype == "int64":
            continue
        scan = {"BLOCK_T": 64, "BLOCK_E": 32, "TRACE": False, **warp_options(4)}
        yield kernel_launch(shape.name, "int32", sizes, tile_scan_kernel, (ints, ints, None, tiles, e), scan)
        row = {"BLOCK_E": triton.next_power_of_2(e), "TRACE": False, **warp_options(4)}
        yield kernel_launch(shape.name, "int32", sizes, offsets_kernel, (ints, ints, None, e), row)
        for block_m in tile_heights(arch):
            yield kernel_launch(
                shape.name, "int32", f"{sizes} M {block_m}", tile_table_kernel, (ints, ints, ints, None, e),
                row | {"BLOCK_M": block_m},
            )  # fmt: skip


def _router_gradient(shape: ExpertShape, arch: str, minor: str) -> Iterator[Launch]:
    """The sum of the partials of each configuration of the gate backward."""
    floats, ints, total = tensor_like("float32"), tensor_like("int32"), TOKENS_PER_RANK * shape.top_k
    widths = {
        config_for(
            Choice(
                kernel="gate_backward", dtype=dtype, size=size, layout=layout_of(shape.gate), load="gather",
                activation=shape.gate.activation.name.lower(), architecture=arch, minor=minor,
            )
        ).block_n
        for dtype in DTYPES for size in ("large", "small", "any")
    }  # fmt: skip
    for tiles in sorted({triton.cdiv(shape.intermediate, width) for width in widths}):
        yield kernel_launch(
            shape.name, "float32", f"{tiles} column tiles", router_weight_gradient_kernel,
            (floats, ints, floats, None, total, tiles),
            {"BLOCK": 128, "BLOCK_N": min(16, triton.next_power_of_2(tiles)), "TRACE": False, **warp_options(4)},
        )  # fmt: skip
