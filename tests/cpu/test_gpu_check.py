"""bench/gpu_check.py without a GPU: every part runs on its CPU twin; faults, hangs and crashes of parts are told."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from tessera_rt.kernels.budget import SmBudget
from tessera_rt.kernels.operands import Run
from tessera_rt.microbench.compare import ComparedRow
from tessera_rt.microbench.timing import Timing
from tessera_rt.testing.interpreter import install

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", BENCH / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_part_has_a_module(gpu_check: ModuleType) -> None:
    names = {part.name for part in (*gpu_check.PARTS, *gpu_check.MORE_PARTS)}
    others = {"__init__", "check", "virtual", "processes"}
    assert names == {path.stem for path in (BENCH / "gpu_check_parts").glob("*.py")} - others


def _planted(
    gpu_check: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    body: str,
    seconds: float = 60.0,
    left: float = 100.0,
) -> dict[str, object]:
    """What the harness says of a part with this body, which starts without loading torch."""
    parts = folder / "gpu_check_parts"
    parts.mkdir()
    text = (BENCH / "gpu_check_parts" / "check.py").read_text()
    (parts / "check.py").write_text(text.replace("import torch\n", "").replace("torch.device", "str"))
    (folder / "gpu_check.py").write_text(
        (BENCH / "gpu_check.py").read_text().replace('Part("ceilings", 20)', 'Part("planted", 20)')
    )
    (parts / "planted.py").write_text(f"import os, sys, time\n\ndef run(check):\n{body}")
    monkeypatch.setattr(gpu_check, "HERE", folder)
    found: dict[str, object] = gpu_check.run_process(gpu_check.Part("planted", seconds), False, time.monotonic() + left)
    return found


def test_cases_that_fail_are_told_and_the_others_run(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    body = (
        "    with check.case('bad'):\n        raise ValueError('a wrong row')\n"
        "    with check.case('good') as figures:\n        figures['n'] = 3\n"
        "    check.skip('other', 'no reason')\n"
    )
    found = _planted(gpu_check, monkeypatch, tmp_path, body)
    assert found["status"] == "cases failed"
    bad, good, other = found["cases"]  # type: ignore[misc]
    assert bad["status"] == "failed" and "a wrong row" in bad["reason"]
    assert (good["status"], good["figures"]) == ("passed", {"n": 3})
    assert (other["status"], other["reason"]) == ("skipped", "no reason")


def test_a_part_that_crashes_keeps_what_it_found(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    body = "    with check.case('first'):\n        pass\n    print('going down', flush=True)\n    os._exit(7)\n"
    found = _planted(gpu_check, monkeypatch, tmp_path, body)
    assert found["status"] == "exit code 7" and "going down" in str(found["log"])
    assert [case["case"] for case in found["cases"]] == ["first"]  # type: ignore[attr-defined]


def test_a_part_that_hangs_is_ended_with_its_children(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    body = (
        "    import subprocess\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        f"    open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "    with check.case('first'):\n        pass\n"
        "    time.sleep(1000)\n"
    )
    found = _planted(gpu_check, monkeypatch, tmp_path, body, seconds=8)
    assert found["status"] == "ended at its limit of 8 s"
    assert [case["case"] for case in found["cases"]] == ["first"]  # type: ignore[attr-defined]
    ended_by = time.monotonic() + 60  # a killed process takes a moment to be gone
    while any(map(running, map(int, pids.read_text().split()))):
        assert time.monotonic() < ended_by, "its processes go on"
        time.sleep(0.05)


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_last_part_has_its_time_when_all_others_used_theirs(gpu_check: ModuleType) -> None:
    assert sum(part.seconds for part in gpu_check.PARTS) <= gpu_check.SECONDS - gpu_check.START_S


def test_a_part_that_had_less_than_its_limit_says_so(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = _planted(gpu_check, monkeypatch, tmp_path, "    time.sleep(1000)\n", left=6.4)
    assert found["status"] == "ended, only 6 s were left for it"


def test_parts_without_time_are_in_the_result_and_fail_the_check(
    gpu_check: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    run_process, result = gpu_check.run_process, tmp_path / "result.json"

    def first_takes_all(part: Any, dry_run: bool, deadline: float) -> dict[str, Any]:
        if part.name == "kernels":
            return {"status": "done", "cases": []}
        found: dict[str, Any] = run_process(part, dry_run, min(deadline, time.monotonic() + 2))
        return found

    monkeypatch.setattr(gpu_check, "run_process", first_takes_all)
    assert gpu_check.main(["--dry-run", "--only", "kernels", "layer", "ranking", "--output", str(result)]) == 1
    told = {name: part["status"] for name, part in json.loads(result.read_text())["parts"].items()}
    assert told == {"kernels": "done", "layer": "no time left", "ranking": "no time left"}
    assert capsys.readouterr().out.count("no time left") == 2


def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / "gpu_check.py")],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1 and "no CUDA device is here; --dry-run" in done.stdout


@pytest.mark.parametrize("arguments", [["--seconds", "0"], ["--seconds", "nan"], ["--output", "no/such/folder/file"]])
def test_bad_arguments_are_named_at_once(
    gpu_check: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["--dry-run", *arguments])
    assert f"{arguments[0]} {arguments[1]}: must be" in capsys.readouterr().err


@pytest.mark.parametrize(("only", "written"), [([], True), (["--only", "kernels", "layer"], False)])
def test_a_part_alone_does_not_replace_the_whole_result(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, only: list[str], written: bool
) -> None:
    monkeypatch.setattr(gpu_check, "RESULT", tmp_path / "gpu_check.json")
    monkeypatch.setattr(gpu_check, "run_process", lambda *_: {"status": "done", "cases": []})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert gpu_check.main(only) == 0
    assert (tmp_path / "gpu_check.json").is_file() == written


def test_targets_of_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates in FLOPs per ns: the first product at 500 TFLOP/s beats torch's 400 and misses 0.9 of the dense 600."""
    monkeypatch.syspath_prepend(BENCH)
    from gpu_check_parts.products import targets

    def row(kind: str, name: str, tflops: int) -> ComparedRow:
        return ComparedRow(
            problem=f"m: 5 tokens, 2 experts, bf16, {kind}", name=name, time=Timing(1000, 0.0, 1), ratio=1.0,
            flops=tflops * 1000 * 1000, bytes=0, clocks=(),
        )  # fmt: skip

    rows = [row("first product", name, rate) for name, rate in
            (("Tessera", 500), ("torch._grouped_mm", 400), ("one dense product", 600))]  # fmt: skip
    rows += [row("input gradient of the first", "Tessera", 460), row("weight gradient of the first", "Tessera", 390)]
    found = targets("deepseek-v3", rows)
    assert [round(one["found"], 3) for one in found] == [1.25, 0.833, 0.92, 0.78, 500]
    assert [one["reached"] for one in found] == [True, False, True, False, False]
    assert len(targets("gpt-oss-120b", rows)) == 4


@pytest.mark.parametrize(
    ("body", "reason", "fault"),
    [
        ("pass", "", ""),
        ("print('no such luck'); sys.exit(3)", "not possible here: no such luck", ""),
        ("assert sys.argv[2] == '0', 'wrong counts'", "", "AssertionError: wrong counts"),
    ],
)
def test_two_processes_that_fail_are_not_called_impossible(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, reason: str, fault: str
) -> None:
    monkeypatch.syspath_prepend(BENCH)
    from gpu_check_parts import processes

    program = tmp_path / "rank.py"
    program.write_text(f"import sys\n{body}\n")
    monkeypatch.setattr(processes, "__file__", str(program))
    found = processes.run_two(60.0)
    assert found[0] == reason and found[1].endswith(fault) and bool(found[1]) == bool(fault)


def test_the_stress_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(BENCH)
    from gpu_check_parts.check import Check
    from gpu_check_parts.transport import _stress

    install()
    check = Check(tmp_path / "cases.json", dry_run=True, seconds=0)
    assert _stress(check, Run(SmBudget(4, communication=1)), 1000) == 8


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_dry_run_passes(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    line = [sys.executable, str(BENCH / "gpu_check.py"), "--dry-run", "--output", str(result)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(result.read_text())
    assert data["dry_run"] and "NVLink" in data["limits"] and "NVLink" in done.stdout
    for name, part in data["parts"].items():
        assert part["status"] == "done" and part["cases"], name
        skipped = [case for case in part["cases"] if case["status"] == "skipped"]
        assert all(case["reason"] for case in skipped)
        assert len(skipped) < len(part["cases"]) or name == "sanitizer", name
