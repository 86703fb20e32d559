"""``validate`` and ``validate_template`` find every kind of mistake and report all of one schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tessera_rt.errors import ScheduleError
from tessera_rt.plan import Action, Interleaving
from tessera_rt.scheduler.templates import Template, build_template
from tessera_rt.scheduler.validate import validate, validate_template
from tessera_rt.tasks import Pass, Task, TaskGraph, TaskKind

GRAPH = TaskGraph(
    (
        Task(kind=TaskKind.ATTN, pass_=Pass.F, label="L0", ns=5),
        Task(kind=TaskKind.DISP, pass_=Pass.F, label="L0", deps=("F_ATTN:L0",), ns=3),
        Task(kind=TaskKind.SHARED, pass_=Pass.F, label="L0", deps=("F_ATTN:L0",), ns=4),
    )
)
GOOD = Interleaving(
    key="0F", order=("F_ATTN:L0", "F_DISP:L0", "F_SHARED:L0"), starts_ns=(0, 5, 5), makespan_ns=9, method="given"
)


def test_a_correct_schedule_passes() -> None:
    validate(GOOD, GRAPH)
    validate(replace(GOOD, starts_ns=(1, 7, 20), makespan_ns=24), GRAPH)  # later than need be, but correct


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"order": ("F_ATTN:L0", "F_DISP:L0", "F_DISP:L0")}, ["named once", "F_SHARED:L0 is missing"]),
        ({"order": ("F_ATTN:L0", "F_DISP:L0", "F_HEAD")}, ["a task of the action", "F_SHARED:L0 is missing"]),
        ({"order": ("F_ATTN:L0",)}, ["F_DISP:L0 is missing", "F_SHARED:L0 is missing", "one start per task"]),
        ({"starts_ns": (0, 5)}, ["one start per task"]),
        ({"starts_ns": (0, 4, 5)}, ["at least 5, the end of F_ATTN:L0"]),
        ({"starts_ns": (0, 5, 3), "makespan_ns": 8}, ["the end of F_ATTN:L0", "on lane COMP"]),
        ({"starts_ns": (-1, 5, 5)}, ["0 or later"]),
        ({"makespan_ns": 8}, ["9, the end of the last task"]),
        ({"order": ("F_DISP:L0", "F_ATTN:L0", "F_SHARED:L0"), "starts_ns": (5, 0, 5)}, ["behind F_ATTN:L0"]),
        (
            {"order": ("F_ATTN:L0", "F_DISP:L0", "F_SHARED:L0"), "starts_ns": (2, 1, 1), "makespan_ns": 70},
            ["F_DISP:L0.start", "F_SHARED:L0.start", "makespan_ns"],
        ),
    ],
)
def test_mistakes_are_found(change: dict[str, object], said: list[str]) -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(replace(GOOD, **change), GRAPH)  # type: ignore[arg-type]
    for text in said:
        assert text in str(caught.value)
    assert "interleaving 0F" in str(caught.value)


def changed(template: Template, rank: int, actions: str) -> Template:
    rows = list(template.actions)
    rows[rank] = tuple(Action.parse(text) for text in actions.split())
    return replace(template, actions=tuple(rows))


GOOD_TEMPLATE = build_template("1f1b", pp=2, vpp=1, microbatches=2, joint=False)  # 0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1


def test_a_split_backward_is_a_full_backward() -> None:
    validate_template(changed(GOOD_TEMPLATE, 1, "1F0 1I0 1F1 1I1 1W0 1W1"))


@pytest.mark.parametrize(
    ("rank", "actions", "said"),
    [
        (0, "0F0 0F1 0B0", ["0B1"]),
        (0, "0F0 0F0 0F1 0B0 0B1", ["0F0", "run once"]),
        (0, "0F0 0F1 0B0 0B1 0W1", ["one B, or one I and one W"]),
        (0, "0F0 0F1 0B0 0B1 1F0", ["on rank 1"]),
        (0, "0F0 0F1 0B0 0B1 0F2", ["a stage and a micro-batch that exist"]),
        (0, "0F0 0F1 0B0 0B1 0SEND_F1", ["a compute action"]),
        (1, "1F0 (1F1;1B1)OVERLAP_F_B 1B0", ["different micro-batches"]),
        (1, "1B0 1F0 1F1 1B1", ["rank 1", "waits for 1F0", "rank 0", "waits for 1B0"]),
        (0, "0F0 0B0 0B1 0F1", ["rank 0", "0B1", "waits for 0F1"]),
        (1, "1F0 1W0 1I0 1F1 1B1", ["1W0", "waits for 1B0"]),
    ],
)
def test_template_mistakes_are_found(rank: int, actions: str, said: list[str]) -> None:
    with pytest.raises(ScheduleError) as caught:
        validate_template(changed(GOOD_TEMPLATE, rank, actions))
    for text in said:
        assert text in str(caught.value)


def test_joint_pairs_without_the_longer_warm_up_deadlock() -> None:
    """One forward too few ahead: rank 0 waits for a backward that needs the forward of the same action."""
    rows = ("0F0 (0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B 0B2", "1F0 (1F1;1B0)OVERLAP_F_B (1F2;1B1)OVERLAP_F_B 1B2")
    template = build_template("1f1b", pp=2, vpp=1, microbatches=3, joint=False)
    for rank, row in enumerate(rows):
        template = changed(template, rank, row)
    with pytest.raises(ScheduleError, match="for ever"):
        validate_template(template)


def test_shape_mistakes() -> None:
    with pytest.raises(ScheduleError, match="one rank for each of 2 stages"):
        validate_template(replace(GOOD_TEMPLATE, stage_ranks=(0,)))
    with pytest.raises(ScheduleError, match="1 stages on rank 1"):
        validate_template(replace(GOOD_TEMPLATE, stage_ranks=(0, 0)))
    with pytest.raises(ScheduleError, match="one list for each of 2 ranks"):
        validate_template(replace(GOOD_TEMPLATE, actions=GOOD_TEMPLATE.actions[:1]))
