"""Every launch that is compiled offline: kernel by model, dtype, size class and load, with arguments of a real call.

A grouped product's code depends on its configuration, its flags, and on whether sizes are multiples of 16, not on the
sizes themselves: many launches share one compilation, named by ``Launch.key``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tessera_rt.kernels import gather_sum as gather_sum_module
from tessera_rt.kernels import routing
from tessera_rt.kernels.config_table import KERNELS, ROWS_GEMM, WGRAD, Config
from tessera_rt.kernels.configs import Choice, config_for
from tessera_rt.kernels.gate_backward_kernels import gate_backward_aligned, gate_backward_any
from tessera_rt.kernels.gather_sum_kernels import (
    gather_sum_backward_kernel,
    gather_sum_kernel,
    router_weight_gradient_kernel,
)
from tessera_rt.kernels.operands import launch_options
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
from tessera_rt.kernels.shapes import SHAPES, ExpertShape
from tessera_rt.kernels.wgrad_kernels import bias_gradient_kernel, wgrad_aligned, wgrad_any

LOADS = ("tma", "gather")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: what it stands for, and what Triton compiles. ``sizes`` names N, K (and the rows of the batch)."""

    kernel: str
    model: str
    dtype: str
    size: str
    load: str
    sizes: str
    config: Config
    function: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def key(self) -> str:
        """Equal for launches that compile to the same code."""
        parts = [self.function.__name__, *(_signature(arg) for arg in self.args)]
        return "|".join([*parts, repr(sorted(self.options.items()))])

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product, which must run on tensor cores."""
        return self.kernel in KERNELS

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the accumulator; a gated tile has two columns per column of its output."""
        return self.config.block_m, self.config.block_n * (2 if self.options.get("GATED") and self._is_rows() else 1)

    def _is_rows(self) -> bool:
        return self.kernel in ROWS_GEMM


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


def _products(
    shape: ExpertShape, kernel: str, dtype: str, size: str, load: str, arch: str, minor: str
) -> Iterator[Launch]:
    gate = shape.gate if kernel in ("forward_gate", "gate_backward") else NO_GATE
    layout = "plain" if not gate.gated else "interleaved" if gate.interleaved else "halves"
    choice = Choice(
        kernel=kernel, dtype=dtype, size=size, layout=layout, load=load, architecture=arch, minor=minor
    )  # fmt: skip
    config = config_for(choice)
    builder = _wgrad_launches if kernel in WGRAD else _gate_backward_launch if kernel == "gate_backward" else _rows
    yield from builder(shape, choice, config, gate)


def _rows(shape: ExpertShape, choice: Choice, config: Config, gate: Gate) -> Iterator[Launch]:
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
        "SAVE_PRE": gate.activation is not Activation.NONE, "WRITE_OUT": True, "PRECISION": _precision(choice.dtype),
        "TRACE": False, **launch_options(config),
    }  # fmt: skip
    x = _like(choice.dtype)
    ints = _like("int32")
    tensors = (x if bias else None, x, x if options["SAVE_PRE"] else None, ints if gather else None, ints, ints, ints)
    if choice.size == "any":
        strides = (k, 1, n_product * k, k, 1)
        strided = (x, x, *tensors, None, n, k, *strides, shape.top_k, gate.alpha, gate.limit)
        yield _launch(shape, choice, config, f"N {n} K {k}", rows_gemm_any, strided, options)
        return
    columns = 2 * config.block_n if gate.gated else config.block_n
    if gate.gated and not gate.interleaved:
        weight = (
            _described(choice.dtype, (shape.local_experts, 2, n, k), (1, 2, config.block_n, config.block_k))
            if n_first
            else _described(choice.dtype, (shape.local_experts, k, 2, n), (1, config.block_k, 2, config.block_n))
        )
    elif n_first:
        weight = _described(choice.dtype, (shape.local_experts, n_product, k), (1, columns, config.block_k))
    else:
        weight = _described(choice.dtype, (shape.local_experts, k, n_product), (1, config.block_k, columns))
    a = x if gather else _described(choice.dtype, (shape.rows, k), (config.block_m, config.block_k))
    flags = {"N_FIRST": n_first, "EVEN_K": k % config.block_k == 0}
    args = (a, weight, *tensors, None, n, k, k, shape.top_k, gate.alpha, gate.limit)
    yield _launch(shape, choice, config, f"N {n} K {k}", rows_gemm_aligned, args, options | flags)


def _gate_backward_launch(shape: ExpertShape, choice: Choice, config: Config, gate: Gate) -> Iterator[Launch]:
    n, k = shape.intermediate, shape.hidden
    gather, n_first = choice.load == "gather", shape.transposed  # down.mT [E, I, H]
    options = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
        "SLICES": config.slices, "GATHER": gather, "ACTIVATION": int(gate.activation), "GATED": gate.gated,
        "INTERLEAVED": gate.gated and gate.interleaved, "HAS_SCALE": gather, "WRITE_PARTIALS": gather,
        "PRECISION": _precision(choice.dtype), "TRACE": False, **launch_options(config),
    }  # fmt: skip
    x, ints, floats = _like(choice.dtype), _like("int32"), _like("float32")
    tensors = (
        x, floats if gather else None, x, x, floats if gather else None, ints if gather else None, ints, ints, ints,
    )  # fmt: skip
    if choice.size == "any":
        strided = (x, x, *tensors, None, n, k, k, 1, n * k, 1, n, shape.top_k, gate.alpha, gate.limit)
        yield _launch(shape, choice, config, f"N {n} K {k}", gate_backward_any, strided, options)
        return
    block = (1, config.block_n, config.block_k) if n_first else (1, config.block_k, config.block_n)
    weight = _described(choice.dtype, (shape.local_experts, *((n, k) if n_first else (k, n))), block)
    a = x if gather else _described(choice.dtype, (shape.rows, k), (config.block_m, config.block_k))
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
            "ELEMENT": _DTYPES[choice.dtype].itemsize, "PRECISION": _precision(choice.dtype), "TRACE": False,
            **launch_options(config),
        }  # fmt: skip
        x, ints = _like(choice.dtype), _like("int32")
        out, index = _like("float32") if accumulate else x, ints if gather else None
        sizes = (shape.rows, shape.local_experts, p, q)
        text = f"{weight} N {n} K {k}"
        if choice.size == "any":
            strided = (x, x, out, index, ints, None, *sizes, p, 1, q, 1, shape.top_k)
            yield _launch(shape, choice, config, text, wgrad_any, strided, options)
            continue
        left = x if gather_left else _ragged(choice.dtype, p, config.block_k, config.block_m)
        right = x if gather_right else _ragged(choice.dtype, q, config.block_k, config.block_n)
        args = (left, right, out, index, ints, None, *sizes, p, q, shape.top_k)
        yield _launch(shape, choice, config, text, wgrad_aligned, args, options)


def _row_kernels(shape: ExpertShape, dtype: str) -> Iterator[Launch]:
    x, ints, floats = _like(dtype), _like("int32"), _like("float32")
    h, k, block_h = shape.hidden, shape.top_k, gather_sum_module.BLOCK_H
    blocks = {"BLOCK_H": block_h, "num_warps": gather_sum_module.WARPS}
    yield _other(
        shape, dtype, f"H {h}", gather_sum_kernel, (x, ints, floats, x, 8192, h, h, 1),
        {"TOP_K": k, "HAS_WEIGHTS": True, "BLOCK_T": gather_sum_module.BLOCK_T, **blocks},
    )  # fmt: skip
    yield _other(
        shape, dtype, f"H {h}", gather_sum_backward_kernel,
        (x, x, floats, ints, ints, ints, x, floats, shape.rows, shape.rows, h, k, h, 1, h, 1),
        {"BLOCK_R": gather_sum_module.BLOCK_T, **blocks},
    )  # fmt: skip
    yield _other(
        shape, dtype, f"N {h}", bias_gradient_kernel, (x, floats, ints, shape.local_experts, h, h, 1),
        {"BLOCK_R": 64, "BLOCK_N": 64, "ACCUMULATE": True, "num_warps": 4},
    )  # fmt: skip
    yield _other(
        shape, dtype, f"N {h}", zero_tail_kernel, (x, ints, shape.rows, h),
        {"BLOCK_M": 32, "BLOCK_N": 128, "num_warps": 8},
    )  # fmt: skip


def _routing(shape: ExpertShape) -> Iterator[Launch]:
    floats, ints = _like("float32"), _like("int32")
    e, k, tokens = shape.experts, shape.top_k, 4096
    block_e, total = triton.next_power_of_2(e), 4096 * k
    tiles = total // routing.PLACE_BLOCK
    sigmoid = shape.name.startswith(("deepseek", "nemotron"))
    groups = 8 if shape.name.startswith("deepseek") else 1
    after = shape.gate.interleaved  # gpt-oss: softmax over the chosen
    rule = {
        "EXPERTS": e, "TOP_K": k, "SIGMOID": sigmoid, "AFTER_TOPK": after, "RENORMALIZE": not after,
        "BLOCK_T": routing.BLOCK_T, "BLOCK_E": block_e, "BLOCK_K": triton.next_power_of_2(k),
        "num_warps": routing.topk_warps(block_e),
    }  # fmt: skip
    forward = {
        "GROUPS": groups, "KEEP": max(groups // 2, 1), "TOP2": True, "BY_LOGITS": not sigmoid, "HAS_BIAS": sigmoid,
        "HAS_MASK": False, "BLOCK_G": groups,
    }  # fmt: skip
    sizes = f"E {e} K {k}"
    yield _other(
        shape, "float32", sizes, topk_forward_kernel,
        (floats, floats if sigmoid else None, None, ints, floats, tokens, e, 1, 1e-20, 2.5), rule | forward,
    )  # fmt: skip
    yield _other(
        shape, "float32", sizes, topk_backward_kernel,
        (floats, floats, ints, floats, tokens, k, 1, e, 1, 1e-20, 2.5), rule,
    )  # fmt: skip
    flat = (total, tiles, e, k, k, 1)
    place_block = {"BLOCK": routing.PLACE_BLOCK, "num_warps": 4}
    yield _other(shape, "int32", sizes, histogram_kernel, (ints, ints, *flat), place_block | {"BLOCK_E": 32})
    scan = {"BLOCK_T": 64, "BLOCK_E": 32, "num_warps": 4}
    yield _other(shape, "int32", sizes, tile_scan_kernel, (ints, ints, tiles, e), scan)
    yield _other(shape, "int32", sizes, offsets_kernel, (ints, ints, e), {"BLOCK_E": block_e, "num_warps": 4})
    yield _other(shape, "int32", sizes, place_kernel, (ints, ints, ints, ints, ints, *flat), place_block)
    table = {"BLOCK_M": 128, "BLOCK_E": block_e, "num_warps": 4}
    yield _other(shape, "int32", sizes, tile_table_kernel, (ints, ints, ints, e), table)
    yield _other(
        shape, "float32", sizes, router_weight_gradient_kernel, (floats, ints, floats, total, 12),
        {"BLOCK": 128, "BLOCK_N": 16, "num_warps": 4},
    )  # fmt: skip


def _launch(
    shape: ExpertShape, choice: Choice, config: Config, sizes: str, function: Any, args: tuple[Any, ...],
    options: dict[str, Any],
) -> Launch:  # fmt: skip
    return Launch(
        choice.kernel, shape.name, choice.dtype, choice.size, choice.load, sizes, config, function, args, options
    )


def _other(
    shape: ExpertShape, dtype: str, sizes: str, function: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> Launch:
    config = Config(block_m=0, block_n=0, block_k=0, warps=options["num_warps"], stages=0)
    name = function.__name__.removesuffix("_kernel")
    return Launch(name, shape.name, dtype, "any", "pointer", sizes, config, function, args, options)


def _precision(dtype: str) -> str:
    return "tf32x3" if dtype == "float32" else "ieee"


def _like(dtype: str) -> Tensor:
    """Stands for a tensor of the dtype: only dtype and alignment matter to the compiler."""
    return torch.empty(1, dtype=_DTYPES.get(dtype, torch.int32))


def _described(dtype: str, shape: tuple[int, ...], block: tuple[int, ...]) -> TensorDescriptor:
    strides = [1]
    for width in reversed(shape[1:]):
        strides.insert(0, strides[0] * width)
    return TensorDescriptor(_like(dtype), list(shape), strides, list(block))


def _ragged(dtype: str, width: int, block_rows: int, block_columns: int) -> TensorDescriptor:
    far, limit = 0x7FFF0000, 1 << 30
    strides = [(1 << 34) - width, width, width, 1]
    return TensorDescriptor(_like(dtype), [far, far, limit, width], strides, [1, 1, block_rows, block_columns])


def _signature(arg: Any) -> str:
    if isinstance(arg, Tensor):
        return str(arg.dtype)
    if isinstance(arg, TensorDescriptor):
        return f"{arg.base.dtype}{arg.block_shape}"
    if isinstance(arg, int):
        return "1" if arg == 1 else "16n" if arg % 16 == 0 else "int"
    return type(arg).__name__
