"""The gated delta rule: linear attention with a decaying state that is corrected towards each new value.

Per head, with state S [K, V], decay a_t = exp(log_decay_t) and writing strength b_t:

    S_t = a_t S_{t-1} + k_t (b_t (v_t - (a_t S_{t-1})^T k_t))^T          o_t = S_t^T q_t

Method: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024). The chunked form uses
the WY representation with the UT transform (Yang et al., "Parallelizing Linear Transformers with the Delta Rule over
Sequence Length", 2024): within a chunk the corrections solve one unit lower triangular system, so that the sequential
loop runs over chunks and all else is matrix products.

Shapes: q, k [b, s, heads, K]; v [b, s, heads, V]; log_decay (at most 0), beta [b, s, heads]; state [b, heads, K, V].
Computed in fp32 at least (float64 stays float64); outputs have the dtype of v, states that of the computation.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def delta_rule_recurrent(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Step by step, as written above -> (outputs [b, s, heads, V], final state). ``state`` None: zeros."""
    dtype = v.dtype
    q, k, v, log_decay, beta = _widened(q, k, v, log_decay, beta)
    state = _initial_state(k, v, state)
    outputs = []
    for t in range(v.shape[1]):
        state = state * log_decay[:, t, :, None, None].exp()
        correction = beta[:, t, :, None] * (v[:, t] - _read(state, k[:, t]))
        state = state + k[:, t].unsqueeze(-1) * correction.unsqueeze(-2)
        outputs.append(_read(state, q[:, t]))
    return (torch.stack(outputs, 1) if outputs else torch.zeros_like(v)).to(dtype), state


def delta_rule_chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None = None, *, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """The same in chunks of ``chunk`` steps; any sequence length."""
    dtype, length = v.dtype, v.shape[1]
    # Steps appended to fill the last chunk write nothing and do not decay: beta = 0, log_decay = 0.
    padding = -length % chunk
    q, k, v, log_decay, beta = _widened(q, k, v, log_decay, beta)
    state = _initial_state(k, v, state)
    q, k, v, log_decay, beta = (_in_chunks(x, padding, chunk) for x in (q, k, v, log_decay, beta))

    # From here: [b, heads, chunks, steps, ...]. ``decay`` is cumulative within a chunk; all differences of it that are
    # exponentiated are at most 0, so nothing overflows however strong the decay.
    decay = log_decay.cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).tril()
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~lower, float("-inf")).exp()
    interaction = (beta.unsqueeze(-1) * (k @ k.mT) * between).tril(-1)
    # Corrections: (1 + interaction) u = beta (v - exp(decay) S^T k), solved for both right-hand sides at once.
    targets = torch.cat([v, k * decay.exp().unsqueeze(-1)], -1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(interaction, targets, upper=False, unitriangular=True)
    from_values, from_state = solved.split([v.shape[-1], k.shape[-1]], -1)
    attention = (q @ k.mT) * between
    q_decayed = q * decay.exp().unsqueeze(-1)
    k_to_end = k * (decay[..., -1:] - decay).exp().unsqueeze(-1)
    chunk_decay = decay[..., -1].exp()

    outputs = []
    for c in range(v.shape[2]):
        correction = from_values[:, :, c] - from_state[:, :, c] @ state
        outputs.append(q_decayed[:, :, c] @ state + attention[:, :, c] @ correction)
        state = state * chunk_decay[:, :, c, None, None] + k_to_end[:, :, c].mT @ correction
    out = torch.cat(outputs, 2) if outputs else v.flatten(2, 3)
    return out.transpose(1, 2)[:, :length].to(dtype), state


def _widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)


def _initial_state(k: Tensor, v: Tensor, state: Tensor | None) -> Tensor:
    if state is not None:
        return state.to(v.dtype)
    return v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])


def _read(state: Tensor, key: Tensor) -> Tensor:
    """state [b, heads, K, V] read at key [b, heads, K] -> [b, heads, V]."""
    return (key.unsqueeze(-2) @ state).squeeze(-2)


def _in_chunks(x: Tensor, padding: int, chunk: int) -> Tensor:
    """[b, s, heads, ...] -> [b, heads, chunks, chunk, ...]."""
    x = functional.pad(x, (0, 0) * (x.ndim - 2) + (0, padding))
    return torch.unflatten(x.transpose(1, 2), 2, (-1, chunk))
