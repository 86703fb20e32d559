"""CSV files of torch.distributed.pipelining, without torch; that torch takes them is tested with torch."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_rt.errors import PlanError, ScheduleError
from tessera_rt.plan import Action, ActionKind
from tessera_rt.scheduler.templates import RULES, TEMPLATES, Template, build_template
from tessera_rt.scheduler.torch_csv import (
    actions_from_csv,
    actions_to_csv,
    add_send_recv,
    plan_to_csv,
    template_from_csv,
)
from tessera_rt.testing.plans import simple_model, simple_plan


@st.composite
def templates(draw: st.DrawFn) -> Template:
    name = draw(st.sampled_from(TEMPLATES))
    least, most = RULES[name].vpp
    vpp = draw(st.integers(int(least), int(min(most, 3))))
    joint = draw(st.booleans()) or RULES[name].joint_only
    pp, m = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    return build_template(name, pp=pp, vpp=vpp, microbatches=m, joint=joint, pad="shadow")


@settings(max_examples=60)
@given(templates())
def test_orders_come_back_from_both_formats(template: Template) -> None:
    lowered = add_send_recv(template.actions, template.stage_ranks)
    for rows in (template.actions, lowered):
        text = actions_to_csv(rows)
        assert actions_from_csv(text) == template.actions
        back = template_from_csv(text, template.name)
        has_pairs = any(action.parts for row in template.actions for action in row)
        assert back == replace(template, joint=has_pairs, pad="groups", shadows=0, interleaving=None)


@settings(max_examples=60)
@given(templates())
def test_every_message_once_sent_behind_its_pass_and_received_before_its_reader(template: Template) -> None:
    """And on every directed edge both sides list the messages in the same order."""
    lowered = add_send_recv(template.actions, template.stage_ranks)
    ranks = template.stage_ranks
    sent: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    received: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    for rank, row in enumerate(lowered):
        done: set[tuple[str, int, int]] = set()
        for action in row:
            stage, mb = action.stage, action.microbatch
            match action.kind:
                case ActionKind.SEND_F | ActionKind.SEND_B:
                    forward = action.kind is ActionKind.SEND_F
                    assert ("F" if forward else "B", stage, mb) in done
                    target = stage + (1 if forward else -1)
                    sent.setdefault((rank, ranks[target]), []).append((action.kind[-1], target, mb))
                case ActionKind.RECV_F | ActionKind.RECV_B:
                    source = stage + (-1 if action.kind is ActionKind.RECV_F else 1)
                    received.setdefault((ranks[source], rank), []).append((action.kind[-1], stage, mb))
                    done.add((f"R{action.kind[-1]}", stage, mb))
                case _:
                    for part in action.passes:
                        kind = "B" if part.kind is ActionKind.I else str(part.kind)
                        source = part.stage + (-1 if kind == "F" else 1)
                        if kind != "W" and 0 <= source < len(ranks) and ranks[source] != rank:
                            assert (f"R{kind}", part.stage, part.microbatch) in done
                    done |= {
                        ("B" if part.kind is ActionKind.I else str(part.kind), part.stage, part.microbatch)
                        for part in action.passes
                    }
    assert sent == received
    boundaries = sum(a != b for a, b in pairwise(ranks))
    assert sum(map(len, sent.values())) == 2 * boundaries * template.microbatches


def test_a_plan_as_csv() -> None:
    plan = simple_plan(simple_model("dd"), pp=2, microbatches=2, joint=True)
    assert plan_to_csv(plan) == "0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"
    assert plan_to_csv(plan, comms=True).splitlines()[1] == (
        "1RECV_F0,1F0,1RECV_F1,(1F1;1B0)OVERLAP_F_B,1SEND_B0,1B1,1SEND_B1"
    )
    with pytest.raises(PlanError, match=r"simulate_only = 'mtp'.*only be simulated"):
        plan_to_csv(replace(plan, simulate_only=("mtp",)))


def test_torchs_own_cells_are_left_out() -> None:
    text = "0UNSHARD,0F0,,0SEND_F0,0RECV_B0, 0B0 ,0REDUCE_GRAD,0RESHARD\n1RECV_F0,1F0,1B0,1SEND_B0,,,\n"
    parse = Action.parse
    assert actions_from_csv(text) == ((parse("0F0"), parse("0B0")), (parse("1F0"), parse("1B0")))


def test_all_faulty_cells_are_named() -> None:
    with pytest.raises(PlanError) as caught:
        actions_from_csv("0F0,hello,0B0\n1F0,1B\n", "orders.csv")
    assert [problem.field for problem in caught.value.problems] == ["row 1, column 2", "row 2, column 2"]
    assert "orders.csv" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one action"),
        ("0F0,0B0\n0F1,0B1\n", "stage 0 .*on one rank"),
        ("0F0,0B0,2F0,2B0\n", "stage 1"),
        ("0F0,0B0\n1F0,1B0,2F0,2B0\n", "as many on each"),
        ("0F0\n1F0,1B0\n", "0B0"),
        ("0B0,0F0\n1F0,1B0\n", "for ever"),
    ],
)
def test_orders_that_cannot_run_are_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        template_from_csv(text)


def test_a_deadlock_is_found_when_messages_are_added() -> None:
    rows = [[Action.parse("1F0"), Action.parse("0F0")]]
    with pytest.raises(ScheduleError, match="deadlock"):
        add_send_recv(rows, (0, 0))
