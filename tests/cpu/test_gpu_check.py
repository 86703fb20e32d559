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

import psutil
import pytest

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
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, body: str, seconds: float = 60.0
) -> dict[str, object]:
    """What the harness says of a part with this body, which starts without loading torch."""
    parts = folder / "gpu_check_parts"
    parts.mkdir()
    text = (BENCH / "gpu_check_parts" / "check.py").read_text()
    (parts / "check.py").write_text(text.replace("import torch\n", "").replace("torch.device", "str"))
    (folder / "gpu_check.py").write_text(
        (BENCH / "gpu_check.py").read_text().replace('Part("ceilings", 25)', 'Part("planted", 25)')
    )
    (parts / "planted.py").write_text(f"import os, sys, time\n\ndef run(check):\n{body}")
    monkeypatch.setattr(gpu_check, "HERE", folder)
    found: dict[str, object] = gpu_check.run_process(gpu_check.Part("planted", seconds), False, time.monotonic() + 100)
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
    for pid in map(int, pids.read_text().split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


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
