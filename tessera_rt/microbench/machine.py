"""What a measurement ran on: device, versions, and the GPU's clocks, power and throttle reasons around it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

try:
    import pynvml

    nvml: ModuleType | None = pynvml
except ModuleNotFoundError:  # the extra "measure"
    nvml = None

_REASONS = {
    0x002: "application clocks",
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "hardware power brake",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that slow a busy GPU down (NVML reference)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """``kind`` is cuda or cpu; ``sms`` the multiprocessors, or the CPU's cores."""

    kind: str
    name: str
    sms: int
    versions: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """A GPU at one moment. ``throttle``: what slows it down, by NVML's reasons."""

    sm_mhz: int
    memory_mhz: int
    power_w: float
    temperature_c: int
    throttle: tuple[str, ...]


def machine(device: torch.device) -> Machine:
    """The machine behind ``device``."""
    versions = f"torch {torch.__version__}, python {platform.python_version()}"
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        versions = f"{versions}, CUDA {torch.version.cuda}, {kernel_versions(device)}"
        return Machine(kind="cuda", name=found.name, sms=found.multi_processor_count, versions=versions)
    name = platform.processor() or platform.machine()
    return Machine(kind="cpu", name=name, sms=os.cpu_count() or 1, versions=versions)


def kernel_versions(device: torch.device) -> str:
    """Triton's version, and the fingerprint of the configurations that kernels have on ``device``: a plan that is
    costed with what was measured names both."""
    try:  # an optional package
        import triton

        from tessera_rt.kernels.architecture import architecture
        from tessera_rt.kernels.configs import fingerprint, triton_minor
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return "no Triton"
    name, minor = architecture(device), triton_minor()
    return f"Triton {triton.__version__}, kernel configurations {name} {fingerprint(name, minor)[:12]}"


class ClockReader:
    """Reads the clocks of a GPU through nvidia-ml-py. ``note`` says why there are none, or is empty."""

    def __init__(self, device: torch.device) -> None:
        self._handle: Any = None
        self.note = ""
        if device.type != "cuda":
            self.note = "clocks were not read: no GPU"
        elif nvml is None:
            self.note = "clocks were not read: nvidia-ml-py is not installed (pip install 'tessera-rt[measure]')"
        else:
            nvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid
            self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def read(self) -> list[Clocks]:
        """The clocks now; empty without a GPU or library."""
        if self._handle is None or nvml is None:
            return []
        bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)
        now = Clocks(
            sm_mhz=nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM),
            memory_mhz=nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_MEM),
            power_w=nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000,
            temperature_c=nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU),
            throttle=tuple(name for bit, name in _REASONS.items() if bits & bit),
        )
        return [now]


def slowed_down(readings: Iterable[Clocks]) -> list[str]:
    """A note on what slowed the GPU down, if anything did."""
    reasons = sorted({reason for clocks in readings for reason in clocks.throttle})
    return [f"the GPU was slowed down meanwhile: {', '.join(reasons)}"] if reasons else []
