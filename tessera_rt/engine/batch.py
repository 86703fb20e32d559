"""A step's batch: splitting it into micro-batches, and the agreement of all ranks on what the step is.

Agreement comes before the first message: ranks that mean different steps would wait for one another, or take one
message for another, so they all raise the same error instead.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tessera_rt.engine.mesh import Groups, ranks_text
from tessera_rt.engine.watchdog import FailureReporter
from tessera_rt.errors import Problem, SpecError, TransportError
from tessera_rt.moe.steps import IGNORED
from tessera_rt.waits import WaitError

Pair = tuple[Tensor, Tensor] | Mapping[str, Tensor]
Batch = Pair | list[tuple[Tensor, Tensor]] | list[Mapping[str, Tensor]]
"""(tokens, labels) or {"tokens": ..., "labels": ...}, both [rows, s] int64; or a list of such, one per micro-batch."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """``tokens`` and ``labels`` [b, s] int64; labels are token ids or -100 (ignored)."""

    index: int
    tokens: Tensor
    labels: Tensor


def split_batch(batch: Batch, microbatches: int, *, vocab: int) -> tuple[Microbatch, ...]:
    """Exactly ``microbatches`` parts: rows split evenly (sizes differ by at most 1), or the list as it is.

    Raises SpecError with all problems: types, shapes, ids outside of the vocabulary, number of rows or of entries.
    """
    problems: list[Problem] = []
    if isinstance(batch, list):
        if len(batch) != microbatches:
            allowed = f"{microbatches}, the plan's number of micro-batches"
            problems.append(Problem("batch entries", len(batch), allowed, "plan for the number you feed"))
        pairs = [_checked(f"batch[{i}]", pair, vocab, problems) for i, pair in enumerate(batch)]
    else:
        whole = _checked("batch", batch, vocab, problems)
        if whole and whole[0].shape[0] < microbatches:
            allowed = f"at least {microbatches}, one row for each of the plan's micro-batches"
            problems.append(
                Problem("batch rows", whole[0].shape[0], allowed, "feed more rows or plan fewer micro-batches")
            )
        tokens, labels = whole or (torch.empty(0), torch.empty(0))
        parts = zip(torch.tensor_split(tokens, microbatches), torch.tensor_split(labels, microbatches), strict=True)
        pairs = list(parts)
    if problems:
        raise SpecError.of("batch", problems)
    return tuple(Microbatch(i, *pair) for i, pair in enumerate(pairs) if pair)


def count_valid(microbatches: Sequence[Microbatch]) -> int:
    """Tokens of this rank's micro-batches that have a label."""
    return sum(int((microbatch.labels != IGNORED).sum()) for microbatch in microbatches)


def valid_tokens(microbatches: Sequence[Microbatch], groups: Groups) -> int:
    """Valid tokens of the whole step: summed over dp x ep. Raises TransportError on a failed or late rank."""
    if groups.data is None:
        return count_valid(microbatches)
    total = torch.tensor(count_valid(microbatches), device=groups.device_mesh.device_type)
    work = dist.all_reduce(total, group=groups.data, async_op=True)
    assert work is not None
    groups.wait(work, "the number of valid tokens", groups.data)
    return int(total)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHeader:
    """What a rank means by the step it is about to run.

    ``plan``: a digest. ``settings``: everything else that must be alike, by name. ``shapes[m]``: (b, s). ``content``:
    digest of all ids.
    """

    mode: str
    step: int
    plan: str
    settings: Mapping[str, str]
    shapes: tuple[tuple[int, ...], ...]
    content: int

    @property
    def words(self) -> list[int]:
        """As integers for comparison, in the order of ``fields``."""
        alike = [
            _digest(self.mode),
            self.step,
            _digest(self.plan),
            _digest(json.dumps(self.settings)),
            len(self.shapes),
        ]
        return [*alike, _digest(self.shapes), self.content]

    @property
    def fields(self) -> list[tuple[str, str]]:
        """As texts, in the order of ``words``."""
        shapes = ", ".join("x".join(map(str, shape)) for shape in self.shapes)
        settings = json.dumps(self.settings)
        texts = (self.mode, self.step, self.plan[:12], settings, len(self.shapes), shapes, f"{self.content:x}")
        return list(zip(_FIELDS, map(str, texts), strict=True))


_FIELDS = (
    "mode",
    "step",
    "plan",
    "settings",
    "number of micro-batches",
    "shapes of micro-batches",
    "digest of the token ids",
)
_OF_COLUMN = 5  # the fields from here on must be alike within a column only


def agree(
    mode: str,
    step: int,
    microbatches: Sequence[Microbatch],
    plan: str,
    settings: Mapping[str, str],
    groups: Groups,
    reporter: FailureReporter,
    *,
    timeout_s: float,
) -> None:
    """All ranks come here before a step and compare what they are about to run.

    ``mode``: train | eval; ``plan``: a digest; ``settings``: overlap, seed, optimizer. Mode, step, plan, settings
    and number of micro-batches must be alike on all ranks, the batch itself on the pipeline ranks of a column. Raises
    SpecError on every rank, which names the ranks and their values; or TransportError, within the time-out, which names
    the ranks that did not come.
    """
    shapes = tuple(tuple(microbatch.tokens.shape) for microbatch in microbatches)
    header = StepHeader(
        mode=mode, step=step, plan=plan, settings=settings, shapes=shapes, content=_content(microbatches)
    )
    store = groups.world.get_group_store()
    words = torch.tensor(header.words, device=groups.device_mesh.device_type)
    gathered = [torch.empty_like(words) for _ in range(groups.mesh.world)]
    call = -1
    started = time.monotonic()
    try:
        call = store.add(f"agree/{groups.rank}", 1)
        work = dist.all_gather(gathered, words, group=groups.world, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise reporter.explained(_not_all(error, header, call, groups, store, started, timeout_s)) from error
    table = torch.stack(gathered).tolist()
    fields = [field for field in range(len(_FIELDS)) if _differs(field, table, groups)]
    if fields:
        raise SpecError.of(
            f"{mode} step {step} on {groups.name}", _mismatches(fields, header, call, groups, store, timeout_s)
        )


def _differs(field: int, table: Sequence[Sequence[int]], groups: Groups) -> bool:
    columns = groups.mesh.dp * groups.mesh.ep if field >= _OF_COLUMN else 1
    return any(row[field] != table[rank % columns][field] for rank, row in enumerate(table))


def _mismatches(
    fields: Sequence[int], header: StepHeader, call: int, groups: Groups, store: dist.Store, timeout_s: float
) -> list[Problem]:
    """Every rank knows that they differ, so all write their values down and read the others'."""
    keys = [f"agree/{call}/{rank}" for rank in range(groups.mesh.world)]
    try:
        store.set(keys[groups.rank], json.dumps(header.fields))
        store.wait(keys, timedelta(seconds=timeout_s))
        told = [dict(json.loads(store.get(key))) for key in keys]
    except RuntimeError as error:
        raise TransportError(f"{groups.name} could not read what the other ranks are about to run: {error}") from error
    problems: list[Problem] = []
    named = [(field, _FIELDS[field], [values[_FIELDS[field]] for values in told]) for field in fields]
    for field, name, values in _single_settings(named):
        ranks: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            ranks.setdefault(value, []).append(rank)
        values_text = "; ".join(f"{value} on {ranks_text(of_value)}" for value, of_value in ranks.items())
        where = "the pipeline ranks of a (dp, ep) column" if field >= _OF_COLUMN else "all ranks"
        remedy = "evaluation is collective too: every rank must call it equally often" if name == "mode" else ""
        problems.append(Problem(name, values_text, f"the same on {where}", remedy))
    return problems


def _single_settings(named: Sequence[tuple[int, str, list[str]]]) -> Iterator[tuple[int, str, list[str]]]:
    """(field, name, values by rank) with the settings one by one, those that differ."""
    for field, name, values in named:
        if name != "settings":
            yield field, name, values
            continue
        by_rank = [json.loads(value) for value in values]
        for key in by_rank[0]:
            of_key = [settings.get(key, "") for settings in by_rank]
            if len(set(of_key)) > 1:
                yield field, f"settings.{key}", of_key


def _not_all(
    error: RuntimeError,
    header: StepHeader,
    call: int,
    groups: Groups,
    store: dist.Store,
    started: float,
    timeout_s: float,
) -> WaitError:
    others = [rank for rank in range(groups.mesh.world) if rank != groups.rank]
    try:
        missing = [rank for rank in others if store.add(f"agree/{rank}", 0) < call]
    except RuntimeError:
        missing = []  # the store is gone too: nobody can tell
    text = f"all ranks to begin {header.mode} step {header.step}"
    if missing:
        text += f"; {ranks_text(missing)} did not come"
    return WaitError.after(error, groups.name, text, missing or others, started=started, timeout_s=timeout_s)


def _checked(where: str, pair: object, vocab: int, problems: list[Problem]) -> tuple[Tensor, Tensor] | None:
    """(tokens, labels), or None with the reasons added to ``problems``."""
    if isinstance(pair, Mapping):
        missing = [name for name in ("tokens", "labels") if name not in pair]
        if missing:
            problems.append(Problem(where, sorted(pair), "a mapping with tokens and labels"))
            return None
        tokens, labels = pair["tokens"], pair["labels"]
    elif isinstance(pair, Sequence) and len(pair) == 2:
        tokens, labels = pair
    else:
        problems.append(Problem(where, type(pair).__name__, "(tokens, labels) or a mapping with tokens and labels"))
        return None
    before = len(problems)
    for name, tensor in (("tokens", tokens), ("labels", labels)):
        _check_ids(f"{where}.{name}", tensor, vocab, problems, ignored=name == "labels")
    if len(problems) == before and tokens.shape != labels.shape:
        allowed = f"the shape of the tokens, {tuple(tokens.shape)}"
        problems.append(Problem(f"{where}.labels.shape", tuple(labels.shape), allowed))
    return (tokens, labels) if len(problems) == before else None


def _check_ids(where: str, tensor: object, vocab: int, problems: list[Problem], *, ignored: bool) -> None:
    if not isinstance(tensor, Tensor):
        problems.append(Problem(where, type(tensor).__name__, "a tensor"))
    elif tensor.dtype != torch.int64:
        problems.append(Problem(f"{where}.dtype", str(tensor.dtype), "torch.int64"))
    elif tensor.dim() != 2 or tensor.numel() == 0:
        problems.append(Problem(f"{where}.shape", tuple(tensor.shape), "(rows, sequence), both at least 1"))
    else:
        ids = tensor[tensor != IGNORED] if ignored else tensor
        low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
        if low < 0 or high >= vocab:
            allowed = f"0 to {vocab - 1}" + (f", or {IGNORED} where there is no label" if ignored else "")
            problems.append(Problem(where, f"ids from {low} to {high}", allowed))


def _digest(value: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "big", signed=True)


def _content(microbatches: Sequence[Microbatch]) -> int:
    """Depends on every id and its place; wraps around at 64 bits. Computed where the tensors are."""
    total = 0
    for microbatch in microbatches:
        for tensor in (microbatch.tokens, microbatch.labels):
            flat = tensor.reshape(-1)
            weights = torch.arange(1, flat.numel() + 1, device=flat.device) * 2654435761 + 1
            total = (total * 1000003 + int((flat * weights).sum())) & (2**63 - 1)
    return total
