"""The launches of routing and of the expert layer that are compiled offline, with arguments of a real call: kernel by
model, dtype, size class and load.

A grouped product's code depends on its configuration, its flags, and on whether sizes are multiples of 16, not on the
sizes themselves: many launches share one compilation, named by ``Launch.key``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import triton

from tessera_rt.kernels import gather_sum as gather_sum_module
from tessera_rt.kernels import routing
from tessera_rt.kernels.config_table import GATED_KERNELS, KERNELS, WGRAD, Config
from tessera_rt.kernels.configs import Choice, config_for, layout_of
from tessera_rt.kernels.gate_backward_kernels import gate_backward_aligned, gate_backward_any
from tessera_rt.kernels.gather_sum_kernels import (
    gather_sum_backward_kernel,
    gather_sum_kernel,
    router_weight_gradient_kernel,
)
from tessera_rt.kernels.launch import (
    Launch,
    descriptor_like,
    element_size,
    kernel_launch,
    ragged_like,
    tensor_like,
)
from tessera_rt.kernels.operands import launch_options, warp_options
from tessera_rt.kernels.options import NO_GATE, Activation, Gate
from tessera_rt.kernels.routing_kernels import (
    histogram_kernel,
    offsets_kernel,
    place_kernel,
    tile_scan_kernel,
    tile_table_kernel,
    topk_backward_kernel,
    topk_forward_kernel,
)
from tessera_rt.kernels.rows_gemm_kernels import rows_gemm_aligned, rows_gemm_any, zero_tail_kernel
from tessera_rt.kernels.shapes import GATE_SHAPES, SHAPES, ExpertShape
from tessera_rt.kernels.wgrad_kernels import bias_gradient_kernel, wgrad_aligned, wgrad_any

LOADS = ("tma", "gather")


def shipped_launches(
    arch: str, minor: str, *, dtypes: tuple[str, ...], sizes: tuple[str, ...], shapes: tuple[ExpertShape, ...] = SHAPES
) -> Iterator[Launch]:
    """The launches of every model: the grouped products for ``dtypes`` and ``sizes``, and the other kernels once."""
    for shape in shapes:
        for dtype in dtypes:
            for size in sizes:
                for kernel in KERNELS:
                    for load in LOADS:
                        yield from _products(shape, kernel, dtype, size, load, arch, minor)
            yield from _row_kernels(shape, dtype)
        yield from _routing(shape)


def gate_launches(arch: str, minor: str, *, dtypes: tuple[str, ...], sizes: tuple[str, ...]) -> Iterator[Launch]:
    """The products with an activation, for the activations and layouts that no model of ``SHAPES`` has."""
    for shape, dtype, size, kernel, load in product(GATE_SHAPES, dtypes, sizes, GATED_KERNELS, LOADS):
        yield from _products(shape, kernel, dtype, size, load, arch, minor)


def _products(
    shape: ExpertShape, kernel: str, dtype: str, size: str, load: str, arch: str, minor: str
) -> Iterator[Launch]:
    gate = shape.gate if kernel in GATED_KERNELS else NO_GATE
    choice = Choice(
        kernel=kernel, dtype=dtype, size=size, layout=layout_of(gate), activation=gate.activation.name.lower(),
        biased=shape.bias and kernel in ("forward", "forward_gate"), load=load, architecture=arch, minor=minor,
    )  # fmt: skip
    config = config_for(choice)
    builder = _wgrad_launches if kernel in WGRAD else _gate_backward_launch if kernel == "gate_backward" else _rows
    yield from builder(shape, choice, config, gate)


def _rows(shape: ExpertShape, choice: Choice, config: Config, gate: Gate) -> Iterator[Launch]:
    activated = gate.activation is not Activation.NONE
    yield _rows_launch(shape, choice, config, gate, saves=activated)
    if activated and (choice.dtype, choice.size, choice.load) == ("bfloat16", "large", "gather"):
        # Recomputation: the activation alone in the forward, the product alone in the backward.
        yield _rows_launch(shape, choice, config, gate, saves=False)
        yield _rows_launch(shape, choice, config, gate, saves=True, writes=False)


def _rows_launch(
    shape: ExpertShape, choice: Choice, config: Config, gate: Gate, *, saves: bool, writes: bool = True
) -> Launch:
    first = choice.kernel == "forward_gate"
    backward = choice.kernel == "dgrad"
    # forward: down [E, H, I]; forward_gate: gate_up [E, 2 I, H]; dgrad: gate_up.mT [E, H, 2 I]
    n_product, k = (
        (shape.product, shape.hidden) if first
        else (shape.hidden, shape.product) if backward
        else (shape.hidden, shape.intermediate)
    )  # fmt: skip
    n, n_first = gate.width(n_product), shape.transposed == backward
    gather, bias = choice.load == "gather", shape.bias and not backward
    options = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
        "GATHER": gather, "ACTIVATION": int(gate.activation), "GATED": gate.gated,
        "INTERLEAVED": gate.gated and gate.interleaved, "HAS_BIAS": bias,
        "SAVE_PRE": saves, "WRITE_OUT": writes, "PRECISION": _precision(choice.dtype),
        "TRACE": False, **launch_options(config),
    }  # fmt: skip
    only = ", product only" if not writes else ", activation only" if first and not saves else ""
    sizes = f"N {n} K {k}{only}"
    x = tensor_like(choice.dtype)
    ints = tensor_like("int32")
    tensors = (x if bias else None, x, x if saves else None, ints if gather else None, ints, ints, ints)
    if choice.size == "any":
        strides = (k, 1, n_product * k, k, 1)
        strided = (x, x, *tensors, None, n, k, *strides, shape.top_k, gate.alpha, gate.limit)
        return _launch(shape, choice, config, sizes, rows_gemm_any, strided, options)
    columns = 2 * config.block_n if gate.gated else config.block_n
    if gate.gated and not gate.interleaved:
        weight = (
            descriptor_like(choice.dtype, (shape.local_experts, 2, n, k), (1, 2, config.block_n, config.block_k))
            if n_first
            else descriptor_like(choice.dtype, (shape.local_experts, k, 2, n), (1, config.block_k, 2, config.block_n))
        )
    elif n_first:
        weight = descriptor_like(choice.dtype, (shape.local_experts, n_product, k), (1, columns, config.block_k))
    else:
        weight = descriptor_like(choice.dtype, (shape.local_experts, k, n_product), (1, config.block_k, columns))
    a = x if gather else descriptor_like(choice.dtype, (shape.rows, k), (config.block_m, config.block_k))
    flags = {"N_FIRST": n_first, "EVEN_K": k % config.block_k == 0}
    args = (a, weight, *tensors, None, n, k, k, shape.top_k, gate.alpha, gate.limit)
    return _launch(shape, choice, config, sizes, rows_gemm_aligned, args, options | flags)


def _gate_backward_launch(shape: ExpertShape, choice: Choice, config: Config, gate: Gate) -> Iterator[Launch]:
    n, k = shape.intermediate, shape.hidden
    gather, n_first = choice.load == "gather", shape.transposed  # down.mT [E, I, H]
    options = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
        "SLICES": config.slices, "GATHER": gather, "ACTIVATION": int(gate.activation), "GATED": gate.gated,
        "INTERLEAVED": gate.gated and gate.interleaved, "HAS_SCALE": gather, "WRITE_PARTIALS": gather,
        "PRECISION": _precision(choice.dtype), "TRACE": False, **launch_options(config),
    }  # fmt: skip
    x, ints, floats = tensor_like(choice.dtype), tensor_like("int32"), tensor_like("float32")
    tensors = (
        x, floats if gather else None, x, x, floats if gather else None, ints if gather else None, ints, ints, ints,
    )  # fmt: skip
    if choice.size == "any":
        strided = (x, x, *tensors, None, n, k, k, 1, n * k, 1, n, shape.top_k, gate.alpha, gate.limit)
        yield _launch(shape, choice, config, f"N {n} K {k}", gate_backward_any, strided, options)
        return
    block = (1, config.block_n, config.block_k) if n_first else (1, config.block_k, config.block_n)
    weight = descriptor_like(choice.dtype, (shape.local_experts, *((n, k) if n_first else (k, n))), block)
    a = x if gather else descriptor_like(choice.dtype, (shape.rows, k), (config.block_m, config.block_k))
    flags = {"N_FIRST": n_first, "EVEN_K": k % config.block_k == 0}
    args = (a, weight, *tensors, None, n, k, k, shape.top_k, gate.alpha, gate.limit)
    yield _launch(shape, choice, config, f"N {n} K {k}", gate_backward_aligned, args, options | flags)


def _wgrad_launches(shape: ExpertShape, choice: Choice, config: Config, _gate: Gate) -> Iterator[Launch]:
    """gate_up from (d pre, x) and down from (grad, activation): the tokens' side is the one that is gathered."""
    pairs = [("gate_up", shape.product, shape.hidden), ("down", shape.hidden, shape.intermediate)]
    for weight, n, k in pairs:
        gather = choice.load == "gather"
        gather_left, gather_right = gather and weight == "down", gather and weight == "gate_up"
        p, q = n, k
        if shape.transposed:
            p, q, gather_left, gather_right = k, n, gather_right, gather_left
        accumulate = choice.kernel == "wgrad_accumulate"
        options = {
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
            "GATHER_LEFT": gather_left, "GATHER_RIGHT": gather_right, "ACCUMULATE": accumulate,
            "ELEMENT": element_size(choice.dtype), "PRECISION": _precision(choice.dtype), "TRACE": False,
            **launch_options(config),
        }  # fmt: skip
        x, ints = tensor_like(choice.dtype), tensor_like("int32")
        out, index = tensor_like("float32") if accumulate else x, ints if gather else None
        sizes = (shape.rows, shape.local_experts, p, q)
        text = f"{weight} N {n} K {k}"
        if choice.size == "any":
            strided = (x, x, out, index, ints, None, *sizes, p, 1, q, 1, shape.top_k)
            yield _launch(shape, choice, config, text, wgrad_any, strided, options)
            continue
        left = x if gather_left else ragged_like(choice.dtype, p, config.block_k, config.block_m)
        right = x if gather_right else ragged_like(choice.dtype, q, config.block_k, config.block_n)
        args = (left, right, out, index, ints, None, *sizes, p, q, shape.top_k)
        yield _launch(shape, choice, config, text, wgrad_aligned, args, options)


def _row_kernels(shape: ExpertShape, dtype: str) -> Iterator[Launch]:
    x, ints, floats = tensor_like(dtype), tensor_like("int32"), tensor_like("float32")
    h, k, block_h = shape.hidden, shape.top_k, gather_sum_module.BLOCK_H
    blocks = {"BLOCK_H": block_h, "TRACE": False, **warp_options(gather_sum_module.WARPS)}
    yield kernel_launch(
        shape.name, dtype, f"H {h}", gather_sum_kernel, (x, ints, floats, x, None, 8192, h, h, 1),
        {"TOP_K": k, "HAS_WEIGHTS": True, "BLOCK_T": gather_sum_module.BLOCK_T, **blocks},
    )  # fmt: skip
    yield kernel_launch(
        shape.name, dtype, f"H {h}", gather_sum_backward_kernel,
        (x, x, floats, ints, ints, ints, x, floats, None, shape.rows, shape.rows, h, k, h, 1, h, 1),
        {"BLOCK_R": gather_sum_module.BLOCK_T, **blocks},
    )  # fmt: skip
    yield kernel_launch(
        shape.name, dtype, f"N {h}", bias_gradient_kernel, (x, floats, ints, None, shape.local_experts, h, h, 1),
        {"BLOCK_R": 64, "BLOCK_N": 64, "ACCUMULATE": True, "TRACE": False, **warp_options(4)},
    )  # fmt: skip
    for traced in (False, True):  # the trace itself must compile
        yield kernel_launch(
            shape.name, dtype, f"N {h}{' traced' if traced else ''}", zero_tail_kernel,
            (x, ints, ints if traced else None, shape.rows, h),
            {"BLOCK_M": 32, "BLOCK_N": 128, "TRACE": traced, **warp_options(8)},
        )  # fmt: skip


def _routing(shape: ExpertShape) -> Iterator[Launch]:
    floats, ints = tensor_like("float32"), tensor_like("int32")
    e, k, tokens = shape.experts, shape.top_k, 4096
    block_e, total = triton.next_power_of_2(e), 4096 * k
    tiles = total // routing.PLACE_BLOCK
    sigmoid = shape.name.startswith(("deepseek", "nemotron"))
    groups = 8 if shape.name.startswith("deepseek") else 1
    after = shape.gate.interleaved  # gpt-oss: softmax over the chosen
    rule = {
        "EXPERTS": e, "TOP_K": k, "SIGMOID": sigmoid, "AFTER_TOPK": after, "RENORMALIZE": not after,
        "BLOCK_T": routing.BLOCK_T, "BLOCK_E": block_e, "BLOCK_K": triton.next_power_of_2(k), "TRACE": False,
        **warp_options(routing.topk_warps(block_e)),
    }  # fmt: skip
    forward = {
        "GROUPS": groups, "KEEP": max(groups // 2, 1), "TOP2": True, "BY_LOGITS": not sigmoid, "HAS_BIAS": sigmoid,
        "HAS_MASK": False, "BLOCK_G": groups,
    }  # fmt: skip
    sizes = f"E {e} K {k}"
    yield kernel_launch(
        shape.name, "float32", sizes, topk_forward_kernel,
        (floats, floats if sigmoid else None, None, ints, floats, None, tokens, e, 1, 1e-20, 2.5), rule | forward,
    )  # fmt: skip
    yield kernel_launch(
        shape.name, "float32", sizes, topk_backward_kernel,
        (floats, floats, ints, floats, None, tokens, k, 1, e, 1, 1e-20, 2.5), rule,
    )  # fmt: skip
    flat = (total, tiles, e, k, k, 1)
    place_block = {"BLOCK": routing.PLACE_BLOCK, "TRACE": False, **warp_options(4)}
    yield kernel_launch(
        shape.name, "int32", sizes, histogram_kernel, (ints, ints, None, *flat), place_block | {"BLOCK_E": 32}
    )
    scan = {"BLOCK_T": 64, "BLOCK_E": 32, "TRACE": False, **warp_options(4)}
    yield kernel_launch(shape.name, "int32", sizes, tile_scan_kernel, (ints, ints, None, tiles, e), scan)
    row = {"BLOCK_E": block_e, "TRACE": False, **warp_options(4)}
    yield kernel_launch(shape.name, "int32", sizes, offsets_kernel, (ints, ints, None, e), row)
    yield kernel_launch(
        shape.name, "int32", sizes, place_kernel, (ints, ints, ints, ints, ints, None, *flat), place_block
    )
    yield kernel_launch(
        shape.name, "int32", sizes, tile_table_kernel, (ints, ints, ints, None, e), row | {"BLOCK_M": 128}
    )
    yield kernel_launch(
        shape.name, "float32", sizes, router_weight_gradient_kernel, (floats, ints, floats, None, total, 12),
        {"BLOCK": 128, "BLOCK_N": 16, "TRACE": False, **warp_options(4)},
    )  # fmt: skip


def _launch(
    shape: ExpertShape, choice: Choice, config: Config, sizes: str, function: Any, args: tuple[Any, ...],
    options: dict[str, Any],
) -> Launch:  # fmt: skip
    return Launch(
        choice.kernel, shape.name, choice.dtype, choice.size, choice.load, sizes, config, function, args, options
    )


def _precision(dtype: str) -> str:
    return "tf32x3" if dtype == "float32" else "ieee"
