"""`Progress`, the counters of a run, and `RunState`, which captures and restores checkpoints.

`RunState` refuses a checkpoint of a different run with an error that names the difference.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.comm.memory import Memory
from paceline.comm.probe_cache import constants_of
from paceline.config import RunConfig, with_defaults
from paceline.core.errors import CheckpointError
from paceline.core.settings import flatten
from paceline.data import BatchPlan
from paceline.models import load_tensors
from paceline.optim.base import MasterOptimizer
from paceline.optim.state import MASTER
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.plan_file import PlanFile
from paceline.precision.policy import LossScale
from paceline.train.batch_norm import BatchNormState
from paceline.train.checkpoint import Checkpoint
from paceline.train.machine import versions
from paceline.train.run_folder import is_neutral
from paceline.train.weights import WeightAverage, full_state, restore_masters

if TYPE_CHECKING:
    from paceline.train.strategy import Strategy

# Settings that a resumed run must not change, because they decide the sample order, the shapes of the
# weights or the meaning of the step count.
PINNED = (
    "run.seed", "model.name", "model.arguments", "model.freeze", "model.num_classes", "model.stem",
    "data.image_size", "data.channels", "data.shuffle", "data.val_split", "optim.name",
)  # fmt: skip


@dataclass
class Progress:
    """Counts the completed work of a run. Equal on all ranks and saved with every checkpoint.

    Times and counts continue over resumes.
    """

    step: int = 0
    images: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    # True if the training loss of the latest step was finite.
    loss_finite: bool = True
    corrupt_samples: int = 0
    corrupt: list[int] = field(default_factory=list)
    corrupt_val_samples: int = 0
    train_s: float = 0.0
    step_s: float = 0.0
    evaluated_step: int = -1
    top1: float | None = None
    top5: float | None = None
    val_loss: float | None = None
    best_top1: float = -1.0
    best_step: int = -1
    time_to_target_s: float | None = None
    resumes: list[int] = field(default_factory=list)
    # The running averages of `NoiseScale`: signal, variance and weight.
    noise: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    @property
    def images_per_s(self) -> float:
        """Training throughput, without the time of evaluations and saves."""
        return self.images / self.step_s if self.step_s > 0 else 0.0


def check_pinned(checkpoint: Checkpoint, config: RunConfig, path: Path) -> None:
    """Checks that a checkpoint fits the settings of this run, before anything is built from it.

    Args:
        checkpoint: The checkpoint.
        config: The settings of this run.
        path: File of the checkpoint, for messages.

    Raises:
        CheckpointError: If this run has changed a setting that a resumed run must not change.
    """
    there, here = flatten(with_defaults(checkpoint.config)), config.flat()
    own = config.optim.own_optimizer.PINNED
    for name in (*PINNED, *(f"optim.{config.optim.name}.{key}" for key in own)):
        _compare(path, name, there.get(name), here.get(name))


def changes(checkpoint: Checkpoint, config: RunConfig, ignored: Callable[[str], bool]) -> str:
    """Lists the settings in which this run differs from the run that wrote the checkpoint.

    Args:
        checkpoint: The checkpoint.
        config: The settings of this run.
        ignored: Returns True for the name of a setting that must not be listed.
    """
    there, here = flatten(with_defaults(checkpoint.config)), flatten(config.in_use())
    names = [name for name in there.keys() | here.keys() if there.get(name) != here.get(name)]
    different = sorted(name for name in names if not ignored(name))
    return ", ".join(f"{name} {there.get(name)!r} → {here.get(name)!r}" for name in different)


def _compare(path: Path, name: str, before: object, now: object) -> None:
    if before != now:
        folder = path.parent.parent
        raise CheckpointError(
            f"{path} has {name} = {before!r}, but this run has {now!r}",
            f"continue that run with paceline train {folder / 'config.toml'} --output {folder} --resume "
            "auto, or start a new one with --pretrained",
        )


@dataclass(frozen=True, kw_only=True)
class RunState:
    """All state that changes between steps. Captures it in a checkpoint and restores it.

    Attributes:
        memory: State that the exchange keeps between steps, if any.
        constants: The tables of the measured cluster by which the plan was chosen, if any.
        notes: Messages about state of a restored checkpoint that this run cannot use.
        callbacks: Returns the state of the user's callbacks for the checkpoint.
    """

    config: RunConfig
    batches: BatchPlan
    exchange_plan: FusionPlan
    peak_lr: float
    classes: tuple[str, ...]
    model: nn.Module
    optimizer: MasterOptimizer
    batch_norm: BatchNormState
    scale: LossScale
    group: Group
    strategy: Strategy | None = None
    average: WeightAverage | None = None
    labels: str = ""
    memory: Memory | None = None
    constants: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    callbacks: Callable[[], dict[str, Any]] = dict

    def restore(self, checkpoint: Checkpoint, path: Path, *, elsewhere: bool = False) -> Progress:
        """Restores the state of model, optimizer, batch norm and gradient exchange from a checkpoint.

        Args:
            checkpoint: The checkpoint.
            path: File of the checkpoint, for messages.
            elsewhere: True if the folder of this run is not that of the run that wrote the checkpoint.

        Returns:
            The progress of the run.

        Raises:
            CheckpointError: If the checkpoint belongs to another run (in that case nothing has changed)
                or does not fit the model.
        """
        self._check(checkpoint, path)
        known = Progress.__dataclass_fields__
        if other := [name for name in checkpoint.progress if name not in known]:
            raise CheckpointError(
                f"{path} is of another Paceline version: its progress contains {other[0]!r}",
                "use the Paceline version that wrote it",
            )
        progress = Progress(**checkpoint.progress)
        if self.is_over(progress):
            self._check_unchanged(checkpoint, path, elsewhere)
        try:
            statistics = self.batch_norm.keys()
            missing = self.model.load_state_dict(checkpoint.model, strict=False).missing_keys
            self._restore_optimizer(checkpoint.optimizer)
            if statistics.issuperset(missing):
                restore_masters(self.model, self.optimizer, checkpoint.model)
        except (RuntimeError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[-1].strip()
            raise CheckpointError(f"{path} does not fit ({reason})", "check --model") from None
        lost = [key for key in missing if key not in statistics]
        if lost:
            raise CheckpointError(f"{path} lacks tensors such as {lost[0]}", "check --model")
        saved = checkpoint.batch_norm
        self.scale.restore(checkpoint.precision)
        self.batch_norm.restore(saved["rows"], saved["tracked"], self.group)
        if self.average is not None:
            self.average.restore(checkpoint.average, saved["tracked"], self.group)
        self._restore_exchange(checkpoint, path)
        progress.resumes.append(progress.step)
        if bool(checkpoint.average) != (self.average is not None):
            # Accuracies of averaged and of plain weights cannot be compared.
            progress.evaluated_step = progress.best_step = -1
            progress.best_top1 = -1.0
            progress.time_to_target_s = None
        if flatten(checkpoint.config).get("run.target_top1") != self.config.run.target_top1:
            progress.time_to_target_s = None
        return progress

    def _restore_exchange(self, checkpoint: Checkpoint, path: Path) -> None:
        """Restores the state that the gradient exchange keeps between steps.

        The state of a rank fits only this rank and the messages of one plan. If the number of ranks or
        the plan has changed, the state is dropped.
        """
        saved = checkpoint.exchange
        if not saved:
            if self.memory is not None and checkpoint.step > 0:
                self.notes.append(f"the checkpoint has no {self.memory.kind}: they start afresh")
            return
        kind, ranks = str(saved.get("kind")), self.group.world_size
        reason = ""
        if self.memory is None or self.memory.kind != kind:
            reason = "this run needs none"
        elif checkpoint.world_size != ranks:
            reason = f"the number of ranks was {checkpoint.world_size} and is {ranks}"
        elif saved.get("plan") != self.exchange_plan.fingerprint:
            reason = "the gradient buckets have changed"
        if reason:
            self.notes.append(f"the checkpoint's {kind} are not used: {reason}")
        elif self.memory is not None:
            try:
                own = saved["ranks"][self.group.rank]
                self.memory.load_state(load_tensors(io.BytesIO(own.numpy().tobytes())))
            except CheckpointError as error:
                raise CheckpointError(f"{path}: {error.cause}", error.remedy) from None
            except Exception as error:  # noqa: BLE001  (damaged bytes can raise anything)
                raise CheckpointError(
                    f"{path}: its {kind} cannot be read ({type(error).__name__})",
                    "resume from another checkpoint",
                ) from None

    def _restore_optimizer(self, saved: dict[str, Any]) -> None:
        """Restores the optimizer's state but keeps this run's hyperparameters, which flags may change."""
        own = self.optimizer.state_dict()["param_groups"]
        if [group["params"] for group in saved["param_groups"]] != [g["params"] for g in own]:
            raise ValueError("the optimizer's parameter groups differ; see optim.layer_decay")
        self.optimizer.load_state_dict({**saved, "param_groups": own})

    def _check(self, checkpoint: Checkpoint, path: Path) -> None:
        check_pinned(checkpoint, self.config, path)
        sampler, batches = checkpoint.sampler, self.batches
        for name, before, now in (
            ("run.global_batch_size", sampler["global_batch"], batches.global_batch),
            ("number of training images", sampler["samples"], batches.samples),
            ("classes", _shown(checkpoint.classes), _shown(self.classes)),
            ("digest of the labels", sampler["labels"], self.labels),
            ("number of batch-norm layers", len(checkpoint.batch_norm["names"]),
             len(self.batch_norm.names)),
        ):  # fmt: skip
            _compare(path, name, before, now)
        expected = min(batches.position(checkpoint.step), batches.total_samples)
        there = flatten(checkpoint.config).get("optim.batch_schedule")
        grows = bool(there) or bool(batches.growth)
        if grows and sampler["position"] != expected:
            raise CheckpointError(
                f"{path} is at sample {sampler['position']:,}, but its steps take {expected:,} samples "
                f"with optim.batch_schedule = {self.config.optim.batch_schedule!r}",
                f"resume with {there!r}; only entries for later epochs may change",
            )
        if sampler["position"] < expected:
            # The last batch of a shorter run was not full, so the next step would skip samples.
            raise CheckpointError(
                f"{path} is the end of a shorter run, whose last batch was not full",
                "raise --epochs from a checkpoint before its last step",
            )
        if checkpoint.step > batches.total_steps:
            raise CheckpointError(
                f"{path} is at step {checkpoint.step}, past the {batches.total_steps} of this run",
                "raise --epochs",
            )

    def _check_unchanged(self, checkpoint: Checkpoint, path: Path, elsewhere: bool) -> None:
        """Raises an error if a finished run is resumed with changed settings, which no step would use."""
        # `_check` has compared the global batch, which a user may have given or Paceline chosen.
        compared = {"run.global_batch_size"}
        if elsewhere:
            compared |= {"run.average_epochs"}  # a run in another folder evaluates again
        different = changes(
            checkpoint, self.config, lambda name: name in compared or is_neutral(name)
        )
        if different:
            raise CheckpointError(
                f"{path} is the end of its run, no step is left to train with {different}",
                "start a new run with these settings, or resume an earlier checkpoint",
            )

    def is_over(self, progress: Progress) -> bool:
        """Returns True if no step is left: all steps are done, or the target accuracy is reached."""
        target, top1 = self.config.run.target_top1, progress.top1
        reached = target is not None and top1 is not None and top1 >= target
        evaluated = progress.evaluated_step == progress.step
        return progress.step >= self.batches.total_steps or (reached and evaluated)

    def capture(
        self, progress: Progress, *, before_content: Callable[[], object] = lambda: None
    ) -> Checkpoint | None:
        """Captures a checkpoint of the current state. All ranks call this and send their statistics.

        Args:
            progress: Progress of the run.
            before_content: Function that runs on rank 0 after the collectives, before the state of the
                callbacks is captured.

        Returns:
            The checkpoint on rank 0, None on all other ranks. The checkpoint refers to the tensors of the
            run, which the next step changes.
        """
        one = self.config.checkpoint.batch_norm == "average"
        rows = self.batch_norm.rows(self.group, average=one)
        average = self.average.capture(self.group, average=one) if self.average else {}
        tracked = self.batch_norm.gather_tracked(self.group, average=one)
        exchange = self._capture_exchange()
        if rows is None or tracked is None:
            return None
        before_content()
        return self._checkpoint(progress, rows, tracked, average, exchange=exchange)

    def _capture_exchange(self) -> dict[str, Any]:
        """Gathers each rank's state of the gradient exchange, as bytes because sizes differ."""
        if self.memory is None:
            return {}
        buffer = io.BytesIO()
        torch.save(self.memory.state(), buffer)
        gathered = self.group.gather_bytes(buffer.getvalue())
        ranks = [torch.frombuffer(bytearray(own), dtype=torch.uint8) for own in gathered or ()]
        plan = self.exchange_plan.fingerprint
        return {"kind": self.memory.kind, "plan": plan, "ranks": ranks}

    def capture_alone(self, progress: Progress) -> Checkpoint:
        """Captures a checkpoint without other ranks, with the batch-norm statistics of this rank only."""
        rows = self.batch_norm.flat.detach().cpu()[None].clone()
        average = self.average.capture_alone() if self.average else {}
        tracked, rank = self.batch_norm.tracked.detach().cpu()[None].clone(), self.group.rank
        return self._checkpoint(progress, rows, tracked, average, only_rank=rank).on_host()

    def _checkpoint(
        self, progress: Progress, rows: Tensor, tracked: Tensor, average: dict[str, Any],
        only_rank: int | None = None, exchange: dict[str, Any] | None = None,
    ) -> Checkpoint:  # fmt: skip
        batches, statistics = self.batches, self.batch_norm.keys()
        return Checkpoint(
            progress=asdict(progress),
            config=self.config.in_use(),
            world_size=batches.world_size,
            threads=torch.get_num_threads(),
            plan={**self.exchange_plan.to_table(), **self.constants},
            model={
                name: value.detach()
                for name, value in full_state(self.model, self.optimizer).items()
                if name not in statistics
            },
            batch_norm={
                "names": self.batch_norm.names,
                "widths": self.batch_norm.widths,
                "rows": rows,
                "tracked": tracked,
                **({} if only_rank is None else {"only_rank": only_rank}),
            },
            optimizer=_without_masters(self.optimizer.state_dict()),
            precision=self.scale.state(),
            sampler={
                "position": min(batches.position(progress.step), batches.total_samples),
                "samples": batches.samples,
                "labels": self.labels,
                "global_batch": batches.global_batch,
                "last_batch": batches.last_batch,
                "micro_batch": batches.micro_batch,
                "seed": self.config.run.seed,
            },
            schedule={"peak_lr": self.peak_lr, "total_steps": batches.total_steps},
            rng={"seed": self.config.run.seed, "derived_from": "(seed, step, micro-batch)"},
            classes=list(self.classes),
            versions=versions(),
            average=average,
            callbacks=self.callbacks(),
            exchange=exchange or {},
            strategy={} if self.strategy is None else {self.strategy.name: self.strategy.state()},
        )


def _without_masters(state: dict[str, Any]) -> dict[str, Any]:
    """Returns an optimizer state without the fp32 master weights.

    A checkpoint contains the master weights as the model's weights, which a run in any number format
    can load.
    """
    slim = {
        number: {key: value for key, value in entry.items() if key != MASTER}
        for number, entry in state["state"].items()
    }
    return {**state, "state": slim}


def _shown(classes: Sequence[str]) -> str:
    """Returns the number of classes, the first names and a digest of all names."""
    digest = hashlib.sha256("\n".join(classes).encode()).hexdigest()[:6]
    return f"{len(classes)}: {', '.join(classes[:3])} … ({digest})"


# Settings that determine the plan of the exchange.
_MAKE_PLANS = (
    "comm.algorithm", "comm.hybrid.sizes", "comm.fusion_mib",
    "comm.wire", "comm.plan",
)  # fmt: skip


@dataclass(frozen=True)
class PinnedPlan:
    """The fusion plan (gradient buckets) of a checkpoint, which a resumed run keeps if possible.

    Attributes:
        plan: The plan.
        constants: The measured constants of the cluster on which the plan was made, if any.
        whole: True if neither the number of ranks nor the settings that determine the plan have changed.
            In that case, the resumed run keeps the plan. Otherwise the run uses its plan file, or makes a
            new plan with the order of the gradients from the checkpoint.
    """

    plan: FusionPlan
    whole: bool
    constants: PlanFile | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint, config: RunConfig, world_size: int) -> PinnedPlan:
        """Reads the plan of a checkpoint and compares it with this run."""
        there, here = flatten(checkpoint.config), flatten(config.in_use())
        same = all(there.get(name) == here.get(name) for name in _MAKE_PLANS)
        plan = FusionPlan.from_table(checkpoint.plan)
        constants = None
        if "measured" in checkpoint.plan:
            tables = {name: checkpoint.plan.get(name) for name in ("cluster", "measured")}
            constants = constants_of(tables, "the checkpoint")
        return cls(plan, same and checkpoint.world_size == world_size, constants)
