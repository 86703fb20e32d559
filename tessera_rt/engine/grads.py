"""Gradients belong to the engine: flat main-gradient buckets, their reduction, one global norm.

Weight gradients come from two sides, W tasks (``queue``) and autograd (parameters whose gradient is made in B). Both
add in place, each use of a weight into a buffer of its own, so that the order of additions to a buffer, and with it
every bit, depends on the plan's actions only. Gradients are sums: the loss is already divided by the global number of
valid tokens, so nothing is averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tessera_rt.engine.buckets import Weight, collect_weights, gathered, make_buckets, reduce_scatter
from tessera_rt.engine.mesh import Groups
from tessera_rt.engine.weight_queue import WeightGradQueue
from tessera_rt.errors import PlanError, Problem, ScheduleError, SpecError
from tessera_rt.moe.steps import ParameterInfo
from tessera_rt.waits import WaitError, short_cause

_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "ReplicateModule"}


def refuse_wrapped(model: object) -> None:
    """Raises PlanError if a module of ``model`` is wrapped in DDP or FSDP: they miss or lose deferred gradients."""
    held = [model, *getattr(model, "__dict__", {}).values()]
    problems: list[Problem] = []
    seen: set[int] = set()
    for root in held:
        for name, module in root.named_modules() if isinstance(root, nn.Module) else ():
            kinds = _WRAPPERS & {base.__name__ for base in type(module).__mro__ if base.__module__.startswith("torch.")}
            if kinds and id(module) not in seen:
                seen.add(id(module))
                where = f"module {name or type(root).__name__}"
                allowed = "not wrapped: the engine reduces gradients and shards the optimizer itself"
                problems.append(Problem(where, " ".join(sorted(kinds)), allowed, "hand over the module inside"))
    if problems:
        raise PlanError.of("model", problems)


class GradientBuffers:
    """Main gradients of this rank's parameters: fp32, or fp64 for fp64 parameters.

    Per step: ``zero``, backward passes and W tasks, ``reduce``; then ``shards`` hold this rank's part of the summed
    gradients, for the optimizer. Creating it is collective over the tied ranks; from then on all uses of a weight on
    this rank share one tensor. Raises PlanError for parameters that contradict one another.
    """

    def __init__(self, infos: Sequence[ParameterInfo], groups: Groups) -> None:
        self.groups = groups
        weights = _mark_crossing(collect_weights(infos), groups)
        self.frozen = tuple(weight for weight in weights if not weight.first.parameter.requires_grad)
        trained = [weight for weight in weights if weight.first.parameter.requires_grad]
        self.buckets = make_buckets(trained, groups)
        self._flat = [torch.zeros(b.size, dtype=b.main_dtype, device=b.device) for b in self.buckets]
        self.shards = [
            flat if b.group is None else torch.zeros_like(b.own(flat))
            for b, flat in zip(self.buckets, self._flat, strict=True)
        ]
        self._later_uses: list[tuple[Tensor, Tensor]] = []  # (first use's buffer, a later use's)
        self._buffers: dict[int, list[Tensor]] = {}  # by parameter, one per use
        self._assigned: dict[tuple[int, str, str], Tensor] = {}
        self._names: dict[int, str] = {}
        for bucket, flat in zip(self.buckets, self._flat, strict=True):
            for entry in bucket.entries:
                self._add_uses(entry.weight, entry.view(flat))
        self.queue = WeightGradQueue(self._deferred_to)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._take_gradient)  # type: ignore[no-untyped-call]
            for parameter in self._parameters()
        ]
        self._reduced = False

    def zero(self) -> None:
        """Begin a step: all gradients are zero, also those in ``.grad``."""
        for flat in self._flat:
            flat.zero_()
        for _, buffer in self._later_uses:
            buffer.zero_()
        for parameter in self._parameters():
            parameter.grad = None
        self._reduced = False

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum over uses, over the ranks that see other data, and over the two ranks of a tied weight (collective).

        Raises ScheduleError if W tasks are missing, or on a second call without ``zero`` (it would count twice).
        """
        self.queue.check_empty()
        if self._reduced:
            raise ScheduleError.of("reduce", [Problem("calls", 2, "one after each zero()")])
        self._reduced = True
        for parameter in self._parameters():  # what a user put there; a hook has taken all else
            if parameter.grad is not None:
                self._buffers[id(parameter)][0].add_(parameter.grad)
                parameter.grad = None
        for first, later in self._later_uses:
            first.add_(later)
        started = [
            (bucket, bucket.group, reduce_scatter(shard, flat, bucket.group))
            for bucket, flat, shard in zip(self.buckets, self._flat, self.shards, strict=True)
            if bucket.group is not None
        ]
        for bucket, group, work in started:
            self.groups.wait(work, f"the reduction of gradients ({bucket.name})", group)
        # Last, so that both ranks hold the same bits whatever order the sums before were made in.
        tied = self.groups.tied
        for bucket, shard in zip(self.buckets, self.shards, strict=True):
            if bucket.crossing and tied is not None:
                pair = dist.all_reduce(shard, group=tied, async_op=True)
                assert pair is not None
                self.groups.wait(pair, f"the sum of tied gradients ({bucket.name})", tied)

    def named_gradients(self) -> dict[str, Tensor]:
        """Whole reduced gradients of this rank's weights under layout-free names (collective). After ``reduce``."""
        if not self._reduced:
            raise ScheduleError.of("named_gradients", [Problem("reduce", "not done", "called before")])
        return {
            name: gradient
            for bucket, shard in zip(self.buckets, self.shards, strict=True)
            for name, gradient in bucket.named(gathered(bucket, shard, self.groups, "gradients"))
        }

    def named_parameters(self) -> dict[str, Tensor]:
        """Copies of this rank's weights under layout-free names; experts one by one, a tied weight once."""
        return {name: tensor.clone() for name, tensor in self._named_tensors()}

    @torch.no_grad()
    def load_parameters(self, state: Mapping[str, Any]) -> None:
        """Copy tensors of ``state`` into the weights. Raises SpecError for every name that is missing or misshapen."""
        own = dict(self._named_tensors())
        check_tensors("parameters", state, own)
        for name, tensor in own.items():
            tensor.copy_(state[name])

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        weights = [entry.weight for bucket in self.buckets for entry in bucket.entries]
        for weight in (*weights, *self.frozen):
            yield from weight.named(weight.first.parameter.detach())

    def _parameters(self) -> list[nn.Parameter]:
        """Trained parameters, each once."""
        uses = (use for bucket in self.buckets for entry in bucket.entries for use in entry.weight.uses)
        return list({id(use.parameter): use.parameter for use in uses}.values())

    def _add_uses(self, weight: Weight, buffer: Tensor) -> None:
        for number, use in enumerate(weight.uses):
            own = buffer if number == 0 else torch.zeros_like(buffer)
            if number:
                self._later_uses.append((buffer, own))
                use.parameter.data = weight.first.parameter.data
            self._buffers.setdefault(id(use.parameter), []).append(own)
            self._names[id(use.parameter)] = weight.name

    def _buffer(self, parameter: nn.Parameter, w_task: str, side: str) -> Tensor:
        """The buffer of the use that ``w_task`` makes of a parameter; uses are told apart when they first appear."""
        key = id(parameter), w_task, side
        if key not in self._assigned:
            buffers = self._buffers.get(id(parameter))
            if buffers is None:
                problem = Problem("parameter", tuple(parameter.shape), "listed in parameter_infos() and trained")
                raise PlanError.of("weight gradients", [problem])
            others = [(task, how) for (owner, task, how) in self._assigned if owner == id(parameter)]
            if len(others) == len(buffers):
                texts = [f"{task or 'backward'} ({how})" for task, how in (*others, (w_task, side))]
                allowed = f"{len(buffers)}, as often as parameter_infos() lists it"
                remedy = "list it once per use, with tied=<name>: bits must not depend on which use comes first"
                problem = Problem(f"uses of {self._names[id(parameter)]}", ", ".join(texts), allowed, remedy)
                raise PlanError.of("weight gradients", [problem])
            self._assigned[key] = buffers[len(others)]
        return self._assigned[key]

    def _deferred_to(self, parameter: nn.Parameter, w_task: str) -> Tensor:
        """Where W adds. A user's ``.grad`` is added now, lest the hook takes it for this backward's."""
        buffer = self._buffer(parameter, w_task, "W")
        if parameter.grad is not None:
            self._buffers[id(parameter)][0].add_(parameter.grad)
            parameter.grad = None
        return buffer

    @torch.no_grad()
    def _take_gradient(self, parameter: Tensor) -> None:
        """Hook: autograd is done with a parameter; ``.grad`` is None when its gradient was left to W."""
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is None:
            return
        self._buffer(parameter, self.queue.current_task, "B").add_(parameter.grad)
        parameter.grad = None


def global_norm(buffers: GradientBuffers) -> float:
    """2-norm of the reduced gradients of the whole model, every weight once; the same bits on all ranks (collective).

    Summed in float64. Infinite or NaN on every rank if a gradient is so on one.
    """
    groups = buffers.groups
    total = torch.zeros((), dtype=torch.float64, device=groups.device_mesh.device_type)
    for bucket, shard in zip(buffers.buckets, buffers.shards, strict=True):
        if not bucket.crossing or groups.rank == groups.tied_ranks[0]:
            total += torch.linalg.vector_norm(shard, dtype=torch.float64).square()
    work = dist.all_reduce(total, group=groups.world, async_op=True)
    assert work is not None
    groups.wait(work, "the gradient norm", groups.world)
    return float(total.sqrt())


def check_tensors(where: str, state: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> None:
    """Raises SpecError for every wanted name that ``state`` lacks or holds in another shape."""
    problems: list[Problem] = []
    for name, tensor in wanted.items():
        shape = tuple(state[name].shape) if name in state else None
        if shape != tuple(tensor.shape):
            problems.append(
                Problem(name, "missing" if shape is None else shape, f"a tensor of shape {tuple(tensor.shape)}")
            )
    if problems:
        raise SpecError.of(where, problems)


def _mark_crossing(weights: list[Weight], groups: Groups) -> list[Weight]:
    """Marks the tied weights that the other tied rank holds too. Raises PlanError on both if they do not match."""
    if groups.tied is None:
        return weights
    mine = {w.name: (tuple(w.shape), str(w.dtype), w.first.decay) for w in weights if w.first.tied}
    both: list[tuple[bool, dict[str, Any]]] = [(False, {}), (False, {})]
    _exchange(both, (bool(weights), mine), groups)
    (first_has, first), (second_has, second) = both
    crossing = sorted(first.keys() & second.keys())
    problems = [
        Problem(f"{name} on ranks {groups.tied_ranks}", f"{first[name]} and {second[name]}", "alike on both")
        for name in crossing
        if first[name] != second[name]
    ]
    if first_has and second_has and not crossing:
        allowed = "marked as uses of one weight (tied=<its name> in parameter_infos())"
        problems.append(Problem(f"embedding and head on ranks {groups.tied_ranks}", "not tied", allowed))
    if not problems:
        equal = all([_same_values(weight, groups) for weight in weights if weight.name in crossing])
        answers = [True, True]
        _exchange(answers, equal, groups)
        if not all(answers):
            names = ", ".join(crossing)
            problems.append(Problem(f"initial {names} on ranks {groups.tied_ranks}", "different", "the same values"))
    if problems:
        raise PlanError.of("tied weights", problems)
    return [replace(weight, crossing=weight.name in crossing) for weight in weights]


def _same_values(weight: Weight, groups: Groups) -> bool:
    assert groups.tied is not None
    theirs = weight.first.parameter.detach().clone()
    work = dist.broadcast(theirs, src=groups.tied_ranks[0], group=groups.tied, async_op=True)
    assert work is not None
    groups.wait(work, f"the values of {weight.name}", groups.tied)
    return torch.equal(theirs, weight.first.parameter.detach())


def _exchange(into: list[Any], mine: Any, groups: Groups) -> None:
    try:
        dist.all_gather_object(into, mine, group=groups.tied)
    except RuntimeError as error:
        raise WaitError(f"{groups.name} lost the other rank of a tied weight: {short_cause(error)}") from error
