"""WeightGradQueue: weight gradients that backward deferred, run later by W tasks.

One first-in-first-out queue per use of a parameter. Its entries come in the order of the B tasks, so in micro-batch
order and, within one, in reverse call order; and only the oldest entry may run. So sums have the same bits wherever
W tasks are put.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from tessera_rt.errors import Problem, ScheduleError
from tessera_rt.split import PendingGrad, accumulate


@dataclass(frozen=True, slots=True)
class _Entry:
    microbatch: int
    w_task: str
    pending: PendingGrad
    buffer: Tensor


class WeightGradQueue:
    """A ``split.WeightGradSink``. ``buffer_of(parameter, w_task)``: where that use's gradient is summed.

    ``pending_bytes``: memory that waiting entries hold (each storage counted once); ``peak_bytes``: most so far.
    """

    def __init__(self, buffer_of: Callable[[nn.Parameter, str], Tensor]) -> None:
        self._buffer_of = buffer_of
        self._current: tuple[int, str] | None = None
        self._tasks: dict[tuple[int, str], list[_Entry]] = {}
        self._queues: dict[tuple[int, str], deque[_Entry]] = {}
        self._holders: dict[int, int] = {}  # storage -> entries that hold it
        self.pending_bytes = 0
        self.peak_bytes = 0

    @property
    def current_task(self) -> str:
        """The W task that belongs to the B task now running ("" outside of one)."""
        return self._current[1] if self._current else ""

    @property
    def pending_count(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def set_current(self, microbatch: int, w_task: str) -> None:
        """The next backward is that of ``w_task``'s B task. Raises ScheduleError if it has been done in this step."""
        key = microbatch, w_task
        if key in self._tasks:
            raise _refused(key, "its B task runs once per step")
        self._current = key
        self._tasks[key] = []

    def defer(self, pending: PendingGrad) -> None:
        """Called in backward, possibly from a thread of autograd."""
        if self._current is None:
            problem = Problem("weight gradient", tuple(pending.weight.shape), "deferred inside of a B task")
            raise ScheduleError.of("weight gradients", [problem])
        microbatch, w_task = self._current
        entry = _Entry(microbatch, w_task, pending, self._buffer_of(pending.weight, w_task))
        self._tasks[self._current].append(entry)
        self._queues.setdefault((id(pending.weight), w_task), deque()).append(entry)
        for storage, size in _storages(pending):
            self._holders[storage] = self._holders.get(storage, 0) + 1
            self.pending_bytes += size if self._holders[storage] == 1 else 0
        self.peak_bytes = max(self.peak_bytes, self.pending_bytes)

    def run(self, microbatch: int, w_task: str) -> None:
        """Do a W task: all that its B task deferred, in reverse call order.

        Raises ScheduleError if the B task has not been done, W was done before, or an older micro-batch waits.
        """
        entries = self._tasks.pop((microbatch, w_task), None)
        if entries is None:
            raise _refused((microbatch, w_task), "after its B task and once per step")
        for entry in entries:
            queue = self._queues[id(entry.pending.weight), w_task]
            if queue[0] is not entry:
                raise _refused(
                    (microbatch, w_task), f"after {w_task} of micro-batch {queue[0].microbatch}, which is older"
                )
            queue.popleft()
            accumulate(entry.pending, entry.buffer)
            for storage, size in _storages(entry.pending):
                self._holders[storage] -= 1
                if self._holders[storage] == 0:
                    del self._holders[storage]
                    self.pending_bytes -= size

    def check_empty(self) -> None:
        """End of a step. Raises ScheduleError naming every weight gradient that no W task has done."""
        left = [key for key, entries in self._tasks.items() if entries]
        if left:
            allowed = "done by a W task of the plan"
            remedy = "tasks without W, such as ROUTE and POST, must not use split linear functions"
            raise ScheduleError.of(
                "weight gradients left at the end of the step",
                [Problem(w_task, f"micro-batch {microbatch}", allowed, remedy) for microbatch, w_task in left],
            )
        self._tasks.clear()
        self._current = None


def _refused(key: tuple[int, str], allowed: str) -> ScheduleError:
    return ScheduleError.of("weight gradients", [Problem(key[1], f"micro-batch {key[0]}", allowed)])


def _storages(pending: PendingGrad) -> Iterator[tuple[int, int]]:
    for tensor in (pending.x, pending.grad):
        storage = tensor.untyped_storage()
        yield storage.data_ptr(), storage.nbytes()
