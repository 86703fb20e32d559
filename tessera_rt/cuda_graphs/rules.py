"""Which operations a graph cannot hold: those that need the host, have shapes that depend on values, or draw from a
random generator that the graph does not know.

In a ``DryRun`` a function runs for real, and they are refused by name, before a capture would fail without one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tessera_rt.errors import CaptureError

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_HOST_READS = ("aten::item", "aten::is_nonzero")
_OWN_NAMESPACES = ("aten", "prims", "profiler", "c10d", "_c10d_functional")  # torch's, which are not opened
_BACKENDS = {"cpu": "CPU", "cuda": "CUDA", "meta": "Meta"}  # dispatch keys
_MASKED_WRITES = ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


def refusal(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device_type: str,
    generators: Sequence[torch.Generator] = (),
) -> str | None:
    """Why a graph on ``device_type`` that knows ``generators`` cannot hold a call of an operation; None if it can."""
    name, leaves = func._schema.name, tree_leaves((args, kwargs))
    types = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
    target = kwargs.get("device")
    if target is not None and types:
        types.add(torch.device(target).type)
    if device_type != "cpu" and types == {"cpu"}:
        # The host's own computing, constant like all of Python's, unless it keeps something.
        return "changes a tensor of the host, which a replay would not do" if func._schema.is_mutable else None
    if device_type != "cpu" and "cpu" in types and _reads_both(func):
        return f"moves values between the host and {device_type}; a replay would not read the host again"
    if torch.Tag.data_dependent_output in func.tags or name in _HOST_READS:
        return "reads a value on the host (item, tolist, int, float, bool, or a condition on a tensor)"
    if name in _MASKED_WRITES and _is_masked_fill(args):
        return None
    if name == "aten::index" or name in _MASKED_WRITES:
        masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
        return "has a shape that depends on values (a mask as index); use torch.where" if masks else None
    if torch.Tag.dynamic_output_shape in func.tags:
        return "has a shape that depends on values"
    for drawn in leaves:
        if isinstance(drawn, torch.Generator):
            # Dispatch makes other Python objects of generators.
            if all(drawn._cdata != known._cdata for known in generators):  # type: ignore[attr-defined]
                return "draws from a random generator that the graph does not know; pass it in generators="
    return None


def is_opaque(func: Any, device_type: str) -> bool:
    """An operation that a library defined (``torch.library``): what it does inside must be seen too."""
    if func.namespace in _OWN_NAMESPACES:
        return False
    return bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), _BACKENDS[device_type]))


def opened(mode: TorchDispatchMode, func: Any, args: tuple[Any, ...], kwargs: Any, device_type: str) -> Any:
    """Runs a library's operation so that ``mode``, whose handler calls this, sees the operations inside."""
    key = getattr(torch._C.DispatchKey, _BACKENDS[device_type])
    with mode:
        return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


def place_of_call(*hidden: str) -> str:
    """ " (file.py:12)" of the innermost line outside torch, this package and ``hidden`` files; "" if there is none."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _HERE)) and file not in hidden:
            return f" ({Path(file).name}:{frame.f_lineno})"
    return ""


class DryRun(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what a graph cannot hold while a function runs (also in its backward). Raises CaptureError."""

    def __init__(self, where: str, device_type: str, generators: Sequence[torch.Generator]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._where, self._device_type, self._generators = where, device_type, generators

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reason = refusal(func, args, kwargs, self._device_type, self._generators)
        if reason is not None:
            raise CaptureError(f"{self._where}: {func} {reason}{place_of_call()}")
        if is_opaque(func, self._device_type):
            return opened(self, func, args, kwargs, self._device_type)
        return func(*args, **kwargs)


def _reads_both(func: Any) -> bool:
    """Operations that take tensors of the host beside those of a device for their values. (Others, as attention, pass
    some along that they do not read.)"""
    name = func._schema.name
    copies = name in ("aten::_to_copy", "aten::copy_", "aten::copy", "aten::index", *_MASKED_WRITES)
    return copies or torch.Tag.pointwise in func.tags or name.startswith(("aten::_foreach_", "aten::_fused_"))


def _is_masked_fill(args: tuple[Any, ...]) -> bool:
    """x[mask] = one value: torch fills in place, without asking where."""
    _, indices, values = args[:3]
    masks = [index for index in indices if index is not None]
    accumulate = len(args) > 3 and args[3]
    return len(masks) == 1 and masks[0].dtype == torch.bool and values.numel() == 1 and not accumulate


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
