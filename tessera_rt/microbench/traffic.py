"""Communication to measure: torch's all-to-all between ranks, and plain copies of as many bytes.

A copy inside one device says what memory allows and nothing of a link. Both are functions of a budget, as ``overlap``
takes them; torch's all-to-all does not obey one.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from tessera_rt.errors import Problem, SpecError
from tessera_rt.microbench.compare import ComparedRow, Contender, compare
from tessera_rt.microbench.overlap import BudgetedLaunch
from tessera_rt.microbench.timing import Launch

ALL_TO_ALL = "torch all-to-all"


def all_to_all(size: int, *, device: torch.device, group: dist.ProcessGroup, timeout_s: float = 60.0) -> Launch:
    """An all-to-all in which each rank sends ``size`` bytes in equal parts, one of them to itself.

    Raises SpecError for a size that the ranks cannot share.
    """
    world = dist.get_world_size(group)
    _check_size(size, world)
    sent = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def launch() -> None:
        work = dist.all_to_all_single(received, sent, group=group, async_op=True)
        if device.type == "cuda":
            work.wait()  # on the stream, not on the host
        else:
            work.wait(timedelta(seconds=timeout_s))

    return launch


def copy(size: int, *, device: torch.device) -> Launch:
    """A copy of ``size`` bytes of device memory to another place of it."""
    _check_size(size, 1)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def unbudgeted(launch: Launch) -> BudgetedLaunch:
    """A launch that takes whatever SMs it wants, as ``overlap`` calls it."""
    return lambda budget: launch()


def bench_traffic(
    title: str,
    size: int,
    *,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    ours: Contender | None = None,
    samples: int = 20,
    timeout_s: float = 60.0,
) -> tuple[ComparedRow, ...]:
    """A message of ``size`` bytes per rank: ours (if given) and torch's all-to-all against a copy. Collective."""
    contenders = [] if ours is None else [ours]
    if group is not None:
        shared = shared_size(size, dist.get_world_size(group))
        launch = all_to_all(shared, device=device, group=group, timeout_s=timeout_s)
        contenders.append(Contender(name=ALL_TO_ALL, launch=launch, bytes=shared))
    contenders.append(Contender(name="copy", launch=copy(size, device=device), bytes=size))
    return compare(title, contenders, device=device, samples=samples, group=group, timeout_s=timeout_s)


def shared_size(size: int, parts: int) -> int:
    """The next number of bytes that ``parts`` ranks can share evenly."""
    return -(-size // parts) * parts


def _check_size(size: int, parts: int) -> None:
    if size < 1 or size % parts:
        allowed = f"a positive number of bytes that {parts} ranks can share" if parts > 1 else "at least 1 byte"
        raise SpecError.of("microbench", [Problem("size", size, allowed)])
