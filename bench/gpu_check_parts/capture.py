"""Dispatch, experts, combine and their backward captured as one graph, replayed with changing routing.

Four virtual ranks on one device. Every replay must equal the same work done eagerly, bit for bit; an input that
overflows the capacity is found after the replay and done again with room for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import tessera_rt
from gpu_check_parts.check import Check
from gpu_check_parts.virtual import FORMS, WORLD, Inputs, step, transports
from tessera_rt.cuda_graphs.device import GraphDevice
from tessera_rt.kernels.budget import device_budget
from tessera_rt.kernels.operands import Run
from tessera_rt.kernels.options import Gate
from tessera_rt.kernels.transport import PeerTransport
from tessera_rt.kernels.transport_layout import Traffic
from tessera_rt.kernels.weights import ExpertWeights

PARTS = 4  # tensors of one rank's input


@dataclass(frozen=True, slots=True)
class Layer:
    """What one run of the layer needs besides its inputs. ``flags`` [W, 2] int32: what overflowed."""

    ranks: Sequence[PeerTransport]
    experts: Sequence[ExpertWeights]
    flags: Tensor

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        given = [Inputs(*tensors[at : at + PARTS]) for at in range(0, len(tensors), PARTS)]
        for rank in self.ranks:
            rank.clear_overflow()
        outs = step(self.ranks, given, self.experts, Gate())
        self.flags.copy_(torch.stack([rank.overflow for rank in self.ranks]))
        return [tensor for out in outs for tensor in out.tensors()]


def run(check: Check) -> None:
    graphs: GraphDevice | None = None
    if check.dry_run:
        from tessera_rt.testing.graphs import StandInDevice
        from tessera_rt.testing.interpreter import install

        install()
        graphs = StandInDevice()
    replays = 3 if check.dry_run else 100
    for form in ("tokens, rows",) if check.dry_run else tuple(FORMS):
        with check.case(f"forward and backward, {form}, {replays} replays") as figures:
            figures["replays"] = replays
            _replays(check, form, replays, graphs)
    with check.case("an overflow is found and done again"):
        _overflow(check, graphs)


def _traffic(check: Check, form: str, *, capacity: int = 0) -> Traffic:
    dispatch, combine = FORMS[form]
    tokens, hidden, experts, top_k = (3, 16, 8, 2) if check.dry_run else (256, 512, 32, 4)
    dtype = torch.float32 if check.dry_run else torch.bfloat16
    return Traffic(
        world=WORLD, experts=experts, top_k=top_k, hidden=hidden, tokens=tokens, dtype=dtype, dispatch=dispatch,
        combine=combine, capacity=capacity,
    )  # fmt: skip


def _layer(check: Check, traffic: Traffic) -> Layer:
    generator = torch.Generator().manual_seed(5)
    intermediate, local = (32 if check.dry_run else 256), traffic.local_experts
    experts = []
    for _ in range(WORLD):
        gate_up = torch.randn(local, 2 * intermediate, traffic.hidden, generator=generator) * traffic.hidden**-0.5
        down = torch.randn(local, traffic.hidden, intermediate, generator=generator) * intermediate**-0.5
        experts.append(ExpertWeights(*(w.to(check.device, traffic.dtype) for w in (gate_up, down))))
    run = Run(device_budget(check.device, communication=2 if check.dry_run else 16))
    flags = torch.zeros(WORLD, 2, dtype=torch.int32, device=check.device)
    return Layer(transports(traffic, check.device, run), experts, flags)


def _draw(traffic: Traffic, device: torch.device, seed: int, *, to_rank: int | None = None) -> list[Tensor]:
    """Every rank's tensors; with ``to_rank`` all choices are that rank's experts."""
    generator = torch.Generator().manual_seed(seed)
    tensors: list[Tensor] = []
    for _ in range(WORLD):
        scores = torch.rand(traffic.tokens, traffic.experts, generator=generator)
        if to_rank is not None:
            mine = torch.arange(traffic.experts) // traffic.local_experts == to_rank
            scores = scores.masked_fill(~mine, -1)
        weights, ids = scores.topk(traffic.top_k, dim=-1)
        x, grad = (torch.randn(traffic.tokens, traffic.hidden, generator=generator) for _ in range(2))
        tensors += [x.to(traffic.dtype), ids.int(), weights, grad.to(traffic.dtype)]
    return [tensor.to(device) for tensor in tensors]


def _captured(
    layer: Layer, examples: Sequence[Tensor], graphs: GraphDevice | None, **options: object
) -> Callable[..., list[Tensor]]:
    found: Callable[..., list[Tensor]] = tessera_rt.capture(layer, tuple(examples), device=graphs, **options)  # type: ignore[arg-type]
    return found


def _replays(check: Check, form: str, replays: int, graphs: GraphDevice | None) -> None:
    traffic = _traffic(check, form)
    layer, eager = _layer(check, traffic), _layer(check, traffic)
    captured = _captured(layer, _draw(traffic, check.device, 0), graphs)
    for number in range(1, replays + 1):
        given = _draw(traffic, check.device, number, to_rank=number % WORLD if number % 5 == 0 else None)
        _assert_equal(captured(*given), eager(*given), number)
    for rank in layer.ranks:
        rank.check()


def _overflow(check: Check, graphs: GraphDevice | None) -> None:
    roomy = _traffic(check, "tokens, rows")
    traffic = _traffic(check, "tokens, rows", capacity=2 * roomy.tokens)
    layer, eager = _layer(check, traffic), _layer(check, roomy)
    redone: list[int] = []

    def again(*tensors: Tensor) -> list[Tensor]:
        redone.append(1)
        layer.flags.zero_()
        return eager(*tensors)

    captured = _captured(
        layer, _draw(roomy, check.device, 0), graphs, overflow=layer.flags, eager=again, state=(layer.flags,)
    )
    balanced = _draw(roomy, check.device, 1)
    for source, ids in enumerate(balanced[1::PARTS]):  # to its own rank and the next: every rank's memory is filled
        ranks = (source, (source + 1) % WORLD)
        chosen = [ranks[k % 2] * traffic.local_experts + k // 2 for k in range(traffic.top_k)]
        ids.copy_(torch.tensor(chosen, dtype=torch.int32))
    for number, given in enumerate((balanced, _draw(roomy, check.device, 2, to_rank=1), balanced)):
        before = len(redone)
        _assert_equal(captured(*given), eager(*given), number)
        assert len(redone) - before == int(number == 1), f"call {number} was redone {len(redone) - before} times"


def _assert_equal(got: Sequence[Tensor], want: Sequence[Tensor], number: int) -> None:
    for at, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(mine, theirs), f"call {number}: tensor {at} differs from the eager one"
