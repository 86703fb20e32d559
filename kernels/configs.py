"""Choosing a configuration from the committed table, and the table's fingerprint for the plan."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product

import torch
import triton
from torch import Tensor

from tessera_rt.errors import Problem, SpecError
from tessera_rt.kernels.architecture import architecture
from tessera_rt.kernels.config_table import GATED_KERNELS, HALF, KERNELS, MINORS, TABLE, Config
from tessera_rt.kernels.options import NO_GATE, Activation, Gate

LARGE_FROM = 96  # mean rows per expert from which 128-row tiles are used; from tile quantisation, not measured
TENSOR_CORE_ARCHITECTURES = ("sm90", "sm100", "interpreter")  # with TMA; others take the any-size class


GATES = tuple(
    Gate(activation=activation, interleaved=interleaved)
    for activation in Activation
    for interleaved in ((False, True) if activation.gated else (False,))
    if activation is not Activation.NONE
)
"""Every activation in every layout of its columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a configuration depends on. All of it is known on the host, so a plan can name it before capture."""

    kernel: str
    dtype: str
    size: str  # large | small | any
    layout: str = "plain"  # plain | halves | interleaved
    activation: str = "none"
    biased: bool = False
    load: str = "tma"  # tma | gather
    architecture: str
    minor: str  # Triton's


def layout_of(gate: Gate) -> str:
    """The layout of the product's columns, as the table names it."""
    return "plain" if not gate.gated else "interleaved" if gate.interleaved else "halves"


def triton_minor(installed: str | None = None) -> str:
    """A version of Triton (by default the installed one) as the table knows it: newer ones count as the newest known,
    with a warning."""
    installed = installed or triton.__version__
    major, minor = installed.split(".")[:2]
    version = f"{major}.{minor}"
    if version in MINORS:
        return version
    newest = MINORS[-1]
    if (int(major), int(minor)) < tuple(map(int, MINORS[0].split("."))):
        raise SpecError.of("kernels", [Problem("triton", installed, f"at least {MINORS[0]}")])
    warnings.warn(f"Triton {version} is newer than the configuration table; using those of {newest}", stacklevel=2)
    return newest


def config_for(choice: Choice) -> Config:
    """The first row of the table that fits. Raises SpecError where there is none."""
    for row in TABLE:
        fits = (
            choice.kernel in row.kernels
            and choice.dtype in (row.dtypes or (choice.dtype,))
            and choice.size in (row.sizes or (choice.size,))
            and choice.layout in (row.layouts or (choice.layout,))
            and choice.activation in (row.activations or (choice.activation,))
            and choice.biased in (row.biased or (choice.biased,))
            and choice.load in (row.loads or (choice.load,))
            and choice.architecture in (row.architectures or (choice.architecture,))
            and choice.minor in (row.minors or (choice.minor,))
        )
        if fits:
            return row.config
    raise SpecError.of("kernel configuration", [Problem("choice", choice, "covered by the table")])


def choose(
    kernel: str,
    x: Tensor,
    rows: int,
    experts: int,
    *,
    aligned: bool,
    gather: bool,
    gate: Gate = NO_GATE,
    biased: bool = False,
) -> Choice:
    """The choice for a call: ``rows`` and ``experts`` are the host's numbers, ``aligned`` that of all row widths."""
    arch = architecture(x.device)
    if not aligned or arch not in TENSOR_CORE_ARCHITECTURES:
        size = "any"
    else:
        size = "large" if rows >= LARGE_FROM * experts else "small"
    return Choice(
        kernel=kernel,
        dtype=str(x.dtype).removeprefix("torch."),
        size=size,
        layout=layout_of(gate),
        activation=gate.activation.name.lower(),
        biased=biased,
        load="gather" if gather else "tma",
        architecture=arch,
        minor=triton_minor(),
    )


def all_choices(arch: str, minor: str, dtypes: tuple[str, ...] = HALF) -> tuple[Choice, ...]:
    """Every choice that can occur on an architecture, in a fixed order."""
    return tuple(
        Choice(
            kernel=kernel, dtype=dtype, size=size, layout=layout_of(gate), activation=gate.activation.name.lower(),
            biased=biased, load=load, architecture=arch, minor=minor,
        )
        for kernel, dtype, size, gate, biased, load in product(
            KERNELS, dtypes, ("large", "small", "any"), (NO_GATE, *GATES), (False, True), ("tma", "gather")
        )
        if (gate == NO_GATE or kernel in GATED_KERNELS) and (not biased or kernel in ("forward", "forward_gate"))
    )  # fmt: skip


@cache  # asked for in every layer's call
def tile_heights(arch: str) -> tuple[int, ...]:
    """Every tile height that the configurations of the rows products have on an architecture."""
    choices = all_choices(arch, MINORS[-1], (*HALF, "float32"))
    if arch not in TENSOR_CORE_ARCHITECTURES:
        choices = tuple(choice for choice in choices if choice.size == "any")
    return tuple(sorted({config_for(choice).block_m for choice in choices if "wgrad" not in choice.kernel}))


def fingerprint(arch: str, minor: str) -> str:
    """sha256 over every choice of the architecture with its configuration, for a plan or a measurement to name: other
    configurations can give other bits and other times."""
    table = [[asdict(choice), asdict(config_for(choice))] for choice in all_choices(arch, minor, (*HALF, "float32"))]
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def precision(dtype: torch.dtype) -> str:
    """Input precision of products: fp32 by three tf32 products, within a few units of fp32's last place.

    Plain tf32 is used when torch allows it for its own (``torch.backends.cuda.matmul.fp32_precision = "tf32"``, or
    ``torch.set_float32_matmul_precision("high")``).
    """
    if dtype != torch.float32:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"
