"""Checkpoints: torch.distributed.checkpoint under names that do not depend on the layout, whole or not at all.

    <run>/checkpoints/step-000030/     tensors of all ranks, and info.json
    <run>/checkpoints/latest           the name of the newest whole checkpoint

A checkpoint is written under another name and renamed when all ranks are done, so a folder called ``step-...`` is
always whole. Since every tensor carries its global name (experts their global ids) and is whole, a run can go on under
another pp, vpp, dp or ep.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tessera_rt.errors import Problem, SpecError, TesseraError, TransportError
from tessera_rt.files.file_checks import write_atomically

VERSION = 1
_INFO = "info.json"
_LATEST = "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """What a checkpoint is of. The fields in ``MUST_MATCH`` have to be the same when a run goes on with it.

    ``step``: optimizer steps done; ``rows``: rows of training data read; ``mesh``: the layout that wrote it;
    ``config``: YAML of the run's configuration.
    """

    model: str
    fingerprint: str
    step: int
    rows: int
    dtype: str
    optimizer: str
    seed: int
    sequence: int
    tokens: int  # of the training data
    mesh: Mapping[str, int] = field(default_factory=dict)
    config: str = ""
    version: int = VERSION


MUST_MATCH: Mapping[str, str] = {
    "fingerprint": "the model differs; train the model of the checkpoint",
    "dtype": "set run.dtype back",
    "optimizer": "set optimizer.kind back",
    "seed": "set run.seed back: it orders the data",
    "sequence": "set data.sequence back: it cuts the data",
    "tokens": "the training data has changed; give the same files",
}


def save_checkpoint(folder: Path, state: Mapping[str, Any], info: CheckpointInfo) -> Path:
    """Write ``state`` (``Engine.state_dict()`` of every rank) into ``folder``; its path. Collective.

    Raises TesseraError on every rank when it could not be written; earlier checkpoints are then as they were.
    """
    path = folder / f"step-{info.step:06d}"
    temporary = folder / f".{path.name}.tmp"

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def publish() -> None:
        (temporary / _INFO).write_text(json.dumps(asdict(info), indent=1), encoding="utf-8")
        replaced = folder / f".{path.name}.old"
        shutil.rmtree(replaced, ignore_errors=True)
        if path.exists():
            path.rename(replaced)
        temporary.rename(path)
        write_atomically(folder / _LATEST, path.name + "\n")
        shutil.rmtree(replaced, ignore_errors=True)

    _on_first_rank(begin, f"checkpoint {path} could not be begun")
    with _as_ours(f"checkpoint {path} could not be written"):
        save(_flat(state), checkpoint_id=temporary)
    _on_first_rank(publish, f"checkpoint {path} could not be finished")
    return path


def load_checkpoint(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a checkpoint for every tensor in ``state``, in its structure, for ``Engine.load_state_dict``.

    Collective. Raises SpecError when the checkpoint lacks a tensor or holds it in another shape.
    """
    flat: dict[str, Any] = {
        name: torch.empty_like(value) if isinstance(value, Tensor) else value for name, value in _flat(state).items()
    }
    with _as_ours(f"checkpoint {path} could not be read", SpecError):
        load(flat, checkpoint_id=path)
    return _nested(flat, state)


def find_checkpoint(place: Path) -> Path | None:
    """The checkpoint at ``place``: itself, or the newest of a run's folder or of its ``checkpoints``; None without one.

    Raises SpecError when the pointer to the newest names one that is gone.
    """
    if (place / _INFO).is_file():
        return place
    for folder in (place, place / "checkpoints"):
        pointer = folder / _LATEST
        if pointer.is_file():
            path = folder / pointer.read_text(encoding="utf-8").strip()
            if not (path / _INFO).is_file():
                raise SpecError.of(str(pointer), [Problem("latest", path.name, "a checkpoint beside it")])
            return path
    return None


def read_info(path: Path) -> CheckpointInfo:
    """What the checkpoint at ``path`` is of. Raises SpecError when that file is damaged or from another version."""
    where = str(path / _INFO)
    try:
        data = json.loads((path / _INFO).read_text(encoding="utf-8"))
        known = {item.name for item in fields(CheckpointInfo)}
        if not isinstance(data, dict) or data.get("version") != VERSION or set(data) != known:
            version = data.get("version") if isinstance(data, dict) else None
            raise SpecError.of(where, [Problem("version", version, f"{VERSION}, with all its fields")])
        return CheckpointInfo(**data)
    except (OSError, ValueError) as fault:
        raise SpecError.of(where, [Problem("file", str(fault), "the readable description of a checkpoint")]) from None


def check_resumable(path: Path, found: CheckpointInfo, wanted: CheckpointInfo) -> None:
    """Raises SpecError with everything in which the checkpoint does not fit the run that wants to go on with it."""
    problems = [
        Problem(name, getattr(wanted, name), f"{getattr(found, name)!r}, as in the checkpoint", remedy)
        for name, remedy in MUST_MATCH.items()
        if getattr(found, name) != getattr(wanted, name)
    ]
    if problems:
        raise SpecError.of(f"resuming from {path}", problems)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name (``model.embed.weight``, ``optimizer.exp_avg/embed.weight``).

    For one process, with or without a process group.
    """
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with _as_ours(f"checkpoint {path} could not be read", SpecError):
        load(dict(tensors), checkpoint_id=path, no_dist=True)
    return tensors


def _flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """``{"model": {name: tensor}, "optimizer": {...}, "steps": 3}`` -> one level, everything a tensor."""
    flat: dict[str, Any] = {}
    for part, value in state.items():
        if isinstance(value, Mapping):
            flat |= {f"{part}.{name}": _tensor(inner) for name, inner in value.items()}
        else:
            flat[part] = _tensor(value)
    return flat


def _nested(flat: MutableMapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    return {
        part: {name: flat[f"{part}.{name}"] for name in value} if isinstance(value, Mapping) else flat[part]
        for part, value in like.items()
    }


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value)


def _on_first_rank(act: Callable[[], None], failure: str) -> None:
    """Rank 0 acts; all ranks learn how it went, so none waits for one that gave up."""
    told: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            act()
        except OSError as error:
            told = [str(error)]
    try:
        dist.broadcast_object_list(told, src=0)
    except RuntimeError as error:
        raise TransportError(f"rank {dist.get_rank()}: {failure}: {error}") from error
    if told[0] is not None:
        raise TesseraError(f"{failure}: {told[0]}")


@contextmanager
def _as_ours(failure: str, kind: type[TesseraError] = TesseraError) -> Iterator[None]:
    """Errors of torch's checkpoint code (which tells all ranks of them) in our words."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        faults = {rank: wrapped[0] for rank, wrapped in error.failures.items()}
        told = [f"rank {rank}: {type(fault).__name__}: {fault}" for rank, fault in sorted(faults.items())]
        raise kind("\n  ".join([failure, *told])) from error
    except RuntimeError as error:
        if not dist.is_initialized():
            raise kind(f"{failure}: {error}") from error
        raise TransportError(f"rank {dist.get_rank()}: {failure}: {error}") from error
