"""A launch that is compiled offline, and stand-ins for its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tessera_rt.kernels.config_table import KERNELS, ROWS_GEMM, Config

_DTYPES = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32,
    "int8": torch.int8, "int64": torch.int64,
}  # fmt: skip


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
    least_store_bytes: int = 0  # the widest global store of the code must be at least this wide

    @property
    def key(self) -> str:
        """Equal for launches that compile to the same code."""
        parts = [self.function.__name__, *(_signature(arg) for arg in self.args)]
        return "|".join([*parts, repr(sorted(self.options.items()))])

    @property
    def module(self) -> str:
        """The file of ``function`` in this folder, without .py."""
        return str(self.function.fn.__module__).rpartition(".")[2]

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product, which must run on tensor cores."""
        return self.kernel in KERNELS

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the accumulator; a gated tile has two columns per column of its output."""
        doubled = self.options.get("GATED") and self.kernel in ROWS_GEMM
        return self.config.block_m, self.config.block_n * (2 if doubled else 1)


def kernel_launch(
    model: str, dtype: str, sizes: str, function: Any, args: tuple[Any, ...], options: dict[str, Any],
    *, least_store_bytes: int = 0,
) -> Launch:  # fmt: skip
    """A launch of a kernel that is no matrix product, named after its function."""
    config = Config(block_m=0, block_n=0, block_k=0, warps=options["num_warps"], stages=0)
    name = function.__name__.removesuffix("_kernel")
    return Launch(
        name, model, dtype, "any", "pointer", sizes, config, function, args, options,
        least_store_bytes=least_store_bytes,
    )  # fmt: skip


def tensor_like(dtype: str) -> Tensor:
    """Stands for a tensor of the dtype (int32 if unknown): only dtype and alignment matter to the compiler."""
    return torch.empty(1, dtype=_DTYPES.get(dtype, torch.int32))


def descriptor_like(dtype: str, shape: tuple[int, ...], block: tuple[int, ...]) -> TensorDescriptor:
    """Stands for the descriptor of a contiguous tensor."""
    strides = [1]
    for width in reversed(shape[1:]):
        strides.insert(0, strides[0] * width)
    return TensorDescriptor(tensor_like(dtype), list(shape), strides, list(block))


def ragged_like(dtype: str, width: int, block_rows: int, block_columns: int) -> TensorDescriptor:
    """Stands for ``descriptors.ragged`` of rows of ``width``."""
    far, limit = 0x7FFF0000, 1 << 30
    strides = [(1 << 34) - width, width, width, 1]
    return TensorDescriptor(tensor_like(dtype), [far, far, limit, width], strides, [1, 1, block_rows, block_columns])


def element_size(dtype: str) -> int:
    """Bytes of an element."""
    return _DTYPES[dtype].itemsize


def _signature(arg: Any) -> str:
    if isinstance(arg, Tensor):
        return str(arg.dtype)
    if isinstance(arg, TensorDescriptor):
        return f"{arg.base.dtype}{arg.block_shape}"
    if isinstance(arg, int):
        wide = "" if -(1 << 31) <= arg < 1 << 31 else " int64"
        return ("1" if arg == 1 else "16n" if arg % 16 == 0 else "int") + wide
    return type(arg).__name__
