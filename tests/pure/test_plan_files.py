"""Plan files: exact round trip, and every fault of a file reported with its field."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.costs import Link, Recompute
from tessera_rt.errors import PlanError
from tessera_rt.files.plan_files import load_plan, plan_from_yaml, plan_to_yaml, save_plan
from tessera_rt.files.yaml_text import parse_yaml
from tessera_rt.plan import Plan
from tessera_rt.plan_check import check_plan
from tessera_rt.testing.plans import simple_model, simple_plan

MODEL = simple_model("dmsm")
PLAN = simple_plan(MODEL, pp=2, vpp=2, cuts=(0, 1, 2, 4, 6), microbatches=4, joint=True)
TEXT = plan_to_yaml(PLAN)


def edited(old: str, new: str) -> str:
    assert TEXT.count(old) >= 1, old
    return TEXT.replace(old, new, 1)


def error_of(text: str) -> PlanError:
    """The error of reading a text, or else of checking the plan that was read."""
    with pytest.raises(PlanError) as caught:
        check_plan(plan_from_yaml(text, "my.yaml"))
    return caught.value


# -- writing and reading -----------------------------------------------------------------------------------------------


@given(st.data())
def test_round_trip(data: st.DataObject) -> None:
    """Texts, numbers and choices of all kinds come back exactly; text that looks like something else, too."""
    text = st.one_of(
        st.text(max_size=20),
        st.sampled_from(
            ["1e5", "12", "true", "null", "~", "0x1F", "", " ", "a: b", "# c", "...", "---", "1_000", "<<"]
        ),
    )
    number = st.integers(0, 2**63)
    positive = st.floats(0, exclude_min=True)
    pp = data.draw(st.integers(1, 3))
    plan = simple_plan(
        simple_model(data.draw(st.text("dmsaf", min_size=1, max_size=4)), mtp=data.draw(st.sampled_from(["", "m"]))),
        pp=pp,
        vpp=data.draw(st.integers(1, 2)),
        microbatches=data.draw(st.integers(1, 12)),
        joint=data.draw(st.booleans()),
        split_w=data.draw(st.booleans()),
    )
    recompute = data.draw(st.sampled_from(Recompute))
    plan = replace(
        plan,
        model=data.draw(text),
        template=data.draw(text),
        target_slots=tuple(data.draw(st.lists(text, max_size=3))),
        simulate_only=tuple(data.draw(st.lists(text, max_size=3))),
        memory=tuple(replace(m, weights=data.draw(number), limit=data.draw(number)) for m in plan.memory),
        workload=replace(
            plan.workload,
            recompute=recompute,
            dtype=data.draw(st.sampled_from(["bf16", "fp64"])),
            momentum=data.draw(st.booleans()),
        ),
        assumptions=replace(
            plan.assumptions,
            device=data.draw(text),
            contention=data.draw(st.floats(0, allow_infinity=False)),
            link=Link(latency_ns=data.draw(number), bytes_per_s=data.draw(positive)),
            notes=tuple(data.draw(st.lists(text, max_size=3))),
        ),
        solver=replace(
            plan.solver,
            t_dom_ns=data.draw(number),
            seconds=data.draw(st.floats(0, allow_infinity=False)),
            alternatives=data.draw(st.dictionaries(text, number, max_size=3)),
        ),
    )
    again = plan_from_yaml(plan_to_yaml(plan))
    assert again == plan
    assert again.workload.recompute is recompute
    assert plan_to_yaml(again) == plan_to_yaml(plan)


def test_the_file_is_readable() -> None:
    assert max(map(len, TEXT.splitlines())) <= 130
    assert "- {index: 2, rank: 0, items: L1..L2, start: 2, stop: 4, slots: 2}" in TEXT
    assert "- {index: 0, rank: 0, items: EMBED, start: 0, stop: 1, slots: 4}" in TEXT
    assert re.search(r"- rank: 0\n  order: >-\n    0F0 0F1 ", TEXT)
    assert re.search(r"  0F;2B:\n    order: >-\n      F_EMBED B_POST:L2 B_COMB:L2 ", TEXT)
    assert "  0F:\n    order: >-\n      F_EMBED\n    starts_ns: [0]\n    makespan_ns: 1000\n" in TEXT
    assert TEXT.startswith("# A plan of Tessera") and TEXT.endswith("\n...\n")


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    save_plan(PLAN, path)
    assert load_plan(path) == load_plan(str(path)) == PLAN
    changed = replace(PLAN, template="interleaved-1f1b")
    save_plan(changed, str(path))
    assert load_plan(path) == changed
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.yaml"]


def test_an_inconsistent_plan_is_not_written(tmp_path: Path) -> None:
    """A layer in two stages, a layer in none, a rank over its limit: rejected, and no file appears or changes."""
    path = tmp_path / "plan.yaml"

    def cut(first_stop: int) -> Plan:
        return replace(PLAN, stages=(PLAN.stages[0], replace(PLAN.stages[1], stop=first_stop), *PLAN.stages[2:]))

    over = replace(PLAN, memory=(PLAN.memory[0], replace(PLAN.memory[1], limit=100)))
    for plan, words in ((cut(3), "L1 in stages 1, 2"), (cut(1), "L0 in no stage"), (over, "its limit of 100 bytes")):
        with pytest.raises(PlanError, match=words):
            save_plan(plan, path)
        assert list(tmp_path.iterdir()) == []
    save_plan(PLAN, path)
    with pytest.raises(PlanError):
        save_plan(over, path)
    assert load_plan(path) == PLAN


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.yaml"
    save_plan(PLAN, path)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        save_plan(replace(PLAN, template="other"), path)
    assert load_plan(path) == PLAN
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.yaml"]


# -- faults of files ---------------------------------------------------------------------------------------------------

CUT = TEXT.index("starts_ns") + len("starts")
FILE_FAULTS: dict[str, tuple[Callable[[], str], str, str]] = {
    # name: text, field, words of the message
    "duplicated layer": (
        lambda: edited("items: L0, start: 1, stop: 2", "items: L0..L1, start: 1, stop: 3"),
        "stages",
        "L1 in stages 1, 2",
    ),
    "missing layer": (
        lambda: edited("items: L1..L2, start: 2, stop: 4", "items: L1, start: 2, stop: 3"),
        "stages",
        "L2 in no stage",
    ),
    "stages out of order": (
        lambda: edited("index: 1, rank: 1", "index: 2, rank: 1").replace("index: 2, rank: 0", "index: 1, rank: 0"),
        "stages[1].index",
        "must be 1: stages are listed in order",
    ),
    "unknown key": (
        lambda: edited("microbatches: 4", "microbatches: 4\nmicrobatchs: 5"),
        "microbatchs",
        "did you mean 'microbatches'?",
    ),
    "unknown key inside": (
        lambda: edited("stop: 2, slots: ", "stop: 2, slot: 1, slots: "),
        "stages[1].slot",
        "did you mean 'slots'?",
    ),
    "unknown key of an interleaving": (
        lambda: edited("    makespan_ns: ", "    makespan: 3\n    makespan_ns: "),
        "interleavings.0F.makespan",
        "did you mean 'makespan_ns'?",
    ),
    "key like no other": (lambda: edited("version: 1", "version: 1\nxyz: 1"), "xyz", "known: version, model,"),
    "NaN cost": (lambda: edited("contention: 0.0", "contention: .nan"), "assumptions.contention", "finite"),
    "NaN start": (
        lambda: edited("starts_ns: [0]", "starts_ns: [.nan]"),
        "interleavings.0F.starts_ns[0]",
        "a whole number",
    ),
    "NaN bandwidth": (
        lambda: edited("bytes_per_s: .inf", "bytes_per_s: .nan"),
        "assumptions.link.bytes_per_s",
        "more than 0",
    ),
    "infinite time": (lambda: edited("seconds: 0.0", "seconds: .inf"), "solver.seconds", "finite"),
    "negative memory": (
        lambda: edited("rank: 1, weights: 4096", "rank: 1, weights: -1"),
        "memory[1].weights",
        "at least 0",
    ),
    "vpp 0": (lambda: edited("vpp: 2", "vpp: 0"), "mesh.vpp", "at least 1"),
    "text for a number": (lambda: edited("slots: 4", "slots: four"), "stages[0].slots", "a whole number"),
    "number in quotes": (lambda: edited("microbatches: 4", "microbatches: '4'"), "microbatches", "without quotes"),
    "fraction": (lambda: edited("microbatches: 4", "microbatches: 4.5"), "microbatches", "a whole number"),
    "truth for a number": (lambda: edited("microbatches: 4", "microbatches: true"), "microbatches", "a whole number"),
    "number for a text": (lambda: edited("template: 1f1b", "template: 11"), "template", "a text"),
    "null": (lambda: edited("template: 1f1b", "template:"), "template", "a text"),
    "unknown choice": (
        lambda: edited("dtype: fp32", "dtype: fp8"),
        "workload.dtype",
        "'bf16', 'fp16', 'fp32' or 'fp64'",
    ),
    "unknown recomputation": (
        lambda: edited("recompute: none", "recompute: some"),
        "workload.recompute",
        "'selective'",
    ),
    "list for a mapping": (lambda: edited("mesh: {", "mesh: [{").replace("tp: 1}", "tp: 1}]", 1), "mesh", "a mapping"),
    "mapping for a list": (lambda: edited("target_slots: []", "target_slots: {}"), "target_slots", "a list"),
    "missing key": (lambda: edited("template: 1f1b\n", ""), "template", "add it"),
    "unreadable actions": (
        lambda: edited("    0F0 0F1 ", "    0F0 0G1 (0F3)OVERLAP_F_B 0F1 "),
        "actions[0].order",
        "'0G1 (0F3)OVERLAP_F_B': must be an action such as 0F3",
    ),
    "ranks out of order": (lambda: edited("- rank: 1\n", "- rank: 2\n"), "actions", "'rank 2 as entry 1'"),
    "memory ranks out of order": (
        lambda: edited("- {rank: 1, weights", "- {rank: 0, weights"),
        "memory",
        "in order from 0",
    ),
    "items against positions": (
        lambda: edited("items: L0, start", "items: L0..L1, start"),
        "stages[1].items",
        "must be L0,",
    ),
    "another version": (lambda: edited("version: 1", "version: 2"), "version", "make the plan again"),
    "empty": (lambda: "", "file", "empty"),
    "blank": (lambda: " \n\n", "file", "empty"),
    "only comments": (lambda: "# a plan\n", "file", "a mapping"),
    "a list": (lambda: "- 1\n- 2\n...\n", "file", "a mapping"),
    "a word": (lambda: "plan\n...\n", "file", "a mapping"),
    "bad syntax": (lambda: edited("mesh: {pp: 2,", "mesh: {pp: 2,,"), "line 7, column 14", "YAML"),
    "key twice": (
        lambda: edited("microbatches: 4", "microbatches: 4\npad: groups"),
        "line 11, column 1",
        "'pad' stands twice",
    ),
    "end missing": (lambda: TEXT.removesuffix("...\n"), "end", "cut off"),
    "cut between keys": (lambda: TEXT[: TEXT.index("actions:")], "end", "cut off"),
    "cut in a key": (
        lambda: TEXT[:CUT],
        f"line {TEXT[:CUT].count(chr(10)) + 1}, column 11",
        "could not find expected ':'",
    ),
}


@pytest.mark.parametrize("name", FILE_FAULTS)
def test_fault_of_a_file(name: str) -> None:
    text, field, words = FILE_FAULTS[name]
    error = error_of(text())
    mine = [str(problem) for problem in error.problems if problem.field == field]
    assert any(words in line for line in mine), str(error)


@pytest.mark.parametrize("name", ["cut at every line", "cut at every character"])
def test_a_file_that_was_cut_off_is_refused(name: str) -> None:
    text = plan_to_yaml(simple_plan(simple_model("d"), pp=2, microbatches=1))
    whole = len(text.rstrip())
    ends = range(0, whole, 7) if "character" in name else [m.start() for m in re.finditer("\n", text)][:-1]
    for end in ends:
        with pytest.raises(PlanError):
            plan_from_yaml(text[:end])
    assert plan_from_yaml(text.rstrip()) == plan_from_yaml(text)


def test_all_faults_come_in_one_error() -> None:
    text = edited("vpp: 2", "vpp: 0").replace("pad: groups", "pda: groups").replace("seconds: 0.0", "seconds: -1.5")
    error = error_of(text.replace("0F1 ", "0Q1 ", 1).removesuffix("...\n"))
    assert {problem.field for problem in error.problems} == {
        "mesh.vpp",
        "pad",
        "pda",
        "solver.seconds",
        "actions[0].order",
        "end",
    }
    assert str(error).startswith("my.yaml: 6 problems\n")


@given(st.data())
def test_no_edit_of_a_file_ends_in_anything_but_an_error_or_a_sound_plan(data: st.DataObject) -> None:
    """Words of the file replaced by others of it, or by numbers and signs; lines lost or doubled."""
    lines = TEXT.splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        words = re.split(r"([ ,:{}\[\];()]+)", lines[at])
        other = re.split(r"([ ,:{}\[\];()]+)", data.draw(st.sampled_from(lines)))
        word = data.draw(st.sampled_from([*other, "-1", "0", "1", "7", "99", "1.5", ".nan", "'", "[", "{", "~", "x"]))
        words[data.draw(st.integers(0, len(words) - 1))] = word
        change = data.draw(st.sampled_from(["word", "word", "word", "lost", "doubled"]))
        lines[at : at + 1] = {"word": ["".join(words)], "lost": [], "doubled": [lines[at]] * 2}[change]
    for model in (None, MODEL):
        try:
            plan = plan_from_yaml("\n".join(lines), model=model)
            check_plan(plan, model)
        except PlanError as error:
            assert error.problems
        else:
            assert plan_from_yaml(plan_to_yaml(plan), model=model) == plan


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.yaml.*\n.*No such file"):
        load_plan(tmp_path / "none.yaml")
    with pytest.raises(PlanError, match="readable file in UTF-8"):
        load_plan(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"version: \xff\xfe")
    with pytest.raises(PlanError, match="UTF-8"):
        load_plan(tmp_path / "binary.yaml")


def test_items_may_be_left_out() -> None:
    assert plan_from_yaml(re.sub(r" items: \S+", "", TEXT)) == PLAN


def test_numbers_as_people_write_them() -> None:
    plan = plan_from_yaml(
        edited("bytes_per_s: .inf", "bytes_per_s: 4.2e10").replace("contention: 0.0", "contention: 0")
    )
    assert plan.assumptions.link.bytes_per_s == 4.2e10 and plan.assumptions.contention == 0
    assert math.isinf(PLAN.assumptions.link.bytes_per_s)


# -- coarse task names -------------------------------------------------------------------------------------------------


def coarse(order: str, rest: str = "") -> str:
    """The plan's text with another order for the key 1F (layer L0, dense) or 2F;2B (L1 MoE, L2 MoE with shared)."""
    start = TEXT.index("  2F;2B:\n")
    end = TEXT.index("\n  ", TEXT.index("method:", start)) + 1
    return f"{TEXT[:start]}  2F;2B:\n    order: {order}\n{rest}    method: given\n{TEXT[end:]}"


COARSE = (
    "B_COMBINE:L2 F_ATTN:L1 F_DISP:L1 B_MLP:L2 F_MLP:L1 B_DISP:L2 F_COMB:L1 B_ATTN:L2 B_COMB:L1 F_ATTN:L2 F_DISP:L2"
    " B_MLP:L1 F_MLP:L2 B_DISP:L1 F_COMB:L2 B_ATTN:L1 B_WGRAD:L2 B_WGRAD:L1"
)


def test_coarse_names_are_expanded_with_the_model() -> None:
    plan = plan_from_yaml(coarse(COARSE), model=MODEL)
    check_plan(plan, MODEL)
    entry = plan.interleavings["2F;2B"]
    assert entry.order[:3] == ("B_POST:L2", "B_COMB:L2", "F_ATTN:L1") and entry.starts_ns == ()
    assert sorted(entry.order) == sorted(PLAN.interleavings["2F;2B"].order)
    assert plan_from_yaml(plan_to_yaml(plan)) == plan
    assert plan_from_yaml(TEXT, model=MODEL) == PLAN


def test_coarse_names_that_do_not_fit() -> None:
    with pytest.raises(PlanError, match=r"interleavings\.2F;2B\.order = 'F_ATTN:L9': must be on one of L1, L2"):
        plan_from_yaml(coarse(COARSE.replace("F_ATTN:L1", "F_ATTN:L9")), model=MODEL)
    with pytest.raises(PlanError, match=r"starts_ns = '2 numbers': must be left out"):
        plan_from_yaml(coarse(COARSE, "    starts_ns: [0, 1]\n"), model=MODEL)
    with pytest.raises(PlanError, match=r"interleavings\.2F;2B\.order = .*B_COMBINE:L2"):
        check_plan(plan_from_yaml(coarse(COARSE)))


def test_wrong_stage_in_a_key_is_reported_with_the_model() -> None:
    with pytest.raises(PlanError, match="stage 9"):
        plan_from_yaml(TEXT.replace("  2F;2B:\n", "  9F;2B:\n"), model=MODEL)


def test_the_file_is_plain_yaml() -> None:
    data = parse_yaml(TEXT, "plan")
    assert isinstance(data, dict)
    assert data["actions"][0]["order"] == " ".join(map(str, PLAN.actions[0]))
    assert data["interleavings"]["1F"]["starts_ns"] == list(PLAN.interleavings["1F"].starts_ns)
