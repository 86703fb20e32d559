"""Memory of the stand-in for graphs: storages, who still holds them, poison, and tensors described by their place."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tessera_rt.testing.streams import CaptureRuleError


@dataclass(eq=False)
class Memory:
    """One storage that captured work uses. There is one of these per storage and device, and it alone, besides its
    owner, keeps the storage alive: so it can tell whether the owner does."""

    storage: torch.UntypedStorage
    dtype: torch.dtype
    first_use: str
    pointer: int = field(init=False)
    size: int = field(init=False)
    at_capture: torch.UntypedStorage | None = None
    """Its values while its graph was captured: a later capture that reads it computes with them."""

    def __post_init__(self) -> None:
        self.pointer, self.size = self.storage.data_ptr(), self.storage.nbytes()

    @property
    def free(self) -> bool:
        """Nobody but the stand-in holds it: its owner has let go of it, and others may get it."""
        return bool(torch._C._storage_Use_Count(self.storage._cdata) == 1)

    def poison(self) -> None:
        """NaN everywhere; the lowest number where integers were, True for truth values."""
        whole = torch.empty(0, dtype=self.dtype).set_(self.storage, 0, (self.size // self.dtype.itemsize,), (1,))
        if self.dtype == torch.bool:
            whole.fill_(True)
        elif self.dtype.is_floating_point or self.dtype.is_complex:
            whole.fill_(math.nan)
        else:
            whole.fill_(torch.iinfo(self.dtype).min)

    def copy(self) -> torch.UntypedStorage:
        values = torch.UntypedStorage(self.size)  # type: ignore[no-untyped-call]
        values.copy_(self.storage)
        return values

    def check_alive(self) -> None:
        if self.free:
            raise CaptureRuleError(f"replay uses memory that was freed after the capture: {self._text}")

    def check_unmoved(self) -> None:
        if self.storage.data_ptr() != self.pointer or self.storage.nbytes() != self.size:
            raise CaptureRuleError(f"replay uses memory that has moved since the capture: {self._text}")

    @property
    def _text(self) -> str:
        return f"{self.size} bytes, {str(self.dtype).removeprefix('torch.')}, first used by {self.first_use}"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as a place in memory. Holding it does not hold the tensor."""

    memory: Memory
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, memory: Memory) -> TensorRef:
        return cls(memory, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def tensor(self) -> Tensor:
        """A tensor of that place."""
        return torch.empty(0, dtype=self.dtype).set_(self.memory.storage, self.offset, self.size, self.stride)
