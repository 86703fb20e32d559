"""ModelSpec from the ``config.json`` of a Hugging Face model, by its ``model_type``. transformers is not needed.

Not described by a ModelSpec, and ignored: rotary scaling, dropout, quantization, attention sinks, vision parts.
"""

from __future__ import annotations

from collections.abc import Mapping

from tessera_rt.errors import Problem, SpecError
from tessera_rt.files.hf_families import FAMILIES
from tessera_rt.files.hf_keys import ConfigKeys
from tessera_rt.files.model_validation import ABSENT, check_model, nearest
from tessera_rt.model_spec import ModelSpec


def from_hf_config(config: Mapping[str, object], *, name: str = "", where: str = "config.json") -> ModelSpec:
    """The model of a Hugging Face config. ``name`` defaults to the config's own, ``where`` names the source in errors.

    Multimodal configs with a ``text_config`` give their text model. MTP blocks are those the config counts
    (``num_nextn_predict_layers``). Raises SpecError with every missing or wrong key, or with the supported model types.
    """
    config = _text_part(config, where)
    keys = ConfigKeys(config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = tuple(sorted(FAMILIES))
        value = ABSENT if model_type is None else model_type
        remedy = nearest(str(model_type), supported)
        raise SpecError.of(where, [Problem("model_type", value, f"one of {', '.join(supported)}", remedy)])
    hidden, vocab = keys.size("hidden_size"), keys.size("vocab_size")
    parts = FAMILIES[model_type](keys, hidden)
    own_name = config.get("_name_or_path")
    context = keys.size("max_position_embeddings")
    tied = keys.flag("tie_word_embeddings", default=False)
    norm_eps = keys.number(*parts.eps_keys, default=parts.eps)
    rope_theta = keys.rope("rope_theta", default=parts.theta)
    if keys.problems:
        raise SpecError.of(where, keys.problems)
    spec = ModelSpec(
        name=name or (own_name if isinstance(own_name, str) and own_name.strip() else model_type),
        hidden=hidden,
        vocab=vocab,
        layers=parts.layers,
        mtp=parts.mtp,
        tied=tied,
        context=context,
        norm_eps=norm_eps,
        rope_theta=rope_theta,
        source=f"config.json of a {model_type} model",
    )
    return check_model(spec, where)


def _text_part(config: Mapping[str, object], where: str) -> Mapping[str, object]:
    text = config.get("text_config")
    if text is None or config.get("model_type") in FAMILIES:
        return config
    if not isinstance(text, Mapping):
        raise SpecError.of(where, [Problem("text_config", text, "a JSON object")])
    outer = {key: config[key] for key in ("tie_word_embeddings", "_name_or_path") if key in config}
    return outer | dict(text)
