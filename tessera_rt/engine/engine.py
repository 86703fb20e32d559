"""Engine: runs a plan. ``Engine(model, plan).step(batch)`` fits in a training loop of one's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from tessera_rt.engine.batch import Batch, Microbatch, agree, split_batch, valid_tokens
from tessera_rt.engine.device import CpuDevice, Device, DeviceSetup
from tessera_rt.engine.events import Event
from tessera_rt.engine.grads import GradientBuffers, global_norm, refuse_wrapped
from tessera_rt.engine.loop import Driver
from tessera_rt.engine.mesh import make_groups
from tessera_rt.engine.optim import OptimizerConfig, ShardedOptimizer
from tessera_rt.engine.stage import StageRunner
from tessera_rt.engine.watchdog import FailureReporter
from tessera_rt.errors import PlanError, Problem, SpecError
from tessera_rt.model_spec import ModelSpec
from tessera_rt.moe.steps import Placement, TaskModel, Transport
from tessera_rt.moe.transport import make_transport
from tessera_rt.plan import ActionKind, Message, Plan, messages_from, output_of
from tessera_rt.plan_check import check_plan
from tessera_rt.timeline import Timeline

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
METRICS = ("loss", "aux_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Of one training step, equal on all ranks. ``loss``: mean cross-entropy over ``tokens`` valid tokens.

    ``grad_norm``: global norm before clipping. ``skipped``: it was not finite and the parameters were left alone.
    """

    step: int
    loss: float
    aux_loss: float
    grad_norm: float
    tokens: int
    skipped: bool


class Engine:
    """Owns this rank's stages, their gradients and the optimizer. All public methods are collective over all ranks.

    ``model``: see ``moe.steps.TaskModel``. The default process group must exist and have ``plan.mesh.world`` ranks.
    ``overlap`` off runs the same actions one pass after the other. ``wrap_transport`` lets tests stand between the
    stages and the collectives. Raises PlanError for a plan that is not runnable, for another model or another number of
    processes, before anything is sent.
    """

    def __init__(
        self,
        model: TaskModel,
        plan: Plan,
        *,
        device: Device | None = None,
        optimizer: OptimizerConfig | None = None,
        overlap: bool = True,
        seed: int = 0,
        timeout_s: float = 300.0,
        wrap_transport: Callable[[Transport], Transport] | None = None,
    ) -> None:
        refuse_wrapped(model)
        self.device = device or CpuDevice()
        _refuse_unrunnable(plan, model.spec, dist.get_world_size(), emulated=self.device.emulates)
        self.model = model
        self.plan = plan
        self.overlap = overlap
        self.seed = seed
        self.timeout_s = timeout_s
        self.steps_done = 0
        self.dtype = DTYPES[plan.workload.dtype]
        optimizer = optimizer or OptimizerConfig()
        self._digest = plan_digest(plan)
        self._settings = {
            "overlap": str(overlap),
            "seed": str(seed),
            "recompute": str(plan.workload.recompute),
            **{f"optimizer.{name}": str(value) for name, value in asdict(optimizer).items()},
        }
        self.groups = make_groups(plan, model.spec, timeout_s=timeout_s)
        self.reporter = FailureReporter.for_group(self.groups.world)
        self._runtime = self.device.set_up(
            DeviceSetup(
                plan=plan,
                spec=model.spec,
                groups=self.groups,
                reporter=self.reporter,
                dtype=self.dtype,
                overlap=overlap,
                timeout_s=timeout_s,
            )
        )
        transport = make_transport(self.groups.ep, self.groups.data, plan.mesh, self.groups.rank, timeout_s=timeout_s)
        if wrap_transport is not None:
            transport = wrap_transport(transport)
        placement = Placement(ep_rank=self.groups.ep_i, ep_size=plan.mesh.ep, dtype=self.dtype)
        mine = plan.stages_of[self.groups.pp_i]
        chunks = {s.index: model.build_chunk(model.spec.items[s.start : s.stop], placement) for s in mine}
        for chunk in chunks.values():
            refuse_wrapped(chunk)
        infos = [info for chunk in chunks.values() for info in chunk.parameter_infos()]
        self.gradients = GradientBuffers(infos, self.groups)
        for chunk in chunks.values():
            chunk.set_sink(self.gradients.queue)
        self.optimizer = ShardedOptimizer(self.gradients, optimizer)
        self.stages = {
            index: StageRunner(
                index, chunk, transport, self._runtime.lanes, self.gradients.queue, plan.workload.recompute
            )
            for index, chunk in chunks.items()
        }
        self._driver = Driver(
            plan,
            model.spec,
            self.groups.pp_i,
            self.stages,
            self._runtime.mail,
            overlap=overlap,
            note=self.reporter.arrive,
            blank=self._blank,
        )

    # -- steps ----------------------------------------------------------------------------------------------------

    def step(self, batch: Batch, *, lr: float | None = None, rounds: int = 1) -> StepResult:
        """One training step: all micro-batches, gradient reduction, clipping, optimizer.

        ``batch``: this (dp, ep) coordinate's, the same on its pipeline ranks: (tokens, labels) [B, s] int64 tensors,
        split on dimension 0, or a list of such pairs, one per micro-batch and of any sizes. ``rounds``: how often the
        plan runs before the optimizer does; the batch holds that many times the plan's micro-batches. ``lr``: of this
        step (default: the optimizer's). Raises SpecError for a bad batch, TransportError when a rank fails or does not
        answer in time.
        """
        tokens, loss, aux_loss = self._accumulate(batch, rounds, "step")
        with self._failures("step"):
            norm = global_norm(self.gradients)
            skipped = self.optimizer.step(norm, lr=lr)
            self.steps_done += 1
        return StepResult(
            step=self.steps_done, loss=loss, aux_loss=aux_loss, grad_norm=norm, tokens=tokens, skipped=skipped
        )

    def forward_backward(self, batch: Batch, *, rounds: int = 1) -> tuple[float, dict[str, Tensor]]:
        """Loss and all reduced gradients by global name, without an optimizer step (every rank gets its own names)."""
        _, loss, _ = self._accumulate(batch, rounds, "forward_backward")
        return loss, self.gradients.named_gradients()

    def evaluate(self, batch: Batch) -> float:
        """Mean cross-entropy over the batch's valid tokens; forward only, no dropout, parameters untouched."""
        microbatches = split_batch(batch, self.plan.microbatches, vocab=self.model.spec.vocab)
        with self._failures("evaluate"):
            tokens = self._begin("eval", microbatches)
            given = self._given(microbatches, tokens)
            # In groups that each end by themselves: no answer comes back by which sent activations could be let go.
            for first in range(0, len(microbatches), self.plan.mesh.pp):
                group = range(first, min(first + self.plan.mesh.pp, len(microbatches)))
                self._exchange(microbatches, partial(self._driver.evaluate, given, group), evaluated=group)
            return self._metrics()[0]

    # -- state ------------------------------------------------------------------------------------------------------

    def named_parameters(self) -> dict[str, Tensor]:
        """This rank's parameters by layout-free name; experts one by one."""
        return self.gradients.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Parameters, optimizer state and step count under layout-free names (for torch.distributed.checkpoint)."""
        return {"model": self.named_parameters(), "optimizer": self.optimizer.state_dict(), "steps": self.steps_done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave, whatever layout it was saved from."""
        self.gradients.load_parameters(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps_done = int(state["steps"])

    def close(self) -> None:
        """Give the process groups back (collective). The default group stays."""
        self.gradients.close()
        self.groups.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.gradients.close()
        self.groups.close(abort=error is not None)

    # -- observation ------------------------------------------------------------------------------------------------

    def events(self) -> tuple[Event, ...]:
        """This rank's event log of the last step."""
        return self._runtime.events()

    def timeline(self, label: str = "") -> Timeline:
        """The last step as it was executed, all pipeline ranks of the first column."""
        return Timeline(
            label=label or self.device.source,
            source=self.device.source,
            ranks=self.plan.mesh.pp,
            spans=self._runtime.spans(),
        )

    # -- inside a step ----------------------------------------------------------------------------------------------

    def _accumulate(self, batch: Batch, rounds: int, what: str) -> tuple[int, float, float]:
        """Reduced gradients of a whole batch; its valid tokens, loss and auxiliary loss."""
        if rounds < 1:
            raise SpecError.of(what, [Problem("rounds", rounds, "at least 1")])
        count = self.plan.microbatches
        microbatches = split_batch(batch, rounds * count, vocab=self.model.spec.vocab)
        with self._failures(what):
            tokens = self._begin("train", microbatches)
            self.gradients.zero()
            given = self._given(microbatches, tokens)
            for first in range(0, len(microbatches), count):
                of_round = slice(first, first + count)
                self._exchange(microbatches[of_round], partial(self._driver.train, given[of_round]))
                self.gradients.queue.check_empty()
            self.gradients.reduce()
            loss, aux_loss = self._metrics()
        return tokens, loss, aux_loss

    def _begin(self, mode: str, microbatches: Sequence[Microbatch]) -> int:
        """All ranks mean the same step before the first message; returns the global number of valid tokens."""
        self.reporter.arrive(f"start of {mode} step {self.steps_done + 1}")
        agree(
            mode,
            self.steps_done,
            microbatches,
            self._digest,
            self._settings,
            self.groups,
            self.reporter,
            timeout_s=self.timeout_s,
        )
        return valid_tokens(microbatches, self.groups)

    def _given(self, microbatches: Sequence[Microbatch], tokens: int) -> list[dict[str, Any]]:
        return [
            {
                "tokens": microbatch.tokens,
                "labels": microbatch.labels,
                "loss_scale": 1.0 / max(tokens, 1),
                "aux_scale": 1.0 / len(microbatches),
                "random_key": self._random_key(microbatch.index),
            }
            for microbatch in microbatches
        ]

    def _blank(self, tokens: Tensor) -> Tensor:
        return torch.zeros(self.model.boundary_shape((tokens.shape[0], tokens.shape[1])), dtype=self.dtype)

    def _random_key(self, microbatch: int) -> int:
        text = f"{self.seed}/{self.steps_done}/{self.groups.dp_i}/{self.groups.ep_i}/{microbatch}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    def _exchange(
        self, microbatches: Sequence[Microbatch], run: Callable[[], None], *, evaluated: range | None = None
    ) -> None:
        """Open the mail, ``run``, close the mail. ``evaluated``: forward only, of these micro-batches."""
        shapes = [self.model.boundary_shape((m.tokens.shape[0], m.tokens.shape[1])) for m in microbatches]
        if evaluated is None:
            sent = self._training_messages
        else:
            of_group = frozenset(evaluated)
            sent = tuple(tuple(m for m in of_rank if m.microbatch in of_group) for of_rank in self._evaluation_messages)
        me = self.groups.pp_i
        incoming = {
            source: [message for message in queue if message.target == me]
            for source, queue in enumerate(sent)
            if any(message.target == me for message in queue)
        }
        for stage in self.stages.values():
            stage.chunk.train(evaluated is None)
        self._runtime.open_step(shapes, sent[me], incoming)
        run()
        self._runtime.close_step()

    @cached_property
    def _training_messages(self) -> tuple[tuple[Message, ...], ...]:
        """What every pipeline rank sends in a training step, in order."""
        return tuple(messages_from(self.plan, rank, overlap=self.overlap) for rank in range(self.plan.mesh.pp))

    @cached_property
    def _evaluation_messages(self) -> tuple[tuple[Message, ...], ...]:
        """What every pipeline rank sends when only the forward passes run, in order."""
        passes = [[part for action in actions for part in action.passes] for actions in self.plan.actions]
        outputs = [[output_of(self.plan, part) for part in of_rank if part.kind is ActionKind.F] for of_rank in passes]
        return tuple(tuple(message for message in of_rank if message) for of_rank in outputs)

    def _metrics(self) -> tuple[float, ...]:
        """Loss terms summed over stages and data ranks."""
        total = torch.zeros(len(METRICS), dtype=torch.float64)
        for stage in self.stages.values():
            for name, value in stage.take_metrics().items():
                total[METRICS.index(name)] += value.double()
        work = dist.all_reduce(total, group=self.groups.world, async_op=True)
        assert work is not None
        self.groups.wait(work, "the sum of the loss", self.groups.world)
        return tuple(total.tolist())

    def _failures(self, what: str) -> AbstractContextManager[None]:
        return self.reporter.guard(f"{what} {self.steps_done + 1}")


def plan_digest(plan: Plan) -> str:
    """Equal on all ranks that were given the same plan."""
    text = repr((plan.fingerprint, asdict(plan.mesh), plan.stages, plan.actions, sorted(plan.interleavings.items())))
    return hashlib.sha256(text.encode()).hexdigest()


_EMULATED = ("mtp", "tp")
"""Simulate-only features that change durations alone; the emulated device has one duration for every task."""


def _refuse_unrunnable(plan: Plan, spec: ModelSpec, world: int, *, emulated: bool) -> None:
    """Raises PlanError unless this engine can run the plan on this many processes."""
    problems: list[Problem] = []
    if plan.mesh.tp != 1:
        problems.append(Problem("mesh.tp", plan.mesh.tp, "1", "this engine has no tensor parallelism; plan with tp 1"))
    problems += [
        Problem("simulate_only", feature, "empty for a plan that is run", "this feature can only be simulated")
        for feature in plan.simulate_only
        if not (emulated and feature in _EMULATED)
    ]
    if plan.workload.dtype not in DTYPES:
        problems.append(Problem("workload.dtype", plan.workload.dtype, " | ".join(DTYPES)))
    if problems:
        raise PlanError.of("plan", problems)
    check_plan(plan, spec, world=world)
