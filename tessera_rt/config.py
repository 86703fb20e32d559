"""The training configuration: one YAML file, checked as a whole, and overrides from the command line.

    model: hybrid_tiny_model.yaml     # a preset id, a file, or the description itself
    mesh: {pp: 2, vpp: 2, ep: 2}
    data: {sequence: 128, microbatch_size: 2, microbatches: 8}
    plan: {costs: measured}
    optimizer: {lr: 3e-3, warmup_steps: 5}
    run: {steps: 30, seed: 0}

Files that are read (model, data, costs, plan) are looked up from the folder of the configuration, folders that are
written from the working directory. Every key that is left out has the default of its section below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError

from tessera_rt.costs import Recompute, Workload
from tessera_rt.errors import Problem, SpecError
from tessera_rt.files.file_checks import StrictModel, problems_of, write_atomically
from tessera_rt.files.model_files import load_model, model_from_dict, model_to_yaml
from tessera_rt.files.model_validation import nearest
from tessera_rt.files.yaml_text import dump_yaml, parse_yaml
from tessera_rt.model_spec import ModelSpec
from tessera_rt.plan import Mesh
from tessera_rt.scheduler.templates import TEMPLATES

_Section = TypeVar("_Section", bound=StrictModel)

BYTE_VOCAB = 256
"""Vocabulary of data that is read as bytes."""
MOST_MICROBATCHES = 65536
"""Of one step on one rank: a plan lists every one of them."""
LONGEST_WAIT_S = 86400.0
"""A day: far longer than any wait of a run that goes well, and what every clock below can hold."""


def _texts(value: object) -> object:
    """One text stands for a list of one."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class MeshSection(StrictModel):
    """Ranks: pp * dp * ep processes, ``vpp`` virtual stages on each pipeline rank."""

    pp: Positive = 1
    vpp: Positive = 1
    dp: Positive = 1
    ep: Positive = 1


class DataSection(StrictModel):
    """What is read and how it is cut.

    ``files``: names and globs of files read as bytes (vocabulary 256); without ``files`` and ``tokens`` the sources of
    Python's standard library. ``tokens``: an array of token ids, ``.npy`` or raw with ``dtype``; ids are below
    ``vocab`` (default: the model's). ``sequence``: tokens of one row; ``microbatch_size``: rows of one micro-batch on
    one rank; ``microbatches``: of one step on one rank. ``held_out``: share at the end of the data that is never
    trained on; ``held_out_files`` names such data instead, of the same kind.
    """

    files: Texts = ()
    tokens: str = ""
    dtype: Literal["uint8", "uint16", "int32", "uint32", "int64"] | None = None
    vocab: Positive | None = None
    sequence: Positive = 128
    microbatch_size: Positive = 1
    microbatches: Annotated[int, Field(ge=1, le=MOST_MICROBATCHES)] = 1
    held_out: Fraction = 0.02
    held_out_files: Texts = ()


class PlanSection(StrictModel):
    """How the plan is made. ``file``: use this plan instead (nothing else may be given then).

    ``template``: without it 1f1b, or interleaved-1f1b with several stages a rank. ``costs``: measured on this machine,
    roofline of ``device``, or a cost file. ``memory_limit``: bytes per rank. ``overlap`` off: the same
    actions one pass after the other.
    """

    file: str = ""
    template: (
        Literal[
            "1f1b",
            "interleaved-1f1b",
            "gpipe",
            "zb-h1",
            "zb-h2",
            "zb-v",
            "interleaved-zb",
            "dualpipe-v",
            "megatron-1f1b",
        ]
        | None
    ) = None
    objective: Literal["step", "t_dom", "serial", "memory"] = "step"
    partitioner: Literal["threshold", "milp", "chain-dp"] = "threshold"
    costs: str = "measured"
    device: str = "h800"
    memory_limit: Positive | None = None
    recompute: Literal["auto", "none", "selective", "full"] = "none"
    overlap: bool = True
    pad: Literal["groups", "shadow"] = "groups"


class OptimizerSection(StrictModel):
    """AdamW or SGD. The rate rises over ``warmup_steps``, then falls on a cosine to ``final_lr`` times ``lr``.

    ``schedule`` constant: it stays at ``lr``. ``clip``: largest global gradient norm, 0 = none.
    """

    kind: Literal["adamw", "sgd"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    warmup_steps: Count = 0
    schedule: Literal["cosine", "constant"] = "cosine"
    final_lr: Annotated[float, Field(ge=0, le=1)] = 0.1
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    momentum: Fraction = 0.0
    clip: Annotated[float, Field(ge=0)] = 1.0


class RunSection(StrictModel):
    """The run itself.

    ``evaluate_every``, ``save_every``: steps between them (evaluation also before the first and after the last step;
    ``save_every`` 0: only after the last step). ``evaluate_batches``: batches of held-out data per evaluation, 0 = all.
    ``resume``: never, latest (the newest checkpoint of ``folder``, if there is one), or a checkpoint. ``folder``: where
    plan, metrics, timelines and checkpoints go; default runs/<name of the file>. ``timeout_s``: of every wait.
    """

    steps: Count = 100
    seed: Count = 0
    dtype: Literal["bf16", "fp16", "fp32", "fp64"] = "fp32"
    dropout: Fraction = 0.0
    evaluate_every: Count = 0
    evaluate_batches: Count = 4
    save_every: Count = 0
    resume: str = "never"
    folder: str = ""
    timeout_s: Annotated[float, Field(gt=0, le=LONGEST_WAIT_S)] = 300.0


class _File(StrictModel):
    model: Any
    mesh: MeshSection = MeshSection()
    data: DataSection = DataSection()
    plan: PlanSection = PlanSection()
    optimizer: OptimizerSection = OptimizerSection()
    run: RunSection = RunSection()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A checked configuration. ``name``: of its file; names of files that are read are absolute."""

    name: str
    model: ModelSpec
    mesh: Mesh
    data: DataSection
    plan: PlanSection
    optimizer: OptimizerSection
    run: RunSection

    @property
    def data_ranks(self) -> int:
        """Ranks that read different data."""
        return self.mesh.dp * self.mesh.ep

    @property
    def rows_per_step(self) -> int:
        """Sequences of one training step over all ranks."""
        return self.data_ranks * self.data.microbatches * self.data.microbatch_size

    @property
    def vocab(self) -> int:
        """Token ids of the data are below this."""
        return self.data.vocab or (self.model.vocab if self.data.tokens else BYTE_VOCAB)

    def workload(self, recompute: Recompute = Recompute.NONE) -> Workload:
        """What one rank processes, for cost sources and plans."""
        return Workload(
            tokens=self.data.microbatch_size * self.data.sequence,
            context=self.data.sequence,
            dp=self.mesh.dp,
            ep=self.mesh.ep,
            dtype=self.run.dtype,
            recompute=recompute,
            optimizer=self.optimizer.kind,
            momentum=self.optimizer.momentum > 0,
        )


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration of a YAML file, with overrides such as ``run.steps=5`` (values are YAML too).

    Raises SpecError with every problem of the file, its model and the overrides.
    """
    path = Path(path)
    if not path.is_file():
        raise SpecError.of(str(path), [Problem("file", str(path), "an existing configuration file (YAML)")])
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise SpecError.of(str(path), [Problem("file", str(fault), "UTF-8 text that can be read")]) from None
    return config_from_dict(parse_yaml(text, str(path)), str(path), folder=path.parent, overrides=overrides)


def config_from_dict(
    data: object, where: str = "configuration", *, folder: Path = Path(), overrides: Sequence[str] = ()
) -> TrainConfig:
    """The configuration of plain data. ``folder``: where the files it names are looked up. Raises SpecError."""
    problems: list[Problem] = []
    data = _overridden(data, overrides, problems)
    try:
        file = _File.model_validate(data)
    except ValidationError as error:
        problems += problems_of(error, _File)
        given = data.get("model") if isinstance(data, Mapping) else None
        if given is not None:
            _model(given, folder, where, problems)
        raise SpecError.of(where, problems) from None
    model = _model(file.model, folder, where, problems)
    problems += _contradictions(file, model)
    if problems or model is None:
        raise SpecError.of(where, problems)
    return TrainConfig(
        name=Path(where).stem,
        model=model,
        mesh=Mesh(**file.mesh.model_dump()),
        data=_absolute(file.data, folder, "files", "tokens", "held_out_files"),
        plan=_absolute(file.plan, folder, "file", *_if_file("costs", file.plan.costs, ("measured", "roofline"))),
        optimizer=file.optimizer,
        run=file.run,
    )


def config_to_yaml(config: TrainConfig) -> str:
    """YAML that ``load_config`` reads back as an equal configuration (up to its name), with the model spelled out."""
    mesh = config.mesh
    data: dict[str, object] = {
        "model": parse_yaml(model_to_yaml(config.model), "model"),
        "mesh": {"pp": mesh.pp, "vpp": mesh.vpp, "dp": mesh.dp, "ep": mesh.ep},
    }
    for name in ("data", "plan", "optimizer", "run"):
        section: StrictModel = getattr(config, name)
        data[name] = section.model_dump(mode="json", exclude_unset=True)
    return dump_yaml(data)


def save_config(config: TrainConfig, path: Path) -> None:
    """Write ``config_to_yaml``, the whole file or nothing."""
    write_atomically(path, config_to_yaml(config))


def run_folder(config: TrainConfig) -> Path:
    """Where a run writes: ``run.folder`` (default runs/<name>); a new run takes the first free of x, x-2, x-3, ...

    Nothing is ever written into the folder of an earlier run unless ``run.resume`` is ``latest``.
    """
    folder = Path(config.run.folder or f"runs/{config.name}")
    if config.run.resume == "latest":
        return folder
    number = 1
    candidate = folder
    while candidate.exists() and any(candidate.iterdir()):
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def _overridden(data: object, overrides: Sequence[str], problems: list[Problem]) -> object:
    """The data with ``a.b=value`` set; bad overrides are added to ``problems``."""
    if not overrides or not isinstance(data, Mapping):
        return data
    result = dict(data)
    for text in overrides:
        key, equals, value_text = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            problems.append(Problem("override", text, "key.path=value, such as run.steps=5"))
            continue
        try:
            value = parse_yaml(value_text, key) if value_text.strip() else None
        except SpecError as error:
            problems += [Problem(key, value_text, problem.allowed, problem.remedy) for problem in error.problems]
            continue
        at = result
        for depth, part in enumerate(parts[:-1]):
            inner = at.get(part)
            if inner is not None and not isinstance(inner, Mapping):
                problems.append(Problem(".".join(parts[: depth + 1]), inner, f"a mapping to set {key} in"))
                break
            at[part] = dict(inner or {})
            at = at[part]
        else:
            at[parts[-1]] = value
    return result


def _model(given: object, folder: Path, where: str, problems: list[Problem]) -> ModelSpec | None:
    """The model of a preset id, a file or a mapping; its faults are added to ``problems``."""
    try:
        if isinstance(given, Mapping):
            return model_from_dict(given, where)
        if isinstance(given, str) and given:
            beside = folder / Path(given).expanduser()
            return load_model(str(beside) if beside.exists() else given)
        problems.append(Problem("model", given, "a preset id, a file, or a model description"))
    except SpecError as error:
        problems += [replace(problem, field=f"model.{problem.field}") for problem in error.problems]
    return None


def _contradictions(file: _File, model: ModelSpec | None) -> list[Problem]:
    """What single fields do not show."""
    data, problems = file.data, []
    if data.files and data.tokens:
        problems.append(Problem("data.tokens", data.tokens, "left out when data.files is given", "keep one of the two"))
    if data.held_out_files and "held_out" in data.model_fields_set and data.held_out:
        problems.append(Problem("data.held_out", data.held_out, "left out beside data.held_out_files"))
    if not data.tokens:
        if data.dtype is not None:
            problems.append(Problem("data.dtype", data.dtype, "left out without data.tokens"))
        if data.vocab not in (None, BYTE_VOCAB):
            problems.append(Problem("data.vocab", data.vocab, f"{BYTE_VOCAB}, since files are read as bytes"))
    if model is not None:
        vocab = data.vocab or (1 if data.tokens else BYTE_VOCAB)
        if vocab > model.vocab:
            allowed = f"at least {vocab}, the vocabulary of the data"
            problems.append(Problem("model.vocab", model.vocab, allowed))
        if data.sequence > model.context:
            problems.append(Problem("data.sequence", data.sequence, f"at most {model.context}, the model's context"))
    plan = file.plan
    if plan.template is not None and plan.template not in TEMPLATES:
        remedy = nearest(plan.template, TEMPLATES)
        problems.append(Problem("plan.template", plan.template, f"one of {', '.join(TEMPLATES)}", remedy))
    if plan.file and (others := plan.model_fields_set - {"file", "overlap"}):
        problems.append(Problem("plan.file", plan.file, f"given without {', '.join(sorted(others))}"))
    if file.optimizer.kind == "adamw" and file.optimizer.momentum:
        problems.append(Problem("optimizer.momentum", file.optimizer.momentum, "0 with adamw", "set beta1 instead"))
    return problems


def _if_file(name: str, value: str, words: Sequence[str]) -> tuple[str, ...]:
    return () if value in words else (name,)


def _absolute(section: _Section, folder: Path, *names: str) -> _Section:
    """The section with the named files looked up from ``folder``."""

    def absolute(name: str) -> str:
        return str(folder.absolute() / Path(name).expanduser()) if name else name

    changed = {}
    for name in names:
        value = getattr(section, name)
        if value:
            changed[name] = absolute(value) if isinstance(value, str) else tuple(map(absolute, value))
    return section.model_copy(update=changed)
