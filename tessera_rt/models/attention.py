"""Token mixers of the hybrid model: softmax attention (full or sliding window) and the gated delta net.

Shapes: x [b, s, H] -> what is added to x, [b, s, H]. Each begins with its norm. Every sequence of a micro-batch is
attended to by itself, causally.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tessera_rt.errors import Problem
from tessera_rt.model_spec import Attention, AttentionKind
from tessera_rt.models.delta_rule import delta_rule_chunked
from tessera_rt.split import SplitLinear


class SoftmaxAttention(nn.Module):
    """Grouped-query attention with rotary positions, optional q/k norm, output gate and sliding window."""

    def __init__(
        self,
        hidden: int,
        spec: Attention,
        *,
        norm_eps: float,
        rope_theta: float,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.rope_theta = spec, rope_theta
        self.norm = nn.RMSNorm(hidden, eps=norm_eps, device=device, dtype=dtype)

        def projection(inputs: int, outputs: int, bias: bool) -> SplitLinear:
            return SplitLinear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        def head_norm() -> nn.RMSNorm | None:
            return nn.RMSNorm(spec.head_dim, eps=norm_eps, device=device, dtype=dtype) if spec.qk_norm else None

        width = spec.heads * spec.head_dim
        self.query = projection(hidden, width, spec.bias)
        self.key = projection(hidden, spec.kv_heads * spec.head_dim, spec.bias)
        self.value = projection(hidden, spec.kv_heads * spec.head_dim, spec.bias)
        self.gate = projection(hidden, width, spec.bias) if spec.output_gate else None
        self.output = projection(width, hidden, spec.bias)
        self.query_norm, self.key_norm = head_norm(), head_norm()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q = self._heads(self.query(x), self.query_norm)
        k = self._heads(self.key(x), self.key_norm)
        v = self._heads(self.value(x), None)
        q, k = rotate(q, self.spec.rope_dim, self.rope_theta), rotate(k, self.spec.rope_dim, self.rope_theta)
        mask = self._window_mask(x) if self.spec.kind is AttentionKind.SLIDING else None
        mixed = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.spec.heads != self.spec.kv_heads
        )
        mixed = mixed.transpose(1, 2).flatten(2)
        if self.gate is not None:
            mixed = mixed * torch.sigmoid(self.gate(x))
        out: Tensor = self.output(mixed)
        return out

    def _heads(self, x: Tensor, norm: nn.RMSNorm | None) -> Tensor:
        """[b, s, heads * head_dim] -> [b, heads, s, head_dim]."""
        heads = torch.unflatten(x, -1, (-1, self.spec.head_dim))
        return (heads if norm is None else norm(heads)).transpose(1, 2)

    def _window_mask(self, x: Tensor) -> Tensor:
        """[s, s]: a token sees itself and the window - 1 tokens before it."""
        position = torch.arange(x.shape[1], device=x.device)
        distance = position.unsqueeze(-1) - position
        return (distance >= 0) & (distance < self.spec.window)


class GatedDeltaNet(nn.Module):
    """Linear attention by the gated delta rule, as in Qwen3-Next: short causal convolution over q, k, v, normalised q
    and k, a decay and a writing strength per head, and a gated norm before the output projection.

    ``spec.heads`` value heads of width ``v_dim`` share ``spec.kv_heads`` query/key heads of width ``head_dim``.
    """

    def __init__(
        self,
        hidden: int,
        spec: Attention,
        *,
        norm_eps: float,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.norm = nn.RMSNorm(hidden, eps=norm_eps, device=device, dtype=dtype)

        def projection(inputs: int, outputs: int) -> SplitLinear:
            return SplitLinear(inputs, outputs, bias=False, device=device, dtype=dtype)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        key_width, value_width = spec.kv_heads * spec.head_dim, spec.heads * spec.v_dim
        self.query = projection(hidden, key_width)
        self.key = projection(hidden, key_width)
        self.value = projection(hidden, value_width)
        self.gate = projection(hidden, value_width)
        self.beta = projection(hidden, spec.heads)
        self.decay = projection(hidden, spec.heads)
        self.conv_weight = parameter(2 * key_width + value_width, spec.conv)
        self.decay_log_rate = parameter(spec.heads)
        self.decay_bias = parameter(spec.heads)
        self.value_norm = nn.RMSNorm(spec.v_dim, eps=norm_eps, device=device, dtype=dtype)
        self.output = projection(value_width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x, spec = self.norm(x), self.spec
        widths = [spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.heads * spec.v_dim]
        projected = torch.cat([self.query(x), self.key(x), self.value(x)], -1)
        q, k, v = torch.split(functional.silu(causal_conv(projected, self.conv_weight)), widths, -1)
        q, k = self._key_heads(q) * spec.head_dim**-0.5, self._key_heads(k)
        wide = _wide(x)  # decays multiply up over a sequence
        step = functional.softplus(self.decay(x).to(wide) + self.decay_bias.to(wide))
        log_decay = -self.decay_log_rate.to(wide).exp() * step
        beta = torch.sigmoid(self.beta(x).to(wide))
        mixed, _ = delta_rule_chunked(q, k, torch.unflatten(v, -1, (-1, spec.v_dim)), log_decay, beta)
        gate = torch.unflatten(self.gate(x), -1, (-1, spec.v_dim))
        out: Tensor = self.output((self.value_norm(mixed) * functional.silu(gate)).flatten(2))
        return out

    def _key_heads(self, x: Tensor) -> Tensor:
        """[b, s, kv_heads * head_dim] -> [b, s, heads, head_dim] of length 1, in fp32 at least."""
        heads = torch.unflatten(x, -1, (-1, self.spec.head_dim)).to(_wide(x))
        normalised = heads * (heads.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        return normalised.repeat_interleave(self.spec.heads // self.spec.kv_heads, dim=2)


def rotate(x: Tensor, dims: int, theta: float) -> Tensor:
    """Rotary positions (Su et al. 2021) on the first ``dims`` of each head: x [b, heads, s, head_dim].

    Dimension i is paired with i + dims / 2; positions count from 0 in every sequence.
    """
    if dims == 0:
        return x
    # Angles need fp32: bf16 cannot tell positions beyond 256 apart.
    wide = _wide(x)
    frequency = theta ** -(torch.arange(0, dims, 2, device=x.device, dtype=wide) / dims)
    angle = torch.arange(x.shape[2], device=x.device, dtype=wide).unsqueeze(-1) * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second, rest = torch.split(x, [dims // 2, dims // 2, x.shape[-1] - dims], -1)
    first, second = first.to(wide), second.to(wide)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return torch.cat([rotated, rest], -1)


def causal_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Depthwise: y[t, c] = sum over j of weight[c, j] * x[t - J + 1 + j, c], for x [b, s, C] and weight [C, J]."""
    taps = weight.shape[1]
    padded = functional.pad(x, (0, 0, taps - 1, 0))
    out = padded[:, : x.shape[1]] * weight[:, 0]
    for j in range(1, taps):
        out = out + padded[:, j : j + x.shape[1]] * weight[:, j]
    return out


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def attention_problems(spec: Attention) -> list[Problem]:
    """What the hybrid model cannot run of a mixer's description."""
    runnable = (AttentionKind.SOFTMAX, AttentionKind.SLIDING, AttentionKind.GATED_DELTA_NET, AttentionKind.NONE)
    if spec.kind not in runnable:
        remedy = "other mixers can only be planned, not run"
        return [Problem("kind", str(spec.kind), ", ".join(runnable), remedy)]
    if spec.kind is AttentionKind.NONE:
        return []
    problems = [
        Problem(name, getattr(spec, name), "at least 1")
        for name in ("heads", "kv_heads", "head_dim")
        if getattr(spec, name) < 1
    ]
    if not problems and spec.heads % spec.kv_heads:
        problems.append(Problem("heads", spec.heads, f"a multiple of kv_heads {spec.kv_heads}"))
    if spec.kind is AttentionKind.GATED_DELTA_NET:
        problems += [Problem(n, getattr(spec, n), "at least 1") for n in ("v_dim", "conv") if getattr(spec, n) < 1]
        # Its projections have no bias, and its q/k normalisation and output gate are always there.
        if spec.bias:
            problems.append(Problem("bias", True, "false for a gated delta net"))
    else:
        if not (0 <= spec.rope_dim <= spec.head_dim and spec.rope_dim % 2 == 0):
            problems.append(Problem("rope_dim", spec.rope_dim, f"even, from 0 to head_dim {spec.head_dim}"))
        if spec.kind is AttentionKind.SLIDING and spec.window < 1:
            problems.append(Problem("window", spec.window, "at least 1"))
    return problems
