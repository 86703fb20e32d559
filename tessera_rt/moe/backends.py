"""The experts' computation behind one interface, with a backend that is chosen where it can be seen.

    triton  CUDA: ``kernels.expert_mlp``; counts stay on the device, nothing waits for the host
    torch   CPU: torch's grouped products (``torch_backend``)

``routed_experts`` takes a token batch with its routing, ``grouped_experts`` rows that are ordered by expert already
(they arrived over a transport). Both are differentiable once, in inputs and all weights, and deterministic.

Shapes: T tokens, K choices per token, E experts, R rows (a row is one chosen token), H features that an expert reads
and writes, I its intermediate size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tessera_rt.errors import Problem, SpecError
from tessera_rt.kernels.budget import SmBudget
from tessera_rt.kernels.options import Gate
from tessera_rt.kernels.weights import ExpertWeights
from tessera_rt.moe.torch_backend import TorchBackend


class Backend(Protocol):
    """Computes experts. All tensors have one dtype (``weights`` may be fp32 beside it) and one device, any strides."""

    @property
    def name(self) -> str: ...

    @property
    def budget(self) -> SmBudget | None:
        """The SMs that its kernels keep to; those of the layer's choice of experts do, too."""
        ...

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, gate: Gate) -> Tensor:
        """x [T, H], ids [T, K] integer, weights [T, K] -> [T, H] in the dtype of ``x``."""
        ...

    def grouped(self, rows: Tensor, offsets: Tensor, experts: ExpertWeights, gate: Gate) -> Tensor:
        """rows [R, H], offsets [E + 1] int32 -> [R, H]; rows from offsets[E] on are zero."""
        ...


BACKENDS = ("torch", "triton")


def backend_for(device: torch.device, name: str | None = None) -> Backend:
    """The backend called ``name``, or the one of ``device``: triton on CUDA, torch elsewhere.

    Raises SpecError for a name that does not exist, and for triton where Triton is not installed.
    """
    name = name or ("triton" if device.type == "cuda" else "torch")
    if name == "torch":
        return TorchBackend()
    if name != "triton":
        raise SpecError.of("experts", [Problem("backend", name, " or ".join(BACKENDS))])
    try:  # an optional package, loaded by those who use it
        from tessera_rt.moe.triton_backend import TritonBackend
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        problem = Problem("backend", name, "torch where Triton is missing", "pip install tessera-rt[triton]")
        raise SpecError.of("experts", [problem]) from error
    return TritonBackend()


def routed_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    gate: Gate,
    *,
    backend: Backend | str | None = None,
) -> Tensor:
    """out[t] = sum over k of weights[t, k] expert_{ids[t, k]}(x[t]): [T, H] in the dtype of ``x``.

    ``x`` [T, H], any strides; ``ids`` [T, K] of an integer type: -1 or E and above mean "not routed" (contributes
    nothing, no gradient); ``weights`` [T, K] in fp32 or the dtype of ``x``. T = 0 is fine. Experts without tokens get
    exact zeros as gradient, not None; what requires no gradient gets none, call by call. Under autocast the products
    run in its dtype. Float64 runs in float64. Raises SpecError for shapes, dtypes or devices that do not fit.
    """
    _check(experts, gate, x, ids=ids, weights=weights)
    chosen = _chosen(backend, x)
    return chosen.routed(*_autocast(x), ids, weights, _autocast_weights(experts, x), gate).to(x.dtype)


def grouped_experts(
    rows: Tensor,
    offsets: Tensor,
    experts: ExpertWeights,
    gate: Gate,
    *,
    backend: Backend | str | None = None,
) -> Tensor:
    """Rows of expert e, rows[offsets[e] : offsets[e + 1]], through expert e: [R, H] -> [R, H].

    ``rows`` [R, H] ordered by expert, any strides; ``offsets`` [E + 1] of an integer type on the device of ``rows``,
    rising from 0 to at most R, which the device asserts (``torch._assert_async``). Rows from offsets[E] on belong to
    nobody: they are zero in the output and get zero gradient, whatever they hold. Otherwise as ``routed_experts``.
    """
    _check(experts, gate, rows, offsets=offsets)
    wide = offsets.to(torch.int64)
    rising = (wide[0] == 0) & (wide[-1] <= rows.shape[0]) & (wide.diff() >= 0).all()
    torch._assert_async(rising, f"grouped_experts: offsets must rise from 0 to at most the {rows.shape[0]} rows")
    chosen = _chosen(backend, rows)
    return chosen.grouped(*_autocast(rows), offsets.to(torch.int32), _autocast_weights(experts, rows), gate).to(
        rows.dtype
    )


def _chosen(backend: Backend | str | None, x: Tensor) -> Backend:
    return backend_for(x.device, backend) if backend is None or isinstance(backend, str) else backend


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that products run in under autocast; float64 is left alone, as by autocast itself."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def _autocast(x: Tensor) -> tuple[Tensor]:
    dtype = _autocast_dtype(x)
    return (x if dtype is None else x.to(dtype),)


def _autocast_weights(experts: ExpertWeights, x: Tensor) -> ExpertWeights:
    dtype = _autocast_dtype(x)
    if dtype is None:
        return experts

    def cast(weight: Tensor | None) -> Tensor | None:
        return None if weight is None else weight.to(dtype)

    return ExpertWeights(
        experts.gate_up.to(dtype), experts.down.to(dtype), cast(experts.gate_up_bias), cast(experts.down_bias)
    )


def _check(
    experts: ExpertWeights,
    gate: Gate,
    x: Tensor,
    *,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
    offsets: Tensor | None = None,
) -> None:
    gate_up, down, problems = experts.gate_up, experts.down, []

    def shape(name: str, tensor: Tensor | None, *allowed: int | None) -> None:
        if tensor is None:
            return
        fits = tensor.dim() == len(allowed) and all(
            want is None or want == have for want, have in zip(allowed, tensor.shape, strict=True)
        )
        if not fits:
            wanted = ", ".join("any" if want is None else str(want) for want in allowed)
            problems.append(Problem(f"{name}.shape", tuple(tensor.shape), f"[{wanted}]"))

    shape("gate_up", gate_up, None, None, None)
    if problems:
        raise SpecError.of("experts", problems)
    count, product, hidden = gate_up.shape
    if gate.gated and product % 2:
        problems.append(Problem("gate_up.shape", tuple(gate_up.shape), "an even number of columns for a gated kind"))
    shape("down", down, count, hidden, gate.width(product))
    shape("gate_up_bias", experts.gate_up_bias, count, product)
    shape("down_bias", experts.down_bias, count, hidden)
    shape("x" if offsets is None else "rows", x, None, hidden)
    shape("offsets", offsets, count + 1)
    shape("ids", ids, x.shape[0], None)
    if ids is not None:
        shape("weights", weights, *ids.shape)
    for name, integers in (("ids", ids), ("offsets", offsets)):
        if integers is not None and (integers.is_floating_point() or integers.dtype == torch.bool):
            problems.append(Problem(f"{name}.dtype", str(integers.dtype), "an integer type"))
    for name, tensor in (
        ("gate_up", gate_up),
        ("down", down),
        ("gate_up_bias", experts.gate_up_bias),
        ("down_bias", experts.down_bias),
    ):
        if tensor is not None and tensor.dtype != x.dtype and _autocast_dtype(x) is None:
            remedy = "cast one of them, or run under torch.autocast"
            problems.append(Problem(f"{name}.dtype", str(tensor.dtype), f"{x.dtype} like the input", remedy))
    for name, tensor in (
        ("gate_up", gate_up),
        ("down", down),
        ("ids", ids),
        ("weights", weights),
        ("offsets", offsets),
    ):
        if tensor is not None and tensor.device != x.device:
            problems.append(Problem(f"{name}.device", str(tensor.device), f"{x.device} like the input"))
    if problems:
        raise SpecError.of("experts", problems)
