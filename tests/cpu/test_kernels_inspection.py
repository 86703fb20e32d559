"""The rules of the offline report, one planted fault each, and its table of what shares an SM; nothing is compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tessera_rt.kernels import inspection
from tessera_rt.kernels.config_table import Config
from tessera_rt.kernels.inspection import Code, CodeNames, problems_of, sharing_table
from tessera_rt.kernels.launch import Launch
from tessera_rt.kernels.offline import Target, target_named

SM90, SM100 = target_named("sm90"), target_named("sm100")
SOUND = Code(
    registers=168, spills=0, shared_bytes=180_248, threads=256, mma="HGMMA", mma_count=8, tma=6, async_copies=8,
    store_bytes=16, scalar_dot=False, unordered_releases=(), plain_waits=(), relaxed_waits=(),
)  # fmt: skip
WIDE = Config(block_m=128, block_n=256, block_k=64, warps=8, stages=3)


def product(**fields: Any) -> Launch:
    """A launch of the large forward, with other fields."""
    given: dict[str, Any] = {"kernel": "forward", "dtype": "bfloat16", "size": "large", "load": "gather"}
    given |= {"config": WIDE, "options": {}} | fields
    return Launch(
        given["kernel"], "m", given["dtype"], given["size"], given["load"], "N 1 K 2", given["config"], None, (),
        given["options"], given.get("least", 0),
    )  # fmt: skip


DATA: dict[str, Any] = {"kernel": "rows_put", "size": "any", "load": "pointer", "config": replace(WIDE, block_m=0)}
RULES: dict[str, tuple[Launch, dict[str, Any], str]] = {
    "spills": (product(), {"spills": 3}, "3 spills"),
    "shared memory": (product(), {"shared_bytes": 232_449}, "shared memory"),
    "plain units": (product(size="any"), {"scalar_dot": True}, "plain units"),
    "no tensor cores": (product(), {"mma": ""}, "by nothing, not HGMMA"),
    "tensor cores of one warp": (product(size="small"), {"mma": "HMMA"}, "by HMMA, not HGMMA"),
    "no TMA": (product(), {"tma": 0}, "no TMA"),
    "gathered in step": (product(), {"async_copies": 0}, "not copied asynchronously"),
    "narrow stores": (product(), {"store_bytes": 8}, "stores of 8 bytes"),
    "narrow stores of a kernel that moves rows": (product(**DATA, least=16), {"store_bytes": 4}, "not 16"),
    "low tile": (product(config=replace(WIDE, block_m=64)), {}, "tile 64x256 is below 128x128"),
    "narrow tile": (product(config=replace(WIDE, block_n=64)), {}, "tile 128x64 is below 128x128"),
    "release": (product(**DATA), {"unordered_releases": ("st.release",)}, "without a barrier"),
    "plain wait": (product(**DATA), {"plain_waits": ("ld.global",)}, "wait loop"),
    "relaxed wait": (product(**DATA), {"relaxed_waits": ("ld.relaxed",)}, "without acquire"),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_a_problem(rule: str) -> None:
    launch, fault, text = RULES[rule]
    (problem,) = problems_of(launch, replace(SOUND, **fault), SM90)
    assert text in problem


@pytest.mark.parametrize(
    ("launch", "code", "target"),
    [
        (product(), SOUND, SM90),
        (product(), replace(SOUND, mma="UTCHMMA"), SM100),
        (product(load="tma"), replace(SOUND, async_copies=0), SM90),
        (product(size="small", config=replace(WIDE, block_m=64)), SOUND, SM90),
        (product(size="any", load="pointer"), replace(SOUND, mma="HMMA", tma=0, store_bytes=2), SM90),
        # A gated tile of 64 columns of output has 128 of the product.
        (product(kernel="forward_gate", config=replace(WIDE, block_n=64), options={"GATED": True}), SOUND, SM90),
        (product(**DATA), replace(SOUND, mma="", tma=0, store_bytes=4), SM90),
    ],
)
def test_sound_code_has_no_problems(launch: Launch, code: Code, target: Target) -> None:
    assert problems_of(launch, code, target) == ()


def test_a_gated_tile_counts_twice_in_the_forward_only() -> None:
    narrow: dict[str, Any] = {"config": replace(WIDE, block_n=64), "options": {"GATED": True}}
    assert problems_of(product(kernel="gate_backward", **narrow), SOUND, SM90)


def test_what_shares_an_sm_with_a_large_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with two variants, of which one has too many registers, and one that never fits."""
    made = {
        "product": (product(), SOUND),
        "small": (product(**DATA | {"kernel": "wait"}), replace(SOUND, registers=32, shared_bytes=0, threads=32)),
        "few": (product(**DATA), replace(SOUND, registers=40, shared_bytes=0)),
        "many": (product(**DATA), replace(SOUND, registers=96, shared_bytes=0)),
        "greedy": (product(**DATA | {"kernel": "slots"}), replace(SOUND, registers=255)),
    }
    launches = {id(launch): name for name, (launch, _) in made.items()}
    monkeypatch.setattr(CodeNames, "of", lambda _self, launch: launches[id(launch)])
    codes = {name: code for name, (_, code) in made.items()}
    (entry,) = sharing_table([launch for launch, _ in made.values()], codes, SM90)
    assert entry == {"product": "forward/gather 128x256x64 w8 s3", "always": ["wait w8"], "sometimes": ["rows_put w8"]}


def test_rows_in_order_are_not_read_by_tma_in_the_any_size_class() -> None:
    loads = {(one.size == "any", one.load) for one in inspection.all_launches(SM90, minor="3.9") if one.is_product}
    assert loads == {(True, "pointer"), (True, "gather"), (False, "tma"), (False, "gather")}
