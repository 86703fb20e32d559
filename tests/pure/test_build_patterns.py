"""Orders given by users in plans: taken for their pair of chunks, completed, priced, and named when of no use."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tessera_rt.cli.app import app
from tessera_rt.files.model_files import model_to_yaml
from tessera_rt.plan import ActionKind, Mesh, Plan
from tessera_rt.plan_check import check_plan
from tessera_rt.planner.build import build_plan
from tessera_rt.planner.pair_costs import PairCosts
from tessera_rt.scheduler.patterns import patterns_from_yaml
from tessera_rt.scheduler.simulate import simulate
from tessera_rt.testing.costs import moe_model, uniform_costs

MODEL = moe_model(4)
COSTS = uniform_costs(MODEL, comm_ns=7)
PATTERN = """\
overlap_plans:
  - chunk_pair: {fwd_chunk: [EMBED, Layer0, Layer1], bwd_chunk: [EMBED, Layer0, Layer1]}
    pattern: [F_EMBED, F_ATTN:L0, B_COMB:L1, F_DISP:L0, B_MLP:L1, F_MLP:L0, B_WGRAD:L1]
  - chunk_pair: {fwd_chunk: [Layer1, Layer2], bwd_chunk: [Layer0]}
    pattern: [B_COMB:L0, F_ATTN:L1]
"""
BOUNDS = (0, 3, 6)


def made(**options: object) -> Plan:
    patterns = patterns_from_yaml(PATTERN, MODEL)
    return build_plan(MODEL, Mesh(pp=2), COSTS, microbatches=6, patterns=patterns, **options)  # type: ignore[arg-type]


def test_the_pattern_is_the_order_of_its_pair() -> None:
    plan = made(fixed_bounds=BOUNDS)
    check_plan(plan, MODEL)
    given = plan.interleavings["0F;0B"]
    assert given.method == "given" and plan.interleavings["1F;1B"].method == "exact"
    compute = [
        name
        for name in given.order
        if name in ("F_EMBED", "F_ATTN:L0", "B_POST:L1", "B_MLP:L1", "F_MLP:L0", "W_MLP:L1")
    ]
    assert compute == ["F_EMBED", "F_ATTN:L0", "B_POST:L1", "B_MLP:L1", "F_MLP:L0", "W_MLP:L1"]
    free = build_plan(MODEL, Mesh(pp=2), COSTS, microbatches=6, fixed_bounds=BOUNDS)
    assert given.makespan_ns >= free.interleavings["0F;0B"].makespan_ns
    assert plan.solver.step_ns == simulate(plan, MODEL, COSTS).step_ns
    (note,) = [note for note in plan.assumptions.notes if "pattern" in note]
    assert note == "pattern in line 4 not used: no F of [L1, L2] runs with B of [L0]"


def test_only_the_pair_itself_costs_what_its_pattern_takes() -> None:
    patterns = patterns_from_yaml(PATTERN, MODEL)
    pairs, free = PairCosts(MODEL, COSTS, patterns=patterns), PairCosts(MODEL, COSTS)
    given, other = ((1, 2), (1, 2)), ((2, 3), (2, 3))
    assert (
        pairs.pair((2, 4), (1, 2))
        >= free.pair((2, 4), (1, 2))
        == free.pair((3, 5), (1, 2))
        == pairs.pair((3, 5), (1, 2))
    )
    assert pairs.pair(*given) == pairs.pair(*other) == free.pair(*given)
    kinds = pairs.kinds([(1, 2), (2, 3), (2, 4), (3, 5), (0, 3)])
    assert len({*kinds.tolist()}) == 5, "chunks that a pattern names are of a kind of their own"
    assert len({*free.kinds([(1, 2), (2, 3), (2, 4), (3, 5)]).tolist()}) == 2


def test_a_search_with_patterns_gives_a_sound_plan() -> None:
    plan = made(objective="t_dom")
    check_plan(plan, MODEL)
    keys = {action.key for row in plan.actions for action in row if action.kind is ActionKind.OVERLAP}
    worst = max(plan.interleavings[key].makespan_ns for key in keys)
    assert worst == plan.solver.t_dom_ns


def run(tmp_path: Path, text: str, *more: str) -> tuple[int, str]:
    model, patterns = tmp_path / "model.yaml", tmp_path / "patterns.yaml"
    model.write_text(model_to_yaml(MODEL), encoding="utf-8")
    patterns.write_text(text, encoding="utf-8")
    result = CliRunner().invoke(
        app, ["plan", str(model), "--pp", "2", "--tokens", "512", "--patterns", str(patterns), *more]
    )
    return result.exit_code, result.output


def test_the_command_line_takes_them_and_names_the_line_of_a_fault(tmp_path: Path) -> None:
    code, output = run(tmp_path, PATTERN, "--comm-sms", "16", "--solver", "milp", "-m", "4")
    assert code == 0, output
    assert "pattern in line 4 not used" in " ".join(output.split()) and "16 communication SMs" in " ".join(
        output.split()
    )
    code, output = run(tmp_path, PATTERN.replace("F_EMBED", "F_EMBD"))
    assert code != 0 and "line 3" in output and "F_EMBD" in output
    code, output = run(tmp_path, PATTERN, "--comm-sms", "many")
    assert code != 0 and "--comm-sms" in output


@pytest.mark.parametrize("tp", [2, 3])
def test_the_command_line_plans_tensor_parallelism(tp: int) -> None:
    arguments = ["plan", "qwen3-next-80b", "--pp", "8", "--ep", "8", "--tp", str(tp), "--partitioner", "chain-dp"]
    result = CliRunner().invoke(app, [*arguments, "--tokens", "1024", "--objective", "t_dom", "--memory-limit", "1000"])
    if tp == 2:
        assert result.exit_code == 0, result.output
        assert "can be simulated, not run yet: mtp, tp" in " ".join(result.output.split())
    else:
        assert result.exit_code != 0 and "workload.tp" in result.output
