"""The offline report: every shipped launch compiled for a target, what the compiler made of it, and what breaks a rule.

Code that the compiler made is named by a hash of all that it depends on (``CodeNames``). A committed report holds what
was found in each code, so that a later one compiles only what is not in it, and a test can say what is out of date.

Run as a program in a process of its own (it must not be interpreting): ``python -m tessera_rt.kernels.inspection
--target sm90 --out report.json``. ``tessera kernels report`` prints the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton

from tessera_rt.errors import Problem, SpecError
from tessera_rt.kernels.code_hash import CodeHashes
from tessera_rt.kernels.config_table import HALF, Config
from tessera_rt.kernels.configs import fingerprint, triton_minor
from tessera_rt.kernels.launch import Launch
from tessera_rt.kernels.offline import TARGETS, Compiled, Target, compile_for, target_named
from tessera_rt.kernels.ptx_checks import (
    plain_loads_in_wait_loops,
    releases_without_barrier,
    waits_without_acquire,
)
from tessera_rt.kernels.sharing import Footprint, blocks_per_sm, can_share
from tessera_rt.kernels.shipped import gate_launches, product_launches
from tessera_rt.kernels.shipped_data import data_launches
from tessera_rt.kernels.shipped_transport import transport_launches

LARGE_TILE = 128


def layer_launches(arch: str, minor: str) -> Iterator[Launch]:
    """Routing and the expert layer: all dtypes and size classes; fp32 has one aligned configuration for both sizes."""
    yield from product_launches(arch, minor, dtypes=HALF, sizes=("large", "small", "any"))
    yield from product_launches(arch, minor, dtypes=("float32",), sizes=("large", "any"))
    # One half dtype: fp16 has the same configurations, and the models' own gates are compiled in both.
    yield from gate_launches(arch, minor, dtypes=("bfloat16",), sizes=("large", "small"))
    yield from data_launches(arch, minor)


LISTS: tuple[Callable[[str, str], Iterator[Launch]], ...] = (layer_launches, transport_launches)
"""What is shipped, by group of kernels: functions of (architecture, Triton's minor version)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """What is kept of the compiler's result: no text of the program."""

    registers: int
    spills: int
    shared_bytes: int
    threads: int
    mma: str
    mma_count: int
    tma: int  # TMA loads and stores
    async_copies: int
    store_bytes: int
    scalar_dot: bool
    unordered_releases: tuple[str, ...]
    plain_waits: tuple[str, ...]
    relaxed_waits: tuple[str, ...]

    @property
    def footprint(self) -> Footprint:
        return Footprint.of(self.registers, self.shared_bytes, self.threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One launch of the report."""

    kernel: str
    model: str
    dtype: str
    shape: str
    size: str
    load: str
    config: str
    registers: int
    spills: int
    shared_bytes: int
    mma: str
    tma: int
    store_bytes: int
    blocks_per_sm: int
    problems: tuple[str, ...]
    code: str  # its name among the report's codes


class CodeNames:
    """Names of codes: hashes of the kernel's source with all it uses, the arguments and options (and so of the
    configuration), and of the functions that read the compiler's result."""

    def __init__(self) -> None:
        self._hashes = CodeHashes()
        self._reading = self._hashes.of("offline", "compile_for") + self._hashes.of("inspection", "code_of")

    def of(self, launch: Launch) -> str:
        source = self._hashes.of(launch.module, launch.function.__name__)
        return hashlib.sha256(f"{source} {launch.key} {self._reading}".encode()).hexdigest()[:20]


def code_of(compiled: Compiled) -> Code:
    """What the report keeps of a compiled kernel."""
    return Code(
        registers=compiled.registers,
        spills=compiled.spills,
        shared_bytes=compiled.shared_bytes,
        threads=compiled.threads,
        mma=compiled.mma,
        mma_count=compiled.mma_count,
        tma=compiled.tma_loads + compiled.tma_stores,
        async_copies=compiled.async_copies,
        store_bytes=compiled.store_bytes,
        scalar_dot=compiled.scalar_dot,
        unordered_releases=tuple(releases_without_barrier(compiled.ptx)),
        plain_waits=tuple(plain_loads_in_wait_loops(compiled.ptx)),
        relaxed_waits=tuple(waits_without_acquire(compiled.ptx)),
    )


def problems_of(launch: Launch, code: Code, target: Target) -> tuple[str, ...]:
    """Rules that the compiled launch breaks; empty for a sound one."""
    problems = []
    if code.spills:
        problems.append(f"{code.spills} spills")
    if code.shared_bytes > target.shared_per_block:
        problems.append(f"shared memory {code.shared_bytes} over the limit {target.shared_per_block}")
    problems += [f"release without a barrier before it: {line}" for line in code.unordered_releases]
    problems += [f"wait loop: {line}" for line in code.plain_waits]
    problems += [f"wait without acquire: {line}" for line in code.relaxed_waits]
    if code.store_bytes < launch.least_store_bytes:
        problems.append(f"stores of {code.store_bytes} bytes, not {launch.least_store_bytes}")
    if not launch.is_product:
        return tuple(problems)
    if code.scalar_dot:
        problems.append("a matrix product runs on the plain units")
    if launch.size == "any":
        return tuple(problems)
    wanted = "HGMMA" if target.capability == 90 else "UTCHMMA"
    if code.mma != wanted:
        problems.append(f"matrix products by {code.mma or 'nothing'}, not {wanted}")
    if not code.tma:
        problems.append("no TMA")
    if launch.load == "gather" and not code.async_copies:
        problems.append("gathered rows are not copied asynchronously")
    if code.store_bytes < 16:
        problems.append(f"stores of {code.store_bytes} bytes")
    if launch.size == "large" and launch.dtype in HALF and min(launch.tile) < LARGE_TILE:
        problems.append(f"tile {launch.tile[0]}x{launch.tile[1]} is below {LARGE_TILE}x{LARGE_TILE}")
    return tuple(problems)


def compile_launches(
    launches: Iterable[Launch], target: Target, *, known: Mapping[str, Code], workers: int = 1
) -> dict[str, Code]:
    """Code by name: those in ``known`` as they are, the others compiled, by ``workers`` processes."""
    names = CodeNames()
    unique = {names.of(launch): launch for launch in launches}
    codes = {name: known[name] for name in unique if name in known}
    missing = tuple(name for name in unique if name not in known)
    if workers == 1:
        return codes | {name: _compile(unique[name], target) for name in missing}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        selections = [missing[part::workers] for part in range(workers)]
        for part in pool.map(_compile_selection, [target.name] * workers, selections):
            codes |= part
    return codes


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A part of the report: launches whose field is among the given ones; an empty tuple takes all."""

    kernel: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    size: tuple[str, ...] = ()
    load: tuple[str, ...] = ()

    def takes(self, launch: Launch) -> bool:
        return all(not wanted or getattr(launch, name) in wanted for name, wanted in asdict(self).items())

    def check(self, launches: Iterable[Launch]) -> None:
        """Raises SpecError with every value that no launch has, and those that there are."""
        launches, problems = tuple(launches), []
        for name, wanted in asdict(self).items():
            there = sorted({getattr(launch, name) for launch in launches})
            problems += [Problem(name, value, f"one of {', '.join(there)}") for value in wanted if value not in there]
        if problems:
            raise SpecError.of("kernels report", problems)


EVERYTHING = Selection()


def all_launches(target: Target, selection: Selection = EVERYTHING, *, minor: str | None = None) -> list[Launch]:
    """What is shipped for a target, under a version of Triton (by default the installed one), each launch once.
    Raises SpecError for a selection of something that there is not."""
    minor = minor or triton_minor()
    launches: dict[tuple[str, ...], Launch] = {}
    for shipped in LISTS:
        for launch in shipped(target.name, minor):
            name = (launch.kernel, launch.model, launch.dtype, launch.size, launch.load, launch.sizes, launch.key)
            launches.setdefault(name, launch)
    selection.check(launches.values())
    return [launch for launch in launches.values() if selection.takes(launch)]


def report_rows(launches: Sequence[Launch], codes: dict[str, Code], target: Target) -> list[Row]:
    """One row per launch."""
    rows, names = [], CodeNames()
    for launch in launches:
        name = names.of(launch)
        code = codes[name]
        rows.append(
            Row(
                kernel=launch.kernel,
                model=launch.model,
                dtype=launch.dtype,
                shape=launch.sizes,
                size=launch.size,
                load=launch.load,
                config=config_text(launch.config),
                registers=code.registers,
                spills=code.spills,
                shared_bytes=code.shared_bytes,
                mma=code.mma,
                tma=code.tma,
                store_bytes=code.store_bytes,
                blocks_per_sm=blocks_per_sm(code.footprint, target),
                problems=problems_of(launch, code, target),
                code=name,
            )
        )
    return rows


def sharing_table(launches: Iterable[Launch], codes: Mapping[str, Code], target: Target) -> list[dict[str, Any]]:
    """For each configuration of the large products: the kernels of which a block fits beside its block on one SM,
    whatever the dtype and variant of both (``always``), or for some of them (``sometimes``)."""
    names, blocks, large = CodeNames(), dict[str, set[Footprint]](), set[str]()
    for launch in launches:
        name = f"{launch.kernel}/{launch.load}" if launch.is_product else launch.kernel
        label = f"{name} {config_text(launch.config)}"
        blocks.setdefault(label, set()).add(codes[names.of(launch)].footprint)
        if launch.is_product and launch.size == "large":
            large.add(label)
    table = []
    for label in sorted(large):
        fits = {
            other: {can_share(ours, theirs, target) for ours in blocks[label] for theirs in footprints}
            for other, footprints in sorted(blocks.items())
        }
        always = [other for other, found in fits.items() if found == {True}]
        table.append({"product": label, "always": always, "sometimes": [o for o, f in fits.items() if len(f) == 2]})
    return table


def config_text(config: Config) -> str:
    """Blocks, warps, stages in one word; only warps for kernels that are no products."""
    if not config.block_m:
        return f"w{config.warps}"
    text = f"{config.block_m}x{config.block_n}x{config.block_k} w{config.warps} s{config.stages}"
    return text if config.slices == 4 else f"{text} slices {config.slices}"


def report(
    target: Target, *, selection: Selection = EVERYTHING, known: Mapping[str, Code] | None = None, workers: int = 1
) -> dict[str, Any]:
    """The report as plain data. ``known``: codes that this Triton made for this target before (``known_codes``).
    Raises SpecError in a process that interprets kernels."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SpecError.of(
            "kernels report", [Problem("TRITON_INTERPRET", "1", "unset: interpreted kernels have no code")]
        )
    launches = all_launches(target, selection)
    codes = compile_launches(launches, target, known=known or {}, workers=workers)
    return {
        "target": target.name,
        "triton": triton.__version__,
        "fingerprint": fingerprint(target.name, triton_minor()),
        "codes": {name: asdict(code) for name, code in sorted(codes.items())},
        "rows": [asdict(row) for row in report_rows(launches, codes, target)],
        "sharing": sharing_table(launches, codes, target),
    }


def known_codes(reports: Iterable[Mapping[str, Any]], target: Target, version: str) -> dict[str, Code]:
    """The codes in reports of the target and of this version of Triton."""
    texts = ("unordered_releases", "plain_waits", "relaxed_waits")
    return {
        name: Code(**(code | {text: tuple(code[text]) for text in texts}))
        for entry in reports
        if entry["target"] == target.name and entry["triton"] == version
        for name, code in entry.get("codes", {}).items()
    }


def _compile(launch: Launch, target: Target) -> Code:
    return code_of(compile_for(target, launch.function, launch.args, launch.options))


def _compile_selection(target_name: str, wanted: Sequence[str]) -> dict[str, Code]:
    """In a worker: builds the launches again, because they hold kernels, which cannot be sent."""
    target, names = target_named(target_name), CodeNames()
    unique = {names.of(launch): launch for launch in all_launches(target)}
    return {name: _compile(unique[name], target) for name in wanted}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=sorted(TARGETS), required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--known", type=Path, help="a file with former reports: their codes are not compiled again")
    parser.add_argument("--out", type=Path, required=True)
    for field in fields(Selection):
        parser.add_argument(f"--{field.name}", action="append", default=[], help="only these (may be repeated)")
    options = parser.parse_args(argv)
    selection = Selection(**{field.name: tuple(getattr(options, field.name)) for field in fields(Selection)})
    target, former = target_named(options.target), []
    if options.known is not None:
        former = json.loads(options.known.read_text(encoding="utf-8"))["reports"]
    known = known_codes(former, target, triton.__version__)
    result = report(target, selection=selection, known=known, workers=options.workers)
    options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    broken = [row for row in result["rows"] if row["problems"]]
    for row in broken:
        print(row["kernel"], row["model"], row["dtype"], row["size"], row["load"], row["config"], row["problems"])
    compiled = sum(name not in known for name in result["codes"])
    print(
        f"{result['target']} Triton {result['triton']}: {len(result['rows'])} rows, {len(broken)} with problems; "
        f"{compiled} of {len(result['codes'])} codes compiled"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
