"""The cases of data/kernel_cases.yaml: each is run, or scaled, or skipped with a reason, or is a test of its own."""

from __future__ import annotations

import ast
import itertools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from tessera_rt.kernels import reference, routing
from tessera_rt.kernels.config_table import Config
from tessera_rt.kernels.expert_mlp import expert_mlp
from tessera_rt.kernels.operands import DEFAULT_RUN, Run
from tessera_rt.kernels.options import Activation, Gate
from tessera_rt.kernels.routing import expert_rows, route_rows
from tessera_rt.kernels.rows_gemm import rows_gemm
from tessera_rt.kernels.wgrad import wgrad
from tessera_rt.testing.interpreter import Launch, launches
from tessera_rt.testing.kernel_checks import (
    assert_near,
    dense_experts,
    map_weights,
    offsets_of,
    poisoned_memory,
    random_ids,
    random_weights,
)

HERE = Path(__file__).parent
STATUSES = ("run", "scaled", "skipped", "test")
# How many cases each group must have: a case that is lost is noticed.
EXPECTED = {
    "deepgemm-contiguous": 8,
    "deepgemm-masked": 4,
    "deepgemm-k-grouped": 8,
    "triton-kernels-sizes": 6,
    "triton-kernels-options": 11,
    "unsloth": 4,
    "sonicmoe": 12,
    "liger": 6,
    "scattermoe": 4,
    "grouped-gemm": 7,
    "megablocks": 2,
    "quack": 1,
    "empty-groups": 2,
    "ours": 17,
    "formulations": 16,
    "reported-faults": 11,
}
PLACING = ("histogram_kernel", "tile_scan_kernel", "offsets_kernel", "place_kernel")
QUICK = ("own-", "f-", "eg-small", "tk-0", "tk-5", "tk-block", "tk-swiglu", "lg-1", "mb-4", "dg-k-empty")
QUICK_NOT = ("f-place-4096",)


def _load() -> dict[str, dict[str, Any]]:
    """Every case by id, with what its group says of all."""
    groups = yaml.safe_load((HERE / "data" / "kernel_cases.yaml").read_text(encoding="utf-8"))
    cases: dict[str, dict[str, Any]] = {}
    for name, group in groups.items():
        shared = {key: value for key, value in group.items() if key != "cases"}
        for case in group["cases"]:
            assert case["id"] not in cases, f"{case['id']} is there twice"
            cases[case["id"]] = {"group": name, **shared, **case}
    return cases


CASES = _load()


def _runnable() -> list[Any]:
    quick = {name for name in CASES if name.startswith(QUICK) and name not in QUICK_NOT}
    marks = {name: () if name in quick else pytest.mark.slow for name in CASES}
    return [
        pytest.param(case, id=name, marks=marks[name])
        for name, case in CASES.items()
        if case.get("status") in ("run", "scaled")
    ]


def test_every_case_has_a_status() -> None:
    counts: dict[str, int] = {}
    for name, case in CASES.items():
        counts[case["group"]] = counts.get(case["group"], 0) + 1
        status = case.get("status")
        assert status in STATUSES, f"{name} has no status"
        needed = {"run": "kind", "scaled": "scale", "skipped": "reason", "test": "covered_by"}[status]
        assert case.get(needed), f"{name} is {status} and lacks {needed}"
        assert case["source"]
    assert counts == EXPECTED


def test_tests_that_cover_cases_exist() -> None:
    for name, case in CASES.items():
        if case["status"] == "test":
            file, _, function = case["covered_by"].partition("::")
            tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
            assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", _runnable())
def test_case(case: dict[str, Any]) -> None:
    {"experts": _experts, "rows": _rows, "placement": _placement}[case["kind"]](case)


def _assert_launched(log: list[Launch], *kernels: str) -> None:
    """A kernel whose name begins so ran, as often as it is named: it was not the reference that gave the result."""
    for kernel, times in Counter(kernels).items():
        found = [launch.kernel for launch in log if launch.kernel.startswith(kernel)]
        assert len(found) >= times, f"{kernel} was launched {len(found)} times, not {times}"


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("kind", "name"), [("rows", "rows_gemm"), ("rows", "wgrad"), ("placement", "place"), ("experts", "expert_mlp")]
)
def test_a_reference_in_a_kernels_place_is_noticed(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are right then; only the launches say what made them."""
    case = next(case for key, case in CASES.items() if case.get("kind") == kind and key.startswith(QUICK))
    module = routing if name == "place" else sys.modules[__name__]
    monkeypatch.setattr(module, name, REFERENCES[name])
    with pytest.raises(AssertionError, match="was launched [01] times, not"):
        test_case(case)


def _reference_rows_gemm(x: Tensor, weight: Tensor, rows: Any, **_: Any) -> tuple[Tensor, Tensor | None]:
    out, pre = reference.rows_gemm(x.double(), weight.double(), rows.offsets, rows.rows)
    return out.to(x.dtype), pre


def _reference_wgrad(grad: Tensor, x: Tensor, rows: Any, out: Tensor, *, accumulate: bool, **_: Any) -> Tensor:
    made = reference.wgrad(grad.double(), x.double(), rows.offsets)
    return (out + made if accumulate else made).to(out.dtype)


def _reference_experts(x: Tensor, weights: Any, routed: Any, router: Tensor, gate: Gate, **_: Any) -> Tensor:
    ids = torch.full(routed.position.shape, -1)
    expert = torch.bucketize(torch.arange(routed.rows.rows), routed.rows.offsets[1:].long(), right=True)
    there = routed.position >= 0
    ids[there] = expert[routed.position[there].long()]
    return dense_experts(x.float(), map_weights(weights, Tensor.float), ids, router, gate).to(x.dtype)


REFERENCES = {
    "rows_gemm": _reference_rows_gemm,
    "wgrad": _reference_wgrad,
    "place": reference.place,
    "expert_mlp": _reference_experts,
}


def _generator(case: dict[str, Any]) -> torch.Generator:
    return torch.Generator().manual_seed(sum(map(ord, case["id"])))


def _gate(case: dict[str, Any]) -> Gate:
    given = dict(case.get("gate", {}))
    return Gate(activation=Activation[given.pop("activation", "SWIGLU")], **given)


def _run_with(block: int, heights: list[int]) -> Run:
    if not block:
        return DEFAULT_RUN
    heights.append(block)
    return Run(config=Config(block_m=block, block_n=64, block_k=64, warps=4, stages=3))


def _experts(case: dict[str, Any]) -> None:
    generator, gate = _generator(case), _gate(case)
    dtype = getattr(torch, case.get("dtype", "bfloat16"))
    tokens, experts, top_k = case["tokens"], case["experts"], case["top_k"]
    weights = random_weights(
        experts, case["hidden"], case["intermediate"], gate, dtype, generator,
        bias=case.get("bias", False), transposed=case.get("transposed", False),
    )  # fmt: skip
    ids = random_ids(tokens, experts, top_k, generator, dropped=case.get("dropped", 0.0))
    if "all_to" in case:
        ids.fill_(case["all_to"])
    x = torch.randn(tokens, case["hidden"], generator=generator).to(dtype)
    router, grad = torch.rand(tokens, top_k, generator=generator), torch.randn(x.shape, generator=generator).to(dtype)
    heights: list[int] = []
    run = _run_with(case.get("blocks", 64 if tokens > 64 else 0), heights)
    low = [x.clone().requires_grad_(), router.clone().requires_grad_()]
    low_weights = map_weights(weights, lambda tensor: tensor.detach().clone().requires_grad_())
    with poisoned_memory(), launches() as log:
        routed = route_rows(ids, experts, block_ms=heights)
        out = expert_mlp(low[0], low_weights, routed, low[1], gate, run=run)
        out.backward(grad)
    if tokens:
        _assert_launched(log, *PLACING, "tile_table", "rows_gemm", "gate_backward", "wgrad", "gather_sum")
    high = [x.double().requires_grad_(), router.double().requires_grad_()]
    high_weights = map_weights(weights, lambda tensor: tensor.double().requires_grad_())
    want = dense_experts(high[0], high_weights, ids, high[1], gate) + 0 * high[0]
    want.backward(grad.double())
    ratio = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}[dtype]
    assert_near("out", out, want, ratio=ratio)
    pairs = {
        "x": (low[0], high[0]),
        "router": (low[1], high[1]),
        "gate_up": (low_weights.gate_up, high_weights.gate_up),
        "down": (low_weights.down, high_weights.down),
    }
    for name, (got, expected) in pairs.items():
        assert got.grad is not None
        reached = torch.zeros_like(expected) if expected.grad is None else expected.grad
        assert_near(f"d {name}", got.grad, reached, ratio=ratio)


def _counts(case: dict[str, Any], generator: torch.Generator) -> list[int]:
    if "counts" in case:
        return list(case["counts"])
    if "total" in case:
        cuts = torch.randint(0, case["total"] + 1, (case["experts"] - 1,), generator=generator).sort().values
        edges = [0, *cuts.tolist(), case["total"]]
        return [b - a for a, b in itertools.pairwise(edges)]
    factors = 0.7 + 0.6 * torch.rand(case["experts"], generator=generator)
    return [int(case["rows"] * factor) for factor in factors]


def _rows(case: dict[str, Any]) -> None:
    generator = _generator(case)
    counts, n, k = _counts(case, generator), case["n"], case["k"]
    total, experts = sum(counts), len(counts)
    buffer = max(case.get("buffer", total), total)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).bfloat16()

    x, grad, weight = draw(buffer, k), draw(buffer, n), draw(experts, n, k, scale=max(k, 1) ** -0.5)
    x[total:], grad[total:] = torch.nan, torch.nan
    if case.get("transposed"):
        weight = weight.mT.contiguous().mT
    heights: list[int] = []
    run = _run_with(case.get("block_m", 128 if total * n * k > 1 << 20 else 0), heights)
    offsets = offsets_of(counts)
    with poisoned_memory(), launches() as log:
        rows = expert_rows(offsets, buffer, heights)
        out, _ = rows_gemm(x, weight, rows, run=run)
        d_x, _ = rows_gemm(grad, weight.mT, rows, kind="dgrad", run=run)
        written = wgrad(grad, x, rows, torch.empty(experts, n, k, dtype=torch.bfloat16), accumulate=False, run=run)
        added = wgrad(grad, x, rows, torch.ones(experts, n, k), accumulate=True, run=run)
    launched = ["rows_gemm"] * 2 + ["wgrad"] * 2 if buffer and n and k else []
    _assert_launched(log, "tile_table", *launched)
    assert_near("out", out, reference.rows_gemm(x.double(), weight.double(), offsets, buffer)[0])
    assert_near("d x", d_x, reference.rows_gemm(grad.double(), weight.mT.double(), offsets, buffer)[0])
    want = reference.wgrad(grad.double(), x.double(), offsets)
    assert_near("d weight", written, want)
    assert_near("main gradient", added, want + 1, ratio=3e-6)


def _placement(case: dict[str, Any]) -> None:
    ids = random_ids(
        case["tokens"], case["experts"], case["top_k"], _generator(case), dropped=case.get("dropped", 0.0)
    )  # fmt: skip
    with poisoned_memory(), launches() as log:
        got = routing.place(ids, case["experts"])
    _assert_launched(log, *PLACING if ids.numel() else ())
    assert all(torch.equal(a, b) for a, b in zip(got, reference.place(ids, case["experts"]), strict=True))
