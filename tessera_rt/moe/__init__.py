"""MoE layers: router, experts, transports, the whole layer as a module, and the task interface of the engine."""

from __future__ import annotations

from tessera_rt.kernels.options import Activation, Gate, RouterRule
from tessera_rt.moe.config import MoEConfig
from tessera_rt.moe.layer import MoE, MoERouting

__all__ = ["Activation", "Gate", "MoE", "MoEConfig", "MoERouting", "RouterRule"]
