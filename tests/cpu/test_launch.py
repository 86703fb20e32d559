"""Ranks of a launched run: results, and every way in which one can end. Nothing hangs, nothing is left."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from tessera_rt.config import TrainConfig, config_from_dict
from tessera_rt.errors import PlanError, SpecError, TransportError
from tessera_rt.files.model_files import model_to_yaml
from tessera_rt.files.yaml_text import parse_yaml
from tessera_rt.launch import RankFailed, run_local, under_torchrun
from tessera_rt.plan import Plan
from tessera_rt.testing.hybrids import random_costs, tiny_hybrid
from tessera_rt.train import make_plan, train

ENTRIES = Path(__file__).with_name("launch_entries.py")


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ENTRIES.parent))
    import launch_entries

    return launch_entries


def pids(folder: Path) -> list[int]:
    return [int(text) for path in sorted(folder.glob("*.pid")) if (text := path.read_text())]


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_results_by_rank_one_thread_each_output_in_logs(entries: ModuleType, tmp_path: Path) -> None:
    found = run_local(entries.sums, 3, (tmp_path, 10), log_dir=tmp_path / "logs", timeout_s=60)
    assert found == [(0, 33, 1), (1, 33, 1), (2, 33, 1)]
    assert "rank 1 printed this" in (tmp_path / "logs" / "rank1.log").read_text()
    assert not (tmp_path / "logs" / "rank0.log").exists()
    assert len(pids(tmp_path)) == 3 and not any(map(running, pids(tmp_path)))


@pytest.mark.timeout(200)  # much less than the time-out of the ranks' own waits
@pytest.mark.parametrize(
    ("end", "world", "victim", "how", "told"),
    [
        ("killed", 3, 1, "was killed by signal 9 (SIGKILL)", "was killed by signal 9 (SIGKILL)"),
        ("exits", 2, 0, "ended with exit code 3", "ended with exit code 3"),
        pytest.param("silent", 2, 0, *["ended without a result"] * 2, marks=pytest.mark.slow),
        ("raises", 2, 0, "failed with ValueError: the dog ate it", "ValueError in step 3, at 3B3: the dog ate it"),
    ],
)
def test_the_true_rank_action_and_cause_are_named(
    entries: ModuleType,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    end: str,
    world: int,
    victim: int,
    how: str,
    told: str,
) -> None:
    with pytest.raises(RankFailed) as caught:
        run_local(entries.steps, world, (tmp_path, end, victim), log_dir=tmp_path / "logs", timeout_s=600)
    assert isinstance(caught.value, TransportError)
    assert str(caught.value) == f"rank {victim} {how} during 3B3"
    assert (caught.value.rank, caught.value.action) == (victim, "3B3")
    if end == "raises":  # on the first rank, whose terminal is left alone
        first = tmp_path / "logs" / "rank0.log"
        assert caught.value.__notes__ == [f"its traceback is in {first}"]
        assert "Traceback" in first.read_text() and "Traceback" not in capfd.readouterr().err
    assert len(pids(tmp_path)) == world and not any(map(running, pids(tmp_path)))
    # The others end by themselves and quote the first cause.
    log = (tmp_path / "logs" / f"rank{world - 1}.log").read_text()
    assert f"first failure, on rank {victim}: {told}" in log, log


@pytest.mark.parametrize("logs", [True, False])
def test_errors_of_users_keep_their_class_and_problems(
    entries: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str], logs: bool
) -> None:
    log_dir = tmp_path / "logs" if logs else None
    with pytest.raises(SpecError) as caught:
        run_local(entries.steps, 2, (tmp_path, "user", 0), log_dir=log_dir, timeout_s=600, grace_s=1)
    assert caught.value.problems[0].field == "field"
    assert caught.value.__notes__ == ["found by rank 0"]
    assert "Traceback" not in capfd.readouterr().err
    assert log_dir is None or "SpecError: file: 1 problem" in (log_dir / "rank0.log").read_text()
    assert not any(map(running, pids(tmp_path)))


def test_errors_of_ours_that_are_not_about_input_are_failures_of_the_run(entries: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 failed with TesseraError: the disk is full during 3B3") as caught:
        run_local(entries.steps, 2, (tmp_path, "ours", 1), log_dir=tmp_path / "logs", timeout_s=600, grace_s=1)
    assert caught.value.__notes__ == [f"its traceback is in {tmp_path / 'logs' / 'rank1.log'}"]


def test_a_rank_that_hangs_is_named_and_ended(entries: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        run_local(entries.steps, 2, (tmp_path, "hangs", 1), log_dir=tmp_path / "logs", timeout_s=3, grace_s=4)
    text = str(caught.value)
    assert text.startswith("rank 1 did not answer and was ended during 3B3\n  rank 0 "), text
    assert (caught.value.rank, caught.value.action) == (1, "3B3")
    assert not any(map(running, pids(tmp_path)))


def test_a_rank_that_is_not_done_with_the_others_is_ended(entries: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 was not done 2 s after rank 0"):
        run_local(entries.first_is_done_early, 2, (tmp_path,), timeout_s=1, grace_s=1)
    assert not any(map(running, pids(tmp_path)))


@pytest.mark.parametrize(
    "signal_number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_ranks_end_with_their_launcher(tmp_path: Path, signal_number: signal.Signals) -> None:
    (tmp_path / "temporary").mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path / "temporary")}
    launcher = subprocess.Popen(
        [sys.executable, str(ENTRIES), str(tmp_path)], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        while len(pids(tmp_path)) < 2:
            assert launcher.poll() is None
            time.sleep(0.1)
        ranks = [psutil.Process(pid) for pid in pids(tmp_path)]
        launcher.send_signal(signal_number)
        _, errors = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert alive == []
    assert launcher.returncode != 0
    if signal_number is not signal.SIGKILL:
        assert list((tmp_path / "temporary").glob("tessera-ranks-*")) == []
    if signal_number is signal.SIGINT:
        assert errors.startswith("interrupted at a place\n") and "KeyboardInterrupt" in errors
    if signal_number is signal.SIGTERM:
        assert errors == "terminated at a place\n" and launcher.returncode == 143


# -- training -------------------------------------------------------------------------------------------------------


def small_run(folder: Path, **mesh: int) -> tuple[TrainConfig, Plan]:
    spec = tiny_hybrid("gSd", vocab=256)
    text = folder / "text"
    text.write_bytes(bytes(i % 256 for i in range(4000)))
    config = config_from_dict(
        {
            "model": parse_yaml(model_to_yaml(spec), "model"),
            "mesh": mesh,
            "data": {"files": [str(text)], "sequence": 16, "microbatches": 4, "held_out": 0.1},
            "run": {"steps": 5, "folder": str(folder / "run"), "timeout_s": 600},
        }
    )
    return config, make_plan(config, lambda recompute: random_costs(spec, config.workload(recompute)))


@pytest.mark.timeout(250)  # less than half of the time-out of the ranks' own waits
def test_a_rank_killed_in_mid_step_ends_all_others(entries: ModuleType, tmp_path: Path) -> None:
    import train_entries

    config, plan = small_run(tmp_path, pp=2, ep=2)
    victim, pp_i = 3, 1
    action = str(next(action for action in plan.actions[pp_i] if len(action.passes) == 2))
    assert plan.mesh.coordinate(victim)[0] == pp_i
    with pytest.raises(TransportError) as caught:
        run_local(
            train_entries.train_and_die,
            plan.mesh.world,
            (tmp_path, config, plan, victim, 3, action),
            timeout_s=config.run.timeout_s,
            log_dir=tmp_path / "logs",
        )
    assert str(caught.value) == f"rank 3 was killed by signal 9 (SIGKILL) during {action}"
    assert len(pids(tmp_path)) == 4 and not any(map(running, pids(tmp_path)))
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2]  # it was in the third step
    for rank in (1, 2):  # they quote it too
        log = (tmp_path / "logs" / f"rank{rank}.log").read_text()
        assert f"first failure, on rank 3: was killed by signal 9 (SIGKILL) during {action}" in log, log


def test_a_plan_for_another_number_of_ranks(tmp_path: Path) -> None:
    config, plan = small_run(tmp_path, pp=4)
    with pytest.raises(PlanError, match="the number of processes that were started, 2"):
        run_local(train, 2, (config, plan), timeout_s=600, grace_s=5, log_dir=tmp_path / "logs")


@pytest.mark.slow
def test_training_under_torchrun(tmp_path: Path) -> None:
    config, plan = small_run(tmp_path, pp=2)
    (tmp_path / "job").write_bytes(pickle.dumps((config, plan)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ENTRIES.with_name("train_entries.py")), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    first, second = (pickle.loads((tmp_path / f"{rank}.summary").read_bytes()) for rank in range(2))
    assert first == second and first.steps == 5 and first.folder == str(tmp_path / "run")
    assert "step 5/5" in done.stdout


def test_at_least_one_rank(entries: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="world = 0"):
        run_local(entries.sums, 0, (tmp_path, 10))


def test_torchrun_is_known_by_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not under_torchrun()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    assert not under_torchrun()
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert under_torchrun()
