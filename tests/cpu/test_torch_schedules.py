"""Our orders and CSV files against torch.distributed.pipelining's own, read from its classes (no process group)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.stage import PipelineStage

from tessera_rt.plan import Action
from tessera_rt.scheduler.templates import TEMPLATES, Template, build_template
from tessera_rt.scheduler.torch_csv import actions_from_csv, actions_to_csv, add_send_recv, plan_to_csv
from tessera_rt.testing.plans import simple_model, simple_plan

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="private parts of torch, as of 2.13"
)
PEERS = {
    "GPipe": ("gpipe", (1,), False),
    "Interleaved1F1B": ("interleaved-1f1b", (2, 3), False),
    "InterleavedZeroBubble": ("interleaved-zb", (2, 3), False),
    "ZBVZeroBubble": ("zb-v", (2,), False),
    "DualPipeV": ("dualpipe-v", (2,), True),
}  # torch's name: ours, stages a rank, joint pairs


@cache
def stage() -> Any:
    """What torch's schedule classes ask of a stage when they only make their order. Slow to make, so made once."""
    return mock.create_autospec(PipelineStage, instance=True)


def torch_schedule(cls: Any, pp: int, vpp: int, m: int) -> Any:
    of_torch = stage()
    of_torch.group_rank, of_torch.group_size, of_torch.submod, of_torch.num_stages = 0, pp, None, pp * vpp
    return cls(of_torch if issubclass(cls, schedules.PipelineScheduleSingle) else [of_torch] * vpp, m)


def torch_order(name: str, pp: int, vpp: int, m: int) -> list[list[str]]:
    """torch's compute actions as texts; its bubbles and reductions are left out."""
    rows = torch_schedule(schedules.get_schedule_class(name), pp, vpp, m).pipeline_order
    return [
        [str(action) for action in rows[rank] if action is not None and "REDUCE_GRAD" not in str(action)]
        for rank in range(pp)
    ]


def texts(template: Template) -> list[list[str]]:
    return [[str(action) for action in row] for row in template.actions]


def allowed_by_torch(name: str, pp: int, m: int) -> bool:
    if name == "DualPipeV":
        return m >= 2 * pp
    return not name.startswith("Interleaved") or m % max(1, m // pp) == 0


QUICK = ((1, 2, 4), (1, 2, 3, 4, 5, 6, 8, 10, 12))
WIDE = ((1, 2, 3, 4, 5, 8), (*range(1, 20), 24, 32, 40))


@pytest.mark.parametrize(("ranks", "microbatches"), [QUICK, pytest.param(*WIDE, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PEERS)
def test_orders_equal_those_of_torch(name: str, ranks: tuple[int, ...], microbatches: tuple[int, ...]) -> None:
    """For every number of micro-batches torch allows; ours also run with the others."""
    ours, stages, joint = PEERS[name]
    compared = 0
    for pp in ranks:
        for vpp in stages:
            for m in microbatches:
                if allowed_by_torch(name, pp, m):
                    template = build_template(ours, pp=pp, vpp=vpp, microbatches=m, joint=joint)
                    assert texts(template) == torch_order(name, pp, vpp, m), (pp, vpp, m)
                    compared += 1
                else:
                    with pytest.raises(ValueError, match="microbatches"):
                        torch_order(name, pp, vpp, m)
    assert compared >= 17


def test_1f1b_equals_that_of_torch() -> None:
    """torch numbers the last rank's forwards from 1 in this listing (what it runs is numbered from 0)."""
    for pp in (2, 3, 8):
        for m in range(pp, 12):
            wanted = torch_order("1F1B", pp, 1, m)
            forwards = [i for i, text in enumerate(wanted[-1]) if "F" in text]
            assert wanted[-1][forwards[0]] == f"{pp - 1}F1"
            for number, i in enumerate(forwards):
                wanted[-1][i] = f"{pp - 1}F{number}"
            assert texts(build_template("1f1b", pp=pp, vpp=1, microbatches=m, joint=False)) == wanted, (pp, m)


def torch_rows(rows: Any) -> dict[int, list[Any]]:
    return {rank: [schedules._Action.from_str(str(action)) for action in row] for rank, row in enumerate(rows)}


@pytest.mark.parametrize("name", TEMPLATES)
def test_messages_are_placed_as_torch_places_them(name: str) -> None:
    for pp, m in ((2, 4), (3, 6), (4, 8)):
        vpp = 1 if name in ("1f1b", "zb-h1", "zb-h2") else 2
        template = build_template(name, pp=pp, vpp=vpp, microbatches=m, joint=True)
        ranks = template.stage_ranks
        wanted = schedules._add_send_recv(torch_rows(template.actions), lambda s, ranks=ranks: ranks[s], len(ranks))
        got = add_send_recv(template.actions, ranks)
        assert [list(map(str, row)) for row in got] == [list(map(str, wanted[rank])) for rank in range(pp)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_torch_loads_our_files_and_we_load_what_it_writes(name: str, tmp_path: Path) -> None:
    pp, m = 2, 6
    vpp = 1 if name in ("1f1b", "zb-h1", "zb-h2") else 2
    order = build_template(name, pp=pp, vpp=vpp, microbatches=m, joint=True)
    plan = simple_plan(
        simple_model("dmd"), pp=pp, vpp=vpp, microbatches=m, actions=order.actions, placement=order.stage_ranks
    )
    runtime = torch_schedule(schedules._PipelineScheduleRuntime, pp, vpp, m)
    for comms, form in ((False, "compute_only"), (True, "compute_comms")):
        ours, theirs = tmp_path / f"{form}.csv", tmp_path / f"torch_{form}.csv"
        ours.write_text(plan_to_csv(plan, comms=comms))
        runtime._load_csv(str(ours), form)
        assert runtime.stage_index_to_group_rank == dict(enumerate(order.stage_ranks))
        runtime._dump_csv(str(theirs), form)
        assert actions_from_csv(theirs.read_text()) == order.actions
        if comms:
            loaded = [list(map(str, row)) for row in runtime.pipeline_order_with_comms.values()]
            assert loaded == [line.split(",") for line in ours.read_text().splitlines()]


def test_we_load_torchs_own_schedules() -> None:
    """With bubbles, messages, sharding and reduction in their rows."""
    for name, (ours, stages, joint) in PEERS.items():
        template = build_template(ours, pp=2, vpp=stages[0], microbatches=8, joint=joint)
        for comms in (False, True) if stages[0] > 1 else (False,):
            rows = get_schedule_ops(name, 2, 8, stages[0] if stages[0] > 1 else None, with_comms=comms)
            texts_ = [["" if action is None else str(action) for action in row] for row in rows]
            text = "\n".join(",".join(row) for row in texts_)
            assert actions_from_csv(text) == template.actions, (name, comms)


def test_notation_is_torchs() -> None:
    for text in ("0F3", "12B0", "3I7", "3W7", "(0F4;3B1)OVERLAP_F_B", "2SEND_F1", "2RECV_B1"):
        assert str(schedules._Action.from_str(text)) == str(Action.parse(text)) == text
    assert actions_to_csv([[Action.parse("0F0"), Action.parse("(0F4;3B1)OVERLAP_F_B")]]) == "0F0,(0F4;3B1)OVERLAP_F_B\n"
