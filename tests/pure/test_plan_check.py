"""check_plan: good plans pass, and every planted fault is found and named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.costs import Link
from tessera_rt.errors import PlanError
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Action, Interleaving, Mesh, Plan, messages_from
from tessera_rt.plan_check import check_plan
from tessera_rt.tasks import Pass
from tessera_rt.testing.plan_strategies import plans
from tessera_rt.testing.plans import simple_model, simple_plan

MODEL = simple_model("dmsm")  # EMBED L0 L1 L2 L3 HEAD
# Stages: EMBED | L0 | L1 L2 | L3 HEAD
PLAN = simple_plan(MODEL, pp=2, vpp=2, cuts=(0, 1, 2, 4, 6), microbatches=4, joint=True)
SPLIT = simple_plan(MODEL, pp=2, microbatches=4, split_w=True)  # stages: EMBED L0 L1 | L2 L3 HEAD
ONE_STAGE = simple_plan(MODEL, pp=1, microbatches=3)
Change = Callable[[Plan], Plan]


def actions(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


def with_stage(number: int, /, **changes: int) -> Change:
    return lambda plan: replace(
        plan, stages=tuple(replace(s, **changes) if s.index == number else s for s in plan.stages)
    )


def with_list(rank: int, change: Callable[[tuple[Action, ...]], tuple[Action, ...]]) -> Change:
    return lambda plan: replace(
        plan, actions=tuple(change(entry) if r == rank else entry for r, entry in enumerate(plan.actions))
    )


def with_interleaving(key: str, change: Callable[[Interleaving], Interleaving]) -> Change:
    return lambda plan: replace(plan, interleavings={**plan.interleavings, key: change(plan.interleavings[key])})


def with_memory(rank: int, **changes: int) -> Change:
    return lambda plan: replace(
        plan, memory=tuple(replace(m, **changes) if r == rank else m for r, m in enumerate(plan.memory))
    )


def with_order(key: str, change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Change:
    def changed(entry: Interleaving) -> Interleaving:
        order = change(entry.order)
        starts = (*entry.starts_ns, *[entry.starts_ns[-1]] * len(order))[: len(order)]
        return replace(entry, order=order, starts_ns=starts)

    return with_interleaving(key, changed)


def swapped(entries: Sequence[Action], first: str, second: str) -> tuple[Action, ...]:
    a, b = Action.parse(first), Action.parse(second)
    return tuple(b if x == a else a if x == b else x for x in entries)


def without(entries: Sequence[Action], text: str) -> tuple[Action, ...]:
    assert Action.parse(text) in entries
    return tuple(x for x in entries if x != Action.parse(text))


def replaced(entries: Sequence[Action], text: str, by: str) -> tuple[Action, ...]:
    assert Action.parse(text) in entries
    return tuple(y for x in entries for y in (actions(by) if x == Action.parse(text) else (x,)))


FAULTS: dict[str, tuple[Plan, Change, str, str]] = {
    # name: plan, change, field, words of the message
    "version": (PLAN, lambda p: replace(p, version=2), "version", "must be 1"),
    "vpp 0": (PLAN, lambda p: replace(p, mesh=replace(p.mesh, vpp=0)), "mesh.vpp", "at least 1"),
    "pp 0": (PLAN, lambda p: replace(p, mesh=replace(p.mesh, pp=0)), "mesh.pp", "at least 1"),
    "ep -1": (PLAN, lambda p: replace(p, mesh=replace(p.mesh, ep=-1)), "mesh.ep", "at least 1"),
    "no micro-batch": (PLAN, lambda p: replace(p, microbatches=0), "microbatches", "at least 1"),
    "pad": (PLAN, lambda p: replace(p, pad="zero"), "pad", "groups or shadow"),
    "shadows without padding": (PLAN, lambda p: replace(p, shadows=2), "shadows", "0 with pad groups"),
    "workload of another ep": (
        PLAN,
        lambda p: replace(p, workload=replace(p.workload, ep=4)),
        "workload.ep",
        "1, as in the mesh",
    ),
    "workload of another dp": (PLAN, lambda p: replace(p, mesh=replace(p.mesh, dp=2)), "workload.dp", "2, as in"),
    "no tokens": (PLAN, lambda p: replace(p, workload=replace(p.workload, tokens=0)), "workload.tokens", "at least 1"),
    "missing list": (PLAN, lambda p: replace(p, actions=p.actions[:1]), "actions", "one entry for each of 2"),
    "missing memory": (PLAN, lambda p: replace(p, memory=p.memory[:1]), "memory", "one entry for each of 2"),
    "negative memory": (PLAN, with_memory(1, activations=-1), "memory[1].activations", "at least 0"),
    "memory over limit": (PLAN, with_memory(1, weights=10**6), "memory[1]", "at most its limit of 65536"),
    "NaN contention": (
        PLAN,
        lambda p: replace(p, assumptions=replace(p.assumptions, contention=float("nan"))),
        "assumptions.contention",
        "finite",
    ),
    "link without bandwidth": (
        PLAN,
        lambda p: replace(p, assumptions=replace(p.assumptions, link=Link(bytes_per_s=0.0))),
        "assumptions.link.bytes_per_s",
        "more than 0",
    ),
    "bound above value": (
        PLAN,
        lambda p: replace(p, solver=replace(p.solver, bound_ns=10**9)),
        "solver.bound_ns",
        "at most t_dom_ns",
    ),
    "unknown status": (
        PLAN,
        lambda p: replace(p, solver=replace(p.solver, status="best")),
        "solver.status",
        "one of optimal, optimal-in-window, incumbent, heuristic",
    ),
    "unknown bottleneck": (
        PLAN,
        lambda p: replace(p, solver=replace(p.solver, bottleneck="7F")),
        "solver.bottleneck",
        "key of an interleaving",
    ),
    "another model": (
        PLAN,
        lambda p: replace(p, fingerprint=simple_model("dmsmm").fingerprint),
        "fingerprint",
        "made for another model",
    ),
    # stages
    "duplicated layer": (PLAN, with_stage(1, stop=3), "stages", "L1 in stages 1, 2"),
    "missing layer": (PLAN, with_stage(1, stop=1), "stages", "L0 in no stage"),
    "missing head": (PLAN, with_stage(3, stop=5), "stages", "HEAD in no stage"),
    "item beyond the model": (PLAN, with_stage(3, stop=7), "stages[3]", "items 0 to 6"),
    "backward range": (PLAN, with_stage(2, start=4, stop=2), "stages[2]", "items 4 to 2"),
    "stages out of order": (
        PLAN,
        lambda p: with_stage(2, start=1, stop=2)(with_stage(1, start=2, stop=4)(p)),
        "stages[1].start",
        "must be 1, where stage 0 ends; L1 is out of order",
    ),
    "wrong stage number": (PLAN, with_stage(2, index=1), "stages[2].index", "listed in order"),
    "stage on no rank": (PLAN, with_stage(2, rank=2), "stages[2].rank", "from 0 to 1"),
    "rank without stage": (
        PLAN,
        lambda p: replace(p, stages=tuple(replace(s, rank=0) for s in p.stages)),
        "stages",
        "none on rank 1",
    ),
    "too few stages": (
        PLAN,
        lambda p: replace(p, stages=(*p.stages[:2], replace(p.stages[2], stop=6))),
        "stages",
        "pp x vpp = 2 x 2 = 4",
    ),
    "negative slots": (PLAN, with_stage(0, slots=-1), "stages[0].slots", "at least 0"),
    "too few slots": (
        PLAN,
        lambda p: with_stage(1, slots=p.stages[1].slots - 1)(p),
        "stages[1].slots",
        f"at least {PLAN.stages[1].slots}",
    ),
    # actions
    "missing F": (PLAN, with_list(0, lambda a: without(a, "0F0")), "actions[0]", "stage 0: no F of micro-batch 0"),
    "missing B": (PLAN, with_list(1, lambda a: without(a, "1B3")), "actions[1]", "no backward of micro-batch 3"),
    "F twice": (PLAN, with_list(0, lambda a: (*a, *actions("0F0"))), "actions[0]", "several F of micro-batch 0"),
    "B twice": (
        PLAN,
        with_list(0, lambda a: (*a, *actions("0B3"))),
        "actions[0]",
        "several backwards of micro-batch 3",
    ),
    "B and I": (SPLIT, with_list(0, lambda a: (*a, *actions("0B3"))), "actions[0]", "several backwards"),
    "I without W": (SPLIT, with_list(1, lambda a: without(a, "1W2")), "actions[1]", "I without W of micro-batch 2"),
    "W without I": (PLAN, with_list(0, lambda a: (*a, *actions("0W1"))), "actions[0]", "W without I of micro-batch 1"),
    "B before F": (
        PLAN,
        with_list(1, lambda a: swapped(a, "1F0", "1B3")),
        "actions[1]",
        "must be in a later action than F",
    ),
    "W before I": (SPLIT, with_list(0, lambda a: swapped(a, "0I1", "0W1")), "actions[0]", "W of micro-batch 1"),
    "W out of order": (
        SPLIT,
        with_list(0, lambda a: (*without(a, "0W1"), *actions("0W1"))),
        "actions[0]",
        "after W of micro-batch 1, whose I came first",
    ),
    "W within B before an older W": (
        ONE_STAGE,
        with_list(0, lambda _: actions("0F0 0F1 0I0 0B1 0W0 0F2 0B2")),
        "actions[0]",
        "W of micro-batch 1 (in its B)': must be after W of micro-batch 0, whose I came first",
    ),
    "W within a joint B before an older W": (
        ONE_STAGE,
        with_list(0, lambda _: actions("0F0 0F1 0I0 (0F2;0B1)OVERLAP_F_B 0W0 0B2")),
        "actions[0]",
        "W of micro-batch 1 (in its B)': must be after W of micro-batch 0, whose I came first",
    ),
    "on another rank": (
        PLAN,
        lambda p: with_list(1, lambda a: (*a, *actions("0F0")))(with_list(0, lambda a: without(a, "0F0"))(p)),
        f"actions[1][{len(PLAN.actions[1])}]",
        "on rank 0, which has stage 0",
    ),
    "no such stage": (
        PLAN,
        with_list(0, lambda a: (*a, *actions("4F0"))),
        f"actions[0][{len(PLAN.actions[0])}]",
        "0 to 3",
    ),
    "no such micro-batch": (
        PLAN,
        with_list(0, lambda a: (*a, *actions("0F4"))),
        f"actions[0][{len(PLAN.actions[0])}]",
        "micro-batch from 0 to 3",
    ),
    "a message among the actions": (
        PLAN,
        with_list(0, lambda a: (*actions("0SEND_F0"), *a)),
        "actions[0][0]",
        "messages follow",
    ),
    "two F together": (
        SPLIT,
        with_list(0, lambda a: replaced(without(a, "0F1"), "0F0", "(0F0;0F1)OVERLAP_F_B")),
        "actions[0][0]",
        "at most one F",
    ),
    "W beside B": (
        SPLIT,
        with_list(1, lambda a: replaced(replaced(a, "1I1", "1B1"), "1W1", "(1B1;1W0)OVERLAP_F_B")),
        "actions[1][5]",
        "a W beside I",
    ),
    "F and B of one micro-batch together": (
        SPLIT,
        with_list(1, lambda a: replaced(without(a, "1F0"), "1I0", "(1F0;1I0)OVERLAP_F_B")),
        "actions[1]",
        "I of micro-batch 0': must be in a later action than F",
    ),
    # interleavings
    "missing interleaving": (
        PLAN,
        lambda p: replace(p, interleavings={k: v for k, v in p.interleavings.items() if k != "2F;2B"}),
        "interleavings.2F;2B",
        "action lists contain",
    ),
    "interleaving of another key": (
        PLAN,
        with_interleaving("0F", lambda entry: replace(entry, key="1F")),
        "interleavings.0F.key",
        "must be 0F",
    ),
    "key that is none": (
        PLAN,
        lambda p: replace(p, interleavings={**p.interleavings, "0X": replace(p.interleavings["0F"], key="0X")}),
        "interleavings.0X",
        "key of an action",
    ),
    "key of no stage": (
        PLAN,
        lambda p: replace(p, interleavings={**p.interleavings, "9F": replace(p.interleavings["0F"], key="9F")}),
        "interleavings.9F",
        "stage 9",
    ),
    "task twice": (PLAN, with_order("1F", lambda o: (*o, o[0])), "interleavings.1F.order", "named once each"),
    "task missing": (PLAN, with_order("1F", lambda o: o[:-1]), "interleavings.1F.order", "without F_MLP:L0"),
    "task of another stage": (
        PLAN,
        with_order("1F", lambda o: (*o, "F_ATTN:L3")),
        "interleavings.1F.order",
        "tasks of this action",
    ),
    "task that is none": (PLAN, with_order("1F", lambda o: (*o, "F_FOO:L0")), "interleavings.1F.order", "F_FOO:L0"),
    "dependency broken": (
        PLAN,
        with_order("1F", lambda o: o[::-1]),
        "interleavings.1F.order",
        "F_MLP:L0 before F_ATTN:L0",
    ),
    "starts missing": (
        PLAN,
        with_interleaving("1F", lambda entry: replace(entry, starts_ns=entry.starts_ns[:1])),
        "interleavings.1F.starts_ns",
        "one per task, 2",
    ),
    "start after the makespan": (
        PLAN,
        with_interleaving("1F", lambda entry: replace(entry, makespan_ns=10)),
        "interleavings.1F.starts_ns",
        "from 0 to the makespan, 10",
    ),
    "starts out of lane order": (
        PLAN,
        with_interleaving("1F", lambda entry: replace(entry, starts_ns=(500, 0))),
        "interleavings.1F.starts_ns",
        "F_MLP:L0",
    ),
    "negative makespan": (
        PLAN,
        with_interleaving("1F", lambda entry: replace(entry, makespan_ns=-1)),
        "interleavings.1F.makespan_ns",
        "at least 0",
    ),
    "unknown target slot": (
        PLAN,
        lambda p: replace(p, target_slots=("F_MLP:L9",)),
        "target_slots[0]",
        "a task of this",
    ),
    # messages
    "deadlock": (
        SPLIT,
        with_list(1, lambda a: actions("1F2 1I2 1W2 1F0 1I0 1W0 1F1 1I1 1W1 1F3 1I3 1W3")),
        "actions[0][2]",
        "waits for 1SEND_B0 from rank 1, which itself waits in 1F2",
    ),
}
WITHOUT_MODEL = {name for name in FAULTS if name not in ("another model", "missing head", "item beyond the model")}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found(name: str) -> None:
    plan, change, field, words = FAULTS[name]
    check_plan(plan, MODEL)
    for model in (MODEL, None) if name in WITHOUT_MODEL else (MODEL,):
        with pytest.raises(PlanError) as caught:
            check_plan(change(plan), model)
        mine = [str(problem) for problem in caught.value.problems if problem.field == field]
        assert any(words in text for text in mine), str(caught.value)


def test_all_faults_come_in_one_error() -> None:
    plan = with_memory(0, weights=-5)(with_stage(1, stop=3)(replace(PLAN, pad="x")))
    with pytest.raises(PlanError) as caught:
        check_plan(plan, MODEL, world=8)
    assert {problem.field for problem in caught.value.problems} >= {"memory[0].weights", "stages", "pad", "mesh"}
    assert str(caught.value).startswith("plan for simple-dmsm: ")


@pytest.mark.parametrize("world", [1, 2, 8])
def test_plan_for_another_number_of_processes(world: int) -> None:
    plan = simple_plan(MODEL, pp=4, microbatches=2)
    check_plan(plan, MODEL, world=4)
    with pytest.raises(PlanError, match=rf"pp 4 x dp 1 x ep 1 = 4 processes.*started, {world}; start 4 processes"):
        check_plan(plan, MODEL, world=world)


def test_plan_for_a_model_with_one_more_layer() -> None:
    with pytest.raises(PlanError) as caught:
        check_plan(PLAN, simple_model("dmsmm"), world=2)
    text = str(caught.value)
    assert "fingerprint" in text and "HEAD in no stage" in text


def test_hand_made_order_needs_no_start_times() -> None:
    entry = PLAN.interleavings["1F"]
    given_order = replace(entry, method="given", starts_ns=(), makespan_ns=0)
    check_plan(replace(PLAN, interleavings={**PLAN.interleavings, "1F": given_order}), MODEL)


def test_slots_of_1f1b() -> None:
    """One stage a rank: rank r of pp keeps pp - r micro-batches, whatever their number."""
    plan = simple_plan(simple_model("mmmmmm"), pp=4, microbatches=8)
    assert [stage.slots for stage in plan.stages] == [4, 3, 2, 1]
    check_plan(plan)
    for stage in range(4):
        with pytest.raises(PlanError, match=rf"stages\[{stage}\].slots = {3 - stage}: must be at least {4 - stage}"):
            check_plan(with_stage(stage, slots=3 - stage)(plan))


@given(plans())
def test_valid_plans_pass(example: tuple[Plan, ModelSpec]) -> None:
    plan, model = example
    check_plan(plan, model, world=plan.mesh.world)
    check_plan(plan)


@given(plans(), st.data())
def test_a_lost_or_doubled_pass_is_found(example: tuple[Plan, ModelSpec], data: st.DataObject) -> None:
    plan, model = example
    rank = data.draw(st.integers(0, plan.mesh.pp - 1))
    entries = plan.actions[rank]
    position = data.draw(st.integers(0, len(entries) - 1))
    if data.draw(st.booleans()):
        changed = entries[:position] + entries[position + 1 :]
    else:
        changed = (*entries, entries[position])
    with pytest.raises(PlanError, match=rf"actions\[{rank}\]"):
        check_plan(with_list(rank, lambda _: changed)(plan), model)


def test_mesh_is_part_of_the_helper() -> None:
    plan = simple_plan(MODEL, pp=2, dp=2, ep=2, placement=(0, 1, 1, 0), microbatches=2)
    assert plan.mesh == Mesh(pp=2, vpp=2, dp=2, ep=2)
    assert {message.pass_ for message in messages_from(plan, 0)} == {Pass.F, Pass.B}
    check_plan(plan, MODEL, world=8)
