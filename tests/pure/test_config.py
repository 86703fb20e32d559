"""Training configurations: defaults, every fault at once, overrides, round trip."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.config import (
    MOST_MICROBATCHES,
    PlanSection,
    TrainConfig,
    config_from_dict,
    config_to_yaml,
    load_config,
    run_folder,
)
from tessera_rt.costs import Recompute
from tessera_rt.errors import SpecError
from tessera_rt.files.yaml_text import dump_yaml, parse_yaml
from tessera_rt.planner import build
from tessera_rt.planner.build import OBJECTIVES, PARTITIONERS
from tessera_rt.scheduler.templates import PADS, TEMPLATES

MODEL: dict[str, Any] = {
    "name": "tiny",
    "hidden": 32,
    "vocab": 300,
    "context": 256,
    "layers": [
        {
            "repeat": 2,
            "attention": {"kind": "softmax", "heads": 2, "kv_heads": 1, "head_dim": 16, "rope_dim": 16},
            "feed_forward": {"kind": "moe", "intermediate": 16, "experts": 4, "top_k": 2},
        }
    ],
}


def config(**sections: dict[str, Any]) -> TrainConfig:
    return config_from_dict({"model": MODEL, **sections}, "tiny.yaml")


def faults(data: object, overrides: tuple[str, ...] = ()) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        config_from_dict(data, "tiny.yaml", overrides=overrides)
    return {problem.field: str(problem) for problem in caught.value.problems}


def test_only_the_model_must_be_given() -> None:
    found = config()
    assert found.name == "tiny" and found.model.hidden == 32
    assert found.mesh.world == 1 and found.data.sequence == 128 and found.optimizer.kind == "adamw"
    assert found.vocab == 256  # bytes, though the model knows more
    assert faults({}).keys() == {"model"}


def test_derived_figures() -> None:
    found = config(
        mesh={"pp": 2, "vpp": 2, "dp": 3, "ep": 2},
        data={"sequence": 64, "microbatch_size": 5, "microbatches": 7},
        run={"dtype": "fp64"},
    )
    assert found.mesh.world == 12 and found.data_ranks == 6 and found.rows_per_step == 6 * 5 * 7
    workload = found.workload(Recompute.FULL)
    assert (workload.tokens, workload.context, workload.dp, workload.ep) == (320, 64, 3, 2)
    assert (workload.dtype, workload.recompute, workload.optimizer) == ("fp64", Recompute.FULL, "adamw")
    assert not workload.momentum
    sgd = config(optimizer={"kind": "sgd", "momentum": 0.9}).workload()
    assert sgd.optimizer == "sgd" and sgd.momentum


def test_all_faults_at_once_with_the_nearest_name() -> None:
    found = faults(
        {
            "model": {**MODEL, "hiden": 3},
            "mash": {},
            "mesh": {"pp": 0, "vpp": "two"},
            "data": {"sequense": 5, "held_out": 1.0},
            "optimizer": {"lr": float("nan")},
            "run": {"dtype": "float"},
        },
        overrides=("run.steps", "mesh.dp.x=3"),
    )
    assert {"mash", "mesh.pp", "mesh.vpp", "data.sequense", "optimizer.lr", "run.dtype"} <= found.keys()
    assert "did you mean 'mesh'" in found["mash"] and "did you mean 'sequence'" in found["data.sequense"]
    assert "override" in found  # run.steps has no value
    assert any(name.startswith("data.held_out") for name in found)
    assert any(name.startswith("model.") and "hiden" in name for name in found)


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"data": {"files": ["a"], "tokens": "b"}}, "data.tokens"),
        ({"data": {"dtype": "int32"}}, "data.dtype"),
        ({"data": {"vocab": 255}}, "data.vocab"),
        ({"data": {"tokens": "b.npy", "vocab": 301}}, "model.vocab"),
        ({"data": {"sequence": 257}}, "data.sequence"),
        ({"data": {"held_out": 0.1, "held_out_files": ["a"]}}, "data.held_out"),
        ({"plan": {"file": "plan.yaml", "pad": "shadow"}}, "plan.file"),
        ({"plan": {"template": "1f1bb"}}, "plan.template"),
        ({"optimizer": {"momentum": 0.9}}, "optimizer.momentum"),
        ({"run": {"timeout_s": 1e30}}, "run.timeout_s"),
        ({"run": {"timeout_s": 0}}, "run.timeout_s"),
        ({"data": {"microbatches": 65537}}, "data.microbatches"),
    ],
)
def test_contradictions(sections: dict[str, Any], field: str) -> None:
    assert faults({"model": MODEL, **sections}).keys() == {field}


def test_a_model_too_small_for_bytes() -> None:
    assert faults({"model": {**MODEL, "vocab": 100}}).keys() == {"model.vocab"}


@pytest.mark.parametrize("data", [None, [], "text", 3, {"model": 3}, {"model": ""}, {"model": "no-such-model"}])
def test_what_is_no_configuration(data: object) -> None:
    assert faults(data)


def test_overrides_set_single_values_as_yaml() -> None:
    data = {"model": MODEL, "run": {"steps": 3, "seed": 1}}
    texts = ("run.steps=7", "optimizer.lr=1e-4", "data.files=[a.txt, b.txt]", "model.hidden=64", "plan.template=")
    found = config_from_dict(data, overrides=texts)
    assert (found.run.steps, found.run.seed, found.optimizer.lr, found.model.hidden) == (7, 1, 1e-4, 64)
    assert [Path(name).name for name in found.data.files] == ["a.txt", "b.txt"]
    assert data["run"] == {"steps": 3, "seed": 1}
    assert "run.stepz" in faults(data, ("run.stepz=3",))
    assert "run.steps" in faults(data, ("run.steps=3x",))


def test_files_are_looked_up_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(dump_yaml(MODEL))
    (tmp_path / "run.yaml").write_text("model: model.yaml\ndata: {files: [texts/*.txt]}\nplan: {costs: costs.yaml}\n")
    found = load_config(tmp_path / "run.yaml", ["run.steps=3"])
    assert found.name == "run" and found.model.name == "tiny" and found.run.steps == 3
    assert found.data.files == (str(tmp_path / "texts/*.txt"),)
    assert found.plan.costs == str(tmp_path / "costs.yaml")
    assert config(plan={"costs": "roofline"}).plan.costs == "roofline"
    with pytest.raises(SpecError, match="existing configuration file"):
        load_config(tmp_path / "other.yaml")


def test_a_preset_names_the_model() -> None:
    assert config_from_dict({"model": "mixtral-8x7b"}).model.name == "mixtral-8x7b"


def test_choices_are_those_of_planner_and_scheduler() -> None:
    def choices(field: str) -> set[object]:
        annotation = PlanSection.model_fields[field].annotation
        literals = [annotation, *typing.get_args(annotation)]
        return {value for one in literals for value in typing.get_args(one) if isinstance(value, str)}

    assert choices("objective") == set(OBJECTIVES)
    assert choices("partitioner") == set(PARTITIONERS)
    assert choices("pad") == set(PADS)
    assert choices("recompute") == {"auto", *Recompute}
    assert MOST_MICROBATCHES == build.MOST_MICROBATCHES


positive = st.integers(1, 8)


def some_of(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


@given(
    mesh=some_of(pp=positive, vpp=positive, dp=positive, ep=positive),
    data=some_of(files=st.lists(st.sampled_from(["/a", "/b/*"])), sequence=positive, held_out=st.just(0.5)),
    plan=some_of(template=st.sampled_from([None, *TEMPLATES]), overlap=st.booleans()),
    optimizer=some_of(lr=st.floats(1e-9, 1), beta1=st.floats(0, 0.999)),
    run=some_of(steps=st.integers(0, 10**6), dtype=st.sampled_from(["fp32", "fp64"])),
)
def test_round_trip(**sections: dict[str, Any]) -> None:
    found = config(**sections)
    assert config_from_dict(parse_yaml(config_to_yaml(found), "again"), "tiny.yaml") == found


def test_a_new_run_never_takes_an_old_folder(tmp_path: Path) -> None:
    wanted = tmp_path / "run"
    new = config(run={"folder": str(wanted)})
    assert run_folder(new) == wanted
    wanted.mkdir()
    assert run_folder(new) == wanted
    (wanted / "metrics.jsonl").touch()
    assert run_folder(new) == tmp_path / "run-2"
    (tmp_path / "run-2").mkdir()
    (tmp_path / "run-2" / "x").touch()
    assert run_folder(new) == tmp_path / "run-3"
    assert run_folder(config(run={"folder": str(wanted), "resume": "latest"})) == wanted
    assert run_folder(config()) == Path("runs/tiny")
