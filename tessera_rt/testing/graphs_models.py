"""Small models that capture: a MoE layer with a capacity, one on Triton kernels, a decoder layer, a training setup."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tessera_rt.cuda_graphs.device import GraphDevice
from tessera_rt.model_spec import Attention, AttentionKind
from tessera_rt.models.attention import GatedDeltaNet, SoftmaxAttention

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Target:
    """Where checks of capturing run: on the stand-in or on a GPU."""

    graphs: GraphDevice
    device: torch.device
    dtype: torch.dtype

    def random(self, *shape: int, requires_grad: bool = False) -> Tensor:
        """Normal numbers out of torch's CPU generator."""
        return torch.randn(*shape).to(self.device, self.dtype).requires_grad_(requires_grad)

    def place(self, module: M) -> M:
        """The module with normal weights of a size that keeps values near 1."""
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape) / max(parameter.shape[-1], 1) ** 0.5)
        return module.to(self.device, self.dtype)


class CapacityMoE(nn.Module):
    """The first ``held`` of ``experts`` gated experts, as a rank of an expert-parallel group holds them.

    x [..., H] -> [..., H]: the weighted sum over those of the ``top_k`` choices that are held here. How many rows they
    are depends on values; buffers have ``capacity`` rows (None: room for all), and a forward that needs more sets
    ``overflow`` (int32 [1]) to 1. ``counts`` [E] int64 adds up the tokens of every expert.
    """

    overflow: Tensor
    counts: Tensor

    def __init__(self, hidden: int, inner: int, experts: int, held: int, top_k: int, capacity: int | None) -> None:
        super().__init__()
        self.experts, self.held, self.top_k, self.capacity = experts, held, top_k, capacity
        self.router = nn.Parameter(torch.empty(experts, hidden))
        self.gate_up = nn.Parameter(torch.empty(held, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(held, hidden, inner))
        self.register_buffer("overflow", torch.zeros(1, dtype=torch.int32), persistent=False)
        self.register_buffer("counts", torch.zeros(experts, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        capacity = x.shape[:-1].numel() * self.top_k if self.capacity is None else self.capacity
        hidden = x.reshape(-1, x.shape[-1])
        scores = (hidden.float() @ self.router.float().mT).softmax(-1)
        ids = scores.detach().sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        weights = scores.gather(-1, ids).flatten()
        flat = ids.flatten()
        counts = (flat.unsqueeze(-1) == torch.arange(self.experts, device=x.device)).sum(0)
        ends = counts[: self.held].cumsum(0)
        self.counts.add_(counts)
        self.overflow.bitwise_or_((ends[-1:] > capacity).int())
        order = flat.argsort(stable=True)[:capacity]
        offsets = ends.clamp(max=capacity).int()
        valid = (torch.arange(capacity, device=x.device) < offsets[-1]).unsqueeze(-1)
        # Grouped products leave rows that belong to nobody unwritten, in their results and in their input gradients.
        rows = torch.where(valid, hidden[order // self.top_k], 0.0)
        product = functional.grouped_mm(rows, self.gate_up.mT, offs=offsets)
        gate, up = torch.where(valid, product, 0.0).chunk(2, dim=-1)
        rows = functional.grouped_mm(functional.silu(gate) * up, self.down.mT, offs=offsets)
        rows = torch.where(valid, rows, 0.0) * weights[order].unsqueeze(-1).to(x.dtype)
        out = torch.zeros_like(hidden).repeat_interleave(self.top_k, 0).index_copy(0, order, rows)
        return out.view(-1, self.top_k, x.shape[-1]).sum(1).view(x.shape)


@contextmanager
def room_for_all(model: nn.Module) -> Iterator[None]:
    """Without capacities in this context."""
    layers = [module for module in model.modules() if isinstance(module, CapacityMoE)]
    before = [layer.capacity for layer in layers]
    try:
        for layer in layers:
            layer.capacity = None
        yield
    finally:
        for layer, capacity in zip(layers, before, strict=True):
            layer.capacity = capacity


class Decoder(nn.Module):
    """x + mixer(x), then x + moe(norm(x)), for x [b, s, H]; the mixer is one of the hybrid model's."""

    def __init__(self, kind: AttentionKind, moe: nn.Module, hidden: int) -> None:
        super().__init__()
        if kind is AttentionKind.GATED_DELTA_NET:
            spec = Attention(kind=kind, heads=2, kv_heads=1, head_dim=8, v_dim=8, conv=3)
            self.mixer: nn.Module = GatedDeltaNet(hidden, spec, norm_eps=1e-6)
        else:
            spec = Attention(kind=kind, heads=4, kv_heads=2, head_dim=8, rope_dim=8, window=5)
            self.mixer = SoftmaxAttention(hidden, spec, norm_eps=1e-6, rope_theta=1e4)
        self.norm = nn.RMSNorm(hidden)
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(x)
        out: Tensor = x + self.moe(self.norm(x))
        return out


@dataclass(frozen=True, slots=True)
class Training:
    """A model with its optimizer. ``lr``: a tensor, changed in place."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    lr: Tensor

    @classmethod
    def of(cls, model: nn.Module) -> Training:
        device = next(model.parameters()).device
        lr = torch.tensor(0.01, device=device)
        capturable = device.type == "cuda"  # on the CPU the fused form reads nothing on the host anyway
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True, capturable=capturable)
        return cls(model, optimizer, lr)

    def twin(self) -> Training:
        """A copy that shares nothing."""
        other = Training.of(copy.deepcopy(self.model))
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        (group,) = other.optimizer.param_groups
        group["lr"] = other.lr
        other.lr.copy_(self.lr)
        for mine, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
            theirs.grad = None if mine.grad is None else mine.grad.clone()
        return other

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """One optimizer step over micro-batches [M, b, s, H]; the sum of their losses."""
        self.optimizer.zero_grad(set_to_none=True)
        total = inputs.new_zeros(())
        for x, y in zip(inputs.unbind(0), targets.unbind(0), strict=True):
            total = total + self.accumulate(x, y)
        self.optimizer.step()
        return total

    def accumulate(self, x: Tensor, y: Tensor) -> Tensor:
        """Forward and backward of a micro-batch: adds to the gradients."""
        loss = (self.model(x) - y).float().square().mean()
        loss.backward()
        detached: Tensor = loss.detach()
        return detached

    def values(self) -> dict[str, Tensor]:
        """Parameters, buffers, gradients and optimizer state by name."""
        found = {**self.model.state_dict()}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                found[f"{name}.grad"] = parameter.grad
            found |= {f"{name}.{key}": value for key, value in self.optimizer.state[parameter].items()}
        return found


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names in which two sets of tensors differ in any bit that ``torch.equal`` sees."""
    names = one.keys() | other.keys()
    return sorted(n for n in names if n not in one or n not in other or not torch.equal(one[n], other[n]))
