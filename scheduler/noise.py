"""What makes a step differ from its plan: uneven routing, and jitter of single tasks.

*Routing.* Each expert's popularity is drawn anew per MoE layer and group of expert-parallel ranks (an EP group), from a
symmetric Dirichlet distribution; the rows of a micro-batch then fall on the experts at random. Even popularity with
random rows alone does nothing: a group routes millions of rows per layer. Rows of the ranks, not of the experts, are
what is drawn: sums of Dirichlet shares are Dirichlet, and sums of multinomial counts multinomial, so this is the same.
Counts recorded in a run take the place of the draw.

*Jitter* multiplies every task's duration by a random factor that only depends on the seed and the task's place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from tessera_rt.costs import Workload
from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.model_spec import Item, ModelSpec

Floats = npt.NDArray[np.float64]

JITTERS = ("lognormal", "uniform")
_QUANTILES = 4096
MOST_SHARES = 2**28
"""Numbers that a draw may have: 2 GiB of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingNoise:
    """How unevenly rows fall on the ranks of an EP group. Exactly one of the first two is given.

    ``lane_cv``: coefficient of variation over ranks of the rows they receive, in expectation. ``concentration``: of the
    Dirichlet distribution, per expert; smaller is more uneven. ``hold``: micro-batches in a row that share one draw of
    the popularity (1: each has its own; the step's number of micro-batches: one for the whole step). ``traffic``:
    whether a rank that receives more rows than usual also slows its group's dispatches and combines as much; false
    leaves collectives as planned.
    """

    lane_cv: float | None = None
    concentration: float | None = None
    hold: int = 1
    traffic: bool = True

    def __post_init__(self) -> None:
        problems = []
        if (self.lane_cv is None) == (self.concentration is None):
            given = "both" if self.lane_cv is not None else "neither"
            problems.append(Problem("noise", given, "exactly one of lane_cv and concentration"))
        for name in ("lane_cv", "concentration"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                problems.append(Problem(f"noise.{name}", value, "a finite number above 0", "0.2 is a usual lane CV"))
        if self.hold < 1:
            problems.append(Problem("noise.hold", self.hold, "at least 1 micro-batch"))
        if problems:
            raise ScheduleError.of("routing noise", problems)

    def rank_concentration(self, experts: int, ep: int, rows: int) -> float:
        """Dirichlet parameter of one rank's share, for a layer with ``rows`` rows per micro-batch and EP group.

        Shares with parameter a have a CV of sqrt((ep - 1) / (ep a + 1)) over ranks; random rows add (ep - 1) / rows to
        its square. Raises ScheduleError for a ``lane_cv`` that random rows alone, or one rank with all rows, exceed.
        """
        if self.concentration is not None:
            return self.concentration * experts / ep
        assert self.lane_cv is not None
        least, most = math.sqrt((ep - 1) / rows), math.sqrt(ep - 1)
        if not least < self.lane_cv < most:
            allowed = f"more than {least:.2g} (random rows alone) and less than {most:.2g} (all rows on one rank)"
            raise ScheduleError.of("routing noise", [Problem("noise.lane_cv", self.lane_cv, allowed)])
        # CV^2 = d (1 - 1 / rows) + (ep - 1) / rows with d the Dirichlet's own.
        dirichlet = (self.lane_cv**2 - (ep - 1) / rows) / (1 - 1 / rows)
        return ((ep - 1) / dirichlet - 1) / ep


@dataclass(frozen=True)
class Rows:
    """Rows that each rank of each EP group computes and moves, relative to balanced routing.

    ``compute`` [replicas, layers, micro-batches, ep]: rows received over the balanced number; MoE tasks on the compute
    lane take this many times longer. ``traffic``, same shape: the busier direction of a dispatch or combine, rows sent
    or received, over balanced. ``layers``: item label -> index.
    """

    layers: Mapping[str, int]
    compute: Floats
    traffic: Floats

    @property
    def replicas(self) -> int:
        return int(self.compute.shape[0])

    @property
    def ep(self) -> int:
        return int(self.compute.shape[3])

    @property
    def lane_cv(self) -> float:
        """Measured CV over ranks, root mean square over layers and micro-batches."""
        return float(np.sqrt((self.compute.var(axis=3) / self.compute.mean(axis=3) ** 2).mean()))

    @property
    def max_over_mean(self) -> float:
        """Rows of the fullest rank over the mean, averaged over layers and micro-batches."""
        return float((self.compute.max(axis=3) / self.compute.mean(axis=3)).mean())


def moe_items(model: ModelSpec) -> tuple[Item, ...]:
    """The items with experts, MTP blocks included, in order: the layers that counts are given for."""
    return tuple(item for item in model.items if item.layer is not None and item.layer.is_moe)


def draw_rows(
    model: ModelSpec, workload: Workload, noise: RoutingNoise, *, microbatches: int, replicas: int, seed: int
) -> Rows:
    """Random rows for every MoE layer and micro-batch of ``replicas`` EP groups of ``workload.ep`` ranks.

    Raises ScheduleError for a model without experts, one expert-parallel rank, impossible noise, or more than
    MOST_SHARES rows to draw.
    """
    items, ep = moe_items(model), workload.ep
    problems = []
    if not items:
        problems.append(Problem("noise", model.name, "given for a model with MoE layers"))
    if ep < 2:
        problems.append(Problem("ep", ep, "at least 2: a single rank always receives all rows"))
    of_one = len(items) * microbatches * ep
    if replicas * of_one > MOST_SHARES:
        allowed = f"at most {MOST_SHARES // of_one} with {len(items)} layers, {microbatches} micro-batches and ep {ep}"
        problems.append(Problem("replicas", replicas, allowed))
    if problems:
        raise ScheduleError.of("routing noise", problems)
    rng = np.random.default_rng(seed)
    draws = -(-microbatches // noise.hold)
    compute = np.empty((replicas, len(items), microbatches, ep))
    for layer, item in enumerate(items):
        assert item.layer is not None
        feed_forward = item.layer.feed_forward
        rows = workload.tokens * feed_forward.top_k * ep
        shape = noise.rank_concentration(feed_forward.experts, ep, rows)
        popularity = rng.standard_gamma(shape, (replicas, draws, ep))
        popularity /= popularity.sum(axis=2, keepdims=True)
        each = np.repeat(popularity, noise.hold, axis=1)[:, :microbatches]
        compute[:, layer] = rng.multinomial(rows, each) * (ep / rows)
    layers = {item.label: i for i, item in enumerate(items)}
    return Rows(layers, compute, np.maximum(compute, 1.0) if noise.traffic else np.ones_like(compute))


def load_counts(path: str | Path, model: ModelSpec, workload: Workload, *, microbatches: int) -> Rows:
    """Recorded counts as rows: ``counts`` [layers, micro-batches, ep, experts] of a .json or .npz file.

    ``counts[i, m, r, e]``: rows that rank r of the EP group sends to expert e in MoE layer i and micro-batch m; a rank
    holds experts / ep consecutive experts. A fifth axis in front, if there is one, is over EP groups.

    Raises ScheduleError with what is wrong with the file, its shape or its numbers.
    """
    path = Path(path)
    items, ep = moe_items(model), workload.ep
    counts = _read_counts(path)
    experts = {item.layer.feed_forward.experts for item in items if item.layer is not None}
    if len(experts) != 1:
        allowed = "a model whose MoE layers have equally many experts"
        raise ScheduleError.of(str(path), [Problem("counts", f"experts {sorted(experts)}", allowed)])
    if counts.ndim == 4:
        counts = counts[None]
    wanted = (len(items), microbatches, ep, *experts)
    problems = []
    if counts.ndim != 5 or counts.shape[1:] != wanted:
        said = " x ".join(map(str, counts.shape))
        meant = " x ".join(map(str, wanted))
        problems.append(Problem("counts", said, f"MoE layers x micro-batches x ep x experts = {meant}"))
    elif not (np.issubdtype(counts.dtype, np.integer) and counts.size and counts.min() >= 0):
        least = counts.min() if counts.size else "none"
        problems.append(Problem("counts", f"{counts.dtype}, least {least}", "integers of at least 0"))
    if problems:
        raise ScheduleError.of(str(path), problems)
    top_k = np.array([item.layer.feed_forward.top_k for item in items if item.layer is not None], dtype=np.float64)
    balanced = workload.tokens * top_k[None, :, None, None]
    _check_rows(counts.sum(axis=4), balanced, str(path))
    received = counts.sum(axis=3).reshape(*counts.shape[:3], ep, -1).sum(axis=4) / balanced
    sent = counts.sum(axis=4) / balanced
    layers = {item.label: i for i, item in enumerate(items)}
    return Rows(layers, received, np.maximum(received, sent))


def _check_rows(sent: npt.NDArray[np.int64], most: Floats, where: str) -> None:
    """Raises ScheduleError for a rank with more rows than its tokens have, or a micro-batch without any."""
    problems = []
    many, none = np.argwhere(sent > most), np.argwhere(sent.sum(axis=3) == 0)
    if len(many):
        _, layer, microbatch, rank = many[0]
        allowed = f"at most tokens x experts of a token = {most[0, layer, 0, 0]:.0f}"
        field = f"counts, layer {layer}, micro-batch {microbatch}, rank {rank}"
        problems.append(Problem(field, f"{sent[tuple(many[0])]} rows", allowed, "counts of another workload?"))
    if len(none):
        _, layer, microbatch = none[0]
        problems.append(Problem(f"counts, layer {layer}, micro-batch {microbatch}", "no rows", "at least one"))
    if problems:
        raise ScheduleError.of(where, problems)


def _read_counts(path: Path) -> npt.NDArray[np.int64]:
    problem = Problem("counts", str(path), "a .json or .npz file with an entry counts")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return np.asarray(file["counts"])
        if path.suffix == ".json":
            return np.asarray(json.loads(path.read_text(encoding="utf-8"))["counts"])
    except (KeyError, TypeError, ValueError, OSError) as error:
        remedy = f"{type(error).__name__}: {error}"
        raise ScheduleError.of(str(path), [Problem(problem.field, problem.value, problem.allowed, remedy)]) from None
    raise ScheduleError.of(str(path), [problem])


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """Random factors on the durations of tasks, mean 1.

    ``kind``: lognormal (``amount``: standard deviation of the logarithm) or uniform (``amount``: largest deviation).
    """

    amount: float
    kind: str = "lognormal"

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in JITTERS:
            problems.append(Problem("jitter.kind", self.kind, f"one of {', '.join(JITTERS)}"))
        most = 1.0 if self.kind == "uniform" else math.inf
        if not 0 <= self.amount < most:
            problems.append(Problem("jitter.amount", self.amount, f"at least 0 and below {most}"))
        if problems:
            raise ScheduleError.of("jitter", problems)

    def factors(self) -> Floats:
        """[4096] equally likely factors, by size."""
        middle = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
        if self.kind == "uniform":
            return 1 + self.amount * (2 * middle - 1)
        drawn = np.exp(self.amount * ndtri(middle))
        return np.asarray(drawn / drawn.mean(), dtype=np.float64)
