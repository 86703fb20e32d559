"""The engine: runs a plan on this process's rank. ``Engine(model, plan).step(batch)`` fits in one's own loop."""

from tessera_rt.engine.batch import Batch
from tessera_rt.engine.device import CpuDevice
from tessera_rt.engine.emulated import EmulatedDevice
from tessera_rt.engine.engine import Engine, StepResult
from tessera_rt.engine.optim import OptimizerConfig
from tessera_rt.engine.stub import StubModel

__all__ = ["Batch", "CpuDevice", "EmulatedDevice", "Engine", "OptimizerConfig", "StepResult", "StubModel"]
