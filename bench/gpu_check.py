"""One command that checks and measures Tessera's kernels on one GPU, within 480 seconds.

    python bench/gpu_check.py [--output FILE] [--seconds 480] [--only PART ...] [--dry-run]

Parts run one after the other, each in a process of its own with a limit of its own, so that a hang or a crash costs
one part; the limits add up to the whole time. With fewer --seconds, parts for which none are left say so. The result
(results/gpu_check.json) is written after every part. --dry-run runs every part without a GPU: the kernels interpreted
or compiled offline, small sizes, times that mean nothing. The result of a dry run, or of some parts alone, is kept only
with --output. The exit code is 1 if a case failed, or a part did not end or run, not for a missed aim.

What one GPU cannot tell: nothing of NVLink or any other link, and nothing of memory ordering between GPUs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

HERE = Path(__file__).parent
RESULT = HERE / "results" / "gpu_check.json"
LIMITS_OF_ONE_GPU = "one GPU: nothing here says anything of NVLink or another link, nor of memory ordering between GPUs"
SECONDS = 480.0
START_S = 10.0  # of them for loading torch here, and for ending what hangs
GRACE_S = 3.0
LEAST_S = 5.0  # a part does not start with less


@dataclass(frozen=True, slots=True)
class Part:
    """``seconds``: its limit. ``interpreted``: a dry run interprets kernels instead of compiling them."""

    name: str
    seconds: float
    interpreted: bool = True


PARTS = (  # together at most SECONDS - START_S
    Part("ceilings", 20),
    Part("compile", 90, interpreted=False),  # by several processes, for the parts behind it too
    Part("kernels", 80),
    Part("transport", 55),
    Part("capture", 55),
    Part("products", 50),
    Part("overlap", 25),
    Part("layer", 45),
    Part("sanitizer", 25),
    Part("ranking", 25),
)
MORE_PARTS = (Part("routing", 30),)  # on demand, for the sanitizer
DRY_FACTOR = 5.0  # interpreting is slow


def main(arguments: Sequence[str] | None = None) -> int:
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in (*PARTS, *MORE_PARTS)]
    parser.add_argument("--output", type=Path, help=f"result file (JSON); {RESULT.name} if all parts run on a GPU")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts; five times as many in a dry run")
    parser.add_argument("--only", nargs="+", choices=names, default=[part.name for part in PARTS], help="these parts")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: every part on its CPU twin")
    parser.add_argument("--part", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--part-output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        return run_part(options.part, options.part_output, options.dry_run, options.seconds)
    out = Console(width=150)
    if not options.seconds > 0:
        parser.error(f"--seconds {options.seconds:g}: must be above 0")
    if options.output is not None and (options.output.is_dir() or not options.output.parent.is_dir()):
        parser.error(f"--output {options.output}: must be a file in a folder that exists")
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        out.print("no CUDA device is here; --dry-run runs every part on its CPU twin")
        return 1
    everything = {part.name for part in PARTS} <= set(options.only)
    output = options.output or (RESULT if everything and not options.dry_run else None)
    if options.dry_run:
        out.print("dry run: no GPU is used, and no time below means anything")
    deadline = start + options.seconds * (DRY_FACTOR if options.dry_run else 1)
    result: dict[str, Any] = {"dry_run": options.dry_run, "limits": LIMITS_OF_ONE_GPU, "parts": {}}
    for part in (*PARTS, *MORE_PARTS):
        if part.name in options.only:
            result["parts"][part.name] = run_process(part, options.dry_run, deadline)
            save(result, output)
            report(out, part.name, result["parts"][part.name])
    out.print(LIMITS_OF_ONE_GPU)
    if output is not None:
        out.print(f"wrote {output}")
    return 0 if all(part["status"] == "done" for part in result["parts"].values()) else 1


def run_part(name: str, output: Path, dry_run: bool, seconds: float) -> int:
    """In the part's own process."""
    start = time.monotonic()
    from gpu_check_parts.check import Check  # loads torch, within the part's time

    check = Check(output, dry_run=dry_run, seconds=seconds - (time.monotonic() - start))
    importlib.import_module(f"gpu_check_parts.{name}").run(check)
    return 0


def run_process(part: Part, dry_run: bool, deadline: float) -> dict[str, Any]:
    """Start the part's process and wait for it; it and its children are ended at its limit."""
    limit, left = part.seconds * (DRY_FACTOR if dry_run else 1), deadline - time.monotonic()
    if left < LEAST_S:
        return {"status": "no time left", "cases": []}
    seconds = min(limit, left)
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    if dry_run and part.interpreted:
        environment["TRITON_INTERPRET"] = "1"
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tessera-gpu-check-") as folder:
        cases, log = Path(folder) / "cases.json", Path(folder) / "log"
        line = [sys.executable, str(HERE / "gpu_check.py"), "--part", part.name, "--part-output", str(cases),
                "--seconds", str(seconds), *(["--dry-run"] if dry_run else [])]  # fmt: skip
        with log.open("w") as stream:
            process = subprocess.Popen(
                line, env=environment, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_group(process)
        found = json.loads(cases.read_text(encoding="utf-8")) if cases.is_file() else []
        tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
    failed = any(case["status"] == "failed" for case in found)
    ended = f"ended at its limit of {limit:.0f} s" if limit <= left else f"ended, only {left:.0f} s were left for it"
    status = ended if code is None else f"exit code {code}" if code else "done"
    return {
        "status": "cases failed" if status == "done" and failed else status,
        "seconds": round(time.monotonic() - start, 1),
        "cases": found,
        **({} if status == "done" else {"log": tail}),
    }


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End what the part started, by the id of its process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def save(result: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)


def report(out: Console, name: str, part: dict[str, Any]) -> None:
    """One line a part, and the reason of everything that failed or was skipped."""
    counts = {status: sum(case["status"] == status for case in part["cases"]) for status in ("passed", "failed")}
    skipped = [case for case in part["cases"] if case["status"] == "skipped"]
    seconds = part.get("seconds", 0)
    out.print(
        f"{name:<10} {part['status']}: {counts['passed']} passed, {counts['failed']} failed, {len(skipped)} skipped, "
        f"{seconds:.0f} s"
    )
    for case in skipped:
        out.print(f"    skipped {case['case']}: {case['reason']}", markup=False)
    for case in part["cases"]:
        if case["status"] == "failed":
            out.print(f"    FAILED {case['case']}: {case['reason'].strip().splitlines()[-1]}", markup=False)
        for target in case.get("figures", {}).get("targets", []):
            word = "reached" if target["reached"] else "MISSED"
            out.print(f"    {word} {case['case']}: {target['what']} {target['found']:.2f}, aim {target['aim']:g}")
    if "log" in part:
        out.print(part["log"].strip()[-1500:], markup=False)


if __name__ == "__main__":
    sys.exit(main())
