"""Training: what every rank runs, from a configuration and a plan to a trained model and a run folder.

    <run>/config.yaml  plan.yaml  metrics.jsonl  timelines/step-<n>.json  checkpoints/step-<n>/

``train`` is the entry of a rank; start it with ``launch.run_local`` or under torchrun. It may be imported freely.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from rich.console import Console

from tessera_rt import checkpoint
from tessera_rt.checkpoint import CheckpointInfo
from tessera_rt.config import OptimizerSection, TrainConfig, config_to_yaml, run_folder, save_config
from tessera_rt.data import Data, Layout, open_data
from tessera_rt.engine.engine import Engine, StepResult
from tessera_rt.engine.optim import OptimizerConfig
from tessera_rt.errors import PlanError, Problem, SpecError
from tessera_rt.files.file_checks import write_atomically
from tessera_rt.files.plan_files import save_plan
from tessera_rt.files.timeline_files import save_timeline
from tessera_rt.models.hybrid import HybridModel
from tessera_rt.plan import Plan
from tessera_rt.planner.build import build_plan
from tessera_rt.planner.sm_budget import Costs
from tessera_rt.progress import RunProgress

METRICS: Final = "metrics.jsonl"
PLAN: Final = "plan.yaml"
CONFIG: Final = "config.yaml"
TIMELINES: Final = "timelines"
CHECKPOINTS: Final = "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSummary:
    """What a run did, equal on all ranks. Losses are means per token (nats); None where nothing was measured.

    ``first_step``: steps that were done before, 0 for a new run. ``step_ns``: median step time on the first rank.
    ``unchanged``: names of parameters with the same bits as when the run began, of ``parameters`` in all.
    """

    folder: str
    first_step: int
    steps: int
    first_loss: float | None
    last_loss: float | None
    held_out_before: float | None
    held_out_after: float | None
    step_ns: int | None
    tokens_per_step: int
    skipped: int
    parameters: int
    unchanged: tuple[str, ...]
    checkpoint: str


def make_plan(config: TrainConfig, costs: Costs) -> Plan:
    """The plan that the configuration asks for, with the given costs (see ``planner.build.build_plan``)."""
    section = config.plan
    return build_plan(
        config.model,
        config.mesh,
        costs,
        microbatches=config.data.microbatches,
        template=section.template,
        memory_limit=section.memory_limit,
        recompute=section.recompute,
        objective=section.objective,
        partitioner=section.partitioner,
        pad=section.pad,
    )


def train(config: TrainConfig, plan: Plan, folder: Path | None = None) -> TrainSummary:
    """Train on this rank; the default process group must exist. Collective, also in everything it raises for users.

    ``folder``: of the run, where it is settled already; else ``config.run_folder`` of the first rank.

    Raises SpecError for data, model or checkpoint that do not fit, PlanError for a plan that is not for this
    configuration or number of processes, TransportError when a rank fails or does not answer in time.
    """
    check_plan_fits(config, plan)
    return _Run(config, plan, folder or _agreed_folder(config)).train()


def check_plan_fits(config: TrainConfig, plan: Plan) -> None:
    """Raises PlanError with everything in which a plan is not for this configuration."""
    again = "plan again, or change the configuration"
    # The optimizer's state is part of the planned memory; tessera plan takes it from the costs, without them AdamW's.
    of_costs = "plan with costs of tessera profile for this configuration, or change its optimizer section"
    workload = config.workload()
    given: Mapping[str, tuple[object, object, str]] = {
        "fingerprint": (plan.fingerprint, config.model.fingerprint, again),
        "mesh": (_mesh_text(plan.mesh), _mesh_text(config.mesh), again),
        "microbatches": (plan.microbatches, config.data.microbatches, again),
        "workload.tokens": (plan.workload.tokens, workload.tokens, again),
        "workload.context": (plan.workload.context, workload.context, again),
        "workload.dtype": (plan.workload.dtype, workload.dtype, again),
        "workload.optimizer": (plan.workload.optimizer, workload.optimizer, of_costs),
        "workload.momentum": (plan.workload.momentum, workload.momentum, of_costs),
    }
    problems = [
        Problem(name, planned, f"{wanted}, as configured", remedy)
        for name, (planned, wanted, remedy) in given.items()
        if planned != wanted
    ]
    if problems:
        raise PlanError.of(f"plan for {plan.model}", problems)


def run_info(config: TrainConfig, *, tokens: int, step: int = 0, rows: int = 0) -> CheckpointInfo:
    """What a checkpoint of this run is of, after ``step`` steps; ``tokens``: of the training data."""
    mesh = config.mesh
    return CheckpointInfo(
        model=config.model.name,
        fingerprint=config.model.fingerprint,
        step=step,
        rows=rows,
        dtype=config.run.dtype,
        optimizer=config.optimizer.kind,
        seed=config.run.seed,
        sequence=config.data.sequence,
        tokens=tokens,
        mesh={"pp": mesh.pp, "vpp": mesh.vpp, "dp": mesh.dp, "ep": mesh.ep},
        config=config_to_yaml(config),
    )


def resumed_checkpoint(config: TrainConfig, folder: Path, *, tokens: int) -> tuple[Path, CheckpointInfo] | None:
    """The checkpoint with which the run in ``folder`` goes on, None for a new run. ``tokens``: of the training data.

    Raises SpecError when there is none where ``run.resume`` says, and with everything in which it does not fit.
    """
    resume = config.run.resume
    if resume == "never":
        return None
    path = checkpoint.find_checkpoint(folder if resume == "latest" else Path(resume))
    if path is None:
        if resume == "latest":
            return None  # the first start of a run that is told to go on whenever it is started
        allowed = "never, latest, or the folder of a checkpoint or of a run that has one"
        raise SpecError.of("run", [Problem("run.resume", resume, allowed)])
    found = checkpoint.read_info(path)
    checkpoint.check_resumable(path, found, run_info(config, tokens=tokens))
    if config.run.steps < found.step:
        allowed = f"at least {found.step}, the steps that the checkpoint has done"
        raise SpecError.of("run", [Problem("run.steps", config.run.steps, allowed)])
    return path, found


def learning_rate(section: OptimizerSection, step: int, steps: int) -> float:
    """Rate of step ``step`` (from 0) of ``steps``: linear warm-up, then a cosine to ``final_lr * lr``, or constant."""
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    if section.schedule == "constant":
        return section.lr
    share = (step - section.warmup_steps) / max(1, steps - 1 - section.warmup_steps)
    return section.lr * (section.final_lr + (1 - section.final_lr) * (1 + math.cos(math.pi * min(share, 1.0))) / 2)


class _Run:
    """One run on one rank. ``step``: optimizer steps done; ``rows``: rows of training data read by all ranks."""

    def __init__(self, config: TrainConfig, plan: Plan, folder: Path) -> None:
        run = config.run
        self.config = config
        self.plan = plan
        self.folder = folder
        self.first_rank = dist.get_rank() == 0
        self.data: Data = open_data(config.data, vocab=config.vocab, seed=run.seed)
        self.engine = Engine(
            HybridModel(config.model, seed=run.seed, dropout=run.dropout),
            plan,
            optimizer=_optimizer(config.optimizer),
            overlap=config.plan.overlap,
            seed=run.seed,
            timeout_s=run.timeout_s,
        )
        groups = self.engine.groups
        self.layout = Layout(
            rank=groups.dp_i * plan.mesh.ep + groups.ep_i,
            ranks=config.data_ranks,
            microbatches=config.data.microbatches,
            rows=config.data.microbatch_size,
        )
        self.rows = 0
        self.saved = ""
        self._resume()

    @property
    def step(self) -> int:
        return self.engine.steps_done

    def train(self) -> TrainSummary:
        steps, first_step = self.config.run.steps, self.step
        self._open_folder()
        console = Console() if self.first_rank else None
        digests = self._digests()
        results: list[StepResult] = []
        times: list[int] = []
        with RunProgress(console, first=first_step, steps=steps) as progress:
            before = after = self._evaluate(progress)
            while self.step < steps:
                result, step_ns = self._train_step(progress)
                results.append(result)
                times.append(step_ns)
                last = self.step == steps
                if last:
                    self._record_timeline()
                if last or _every(self.config.run.evaluate_every, self.step):
                    after = self._evaluate(progress)
                if last or _every(self.config.run.save_every, self.step):
                    self._save(progress)
        names, unchanged = self._compare(digests)
        return TrainSummary(
            folder=str(self.folder),
            first_step=first_step,
            steps=self.step,
            first_loss=results[0].loss if results else None,
            last_loss=results[-1].loss if results else None,
            held_out_before=before,
            held_out_after=after,
            step_ns=_agreed(sorted(times)[len(times) // 2]) if times else None,
            tokens_per_step=self.layout.rows_per_step * self.config.data.sequence,
            skipped=sum(result.skipped for result in results),
            parameters=len(names),
            unchanged=unchanged,
            checkpoint=self.saved,
        )

    # -- steps ------------------------------------------------------------------------------------------------------

    def _train_step(self, progress: RunProgress) -> tuple[StepResult, int]:
        self.engine.reporter.arrive(f"reading the data of step {self.step + 1}")
        batch = self.data.batch(self.rows, self.layout)
        rate = learning_rate(self.config.optimizer, self.step, self.config.run.steps)
        started = time.perf_counter_ns()
        result = self.engine.step(batch, lr=rate)
        step_ns = time.perf_counter_ns() - started
        self.rows += self.layout.rows_per_step
        row = {"kind": "train", **asdict(result), "lr": rate, "step_ns": step_ns}
        self._record(row | {"tokens_per_s": result.tokens * 1e9 / step_ns})
        progress.step(self.step, loss=result.loss, tokens=result.tokens, step_ns=step_ns)
        if result.skipped:
            progress.note(f"step {self.step} was skipped: the gradient norm is {result.grad_norm}")
        return result, step_ns

    def _evaluate(self, progress: RunProgress) -> float | None:
        """Mean held-out loss per token, or None without held-out data."""
        total, counted = 0.0, 0
        for index in range(self.data.held_out_batches(self.config.run.evaluate_batches, self.layout)):
            tokens, labels, labels_counted = self.data.held_out_batch(index, self.layout)
            total += self.engine.evaluate((tokens, labels)) * labels_counted
            counted += labels_counted
        if not counted:
            return None
        loss = total / counted
        self._record({"kind": "evaluate", "step": self.step, "held_out_loss": loss, "tokens": counted})
        progress.note(f"held-out loss {loss:.4f} after {self.step} steps")
        return loss

    # -- the run folder ---------------------------------------------------------------------------------------------

    def _open_folder(self) -> None:
        """Write what is known before the first step. Of a run that goes on, later metrics are forgotten."""
        if not self.first_rank:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        save_config(self.config, self.folder / CONFIG)
        save_plan(self.plan, self.folder / PLAN)
        path = self.folder / METRICS
        kept: list[str] = []
        if path.is_file() and self.step:
            lines = path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if _is_before(line, self.step)]
        write_atomically(path, "".join(f"{line}\n" for line in kept))

    def _record(self, row: Mapping[str, Any]) -> None:
        """One line of metrics; numbers that are not finite become null."""
        if self.first_rank:
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
            with (self.folder / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite, allow_nan=False) + "\n")

    def _record_timeline(self) -> None:
        timeline = self.engine.timeline(f"step {self.step}")
        if self.first_rank:
            save_timeline(timeline, self.folder / TIMELINES / f"step-{self.step:06d}.json")

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _save(self, progress: RunProgress) -> None:
        self.engine.reporter.arrive(f"saving after step {self.step}")
        info = run_info(self.config, tokens=len(self.data.train.tokens), step=self.step, rows=self.rows)
        path = checkpoint.save_checkpoint(self.folder / CHECKPOINTS, self.engine.state_dict(), info)
        self.saved = str(path)
        progress.note(f"saved {path}")

    def _resume(self) -> None:
        resumed = resumed_checkpoint(self.config, self.folder, tokens=len(self.data.train.tokens))
        if resumed is None:
            return
        path, found = resumed
        self.engine.load_state_dict(checkpoint.load_checkpoint(path, self.engine.state_dict()))
        self.rows = found.rows
        self.saved = str(path)

    # -- what changed -----------------------------------------------------------------------------------------------

    def _digests(self) -> dict[str, bytes]:
        return {
            name: hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
            for name, tensor in self.engine.named_parameters().items()
        }

    def _compare(self, before: Mapping[str, bytes]) -> tuple[set[str], tuple[str, ...]]:
        """Names of all ranks' parameters, and those whose bits are what they were."""
        same = [name for name, digest in self._digests().items() if digest == before[name]]
        told: list[tuple[list[str], list[str]]] = [([], [])] * dist.get_world_size()
        dist.all_gather_object(told, (list(before), same))
        unchanged = {name for _, of_rank in told for name in of_rank}
        return {name for of_rank, _ in told for name in of_rank}, tuple(sorted(unchanged))


def _optimizer(section: OptimizerSection) -> OptimizerConfig:
    return OptimizerConfig(
        kind=section.kind,
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        weight_decay=section.weight_decay,
        momentum=section.momentum,
        clip=section.clip,
    )


def _agreed(value: Any) -> Any:
    """The first rank's value, on all ranks."""
    told = [value]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def _agreed_folder(config: TrainConfig) -> Path:
    """Only one rank looks which folder is free: the others might see it already taken by this very run."""
    return Path(_agreed(str(run_folder(config)) if dist.get_rank() == 0 else ""))


def _every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0


def _is_before(line: str, step: int) -> bool:
    """Whether a line of metrics comes before those that a run writes when it goes on after ``step`` (cut off: no)."""
    try:
        row = json.loads(line)
        return int(row["step"]) < step + int(row["kind"] == "train")
    except (ValueError, KeyError, TypeError):
        return False


def _mesh_text(mesh: Any) -> str:
    return f"pp {mesh.pp} x vpp {mesh.vpp} x dp {mesh.dp} x ep {mesh.ep}"
