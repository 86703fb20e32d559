"""The simulator against closed forms and examples worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_rt.costs import ItemMemory, Link, TaskCost
from tessera_rt.errors import CostError, ScheduleError
from tessera_rt.plan import Action, Plan, Stage
from tessera_rt.scheduler.closed_forms import gpipe_time, interleaved_bubble, interleaved_time, one_f_one_b_time
from tessera_rt.scheduler.graphs import action_graph
from tessera_rt.scheduler.list_schedule import interleaving
from tessera_rt.scheduler.simulate import simulate, simulate_schedule
from tessera_rt.scheduler.templates import build_template
from tessera_rt.testing.costs import dense_model, item_costs, moe_model, uniform_costs
from tessera_rt.testing.plans import simple_model, simple_plan
from tessera_rt.testing.schedules import Bounds, Case, orders


def uniform_case(
    name: str, pp: int, vpp: int, m: int, f: int, b: int, *, w: int = 0, joint: bool = False, link: Link | None = None
) -> Case:
    """A dense layer a stage, F, B, W of ``f``, ``b``, ``w`` ns; embedding and head take no time; 1 byte per message."""
    template = build_template(name, pp=pp, vpp=vpp, microbatches=m, joint=joint)
    stages = pp * vpp
    model = dense_model(stages)
    memory = {item.label: ItemMemory(output=1) for item in model.items}
    times = {f"L{i}": (f, b, w) for i in range(stages)}
    costs = item_costs(model, times, memory, link=link)
    bounds = [(1 + s - (s == 0), 2 + s + (s == stages - 1)) for s in range(stages)]
    return Case(
        template.stage_ranks, template.actions, bounds, orders(template.actions, model, costs, bounds), model, costs
    )


# --- closed forms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "makespan"), [(1, 12), (2, 15), (3, 18), (8, 33)])
def test_case_20_fewer_micro_batches_than_stages(m: int, makespan: int) -> None:
    assert uniform_case("1f1b", 4, 1, m, 1, 2).timeline().step_ns == makespan == one_f_one_b_time(4, m, 1, 2)


def test_case_34_known_step_times() -> None:
    assert uniform_case("gpipe", 4, 1, 8, 1, 2).timeline().step_ns == 33
    assert uniform_case("1f1b", 4, 1, 8, 1, 2).timeline().step_ns == 33
    # F = 1 and B = 2 per rank, halved over two stages, in units of 1/10
    assert uniform_case("interleaved-1f1b", 4, 2, 8, 5, 10).timeline().step_ns == 285
    assert uniform_case("zb-h1", 4, 1, 8, 1, 1, w=1).timeline().step_ns == 27
    half = Link(latency_ns=5)
    assert uniform_case("gpipe", 2, 1, 2, 10, 20, link=half).timeline().step_ns == 100
    assert uniform_case("1f1b", 2, 1, 2, 10, 20, link=half).timeline().step_ns == 100
    by_bandwidth = Link(bytes_per_s=2e8)  # 1 byte in 5 ns
    assert uniform_case("1f1b", 2, 1, 2, 10, 20, link=by_bandwidth).timeline().step_ns == 100


@settings(max_examples=30)
@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 14),
    st.booleans(),
    st.integers(1, 9),
    st.integers(1, 9),
    st.booleans(),
)
def test_closed_forms(pp: int, vpp: int, more: int, joint: bool, f: int, b: int, overlap: bool) -> None:
    """For every number of micro-batches from pp on, joint pairs or not: no overhead from groups of unequal size."""
    m = pp + more
    name = "1f1b" if vpp == 1 else "interleaved-1f1b"
    timeline = uniform_case(name, pp, vpp, m, f, b, joint=joint).timeline(overlap=overlap)
    assert timeline.step_ns == pytest.approx(interleaved_time(pp, vpp, m, f * vpp, b * vpp), rel=1e-12)
    idle = 1 - vpp * m * (f + b) / timeline.step_ns
    assert idle == pytest.approx(interleaved_bubble(pp, vpp, m))
    assert timeline.split(0).bubble_ns == timeline.step_ns - vpp * m * (f + b)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 4))
def test_gpipe_with_links(pp: int, m: int, f: int, b: int, latency: int) -> None:
    timeline = uniform_case("gpipe", pp, 1, m, f, b, link=Link(latency_ns=latency)).timeline()
    assert timeline.step_ns == gpipe_time(pp, m, f, b) + 2 * (pp - 1) * latency


# --- by hand --------------------------------------------------------------------------------------------------------


def one_rank(actions: str, order: str, *, comm_ns: int = 10) -> Case:
    """One rank, stage 0 = a MoE layer L0, stage 1 = L1 with the embedding before and the head behind."""
    model = moe_model(2)
    costs = item_costs(model, {"L0": (8, 12, 4), "L1": (6, 10, 4)}, comm_ns=comm_ns)
    bounds = ((0, 2), (2, 4))
    row = tuple(Action.parse(text) for text in actions.split())
    interleavings = orders([row], model, costs, bounds)
    if order:
        key = next(action.key for action in row if action.parts)
        graph = action_graph(key, model, costs, bounds)
        interleavings[key] = interleaving(order.split(), graph, key)
    return Case((0, 0), (row,), bounds, interleavings, model, costs)


def test_contention_by_hand() -> None:
    """One rank: F of micro-batch 1 on stage 0 with B of micro-batch 0 on stage 1; c = 0.5, all-to-alls of 10 ns.

    F: dispatch 10, MLP 8, combine 10. B: combine 10, MLP 10, W 4, dispatch 10.
    COMM: F dispatch 0-10, B combine 10-20.
    COMP: F MLP from 10; beside COMM it does 6.67 of 8 by 20, the other 1.33 alone: 21.33, rounded 21.
    COMM: F combine 21-31. COMP: B MLP from 21; 6.67 of 10 by 31, the other 3.33 alone: 34.33, rounded 34.
    COMM: B dispatch 34-44. COMP: W MLP from 34, all of it beside COMM: 4 * 1.5 = 6, so 40.
    """
    order = (
        "F_EMBED F_ATTN:L0 F_ROUTE:L0 F_COUNT:L0 F_DISP:L0 B_HEAD W_HEAD B_POST:L1 B_COMB:L1 F_MLP:L0 F_COMB:L0 "
        "B_MLP:L1 B_DISP:L1 W_MLP:L1 F_POST:L0 B_ROUTE:L1 B_ATTN:L1 W_ATTN:L1"
    )
    case = one_rank("0F0 1F0 (0F1;1B0)OVERLAP_F_B 1F1 0B0 1B1 0B1", order)
    timeline = case.timeline(contention=0.5)
    begin = next(s.start_ns for s in timeline.spans if s.name == "F_DISP:L0" and s.microbatch == 1)

    def span(name: str, stage: int, microbatch: int) -> tuple[int, int]:
        found = next(s for s in timeline.spans if (s.name, s.stage, s.microbatch) == (name, stage, microbatch))
        return found.start_ns - begin, found.end_ns - begin

    assert begin == next(s.end_ns for s in timeline.spans if s.name == "F_COMB:L1" and s.microbatch == 0)
    assert span("F_DISP:L0", 0, 1) == (0, 10)
    assert span("B_COMB:L1", 1, 0) == (10, 20)
    assert span("F_MLP:L0", 0, 1) == (10, 21)
    assert span("F_COMB:L0", 0, 1) == (21, 31)
    assert span("B_MLP:L1", 1, 0) == (21, 34)
    assert span("B_DISP:L1", 1, 0) == (34, 44)
    assert span("W_MLP:L1", 1, 0) == (34, 40)


def test_one_message_at_a_time_on_an_edge() -> None:
    """Two forwards of no duration: their messages (10 ns each, latency 3) follow one another on the edge."""
    template = build_template("gpipe", pp=2, vpp=1, microbatches=3, joint=False)
    model = dense_model(2)
    memory = {"L0": ItemMemory(output=10)}
    costs = item_costs(model, {"L1": (1, 0, 0)}, memory, link=Link(latency_ns=3, bytes_per_s=1e9))
    bounds = ((0, 2), (2, 4))
    case = Case(
        template.stage_ranks, template.actions, bounds, orders(template.actions, model, costs, bounds), model, costs
    )
    timeline = case.timeline()
    links = [(s.rank, s.name, s.stage, s.microbatch, s.start_ns, s.end_ns) for s in timeline.spans if s.lane == "LINK"]
    assert links == [
        (0, "SEND_F", 0, 0, 0, 13),
        (0, "SEND_F", 0, 1, 10, 23),
        (0, "SEND_F", 0, 2, 20, 33),
        (1, "SEND_B", 1, 0, 34, 47),  # all forwards first: the last one ends at 33 + 1
        (1, "SEND_B", 1, 1, 44, 57),
        (1, "SEND_B", 1, 2, 54, 67),
    ]
    assert timeline.step_ns == 67


def test_an_empty_stage_passes_on_with_the_size_of_the_stage_before() -> None:
    template = build_template("gpipe", pp=3, vpp=1, microbatches=1, joint=False)
    model = dense_model(2)
    costs = item_costs(model, {"L0": (5, 5, 0)}, {"L0": ItemMemory(output=7)}, link=Link(bytes_per_s=1e9))
    bounds = ((0, 2), (2, 2), (2, 4))
    case = Case(
        template.stage_ranks, template.actions, bounds, orders(template.actions, model, costs, bounds), model, costs
    )
    links = [(s.name, s.stage, s.start_ns, s.end_ns) for s in case.timeline().spans if s.lane == "LINK"]
    assert links == [("SEND_F", 0, 5, 12), ("SEND_F", 1, 12, 19), ("SEND_B", 2, 19, 26), ("SEND_B", 1, 26, 33)]
    assert case.timeline().step_ns == 38


@pytest.mark.parametrize("bounds", [((0, 0), (0, 0), (0, 3)), ((0, 3), (3, 3), (3, 3)), ((0, 0), (0, 3), (3, 3))])
def test_empty_stages_at_either_end_of_one_rank(bounds: Bounds) -> None:
    template = build_template("gpipe", pp=1, vpp=3, microbatches=2, joint=False)
    model = dense_model(1)
    costs = item_costs(model, {"L0": (5, 6, 1)})
    case = Case(
        template.stage_ranks, template.actions, bounds, orders(template.actions, model, costs, bounds), model, costs
    )
    assert case.timeline().step_ns == case.timeline(overlap=False).step_ns == 2 * (5 + 6 + 1)


def test_output_is_sent_before_the_w_tasks_end() -> None:
    case = uniform_case("gpipe", 2, 1, 1, 2, 3)
    tasks = dict(case.costs.tasks) | {"W_MLP:L1": TaskCost(ns=50)}
    timeline = replace(case, costs=replace(case.costs, tasks=tasks)).timeline()
    sent = next(s for s in timeline.spans if s.name == "SEND_B")
    assert sent.start_ns == 2 + 2 + 3


def test_overlap_hides_communication() -> None:
    template = build_template("interleaved-1f1b", pp=2, vpp=2, microbatches=8, joint=True)
    model = moe_model(8)
    costs = uniform_costs(model, (100, 100, 100), comm_ns=60)
    bounds = ((0, 3), (3, 5), (5, 7), (7, 10))
    case = Case(
        template.stage_ranks, template.actions, bounds, orders(template.actions, model, costs, bounds), model, costs
    )
    on, off = case.timeline(), case.timeline(overlap=False)
    assert on.step_ns < 0.8 * off.step_ns
    assert on.split(0).compute_ns == off.split(0).compute_ns == 8 * 4 * 300
    assert case.timeline(contention=0.2).step_ns > on.step_ns


# --- mistakes -------------------------------------------------------------------------------------------------------


def two_ranks(rows: tuple[str, str]) -> Case:
    model = dense_model(2)
    costs = uniform_costs(model, (1, 1, 1))
    actions = [tuple(Action.parse(text) for text in row.split()) for row in rows]
    bounds = ((0, 2), (2, 4))
    return Case((0, 1), actions, bounds, orders(actions, model, costs, bounds), model, costs)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_deadlock_names_rank_action_and_what_it_waits_for(overlap: bool) -> None:
    with pytest.raises(ScheduleError, match="deadlock") as caught:
        two_ranks(("0F0 0B0 0B1 0F1", "1F0 1B0 1F1 1B1")).timeline(overlap=overlap)
    text = str(caught.value)
    assert "rank 0, action 0B1" in text
    assert "waits for 0F1 of rank 0" in text
    assert "rank 1, action 1F1" in text
    with pytest.raises(ScheduleError, match="waits for 0F0, which no rank runs"):
        two_ranks(("", "1F0 1B0")).timeline(overlap=overlap)


def test_a_deadlock_through_an_empty_stage_is_found() -> None:
    case = two_ranks(("0F0 0B0", "1F0"))
    case = replace(case, bounds=((0, 0), (0, 4)))
    case = replace(case, interleavings=orders(case.actions, case.model, case.costs, case.bounds))
    with pytest.raises(ScheduleError, match="rank 0, action 0B0.*waits for 1B0, which no rank runs"):
        case.timeline()


def test_an_order_against_the_dependencies_deadlocks() -> None:
    case = two_ranks(("0F0 0B0", "1F0 1B0"))
    entry = case.interleavings["1F"]
    swapped = replace(entry, order=entry.order[::-1])
    with pytest.raises(ScheduleError, match="rank 1, action 1F0.*waits for F_"):
        replace(case, interleavings={**case.interleavings, "1F": swapped}).timeline()


def test_other_mistakes_are_named() -> None:
    good = two_ranks(("0F0 0B0", "1F0 1B0"))
    rows = ("0F0 0F0 0W0 1B0", "1F0 1I0 (1F1;1W0)OVERLAP_F_B 1B0 0SEND_F0")
    with pytest.raises(ScheduleError) as caught:
        replace(good, actions=[[Action.parse(text) for text in row.split()] for row in rows]).timeline()
    text = str(caught.value)
    for said in (
        "'0F0': must be run once",
        "'0W0': must be in a later action than 0I0",
        "'1B0': must be of a stage on this rank",
        "'1B0': must be run once",
        "'0SEND_F0': must be a compute action",
        "interleavings.1F;1W",
    ):
        assert said in text
    wrong = replace(good.interleavings["0F"], order=("F_EMBED",))
    with pytest.raises(ScheduleError, match=r"interleavings\.0F.*exactly the tasks"):
        replace(good, interleavings={**good.interleavings, "0F": wrong}).timeline()
    with pytest.raises(ScheduleError, match="contention"):
        good.timeline(contention=-0.1)
    with pytest.raises(CostError, match=r"memory\.L0"):
        replace(good, costs=replace(good.costs, memory={})).timeline()


def test_simulate_reads_the_plan() -> None:
    """The plan's stages, actions and interleavings, and the table's contention, are what is simulated."""
    model = simple_model("ddmm")
    plan: Plan = simple_plan(model, pp=2, microbatches=3, joint=True)
    costs = item_costs(model, {}, default=(30, 40, 20), comm_ns=25, contention=0.4)
    same = simulate_schedule(
        [s.rank for s in plan.stages],
        plan.actions,
        [(s.start, s.stop) for s in plan.stages],
        plan.interleavings,
        model,
        costs,
        contention=0.4,
        label=plan.template,
    )
    assert simulate(plan, model, costs) == same
    assert simulate(plan, model, costs, contention=0.0).step_ns < same.step_ns
    moved = replace(plan, stages=(plan.stages[0], Stage(index=1, rank=1, start=5, stop=6, slots=1)))
    assert same.source == "simulated"
    with pytest.raises(ScheduleError, match="exactly the tasks"):
        simulate(moved, model, costs)
