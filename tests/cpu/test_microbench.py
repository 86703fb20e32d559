"""Microbenchmarks without a GPU: lanes run at once, figures follow from samples, problems and layers are right."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from torch import Tensor

from tessera_rt.errors import SpecError, TransportError
from tessera_rt.kernels.budget import SmBudget
from tessera_rt.kernels.configs import fingerprint, triton_minor
from tessera_rt.kernels.options import Activation, Gate
from tessera_rt.kernels.shapes import SHAPES, ExpertShape
from tessera_rt.kernels.trace import Trace
from tessera_rt.kernels.weights import ExpertWeights
from tessera_rt.microbench import layer, products, puts
from tessera_rt.microbench.compare import ComparedRow, Contender, compare
from tessera_rt.microbench.machine import ClockReader, Clocks, Machine, kernel_versions, machine, slowed_down
from tessera_rt.microbench.overlap import OverlapResult, OverlapRow, Placement, overlap
from tessera_rt.microbench.picture import draw_overlap
from tessera_rt.microbench.problems import ExpertProblem, expert_problem
from tessera_rt.microbench.puts import dispatched_bytes, peer_dispatch
from tessera_rt.microbench.results import link_figures, overlap_result, product_figures, save_result
from tessera_rt.microbench.timing import Timing, stopwatch
from tessera_rt.microbench.traffic import bench_traffic, copy, shared_size
from tessera_rt.microbench.user_functions import load_launch
from tessera_rt.moe.backends import routed_experts
from tessera_rt.testing.interpreter import launches

CPU = torch.device("cpu")
TINY = ExpertShape(name="tiny", hidden=16, intermediate=24, experts=8, top_k=3)


def problem(shape: ExpertShape = TINY, tokens: int = 13, dtype: torch.dtype = torch.float32) -> ExpertProblem:
    return ExpertProblem(shape=shape, tokens=tokens, experts=shape.experts, dtype=dtype, device=CPU)


def row(comm: int = 40, comp: int = 110, comp_all: int = 100, both: int = 130, **more: int) -> OverlapRow:
    values = {"comm_in_both_ns": 50, "comp_in_both_ns": 130} | more
    return OverlapRow(
        budget=SmBudget(132, more.pop("sms", 20)),
        comm=Timing(comm, 0.1, 5),
        comp=Timing(comp, 0.0, 5),
        comp_all=Timing(comp_all, 0.0, 5),
        both=Timing(both, 0.2, 5),
        comm_in_both_ns=values["comm_in_both_ns"],
        comp_in_both_ns=values["comp_in_both_ns"],
        placement=None,
        clocks=(),
    )


def test_the_two_lanes_run_at_once() -> None:
    """Each function waits for the other to have started: one after the other they would never end."""
    started = {name: threading.Event() for name in ("comm", "comp")}

    def meet(mine: str, other: str) -> None:
        started[mine].set()
        assert started[other].wait(30), f"{mine} ran alone"

    with stopwatch(CPU) as watch:
        both = watch.both(lambda: meet("comm", "comp"), lambda: meet("comp", "comm"))
    assert both.total == max(both.comm, both.comp)


def test_a_lane_that_does_not_end_is_named() -> None:
    release = threading.Event()
    with stopwatch(CPU, timeout_s=0.2) as watch:
        with pytest.raises(TransportError, match=r"rank 0 waited 0\.2 s for communication"):
            watch.both(lambda: release.wait(30), lambda: None)
        release.set()


def test_a_lane_that_does_not_end_does_not_keep_the_process() -> None:
    program = (
        "import time\nfrom tessera_rt.microbench import overlap\ncalls = []\n"
        "def comm(budget):\n    calls.append(1)\n    if len(calls) == 2:\n        time.sleep(1000)\n"
        "overlap(comm, lambda budget: None, samples=1, warmup=0, timeout_s=0.1)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1 and "rank 0 waited 0.1 s for communication" in done.stderr


def test_what_a_lane_raises_is_raised() -> None:
    with stopwatch(CPU) as watch, pytest.raises(ZeroDivisionError):
        watch.both(lambda: 1 // 0, lambda: None)


def test_threads_are_restored() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="of the function"), stopwatch(CPU) as watch:
        watch.alone(lambda: (_ for _ in ()).throw(ValueError("of the function")).__next__())
    assert torch.get_num_threads() == before


def test_figures_of_a_row() -> None:
    """Worked by hand: 40 + 110 - 130 = 20 of 40 hidden; in 50 ns beside communication compute did 100 - 80 = 20."""
    found = row()
    assert found.efficiency == pytest.approx(0.5)
    assert found.slowdown == pytest.approx(1.3)
    assert found.contention == pytest.approx(50 / 20 - 1)
    assert found.as_row()["fair_slowdown"] == pytest.approx(132 / 112)
    assert row(comp_in_both_ns=100, comm_in_both_ns=50).contention == 0
    assert row(comm_in_both_ns=200, comp_in_both_ns=125).contention == pytest.approx(0.25)  # compute ended first
    assert row(comm_in_both_ns=9).contention is None  # too short to tell


@pytest.mark.parametrize("seed", range(20))
def test_contention_is_that_of_the_planners_model(seed: int) -> None:
    """Compute at rate 1 / (1 + c) while communication runs, simulated: the row gives c back."""
    draw = random.Random(seed)
    c, work, comm = draw.uniform(0, 1), draw.uniform(1e5, 1e6), draw.uniform(1e5, 1e6)
    done_beside = comm / (1 + c)
    comp = work * (1 + c) if done_beside >= work else comm + (work - done_beside)
    found = row(comp_all=round(work), comm_in_both_ns=round(comm), comp_in_both_ns=round(comp)).contention
    if found is None:
        assert min(comm, comp) < work / 10 + 1
    else:
        assert found == pytest.approx(c, abs=1e-3)


def test_overlap_calls_with_the_budget() -> None:
    seen: list[tuple[str, SmBudget]] = []
    given = SmBudget(8, 3)
    result = overlap(
        lambda budget: seen.append(("comm", budget)), lambda budget: seen.append(("comp", budget)), given,
        samples=4, warmup=1, device=CPU,
    )  # fmt: skip
    assert seen.count(("comm", given)) == seen.count(("comp", given)) == 5 * 2  # alone and together
    assert seen.count(("comp", SmBudget(8))) == 5  # on all SMs
    assert result.rows[0].both.samples == 4
    assert any("no GPU" in note for note in result.notes)
    assert result.best is result.rows[0]


def test_traces_say_where_programs_ran() -> None:
    def trace(*sms: int) -> Trace:
        made = Trace()
        for sm in sms:  # a launch each, with a program that did not run
            places = made.places("kernel", 2, CPU)
            places[0] = torch.tensor([0, sm])
        return made

    result = overlap(
        lambda _: trace(0, 1, 2), lambda _: trace(2, 3, 3, 4), SmBudget(8, 3), samples=1, warmup=0, device=CPU
    )
    assert result.rows[0].placement == Placement(comm_sms=3, comp_sms=3, shared_sms=1)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"samples": 0}, "samples = 0"),
        ({"sweep": [4]}, r"sweep = \[4\].*CPU has no SMs"),
        ({"sweep": []}, "at least one number"),
        ({"budget": SmBudget(4, 1), "sweep": [1]}, "left out when budget is given"),
    ],
)
def test_refused_sweeps(options: dict[str, object], field: str) -> None:
    def never(_: SmBudget) -> None:
        raise AssertionError("nothing may run")

    with pytest.raises(SpecError, match=field):
        overlap(never, never, device=CPU, **options)  # type: ignore[arg-type]


def test_the_cpu_is_described_and_has_no_clocks() -> None:
    found, reader = machine(CPU), ClockReader(CPU)
    assert found.kind == "cpu" and found.sms >= 1 and torch.__version__ in found.versions
    assert reader.read() == [] and "no GPU" in reader.note


def test_clocks_are_read_around_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, between and after the rounds that count, and what slowed the GPU down is said."""
    events: list[str] = []

    def read(_: ClockReader) -> list[Clocks]:
        events.append("clocks")
        reasons = ("software power cap",) if events.count("clocks") == 2 else ()
        return [Clocks(sm_mhz=1980, memory_mhz=2619, power_w=700.0, temperature_c=60, throttle=reasons)]

    monkeypatch.setattr(ClockReader, "read", read)
    contender = Contender(name="a", launch=lambda: events.append("sample"))
    (found,) = compare("order", [contender], device=CPU, samples=2, warmup=1)
    assert events == ["sample", *["clocks", "sample"] * 2, "clocks"]
    assert len(found.as_row()["clocks"]) == 3
    assert slowed_down(found.clocks) == ["the GPU was slowed down meanwhile: software power cap"]
    assert slowed_down(found.clocks[:1]) == []
    events.clear()
    result = overlap(lambda _: None, lambda _: None, SmBudget(8, 3), samples=2, warmup=1, device=CPU)
    assert len(result.rows[0].clocks) == events.count("clocks") == 3
    assert "software power cap" in " ".join(overlap_result({"a": result}).notes)


def test_compare_pairs_rounds() -> None:
    calls: list[str] = []
    found = compare(
        "order",
        [Contender(name=name, launch=lambda name=name: calls.append(name), flops=10, bytes=5) for name in ("a", "b")],
        device=CPU,
        samples=3,
        warmup=1,
    )
    assert calls == ["a", "b"] * 4
    assert found[0].ratio == 1 and found[1].time.samples == 3
    assert found[0].as_row()["flops_per_s"] == pytest.approx(10 / (found[0].time.ns / 1e9))
    slow = compare(
        "slow", [Contender(name="a", launch=lambda: None), Contender(name="b", launch=lambda: time.sleep(0.02))],
        device=CPU, samples=3,
    )  # fmt: skip
    assert slow[1].ratio > 1
    for contenders, samples in (([], 1), ([Contender(name="a", launch=lambda: None)], 0)):
        with pytest.raises(SpecError):
            compare("none", contenders, device=CPU, samples=samples)


# -- problems and what is timed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 13, 64])
def test_routing_of_a_problem(tokens: int) -> None:
    made = problem(tokens=tokens)
    ids, weights = made.choices()
    assert ids.shape == weights.shape == (tokens, 3) and ids.dtype == torch.int32
    assert all(len(set(of_token)) == 3 for of_token in ids.tolist()) and int(ids.max()) < 8
    torch.testing.assert_close(weights.sum(-1), torch.ones(tokens))
    offsets = made.offsets()
    assert offsets.dtype == torch.int32 and offsets[0] == 0 and int(offsets[-1]) == made.rows == 3 * tokens
    assert (offsets.diff() == torch.bincount(ids.flatten().long(), minlength=8)).all()


def test_random_data_is_neither_constant_nor_repeated() -> None:
    a, b = problem().random(50, 7, seed=1), problem().random(50, 7, seed=2)
    assert a.unique().numel() > 300 and not torch.equal(a, b)


def test_problems_of_released_models_and_refusals() -> None:
    made = expert_problem("qwen3-30b-a3b", tokens=5, ep=8, dtype="bf16", device=CPU)
    assert (made.experts, made.rows, made.dtype) == (16, 40, torch.bfloat16)
    with pytest.raises(SpecError) as caught:
        expert_problem("qwen", tokens=0, ep=0, dtype="int8", device=CPU)
    assert {p.field for p in caught.value.problems} == {"model", "dtype", "tokens"}
    with pytest.raises(SpecError, match="divisor of the 128"):
        expert_problem("qwen3-30b-a3b", tokens=1, ep=3, device=CPU)
    with pytest.raises(SpecError, match="leave 8 experts"):
        expert_problem("qwen3-30b-a3b", tokens=1, ep=64, device=CPU)


GATES = {shape.gate.activation: shape for shape in SHAPES}


@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.SWIGLU_OSS, Activation.RELU2])
def test_the_composed_layer_is_the_layer(activation: Activation) -> None:
    """The contenders of the layer bench do the same work: equal outputs and gradients."""
    like = GATES[activation]
    made = problem(replace(TINY, gate=like.gate, bias=like.bias))
    x, weights, ids, router_weights = layer._operands(made)
    leaves = [
        leaf for leaf in (x, router_weights, weights.gate_up, weights.down, weights.gate_up_bias) if leaf is not None
    ]
    grad = torch.randn_like(x)
    found = []
    for forward in (routed_experts, layer.grouped_mm_layer):
        out = forward(x, ids, router_weights, weights, made.shape.gate)
        found.append((out, *torch.autograd.grad(out, leaves, grad)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_products_and_layer_are_timed() -> None:
    rows = products.bench_products(problem(), samples=1)
    assert [r.name for r in rows] == ["torch._grouped_mm", "one dense product"] * 4
    assert {r.flops for r in rows} == {2 * 39 * 48 * 16, 2 * 39 * 16 * 24}
    grouped, dense = rows[:2]
    assert grouped.bytes == 4 * (39 * (48 + 16) + 8 * 48 * 16) and dense.bytes == 4 * (39 * (48 + 16) + 48 * 16)
    forward, _, both, _ = layer.bench_layer(problem(), samples=1)
    assert forward.name == both.name == "Tessera" and both.flops == 3 * forward.flops


def test_copies_move_the_bytes() -> None:
    launch = copy(1001, device=CPU)
    copied = launch()
    assert isinstance(copied, Tensor) and copied.numel() == 1001
    rows = bench_traffic("a title", 64, device=CPU, samples=1)
    assert [(r.problem, r.name, r.bytes) for r in rows] == [("a title", "copy", 64)]
    assert [shared_size(size, 3) for size in (1, 3, 4 << 20)] == [3, 3, (4 << 20) + 2]
    with pytest.raises(SpecError, match="size = 0"):
        copy(0, device=CPU)


# -- users' functions -------------------------------------------------------------------------------------------------


def test_users_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "def good(device):\n    return lambda budget: budget.total\n"
        "def bad(device):\n    return 3\n"
        "value = 1\n"
    )  # fmt: skip
    (tmp_path / "broken.py").write_text("import no_such_module_of_mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_launch("--comm", "mine:good", CPU)(SmBudget(7)) == 7
    for name, allowed in (
        ("mine", "package.module:function"),
        ("nowhere.at_all:f", "a module that can be imported"),
        ("mine:missing", "a function of mine"),
        ("mine:value", "a function of mine"),
        ("mine:bad", "returned int"),
    ):
        with pytest.raises(SpecError, match=allowed) as caught:
            load_launch("--comm", name, CPU)
        assert caught.value.problems[0].field == "--comm"
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_mine"):
        load_launch("--comm", "broken:f", CPU)


@pytest.mark.usefixtures("interpreted")
def test_a_measurement_names_the_kernels_configurations() -> None:
    of_table = fingerprint("interpreter", triton_minor())
    assert kernel_versions(CPU) == f"Triton {triton.__version__}, kernel configurations interpreter {of_table[:12]}"


# -- results ----------------------------------------------------------------------------------------------------------


def test_results_and_their_figures(tmp_path: Path) -> None:
    gpu = Machine(kind="cuda", name="a GPU", sms=132, versions="torch")
    slow, fast = row(both=200), replace(row(both=120), budget=SmBudget(132, 16))
    sweeps = {"small": OverlapResult(machine=gpu, rows=(slow,), notes=("a note",)),
              "large": OverlapResult(machine=gpu, rows=(slow, fast), notes=("a note",))}  # fmt: skip
    result = overlap_result(sweeps, comp_flops=1000, link_bytes=80, notes=("a note", "another"))
    assert result.figures["comm_sms"] == 16
    assert result.figures["grouped_gemm_flops_per_s"] == pytest.approx(1000 / 100e-9)
    assert result.figures["link_bytes_per_s"] == pytest.approx(80 / 40e-9)
    assert list(result.notes) == ["a note", "another"] and len(result.rows) == 3
    save_result(result, tmp_path / "result.json")
    data = json.loads((tmp_path / "result.json").read_text())
    assert data["tessera_bench"] == 1 and data["rows"][2]["name"] == "large"
    assert "link_bytes_per_s" not in overlap_result(sweeps).figures
    draw_overlap(sweeps, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5_000


def test_figures_of_products_and_traffic() -> None:
    """What ``tessera plan --costs`` takes: rates of the first problem only, and of the largest all-to-all."""

    def compared(problem: str, name: str, ns: int, flops: int = 0, bytes: int = 0) -> ComparedRow:
        return ComparedRow(
            problem=problem, name=name, time=Timing(ns, 0.0, 3), ratio=1.0, flops=flops, bytes=bytes,
            clocks=(),
        )  # fmt: skip

    rows = [
        compared("first", "Tessera", 20, flops=1000),
        compared("first", "torch._grouped_mm", 1, flops=1000),
        compared("first", "one dense product", 10, flops=1000),
        compared("second", "Tessera", 1, flops=1000),
    ]
    assert product_figures(rows) == pytest.approx({"grouped_gemm_flops_per_s": 5e10, "gemm_flops_per_s": 1e11})
    assert product_figures(rows[1:2]) == {}
    sent = [compared("a", "torch all-to-all", 100, bytes=800), compared("b", "torch all-to-all", 10, bytes=8)]
    assert link_figures([*sent, compared("a", "copy", 1, bytes=800)], 4) == pytest.approx({"link_bytes_per_s": 6e9})
    assert link_figures(sent, 1) == link_figures(rows, 4) == {}


@pytest.mark.usefixtures("interpreted")
def test_the_measured_dispatch_sends_every_token_once_to_each_of_its_ranks() -> None:
    made = replace(problem(tokens=9), experts=2)
    contender = peer_dispatch(made, 3)
    with launches() as log:
        contender.launch()
    assert Counter(launch.kernel for launch in log) == {"wait_kernel": 6, "rows_put_kernel": 3, "rows_take_kernel": 3}
    _, ids, _ = puts._tokens(made, puts._traffic(made, 3))
    copies = sum(len({expert // 2 for expert in of_token}) for of_token in ids.tolist())
    assert 9 < copies < 27 and contender.bytes == dispatched_bytes(made, 3) == copies * 16 * 4


def test_a_users_gate_is_not_needed_for_a_dense_shape() -> None:
    """Weights of an expert without gate have one half only."""
    made = problem(replace(TINY, gate=Gate(activation=Activation.RELU2)))
    _, weights, _, _ = layer._operands(made)
    assert isinstance(weights, ExpertWeights) and weights.gate_up.shape == (8, 24, 16)
