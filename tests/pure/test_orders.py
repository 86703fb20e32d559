"""All templates: complete, free of deadlocks for any number of micro-batches, the step times they promise, memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_rt.errors import ScheduleError
from tessera_rt.plan import Action, ActionKind
from tessera_rt.plan_check import check_plan
from tessera_rt.rendezvous import find_stuck
from tessera_rt.scheduler.closed_forms import interleaved_bubble, interleaved_time, zb_h1_time
from tessera_rt.scheduler.simulate import step_time
from tessera_rt.scheduler.templates import RULES, TEMPLATES, Template, build_template, held_chunks, in_flight
from tessera_rt.scheduler.validate import validate_template
from tessera_rt.testing.costs import dense_model, item_costs
from tessera_rt.testing.plans import simple_model, simple_plan
from tessera_rt.testing.schedules import Case, orders
from tessera_rt.timeline import Timeline

SPLIT = ("zb-h1", "zb-h2", "zb-v", "interleaved-zb")


def least_vpp(name: str) -> int:
    """The fewest stages a rank a template can have, two where it may have more."""
    least, most = RULES[name].vpp
    return 2 if least <= 2 <= most else int(least)


def template_of(name: str, pp: int, m: int, *, vpp: int = 0, joint: bool = True, pad: str = "groups") -> Template:
    joint = joint or RULES[name].joint_only
    pad = "shadow" if RULES[name].whole_groups and m % pp else pad
    return build_template(name, pp=pp, vpp=vpp or least_vpp(name), microbatches=m, joint=joint, pad=pad)


@st.composite
def templates(draw: st.DrawFn) -> Template:
    name = draw(st.sampled_from(TEMPLATES))
    least, most = RULES[name].vpp
    vpp = draw(st.integers(int(least), int(min(most, 4))))
    pad = draw(st.sampled_from(("groups", "shadow")))
    return template_of(
        name, draw(st.integers(1, 6)), draw(st.integers(1, 24)), vpp=vpp, joint=draw(st.booleans()), pad=pad
    )


def case_of(template: Template, f: int, i: int, w: int) -> Case:
    """One dense layer per stage, F, I and W of so many ns; embedding, head and messages take no time."""
    stages = len(template.stage_ranks)
    model = dense_model(stages)
    costs = item_costs(model, {f"L{k}": (f, i, w) for k in range(stages)})
    bounds = [(1 + s - (s == 0), 2 + s + (s == stages - 1)) for s in range(stages)]
    return Case(
        template.stage_ranks, template.actions, bounds, orders(template.actions, model, costs, bounds), model, costs
    )


def step_of(template: Template, f: int, i: int, w: int) -> int:
    case = case_of(template, f, i, w)
    return step_time(case.stage_ranks, case.actions, case.bounds, case.interleavings, case.model, case.costs)


def bubble(timeline: Timeline) -> float:
    """Idle share of the ranks' time, in percent."""
    return (
        100 * sum(timeline.split(rank).bubble_ns for rank in range(timeline.ranks)) / timeline.ranks / timeline.step_ns
    )


# --- orders -----------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(templates())
def test_complete_and_free_of_deadlocks(template: Template) -> None:
    """Case 20 and 21: any number of micro-batches, also fewer than ranks, in groups and padded."""
    validate_template(template)
    for stage, rank in enumerate(template.stage_ranks):
        for kinds in ((ActionKind.F,), (ActionKind.B, ActionKind.I)):
            mine = [p for a in template.actions[rank] for p in a.passes if p.stage == stage and p.kind in kinds]
            assert [part.microbatch for part in mine] == list(range(template.microbatches))


@pytest.mark.parametrize("name", TEMPLATES)
def test_case_26_plans_never_block(name: str) -> None:
    """Under unbuffered sends, with overlap and without, and the plan is accepted."""
    model = simple_model("dmsm")
    for pp, m in ((2, 4), (2, 3), (4, 1), (3, 7), (4, 9)):
        order = template_of(name, pp, m)
        plan = simple_plan(
            model, pp=pp, vpp=order.vpp, microbatches=m, actions=order.actions, placement=order.stage_ranks
        )
        assert find_stuck(plan, overlap=True) == find_stuck(plan, overlap=False) == ()
        check_plan(plan, model)


def text(template: Template) -> list[str]:
    return [" ".join(map(str, actions)) for actions in template.actions]


def test_small_orders_are_the_known_ones() -> None:
    assert text(template_of("zb-h1", 2, 3)) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]
    assert text(template_of("zb-h2", 2, 3)) == [
        "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2",
    ]
    assert text(template_of("zb-v", 1, 2)) == ["0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1"]
    assert text(template_of("dualpipe-v", 1, 3)) == [
        "0F0 1F0 0F1 1B0 (1F1;0B0)OVERLAP_F_B (0F2;1B1)OVERLAP_F_B (1F2;0B1)OVERLAP_F_B 1B2 0I2 0W2"
    ]


def test_a_v_sits_on_its_ranks() -> None:
    assert template_of("zb-v", 3, 4).stage_ranks == template_of("dualpipe-v", 3, 8).stage_ranks == (0, 1, 2, 2, 1, 0)


def test_joint_pairs_of_dualpipe_v() -> None:
    """F of one side with B of the other: 2 N different pairs; without joint the same passes one after the other."""
    pp, m = 4, 12
    joint, apart = template_of("dualpipe-v", pp, m), template_of("dualpipe-v", pp, m, joint=False)
    for rank in range(pp):
        keys = {action.key for action in joint.actions[rank] if action.parts}
        assert keys == {f"{rank}F;{2 * pp - 1 - rank}B", f"{2 * pp - 1 - rank}F;{rank}B"}
        assert [p for a in joint.actions[rank] for p in a.passes] == list(apart.actions[rank])


def test_megatron_is_the_joint_interleaved_order_in_its_own_task_order() -> None:
    ours, theirs = template_of("interleaved-1f1b", 4, 8), template_of("megatron-1f1b", 4, 8)
    assert ours.actions == theirs.actions
    assert (ours.interleaving, theirs.interleaving) == (None, "megatron")


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given_", "fields"),
    [
        ("zb-h1", {"vpp": 2}, ["vpp"]),
        ("zb-h2", {"vpp": 2, "placement": "v"}, ["vpp", "placement"]),
        ("zb-v", {"vpp": 1}, ["vpp"]),
        ("zb-v", {"vpp": 3, "placement": "loop"}, ["vpp", "placement"]),
        ("dualpipe-v", {"vpp": 4}, ["vpp"]),
        ("interleaved-zb", {"vpp": 2, "placement": "v"}, ["placement"]),
        ("megatron-1f1b", {"vpp": 1, "joint": False, "microbatches": 7}, ["vpp", "joint", "microbatches"]),
        ("dualpipe", {}, ["template"]),
    ],
)
def test_templates_refuse_what_breaks_their_rules(name: str, given_: dict[str, object], fields: list[str]) -> None:
    arguments: dict[str, object] = {"pp": 4, "vpp": 2, "microbatches": 8, "joint": True}
    with pytest.raises(ScheduleError) as caught:
        build_template(name, **(arguments | given_))  # type: ignore[arg-type]
    assert [problem.field for problem in caught.value.problems] == fields


def test_refusals_name_the_way_out() -> None:
    with pytest.raises(ScheduleError, match="multiple of pp .4. .*; pad with shadow"):
        build_template("megatron-1f1b", pp=4, vpp=2, microbatches=7, joint=True)
    assert build_template("megatron-1f1b", pp=4, vpp=2, microbatches=7, joint=True, pad="shadow").shadows == 1
    with pytest.raises(ScheduleError, match="use interleaved-zb for several stages a rank"):
        build_template("zb-h1", pp=4, vpp=2, microbatches=7, joint=True)
    with pytest.raises(ScheduleError, match="only be simulated"):
        build_template("dualpipe", pp=4, vpp=2, microbatches=8, joint=True)


def test_a_v_reports_the_micro_batches_it_was_padded_by() -> None:
    assert template_of("zb-v", 4, 3, pad="shadow").shadows == 4
    assert template_of("dualpipe-v", 4, 3, pad="shadow").shadows == 5
    assert template_of("zb-v", 4, 10, pad="shadow").shadows == 2
    assert template_of("zb-v", 4, 3).shadows == 0
    assert text(template_of("zb-v", 4, 3)) == text(template_of("zb-v", 4, 3, pad="shadow"))


# --- step times -------------------------------------------------------------------------------------------------------


def test_case_34_zero_bubble() -> None:
    """pp = 4, m = 8, F = I = W = 1: ZB-H1 takes 27; ZB-H2 no less, for the last rank waits 3 for its input."""
    for name in ("zb-h1", "zb-h2"):
        assert step_of(template_of(name, 4, 8), 1, 1, 1) == 27 == zb_h1_time(4, 1, 8, 1, 1, 1)
    for name in ("zb-v", "dualpipe-v", "interleaved-zb"):
        assert step_of(template_of(name, 4, 8), 5, 5, 5) == 255  # half as long a stage: half as long a wait


@settings(max_examples=40)
@given(*(st.integers(1, 6),) * 2, st.integers(0, 12), *(st.integers(1, 7),) * 3)
def test_zb_h1_and_its_interleaved_form_keep_their_formula(
    pp: int, vpp: int, more: int, f: int, i: int, w: int
) -> None:
    """From as many micro-batches as ranks on, also in unequal groups."""
    name, m = "zb-h1" if vpp == 1 else "interleaved-zb", pp + more
    found = step_of(template_of(name, pp, m, vpp=vpp), f, i, w)
    assert found == pytest.approx(zb_h1_time(pp, vpp, m, f * vpp, i * vpp, w * vpp), rel=1e-12)


@pytest.mark.parametrize("name", ["zb-h2", "zb-v"])
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_no_rank_idles_between_its_first_and_last_pass(name: str, pp: int) -> None:
    """What the two are made for, with F = I = W, from 2 pp - 1 micro-batches on."""
    for m in (2 * pp - 1, 2 * pp, 2 * pp + 3):
        timeline = case_of(template_of(name, pp, m), 1, 1, 1).timeline()
        for rank in range(pp):
            spans = timeline.of(rank, "COMP")
            busy = sum(span.end_ns - span.start_ns for span in spans)
            first = min(span.start_ns for span in spans if span.end_ns > span.start_ns)
            assert max(span.end_ns for span in spans) - first == busy, (m, rank)


def test_bubbles_of_eight_ranks_and_32_micro_batches() -> None:
    """Idle share in percent with F, I and W equally long; whole backwards count as 2."""
    shares = {
        ("1f1b", 1): 17.9,
        ("interleaved-1f1b", 2): 9.9,
        ("interleaved-1f1b", 4): 5.2,
        ("zb-h1", 1): 6.8,
        ("zb-h2", 1): 6.8,
        ("zb-v", 2): 3.5,
        ("dualpipe-v", 2): 3.5,
        ("interleaved-zb", 2): 3.5,
        ("interleaved-zb", 4): 1.8,
    }
    for (name, vpp), share in shares.items():
        whole = name.endswith("1f1b")
        for joint in (False, True):
            case = case_of(template_of(name, 8, 32, vpp=vpp, joint=joint), 1, 2 if whole else 1, 0 if whole else 1)
            assert bubble(case.timeline()) == pytest.approx(share, abs=0.05), (name, vpp, joint)
        if whole:
            assert share == pytest.approx(100 * interleaved_bubble(8, vpp, 32), abs=0.05)


def test_input_gradients_that_leave_before_w_shorten_1f1b() -> None:
    """A full backward sends its output when its B tasks are done: (pp-1)(F+I) instead of (pp-1)(F+I+W) of bubble."""
    assert step_of(template_of("1f1b", 8, 32, joint=False), 1, 1, 1) == 32 * 3 + 7 * 2
    assert interleaved_time(8, 1, 32, 1, 2) == 32 * 3 + 7 * 3


# --- memory -----------------------------------------------------------------------------------------------------------


def test_in_flight_of_every_template() -> None:
    """Micro-batches between F and the end of I, per stage, for pp = 4 and m = 16."""
    known = {
        "zb-h1": (4, 3, 2, 1),
        "zb-h2": (7, 5, 3, 1),
        "zb-v": (8, 7, 6, 5, 4, 3, 2, 1),
        "dualpipe-v": (8, 7, 6, 5, 4, 3, 2, 1),
        "interleaved-zb": (8, 7, 6, 5, 4, 3, 2, 1),
        "megatron-1f1b": (8, 8, 8, 6, 4, 4, 4, 2),
    }
    found = {name: in_flight(template_of(name, 4, 16, vpp=least_vpp(name))) for name in known}
    assert found == known


@settings(max_examples=60)
@given(templates())
def test_held_chunks_lie_between_those_in_flight_and_all(template: Template) -> None:
    slots = in_flight(template)
    for rank, held in enumerate(held_chunks(template, pending_w=0)):
        mine = [slot for slot, owner in zip(slots, template.stage_ranks, strict=True) if owner == rank]
        assert max(mine) <= held <= sum(mine)
    for less, more in zip(held_chunks(template), held_chunks(template, pending_w=1), strict=True):
        assert less <= more


def test_memory_of_zero_bubble_templates() -> None:
    """Activations and pending W together, in micro-batches of a whole rank: ZB-H1 and ZB-V hold what 1F1B does."""
    pp, m = 8, 32
    chunks = {
        name: template_of(name, pp, m, vpp=v, joint=False) for name, v in (("1f1b", 1), ("zb-h1", 1), ("zb-v", 2))
    }
    assert {name: max(held_chunks(t, pending_w=1)) / t.vpp for name, t in chunks.items()} == {
        "1f1b": pp,
        "zb-h1": pp,
        "zb-v": pp,
    }
    assert max(held_chunks(template_of("zb-h2", pp, m), pending_w=1)) == 2 * pp - 1


def test_held_chunks_count_a_pending_w() -> None:
    def action(text: str) -> Action:
        return Action.parse(text)

    order = tuple(map(action, ["0F0", "0I0", "0F1", "0I1", "0W0", "0W1"]))
    template = replace(template_of("zb-h1", 1, 2), actions=(order,))
    assert held_chunks(template) == (1.5,)
    assert held_chunks(template, pending_w=1) == (2,)
    assert held_chunks(template, pending_w=0) == (1,)
