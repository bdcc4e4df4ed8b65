"""Settings of the run itself: the sections `[run]` and `[checkpoint]` of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from paceline.core.errors import ConfigError, nearest
from paceline.core.extensions import Registry
from paceline.core.imports import split_name
from paceline.core.settings import NO_SETTING, Section, SettingChecks

DEVICES = ("auto", "cpu", "cuda")
SWITCHES = ("auto", "on", "off")
LOSSES = ("cross_entropy", "bce")
# Parameters of Beta distributions: below this range, shares are 0 or 1; above it, they are all 0.5.
MIXES = (0.01, 100.0)
SYNCHRONOUS = "synchronous"
STRATEGIES: Registry[Any] = Registry("strategies", {SYNCHRONOUS: "train.strategy:Synchronous"})
BATCH_NORM_ROWS = ("ranks", "average")
SIGNAL_ACTIONS = ("save", "stop")
# More than the cores of any node; torch accepts 2^31 - 1 and then fails to start the threads.
MOST_THREADS = 4096


@dataclass(frozen=True)
class Pending:
    """A recipe that chooses its settings when the run starts.

    Attributes:
        recipe: Name of the recipe.
        given: The settings that the user has given; the recipe changes none of them.
        trust: True if the user allows code that a file names.
    """

    recipe: str
    given: Mapping[str, Any]
    trust: bool = False


@dataclass(frozen=True)
class RunSettings(Section):
    """Length, batch size, device and output of a run."""

    NAME: ClassVar[str] = "run"
    CHOOSERS: ClassVar[tuple[str, ...]] = ("strategy",)

    name: str = "run"
    """Name of the run and of its folders; a recipe sets its own name."""
    epochs: int = 90
    """Number of passes over the training data."""
    minutes: float | None = None
    """Time for the whole run in minutes, with `recipe = auto`. The number of epochs is corrected once,
    after the first epoch."""
    global_batch_size: int | None = None
    """Samples of one update over all ranks. If unset: `batch_size` times the ranks, or 256 (less for
    small data sets) if both are unset.
    """
    batch_size: int | None = None
    """Samples of one forward and backward pass of one process. If unset: the largest equal part of the
    global batch, at most 256.
    """
    strategy: str = SYNCHRONOUS
    """How ranks turn the micro-batches of a step into new weights: `synchronous` (one update with the sum
    of all gradients), or an extension with settings in the table `[run.NAME]`.
    """
    loss: str = "cross_entropy"
    """`cross_entropy`, `bce` (binary cross-entropy, mean over classes), or a function of outputs and
    targets, as in `my_package.losses:focal`."""
    smoothing: float = 0.1
    """Label smoothing; functions of `run.loss` get unsmoothed targets."""
    mixup: float = 0.0
    """Parameter of mixup's Beta distribution; 0 disables it; with `cutmix` also set, each image
    uses one of the two."""
    cutmix: float = 0.0
    """Parameter of CutMix's Beta distribution; 0 disables it."""
    average_epochs: float = 0.0
    """Evaluate and export weights averaged over about this many epochs; 0 disables averaging."""
    seed: int = 0
    """Seed of the initial weights, the sample order, augmentation and dropout."""
    device: str = "auto"
    """Where to compute: `auto` (a GPU if there is one), `cpu` or `cuda`."""
    threads: int = 0
    """CPU threads of each rank; 0 divides the cores of a node among its ranks."""
    channels_last: bool = True
    """Keep weights and activations in NHWC memory format."""
    cuda_graphs: str = "auto"
    """Capture forward, backward and update as CUDA graphs: `on`, `off`, or `auto` (on a GPU)."""
    output: str = ""
    """Run folder. If empty: `runs/NAME-NNN`."""
    resume: str = ""
    """`auto`, a run folder or a checkpoint to continue from; empty starts a new run."""
    pretrained: str = ""
    """Weights to start from, with torchvision's or timm's keys (`.pth`, `.pt` or `.safetensors`)."""
    log_interval: int = 10
    """Steps between two log lines if the output is no terminal."""
    eval_interval_epochs: int = 1
    """Epochs between two evaluations."""
    target_top1: float | None = None
    """Stop at the first evaluation that reaches this top-1 accuracy, in percent."""
    trackers: tuple[str, ...] = ()
    """Experiment trackers that also receive all metrics: `csv` (`metrics.csv`), `tensorboard`, `wandb`,
    `mlflow`; all but `csv` need an extra of that name.
    """
    report_port: int | None = None
    """Port of the loopback interface for the live report of a training run; 0 takes a free port."""
    eval_details: str = "auto"
    """Record accuracies by class, confusions and the most confident mistakes of the latest evaluation:
    `on`, `off`, or `auto` (up to 20,000 validation images and 1,000 classes).
    """
    noise_scale: bool = False
    """Estimate the gradient noise scale; needs at least two micro-batches per step."""
    traced_steps: tuple[int, ...] = ()
    """First and last step of the trace (`trace.json` in the run folder, for Perfetto); empty writes none,
    `--trace` is `[10, 30]`.
    """

    pending: Pending | None = field(
        default=None, kw_only=True, hash=False, compare=False, metadata=NO_SETTING
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        STRATEGIES.check(self.strategy, "run.strategy")
        check = SettingChecks("run", self)
        for name in (
            "epochs", "log_interval", "eval_interval_epochs", "global_batch_size", "batch_size",
        ):  # fmt: skip
            check.number(name, "at least 1")
        check.number("minutes", "above 0", "try 10")
        if ":" in self.loss:
            split_name("run.loss", self.loss)
        elif self.loss not in LOSSES:
            remedy = f"{nearest(self.loss, LOSSES)} (a function is written my_module:my_loss)"
            raise check.error("loss", "unknown", remedy)
        check.number("smoothing", "in [0, 1)", "try 0.1")
        for name in ("mixup", "cutmix"):
            value = getattr(self, name)
            if value != 0 and not MIXES[0] <= value <= MIXES[1]:
                raise check.error(
                    name, f"must be 0 (off), or from {MIXES[0]} to {MIXES[1]}",
                    "try 0.2" if name == "mixup" else "try 1.0",
                )  # fmt: skip
        check.number("average_epochs", "0 or more", "try 5.0")
        if not 0 <= self.seed < 2**63:
            raise check.error("seed", "must be 0 or more, and below 2^63")
        if not 0 <= self.threads <= MOST_THREADS:
            raise check.error(
                "threads", f"must be from 0 (automatic) to {MOST_THREADS}",
                "leave it out to divide the cores among the ranks of the node",
            )  # fmt: skip
        if self.target_top1 is not None and not 0 < self.target_top1 <= 100:
            raise check.error("target_top1", "must be a percentage in (0, 100]")
        steps = list(self.traced_steps)
        if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1] < steps[0] + 1000):
            raise ConfigError(
                "run.traced_steps", steps, "must be the first and last of at most 1000 steps",
                "try [10, 30]",
            )  # fmt: skip
        if self.report_port is not None and not 0 <= self.report_port < 65536:
            raise check.error("report_port", "must be 0 to 65535")
        check.known("device", DEVICES)
        check.known("eval_details", SWITCHES)
        check.known("cuda_graphs", SWITCHES)


@dataclass(frozen=True)
class CheckpointSettings:
    """When checkpoints are saved, and how many are kept. A signal and the end of a run always save."""

    interval_epochs: int = 1
    """Epochs between two checkpoints; 0 disables this interval."""
    interval_steps: int = 0
    """Steps between two checkpoints; 0 disables this interval."""
    keep: int = 2
    """Number of recent checkpoints to keep."""
    keep_best: bool = True
    """Also keep the checkpoint with the best top-1 accuracy, as `best.pt`."""
    batch_norm: str = "ranks"
    """Batch-norm statistics in a checkpoint: of all `ranks`, one row each, or their `average`. With
    `average`, every rank continues with the average after a save, for bit-identical resumes;
    evaluations then depend on when the run saves.
    """
    background: bool = True
    """Write checkpoints on a thread; training waits only for the copy to host memory."""
    on_sigusr1: str = "save"
    """Action on SIGUSR1: `save` and continue, or `stop` after saving."""
    on_sigusr2: str = "stop"
    """Action on SIGUSR2: `save` and continue, or `stop` after saving."""

    def __post_init__(self) -> None:
        check = SettingChecks("checkpoint", self)
        for name in ("interval_epochs", "interval_steps"):
            check.number(name, "0 or more")
        check.number("keep", "at least 1")
        check.known("batch_norm", BATCH_NORM_ROWS)
        for name in ("on_sigusr1", "on_sigusr2"):
            check.known(name, SIGNAL_ACTIONS)
