"""Which devices kernels run on, as the configuration table names them."""

from __future__ import annotations

import os

import torch
from triton.runtime import interpreter

from tessera_rt.errors import Problem, SpecError


def architecture(device: torch.device) -> str:
    """sm90, sm100, ..., or ``interpreter`` for interpreted kernels.

    Raises SpecError for a device that kernels cannot run on, and in Triton's interpreter as it comes: it computes bf16
    from bit patterns, without a word (``tessera_rt.testing.interpreter`` corrects it).
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return "sm100" if major == 10 else f"sm{major}{minor}"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        if not getattr(interpreter.interpreter_builder, "corrected", False):
            remedy = "call tessera_rt.testing.interpreter.install() first"
            raise SpecError.of("kernels", [Problem("interpreter", "Triton's own", "the corrected one", remedy)])
        return "interpreter"
    remedy = "use tessera_rt.kernels.reference there"
    raise SpecError.of("kernels", [Problem("device", str(device), "a CUDA device", remedy)])
