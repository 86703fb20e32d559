"""Expert parallelism on the device: tokens go to the ranks that hold their experts, and come back summed.

``expert_parallel_mlp`` is the whole of it as one differentiable function. An ``ExpertTransport`` moves the data:

    kernels.transport.PeerTransport        peer-mapped memory inside a node, Triton, nothing waits for the host
    CollectiveExpertParallel               torch.distributed all-to-all: exact splits, or equal padded ones

Both are split-phase: a call issues, ``wait`` finishes. The experts are computed by Triton (``expert_parallel_triton``)
or by torch (``expert_parallel_torch``). Forms of dispatch and combine: ``kernels.transport_layout``. With combine
``rows`` the bits of outputs and gradients do not depend on how many ranks share the experts (given one configuration of
the products).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from tessera_rt.differentiable_once import differentiable_once
from tessera_rt.errors import Problem, SpecError
from tessera_rt.kernels.options import Gate
from tessera_rt.kernels.row_gradients import Needs
from tessera_rt.kernels.transport_calls import Combined, Issued, Received
from tessera_rt.kernels.transport_layout import Traffic
from tessera_rt.kernels.weights import NO_MAIN_GRADS, ExpertWeights, MainGrads
from tessera_rt.moe.expert_parallel_rows import RowsCompute
from tessera_rt.moe.expert_parallel_torch import TorchRows


class ExpertTransport(Protocol):
    """One rank's end. Every rank makes the same calls in the same order, with zero tokens too; shapes as in
    ``kernels.transport_calls``."""

    @property
    def traffic(self) -> Traffic: ...

    @property
    def rank(self) -> int: ...

    @property
    def rows_limit(self) -> int:
        """Choices that the experts have room for (``Traffic.rows``, or none but that of the units)."""
        ...

    @property
    def overflow(self) -> Tensor:
        """int32 on the device: not zero anywhere when something found no room. ``capture`` takes it as ``overflow``."""
        ...

    def exchange(self, ids: Tensor) -> Issued[Any]:
        """Chosen experts ``ids`` [T, K] (outside 0 .. E - 1: not sent) -> a placement, with ``counts`` [W, E]."""
        ...

    def dispatch(self, x: Tensor, weights: Tensor, placement: Any) -> Issued[Received[Any]]:
        """``x`` [T, H] and the router's ``weights`` [T, K] fp32 -> what came for this rank's experts."""
        ...

    def dispatch_gradient(self, grad: Tensor, received: Received[Any]) -> Issued[Tensor]:
        """The backward of ``combine``: ``grad`` [T, H] -> [R, H], where the tokens went."""
        ...

    def combine(
        self,
        y: Tensor,
        position: Tensor,
        received: Received[Any],
        *,
        weighted: bool = True,
        router_gradient: Tensor | None = None,
    ) -> Issued[Combined]:
        """Rows ``y`` of the experts, ``position`` [R, J] -> their sums at home, times the weights if ``weighted``; and
        the ``router_gradient`` [R, J] fp32."""
        ...

    def check(self) -> None:
        """Raises TransportError for what went wrong on the device (reads it: off the path)."""
        ...


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator, unused-ignore]
    reason="ranks wait for each other in it: compile without fullgraph"
)
def expert_parallel_mlp(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    gate: Gate,
    transport: ExpertTransport,
    *,
    main_grads: MainGrads = NO_MAIN_GRADS,
    recompute: bool = False,
    compute: RowsCompute | str | None = None,
) -> Tensor:
    """out[t] = sum over k of weights[t, k] expert_{ids[t, k]}(x[t]), over the experts of all ranks: [T, H] -> [T, H].

    ``x`` [T, H], cast to the traffic's dtype; ``ids`` [T, K] global, outside 0 .. E - 1: not routed; ``weights``
    [T, K]; ``experts``: this rank's E / W, cast likewise. A collective call, forward and backward: all ranks go
    backward, and ``x`` or ``weights`` (or both) require gradients on all of them or on none. Gradients of weights are
    added to ``main_grads`` (fp32) where there are any. ``recompute``: the first product is not saved. ``compute``:
    "triton", "torch", or by the device. The result has the dtype of ``x``. Differentiable once. Raises SpecError for
    shapes and dtypes that do not fit.
    """
    traffic = transport.traffic
    _check(x, ids, weights, experts, gate, traffic, main_grads)
    low = traffic.dtype
    out: Tensor = _ExpertParallel.apply(  # type: ignore[no-untyped-call]
        x.to(low), weights.to(traffic.weight_dtype), experts.gate_up.to(low), experts.down.to(low),
        None if experts.gate_up_bias is None else experts.gate_up_bias.to(low),
        None if experts.down_bias is None else experts.down_bias.to(low),
        _Call(ids.detach(), gate, transport, main_grads, recompute, compute_for(x.device, compute)),
    )  # fmt: skip
    return out.to(x.dtype)


def compute_for(device: torch.device, given: RowsCompute | str | None) -> RowsCompute:
    """The one given, by object or name; by default triton on CUDA and torch elsewhere. Raises SpecError."""
    if given is not None and not isinstance(given, str):
        return given
    name = given or ("triton" if device.type == "cuda" else "torch")
    if name == "torch":
        return TorchRows()
    if name != "triton":
        raise SpecError.of("expert_parallel_mlp", [Problem("compute", name, "torch or triton")])
    try:  # an optional package, loaded by those who use it
        from tessera_rt.moe.expert_parallel_triton import TritonRows
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        problem = Problem("compute", name, "torch where Triton is missing", "pip install tessera-rt[triton]")
        raise SpecError.of("expert_parallel_mlp", [problem]) from error
    return TritonRows()


@dataclass(frozen=True, slots=True)
class _Call:
    """What the function takes besides the tensors that have gradients."""

    ids: Tensor
    gate: Gate
    transport: ExpertTransport
    main_grads: MainGrads
    recompute: bool
    compute: RowsCompute


class _ExpertParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        call: _Call,
    ) -> Tensor:
        transport = call.transport
        placement = transport.exchange(call.ids).wait()
        received = transport.dispatch(x, weights, placement).wait()
        experts = ExpertWeights(gate_up, down, gate_up_bias, down_bias)
        done = call.compute.forward(received, experts, call.gate, transport.rows_limit, recompute=call.recompute)
        ctx.save_for_backward(gate_up, down, gate_up_bias, down_bias, *done.kept)
        ctx.call, ctx.received, ctx.state, ctx.position = call, received.without_rows(), done.state, done.position
        return transport.combine(done.y, done.position, received).wait().out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, down, gate_up_bias, down_bias, *kept = ctx.saved_tensors
        call, received, experts = ctx.call, ctx.received, ExpertWeights(gate_up, down, gate_up_bias, down_bias)
        x, router, needs_gate_up, needs_down, needs_gate_up_bias, needs_down_bias = ctx.needs_input_grad[:6]
        # What one wants of the tokens' gradients is sent whole: another rank may want the other part, and all make the
        # same call.
        home_wanted = x or router
        needs = Needs(home_wanted, needs_gate_up, needs_down, needs_gate_up_bias, needs_down_bias, home_wanted)
        d_units = call.transport.dispatch_gradient(grad, received).wait()
        found = call.compute.backward(
            d_units, received, experts, call.gate, kept, ctx.state, main_grads=call.main_grads, needs=needs
        )
        d_x = d_router = None
        if home_wanted:
            assert found.x_rows is not None
            home = call.transport.combine(
                found.x_rows, ctx.position, received, weighted=False, router_gradient=found.router
            ).wait()
            d_x, d_router = home.out if x else None, home.router_gradient
        return d_x, d_router, found.gate_up, found.down, found.gate_up_bias, found.down_bias, None


def _check(
    x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, gate: Gate, traffic: Traffic, main: MainGrads
) -> None:
    problems = []

    def shape(name: str, tensor: Tensor | None, *wanted: int) -> None:
        if tensor is not None and tuple(tensor.shape) != wanted:
            problems.append(Problem(f"{name}.shape", tuple(tensor.shape), f"[{', '.join(map(str, wanted))}]"))

    if x.dim() != 2 or x.shape[0] > traffic.tokens:
        wanted = f"[at most {traffic.tokens}, {traffic.hidden}]"
        raise SpecError.of(
            "expert_parallel_mlp", [Problem("x.shape", tuple(x.shape), wanted, "traffic.tokens says so")]
        )
    shape("x", x, x.shape[0], traffic.hidden)
    shape("ids", ids, x.shape[0], traffic.top_k)
    shape("weights", weights, x.shape[0], traffic.top_k)
    if ids.is_floating_point() or ids.dtype == torch.bool:
        problems.append(Problem("ids.dtype", str(ids.dtype), "an integer type"))
    intermediate = experts.down.shape[-1]
    product = 2 * intermediate if gate.gated else intermediate
    shape("gate_up", experts.gate_up, traffic.local_experts, product, traffic.hidden)
    shape("down", experts.down, traffic.local_experts, traffic.hidden, intermediate)
    shape("gate_up_bias", experts.gate_up_bias, traffic.local_experts, product)
    shape("down_bias", experts.down_bias, traffic.local_experts, traffic.hidden)
    for field in fields(MainGrads):
        weight, target = getattr(experts, field.name), getattr(main, field.name)
        if target is None:
            continue
        if weight is None or target.shape != weight.shape or target.dtype != torch.float32:
            given = (tuple(target.shape), str(target.dtype))
            wanted = "None" if weight is None else f"float32 {tuple(weight.shape)}"
            problems.append(Problem(f"main_grads.{field.name}", given, wanted))
        elif weight.dtype != traffic.dtype:
            problems.append(Problem(f"{field.name}.dtype", str(weight.dtype), f"{traffic.dtype} with a main gradient"))
    if problems:
        raise SpecError.of("expert_parallel_mlp", problems)
