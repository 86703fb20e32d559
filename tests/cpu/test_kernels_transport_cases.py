"""The cases of data/transport_cases.yaml: each is run, or scaled, or skipped with a reason, or is a test of its own."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tessera_rt.testing.peer_calls import run_and_compare, traffic_of
from tessera_rt.testing.peer_ranks import rank_inputs

HERE = Path(__file__).parent
# How many cases each group must have: a case that is lost is noticed.
EXPECTED = {
    "deepep": 19,
    "pplx": 2,
    "triton-distributed": 2,
    "torchtitan": 6,
    "dist-moe": 2,
    "ours": 13,
    "reported-faults": 2,
}


def _load() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load((HERE / "data" / "transport_cases.yaml").read_text(encoding="utf-8"))
    listed = [(name, group["source"], case) for name, group in groups.items() for case in group["cases"]]
    cases = {case["id"]: {"group": name, "source": source, **case} for name, source, case in listed}
    assert len(cases) == len(listed), "an id is there twice"
    return cases


CASES = _load()


def test_every_case_has_a_status() -> None:
    for name, case in CASES.items():
        needed = {"run": "form", "scaled": "scale", "skipped": "reason", "test": "covered_by"}[case["status"]]
        assert case.get(needed) and case["source"], f"{name} is {case['status']} and lacks {needed}"
    assert Counter(case["group"] for case in CASES.values()) == EXPECTED


def test_tests_that_cover_cases_exist() -> None:
    for name, case in CASES.items():
        if case["status"] == "test":
            file, _, function = case["covered_by"].partition("::")
            tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
            assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] if case.get("slow") else [])
        for name, case in CASES.items()
        if case["status"] in ("run", "scaled")
    ],
)
def test_case(case: dict[str, Any]) -> None:
    traffic = traffic_of(
        case["form"], case["world"], max(case["tokens"]), experts=case["experts"], top_k=case["top_k"],
        hidden=case["hidden"], dtype=getattr(torch, case.get("dtype", "float32")),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(sum(map(ord, case["id"])))
    inputs = rank_inputs(traffic, case["tokens"], generator, dropped=case.get("dropped", 0.0))
    if "ids" in case:
        parts = torch.tensor(case["ids"], dtype=torch.int32).split(case["tokens"])
        inputs = [replace(one, ids=ids) for one, ids in zip(inputs, parts, strict=True)]
    run_and_compare(traffic, inputs)
