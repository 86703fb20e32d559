"""Activations of experts and their derivatives, as device functions on fp32 tiles.

``ACTIVATION`` is a value of ``options.Activation``. Gated kinds map (gate, up) to one value; the others take ``up``
alone, and ``gate`` is ignored. Clamps are written with comparisons, so that NaN stays NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """The activation, fp32 in and out."""
    if ACTIVATION == 1:
        return gate * sigmoid(gate) * up
    elif ACTIVATION == 2:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        return gate * sigmoid(gate) * up
    elif ACTIVATION == 3:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        return gate * sigmoid(alpha * gate) * (up + 1.0)
    elif ACTIVATION == 4:
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == 5:
        return gate * sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    elif ACTIVATION == 6:
        positive = tl.where(up < 0.0, 0.0, up)
        return positive * positive
    else:
        return up


@triton.jit
def activate_backward(gate, up, grad, alpha, limit, ACTIVATION: tl.constexpr):
    """(activation, d gate, d up) for the gradient ``grad`` of the activation, fp32; d gate is 0 without a gate."""
    if ACTIVATION == 1:
        s = sigmoid(gate)
        value = gate * s
        return value * up, grad * up * s * (1.0 + gate * (1.0 - s)), grad * value
    elif ACTIVATION == 2:
        gate_open = gate <= limit
        up_open = (up <= limit) & (up >= -limit)
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        s = sigmoid(gate)
        value = gate * s
        d_gate = tl.where(gate_open, grad * up * s * (1.0 + gate * (1.0 - s)), 0.0)
        return value * up, d_gate, tl.where(up_open, grad * value, 0.0)
    elif ACTIVATION == 3:
        gate_open = gate <= limit
        up_open = (up <= limit) & (up >= -limit)
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        s = sigmoid(alpha * gate)
        value = gate * s
        d_gate = tl.where(gate_open, grad * up * s * (1.0 + alpha * gate * (1.0 - s)), 0.0)
        return value * up, d_gate, tl.where(up_open, grad * value, 0.0)
    elif ACTIVATION == 4:
        half = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        density = 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
        value = gate * half
        return value * up, grad * up * (half + gate * density), grad * value
    elif ACTIVATION == 5:
        # Beyond 30 s is exactly 0 or 1; without this bound the polynomials overflow and 0 times infinity gives NaN.
        inner = tl.where(gate > 30.0, 30.0, tl.where(gate < -30.0, -30.0, gate))
        s = sigmoid(1.5957691216057308 * (inner + 0.044715 * inner * inner * inner))
        slope = 1.5957691216057308 * (1.0 + 0.134145 * inner * inner)
        value = gate * s
        return value * up, grad * up * s * (1.0 + inner * (1.0 - s) * slope), grad * value
    elif ACTIVATION == 6:
        positive = tl.where(up < 0.0, 0.0, up)
        return positive * positive, tl.zeros_like(up), 2.0 * grad * positive
    else:
        return up, tl.zeros_like(up), grad
