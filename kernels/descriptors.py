"""Host-built TMA descriptors, and which tensors they can describe.

Host-built ones need no scratch memory on the device. They hold the tensor's address: a captured graph reads that
address, so the tensor must not move.
"""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_ROW_LIMIT = 1 << 30  # rows a ragged descriptor can address


def is_aligned(tensor: Tensor) -> bool:
    """Whether TMA can read it: last dimension contiguous, other strides and the address multiples of 16 bytes."""
    size = tensor.element_size()
    return (
        tensor.stride(-1) == 1
        and tensor.data_ptr() % 16 == 0
        and all(stride * size % 16 == 0 and stride > 0 for stride in tensor.stride()[:-1])
    )


def width_is_aligned(width: int) -> bool:
    """Whether rows of ``width`` elements are of the aligned class: a multiple of 16 elements, which Triton compiles
    16-byte accesses for. (TMA alone would take any multiple of 16 bytes.)"""
    return width > 0 and width % 16 == 0


def plain(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Descriptor of the whole tensor; reads past an edge give zeros."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


def ragged(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Descriptor [., ., R, C] of rows [R, C] that can end at any row: a read past it gives zeros.

    Coordinates [2^30, end, 2^30 - (end - first), column] read rows first, first + 1, ... and stop at ``end``, because
    the third dimension is declared 2^30 long; the first two shift the address back, whose arithmetic wraps at 2^64.
    (The method of triton.tools.ragged_tma, whose device helpers the interpreter cannot run.)
    """
    assert tensor.shape[0] <= _ROW_LIMIT
    stride, width = tensor.stride(0), tensor.shape[1]
    far = 0x7FFF0000
    return TensorDescriptor(
        tensor, [far, far, _ROW_LIMIT, width], [(1 << 34) - stride, stride, stride, 1], [1, 1, *block]
    )
