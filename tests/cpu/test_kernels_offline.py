"""Kernels compiled for GPUs that are not there: by Triton 3.6.0, 3.7.1 and the installed one.

Compilation runs in processes of its own, without the interpreter. Other versions of Triton are installed beside the
environment, in .cache/triton/<version>.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tessera_rt.kernels import code_hash, inspection
from tessera_rt.kernels.code_hash import CodeHashes
from tessera_rt.kernels.config_table import GATED_KERNELS, HALF, KERNELS
from tessera_rt.kernels.configs import fingerprint, triton_minor
from tessera_rt.kernels.launch import Launch
from tessera_rt.kernels.options import Activation
from tessera_rt.kernels.ptx_checks import plain_waits_in_source
from tessera_rt.kernels.shapes import GATE_SHAPES, SHAPES

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "bench" / "results" / "kernel_report.json"
NEWEST = "installed"
COMPILED = (("sm90", "3.6.0"), ("sm90", "3.7.1"), ("sm90", NEWEST), ("sm100", NEWEST))
TENSOR_CORES = {"sm90": "HGMMA", "sm100": "UTCHMMA"}  # of a warp group, and of the fifth generation
ROW_FIELDS = {"kernel", "dtype", "shape", "config", "registers", "spills", "shared_bytes", "mma", "tma"}


def triton_environment(version: str) -> dict[str, str]:
    """Environment of a process that compiles with this version; installs it, or skips with the reason."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    cache = ROOT / ".cache"
    cache.mkdir(exist_ok=True)
    (cache / ".gitignore").write_text("*\n", encoding="utf-8")
    environment["TRITON_CACHE_DIR"] = str(cache / "triton" / "compiled")
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    if version == NEWEST:
        return environment
    folder = cache / "triton" / version
    if not (folder / "triton").is_dir():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        done = subprocess.run([*install, f"triton=={version}"], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"pip could not fetch Triton {version}: {done.stderr.strip().splitlines()[-1:]}")
    environment["PYTHONPATH"] = str(folder)
    return environment


def compiled_report(tmp_path: Path, target: str, version: str, *selection: str) -> dict[str, Any]:
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "tessera_rt.kernels.inspection", "--target", target, "--out", str(out)]
    done = subprocess.run(
        [*command, *selection], cwd=ROOT, env=triton_environment(version), capture_output=True, text=True, check=False
    )
    assert out.exists(), done.stderr[-2000:]
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    if version != NEWEST:
        assert result["triton"] == version
    assert done.returncode == any(row["problems"] for row in result["rows"])
    return result


def assert_sound(result: dict[str, Any]) -> None:
    broken = [row for row in result["rows"] if row["problems"]]
    assert not broken, "\n".join(f"{row['kernel']} {row['model']} {row['config']}: {row['problems']}" for row in broken)
    for row in result["rows"]:
        assert row["spills"] == 0 and row["shared_bytes"] <= 232448 and row.keys() >= ROW_FIELDS


def test_the_riskiest_products_compile_soundly(tmp_path: Path) -> None:
    """Gated with bias and interleaved, gathered, accumulating: the ones that spill first."""
    kernels = ("forward_gate", "gate_backward", "wgrad_accumulate")
    selection = [word for kernel in kernels for word in ("--kernel", kernel)]
    narrow = ("--model", "gpt-oss-120b", "--dtype", "bfloat16", "--size", "large", "--load", "gather")
    result = compiled_report(tmp_path, "sm90", NEWEST, *selection, *narrow)
    assert {row["kernel"] for row in result["rows"]} == set(kernels)
    assert_sound(result)
    assert all(row["mma"] == "HGMMA" and row["store_bytes"] == 16 and row["tma"] > 0 for row in result["rows"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("target", "version"), COMPILED)
def test_large_products_compile_soundly(tmp_path: Path, target: str, version: str) -> None:
    """Every kernel and load at the large shapes in bf16 and fp16; the other launches are in the committed report."""
    result = compiled_report(tmp_path, target, version, "--dtype", "bfloat16", "--dtype", "float16", "--size", "large")
    assert_sound(result)
    assert_large_tiles(result)
    found = {(row["kernel"], row["model"], row["dtype"], row["load"]) for row in result["rows"]}
    for kernel, shape, dtype, load in product(KERNELS, SHAPES, HALF, ("tma", "gather")):
        assert (kernel, shape.name, dtype, load) in found


def assert_large_tiles(result: dict[str, Any]) -> None:
    """Tiles of at least 128 x 128 of the product: a gated first product has two columns for each of its output."""
    gated = {shape.name for shape in (*SHAPES, *GATE_SHAPES) if shape.gate.gated}
    for row in result["rows"]:
        if row["size"] == "large" and row["dtype"] in HALF and row["kernel"] in KERNELS:
            block_m, block_n, _ = (int(number) for number in row["config"].split()[0].split("x"))
            columns = block_n * (2 if row["kernel"] == "forward_gate" and row["model"] in gated else 1)
            assert block_m >= 128 and columns >= 128, row


def assert_covers(result: dict[str, Any]) -> None:
    """Every kernel, dtype and load at the models' shapes, fp32 and the any-size class too; other gates in bf16."""
    found = {(row["kernel"], row["model"], row["dtype"], row["size"], row["load"]) for row in result["rows"]}
    for kernel in KERNELS:
        for shape in SHAPES:
            for load in ("tma", "gather"):
                for dtype in HALF:
                    assert {(kernel, shape.name, dtype, size, load) for size in ("large", "small")} <= found
                assert (kernel, shape.name, "float32", "large", load) in found
            for dtype, load in product((*HALF, "float32"), ("pointer", "gather")):
                assert (kernel, shape.name, dtype, "any", load) in found
    gates = {(shape.gate.activation, shape.gate.interleaved) for shape in (*SHAPES, *GATE_SHAPES) if shape.gate.gated}
    assert gates == {(each, wide) for each in Activation if each.gated for wide in (False, True)}
    for shape, kernel, size, load in product(GATE_SHAPES, GATED_KERNELS, ("large", "small"), ("tma", "gather")):
        assert (kernel, shape.name, "bfloat16", size, load) in found
    large = [row for row in result["rows"] if row["size"] == "large" and row["kernel"] in KERNELS]
    assert all(row["mma"] == TENSOR_CORES[result["target"]] for row in large)


@pytest.mark.parametrize(("target", "version"), COMPILED)
def test_the_committed_report_is_sound_complete_and_of_these_sources(target: str, version: str) -> None:
    reports = json.loads(REPORT.read_text(encoding="utf-8"))["reports"]
    of_target = [entry for entry in reports if entry["target"] == target]
    names = [entry["triton"] for entry in of_target]
    newest = max(names, key=lambda name: tuple(map(int, name.split("."))))
    entry = of_target[names.index(newest if version == NEWEST else version)]
    minor = triton_minor(entry["triton"])
    launches = inspection.all_launches(inspection.target_named(target), minor=minor)
    codes = inspection.known_codes([entry], inspection.target_named(target), entry["triton"])
    names = inspection.CodeNames()
    old = {launch.kernel for launch in launches if names.of(launch) not in codes}
    remedy = "make it again with: python bench/bench_kernel_report.py"
    assert not old, f"the code of {', '.join(sorted(old))} changed since the report was made; {remedy}"
    rows = inspection.report_rows(launches, codes, inspection.target_named(target))
    assert entry["rows"] == json.loads(json.dumps([asdict(row) for row in rows])), f"rules changed since; {remedy}"
    assert entry["codes"].keys() == {row.code for row in rows}
    assert entry["fingerprint"] == fingerprint(target, minor)
    assert_sound(entry)
    assert_large_tiles(entry)
    assert_covers(entry)


def test_only_unknown_codes_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    target = inspection.target_named("sm90")
    launches = inspection.all_launches(target, inspection.Selection(kernel=("offsets", "place")), minor="3.9")
    names = inspection.CodeNames()
    there = sorted(launch.kernel for launch in {names.of(launch): launch for launch in launches}.values())
    assert len(there) < len(launches), "several launches have one code"
    made: list[str] = []

    def compile_launch(launch: Launch, _target: Any) -> inspection.Code:
        made.append(launch.kernel)
        return code

    reported = json.loads(REPORT.read_text(encoding="utf-8"))["reports"][0]
    former = inspection.known_codes([reported], inspection.target_named("sm90"), reported["triton"])
    code = replace(next(iter(former.values())), registers=77)
    monkeypatch.setattr(inspection, "_compile", compile_launch)
    first = inspection.compile_launches(launches, target, known={})
    assert sorted(made) == there and len(first) == len(there)
    made.clear()
    known = {names.of(launch): replace(code, registers=5) for launch in launches if launch.kernel == "offsets"}
    again = inspection.compile_launches(launches, target, known=known)
    assert set(made) == {"place"} and len(made) == there.count("place")
    assert sorted(code.registers for code in again.values()) == [5] * there.count("offsets") + [77] * len(made)
    assert not inspection.known_codes([reported], target, "3.5.0")
    assert not inspection.known_codes([reported], inspection.target_named("sm100"), reported["triton"])


def test_code_hashes_follow_what_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Own text, functions and constants that are used, also from other files; not comments or other kernels."""
    monkeypatch.setattr(code_hash, "_FOLDER", tmp_path)
    shared = "import triton\nLIMIT = 3\n\ndef half(x):\n    return x / LIMIT\n\ndef other(x):\n    return x\n"
    kernel = (
        "from tessera_rt.kernels.shared import half\n\ndef work(args):\n    return 1\n\n"
        "@triton.jit(launch_metadata=work)\ndef kernel(x):\n    'doc'\n    half(x)\n\ndef unused(x):\n    return x\n"
    )

    def hashed(kernel: str, shared: str) -> str:
        (tmp_path / "shared.py").write_text(shared, encoding="utf-8")
        (tmp_path / "kernel.py").write_text(kernel, encoding="utf-8")
        return CodeHashes().of("kernel", "kernel")

    before = hashed(kernel, shared)
    for old, new in [("'doc'", "'text'"), ("return 1", "return 2"), ("def unused(x)", "def unused(y)"),
                     ("\n    half", "\n    # why\n    half")]:  # fmt: skip
        assert old in kernel and hashed(kernel.replace(old, new), shared) == before, old
    assert hashed(kernel, shared.replace("def other(x)", "def other(z)")) == before
    for old, new in [("half(x)\n", "half(x + 1)\n"), ("(launch_metadata=work)", "(noinline=True)")]:
        assert old in kernel and hashed(kernel.replace(old, new), shared) != before, old
    for old, new in [("LIMIT = 3", "LIMIT = 4"), ("x / LIMIT", "LIMIT / x")]:
        assert old in shared and hashed(kernel, shared.replace(old, new)) != before, old


@pytest.mark.slow
@pytest.mark.parametrize(("target", "version"), [("sm90", "3.6.0"), ("sm90", NEWEST), ("sm100", NEWEST)])
def test_planted_faults_are_found(target: str, version: str) -> None:
    """Spills, products on the plain units, and (3.6.0) a release that no barrier precedes."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("planted_kernels.py")), target],
        cwd=ROOT, env=triton_environment(version), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)["kernels"]
    assert found["spilling"]["spills"] > 0 and found["dot_tensor"]["spills"] == 0
    assert found["dot_scalar"]["scalar"] and not found["dot_tensor"]["scalar"]
    assert found["dot_tensor"]["mma"] == TENSOR_CORES[target] and found["dot_scalar"]["mma"] == ""
    assert found["signal_after_barrier"]["releases"] == []
    if version == "3.6.0":
        assert len(found["signal_bare"]["releases"]) == 1, "this version puts no barrier there itself"
    for kernel in ("wait_acquire", "wait_volatile", "sum_loop"):
        assert found[kernel]["waits"] == [], kernel
        assert bool(found[kernel]["relaxed"]) == (kernel == "wait_volatile"), kernel


def test_no_source_waits_by_a_plain_load() -> None:
    planted = Path(__file__).with_name("planted_kernels.py").read_text(encoding="utf-8")
    assert plain_waits_in_source(planted) == ["tl.load(flag) < n", "value < n"]
    for file in sorted((ROOT / "kernels").glob("*.py")):
        assert plain_waits_in_source(file.read_text(encoding="utf-8")) == [], file.name


def test_reports_are_refused_where_kernels_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(inspection.SpecError, match="TRITON_INTERPRET"):
        inspection.report(inspection.target_named("sm90"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", ["3.6.0", "3.7.1"])
def test_interpreted_tests_pass_on_older_triton(version: str) -> None:
    environment = triton_environment(version) | {"TRITON_INTERPRET": "1"}
    files = [
        f"tests/cpu/test_kernels_{name}.py" for name in ("interpreter", "threads", "bits", "routing", "expert_mlp")
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *files],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
