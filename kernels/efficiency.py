"""Upper bounds of what the kernels can reach on a GPU, from sizes alone: no measurement, no tuning.

For the grouped products, bound = min(peak x tile efficiency x wave efficiency, intensity x bandwidth). Tile efficiency
is the share of the computed tiles that is wanted: rows of the last tile of each expert and columns past N are computed
in vain. Wave efficiency is the share of the SMs' time that has a tile, tiles taking equally long. Real kernels stay
below: prologue and epilogue, instruction issue, power limits and L2 misses are not in it. The other kernels only move
data: their bound is the time for their bytes at full bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tessera_rt.kernels.config_table import WGRAD, Config
from tessera_rt.kernels.routing import PLACE_BLOCK
from tessera_rt.kernels.shapes import TOKENS_PER_RANK, ExpertShape
from tessera_rt.kernels.work import (
    Work,
    bias_gradient_work,
    choices_work,
    gate_backward_work,
    gather_sum_backward_work,
    gather_sum_work,
    per_expert_work,
    router_weight_gradient_work,
    rows_gemm_work,
    tile_scan_work,
    topk_work,
    wgrad_work,
    zero_tail_work,
)

HALF_BYTES, FLOAT_BYTES = 2, 4


@dataclass(frozen=True, slots=True)
class Peak:
    """A GPU's limits: dense bf16 operations per second, bytes per second, SMs."""

    name: str
    flops: float
    bandwidth: float
    sms: int


# Vendor's data sheets: H100 SXM (989 TFLOPS dense bf16, 3.35 TB/s) and B200 (2250 TFLOPS dense bf16, 8 TB/s).
PEAKS = {"sm90": Peak("H100 SXM", 989e12, 3.35e12, 132), "sm100": Peak("B200", 2250e12, 8.0e12, 148)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What one launch can reach at best, and why."""

    kernel: str
    model: str
    sizes: str
    rows_per_expert: float
    work: Work
    tile_efficiency: float
    wave_efficiency: float
    compute_bound: float  # operations per second
    memory_bound: float

    @property
    def flops(self) -> float:
        """The lower of the two bounds."""
        return min(self.compute_bound, self.memory_bound)

    @property
    def limited_by(self) -> str:
        return "memory" if self.memory_bound < self.compute_bound else "compute"


def layer_load(kernel: str, shape: ExpertShape, weight: str = "gate_up") -> str:
    """Whether a layer's launch of a product gathers its rows ("gather") or finds them in order ("tma"): what comes from
    the tokens is gathered, except that behind a bias the gradient of the rows exists in order."""
    in_order = kernel in ("forward", "dgrad")
    of_output = kernel == "gate_backward" or (kernel in WGRAD and weight == "down")
    return "tma" if in_order or (of_output and shape.bias) else "gather"


def product_sizes(kernel: str, shape: ExpertShape, weight: str = "gate_up") -> tuple[int, int]:
    """(N, K) of the product that a kernel does: for the weight gradient, those of the weight."""
    match kernel:
        case "forward_gate":
            return shape.product, shape.hidden
        case "forward":
            return shape.hidden, shape.intermediate
        case "gate_backward":
            return shape.intermediate, shape.hidden
        case "dgrad":
            return shape.hidden, shape.product
        case _:
            gate_up = (shape.product, shape.hidden)
            return gate_up if weight == "gate_up" else (shape.hidden, shape.intermediate)


def work_of(kernel: str, shape: ExpertShape, n: int, k: int, block_n: int) -> Work:
    """Operations and bytes of one launch in bf16, main gradients in fp32."""
    rows, experts = shape.rows, shape.local_experts
    if kernel in WGRAD:
        accumulate = kernel == "wgrad_accumulate"
        return wgrad_work(
            rows=rows, experts=experts, n=n, k=k, element=HALF_BYTES,
            out_element=FLOAT_BYTES if accumulate else HALF_BYTES, accumulate=accumulate,
        )  # fmt: skip
    if kernel == "gate_backward":
        partials = ceil(n / block_n)
        return gate_backward_work(
            rows=rows, experts=experts, n=n, k=k, element=HALF_BYTES, pre=shape.product, partials=partials
        )
    gated = kernel == "forward_gate"
    return rows_gemm_work(
        rows=rows, experts=experts, n=n, k=k, element=HALF_BYTES,
        out_columns=shape.intermediate if gated else n, saved=n if gated else 0,
        biased=shape.bias and kernel != "dgrad",
    )  # fmt: skip


def bound_of(
    kernel: str, shape: ExpertShape, config: Config, peak: Peak, *, sms: int, weight: str = "gate_up"
) -> Bound:
    """The bound of a launch on ``sms`` SMs under uniform routing, where every expert has the same rows."""
    n, k = product_sizes(kernel, shape, weight)
    per_expert = shape.rows / shape.local_experts
    gated = kernel == "forward_gate" and shape.gate.gated
    if kernel in WGRAD:
        p, q = (k, n) if shape.transposed else (n, k)  # as stored: tiles lie along the rows of memory
        down, across = ceil(p / config.block_m), ceil(q / config.block_n)
        steps = ceil(per_expert / config.block_k) * config.block_k
        computed = down * config.block_m * across * config.block_n * steps
    else:
        columns = config.block_n * (2 if gated else 1)
        down, across = ceil(per_expert / config.block_m), ceil(n / columns)
        computed = down * config.block_m * across * columns * ceil(k / config.block_k) * config.block_k
    tiles = down * across * shape.local_experts
    work = work_of(kernel, shape, n, k, config.block_n)
    tile_efficiency = per_expert * n * k / computed
    wave_efficiency = tiles / (ceil(tiles / sms) * sms)
    return Bound(
        kernel=kernel if kernel not in WGRAD else f"{kernel} {weight}",
        model=shape.name,
        sizes=f"N {n} K {k}",
        rows_per_expert=per_expert,
        work=work,
        tile_efficiency=tile_efficiency,
        wave_efficiency=wave_efficiency,
        compute_bound=peak.flops * sms / peak.sms * tile_efficiency * wave_efficiency,
        memory_bound=work.intensity * peak.bandwidth,
    )


def data_work(shape: ExpertShape) -> dict[str, Work]:
    """Operations and bytes of the kernels that are no products, by name: all tokens of a rank routed, activations in
    bf16, scores in fp32. Zeroing the tail is charged for one row per expert."""
    tokens, choices, rows, element = TOKENS_PER_RANK, TOKENS_PER_RANK * shape.top_k, shape.rows, HALF_BYTES
    experts, local, h, tiles = shape.experts, shape.local_experts, shape.hidden, ceil(choices / PLACE_BLOCK)
    score = {"tokens": tokens, "experts": experts, "top_k": shape.top_k, "element": FLOAT_BYTES}
    counted = {"choices": choices, "tiles": tiles, "experts": experts}
    return {
        "topk_forward": topk_work(**score, backward=False),
        "topk_backward": topk_work(**score, backward=True),
        "histogram": choices_work(**counted, placed=False),
        "tile_scan": tile_scan_work(tiles=tiles, experts=experts),
        "offsets": per_expert_work(experts=experts, written=experts),
        "place": choices_work(**counted, placed=True),
        "tile_table": per_expert_work(experts=local, written=ceil(rows / 128) + local),
        "gather_sum": gather_sum_work(rows=rows, tokens=tokens, h=h, element=element),
        "gather_sum_backward": gather_sum_backward_work(rows=rows, h=h, element=element),
        "router_weight_gradient": router_weight_gradient_work(
            choices=choices, column_tiles=ceil(shape.intermediate / 128)
        ),
        "bias_gradient": bias_gradient_work(rows=rows, experts=local, n=h, element=element, out_element=FLOAT_BYTES),
        "zero_tail": zero_tail_work(rows=local, n=h, element=element),
    }
