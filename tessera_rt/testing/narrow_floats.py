"""bf16 and fp8 in numpy, which has neither: bit patterns to fp32 and back, rounded as a GPU rounds."""

from __future__ import annotations

import numpy as np
import torch

_FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
FP8_NAMES = frozenset(_FP8)
"""Triton's names of the fp8 types that are converted here."""


def bf16_to_float(bits: np.ndarray) -> np.ndarray:
    """bf16 bit patterns (uint16) to fp32, exactly."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def float_to_bf16(values: np.ndarray) -> np.ndarray:
    """fp32 to bf16 bit patterns (uint16), rounded to nearest even; every NaN becomes the same quiet NaN."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def rounded_to_odd(values: np.ndarray) -> np.ndarray:
    """fp64 to fp32 so that rounding the result to bf16 is rounding ``values`` once: inexact results get an odd last
    bit, so that none lies half-way between two bf16 by mistake."""
    narrow = np.ascontiguousarray(values.astype(np.float32))
    toward_zero = np.where(np.abs(narrow) > np.abs(values), np.nextafter(narrow, np.float32(0)), narrow)
    odd = (toward_zero.astype(np.float32).view(np.uint32) | np.uint32(1)).view(np.float32)
    return np.where((narrow == values) | ~np.isfinite(values), narrow, odd)


def fp8_to_float(bits: np.ndarray, name: str) -> np.ndarray:
    """fp8 bit patterns (uint8) of the type called ``name`` to fp32, exactly."""
    return torch.from_numpy(np.ascontiguousarray(bits)).view(_FP8[name]).float().numpy()


def float_to_fp8(values: np.ndarray, name: str) -> np.ndarray:
    """fp32 to fp8 bit patterns, rounded to nearest even; beyond the largest number, infinities too, that number."""
    dtype = _FP8[name]
    limit = torch.finfo(dtype).max
    wide = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    return wide.clamp(-limit, limit).to(dtype).view(torch.uint8).numpy()
