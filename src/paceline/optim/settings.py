"""Settings of the optimizer and its schedule, the section `[optim]` of a recipe: names of optimizers and
schedules, ranges of numbers, and combinations that are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from paceline.core.exclusions import Exclusion, check_exclusions, not_in, one_of
from paceline.core.imports import check_module, split_name
from paceline.core.settings import NO_SETTING, Section, SettingChecks, parse_arguments
from paceline.optim.batch_growth import BATCH_RATES, BatchGrowth
from paceline.optim.registry import (
    OWNERS,
    OptimizerSettings,
    check_optimizer,
    check_schedule,
    registered_rule,
)
from paceline.optim.schedules import DECAY, MOMENTUM, ScheduleSettings

PATHS = ("auto", "foreach", "triton")
SCALINGS = ("off", "auto")


@dataclass(frozen=True)
class KnownGood:
    """What the scaling rule has to know of the recipe, and of where values came from.

    Attributes:
        optimizer: Optimizer of the recipe; empty if it is the one in use.
        lr: Its peak rate at the known-good batch, if the command line gives another one.
        momentum: Its momentum, if the command line gives another one.
        keeps: Settings of the command line, which the rule leaves as they are.
    """

    optimizer: str = ""
    lr: float | None = None
    momentum: float | None = None
    keeps: tuple[str, ...] = ()


@dataclass(frozen=True)
class OptimSettings(Section):
    """The update rule and the learning-rate schedule; docs/optimizers.md has the equations."""

    NAME: ClassVar[str] = "optim"
    OWNERS: ClassVar[Mapping[str, str]] = OWNERS
    CHOOSERS: ClassVar[tuple[str, ...]] = ("name", "schedule")

    name: str = "sgd"
    """`sgd`, `lars`, `muon`, `adamw`, `lamb`, another name of docs/optimizers.md, a class of torch.optim
    or of another module, as in `torch.optim:RAdam`, or a registered name."""
    arguments: str = ""
    """Keyword arguments for the class of `module:Class` or for a registered rule beside the rate, as a
    TOML table: `{betas = [0.9, 0.95]}`."""
    lr: float | None = None
    """Peak learning rate; unset, `lr_base` · global batch / `lr_base_batch` (linear scaling)."""
    lr_base: float = 0.1
    """Peak learning rate at a global batch of `lr_base_batch`; the default stands for 0.00025 with
    `adamw` and 0.000625 with `lamb`."""
    lr_base_batch: int = 256
    """Global batch that `lr_base` refers to."""
    scaling: str = "off"
    """`auto` derives optimizer, rate, trust coefficient, warm-up, batch-norm group, averaging and, at
    few steps per epoch, growth of the batch, from a recipe that works at `known_good_batch`; `off`
    uses the settings as they are."""
    known_good_batch: int | None = None
    """Global batch at which the recipe is known to work, for `scaling`; unset, the recipe's own
    `run.global_batch_size`."""
    momentum: float = 0.9
    """Momentum of SGD, LARS and Muon."""
    nesterov: bool = False
    """Use Nesterov momentum in SGD, LARS and Muon."""
    clip_norm: float = 0.0
    """Largest norm of all gradients together; larger ones are scaled down to it; 0 clips nothing."""
    layer_decay: float = 1.0
    """Factor of the learning rate from each layer to the one before it; 1 gives all layers the same."""
    weight_decay: float = 1e-4
    """Weight decay of weights; biases and normalization have none unless `decay_bias_norm`."""
    decay_bias_norm: bool = False
    """Apply weight decay to biases and normalization parameters too."""
    warmup_epochs: float = 5.0
    """Epochs of linear warm-up."""
    warmup_start: float = 0.0
    """Learning rate at the start of warm-up."""
    warmup_max_share: float = 1.0
    """Largest share of the run that warm-up may take; the command line sets 0.2, or the share in
    the recipe if larger, and 1 if `--warmup-epochs` is given."""
    schedule: str = "cosine"
    """Decay after warm-up: `constant`, `cosine`, `poly`, `exponential`, `step`, `piecewise`, a name that
    docs/optimizers.md lists, or a registered name."""
    schedule_free: float = 0.0
    """Schedule-free training: share of the average in the weights at which gradients are taken; 0 is off,
    0.9 common; needs `schedule = "constant"`."""
    lr_end: float = 0.0
    """Final learning rate of schedules that have one, such as `cosine` and `poly`."""
    decay_over_epochs: float | None = None
    """Epoch at which `cosine` and `poly` reach `lr_end`, warm-up included; unset, the end of the
    run."""
    batch_schedule: str = ""
    """Global batches by epoch, as in `0:256,8:1024,12:4096`, or `x4`: four times the batch at each of
    `optim.step.epochs`, with `x4:4096` up to a batch of 4,096 (from then on the rate decays alone);
    empty keeps the batch."""
    batch_rate: str = "auto"
    """How the rate follows the batch of `batch_schedule`: `constant` (not at all), `linear` (times batch
    / first batch), `sqrt`, or `auto` (`linear` with a rule such as `x4`, else `constant`)."""
    fused: str = "auto"
    """Implementation of the update: `triton`, `foreach`, or `auto` (Triton on a GPU where it is
    installed)."""

    known_good: KnownGood = field(default=KnownGood(), kw_only=True, metadata=NO_SETTING)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_optim(self)
        check_exclusions((*EXCLUSIONS, *self.exclusions()), optim=self)

    @property
    def is_class(self) -> bool:
        """Whether `name` is `module:Class`."""
        return _is_class(self.name)

    @property
    def is_foreign(self) -> bool:
        """Returns True if the optimizer is not one of Paceline's own."""
        return self.is_class or registered_rule(self.name) is not None

    @property
    def own_optimizer(self) -> OptimizerSettings:
        """The settings of the optimizer; the defaults of the base if it has none."""
        own = self.chosen(self.name)
        return own if isinstance(own, OptimizerSettings) else OptimizerSettings()

    @property
    def own_schedule(self) -> ScheduleSettings:
        """The settings of the schedule."""
        own = self.chosen(self.schedule)
        assert isinstance(own, ScheduleSettings), self.schedule
        return own

    @property
    def has_default_base(self) -> bool:
        """Returns True if `lr_base` has its default value."""
        return self.lr_base == OptimSettings.lr_base

    @property
    def batch_growth(self) -> BatchGrowth:
        """`batch_schedule`, read."""
        return BatchGrowth.parse(self.batch_schedule)

    @property
    def idle(self) -> dict[str, str]:
        """Settings that are given but have no effect, and why."""
        if self.scaling != "off":  # it chooses what a recipe has
            return {}
        found = {
            name: f"optim.{chooser} = {getattr(self, chooser)!r}"
            for chooser, names, own in (
                ("name", MOMENTUM, self.own_optimizer), ("schedule", DECAY, self.own_schedule)
            )
            for name in names
            if name not in own.READS and getattr(self, name) != getattr(OptimSettings, name)
        }  # fmt: skip
        rule = registered_rule(self.name)
        own_decay = self.weight_decay != OptimSettings.weight_decay
        if rule is not None and own_decay and "weight_decay" not in rule.Hyper._fields:
            found["weight_decay"] = f"optim.name = {self.name!r}"
        if self.batch_rate != "auto" and not self.batch_schedule:
            found["batch_rate"] = "no optim.batch_schedule"
        return found

    def arguments_table(self) -> dict[str, Any]:
        """`arguments` as a dictionary."""
        table = parse_arguments("optim.arguments", self.arguments)
        return {key: tuple(v) if isinstance(v, list) else v for key, v in table.items()}

    def peak_lr(self, global_batch: int) -> float:
        """Linear scaling (Goyal et al. 2017), unless the rate is given as it is."""
        if self.lr is not None:
            return self.lr
        base = self.own_optimizer.LR_BASE if self.has_default_base else self.lr_base
        return base * global_batch / self.lr_base_batch


def check_optim(optim: OptimSettings) -> None:
    """Raises ConfigError for the first value that cannot be."""
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
    for name in (
        "weight_decay", "warmup_epochs", "warmup_start", "lr_end", "clip_norm",
    ):  # fmt: skip
        check.number(name, "0 or more")
    check.number("warmup_max_share", "in (0, 1]", "try 0.2")
    over = optim.decay_over_epochs
    if over is not None and not optim.warmup_epochs < over < float("inf"):
        raise check.error(
            "decay_over_epochs",
            f"must lie behind the warm-up of {optim.warmup_epochs:g} epochs",
            "leave it unset to decay over the whole run",
        )
    check.number("layer_decay", "in (0, 1]", "try 0.75, or 1 (off)")
    check.number("schedule_free", "in [0, 1)", "try 0.9")
    _check_scaling(optim, check)
    _check_batches(optim, check)
    check.known("fused", PATHS)
    if optim.fused == "triton" and not (
        optim.own_optimizer.HAS_KERNELS or registered_rule(optim.name)
    ):
        raise check.error("fused", f"there are no kernels for {optim.name}", "use 'auto'")
    _check_others(optim, check)


def _check_scaling(optim: OptimSettings, check: SettingChecks) -> None:
    check.known("scaling", SCALINGS)
    check.number("known_good_batch", "at least 1")


def _check_batches(optim: OptimSettings, check: SettingChecks) -> None:
    check.known("batch_rate", BATCH_RATES)


def _check_others(optim: OptimSettings, check: SettingChecks) -> None:
    if optim.arguments_table() and not optim.is_foreign:
        raise check.error(
            "arguments", f"{optim.name} takes none", "it is for optim.name = 'module:Class'"
        )
    if optim.is_foreign and optim.lr is None and optim.has_default_base:
        if optim.is_class:
            check_module("optim.name", optim.name)
        raise check.error(
            "lr", f"no learning rate, and there is no default for {optim.name}",
            "give --lr, such as 0.001",
        )  # fmt: skip


def _grows_by_rule(schedule: str) -> bool:
    """Returns True for a rule such as `x4`."""
    return BatchGrowth.parse(schedule).factor > 1


def _is_class(name: str) -> bool:
    return ":" in name


EXCLUSIONS: tuple[Exclusion, ...] = (
    Exclusion(
        "optim.nesterov", one_of(True), {"optim.momentum": one_of(0)},
        "needs momentum", "set optim.momentum = 0.9",
    ),
    Exclusion(
        "optim.schedule", not_in("constant"), {"optim.schedule_free": not_in(0)},
        "is not supported with optim.schedule_free", "use optim.schedule = 'constant'",
    ),
    Exclusion(
        "optim.batch_schedule", not_in(""), {"optim.scaling": one_of("auto")},
        "optim.scaling = 'auto' chooses the batches", "leave one of them out",
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
