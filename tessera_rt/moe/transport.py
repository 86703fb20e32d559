"""Transports: the collectives of a MoE layer, in one process or over torch.distributed.

Shapes: R rows that a rank sends or receives, H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from tessera_rt.errors import PlanError, Problem, TransportError
from tessera_rt.moe.steps import Pending, ReadyPending, RowLayout, Transport
from tessera_rt.plan import Mesh
from tessera_rt.waits import wait


class LocalTransport:
    """One rank holds all experts and there is no data parallelism: rows stay where they are, and keep their graph."""

    dp_rank = ep_rank = 0
    ep_size = 1

    def gather_counts(self, counts: Tensor) -> Pending:
        return ReadyPending(counts.detach().cpu().view(1, 1, -1))

    def dispatch(self, rows: Tensor, layout: RowLayout) -> Pending:
        _check_rows("dispatch", rows, layout.send)
        return ReadyPending(rows)

    def combine(self, rows: Tensor, layout: RowLayout) -> Pending:
        _check_rows("combine", rows, layout.receive)
        return ReadyPending(rows)


class CollectiveTransport:
    """Asynchronous torch.distributed collectives with exact splits; every rank takes part, with zero rows too.

    ``ep_group``: the ranks that share the experts, in the order of their ep_rank (None if there is one).
    ``data_group``: the dp x ep ranks of one pipeline rank, in the order dp_rank * ep_size + ep_rank (None if there is
    one). ``timeout_s`` bounds each wait. Raises PlanError when a group contradicts the coordinates.
    """

    def __init__(
        self,
        *,
        ep_group: dist.ProcessGroup | None,
        data_group: dist.ProcessGroup | None,
        ep_rank: int = 0,
        ep_size: int = 1,
        dp_rank: int = 0,
        dp_size: int = 1,
        timeout_s: float = 300.0,
    ) -> None:
        self.ep_rank, self.ep_size, self.dp_rank, self.dp_size = ep_rank, ep_size, dp_rank, dp_size
        self._ep_group, self._data_group, self._timeout_s = ep_group, data_group, timeout_s
        problems = [
            *_group_problems("ep_group", ep_group, ep_rank, ep_size),
            *_group_problems("data_group", data_group, dp_rank * ep_size + ep_rank, dp_size * ep_size),
        ]
        if problems:
            raise PlanError.of("expert-parallel groups", problems)

    def gather_counts(self, counts: Tensor) -> Pending:
        counts = counts.detach().contiguous()
        output = counts.new_empty(self.dp_size * self.ep_size, counts.numel())
        shape = (self.dp_size, self.ep_size, counts.numel())
        if self._data_group is None:
            return ReadyPending(counts.cpu().view(shape))
        work = dist.all_gather(list(output.unbind(0)), counts, group=self._data_group, async_op=True)
        what = "all-gather of expert counts"
        return WorkPending(
            work,
            output.view(shape),
            counts,
            self._data_group,
            self._timeout_s,
            what,
            finish=lambda gathered: gathered.cpu(),
        )

    def dispatch(self, rows: Tensor, layout: RowLayout) -> Pending:
        return self._all_to_all("dispatch", rows, layout.send, layout.receive)

    def combine(self, rows: Tensor, layout: RowLayout) -> Pending:
        return self._all_to_all("combine", rows, layout.receive, layout.send)

    def _all_to_all(self, name: str, rows: Tensor, send: tuple[int, ...], receive: tuple[int, ...]) -> Pending:
        _check_rows(name, rows, send)
        rows = rows.detach().contiguous()
        if self._ep_group is None:
            return ReadyPending(rows)
        output = rows.new_empty(sum(receive), *rows.shape[1:])
        work = dist.all_to_all_single(output, rows, list(receive), list(send), group=self._ep_group, async_op=True)
        return WorkPending(work, output, rows, self._ep_group, self._timeout_s, f"all-to-all of rows ({name})")


class WorkPending:
    """A collective under way. Holds its tensors until ``wait``, which may be called again."""

    def __init__(
        self,
        work: dist.Work,
        output: Tensor,
        sent: Tensor,
        group: dist.ProcessGroup,
        timeout_s: float,
        what: str,
        finish: Callable[[Tensor], Tensor] = lambda output: output,
    ) -> None:
        self.output = output
        self._work: dist.Work | None = work
        self._sent: Tensor | None = sent
        self._group, self._timeout_s, self._what, self._finish = group, timeout_s, what, finish

    def wait(self) -> Tensor:
        """The output. Raises WaitError (a TransportError) when it does not come in time or a peer is gone."""
        if self._work is not None:
            others = [rank for rank in dist.get_process_group_ranks(self._group) if rank != dist.get_rank()]
            what = f"the {self._what} with ranks {', '.join(map(str, others))}"
            wait(self._work, f"rank {dist.get_rank()}", what, others, timeout_s=self._timeout_s)
            self.output = self._finish(self.output)
            self._work = self._sent = None
        return self.output


def make_transport(
    ep_group: dist.ProcessGroup | None,
    data_group: dist.ProcessGroup | None,
    mesh: Mesh,
    rank: int,
    *,
    timeout_s: float = 300.0,
) -> Transport:
    """The transport of global ``rank`` in ``mesh``; the groups as for ``CollectiveTransport``."""
    _, dp_rank, ep_rank = mesh.coordinate(rank)
    if mesh.dp * mesh.ep == 1:
        return LocalTransport()
    return CollectiveTransport(
        ep_group=ep_group if mesh.ep > 1 else None,
        data_group=data_group,
        ep_rank=ep_rank,
        ep_size=mesh.ep,
        dp_rank=dp_rank,
        dp_size=mesh.dp,
        timeout_s=timeout_s,
    )


def _check_rows(name: str, rows: Tensor, splits: tuple[int, ...]) -> None:
    if rows.shape[0] != sum(splits):
        problem = Problem("rows", rows.shape[0], f"the sum of the splits {splits}")
        raise TransportError.of(name, [problem])


def _group_problems(name: str, group: dist.ProcessGroup | None, rank: int, size: int) -> list[Problem]:
    actual = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    return [] if actual == (rank, size) else [Problem(f"{name} (rank, size)", actual, f"{(rank, size)}")]
