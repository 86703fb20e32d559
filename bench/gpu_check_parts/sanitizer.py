"""The kernels' part again under compute-sanitizer, which finds accesses out of bounds and races in shared memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu_check_parts.check import Check

MAIN = Path(__file__).parents[1] / "gpu_check.py"


def run(check: Check) -> None:
    tool = shutil.which("compute-sanitizer")
    if check.dry_run or tool is None:
        reason = "a dry run has no GPU" if check.dry_run else "compute-sanitizer is not installed"
        check.skip("compute-sanitizer memcheck", reason)
        return
    with check.case("compute-sanitizer memcheck") as figures, tempfile.TemporaryDirectory() as folder:
        line = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(MAIN), "--part", "routing",
                "--part-output", str(Path(folder) / "part.json"), "--seconds", str(check.seconds_left)]  # fmt: skip
        done = subprocess.run(line, capture_output=True, text=True, timeout=check.seconds_left, check=False)
        figures["tail"] = done.stdout[-2000:]
        assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout[-500:]}"
