"""Expert-parallel transport over peer memory: count exchange, dispatch and combine, forward and backward.

    placement = transport.exchange(ids).wait()                       counts go round, every unit gets its place
    received = transport.dispatch(x, weights, placement).wait()      tokens go to their experts
    ...                                                              rows y of the experts, at ``position``
    out = transport.combine(y, position, received).wait().out        rows come back and are summed

The backward of combine is ``dispatch_gradient``, that of dispatch is ``combine(..., weighted=False)``, which brings the
router weights' gradients home too. Each call is split: the method puts and signals, ``wait`` waits and takes; work of
other streams, or of the same one, fits between. Nothing waits for the host, so all of it can be captured.

On each channel (counts, dispatch, combine) memory is double-buffered: two calls may be under way, and are waited for in
order. Every rank makes the same calls in the same order, with zero tokens too. Waits are bounded: ``check`` raises
what went wrong. Nothing here has run on a GPU yet: it is tested interpreted, and compiled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from tessera_rt.errors import Problem, SpecError, TransportError
from tessera_rt.kernels.budget import SmBudget, device_budget
from tessera_rt.kernels.launching import launching
from tessera_rt.kernels.operands import (
    DEFAULT_RUN,
    ID_DTYPES,
    INDEX_DTYPES,
    Run,
    check_tensors,
    refuse,
    shape_problem,
    tensor_problems,
    warp_options,
)
from tessera_rt.kernels.peer_memory import PeerAllocator
from tessera_rt.kernels.routing import PLACE_BLOCK, Routed, expert_rows, place
from tessera_rt.kernels.routing_kernels import histogram_kernel, tile_scan_kernel
from tessera_rt.kernels.transport_calls import Combined, Issued, Received
from tessera_rt.kernels.transport_kernels import (
    counts_put_kernel,
    counts_take_kernel,
    limit_rows_kernel,
    reach_kernel,
    returns_put_kernel,
    returns_take_kernel,
    rows_put_kernel,
    rows_take_kernel,
    slots_kernel,
)
from tessera_rt.kernels.transport_layout import Channel, Combine, Layout, Region, Traffic, differences
from tessera_rt.kernels.transport_signal_kernels import wait_kernel

BLOCK, BLOCK_H, WARPS = 8, 512, 8  # rows and columns of a tile: a warp has a row of 512
COUNT_BLOCK, COUNT_WARPS = 128, 4
REACH_BLOCK, REACH_WARPS = 128, 8
# Looks at a flag in local memory: some minutes, because ranks may still compile. About a microsecond each on a GPU
# (an estimate), a tenth of a millisecond and more where kernels are interpreted.
POLLS_CUDA, POLLS_INTERPRETED = 200_000_000, 500_000
UNDER_WAY = 2  # calls per channel: memory is double-buffered


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the units of one routing go; all on the device.

    ``ids`` [U, J] int32 as dispatched; ``slots`` [U, W]: row at each rank or -1; ``home`` [T, K]: negative for choices
    that are not sent; ``counts`` [W, E]: choices per source and expert; ``incoming`` [1]: units this rank receives.
    All int32. ``tokens`` = T. It may be used again, by every transport of its ``traffic``.
    """

    traffic: Traffic
    tokens: int
    ids: Tensor
    slots: Tensor
    home: Tensor
    counts: Tensor
    incoming: Tensor


class PeerTransport:
    """One rank's end of the transport, for one layer (or for layers of equal traffic that run in turn).

    ``allocator``: makes the peer memory; the constructor is a collective call. ``run``: the SM budget, whose
    communication SMs bound every grid (all SMs if there are none), and a trace.
    ``polls``: how often a wait looks at its flags before it gives up, 0 for some minutes. Raises SpecError.
    """

    def __init__(self, traffic: Traffic, allocator: PeerAllocator, *, run: Run = DEFAULT_RUN, polls: int = 0) -> None:
        problems = []
        if allocator.world != traffic.world:
            problems.append(Problem("world", traffic.world, f"{allocator.world}, the allocator's"))
        if traffic.dtype == torch.float64:
            problems.append(Problem("dtype", str(traffic.dtype), "bfloat16, float16 or float32 over peer memory"))
        if not 0 <= polls < 1 << 31:
            problems.append(Problem("polls", polls, "from 1 to 2^31 - 1, or 0 for some minutes"))
        if problems:
            raise SpecError.of("peer transport", problems)
        self.traffic, self.rank, self.world = traffic, allocator.rank, allocator.world
        self._layout = Layout.of(traffic)
        self._memory = allocator.allocate(self._layout.total, traffic.values())
        self.device = self._memory.local.device
        self._run = communication_run(run, self.device)
        self._polls = polls or (POLLS_CUDA if self.device.type == "cuda" else POLLS_INTERPRETED)
        flags = (len(Channel), self.world)
        self._ready = self._memory.view(self._layout.ready, flags, torch.int32)
        self._free = self._memory.view(self._layout.free, flags, torch.int32)
        # Per channel: epoch of the newest put, epoch of the newest take, programs that have arrived at each. Four
        # integers apart, so that addresses are multiples of 16 bytes as in the code that is compiled offline.
        self._counters = torch.zeros(len(Channel), 4, 4, dtype=torch.int32, device=self.device)
        self._words = torch.zeros(8, dtype=torch.int32, device=self.device)
        self._begun, self._done = [0] * len(Channel), [0] * len(Channel)
        self._block_w = max(triton.next_power_of_2(self.world), 2)

    @property
    def rows_limit(self) -> int:
        """Choices that the experts have room for."""
        return self.traffic.rows

    def exchange(self, ids: Tensor) -> Issued[Placement]:
        """Chosen experts ``ids`` [T, K] of an integer type (outside 0 .. E - 1: not sent) -> where all units go."""
        traffic = self.traffic
        problems = tensor_problems("ids", ids, (None, traffic.top_k), ID_DTYPES, self.device)
        if ids.dim() and ids.shape[0] > traffic.tokens:
            problems.append(Problem("tokens", ids.shape[0], f"at most {traffic.tokens}", "raise the traffic's tokens"))
        refuse("exchange", problems)
        tokens, units = ids.shape[0], ids.shape[0] * traffic.units_per_token
        if ids.dtype == torch.int64:
            ids = ids.clamp(-1, traffic.experts)  # one beyond int32 would come back as another expert
        ids = ids.resolve_neg().to(torch.int32).contiguous().view(units, traffic.choices)
        before, of_ranks, of_experts = self._count(ids)
        channel, layout = Channel.COUNTS, self._layout
        slab = (self._ready_flag(channel), self.rank, self.world, traffic.experts)
        number = self._begin(channel)
        grid, places, traced = self._grid(counts_put_kernel, self.world)
        counts_put_kernel[grid](
            self._memory.bases, of_experts, of_ranks, self._counters[channel, 0, 0], self._words,
            self._counters[channel, 2, 0], places, layout.counts.start, layout.counts.size, *slab,
            BLOCK=COUNT_BLOCK, BLOCK_W=self._block_w, **warp_options(COUNT_WARPS), **traced,
        )  # fmt: skip
        return Issued(lambda: self._placed(number, tokens, ids, before))

    def dispatch(self, x: Tensor, weights: Tensor, placement: Placement) -> Issued[Received[Placement]]:
        """Sends ``x`` [T, H] with the router's ``weights`` [T, K] fp32 to the experts of ``placement``."""
        problems = self._of_this_traffic(placement)
        shape = (placement.tokens, self.traffic.top_k)
        problems += tensor_problems("weights", weights, shape, (torch.float32,), self.device)
        self._check_rows("dispatch", "x", x, placement.tokens, problems)
        sent = weights.resolve_neg().contiguous()
        number = self._put_rows(x, placement, sent)
        return Issued(lambda: self._received(number, placement, sent))

    def dispatch_gradient(self, grad: Tensor, received: Received[Placement]) -> Issued[Tensor]:
        """The backward of ``combine``: ``grad`` [T, H] goes where the tokens went -> [R, H] as ``received.x``. The
        experts' backward multiplies by ``received.weights``."""
        problems = self._of_this_traffic(received.placement)
        self._check_rows("dispatch_gradient", "grad", grad, received.placement.tokens, problems)
        number = self._put_rows(grad, received.placement, None)
        return Issued(lambda: self._take_rows(number, received.placement, None))

    def combine(
        self,
        y: Tensor,
        position: Tensor,
        received: Received[Placement],
        *,
        weighted: bool = True,
        router_gradient: Tensor | None = None,
    ) -> Issued[Combined]:
        """Brings the experts' rows home: out[t] = sum over k of weights[t, k] y[position of (t, k)].

        ``y`` [any, H]; ``position`` [R, J] int32: the row of each received choice, below the number of rows of ``y``
        (it is read unchecked), -1 for none (counts as zero).
        Without ``weighted`` a plain sum: the backward of ``dispatch``, which passes ``router_gradient`` [R, J] fp32.
        """
        traffic, channel, layout = self.traffic, Channel.COMBINE, self._layout
        problems, shape = self._of_this_traffic(received.placement), (traffic.units_received, traffic.choices)
        problems += tensor_problems("position", position, shape, INDEX_DTYPES, self.device)
        if router_gradient is not None:
            problems += tensor_problems("router_gradient", router_gradient, shape, (torch.float32,), self.device)
        self._check_rows("combine", "y", y, None, problems)
        y, number = _with_rows(y), self._begin(channel)
        returned, gradients = layout.returned, layout.gradients
        reduced = traffic.combine is Combine.REDUCED
        block_h = self._block_h()
        tasks = triton.cdiv(traffic.units_received, BLOCK) * triton.cdiv(traffic.hidden, block_h)
        grid, places, traced = self._grid(returns_put_kernel, tasks)
        returns_put_kernel[grid](
            self._memory.bases, y, position.contiguous(), received.ids, received.origin, received.weights,
            None if router_gradient is None else router_gradient.resolve_neg().contiguous(),
            received.placement.incoming,
            self._counters[channel, 0, 0], self._words, self._counters[channel, 2, 0], places, self.rank, self.world,
            traffic.hidden, y.stride(0), traffic.row_stride, returned.start, returned.size, gradients.start,
            gradients.size, self._ready_flag(channel),
            J=traffic.choices, REDUCED=reduced, HAS_WEIGHTS=weighted and reduced,
            HAS_GRADIENT=router_gradient is not None,
            ELEMENT=traffic.dtype.itemsize, BLOCK=BLOCK, BLOCK_H=block_h, BLOCK_W=self._block_w, **warp_options(WARPS),
            **traced,
        )  # fmt: skip
        weights = received.sent_weights if weighted and not reduced else None
        return Issued(lambda: self._combined(number, received.placement, weights, router_gradient is not None))

    def check(self) -> None:
        """Reads the error words (waiting for the device): call it off the path, once a step.

        Raises TransportError for a wait that gave up, naming this rank, the peer and what it waited for, after which
        this transport is unusable on all ranks; or for units or rows that found no room, with the size needed by the
        rank that needs most, which is the same on all ranks (``clear_overflow`` forgets it).
        """
        phase, peer, epoch, value, units, rows, *_ = self._words.tolist()
        if phase:
            raise TransportError(
                f"rank {self.rank} waited for rank {peer} {_phase_text(phase)}: after {self._polls} polls its flag is "
                f"at call {value}, not {epoch}"
            )
        traffic, problems = self.traffic, []
        if units:
            problem = Problem(
                "capacity", traffic.units_received, f"at least {units}", "units were left out: run it again"
            )
            problems.append(problem)
        if rows:
            problem = Problem("row_capacity", traffic.rows, f"at least {rows}", "choices were left out: run it again")
            problems.append(problem)
        if problems:
            raise TransportError.of(f"rank {self.rank}: expert-parallel transport", problems)

    @property
    def overflow(self) -> Tensor:
        """[2] int32 on the device: units and rows that found no room so far (0: all did), as ``check`` reads them."""
        return self._words[4:6]

    def clear_overflow(self) -> None:
        """Forgets recorded overflows."""
        self._words[4:6].zero_()

    def preset_epochs(self, epoch: int) -> None:
        """Sets every counter and flag of this rank to ``epoch``, as after so many calls. All ranks do it with the same
        number, while nothing is under way, and meet before their next call."""
        wrapped = (epoch + (1 << 31)) % (1 << 32) - (1 << 31)
        self._counters[:, :2] = wrapped
        self._ready.fill_(wrapped)
        self._free.fill_(wrapped)

    def _count(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(units and choices per rank before each tile, the same of all, choices per expert)."""
        traffic, (units, choices) = self.traffic, ids.shape
        tiles = triton.cdiv(units, REACH_BLOCK)
        before = self._ints(tiles, 2 * self.world)
        of_ranks = self._ints(2 * self.world)
        grid, places, traced = self._grid(reach_kernel, tiles)
        reach_kernel[grid](
            ids, before, places, units, self.world, traffic.experts, traffic.local_experts,
            J=choices, BLOCK=REACH_BLOCK, BLOCK_W=self._block_w, **warp_options(REACH_WARPS), **traced,
        )  # fmt: skip
        self._scan(before, of_ranks)
        total = ids.numel()
        place_tiles = triton.cdiv(total, PLACE_BLOCK)
        of_tiles = self._ints(place_tiles, traffic.experts)
        of_experts = self._ints(traffic.experts)
        grid, places, traced = self._grid(histogram_kernel, place_tiles)
        histogram_kernel[grid](
            ids, of_tiles, places, total, place_tiles, traffic.experts, choices, choices, 1,
            BLOCK=PLACE_BLOCK, BLOCK_E=32, **warp_options(4), **traced,
        )  # fmt: skip
        self._scan(of_tiles, of_experts)
        return before, of_ranks, of_experts

    def _scan(self, counts: Tensor, totals: Tensor) -> None:
        """Counts of tiles [tiles, columns] become those of earlier tiles, in place; totals [columns]."""
        tiles, columns = counts.shape
        grid, places, traced = self._grid(tile_scan_kernel, triton.cdiv(columns, 32))
        tile_scan_kernel[grid](
            counts, totals, places, tiles, columns, BLOCK_T=64, BLOCK_E=32, **warp_options(4), **traced
        )

    def _placed(self, number: int, tokens: int, ids: Tensor, before: Tensor) -> Placement:
        traffic, channel, layout = self.traffic, Channel.COUNTS, self._layout
        self._arrive(channel, number)
        counts = self._ints(self.world, traffic.experts)
        first, incoming = self._ints(self.world), self._ints(1)
        grid, places, traced = self._grid(counts_take_kernel, 1)
        counts_take_kernel[grid](
            self._memory.bases, self._local(layout.counts, torch.int32), self._counters[channel, 1, 0], self._words,
            self._counters[channel, 3, 0], counts, first, incoming, places,
            layout.counts.size, self._free_flag(channel), self.rank, self.world, traffic.experts,
            traffic.units_received, traffic.rows,
            BLOCK=COUNT_BLOCK, BLOCK_W=self._block_w, **warp_options(COUNT_WARPS), **traced,
        )  # fmt: skip
        units = ids.shape[0]
        slots, home = self._ints(units, self.world), self._ints(tokens, traffic.top_k)
        grid, places, traced = self._grid(slots_kernel, triton.cdiv(units, REACH_BLOCK))
        slots_kernel[grid](
            ids, before, first, self._words, slots, home, places,
            units, self.world, traffic.experts, traffic.local_experts, traffic.units_received,
            J=traffic.choices, BLOCK=REACH_BLOCK, BLOCK_W=self._block_w, **warp_options(REACH_WARPS), **traced,
        )  # fmt: skip
        return Placement(traffic, tokens, ids, slots, home, counts, incoming)

    def _put_rows(self, x: Tensor, placement: Placement, weights: Tensor | None) -> int:
        traffic, channel, layout = self.traffic, Channel.DISPATCH, self._layout
        x, number = _with_rows(x), self._begin(channel)
        units, block_h = placement.slots.shape[0], self._block_h()
        tasks = triton.cdiv(units, BLOCK) * triton.cdiv(traffic.hidden, block_h)
        grid, places, traced = self._grid(rows_put_kernel, tasks)
        rows_put_kernel[grid](
            self._memory.bases, x, placement.slots, placement.ids, weights, self._counters[channel, 0, 0], self._words,
            self._counters[channel, 2, 0], places, self.rank, self.world, units, traffic.hidden, x.stride(0),
            traffic.units_per_token, traffic.row_stride, layout.rows.start, layout.rows.size, layout.origin.start,
            layout.origin.size, layout.ids.start, layout.ids.size, layout.weights.start, layout.weights.size,
            self._ready_flag(channel),
            J=traffic.choices, META=weights is not None,
            BLOCK=BLOCK, BLOCK_H=block_h, BLOCK_W=self._block_w, **warp_options(WARPS),
            **traced,
        )  # fmt: skip
        return number

    def _received(self, number: int, placement: Placement, sent_weights: Tensor) -> Received[Placement]:
        received, choices = self.traffic.units_received, self.traffic.choices
        ids = self._ints(received, choices)
        weights = torch.empty(received, choices, dtype=torch.float32, device=self.device)
        origin = self._ints(received, 2)
        x = self._take_rows(number, placement, (origin, ids, weights))
        return Received(placement, x, ids, weights, sent_weights, origin)

    def _take_rows(self, number: int, placement: Placement, meta: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
        traffic, channel, layout = self.traffic, Channel.DISPATCH, self._layout
        self._arrive(channel, number)
        out = torch.empty(traffic.units_received, traffic.hidden, dtype=traffic.dtype, device=self.device)
        block_h = self._block_h()
        tasks = triton.cdiv(traffic.units_received, BLOCK) * triton.cdiv(traffic.hidden, block_h)
        grid, places, traced = self._grid(rows_take_kernel, tasks)
        rows_take_kernel[grid](
            self._memory.bases, self._local(layout.rows, traffic.dtype), self._local(layout.origin, torch.int32),
            self._local(layout.ids, torch.int32), self._local(layout.weights, torch.float32),
            self._counters[channel, 1, 0], self._words, self._counters[channel, 3, 0], placement.incoming,
            out, *(meta or (None, None, None)), places, self.rank, self.world, traffic.units_received, traffic.hidden,
            traffic.row_stride, traffic.local_experts, layout.rows.size, layout.origin.size, layout.ids.size,
            layout.weights.size, self._free_flag(channel),
            J=traffic.choices, META=meta is not None, ELEMENT=traffic.dtype.itemsize,
            BLOCK=BLOCK, BLOCK_H=block_h, BLOCK_W=self._block_w, **warp_options(WARPS),
            **traced,
        )  # fmt: skip
        return out

    def _combined(self, number: int, placement: Placement, weights: Tensor | None, gradient: bool) -> Combined:
        traffic, channel, layout = self.traffic, Channel.COMBINE, self._layout
        self._arrive(channel, number)
        tokens, block_h = placement.tokens, self._block_h()
        out = torch.empty(tokens, traffic.hidden, dtype=traffic.dtype, device=self.device)
        shape = (tokens, traffic.top_k)
        out_gradient = torch.empty(shape, dtype=torch.float32, device=self.device) if gradient else None
        sent = placement.slots if traffic.combine is Combine.REDUCED else placement.home
        tasks = triton.cdiv(tokens, BLOCK) * triton.cdiv(traffic.hidden, block_h)
        grid, places, traced = self._grid(returns_take_kernel, tasks)
        returns_take_kernel[grid](
            self._memory.bases, self._local(layout.returned, traffic.dtype),
            self._local(layout.gradients, torch.float32), sent, placement.home, weights,
            self._counters[channel, 1, 0], self._words, self._counters[channel, 3, 0], out, out_gradient, places,
            self.rank, self.world, tokens, traffic.hidden, traffic.row_stride, layout.returned.size,
            layout.gradients.size, self._free_flag(channel),
            PARTS=traffic.parts, TOP_K=traffic.top_k, HAS_WEIGHTS=weights is not None, HAS_GRADIENT=gradient,
            ELEMENT=traffic.dtype.itemsize, BLOCK=BLOCK, BLOCK_H=block_h, BLOCK_W=self._block_w, **warp_options(WARPS),
            **traced,
        )  # fmt: skip
        return Combined(out, out_gradient)

    def _begin(self, channel: Channel) -> int:
        """The number of a new call, whose memory the peers have freed once what is launched here has run."""
        if self._begun[channel] - self._done[channel] >= UNDER_WAY:
            raise TransportError(
                f"rank {self.rank}: {UNDER_WAY} calls of {channel.name.lower()} are under way already; wait for one"
            )
        self._begun[channel] += 1
        self._wait(channel, 0, self._free, UNDER_WAY)
        return self._begun[channel]

    def _arrive(self, channel: Channel, number: int) -> None:
        if number != self._done[channel] + 1:
            raise TransportError(
                f"rank {self.rank}: call {number} of {channel.name.lower()} is waited for before call "
                f"{self._done[channel] + 1}"
            )
        self._done[channel] = number
        self._wait(channel, 1, self._ready, 0)

    def _wait(self, channel: Channel, side: int, flags: Tensor, lag: int) -> None:
        grid, places, traced = self._grid(wait_kernel, 1)
        wait_kernel[grid](
            self._counters[channel, side, 0], flags[channel], self._words, places, self.world, self._polls,
            _phase(channel, side), LAG=lag, **warp_options(1), **traced,
        )  # fmt: skip

    def _ready_flag(self, channel: Channel) -> int:
        return self._layout.ready + 4 * self.world * channel

    def _free_flag(self, channel: Channel) -> int:
        return self._layout.free + 4 * self.world * channel

    def _local(self, region: Region, dtype: torch.dtype) -> Tensor:
        return self._memory.view(region.start, (2 * region.size // dtype.itemsize,), dtype)

    def _ints(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self.device)

    def _block_h(self) -> int:
        return int(min(BLOCK_H, triton.next_power_of_2(self.traffic.hidden)))

    def _grid(self, kernel: object, tasks: int) -> tuple[tuple[int], Tensor | None, dict[str, bool]]:
        """Grid, its part of the trace, and the kernel's option that says whether there is one. Raises SpecError."""
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            remedy = f"call torch.cuda.set_device({self.device.index}) before the transport is used"
            current = torch.cuda.current_device()
            raise SpecError.of("transport", [Problem("current device", current, str(self.device), remedy)])
        grid, places = self._run.grid(kernel, self.device, tasks)
        return grid, places, {"TRACE": places is not None}

    def _of_this_traffic(self, placement: Placement) -> list[Problem]:
        """Problems if the placement's rows would lie elsewhere here."""
        remedy = "the placement is of other traffic: exchange the ids with this transport"
        return differences(placement.traffic.values(), self.traffic.values(), "this transport's", remedy)

    def _check_rows(self, where: str, name: str, x: Tensor, rows: int | None, problems: list[Problem]) -> None:
        problems += shape_problem(name, x, rows, self.traffic.hidden)
        if x.dtype != self.traffic.dtype or x.device != self.device:
            wanted = f"{self.traffic.dtype} on {self.device}"
            problems.append(Problem(name, f"{x.dtype} on {x.device}", wanted))
        check_tensors(where, problems, x)


@launching
def route_received(
    ids: Tensor, experts: int, rows: int, *, block_ms: tuple[int, ...] = (), run: Run = DEFAULT_RUN
) -> Routed:
    """``routing.route_rows`` of received ``ids`` [R, J] over a buffer of at most ``rows`` rows: choices behind its end
    have no row (a transport with this ``row_capacity`` has recorded the size needed)."""
    position, source, offsets = place(ids, experts, budget=run.budget, trace=run.trace)
    rows = min(rows, ids.numel())
    if rows < ids.numel():
        limited, ends = torch.empty_like(position), torch.empty_like(offsets)
        tasks = triton.cdiv(max(position.numel(), offsets.numel()), 128)
        grid, places = run.grid(limit_rows_kernel, ids.device, tasks)
        limit_rows_kernel[grid](
            position, offsets, limited, ends, places, position.numel(), rows, experts,
            BLOCK=128, TRACE=places is not None, **warp_options(4),
        )  # fmt: skip
        position, source, offsets = limited, source[:rows], ends
    return Routed(position, source, expert_rows(offsets, rows, block_ms, trace=run.trace))


def communication_run(run: Run, device: torch.device) -> Run:
    """``run`` with the budget's communication SMs (all SMs if none are set aside) as those that kernels may use."""
    budget = run.budget or device_budget(device)
    return Run(SmBudget(budget.communication or budget.total), trace=run.trace)


def _with_rows(x: Tensor) -> Tensor:
    """``x`` with contiguous rows of stored values, copied if it has none."""
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 else x.contiguous()


def _phase(channel: Channel, side: int) -> int:
    return 1 + 2 * channel + side


def _phase_text(phase: int) -> str:
    channel, side = divmod(phase - 1, 2)
    name = Channel(channel).name.lower()
    return f"to send its part of {name}" if side else f"to free its memory of {name}"
