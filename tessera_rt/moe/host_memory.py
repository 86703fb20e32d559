"""Large host buffers on huge pages.

A weight gradient is as large as its weight and new in every step. On 4 KiB pages the kernel's page faults cost several
times what writing the values does; on 2 MiB pages they nearly vanish.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

_LARGE = 8 << 20  # bytes from which a mapping of its own pays


def large_empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised contiguous tensor; on Linux, large ones on the CPU ask for huge pages (where the system allows
    them on request). The memory is the tensor's own and is returned to the system with it."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
