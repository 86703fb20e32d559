"""Templates: complete, deadlock-free under unbuffered messages, with the joint structure of interleaved 1F1B."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.errors import ScheduleError
from tessera_rt.plan import Action, ActionKind
from tessera_rt.scheduler.templates import Template, build_template, in_flight
from tessera_rt.scheduler.validate import validate_template

WHOLE_BACKWARD = ("1f1b", "interleaved-1f1b", "gpipe")
"""The templates that do not split the backward; see test_orders.py for the others."""


@st.composite
def templates(draw: st.DrawFn) -> Template:
    name = draw(st.sampled_from(WHOLE_BACKWARD))
    return build_template(
        name,
        pp=draw(st.integers(1, 6)),
        vpp=1 if name == "1f1b" else draw(st.integers(1, 4)),
        microbatches=draw(st.integers(1, 24)),
        joint=draw(st.booleans()),
        pad=draw(st.sampled_from(("groups", "shadow"))),
        placement=draw(st.sampled_from(("loop", "v"))) if name == "gpipe" else "loop",
    )


def passes(template: Template, rank: int) -> list[Action]:
    return [part for action in template.actions[rank] for part in action.passes]


def execute_unbuffered(template: Template) -> int:
    """Runs the template with messages that nobody stores on the way; returns the number of actions that were run.

    A rank offers the outputs of an action on its edges in the order of the action's passes and goes on. A message moves
    only when it is the edge's first and the receiver stands before an action that waits for a message of this edge.
    """
    last = len(template.stage_ranks) - 1
    offers: dict[tuple[int, int], list[tuple[int, str, int]]] = {}
    here: list[set[tuple[int, str, int]]] = [set() for _ in range(template.pp)]
    position = [0] * template.pp
    ran = 0

    def inputs(part: Action) -> list[tuple[int, str, int]]:
        if part.kind is ActionKind.F:
            return [(part.stage - 1, "F", part.microbatch)] if part.stage else []
        own = [(part.stage, "F", part.microbatch)]
        return own + ([(part.stage + 1, "B", part.microbatch)] if part.stage < last else [])

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(template.actions):
            if position[rank] == len(actions):
                continue
            action = actions[position[rank]]
            missing = [need for part in action.passes for need in inputs(part) if need not in here[rank]]
            for stage, _, _ in missing:
                edge = offers.get((template.stage_ranks[stage], rank))
                if edge:
                    here[rank].add(edge.pop(0))
                    moved = True
            if missing:
                continue
            for part in action.passes:
                output = (part.stage, str(part.kind), part.microbatch)
                here[rank].add(output)
                target = part.stage + (1 if part.kind is ActionKind.F else -1)
                if 0 <= target <= last and template.stage_ranks[target] != rank:
                    offers.setdefault((rank, template.stage_ranks[target]), []).append(output)
            position[rank] += 1
            ran += 1
            moved = True
    return ran


@given(templates())
def test_every_pass_once_in_order_and_without_deadlock(template: Template) -> None:
    validate_template(template)
    for rank in range(template.pp):
        mine = passes(template, rank)
        assert len(mine) == len(set(mine))
        expected = {
            (stage, kind, mb)
            for stage, owner in enumerate(template.stage_ranks)
            if owner == rank
            for kind in (ActionKind.F, ActionKind.B)
            for mb in range(template.microbatches)
        }
        assert {(part.stage, part.kind, part.microbatch) for part in mine} == expected
        place = {(part.kind, part.stage, part.microbatch): i for i, part in enumerate(mine)}
        for part in mine:
            if part.kind is ActionKind.B:
                assert (
                    place[ActionKind.F, part.stage, part.microbatch] < place[ActionKind.B, part.stage, part.microbatch]
                )
        for action in template.actions[rank]:
            assert len({part.microbatch for part in action.passes}) == len(action.passes)
    assert execute_unbuffered(template) == sum(map(len, template.actions))


@given(templates())
def test_micro_batches_go_in_order_through_every_stage(template: Template) -> None:
    for rank in range(template.pp):
        for stage, owner in enumerate(template.stage_ranks):
            for kind in (ActionKind.F, ActionKind.B):
                order = [p.microbatch for p in passes(template, rank) if p.kind is kind and p.stage == stage]
                assert order == (list(range(template.microbatches)) if owner == rank else [])


@pytest.mark.parametrize("name", WHOLE_BACKWARD)
@pytest.mark.parametrize("joint", [False, True])
def test_case_26_two_ranks_two_stages_each(name: str, joint: bool) -> None:
    template = build_template(name, pp=2, vpp=1 if name == "1f1b" else 2, microbatches=4, joint=joint)
    assert execute_unbuffered(template) == sum(map(len, template.actions))


def test_gpipe_and_1f1b_orders_are_the_known_ones() -> None:
    def text(template: Template) -> list[str]:
        return [" ".join(map(str, actions)) for actions in template.actions]

    assert text(build_template("gpipe", pp=2, vpp=1, microbatches=2, joint=False)) == [
        "0F0 0F1 0B0 0B1",
        "1F0 1F1 1B0 1B1",
    ]
    assert text(build_template("1f1b", pp=2, vpp=1, microbatches=3, joint=False)) == [
        "0F0 0F1 0B0 0F2 0B1 0B2",
        "1F0 1B0 1F1 1B1 1F2 1B2",
    ]
    assert text(build_template("1f1b", pp=2, vpp=1, microbatches=4, joint=True)) == [
        "0F0 0F1 0F2 (0F3;0B0)OVERLAP_F_B 0B1 0B2 0B3",
        "1F0 (1F1;1B0)OVERLAP_F_B (1F2;1B1)OVERLAP_F_B (1F3;1B2)OVERLAP_F_B 1B3",
    ]
    # Megatron-LM's order for pp=2, two stages a rank
    assert text(build_template("interleaved-1f1b", pp=2, vpp=2, microbatches=2, joint=False)) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]


def test_placements() -> None:
    loop = build_template("gpipe", pp=3, vpp=3, microbatches=1, joint=False)
    v = build_template("gpipe", pp=3, vpp=3, microbatches=1, joint=False, placement="v")
    assert loop.stage_ranks == (0, 1, 2, 0, 1, 2, 0, 1, 2)
    assert v.stage_ranks == (0, 1, 2, 2, 1, 0, 0, 1, 2)


@pytest.mark.parametrize(("pp", "vpp", "edges"), [(8, 2, 32), (8, 4, 64), (7, 2, 26), (2, 3, 12), (5, 1, 5), (4, 1, 4)])
def test_joint_pairs_of_the_steady_state(pp: int, vpp: int, edges: int) -> None:
    """F chunk v runs with B chunk vpp-1-v in pp-|o| of pp slots and with a cyclic neighbour in |o|, o = 2r-pp+1."""
    name = "1f1b" if vpp == 1 else "interleaved-1f1b"
    template = build_template(name, pp=pp, vpp=vpp, microbatches=8 * pp, joint=True)
    pairs = [
        (rank, action.parts[0].stage // pp, action.parts[1].stage // pp)
        for rank, actions in enumerate(template.actions)
        for action in actions
        if action.parts
    ]
    if vpp == 1:
        assert len(set(pairs)) == pp  # self-loops only
        return
    assert len(set(pairs)) == edges
    for rank in range(pp):
        offset = 2 * rank - pp + 1
        # one whole round of the steady state: every forward chunk with every micro-batch of a group
        mine = [(f, b) for r, f, b in pairs if r == rank][: pp * vpp]
        counts = Counter(mine)
        step = -1 if offset > 0 else 1
        for v in range(vpp):
            mirror = vpp - 1 - v
            assert counts[v, mirror] == pp - abs(offset)
            assert counts[v, (mirror + step) % vpp] == abs(offset) or offset == 0


def test_joint_warm_up_holds_one_more() -> None:
    for pp, vpp, m in ((4, 1, 12), (4, 2, 12), (3, 3, 10), (4, 2, 14)):
        name = "1f1b" if vpp == 1 else "interleaved-1f1b"
        template = build_template(name, pp=pp, vpp=vpp, microbatches=m, joint=True)
        largest = -(-m // (m // pp))
        for rank, actions in enumerate(template.actions):
            warmup = next(i for i, action in enumerate(actions) if action.parts)
            assert warmup == 2 * (pp - 1 - rank) + (vpp - 1) * largest + 1
            kinds = [len(action.passes) for action in actions]
            assert sum(a != b for a, b in pairwise(kinds)) <= 2  # singles, pairs, singles


@given(st.integers(1, 8), st.integers(1, 40))
def test_groups_are_even(pp: int, m: int) -> None:
    """Rank 0 of an interleaved order shows the groups: micro-batches that go through stage 0 in one row."""
    template = build_template("interleaved-1f1b", pp=pp, vpp=2, microbatches=m, joint=False)
    forwards = [part.stage for part in passes(template, 0) if part.kind is ActionKind.F]
    sizes: list[int] = []
    for i, stage in enumerate(forwards):
        if stage == 0:
            if i == 0 or forwards[i - 1] != 0:
                sizes.append(0)
            sizes[-1] += 1
    assert sum(sizes) == m
    assert len(sizes) == max(1, m // pp)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("pp", "vpp", "m", "shadows"), [(4, 2, 10, 2), (4, 2, 5, 3), (2, 3, 7, 1), (3, 2, 1, 2)])
@pytest.mark.parametrize("joint", [False, True])
def test_case_21_shadow_micro_batches_are_reported_and_absent(
    pp: int, vpp: int, m: int, shadows: int, joint: bool
) -> None:
    template = build_template("interleaved-1f1b", pp=pp, vpp=vpp, microbatches=m, joint=joint, pad="shadow")
    padded = build_template("interleaved-1f1b", pp=pp, vpp=vpp, microbatches=m + shadows, joint=joint)
    assert template.shadows == shadows
    assert padded.shadows == build_template("1f1b", pp=pp, vpp=1, microbatches=m, joint=joint).shadows == 0
    for rank in range(pp):
        assert passes(template, rank) == [part for part in passes(padded, rank) if part.microbatch < m]
        assert all(len(action.passes) in (1, 2) for action in template.actions[rank])
        kept = [action for action in padded.actions[rank] if all(part.microbatch < m for part in action.passes)]
        assert [a for a in template.actions[rank] if a.parts] == [a for a in kept if a.parts]
    validate_template(template)


def test_case_86_input_slots() -> None:
    assert in_flight(build_template("1f1b", pp=4, vpp=1, microbatches=8, joint=False)) == (4, 3, 2, 1)
    assert in_flight(build_template("gpipe", pp=4, vpp=1, microbatches=8, joint=False)) == (8, 8, 8, 8)
    # one more position ahead, and a pair holds its F and its B at once: two per hop
    assert in_flight(build_template("1f1b", pp=4, vpp=1, microbatches=12, joint=True)) == (8, 6, 4, 2)


@given(templates())
def test_in_flight_never_exceeds_the_micro_batches(template: Template) -> None:
    slots = in_flight(template)
    assert len(slots) == len(template.stage_ranks)
    assert all(1 <= slot <= template.microbatches for slot in slots)


def test_all_problems_of_the_arguments_at_once() -> None:
    with pytest.raises(ScheduleError) as caught:
        build_template("1f1b", pp=0, vpp=2, microbatches=-1, joint=True, pad="zeros", placement="v")
    fields = [problem.field for problem in caught.value.problems]
    assert fields == ["pp", "microbatches", "vpp", "pad", "placement"]
    with pytest.raises(ScheduleError, match="one of 1f1b, interleaved-1f1b, gpipe"):
        build_template("zb-h9", pp=2, vpp=1, microbatches=1, joint=False)
    with pytest.raises(ScheduleError, match="placement"):
        build_template("gpipe", pp=2, vpp=1, microbatches=1, joint=False, placement="w")


def test_larger_groups_keep_more_in_flight() -> None:
    """(vpp-1)(g-pp) more chunks on every rank."""
    small, large = (
        build_template("interleaved-1f1b", pp=4, vpp=3, microbatches=16, joint=True, group=group) for group in (None, 8)
    )
    assert [sum(action.kind is ActionKind.F for action in row) for row in large.actions] == [
        sum(action.kind is ActionKind.F for action in row) + 2 * (8 - 4) for row in small.actions
    ]
    assert build_template("interleaved-1f1b", pp=4, vpp=3, microbatches=16, joint=True, group=4) == small


@pytest.mark.parametrize(
    ("name", "group", "pad", "message"),
    [
        ("interleaved-1f1b", 3, "groups", "at least pp"),
        ("interleaved-1f1b", 8, "shadow", "without shadow padding"),
        ("zb-v", 8, "groups", "left out, except for interleaved-1f1b and interleaved-zb"),
        ("megatron-1f1b", 8, "groups", "left out"),
    ],
)
def test_groups_that_cannot_be(name: str, group: int, pad: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build_template(name, pp=4, vpp=2, microbatches=16, joint=True, pad=pad, group=group)
