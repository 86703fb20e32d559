"""The sizes that microbenchmarks run at: one rank's share of a released model's expert layer, with random data."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tessera_rt.errors import Problem, SpecError
from tessera_rt.kernels.shapes import SHAPES, ExpertShape

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertProblem:
    """``tokens`` of one rank choose ``top_k`` experts each; uniform routing leaves ``rows`` rows for its ``experts``.

    ``experts`` are those of one of ``ep`` ranks. The experts' sizes are the model's.
    """

    shape: ExpertShape
    tokens: int
    experts: int
    dtype: torch.dtype
    device: torch.device

    @property
    def rows(self) -> int:
        return self.tokens * self.shape.top_k

    @property
    def title(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.shape.name}: {self.tokens} tokens, {self.experts} experts, {dtype}"

    def random(self, *sizes: int, scale: float = 1.0, seed: int = 0) -> Tensor:
        """Normal values: constant or zero data draws less power and flatters a GPU."""
        generator = torch.Generator(self.device).manual_seed(seed)
        values = torch.randn(sizes, generator=generator, device=self.device, dtype=torch.float32)
        return (values * scale).to(self.dtype)

    def choices(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Uniformly random ids [T, K] int32, distinct per token, and weights [T, K] fp32 that sum to 1."""
        generator = torch.Generator(self.device).manual_seed(seed)
        scores = torch.rand(self.tokens, self.experts, generator=generator, device=self.device)
        weights, ids = scores.topk(self.shape.top_k, dim=-1)
        return ids.to(torch.int32), weights / weights.sum(-1, keepdim=True)

    def offsets(self, seed: int = 0) -> Tensor:
        """Where each expert's rows start under ``choices``: [E + 1] int32."""
        ids, _ = self.choices(seed)
        counts = torch.bincount(ids.flatten().long(), minlength=self.experts)
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)


def expert_problem(model: str, *, tokens: int, ep: int = 8, dtype: str = "bf16", device: torch.device) -> ExpertProblem:
    """The problem of a model's name (``kernels.shapes``). Raises SpecError naming what is known or allowed."""
    found = {shape.name: shape for shape in SHAPES}
    problems = []
    if model not in found:
        problems.append(Problem("model", model, f"one of {', '.join(found)}"))
    if dtype not in DTYPES:
        problems.append(Problem("dtype", dtype, f"one of {', '.join(DTYPES)}"))
    if tokens < 1:
        problems.append(Problem("tokens", tokens, "at least 1"))
    if model in found and (ep < 1 or found[model].experts % ep):
        problems.append(Problem("ep", ep, f"a divisor of the {found[model].experts} experts of {model}"))
    elif model in found and found[model].experts // ep < found[model].top_k:
        problems.append(Problem("ep", ep, f"small enough to leave {found[model].top_k} experts a rank"))
    if problems:
        raise SpecError.of("microbench", problems)
    shape = replace(found[model])
    return ExpertProblem(shape=shape, tokens=tokens, experts=shape.experts // ep, dtype=DTYPES[dtype], device=device)
