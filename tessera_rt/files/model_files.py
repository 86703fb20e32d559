"""Model descriptions from files: presets, YAML, and the ``config.json`` of Hugging Face models.

A YAML description has the fields of ``ModelSpec``; ``layers`` and ``mtp`` are lists of entries, each one layer or a
group of entries, given once for all its repetitions::

    name: small
    hidden: 512
    vocab: 32000
    layers:
    - repeat: 4
      layers:
      - repeat: 3
        attention: {kind: gated_delta_net, heads: 8, kv_heads: 4, head_dim: 64, v_dim: 64, conv: 4}
        feed_forward: {kind: dense, intermediate: 1536}
      - attention: {kind: softmax, heads: 8, kv_heads: 2, head_dim: 64, rope_dim: 64}
        feed_forward: {kind: moe, intermediate: 256, experts: 16, top_k: 2}

A layer without ``attention`` or without ``feed_forward`` has kind ``none`` there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from tessera_rt.errors import Problem, SpecError
from tessera_rt.files.hf_config import from_hf_config
from tessera_rt.files.model_validation import MAX_DEPTH, check_model, model_from_dict, nearest
from tessera_rt.files.yaml_text import dump_yaml, parse_yaml
from tessera_rt.model_spec import AttentionKind, FeedForwardKind, LayerSpec, ModelSpec

__all__ = ["check_model", "from_hf_config", "load_model", "model_from_dict", "model_to_yaml", "preset_ids"]

_PRESETS: Final = Path(__file__).parents[1] / "presets"
_FILE_ENDINGS: Final = (".yaml", ".yml", ".json")
_LONGEST_PATTERN: Final = 64  # layers; looking for longer ones would take long and find nothing


def preset_ids() -> tuple[str, ...]:
    """The names of the released models that come with the package, sorted."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.yaml")))


def load_model(spec: str | Path) -> ModelSpec:
    """The model of a preset id, a YAML file, or a Hugging Face ``config.json`` (the file, or a folder that holds it).

    A text that names a preset means the preset, even where a file has that name too. Raises SpecError with all faults
    of the file, or with the known presets where ``spec`` is neither a preset nor a file.
    """
    if isinstance(spec, str) and spec in preset_ids():
        return _from_text((_PRESETS / f"{spec}.yaml").read_text(encoding="utf-8"), f"preset {spec}")
    path = Path(spec)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise SpecError.of(str(path), [Problem("folder", str(path), "a folder with a config.json")])
        path = path / "config.json"
    if not path.exists():
        raise _unknown(spec, path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as fault:
        problem = Problem("file", f"byte {fault.start}", "UTF-8 text: YAML, or the config.json of a model")
        raise SpecError.of(str(path), [problem]) from None
    except OSError as fault:
        raise SpecError.of(str(path), [Problem("file", fault.strerror, "a file that can be read")]) from None
    if path.suffix == ".json":
        return _from_json(text, path)
    return _from_text(text, str(path))


def model_to_yaml(spec: ModelSpec) -> str:
    """YAML that ``load_model`` reads back as an equal ModelSpec. Equal neighbours and repeated patterns stand once."""
    data: dict[str, object] = {"name": spec.name}
    data |= {key: value for key, value in _plain(spec).items() if key not in ("name", "layers", "mtp")}
    data["layers"] = _entries(spec.layers)
    if spec.mtp:
        data["mtp"] = _entries(spec.mtp)
    return dump_yaml(data)


def _unknown(spec: str | Path, path: Path) -> SpecError:
    if isinstance(spec, Path) or path.suffix in _FILE_ENDINGS or len(path.parts) > 1:
        return SpecError.of(str(path), [Problem("file", str(path), "an existing file or folder")])
    ids = preset_ids()
    remedy = nearest(str(spec), ids)
    problem = Problem("model", str(spec), f"a preset ({', '.join(ids)}) or a YAML or config.json file", remedy)
    return SpecError.of("model", [problem])


def _from_text(text: str, where: str) -> ModelSpec:
    return model_from_dict(parse_yaml(text, where), where)


def _from_json(text: str, path: Path) -> ModelSpec:
    where = str(path)
    if not text.strip():
        raise SpecError.of(where, [Problem("file", "", "a JSON object", "it is empty")])
    try:
        data = json.loads(text)
    except json.JSONDecodeError as fault:
        lines = text.splitlines()
        line = lines[fault.lineno - 1].strip() if fault.lineno <= len(lines) else ""
        place = f"line {fault.lineno}, column {fault.colno}"
        raise SpecError.of(where, [Problem(place, line, "JSON", fault.msg)]) from None
    except (RecursionError, ValueError) as fault:  # nested too deeply, or an integer of too many digits
        raise SpecError.of(where, [Problem("file", text[:40], "JSON", str(fault))]) from None
    if not isinstance(data, Mapping):
        raise SpecError.of(where, [Problem("file", data, "a JSON object")])
    if "model_type" in data or "text_config" in data:
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return from_hf_config(data, name=name, where=where)
    return model_from_dict(data, where)


# Writing.


def _plain(value: Any) -> dict[str, object]:
    """The fields of a dataclass that differ from their defaults, as plain data; ``kind`` always."""
    data: dict[str, object] = {}
    for field in fields(value):
        item = getattr(value, field.name)
        if item == field.default and field.name != "kind":
            continue
        if isinstance(item, Enum):
            item = item.value
        data[field.name] = _plain(item) if is_dataclass(item) else item
    return data


def _layer_entry(layer: LayerSpec) -> dict[str, object]:
    entry: dict[str, object] = {}
    if layer.attention.kind is not AttentionKind.NONE:
        entry["attention"] = _plain(layer.attention)
    if layer.feed_forward.kind is not FeedForwardKind.NONE:
        entry["feed_forward"] = _plain(layer.feed_forward)
    return entry


def _entries(layers: Sequence[LayerSpec], depth: int = 1) -> list[dict[str, object]]:
    """Entries that stand for the layers: from each position on, the pattern that saves most layers, repeated."""
    longest = _LONGEST_PATTERN if depth < MAX_DEPTH else 1
    entries: list[dict[str, object]] = []
    start = 0
    while start < len(layers):
        period, count = _pattern_at(layers, start, longest)
        repeat: dict[str, object] = {"repeat": count} if count > 1 else {}
        if period == 1:
            entries.append(repeat | _layer_entry(layers[start]))
        else:
            entries.append(repeat | {"layers": _entries(layers[start : start + period], depth + 1)})
        start += period * count
    return entries


def _pattern_at(layers: Sequence[LayerSpec], start: int, longest: int) -> tuple[int, int]:
    """(length, repetitions) of the pattern from ``start`` on that saves most; the shortest of equally good ones."""
    best = (1, 1)
    saved = 0
    for period in range(1, min(longest, (len(layers) - start) // 2) + 1):
        first = layers[start : start + period]
        count = 1
        while layers[start + count * period : start + (count + 1) * period] == first:
            count += 1
        if (count - 1) * period > saved:
            best, saved = (period, count), (count - 1) * period
    return best
