"""DeviceSpec: what a roofline needs to know of an accelerator, its node and its network.

Device files (``devices/*.yaml``, or one's own) state every figure as ``{value: ..., source: ...}``. The figures are
assumptions to compute with; nobody tunes them to a result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Generic, TypeVar

from pydantic import Field, ValidationError

from tessera_rt.cost_sources.work import DTYPE_BYTES, WorkKind
from tessera_rt.costs import Link
from tessera_rt.errors import CostError, Problem
from tessera_rt.files.file_checks import StrictModel, problems_of
from tessera_rt.files.model_validation import nearest
from tessera_rt.files.yaml_text import parse_yaml

_DEVICES = Path(__file__).parents[1] / "devices"
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One accelerator and how it is connected. Rates are per second, bandwidths per GPU and direction.

    ``peak_flops``: dtype -> dense peak. ``fractions``: kind of work -> reachable fraction of the peak (``memory``: of
    ``hbm_bytes_per_s``). ``intra_node``, ``inter_node``: what one GPU reaches to all others at once, and the latency of
    a small collective there. ``comm_bytes_per_sm``: rate at which one SM moves communication data; above it the links
    saturate. ``contention``: slow-down c of compute, to rate 1/(1+c), while ``comm_sms`` SMs communicate.
    ``comm_sms_candidates``: budgets that a planner may choose from (default: ``comm_sms`` alone).
    ``launch_ns``: added to each task. ``sources``: field -> where its figure comes from. ``measured``: which figures
    were measured, and by what (empty: none).
    """

    name: str
    title: str
    sm_count: int
    hbm_bytes: int
    hbm_bytes_per_s: float
    peak_flops: Mapping[str, float]
    fractions: Mapping[WorkKind, float]
    gpus_per_node: int
    intra_node: Link
    inter_node: Link
    comm_sms: int
    comm_bytes_per_sm: float
    contention: float
    launch_ns: int
    comm_sms_candidates: tuple[int, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    measured: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "comm_sms_candidates", self.comm_sms_candidates or (self.comm_sms,))
        for name in ("peak_flops", "fractions", "sources"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def rate(self, kind: WorkKind, dtype: str) -> float:
        """Reachable flops per second. ``kind`` is not MEMORY."""
        return self.peak_flops[dtype] * self.fractions[kind]

    @property
    def memory_rate(self) -> float:
        """Reachable bytes per second of device memory."""
        return self.hbm_bytes_per_s * self.fractions[WorkKind.MEMORY]

    def contention_at(self, comm_sms: int) -> float:
        """Slow-down of compute while ``comm_sms`` SMs communicate.

        Losing s of S SMs slows compute by s / (S - s); the stated contention scales that to what was observed.
        """

        def lost(sms: int) -> float:
            return sms / (self.sm_count - sms)

        return self.contention * lost(comm_sms) / lost(self.comm_sms)

    def comm_bandwidth(self, comm_sms: int) -> float:
        """Bytes per second that ``comm_sms`` SMs can move, before any link limits them."""
        return self.comm_bytes_per_sm * comm_sms


class _Figure(StrictModel, Generic[_Value]):
    value: _Value
    source: str = Field(min_length=1)


class _Positive(_Figure[float]):
    value: float = Field(gt=0)


class _Fraction(_Figure[float]):
    value: float = Field(gt=0, le=1)


class _NotNegative(_Figure[float]):
    value: float = Field(ge=0)


class _Count(_Figure[int]):
    value: int = Field(ge=1)


class _Counts(_Figure[tuple[int, ...]]):
    value: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1, strict=False)


class _Nanoseconds(_Figure[int]):
    value: int = Field(ge=0)


class _Fractions(StrictModel):
    gemm: _Fraction
    grouped_gemm: _Fraction
    attention_forward: _Fraction
    attention_backward: _Fraction
    linear_attention: _Fraction
    memory: _Fraction


class _Link(StrictModel):
    latency_ns: _Nanoseconds
    bytes_per_s: _Positive


class _Device(StrictModel):
    name: str = Field(min_length=1)
    title: str = ""
    sm_count: _Count
    hbm_bytes: _Count
    hbm_bytes_per_s: _Positive
    peak_flops: dict[str, _Positive]
    fractions: _Fractions
    gpus_per_node: _Count
    intra_node: _Link
    inter_node: _Link
    comm_sms: _Count
    comm_sms_candidates: _Counts | None = None
    comm_bytes_per_sm: _Positive
    contention: _NotNegative
    launch_ns: _Nanoseconds


def device_ids() -> tuple[str, ...]:
    """Names of the devices that come with the package, sorted."""
    return tuple(sorted(path.stem for path in _DEVICES.glob("*.yaml")))


def load_device(name_or_path: str | Path) -> DeviceSpec:
    """A device by the name of a file that comes with the package, or from a YAML file of one's own.

    Raises CostError with every problem of the file, or naming the known devices.
    """
    path = _DEVICES / f"{name_or_path}.yaml" if str(name_or_path) in device_ids() else Path(name_or_path)
    if not path.is_file():
        known = device_ids()
        allowed = f"one of {', '.join(known)}, or a YAML file that exists"
        raise CostError.of("device", [Problem("device", str(name_or_path), allowed, nearest(str(name_or_path), known))])
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise CostError.of(str(path), [Problem("file", str(fault), "a text file that can be read")]) from None
    return device_from_yaml(text, str(path))


def device_from_yaml(text: str, where: str = "device") -> DeviceSpec:
    """The device described by YAML text. Raises CostError with every problem of ``where``."""
    data = parse_yaml(text, where, CostError)
    problems: list[Problem] = []
    try:
        file = _Device.model_validate(data)
    except ValidationError as error:
        raise CostError.of(where, problems_of(error, _Device)) from None
    problems += [
        Problem(f"peak_flops.{dtype}", dtype, f"one of {', '.join(DTYPE_BYTES)}")
        for dtype in file.peak_flops
        if dtype not in DTYPE_BYTES
    ]
    if not file.peak_flops:
        problems.append(Problem("peak_flops", {}, f"a rate for at least one of {', '.join(DTYPE_BYTES)}"))
    if file.comm_sms.value >= file.sm_count.value:
        problems.append(Problem("comm_sms.value", file.comm_sms.value, f"less than sm_count ({file.sm_count.value})"))
    candidates = () if file.comm_sms_candidates is None else file.comm_sms_candidates.value
    problems += [
        Problem("comm_sms_candidates.value", sms, f"less than sm_count ({file.sm_count.value})")
        for sms in candidates
        if sms >= file.sm_count.value
    ]
    if problems:
        raise CostError.of(where, problems)
    return DeviceSpec(
        name=file.name,
        title=file.title or file.name,
        sm_count=file.sm_count.value,
        hbm_bytes=file.hbm_bytes.value,
        hbm_bytes_per_s=file.hbm_bytes_per_s.value,
        peak_flops={dtype: figure.value for dtype, figure in file.peak_flops.items()},
        fractions={kind: getattr(file.fractions, kind).value for kind in WorkKind},
        gpus_per_node=file.gpus_per_node.value,
        intra_node=_link(file.intra_node),
        inter_node=_link(file.inter_node),
        comm_sms=file.comm_sms.value,
        comm_bytes_per_sm=file.comm_bytes_per_sm.value,
        contention=file.contention.value,
        launch_ns=file.launch_ns.value,
        comm_sms_candidates=candidates,
        sources=dict(_sources(file.model_dump())),
    )


def _link(file: _Link) -> Link:
    return Link(latency_ns=file.latency_ns.value, bytes_per_s=file.bytes_per_s.value)


def _sources(data: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in data.items():
        if isinstance(value, dict):
            if "source" in value:
                yield f"{prefix}{name}", str(value["source"])
            else:
                yield from _sources(value, f"{prefix}{name}.")
