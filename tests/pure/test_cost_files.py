"""Cost table files: exact round trips, files made by hand, and everything that can be wrong in one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_rt.cost_sources.device import load_device
from tessera_rt.cost_sources.roofline import roofline_costs
from tessera_rt.costs import CostTable, ItemMemory, Link, Provenance, Recompute, TaskCost, Workload
from tessera_rt.errors import CostError
from tessera_rt.files.cost_files import cost_table_from_yaml, cost_table_to_yaml, load_cost_table, save_cost_table
from tessera_rt.files.model_files import load_model
from tessera_rt.tasks import Pass, chunk_tasks
from tessera_rt.testing.costs import dense_model, item_costs, moe_model

BY_HAND = """
items:
  EMBED: {tasks: {F_EMBED: 0, B_EMBED: 0}}
  L0:
    tasks: {F_ATTN: 1000, F_MLP: 2000, B_MLP: 2000, W_MLP: {ns: 1500, samples: 3}, B_ATTN: 1000, W_ATTN: 1000}
    memory: {weights: 4096, activations: 1024}
  HEAD: {tasks: {F_HEAD: 500, B_HEAD: 500, W_HEAD: 500}}
"""

counts = st.integers(0, 2**62)
texts = st.text(max_size=20)


@st.composite
def tables(draw: st.DrawFn) -> CostTable:
    model = moe_model(draw(st.integers(1, 2)), mtp=draw(st.integers(0, 1)), shared=draw(st.booleans()))
    names = [name for pass_ in (Pass.F, Pass.B) for name in chunk_tasks(model.items, pass_).names]
    cost = st.builds(
        TaskCost, ns=counts, bytes=counts, flops=counts, spread=st.floats(0, 1e300), samples=st.integers(0, 9)
    )
    memory = st.builds(ItemMemory, **dict.fromkeys(ItemMemory.__slots__, counts))
    return CostTable(
        fingerprint=model.fingerprint,
        workload=Workload(
            tokens=draw(st.integers(1, 9999)),
            context=draw(st.integers(1, 9999)),
            dp=draw(st.integers(1, 9)),
            ep=draw(st.integers(1, 9)),
            dtype=draw(st.sampled_from(["bf16", "fp16", "fp32", "fp64"])),
            recompute=draw(st.sampled_from(Recompute)),
            optimizer=draw(st.sampled_from(["adamw", "sgd"])),
            momentum=draw(st.booleans()),
            shard_optimizer=draw(st.booleans()),
            combine=draw(st.sampled_from(["rows", "reduced"])),
        ),
        provenance=Provenance(
            source=draw(texts), device=draw(texts), versions=draw(texts), notes=tuple(draw(st.lists(texts, max_size=2)))
        ),
        tasks={name: draw(cost) for name in names},
        memory={item.label: draw(memory) for item in model.items},
        link=Link(latency_ns=draw(counts), bytes_per_s=draw(st.floats(0, exclude_min=True) | st.just(float("inf")))),
        contention=draw(st.floats(0, 10)),
        comm_sms=draw(st.integers(0, 132)),
        pairs=draw(st.dictionaries(texts, counts, max_size=3)),
    )


@given(tables())
def test_round_trip_is_exact(costs: CostTable) -> None:
    assert cost_table_from_yaml(cost_table_to_yaml(costs)) == costs


def test_saved_roofline_comes_back_equal(tmp_path: Path) -> None:
    model = load_model("qwen3-next-80b")
    costs = roofline_costs(model, Workload(tokens=4096, context=65536, ep=32), load_device("h800"))
    path = tmp_path / "costs.yaml"
    save_cost_table(costs, path)
    assert load_cost_table(path) == costs == load_cost_table(path, model=model)
    text = path.read_text(encoding="utf-8")
    assert "  L3:\n" in text and "F_ATTN" in text and "F_ATTN:L3" not in text  # grouped by item
    assert [file.name for file in tmp_path.iterdir()] == ["costs.yaml"]


def test_a_file_made_by_hand_needs_tasks_only() -> None:
    model = dense_model(1)
    costs = cost_table_from_yaml(BY_HAND, model=model)
    assert costs.tasks["F_ATTN:L0"] == TaskCost(ns=1000) and costs.tasks["W_MLP:L0"] == TaskCost(ns=1500, samples=3)
    assert costs.tasks["F_EMBED"].ns == 0 and costs.tasks["W_HEAD"].ns == 500
    assert costs.memory["L0"] == ItemMemory(weights=4096, activations=1024)
    assert costs.memory["HEAD"] == ItemMemory()
    assert costs.fingerprint == model.fingerprint and costs.link == Link() and costs.provenance.source == "table"
    assert "states no workload" in costs.provenance.notes[0]
    assert costs.apply(chunk_tasks(model.items, Pass.B)).total_ns() == 6500
    without_model = cost_table_from_yaml(BY_HAND)
    assert without_model.fingerprint == "" and without_model.tasks == costs.tasks


def test_a_table_for_another_model_is_refused() -> None:
    text = cost_table_to_yaml(item_costs(dense_model(1), {"L0": (1, 2, 3)}))
    with pytest.raises(CostError) as error:
        cost_table_from_yaml(text, model=dense_model(2))
    assert {problem.field for problem in error.value.problems} == {"fingerprint", "items.L1.tasks"}
    with pytest.raises(CostError) as error:
        cost_table_from_yaml(BY_HAND.replace("  L0:", "  L7:"), model=moe_model(1))
    text = str(error.value)
    assert "items.L7" in text and "EMBED, L0, HEAD" in text
    assert "items.L0.tasks = None: must be complete; add B_ATTN, B_COMB" in text
    with pytest.raises(CostError, match=r"items\.L0\.tasks\.F_SHARED .* one of .*F_MLP"):
        cost_table_from_yaml(BY_HAND.replace("F_MLP: 2000", "F_MLP: 2000, F_SHARED: 1"), model=dense_model(1))


def test_all_problems_of_a_file_are_reported_at_once() -> None:
    text = """
    contention: .nan
    colour: green
    workload: {tokens: 0, context: 4, dtype: fp8}
    link: {bytes_per_s: 0}
    items:
      L0:
        tasks: {F_ATTN: -1, F_MLP: 1.5, B_MLP: fast, W_MLP: {ns: .nan, size: 1}, F_HEAD: 1, "F_ATTN:L0": 1, BUBBLE: 1}
        memory: {weights: -3}
      L01: {}
      HEAD: 3
    """
    with pytest.raises(CostError) as error:
        cost_table_from_yaml(text, "mine.yaml")
    assert str(error.value).startswith("mine.yaml: 16 problems")
    assert {problem.field for problem in error.value.problems} == {
        "contention",
        "colour",
        "workload.tokens",
        "workload.dtype",
        "link.bytes_per_s",
        "items.L0.tasks.F_ATTN.ns",
        "items.L0.tasks.F_MLP.ns",
        "items.L0.tasks.B_MLP.ns",
        "items.L0.tasks.W_MLP.ns",
        "items.L0.tasks.W_MLP.size",
        "items.L0.tasks.F_HEAD",
        "items.L0.tasks.F_ATTN:L0",
        "items.L0.tasks.BUBBLE",
        "items.L0.memory.weights",
        "items.L01",
        "items.HEAD",
    }


@pytest.mark.parametrize(
    "text",
    ["", "   \n", "7", "[1]", "items: []", "items: {L0: {tasks: 3}}", "items: {L0: {}, L0: {}}", "version: 2\n..."],
)
def test_what_is_no_cost_table(text: str) -> None:
    with pytest.raises(CostError):
        cost_table_from_yaml(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CostError, match="exists"):
        load_cost_table(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CostError, match="can be read"):
        load_cost_table(tmp_path / "binary.yaml")


@settings(max_examples=100)
@given(st.data())
def test_a_file_that_was_cut_off_is_never_a_table(data: st.DataObject) -> None:
    text = cost_table_to_yaml(item_costs(dense_model(1), {"L0": (1, 2, 3)}))
    length = data.draw(st.integers(0, len(text.rstrip()) - 1))
    with pytest.raises(CostError):
        cost_table_from_yaml(text[:length])
