"""The launches of the expert layer's products that are compiled offline, with arguments of a real call: kernel by
model, dtype, size class and load, in the variants that a layer makes (``Variant``).

A grouped product's code depends on its configuration, its flags, and on which sizes are 1 or multiples of 16, not on
the sizes themselves: many launches share one compilation, named by ``Launch.key``. tests/cpu/test_kernels_shipped.py
holds these launches to those that the wrappers make.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tessera_rt.kernels.config_table import GATED_KERNELS, KERNELS, WGRAD, Config
from tessera_rt.kernels.configs import Choice, config_for, layout_of
from tessera_rt.kernels.gate_backward_kernels import gate_backward_aligned, gate_backward_any
from tessera_rt.kernels.launch import (
    Launch,
    descriptor_like,
    element_size,
    ragged_like,
    tensor_like,
)
from tessera_rt.kernels.operands import launch_options
from tessera_rt.kernels.options import NO_GATE, Gate
from tessera_rt.kernels.rows_gemm_kernels import rows_gemm_aligned, rows_gemm_any
from tessera_rt.kernels.shapes import GATE_SHAPES, SHAPES, ExpertShape
from tessera_rt.kernels.wgrad_kernels import wgrad_aligned, wgrad_any

LOADS = ("tma", "gather")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """How a launch differs from the usual one of its kernel."""

    saves: bool = True  # forward_gate: whether the product is kept for the backward
    writes: bool = True  # forward_gate: whether the activation is written
    partials: bool = True  # gate_backward of gathered rows: whether the router's weights need a gradient
    one_choice: bool = False  # gathered rows are choices of a token each: units of a dispatch by rows
    tf32: bool = False  # fp32 by one tf32 product, where torch allows it, instead of three

    @property
    def text(self) -> str:
        """What a row of the report says of it behind its sizes."""
        said = {
            "activation only": not self.saves, "product only": not self.writes, "no partials": not self.partials,
            "one choice per token": self.one_choice, "tf32": self.tf32,
        }  # fmt: skip
        return "".join(f", {words}" for words, applies in said.items() if applies)


USUAL = Variant()


def product_launches(
    arch: str, minor: str, *, dtypes: tuple[str, ...], sizes: tuple[str, ...], shapes: tuple[ExpertShape, ...] = SHAPES
) -> Iterator[Launch]:
    """The grouped products of every model. Those of the ``any`` size class have widths that are no multiples of 16
    (``ExpertShape.odd``): others never run in it. Rows of one choice per token, whose code lacks a division, are
    compiled for the aligned classes in bf16 only; tf32 for the aligned classes only."""
    for shape, dtype, size, kernel, load in product(shapes, dtypes, sizes, KERNELS, LOADS):
        sized = shape.odd if size == "any" else shape
        for variant in _variants(shape, kernel, load):
            yield from _products(sized, kernel, dtype, size, load, arch, minor, variant)
            if (dtype, load) == ("bfloat16", "gather") and size != "any" and kernel not in ("forward", "dgrad"):
                yield from _products(
                    sized, kernel, dtype, size, load, arch, minor, replace(variant, one_choice=True)
                )  # fmt: skip
            if dtype == "float32" and size != "any":
                yield from _products(sized, kernel, dtype, size, load, arch, minor, replace(variant, tf32=True))


def gate_launches(arch: str, minor: str, *, dtypes: tuple[str, ...], sizes: tuple[str, ...]) -> Iterator[Launch]:
    """The products with an activation, for the activations and layouts that no model of ``SHAPES`` has; in the small
    class, whose tiles are half as high, the usual variant only."""
    for shape, dtype, size, kernel, load in product(GATE_SHAPES, dtypes, sizes, GATED_KERNELS, LOADS):
        for variant in _variants(shape, kernel, load) if size == "large" else (USUAL,):
            yield from _products(shape, kernel, dtype, size, load, arch, minor, variant)


def _variants(shape: ExpertShape, kernel: str, load: str) -> tuple[Variant, ...]:
    """What a layer makes of the kernels that gather in it."""
    if load == "gather" and kernel == "forward_gate":  # recomputation
        return USUAL, Variant(saves=False), Variant(writes=False)
    if load == "gather" and kernel == "gate_backward" and not shape.bias:  # behind a bias it does not gather
        return USUAL, Variant(partials=False)
    return (USUAL,)


def _products(
    shape: ExpertShape, kernel: str, dtype: str, size: str, load: str, arch: str, minor: str, variant: Variant
) -> Iterator[Launch]:
    gate = shape.gate if kernel in GATED_KERNELS else NO_GATE
    choice = Choice(
        kernel=kernel, dtype=dtype, size=size, layout=layout_of(gate), activation=gate.activation.name.lower(),
        biased=shape.bias and kernel in ("forward", "forward_gate"), load=load, architecture=arch, minor=minor,
    )  # fmt: skip
    config = config_for(choice)
    if kernel in WGRAD:
        yield from _wgrad_launches(shape, choice, config, variant)
    elif kernel == "gate_backward":
        yield _gate_backward_launch(shape, choice, config, gate, variant)
    else:
        yield _rows_launch(shape, choice, config, gate, variant)


def _divisor(shape: ExpertShape, choice: Choice, variant: Variant) -> int:
    return 1 if choice.load == "tma" or variant.one_choice else shape.top_k


def _rows_launch(shape: ExpertShape, choice: Choice, config: Config, gate: Gate, variant: Variant) -> Launch:
    first = choice.kernel == "forward_gate"
    backward = choice.kernel == "dgrad"
    # forward: down [E, H, I]; forward_gate: gate_up [E, 2 I, H]; dgrad: gate_up.mT [E, H, 2 I]
    n_product, k = (
        (shape.product, shape.hidden) if first
        else (shape.hidden, shape.product) if backward
        else (shape.hidden, shape.intermediate)
    )  # fmt: skip
    n, n_first = gate.width(n_product), shape.transposed == backward
    gather, bias, saves = choice.load == "gather", shape.bias and not backward, first and variant.saves
    options = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
        "GATHER": gather, "ACTIVATION": int(gate.activation), "GATED": gate.gated,
        "INTERLEAVED": gate.gated and gate.interleaved, "HAS_BIAS": bias,
        "SAVE_PRE": saves, "WRITE_OUT": variant.writes, "PRECISION": _precision(choice.dtype, variant),
        "TRACE": False, **launch_options(config),
    }  # fmt: skip
    sizes = f"N {n} K {k}{variant.text}"
    x, ints = tensor_like(choice.dtype), tensor_like("int32")
    tensors = (x if bias else None, x, x if saves else None, ints if gather else None, ints, ints, ints)
    last = (_divisor(shape, choice, variant), gate.alpha, gate.limit)
    if choice.size == "any":
        strided = (x, x, *tensors, None, n, k, k, 1, *_weight_strides(n_product, k, n_first), *last)
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
    args = (a, weight, *tensors, None, n, k, k, *last)
    return _launch(shape, choice, config, sizes, rows_gemm_aligned, args, options | flags)


def _gate_backward_launch(shape: ExpertShape, choice: Choice, config: Config, gate: Gate, variant: Variant) -> Launch:
    n, k = shape.intermediate, shape.hidden
    gather, n_first = choice.load == "gather", shape.transposed  # down.mT [E, I, H]
    partials = gather and variant.partials
    options = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
        "SLICES": config.slices, "GATHER": gather, "ACTIVATION": int(gate.activation), "GATED": gate.gated,
        "INTERLEAVED": gate.gated and gate.interleaved, "HAS_SCALE": gather, "WRITE_PARTIALS": partials,
        "PRECISION": _precision(choice.dtype, variant), "TRACE": False, **launch_options(config),
    }  # fmt: skip
    x, ints, floats = tensor_like(choice.dtype), tensor_like("int32"), tensor_like("float32")
    tensors = (
        x, floats if gather else None, x, x, floats if partials else None, ints if gather else None, ints, ints, ints,
    )  # fmt: skip
    sizes, last = f"N {n} K {k}{variant.text}", (_divisor(shape, choice, variant), gate.alpha, gate.limit)
    if choice.size == "any":
        strided = (x, x, *tensors, None, n, k, k, 1, *_weight_strides(n, k, n_first), *last)
        return _launch(shape, choice, config, sizes, gate_backward_any, strided, options)
    block = (1, config.block_n, config.block_k) if n_first else (1, config.block_k, config.block_n)
    weight = descriptor_like(choice.dtype, (shape.local_experts, *((n, k) if n_first else (k, n))), block)
    a = x if gather else descriptor_like(choice.dtype, (shape.rows, k), (config.block_m, config.block_k))
    flags = {"N_FIRST": n_first, "EVEN_K": k % config.block_k == 0}
    args = (a, weight, *tensors, None, n, k, k, *last)
    return _launch(shape, choice, config, sizes, gate_backward_aligned, args, options | flags)


def _weight_strides(n: int, k: int, n_first: bool) -> tuple[int, int, int]:
    """Strides of the view [E, N, K] of a weight that is stored so (``n_first``), or as [E, K, N]."""
    return (n * k, k, 1) if n_first else (n * k, 1, n)


def _wgrad_launches(shape: ExpertShape, choice: Choice, config: Config, variant: Variant) -> Iterator[Launch]:
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
            "ELEMENT": element_size(choice.dtype), "PRECISION": _precision(choice.dtype, variant), "TRACE": False,
            **launch_options(config),
        }  # fmt: skip
        x, ints = tensor_like(choice.dtype), tensor_like("int32")
        out, index = tensor_like("float32") if accumulate else x, ints if gather else None
        sizes, divisor = (shape.rows, shape.local_experts, p, q), _divisor(shape, choice, variant)
        text = f"{weight} N {n} K {k}{variant.text}"
        if choice.size == "any":
            strided = (x, x, out, index, ints, None, *sizes, p, 1, q, 1, divisor)
            yield _launch(shape, choice, config, text, wgrad_any, strided, options)
            continue
        left = x if gather_left else ragged_like(choice.dtype, p, config.block_k, config.block_m)
        right = x if gather_right else ragged_like(choice.dtype, q, config.block_k, config.block_n)
        args = (left, right, out, index, ints, None, *sizes, p, q, divisor)
        yield _launch(shape, choice, config, text, wgrad_aligned, args, options)


def _launch(
    shape: ExpertShape, choice: Choice, config: Config, sizes: str, function: Any, args: tuple[Any, ...],
    options: dict[str, Any],
) -> Launch:  # fmt: skip
    # In the any-size class rows in order are read through pointers, not by TMA.
    load = "pointer" if (choice.size, choice.load) == ("any", "tma") else choice.load
    return Launch(choice.kernel, shape.name, choice.dtype, choice.size, load, sizes, config, function, args, options)


def _precision(dtype: str, variant: Variant) -> str:
    return "ieee" if dtype != "float32" else "tf32" if variant.tf32 else "tf32x3"
