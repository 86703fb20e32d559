"""What a run shows: lines where there is no terminal, a bar where there is one, nothing on other ranks."""

from __future__ import annotations

import io

from rich.console import Console

from tessera_rt.progress import RunProgress


def shown(*, terminal: bool, first: int = 0, steps: int = 3) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=160)
    with RunProgress(console, first=first, steps=steps) as progress:
        progress.note("held-out loss 5.5000")
        for number in range(first + 1, steps + 1):
            progress.step(number, loss=5.0 - number, tokens=2000, step_ns=500_000_000)
    return text.getvalue()


def test_lines() -> None:
    lines = shown(terminal=False).splitlines()
    assert lines[0] == "held-out loss 5.5000"
    assert lines[1].startswith("step 1/3  loss 4.0000  4,000 tokens/s  0.500 s/step  0:00:0")
    assert lines[3].startswith("step 3/3  loss 2.0000") and lines[3].endswith("0:00:00 left")


def test_long_runs_have_few_lines_and_the_last_step() -> None:
    lines = shown(terminal=False, first=100, steps=10_100).splitlines()
    assert 20 < len(lines) < 60
    assert lines[1].startswith("step 101/10100") and lines[-1].startswith("step 10100/10100")


def test_the_bar_has_all_figures() -> None:
    text = shown(terminal=True, first=1)
    assert "3/3" in text and "loss 2.0000" in text and "4,000 tokens/s" in text and "0.500 s/step" in text
    assert "held-out loss 5.5000" in text
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is shown again


def test_other_ranks_are_silent() -> None:
    with RunProgress(None, first=0, steps=1) as progress:
        progress.note("x")
        progress.step(1, loss=1.0, tokens=1, step_ns=1)
