"""Defines the section `[optim]` of a recipe: optimizer and learning-rate schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from paceline.core.exclusions import Exclusion, check_exclusions, not_in, one_of
from paceline.core.imports import split_name
from paceline.core.settings import NO_SETTING, Section, SettingChecks, parse_arguments
from paceline.optim.batch_growth import BATCH_RATES, BatchGrowth
from paceline.optim.registry import (
    OWNERS,
    OptimizerSettings,
    check_optimizer,
    check_schedule,
    registered_rule,
)
from paceline.optim.schedules import ScheduleSettings

PATHS = ("auto", "foreach", "triton")
SCALINGS = ("off", "auto")


@dataclass(frozen=True)
class KnownGood:
    """Facts about the origin of the settings, from which the scaling rule starts.

    Attributes:
        batch: Global batch of the recipe.
        optimizer: Optimizer whose rate the recipe has; None if the run uses the same optimizer, empty
            if there is no rate, so that the rule chooses it.
        named: True if the recipe or the user names the optimizer.
        momentum: The recipe's momentum; None if the run uses the same momentum.
        keeps: Names of settings that the user has given and the rule does not change.
    """

    batch: int | None = None
    optimizer: str | None = None
    named: bool = True
    momentum: float | None = None
    keeps: tuple[str, ...] = ()


@dataclass(frozen=True)
class OptimSettings(Section):
    """Optimizer and learning-rate schedule; docs/optimizers.md has the equations."""

    NAME: ClassVar[str] = "optim"
    OWNERS: ClassVar[Mapping[str, str]] = OWNERS
    CHOOSERS: ClassVar[tuple[str, ...]] = ("name", "schedule")

    name: str = "sgd"
    """`sgd`, `lars`, `muon`, `adamw`, `lamb`, another name of docs/optimizers.md, a class of torch.optim
    or another module (`torch.optim:RAdam`), or a registered name."""
    arguments: str = ""
    """Keyword arguments, except the learning rate, of a class `module:Class` or a registered optimizer,
    as TOML: `{betas = [0.9, 0.95]}`.
    """
    lr: float | None = None
    """Peak learning rate. If unset: the rate of the rule (`scaling`), or `lr_base` · global batch /
    `lr_base_batch` (linear scaling)."""
    lr_base: float = 0.1
    """Peak learning rate at a global batch of `lr_base_batch`. The default is 0.00025 with `adamw` and
    0.000625 with `lamb`."""
    lr_base_batch: int = 256
    """Global batch that `lr_base` refers to."""
    scaling: str = "auto"
    """`auto` chooses optimizer and rate, and what belongs to them, if no rate is given or the batch is
    not the recipe's, unless you give a rate; `off` changes no setting."""
    known_good_batch: int | None = None
    """Global batch at which the recipe works, for `scaling`. If unset: the recipe's
    `run.global_batch_size`.
    """
    momentum: float = 0.9
    """Momentum of SGD, LARS and Muon."""
    nesterov: bool = False
    """Use Nesterov momentum in SGD, LARS and Muon."""
    clip_norm: float = 0.0
    """Maximum norm of all gradients together; 0 disables clipping."""
    layer_decay: float = 1.0
    """Factor of the learning rate from each layer to the layer before it; 1 disables it."""
    weight_decay: float = 1e-4
    """Weight decay; applies to biases and normalization only with `decay_bias_norm`."""
    decay_bias_norm: bool = False
    """Apply weight decay to biases and normalization parameters."""
    warmup_epochs: float = 5.0
    """Epochs of linear warm-up."""
    warmup_start: float = 0.0
    """Learning rate at the start of warm-up."""
    warmup_max_share: float = 1.0
    """Maximum fraction of the run for warm-up. The command line sets 0.2, or the recipe's fraction if
    larger, and 1 if `--warmup-epochs` is given."""
    schedule: str = "cosine"
    """Decay after warm-up: `constant`, `cosine`, `poly`, `exponential`, `step`, `piecewise`, a name that
    docs/optimizers.md lists, or a registered name."""
    lr_end: float = 0.0
    """Final learning rate of schedules that have one, such as `cosine` and `poly`."""
    decay_over_epochs: float | None = None
    """Epoch at which `cosine` and `poly` reach `lr_end`, warm-up included. If unset: the end of the
    run."""
    batch_schedule: str = ""
    """Growth of the global batch: a list of epochs and batches (`0:256,8:1024,12:4096`), or `x4` to
    multiply the batch by 4 at each of `optim.step.epochs`, or `x4:4096` to do so up to a batch of 4,096
    and then decay the rate. Empty for a constant batch."""
    batch_rate: str = "auto"
    """Change of the learning rate with `batch_schedule`: `constant`, `linear` (times batch / first
    batch), `sqrt`, or `auto` (`linear` with a rule such as `x4`, otherwise `constant`).
    """
    fused: str = "auto"
    """Implementation of the update: `triton`, `foreach`, or `auto` (Triton on a GPU if it is
    installed)."""

    known_good: KnownGood = field(
        default=KnownGood(), kw_only=True, hash=False, compare=False, metadata=NO_SETTING
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)
        check_exclusions((*EXCLUSIONS, *self.exclusions()), optim=self)

    @property
    def known_batch(self) -> int | None:
        """Global batch at which the recipe works; None if there is no such batch."""
        return self.known_good_batch or self.known_good.batch

    @property
    def follows_rule(self) -> bool:
        """True if the scaling rule may change the settings; this depends on the batch, too."""
        given = self.known_good
        known = self.known_batch is not None or given.optimizer == ""
        has_rate = any(name.startswith("optim.lr") for name in given.keeps)
        return self.scaling == "auto" and known and not has_rate and not self.batch_schedule

    @property
    def is_class(self) -> bool:
        """True if `name` is `module:Class`."""
        return ":" in self.name

    @property
    def is_foreign(self) -> bool:
        """True if the optimizer is a class of torch or another module, or registered by a program."""
        return self.is_class or registered_rule(self.name) is not None

    @property
    def own_optimizer(self) -> OptimizerSettings:
        """The settings of the chosen optimizer; default `OptimizerSettings` if it has no settings."""
        own = self.chosen(self.name)
        return own if isinstance(own, OptimizerSettings) else OptimizerSettings()

    @property
    def own_schedule(self) -> ScheduleSettings:
        """The settings of the chosen schedule."""
        own = self.chosen(self.schedule)
        assert isinstance(own, ScheduleSettings), self.schedule
        return own

    @property
    def has_default_base(self) -> bool:
        return self.lr_base == OptimSettings.lr_base

    @property
    def batch_growth(self) -> BatchGrowth:
        """The parsed `batch_schedule`."""
        return BatchGrowth.parse(self.batch_schedule)

    def arguments_table(self) -> dict[str, Any]:
        """Returns `arguments` as a dictionary."""
        table = parse_arguments("optim.arguments", self.arguments)
        return {key: tuple(v) if isinstance(v, list) else v for key, v in table.items()}

    def peak_lr(self, global_batch: int) -> float:
        """Returns `lr` if set, otherwise the base rate scaled linearly with the batch (Goyal 2017)."""
        if self.lr is not None:
            return self.lr
        base = self.own_optimizer.LR_BASE if self.has_default_base else self.lr_base
        return base * global_batch / self.lr_base_batch


def _check(optim: OptimSettings) -> None:
    """Raises ConfigError for the first invalid value."""
    check = SettingChecks("optim", optim)
    if optim.is_class:
        split_name("optim.name", optim.name)
    else:
        check_optimizer(optim.name)
    check_schedule(optim.schedule)
    check.number("lr", "above 0", "0.1 is a common start")
    check.number("lr_base", "above 0", "try 0.1")
    check.number("lr_base_batch", "at least 1")
    check.number("momentum", "in [0, 1)", "try 0.9")
    for name in ("weight_decay", "warmup_epochs", "warmup_start", "lr_end", "clip_norm"):
        check.number(name, "0 or more")
    check.number("warmup_max_share", "in (0, 1]", "try 0.2")
    over = optim.decay_over_epochs
    if over is not None and not optim.warmup_epochs < over < float("inf"):
        raise check.error(
            "decay_over_epochs",
            f"must be after the warm-up of {optim.warmup_epochs:g} epochs",
            "leave it unset to decay over the whole run",
        )
    check.number("layer_decay", "in (0, 1]", "try 0.75, or 1 (off)")
    check.known("scaling", SCALINGS)
    check.number("known_good_batch", "at least 1")
    check.known("batch_rate", BATCH_RATES)
    check.known("fused", PATHS)
    if optim.fused == "triton" and not (
        optim.own_optimizer.HAS_KERNELS or registered_rule(optim.name)
    ):
        raise check.error("fused", f"there are no kernels for {optim.name}", "use 'auto'")
    if optim.arguments_table() and not optim.is_foreign:
        raise check.error("arguments", f"{optim.name} takes none", "leave it out")
    if optim.is_foreign and optim.lr is None and optim.has_default_base:
        raise check.error(
            "lr", f"no learning rate is given, and {optim.name} has no default",
            "give --lr, such as 0.001",
        )  # fmt: skip


def _grows_by_rule(schedule: str) -> bool:
    """Returns True if the batch schedule is a rule such as `x4`."""
    return BatchGrowth.parse(schedule).factor > 1


EXCLUSIONS: tuple[Exclusion, ...] = (
    Exclusion(
        "optim.nesterov", one_of(True), {"optim.momentum": one_of(0)},
        "needs momentum", "set optim.momentum = 0.9",
    ),
    Exclusion(
        "optim.step.epochs", lambda epochs: len(set(epochs)) < len(epochs),
        {"optim.schedule": one_of("step"), "optim.batch_schedule": _grows_by_rule},
        "contains an epoch twice, but optim.batch_schedule = {optim.batch_schedule!r} grows the batch "
        "at each", "give each once",
    ),
    Exclusion(
        "optim.batch_schedule", _grows_by_rule, {"optim.schedule": not_in("step")},
        "grows the batch at optim.step.epochs, which {optim.schedule!r} does not have",
        "use optim.schedule = 'step', or a list as in '0:256,8:1024'",
    ),
)  # fmt: skip
