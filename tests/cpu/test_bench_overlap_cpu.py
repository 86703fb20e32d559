"""bench/bench_overlap_cpu.py: it measures, or says why it cannot, and leaves no namespace behind."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "bench_overlap_cpu.py"


def _namespaces() -> set[str]:
    if shutil.which("ip") is None:
        return set()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=30, check=False).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith("tessera-")}


@pytest.mark.slow
def test_the_quick_form_measures_or_says_why_not() -> None:
    before = _namespaces()
    line = [sys.executable, str(BENCH), "--quick"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hidden" in done.stdout or done.stdout.startswith("skipped: ")
    assert _namespaces() <= before
