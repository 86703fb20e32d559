"""ShardedOptimizer: AdamW or SGD on this rank's shard of every bucket, with the arithmetic of torch.optim.

The ranks that reduce a bucket together share its optimizer state: each updates its shard and gathers the others'. The
model's parameters become views of flat tensors, one per bucket, so an update is one all-gather per bucket. bf16 and
fp16 parameters have fp32 masters; fp32 and fp64 parameters are their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessera_rt.engine.buckets import Bucket, all_gather, gathered
from tessera_rt.engine.grads import GradientBuffers, check_tensors
from tessera_rt.errors import Problem, SpecError

_APPLIED = "applied_steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """``kind``: adamw (decoupled weight decay) | sgd (with ``momentum``; weight decay added to the gradient).

    ``weight_decay`` applies to parameters whose info says ``decay``. ``clip``: largest global gradient norm, 0 = none.
    Raises SpecError with all values out of range.
    """

    kind: str = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.0
    clip: float = 1.0

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        if self.kind not in ("adamw", "sgd"):
            problems.append(Problem("optimizer.kind", self.kind, "adamw | sgd"))
        for name in ("lr", "weight_decay", "clip", "eps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                problems.append(Problem(f"optimizer.{name}", value, "a finite number >= 0"))
        shares = [(f"betas[{i}]", beta) for i, beta in enumerate(self.betas)] + [("momentum", self.momentum)]
        for name, value in shares:
            if not 0 <= value < 1:
                problems.append(Problem(f"optimizer.{name}", value, "at least 0 and less than 1"))
        if problems:
            raise SpecError.of("optimizer", problems)

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the state tensors, as in torch.optim."""
        if self.kind == "adamw":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self.momentum else ()


def clip_scale(norm: float, largest: float) -> float:
    """Factor that brings gradients of global norm ``norm`` down to ``largest`` (0 = no limit)."""
    return largest / norm if 0 < largest < norm else 1.0


@dataclass(slots=True)
class _State:
    """Of one bucket: ``flat`` holds the parameters; the rest is this rank's shard in the main precision."""

    bucket: Bucket
    flat: Tensor
    master: Tensor
    moments: dict[str, Tensor]

    @property
    def own_master(self) -> bool:
        return self.bucket.dtype != self.bucket.main_dtype


class ShardedOptimizer:
    """Updates the parameters behind ``buffers`` from its reduced gradients. ``applied``: updates done so far."""

    def __init__(self, buffers: GradientBuffers, config: OptimizerConfig) -> None:
        self.config = config
        self.applied = 0
        self._buffers = buffers
        self._states = [self._flatten(bucket) for bucket in buffers.buckets]

    @torch.no_grad()
    def step(self, norm: float, *, lr: float | None = None) -> bool:
        """One update with gradients clipped by their global ``norm`` (collective). ``lr``: default, the configured one.

        Returns whether the update was skipped: it is, on every rank alike, when the norm is not finite. Parameters and
        state then stay as they are.
        """
        if not math.isfinite(norm):
            return True
        self.applied += 1
        rate = self.config.lr if lr is None else lr
        scale = clip_scale(norm, self.config.clip)
        for state, gradient in zip(self._states, self._buffers.shards, strict=True):
            scaled = gradient * scale if scale != 1.0 else gradient
            decay = self.config.weight_decay if state.bucket.decay else 0.0
            if self.config.kind == "adamw":
                self._adamw(state, scaled, rate, decay)
            else:
                self._sgd(state, scaled, rate, decay)
        self._publish()
        return False

    def state_dict(self) -> dict[str, Tensor]:
        """Whole state tensors as ``<kind>/<layout-free name>`` (collective), and the number of updates.

        Kinds: exp_avg, exp_avg_sq | momentum_buffer; and master for parameters in low precision. So any other layout
        can take over its part.
        """
        found: dict[str, Tensor] = {_APPLIED: torch.tensor(self.applied)}
        for state in self._states:
            for kind, shard in self._kinds(state).items():
                flat = gathered(state.bucket, shard, self._buffers.groups, kind)
                found.update((f"{kind}/{name}", tensor) for name, tensor in state.bucket.named(flat))
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave, from any layout (collective). The parameters are to be loaded before.

        Raises SpecError for every tensor that is missing or has another shape.
        """
        wanted = {
            f"{kind}/{name}": tensor
            for state in self._states
            for kind in self._kinds(state)
            for name, tensor in state.bucket.named(state.flat)
        }
        check_tensors("optimizer state", state_dict, {_APPLIED: torch.tensor(0), **wanted})
        for state in self._states:
            for kind, shard in self._kinds(state).items():
                flat = torch.zeros(state.bucket.size, dtype=shard.dtype, device=shard.device)
                for name, tensor in state.bucket.named(flat):
                    tensor.copy_(state_dict[f"{kind}/{name}"])
                shard.copy_(state.bucket.own(flat))
        self.applied = int(state_dict[_APPLIED])
        self._publish()

    @torch.no_grad()
    def take_parameters(self) -> None:
        """Make the masters equal to the parameters, after these were changed from outside."""
        for state in self._states:
            if state.own_master:
                state.master.copy_(state.bucket.own(state.flat))

    @torch.no_grad()
    def _flatten(self, bucket: Bucket) -> _State:
        """Moves the bucket's parameters into one flat tensor; all uses of a weight become views of the same part."""
        flat = torch.zeros(bucket.size, dtype=bucket.dtype, device=bucket.device)
        for entry in bucket.entries:
            view = entry.view(flat)
            view.copy_(entry.weight.first.parameter)
            for use in entry.weight.uses:
                use.parameter.data = view
        master = bucket.own(flat)
        if bucket.dtype != bucket.main_dtype:
            master = master.to(bucket.main_dtype)
        return _State(bucket, flat, master, {name: torch.zeros_like(master) for name in self.config.moments})

    def _kinds(self, state: _State) -> dict[str, Tensor]:
        return ({"master": state.master} if state.own_master else {}) | state.moments

    def _adamw(self, state: _State, gradient: Tensor, lr: float, decay: float) -> None:
        """torch.optim.AdamW's operations in its order (Loshchilov, Hutter: Decoupled Weight Decay Regularization)."""
        beta1, beta2 = self.config.betas
        average, square = state.moments["exp_avg"], state.moments["exp_avg_sq"]
        state.master.mul_(1 - lr * decay)
        average.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correction1, correction2 = 1 - beta1**self.applied, 1 - beta2**self.applied
        denominator = (square.sqrt() / math.sqrt(correction2)).add_(self.config.eps)
        state.master.addcdiv_(average, denominator, value=-lr / correction1)

    def _sgd(self, state: _State, gradient: Tensor, lr: float, decay: float) -> None:
        """torch.optim.SGD's operations in its order."""
        if decay:
            gradient = gradient.add(state.master, alpha=decay)
        if self.config.momentum:
            gradient = state.moments["momentum_buffer"].mul_(self.config.momentum).add_(gradient)
        state.master.add_(gradient, alpha=-lr)

    def _publish(self) -> None:
        """Cast the masters to the parameters' dtype and gather all shards."""
        groups = self._buffers.groups
        started = []
        for state in self._states:
            own = state.bucket.own(state.flat)
            if state.own_master:
                own.copy_(state.master)
            if state.bucket.group is not None:
                started.append((state.bucket, state.bucket.group, all_gather(state.flat, own, state.bucket.group)))
        for bucket, group, work in started:
            groups.wait(work, f"the all-gather of updated parameters ({bucket.name})", group)
