"""Reading and writing model descriptions: what is written comes back, and every fault of a file is told at once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.errors import Problem, SpecError
from tessera_rt.files import model_validation
from tessera_rt.files.model_files import check_model, load_model, model_from_dict, model_to_yaml, preset_ids
from tessera_rt.files.yaml_text import parse_yaml
from tessera_rt.model_spec import (
    Activation,
    Attention,
    AttentionKind,
    FeedForward,
    FeedForwardKind,
    LayerSpec,
    ModelSpec,
    Router,
)
from tessera_rt.testing.strategies import model_specs

SOFTMAX = {"kind": "softmax", "heads": 4, "kv_heads": 2, "head_dim": 8, "rope_dim": 8}
GDN = {"kind": "gated_delta_net", "heads": 4, "kv_heads": 2, "head_dim": 8, "v_dim": 8, "conv": 4}
DENSE = {"kind": "dense", "intermediate": 32}
MOE = {"kind": "moe", "intermediate": 16, "experts": 8, "top_k": 2}


def model(*layers: object, **fields: object) -> dict[str, Any]:
    return {"name": "small", "hidden": 16, "vocab": 17, "layers": list(layers), **fields}


def layer(attention: object = None, feed_forward: object = None, **fields: object) -> dict[str, Any]:
    return {"attention": attention or SOFTMAX, "feed_forward": feed_forward or DENSE, **fields}


def faults(data: object) -> dict[str, Problem]:
    """The problems of a description by field."""
    with pytest.raises(SpecError) as caught:
        model_from_dict(data, "small.yaml")
    assert caught.value.headline.startswith("small.yaml: ")
    return {problem.field: problem for problem in caught.value.problems}


def only_fault(data: object) -> Problem:
    found = faults(data)
    assert len(found) == 1, found
    return next(iter(found.values()))


def text_faults(text: str, folder: Path, name: str = "model.yaml") -> dict[str, Problem]:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        load_model(path)
    assert str(path) in caught.value.headline
    return {problem.field: problem for problem in caught.value.problems}


# Round trips.


@given(model_specs())
def test_written_model_reads_back_equal(spec: ModelSpec) -> None:
    data = parse_yaml(model_to_yaml(spec), "text")
    again = model_from_dict(data, "text")
    assert again == spec
    assert again.fingerprint == spec.fingerprint


@given(model_specs(max_layers=24))
def test_plain_data_reads_back_equal(spec: ModelSpec) -> None:
    assert check_model(spec) == spec


def test_file_reads_back_equal(tmp_path: Path) -> None:
    spec = load_model("qwen3-next-80b")
    path = tmp_path / "copy.yaml"
    path.write_text(model_to_yaml(spec), encoding="utf-8")
    assert load_model(path) == load_model(str(path)) == spec
    json_path = tmp_path / "copy.json"
    json_path.write_text(json.dumps(spec.to_dict()), encoding="utf-8")
    assert load_model(json_path) == spec


@pytest.mark.parametrize(
    "text",
    ["a\x85b", "a\u2028b", "1e-5", "010", "no", "~", "1:30", "- a", "a: b", "'", "=", "<<", "2024-13-01", " x ", "#"],
)
def test_texts_that_look_like_something_else_stay_texts(text: str) -> None:
    spec = model_from_dict(model(layer(), name=text, source=text), "x")
    again = model_from_dict(parse_yaml(model_to_yaml(spec), "text"), "text")
    assert (again.name, again.source) == (text, text)


def test_patterns_are_written_once() -> None:
    spec = load_model("nemotron-3-nano")
    text = model_to_yaml(spec)
    assert text.count("mamba2") < 6  # there are 23 such layers
    written = parse_yaml(model_to_yaml(load_model("qwen3-next-80b")), "text")
    assert isinstance(written, dict)
    assert written["layers"][0]["repeat"] == 12
    assert [entry.get("repeat", 1) for entry in written["layers"][0]["layers"]] == [3, 1]


def test_deep_patterns_stay_within_the_depth_that_is_read() -> None:
    """Layers whose repetitions nest deeper than the reader allows, each level a repetition and a layer of its own."""
    kinds = [
        LayerSpec(
            attention=Attention(kind=AttentionKind.NONE),
            feed_forward=FeedForward(kind=FeedForwardKind.DENSE, intermediate=size),
        )
        for size in range(1, 12)
    ]
    layers: list[LayerSpec] = []
    for kind in kinds:
        layers = [*layers, *layers, kind]
    spec = ModelSpec(name="deep", hidden=4, vocab=4, layers=tuple(layers))
    assert model_from_dict(parse_yaml(model_to_yaml(spec), "text"), "text") == spec


def test_groups_expand_in_order() -> None:
    spec = model_from_dict(
        model({"repeat": 2, "layers": [layer(GDN, MOE, repeat=3), layer()]}, layer(feed_forward=MOE)), "x"
    )
    kinds = [(item.attention.kind, item.feed_forward.kind) for item in spec.layers]
    gdn = (AttentionKind.GATED_DELTA_NET, FeedForwardKind.MOE)
    soft = (AttentionKind.SOFTMAX, FeedForwardKind.DENSE)
    assert kinds == [gdn, gdn, gdn, soft, gdn, gdn, gdn, soft, (AttentionKind.SOFTMAX, FeedForwardKind.MOE)]


def test_left_out_parts_are_none() -> None:
    spec = model_from_dict(model({"attention": SOFTMAX}, {"feed_forward": DENSE}), "x")
    assert spec.layers[0].feed_forward == FeedForward(kind=FeedForwardKind.NONE)
    assert spec.layers[1].attention == Attention(kind=AttentionKind.NONE)


def test_private_models_mirror_the_words() -> None:
    """Same fields and defaults: a field added to one and not to the other would be lost in files."""
    pairs: list[tuple[Any, Any, set[str]]] = [
        (Attention, model_validation._Attention, set()),
        (Router, model_validation._Router, set()),
        (FeedForward, model_validation._FeedForward, {"router"}),
        (ModelSpec, model_validation._Model, {"mtp"}),
    ]
    for word, private, other in pairs:
        fields = {field.name: field for field in dataclasses.fields(word)}
        assert set(fields) == set(private.model_fields)
        for name, field in private.model_fields.items():
            if name in other:
                continue
            if field.is_required():
                assert fields[name].default is dataclasses.MISSING
            else:
                assert fields[name].default == field.default, name
    assert FeedForward(kind=FeedForwardKind.MOE).router == Router(**model_validation._Router().model_dump())
    for kinds in (model_validation._ATTENTION_FIELDS, model_validation._FEED_FORWARD_FIELDS):
        assert set(kinds) == set(type(next(iter(kinds))))


# Faults.


def test_all_faults_of_a_file_are_told_at_once() -> None:
    found = faults(
        model(
            layer(SOFTMAX | {"kv_heads": 3}, MOE | {"top_k": 9}),
            {"repeat": 0, "layers": [layer(GDN | {"conv": -1}), layer(feed_forward=DENSE | {"activation": "swish"})]},
            layer(SOFTMAX | {"heads": True}, MOE | {"router": {"scale": float("nan"), "groups": 3}}),
            vocab="many",
            norm_eps=float("inf"),
            contexts=7,
        )
    )
    assert {field: problem.value for field, problem in found.items() if field not in ("norm_eps",)} == {
        "layers[0].attention.kv_heads": 3,
        "layers[0].feed_forward.top_k": 9,
        "layers[1].repeat": 0,
        "layers[1].layers[0].attention.conv": -1,
        "layers[1].layers[1].feed_forward.activation": "swish",
        "layers[2].attention.heads": True,
        "layers[2].feed_forward.router.scale": pytest.approx(float("nan"), nan_ok=True),
        "layers[2].feed_forward.router.groups": 3,
        "vocab": "many",
        "contexts": 7,
    }
    assert found["layers[0].feed_forward.top_k"].allowed == "an integer from 1 to experts (8)"
    assert found["layers[0].attention.kv_heads"].allowed == "a divisor of heads (4)"
    assert found["layers[2].attention.heads"].allowed == "an integer from 0 to 2147483647"
    assert found["layers[1].repeat"].allowed == "an integer from 1 to 10000"
    assert found["norm_eps"].allowed == "a finite number above 0"
    assert found["contexts"].remedy == "did you mean 'context'?"
    swiglu = found["layers[1].layers[1].feed_forward.activation"]
    assert swiglu.allowed == f"one of {', '.join(Activation)}"


@pytest.mark.parametrize("name", ["hidden", "vocab", "context"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, None, "4", [4], 2**31])
def test_sizes_of_the_model(name: str, value: object) -> None:
    problem = only_fault(model(layer(), **{name: value}))
    assert (problem.field, problem.value, problem.allowed) == (name, value, "an integer from 1 to 2147483647")


@pytest.mark.parametrize("name", ["norm_eps", "rope_theta"])
@pytest.mark.parametrize("value", [0, 0.0, -1e-6, float("nan"), float("inf"), True, "1e-6", 10**400])
def test_numbers_of_the_model(name: str, value: object) -> None:
    problem = only_fault(model(layer(), **{name: value}))
    assert (problem.field, problem.allowed) == (name, "a finite number above 0")


def test_whole_numbers_are_numbers() -> None:
    spec = model_from_dict(model(layer(), rope_theta=10000, norm_eps=1), "x")
    assert spec.rope_theta == 10000.0
    assert type(spec.rope_theta) is float  # so that the fingerprint does not depend on how it is written


@pytest.mark.parametrize("value", ["yes", 1, 0.0, None])
def test_flags(value: object) -> None:
    assert only_fault(model(layer(), tied=value)).allowed == "true or false"


@pytest.mark.parametrize("value", ["", "  ", "two\nlines", 3, None])
def test_names(value: object) -> None:
    assert only_fault(model(layer(), name=value)).allowed == "a text of one line, not empty"


@pytest.mark.parametrize("name", ["name", "hidden", "vocab", "layers"])
def test_missing_fields(name: str) -> None:
    data = model(layer())
    del data[name]
    problem = only_fault(data)
    assert problem.field == name
    assert str(problem).startswith(f"{name} = (missing): must be a")


@pytest.mark.parametrize(
    ("attention", "field", "allowed"),
    [
        (
            {"kind": "softmax", "kv_heads": 2, "head_dim": 8},
            "heads",
            "an integer from 1 to 2147483647 for kind softmax",
        ),
        (SOFTMAX | {"head_dim": 0}, "head_dim", "an integer from 1 to 2147483647 for kind softmax"),
        (SOFTMAX | {"rope_dim": 10}, "rope_dim", "an even number from 0 to 8"),
        (SOFTMAX | {"rope_dim": 3}, "rope_dim", "an even number from 0 to 8"),
        (SOFTMAX | {"window": 4}, "window", "left out: attention of kind softmax does not use it"),
        (SOFTMAX | {"kind": "sliding"}, "window", "an integer from 1 to 2147483647 for kind sliding"),
        (GDN | {"heads": 3}, "kv_heads", "a divisor of heads (3)"),
        (GDN | {"bias": True}, "bias", "left out: attention of kind gated_delta_net does not use it"),
        (
            {"kind": "mla", "heads": 4, "kv_rank": 8, "head_dim": 8, "rope_dim": 4},
            "v_dim",
            "an integer from 1 to 2147483647 for kind mla",
        ),
        (
            {"kind": "mamba1", "inner": 4, "state": 4, "conv": 4},
            "dt_rank",
            "an integer from 1 to 2147483647 for kind mamba1",
        ),
        (
            {"kind": "mamba2", "heads": 4, "head_dim": 4, "state": 4, "conv": 4, "groups": 3},
            "groups",
            "a divisor of heads (4)",
        ),
        ({"kind": "none", "heads": 2}, "heads", "left out: attention of kind none does not use it"),
        (SOFTMAX | {"kind": "Softmax"}, "kind", f"one of {', '.join(AttentionKind)}"),
        ({"heads": 2}, "kind", f"one of {', '.join(AttentionKind)}"),
    ],
)
def test_what_each_attention_needs(attention: dict[str, object], field: str, allowed: str) -> None:
    problem = only_fault(model(layer(attention)))
    assert (problem.field, problem.allowed) == (f"layers[0].attention.{field}", allowed)


@pytest.mark.parametrize(
    ("feed_forward", "field", "allowed"),
    [
        ({"kind": "dense"}, "intermediate", "an integer from 1 to 2147483647 for kind dense"),
        (DENSE | {"experts": 4}, "experts", "left out: feed_forward of kind dense does not use it"),
        (DENSE | {"router": {"scale": 2.0}}, "router.scale", "left out: feed_forward of kind dense has no router"),
        (MOE | {"top_k": 0}, "top_k", "an integer from 1 to 2147483647 for kind moe"),
        (MOE | {"top_k": 9}, "top_k", "an integer from 1 to experts (8)"),
        (MOE | {"latent": 16}, "latent", "an integer from 0 to 15 (smaller than hidden; 0: none)"),
        (MOE | {"shared_gated": True}, "shared_gated", "false without a shared expert"),
        (MOE | {"router": {"groups": 3}}, "router.groups", "a divisor of experts (8)"),
        (MOE | {"router": {"groups": 2, "keep_groups": 3}}, "router.keep_groups", "an integer from 1 to groups (2)"),
        (
            MOE | {"top_k": 3, "router": {"groups": 4, "keep_groups": 1}},
            "top_k",
            "an integer from 1 to 2 (the experts of the kept groups)",
        ),
        (MOE | {"router": {"score": "tanh"}}, "router.score", "one of softmax, sigmoid"),
        (
            MOE | {"router": {"score": "sigmoid", "softmax_after_topk": True}},
            "router.softmax_after_topk",
            "false for score sigmoid",
        ),
        (MOE | {"router": {"aux_coefficient": -0.1}}, "router.aux_coefficient", "a finite number, 0 or above"),
        (MOE | {"router": None}, "router", "a mapping"),
        (MOE | {"expert": 4}, "expert", "left out: there is no such key"),
    ],
)
def test_what_each_feed_forward_needs(feed_forward: dict[str, object], field: str, allowed: str) -> None:
    problem = only_fault(model(layer(feed_forward=feed_forward)))
    assert (problem.field, problem.allowed) == (f"layers[0].feed_forward.{field}", allowed)


def test_a_layer_needs_one_of_its_parts() -> None:
    for empty in ({}, {"repeat": 2}, {"attention": {"kind": "none"}, "feed_forward": {"kind": "none"}}):
        problem = only_fault(model(layer(), empty))
        assert (problem.field, problem.allowed) == ("layers[1]", "a layer with at least one of the two")


def test_lists_of_layers() -> None:
    assert only_fault(model()).field == "layers"
    assert only_fault(model({"layers": []})).field == "layers[0].layers"
    assert only_fault(model(layers="many")).allowed == "a list of layer entries"
    assert only_fault(model(None)).allowed == "a mapping with attention and feed_forward, or with layers"
    assert only_fault(model(layer(), mtp=[layer(GDN | {"conv": 0})])).field == "mtp[0].attention.conv"
    mixed = only_fault(model({"layers": [layer()], "attention": SOFTMAX}))
    assert (mixed.field, mixed.allowed) == ("layers[0].attention", "left out where layers are given")


def test_equal_layers_are_faulted_once() -> None:
    bad = LayerSpec(
        attention=Attention(kind=AttentionKind.SOFTMAX, heads=4, kv_heads=3, head_dim=8),
        feed_forward=FeedForward(kind=FeedForwardKind.NONE),
    )
    good = LayerSpec(
        attention=Attention(kind=AttentionKind.NONE),
        feed_forward=FeedForward(kind=FeedForwardKind.DENSE, intermediate=4),
    )
    spec = ModelSpec(name="bad", hidden=4, vocab=4, layers=(good, bad, bad, good, bad), mtp=(bad,))
    with pytest.raises(SpecError) as caught:
        check_model(spec)
    fields = [problem.field for problem in caught.value.problems]
    assert fields == ["layers[1].attention.kv_heads", "mtp[0].attention.kv_heads"]


def test_too_many_layers_are_refused_before_they_are_made() -> None:
    million = model({"repeat": 1000, "layers": [layer(repeat=1000)]})
    assert only_fault(million).value == "1000000 layers"


def test_nesting_ends() -> None:
    deep: dict[str, Any] = layer()
    for _ in range(model_validation.MAX_DEPTH):
        deep = {"layers": [deep]}
    assert only_fault(model(deep)).allowed == "nested at most 8 deep"
    assert model_from_dict(model(deep["layers"][0]), "x").layers


def test_a_list_that_contains_itself(tmp_path: Path) -> None:
    text = "name: a\nhidden: 4\nvocab: 4\nlayers: &all\n- layers: *all\n"
    assert any(problem.remedy == "it contains itself" for problem in text_faults(text, tmp_path).values())


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(
                    ["layers", "attention", "feed_forward", "router", "kind", "repeat", "hidden", "mtp", "heads", "x"]
                ),
                inner,
            )
        ),
    )
)
def test_no_data_breaks_the_reader(data: object) -> None:
    with pytest.raises(SpecError):
        model_from_dict(data, "x")


@given(model_specs(), st.data())
def test_one_broken_value_gives_one_fault_there(spec: ModelSpec, data: st.DataObject) -> None:
    plain = spec.to_dict()
    index = data.draw(st.integers(0, len(spec.layers) - 1))
    part = data.draw(st.sampled_from(["attention", "feed_forward"]))
    name = data.draw(st.sampled_from(sorted(set(plain["layers"][index][part]) - {"kind", "router"})))
    plain["layers"][index][part][name] = data.draw(st.sampled_from(["text", -1, None, [], 0.5]))
    assert only_fault(plain).field == f"layers[{index}].{part}.{name}"


# Files that are not even YAML, and names of models.


@pytest.mark.parametrize("text", ["", "  \n", "# only a comment\n", "[]", "4", "just text", "- a\n- b\n", "null"])
@pytest.mark.parametrize("name", ["model.yaml", "config.json"])
def test_files_that_are_no_mapping(text: str, name: str, tmp_path: Path) -> None:
    found = text_faults(text, tmp_path, name)
    assert len(found) == 1
    assert next(iter(found)) == "file" or (name == "config.json" and next(iter(found)).startswith("line 1"))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("name: a\nhidden: [1, 2\nvocab: 3\n", "line 3, column 6"),
        ("name: a\n  hidden: 2\n", "line 2, column 9"),
        ("name: a\nlayers:\n- attention: {kind: softmax", "line 3, column 28"),
        ("name: a\nhidden: 2\nname: b\n", "line 3, column 1"),
        ("name: *nothing\n", "line 1, column 7"),
        ("name: !!python/object:os.system a\n", "line 1, column 7"),
        ("name: a\n---\nname: b\n", "line 2, column 1"),
        ("name: a\nhidden: \x07\n", "line 2, column 9"),
    ],
)
def test_syntax_errors_say_where(text: str, place: str, tmp_path: Path) -> None:
    assert list(text_faults(text, tmp_path)) == [place]


def test_a_file_cut_off_anywhere_never_breaks_the_reader(tmp_path: Path) -> None:
    text = model_to_yaml(load_model("gpt-oss-120b"))
    path = tmp_path / "cut.yaml"
    refused = 0
    for end in range(0, len(text), 7):
        path.write_text(text[:end], encoding="utf-8")
        try:
            load_model(path)
        except SpecError as error:
            refused += 1
            assert error.problems
    assert refused > len(text) // 7 * 0.9  # the last layer's router may be cut unnoticed


def test_json_syntax_and_bytes(tmp_path: Path) -> None:
    assert list(text_faults('{"model_type": "llama",\n "vocab_size": }', tmp_path, "config.json")) == [
        "line 2, column 16"
    ]
    path = tmp_path / "weights.yaml"
    path.write_bytes(b"name: \xff\xfe\x00")
    with pytest.raises(SpecError, match="UTF-8"):
        load_model(path)
    assert "nested too deeply" in str(text_faults("[" * 100_000, tmp_path)["file"])


def test_names_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_model("qwen3-next-80")
    problem = caught.value.problems[0]
    assert all(preset in problem.allowed for preset in preset_ids())
    assert problem.remedy == "did you mean 'qwen3-next-80b'?"
    for missing in (tmp_path / "none", str(tmp_path / "none.yaml"), "none.yaml", "none/config.json"):
        with pytest.raises(SpecError, match="an existing file or folder"):
            load_model(missing)
    with pytest.raises(SpecError, match=r"a folder with a config\.json"):
        load_model(tmp_path)


def test_numbers_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(
        "name: a\nhidden: 1_024\nvocab: 17\nnorm_eps: 1e-5\nrope_theta: 1E6\n"
        "layers:\n- feed_forward: {kind: dense, intermediate: 8}\n"
    )
    spec = load_model(path)
    assert (spec.hidden, spec.norm_eps, spec.rope_theta) == (1024, 1e-5, 1e6)
    octal = text_faults("name: a\nhidden: 010\nvocab: 1:30\nlayers:\n- feed_forward: {kind: none}\n", tmp_path)
    assert octal["hidden"].value == "010"
    assert octal["vocab"].value == "1:30"
