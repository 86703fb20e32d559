"""What the README says can be done is done."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tessera_rt.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


SWAP, CAPTURE, ENGINE = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_lines_that_swap_run_and_losses_are_equal() -> None:
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, "-c", SWAP], cwd=ROOT, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    before, after = map(float, done.stdout.splitlines()[-1].split())
    assert before == pytest.approx(after, rel=1e-5)
    assert done.stdout.count("swapped") == 2


def test_the_lines_that_capture_compile() -> None:
    """They need a GPU; tests/cpu/test_capture.py runs the same on the stand-in."""
    compile(CAPTURE, "README.md", "exec")


def test_the_ten_lines_run_under_a_process_group() -> None:
    """The code block as it stands, as the only rank of a group."""
    block = ENGINE
    assert len([line for line in block.splitlines() if line and not line.startswith(("import", "from"))]) <= 10
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", block],
        cwd=ROOT,
        env=os.environ | group,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(text) for text in re.findall(r"StepResult\(step=\d+, loss=([\d.]+)", done.stdout)]
    assert len(losses) == 3 and all(5.0 < loss < 6.0 for loss in losses)


def test_files_and_folders_of_the_tree_exist() -> None:
    tree = README[README.index("## The tree") : README.index("## What is not there yet")]
    names = re.findall(r"(?<![\w/{,.])([a-z_]+\.py|[a-z_]+/)(?=[\s{])", tree)
    assert len(names) > 30
    for name in names:
        assert (ROOT / "tessera_rt" / name).exists() or (ROOT / name).exists(), name


@pytest.mark.parametrize("line", re.findall(r"^    (tessera .*)$", README, flags=re.MULTILINE))
def test_commands_of_the_readme_are_known(line: str) -> None:
    """Every command and option exists. (What they do is tested elsewhere.)"""
    command, *rest = shlex.split(line, comments=True)[1:]
    commands = [command, rest.pop(0)] if command in ("bench", "kernels") else [command]
    text = CliRunner().invoke(app, [*commands, "--help"]).stdout
    assert "Examples:" in text or len(commands) == 2
    assert all(option in text for option in rest if option.startswith("-"))
