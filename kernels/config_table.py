"""The committed configurations, most specific first: the first row that fits is taken. Fixed before capture, never
tuned while running. Every row is compiled offline for its targets by tests/cpu/test_kernels_offline.py (no spills,
shared memory in the limit, tensor-core instructions); none has been ranked on a GPU yet.

Size classes: ``large`` from about 96 rows per expert on, ``small`` below, ``any`` where widths are no multiples of
16 elements. Layout: ``plain``, or of a gated product ``halves`` ([gate; up]) or ``interleaved``. Activation: name of
an ``options.Activation`` in lower case, ``none`` for products without one.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera_rt.errors import Problem

HALF = ("bfloat16", "float16")
MINORS = ("3.6", "3.7", "3.8", "3.9")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Blocks and compile options of one kernel. ``slices``: pieces of a tile that an epilogue works on in turn."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group_m: int = 8
    slices: int = 4

    def problems(self) -> list[Problem]:
        """What Triton cannot compile, or kernels do not work with."""
        found = []
        for name, least, most in (
            ("block_m", 16, 1024), ("block_n", 16, 1024), ("block_k", 16, 1024), ("warps", 1, 32), ("slices", 4, 8)
        ):  # fmt: skip
            value: object = getattr(self, name)
            if not (isinstance(value, int) and least <= value <= most and value.bit_count() == 1):
                found.append(Problem(name, value, f"a power of 2 from {least} to {most}"))
        for name in ("stages", "group_m"):
            number: object = getattr(self, name)
            if not (isinstance(number, int) and number >= 1):
                found.append(Problem(name, number, "a whole number, at least 1"))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rule: what it fits, and the configuration. Empty tuples fit everything."""

    kernels: tuple[str, ...]
    dtypes: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    activations: tuple[str, ...] = ()
    biased: tuple[bool, ...] = ()
    loads: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    minors: tuple[str, ...] = ()
    config: Config


def _config(block_m: int, block_n: int, block_k: int, warps: int, stages: int, slices: int = 4) -> Config:
    return Config(block_m=block_m, block_n=block_n, block_k=block_k, warps=warps, stages=stages, slices=slices)


ROWS_GEMM = ("forward", "forward_gate", "dgrad")
WGRAD = ("wgrad_write", "wgrad_accumulate")
HEAVY = ("swiglu_clamped", "swiglu_oss", "geglu", "geglu_tanh")  # activations that need more registers than SwiGLU
GATED_KERNELS = ("forward_gate", "gate_backward")  # those with an activation
KERNELS = (*ROWS_GEMM, "gate_backward", *WGRAD)

TABLE: tuple[Row, ...] = (
    # Interpreted: small blocks, so that small inputs have many tiles.
    Row(kernels=KERNELS, architectures=("interpreter",), config=_config(32, 32, 32, 4, 2)),
    # What spills on Blackwell with the configurations below, and does not with these.
    Row(
        kernels=("forward_gate",),
        dtypes=("float32",),
        layouts=("plain",),
        architectures=("sm100",),
        config=_config(64, 64, 32, 4, 3),
    ),
    Row(  # with tf32 the lower tile spills
        kernels=WGRAD,
        dtypes=("float32",),
        sizes=("large", "small"),
        architectures=("sm100",),
        config=_config(128, 64, 32, 4, 3),
    ),
    Row(
        kernels=("forward", "dgrad"),
        dtypes=HALF,
        sizes=("small",),
        loads=("gather",),
        architectures=("sm100",),
        config=_config(64, 128, 64, 8, 4),
    ),
    Row(  # the wider tile spills where the activation alone is written (recomputation)
        kernels=("forward_gate",),
        dtypes=HALF,
        sizes=("large",),
        layouts=("halves",),
        loads=("gather",),
        architectures=("sm100",),
        config=_config(128, 64, 64, 8, 4),
    ),
    Row(
        kernels=("forward_gate",),
        dtypes=HALF,
        sizes=("small",),
        layouts=("interleaved",),
        loads=("gather",),
        architectures=("sm100",),
        config=_config(64, 64, 64, 8, 4),
    ),
    Row(
        kernels=("gate_backward",),
        dtypes=HALF,
        sizes=("large",),
        layouts=("plain",),
        loads=("gather",),
        architectures=("sm100",),
        config=_config(128, 128, 64, 8, 4, 8),
    ),
    Row(  # with transposed weights
        kernels=("gate_backward",),
        dtypes=HALF,
        sizes=("large",),
        layouts=("halves",),
        activations=("swiglu",),
        loads=("tma",),
        architectures=("sm100",),
        config=_config(128, 128, 64, 8, 4, 8),
    ),
    Row(
        kernels=("gate_backward",),
        dtypes=HALF,
        sizes=("large",),
        layouts=("halves",),
        activations=HEAVY,
        loads=("gather",),
        architectures=("sm100",),
        config=_config(128, 128, 64, 8, 4, 8),
    ),
    Row(  # with a bias, or the addresses of gathered rows, the wider tile spills
        kernels=("forward_gate",),
        dtypes=HALF,
        sizes=("large",),
        layouts=("halves",),
        activations=HEAVY,
        config=_config(128, 64, 64, 8, 4),
    ),
    Row(
        kernels=("forward_gate",),
        dtypes=HALF,
        sizes=("large",),
        layouts=("halves",),
        biased=(True,),
        loads=("gather",),
        config=_config(128, 64, 64, 8, 4),
    ),
    # As many slices as with many rows, or a row's router gradient would be summed in another order.
    Row(
        kernels=("gate_backward",),
        dtypes=HALF,
        sizes=("small",),
        layouts=("plain",),
        loads=("gather",),
        architectures=("sm100",),
        config=_config(64, 128, 64, 4, 4, 8),
    ),
    Row(
        kernels=("gate_backward",),
        dtypes=HALF,
        sizes=("small",),
        layouts=("halves",),
        activations=("swiglu",),
        loads=("tma",),
        architectures=("sm100",),
        config=_config(64, 128, 64, 4, 4, 8),
    ),
    Row(
        kernels=("gate_backward",),
        dtypes=HALF,
        sizes=("small",),
        layouts=("halves",),
        activations=HEAVY,
        loads=("gather",),
        architectures=("sm100",),
        config=_config(64, 128, 64, 4, 4, 8),
    ),
    Row(
        kernels=("gate_backward",),
        dtypes=HALF,
        sizes=("small",),
        layouts=("halves",),
        activations=HEAVY,
        architectures=("sm100",),
        config=_config(64, 128, 64, 8, 4),
    ),
    Row(  # the error function
        kernels=("gate_backward",),
        dtypes=HALF,
        sizes=("small",),
        layouts=("halves",),
        activations=("geglu",),
        config=_config(64, 128, 64, 8, 4),
    ),
    # Any size: pointers and masks everywhere. A gated product has two accumulators, which spill at 64 columns.
    Row(kernels=("forward_gate",), sizes=("any",), config=_config(64, 32, 32, 4, 2)),
    Row(kernels=KERNELS, sizes=("any",), config=_config(64, 64, 32, 4, 2)),
    # fp32 by three tf32 products.
    Row(kernels=("forward", "dgrad"), dtypes=("float32",), config=_config(64, 64, 32, 4, 3)),
    Row(kernels=("forward_gate",), dtypes=("float32",), config=_config(64, 32, 32, 4, 3)),
    Row(kernels=("gate_backward",), dtypes=("float32",), config=_config(64, 64, 32, 4, 3)),
    Row(kernels=WGRAD, dtypes=("float32",), config=_config(64, 64, 32, 4, 3)),
    # Few rows per expert.
    Row(kernels=("forward", "dgrad"), sizes=("small",), config=_config(64, 128, 64, 4, 4)),
    Row(kernels=("forward_gate",), sizes=("small",), config=_config(64, 64, 64, 4, 4)),
    # Interleaved gates hold both halves of a slice at once: eight slices, or Triton 3.6 spills.
    Row(kernels=("gate_backward",), sizes=("small",), layouts=("interleaved",), config=_config(64, 128, 64, 4, 4, 8)),
    Row(kernels=("gate_backward",), sizes=("small",), config=_config(64, 128, 64, 4, 4)),
    # Many rows per expert.
    Row(kernels=("forward", "dgrad"), config=_config(128, 256, 64, 8, 3)),
    Row(kernels=("forward_gate",), layouts=("interleaved",), config=_config(128, 64, 64, 8, 4)),
    Row(kernels=("forward_gate",), layouts=("plain",), config=_config(128, 256, 64, 8, 3)),
    Row(kernels=("forward_gate",), config=_config(128, 128, 64, 8, 3)),
    Row(kernels=("gate_backward",), layouts=("interleaved",), config=_config(128, 128, 64, 8, 4, 8)),
    Row(kernels=("gate_backward",), config=_config(128, 128, 64, 8, 4)),
    Row(kernels=WGRAD, config=_config(128, 256, 64, 8, 3)),
)
