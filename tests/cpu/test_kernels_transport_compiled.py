"""The transport's kernels compiled for sm_90 by Triton 3.6.0 and the newest: what the interpreter cannot show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NEWEST = "installed"


def compiled(version: str) -> list[dict[str, Any]]:
    """Every kernel at one model's shape in bf16; installs the version beside the environment, or skips."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    cache = ROOT / ".cache" / "triton"
    cache.mkdir(parents=True, exist_ok=True)
    (cache.parent / ".gitignore").write_text("*\n", encoding="utf-8")
    environment |= {"TRITON_CACHE_DIR": str(cache / "compiled"), "TRITON_DEFAULT_FP_FUSION": "1"}
    if version != NEWEST:
        folder = cache / version
        if not (folder / "triton").is_dir():
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
            done = subprocess.run([*install, f"triton=={version}"], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"pip could not fetch Triton {version}: {done.stderr.strip().splitlines()[-1:]}")
        environment["PYTHONPATH"] = str(folder)
    program = str(Path(__file__).with_name("compiled_transport.py"))
    done = subprocess.run(
        [sys.executable, program, "sm90", "qwen3-235b-a22b"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert version in (NEWEST, result["triton"])
    kernels: list[dict[str, Any]] = result["kernels"]
    return kernels


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.6.0", NEWEST])
def test_signals_waits_stores_and_spills(version: str) -> None:
    """A barrier before each release, an acquire in each wait, rows stored 16 bytes at a time, nothing spilled."""
    kernels = compiled(version)
    assert len({kernel["kernel"] for kernel in kernels}) == 10
    for kernel in kernels:
        name = f"{kernel['kernel']} {kernel['sizes']}"
        assert kernel["spills"] == 0, name
        assert kernel["bare_releases"] == [] and kernel["bare_waits"] == [], name
        moves = kernel["kernel"].startswith(("rows_", "returns_"))
        signals = moves or kernel["kernel"].startswith("counts_")
        # The arrival of each program, and the signal of the last one.
        assert kernel["releases"] == (2 if signals else 0), name
        assert (kernel["acquires"] > 0) == (kernel["kernel"] == "wait"), name
        if moves:
            stores = kernel["stores"]
            assert stores.get("st.global.v4.b32", 0) > 0, name
            # Rows of bf16: a narrow store would be of 16 bits (or two or four of them); the others are ids and flags.
            assert set(stores) <= {"st.global.v4.b32", "st.global.b32"}, name
