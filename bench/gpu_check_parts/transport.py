"""The transport kernels with four virtual ranks on one device, their flags under stress, and two processes."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_check_parts.check import Check
from gpu_check_parts.virtual import FORMS, WORLD, Inputs, step, transports
from tessera_rt.kernels.budget import device_budget
from tessera_rt.kernels.operands import Run
from tessera_rt.kernels.options import Gate
from tessera_rt.kernels.transport_layout import Traffic
from tessera_rt.testing.kernel_checks import assert_near, map_weights, poisoned_memory
from tessera_rt.testing.peer_ranks import RankInput, all_experts, dense_result, own_experts, rank_inputs

RESERVE_S = 5.0  # of the part's time, to read and record
CALLS_S = 15.0  # of it at least for calls with changing routing
RATIOS = {torch.bfloat16: 2.5e-2, torch.float32: 2e-5}


def run(check: Check) -> None:
    if check.dry_run:
        from tessera_rt.testing.interpreter import install

        install()
    run_ = Run(device_budget(check.device, communication=2 if check.dry_run else 16))
    for form in FORMS:
        for dtype in (torch.float32,) if check.dry_run else (torch.bfloat16, torch.float32):
            with check.case(f"four virtual ranks, {form}, {str(dtype)[6:]}"):
                _against_one_process(check, form, dtype, run_)
    with check.case("epochs wrap at 2^31"):
        _stress(check, run_, 8, first_epoch=(1 << 31) - 3)
    _two_processes(check)
    calls = 6 if check.dry_run else 10_000
    with check.case("calls with changing routing") as figures:  # last: it takes what time is left
        figures["calls"] = _stress(check, run_, calls)
        if figures["calls"] < calls:
            check.skip(f"the rest of {calls} calls", f"time was left for {figures['calls']}")


def _traffic(check: Check, form: str, dtype: torch.dtype) -> Traffic:
    dispatch, combine = FORMS[form]
    tokens, hidden, experts, top_k = (5, 32, 8, 2) if check.dry_run else (500, 512, 32, 4)
    return Traffic(
        world=WORLD, experts=experts, top_k=top_k, hidden=hidden, tokens=tokens, dtype=dtype, dispatch=dispatch,
        combine=combine,
    )  # fmt: skip


def _on(device: torch.device, one: RankInput) -> Inputs:
    return Inputs(*(getattr(one, name).to(device) for name in ("x", "ids", "weights", "grad")))


def _against_one_process(check: Check, form: str, dtype: torch.dtype, run: Run) -> None:
    traffic, generator, gate = _traffic(check, form, dtype), torch.Generator().manual_seed(3), Gate()
    tokens = (traffic.tokens, 0, traffic.tokens - 2, 1)  # a full rank, an empty one, a ragged one, one token
    given = rank_inputs(traffic, tokens, generator, dropped=0.1)
    experts = all_experts(traffic, 48 if check.dry_run else 208, gate, generator)
    want, want_experts = dense_result(given, experts, gate)
    ranks = transports(traffic, check.device, run)

    def own(rank: int) -> object:
        return map_weights(own_experts(experts, traffic, rank), lambda tensor: tensor.detach().to(check.device))

    with poisoned_memory():
        got = step(ranks, [_on(check.device, one) for one in given], [own(rank) for rank in range(WORLD)], gate)
    for rank, (found, wanted) in enumerate(zip(got, want, strict=True)):
        ranks[rank].check()
        for name, mine, theirs in (
            ("out", found.out, wanted.out),
            ("gradient of x", found.x, wanted.d_x),
            ("router gradient", found.router, wanted.d_weights),
        ):
            assert_near(f"rank {rank}: {name}", mine.cpu(), theirs, ratio=RATIOS[dtype])
    for name, parts, theirs in (
        ("gate_up", [found.gate_up for found in got], want_experts[0]),
        ("down", [found.down for found in got], want_experts[1]),
    ):
        assert_near(f"gradient of {name}", torch.cat([part.cpu() for part in parts]), theirs, ratio=RATIOS[dtype])


def _stress(check: Check, run: Run, calls: int, *, first_epoch: int = 0) -> int:
    """As many of the calls as there is time for, at least 8; their number. Expert e multiplies by e + 1, so every row
    that went astray shows. Compared on the device, read now and then: the host must not run ahead of the clock."""
    tokens, hidden = (3, 16) if check.dry_run else (16, 64)
    traffic = Traffic(world=WORLD, experts=8, top_k=2, hidden=hidden, tokens=tokens, dtype=torch.float32)
    ranks = transports(traffic, check.device, run)
    if first_epoch:
        for rank in ranks:
            rank.preset_epochs(first_epoch)
    generator = torch.Generator(check.device).manual_seed(calls)
    worst = torch.zeros((), device=check.device)
    done = 0
    while done < calls and (done < 8 or check.seconds_left > RESERVE_S):
        done += 1
        if done % 100 == 0:
            ranks[0].check()
        given = [_draw(traffic, check.device, generator) for _ in ranks]
        placed = [one.wait() for one in [rank.exchange(ids) for rank, (_, ids, _) in zip(ranks, given, strict=True)]]
        sent = [r.dispatch(x, weights, p) for r, (x, _, weights), p in zip(ranks, given, placed, strict=True)]
        received = [one.wait() for one in sent]
        back = []
        for rank, came in zip(ranks, received, strict=True):
            rows = came.x.shape[0]
            choice = torch.arange(rows * traffic.choices, dtype=torch.int32, device=check.device)
            factor = came.ids.flatten() + rank.rank * traffic.local_experts + 1
            y = came.x.nan_to_num().repeat_interleave(traffic.choices, 0) * factor.unsqueeze(-1)
            position = choice.view(rows, -1).masked_fill(came.ids < 0, -1)
            back.append(rank.combine(y, position, came))
        for issued, (x, ids, weights) in zip(back, given, strict=True):
            want = x * (weights * (ids + 1)).sum(1, keepdim=True)
            worst = torch.maximum(worst, (issued.wait().out - want).abs().max())
    for rank in ranks:
        rank.check()
    assert float(worst) < 1e-3, f"a row is wrong by {float(worst):.3g}"
    return done


def _draw(traffic: Traffic, device: torch.device, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(traffic.tokens, traffic.hidden, device=device, generator=generator)
    scores = torch.rand(traffic.tokens, traffic.experts, device=device, generator=generator)
    weights, ids = scores.topk(traffic.top_k, dim=-1)
    return x, ids.int(), weights


def _two_processes(check: Check) -> None:
    name = "two processes on one device"
    if check.dry_run:
        check.skip(name, "a dry run uses the CPU twin of peer memory, which the tests run with four processes")
        return
    from gpu_check_parts.processes import run_two

    reason, fault = run_two(check.seconds_left - CALLS_S)
    if reason:
        check.skip(name, reason)
        return
    with check.case(name):
        assert not fault, fault
