"""What compilers make of the kernels: every shipped configuration for sm_90 (Triton 3.6.0, 3.7.1, newest) and sm_100.

Compiles offline, without a GPU; nothing is timed. Writes results/kernel_report.json, which tests compare with the
sources, and compiles only what that file does not hold yet. Other versions of Triton are expected in
.cache/triton/<version> (the tests install them), else they are fetched by pip. All anew takes about twenty minutes per
version and worker. A part of it, for one target: tessera kernels report.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "triton"
OUT = ROOT / "bench" / "results" / "kernel_report.json"
RUNS = (("sm90", "3.6.0"), ("sm90", "3.7.1"), ("sm90", ""), ("sm100", ""))


def environment(version: str) -> dict[str, str]:
    """Of a process that compiles with this version of Triton ("" is the installed one)."""
    result = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result |= {"TRITON_CACHE_DIR": str(CACHE / "compiled"), "TRITON_DEFAULT_FP_FUSION": "1"}
    if version:
        folder = CACHE / version
        if not (folder / "triton").is_dir():
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
            subprocess.run([*install, f"triton=={version}"], check=True)
        result["PYTHONPATH"] = str(folder)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1, help="processes that compile")
    workers = parser.parse_args().workers
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE.parent / ".gitignore").write_text("*\n", encoding="utf-8")
    former = json.loads(OUT.read_text(encoding="utf-8"))["reports"] if OUT.exists() else []
    reports: list[dict[str, object]] = []
    failed = False
    for target, version in RUNS:
        part = CACHE / f"report-{target}-{version or 'newest'}.json"
        part.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tessera_rt.kernels.inspection", "--target", target, "--out", str(part)]
        command += ["--known", str(OUT)] if OUT.exists() else []
        command += ["--workers", str(workers)]
        done = subprocess.run(command, cwd=ROOT, env=environment(version), check=False)
        if not part.exists():
            return done.returncode or 1
        failed |= done.returncode != 0
        reports.append(json.loads(part.read_text(encoding="utf-8")))
        made = {(report["target"], report["triton"]) for report in reports}
        # An interrupted run keeps what it has made.
        write([*reports, *(report for report in former if (report["target"], report["triton"]) not in made)])
    write(reports)
    print(f"wrote {OUT.relative_to(ROOT)}")
    return int(failed)


def write(reports: list[dict[str, object]]) -> None:
    OUT.parent.mkdir(exist_ok=True)
    text = ",\n".join(_one_line_per_row(report) for report in reports)
    OUT.write_text(f'{{"reports": [\n{text}\n]}}\n', encoding="utf-8")


def _one_line_per_row(report: dict[str, object]) -> str:
    """JSON whose long lists and objects have one entry a line, so that a change reads as one."""
    parts = []
    for key, value in report.items():
        if isinstance(value, list):
            lines = ",\n".join(f"  {json.dumps(entry)}" for entry in value)
            parts.append(f'"{key}": [\n{lines}\n]')
        elif isinstance(value, dict):
            lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items())
            parts.append(f'"{key}": {{\n{lines}\n}}')
        else:
            parts.append(f'"{key}": {json.dumps(value)}')
    return "{" + ",\n".join(parts) + "}"


if __name__ == "__main__":
    sys.exit(main())
