"""Running a microbenchmark with the ranks that it needs: this process, local CPU ranks, or those of torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tessera_rt.errors import Problem, SpecError
from tessera_rt.launch import run_local, under_torchrun
from tessera_rt.microbench.compare import ComparedRow
from tessera_rt.microbench.layer import bench_layer
from tessera_rt.microbench.machine import ClockReader, machine, slowed_down
from tessera_rt.microbench.overlap import BudgetedLaunch, OverlapResult, overlap
from tessera_rt.microbench.picture import draw_overlap
from tessera_rt.microbench.problems import ExpertProblem, expert_problem
from tessera_rt.microbench.products import WITHOUT_GPU, bench_products, budgeted_product, grouped_launch
from tessera_rt.microbench.puts import budgeted_puts, dispatched_bytes, peer_dispatch
from tessera_rt.microbench.results import BenchResult, link_figures, overlap_result, product_figures
from tessera_rt.microbench.traffic import all_to_all, bench_traffic, copy, shared_size, unbudgeted
from tessera_rt.microbench.user_functions import load_launch

GPU_TOKENS, CPU_TOKENS = 8192, 256
_COPY_NOTE = "a copy crosses no link: it says what memory allows, and nothing of communication between GPUs"
_PUT_NOTE = "puts of virtual ranks stay in one GPU's memory: they say how SMs are shared, and nothing of links"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """What `tessera bench` was asked for. ``sizes``: bytes per rank. ``comm`` and ``comp``: see ``cli.bench``."""

    bench: str
    model: str = "qwen3-30b-a3b"
    tokens: int | None = None
    ep: int = 8
    dtype: str = "bf16"
    comm: str = ""
    comp: str = "gemm"
    sizes: tuple[int, ...] = ()
    sms: tuple[int, ...] | None = None
    ranks: int = 1
    samples: int = 20
    timeout_s: float = 60.0
    picture: Path | None = None


def run_bench(request: BenchRequest) -> BenchResult | None:
    """The result of ``request``; None on the ranks under torchrun that do not report.

    Raises SpecError for what cannot be measured, TransportError for a launch that does not end or a rank that fails.
    """
    _check(request)
    if under_torchrun():
        with _torchrun_group(request.timeout_s) as device:
            result = _measured(request, device)
            return result if dist.get_rank() == 0 else None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and request.ranks > 1 and _wants_ranks(request):
        return run_local(_measure_on_cpu, request.ranks, (request,), timeout_s=request.timeout_s)[0]
    return _measured(request, device)


def _wants_ranks(request: BenchRequest) -> bool:
    return request.bench == "dispatch" or (request.bench == "overlap" and request.comm in ("", "all-to-all"))


def _measure_on_cpu(request: BenchRequest) -> BenchResult:
    return _measured(request, torch.device("cpu"))


def _measured(request: BenchRequest, device: torch.device) -> BenchResult:
    return replace(_measure(request, device), dtype=request.dtype)


@contextmanager
def _torchrun_group(timeout_s: float) -> Iterator[torch.device]:
    """The process group that torchrun's variables describe: NCCL on this rank's GPU, or gloo without one."""
    timeout = timedelta(seconds=timeout_s)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=timeout)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _measure(request: BenchRequest, device: torch.device) -> BenchResult:
    group = dist.group.WORLD if dist.is_initialized() else None
    samples, timeout_s = request.samples, request.timeout_s
    match request.bench:
        case "overlap":
            return _overlap(request, device, group)
        case "dispatch":
            return _dispatch(request, device, group)
        case "gemm":
            rows = bench_products(_problem(request, device), samples=samples, timeout_s=timeout_s)
            notes = [] if device.type == "cuda" else [WITHOUT_GPU]
            figures = product_figures(rows)
        case _:
            rows = bench_layer(_problem(request, device), samples=samples, timeout_s=timeout_s)
            notes = [] if device.type == "cuda" else ["no GPU: Tessera's plain-torch experts were timed"]
            figures = {}
    return _compared(request, device, rows, figures, notes)


def _dispatch(request: BenchRequest, device: torch.device, group: dist.ProcessGroup | None) -> BenchResult:
    """The model's dispatch, and messages of the sizes asked for."""
    problem, world = _problem(request, device), 1 if group is None else dist.get_world_size(group)
    notes = [] if group is not None else ["one rank: torch's all-to-all was not timed"]
    ours = None
    if device.type != "cuda":
        notes.append("no GPU: Tessera's dispatch was not timed")
    elif group is not None and world != request.ep:
        notes.append(f"Tessera's dispatch was not timed: it needs --ep ranks, {request.ep}, and there are {world}")
    else:
        ours = peer_dispatch(problem, request.ep, group)
        notes += [_PUT_NOTE] if group is None else []
    title = f"{problem.title} of {request.ep} ranks, dispatch"
    messages = {title: (dispatched_bytes(problem, request.ep), ours)}
    messages |= {f"{size} bytes": (size, None) for size in request.sizes}
    rows: list[ComparedRow] = []
    for title, (size, contender) in messages.items():
        rows += bench_traffic(
            title, size, device=device, group=group, ours=contender, samples=request.samples,
            timeout_s=request.timeout_s,
        )  # fmt: skip
    return _compared(request, device, rows, {} if group is None else link_figures(rows, world), notes)


def _compared(
    request: BenchRequest,
    device: torch.device,
    rows: Sequence[ComparedRow],
    figures: Mapping[str, float | int],
    notes: Sequence[str],
) -> BenchResult:
    unread = ClockReader(device).note if device.type == "cuda" else ""
    slowed = slowed_down(clocks for row in rows for clocks in row.clocks)
    return BenchResult(
        bench=request.bench,
        machine=machine(device),
        rows=[row.as_row() for row in rows],
        figures=figures,
        notes=[*([unread] if unread else []), *notes, *slowed],
    )


def _overlap(request: BenchRequest, device: torch.device, group: dist.ProcessGroup | None) -> BenchResult:
    comp, flops = _compute(request, device)
    results: dict[str, OverlapResult] = {}
    notes: list[str] = []
    for name, comm in _communication(request, device, group, notes):
        results[name] = overlap(
            comm, comp, sweep=request.sms, samples=request.samples, device=device, group=group,
            timeout_s=request.timeout_s,
        )  # fmt: skip
    if request.picture is not None and (group is None or dist.get_rank() == 0):
        draw_overlap(results, request.picture)
    world = 1 if group is None else dist.get_world_size(group)
    crosses = request.comm in ("", "all-to-all")  # all but the part that a rank keeps
    link = shared_size(request.sizes[-1], world) * (world - 1) // world if crosses else 0
    return overlap_result(results, comp_flops=flops, link_bytes=link, notes=notes)


def _compute(request: BenchRequest, device: torch.device) -> tuple[BudgetedLaunch, int]:
    if request.comp != "gemm":
        return load_launch("--comp", request.comp, device), 0
    problem = _problem(request, device)
    if device.type == "cuda":
        return budgeted_product(problem)
    launch, flops = grouped_launch(problem)
    return unbudgeted(launch), flops


def _communication(
    request: BenchRequest, device: torch.device, group: dist.ProcessGroup | None, notes: list[str]
) -> Iterator[tuple[str, BudgetedLaunch]]:
    if ":" in request.comm:
        yield request.comm, load_launch("--comm", request.comm, device)
        return
    alone = "put" if device.type == "cuda" else "copy"
    kind = request.comm or (alone if group is None else "all-to-all")
    if kind == "put":
        notes.append(_PUT_NOTE)
        yield "put", budgeted_puts(_problem(request, device))
        return
    for size in request.sizes:
        name = f"{kind} {size / 2**20:g} MiB"
        if kind == "copy":
            notes.append(_COPY_NOTE)
            yield name, unbudgeted(copy(size, device=device))
        else:
            assert group is not None
            shared = shared_size(size, dist.get_world_size(group))
            yield name, unbudgeted(all_to_all(shared, device=device, group=group, timeout_s=request.timeout_s))


def _problem(request: BenchRequest, device: torch.device) -> ExpertProblem:
    tokens = request.tokens or (GPU_TOKENS if device.type == "cuda" else CPU_TOKENS)
    return expert_problem(request.model, tokens=tokens, ep=request.ep, dtype=request.dtype, device=device)


def _check(request: BenchRequest) -> None:
    """What can be refused before ranks are started."""
    problems = []
    if request.bench == "overlap":
        if request.comm not in ("", "put", "copy", "all-to-all") and ":" not in request.comm:
            problems.append(Problem("--comm", request.comm, "put, copy, all-to-all, or module:function"))
        if request.comm == "put" and not torch.cuda.is_available():
            problems.append(Problem("--comm", "put", "copy or all-to-all: Triton's puts need a GPU"))
        if request.comp != "gemm" and ":" not in request.comp:
            problems.append(Problem("--comp", request.comp, "gemm, or module:function"))
        alone = request.ranks == 1 or torch.cuda.is_available()
        if request.comm == "all-to-all" and alone and not under_torchrun():
            remedy = "torchrun --nproc-per-node N -m tessera_rt.cli bench overlap ..."
            problems.append(Problem("--comm", "all-to-all", "between at least two ranks", remedy))
        if request.sms is not None and not torch.cuda.is_available():
            problems.append(Problem("--sms", list(request.sms), "left out: a CPU has no SMs to set aside"))
    if not request.timeout_s > 0:
        problems.append(Problem("--timeout", request.timeout_s, "a number of seconds above 0"))
    if problems:
        raise SpecError.of("bench", problems)
    if request.bench != "overlap" or request.comp == "gemm":
        _problem(request, torch.device("cpu"))
