"""Learning rate, momentum and other values of a schedule, as pure functions of the step: a resumed run
needs no state of a schedule. `LrSchedule` has the warm-up; after it comes one of the schedules, whose
classes are also their settings: `[optim.poly]` and so on. Without torch.

Times are counted in steps of the first batch, so that a schedule does not depend on how the batch grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from paceline.core.errors import ConfigError
from paceline.core.exclusions import Exclusion, one_of
from paceline.core.settings import SettingChecks

if TYPE_CHECKING:
    import torch

    from paceline.optim.registry import OptimizerSettings
    from paceline.optim.settings import OptimSettings

# The settings of `[optim]` that only some optimizers, or schedules, read.
MOMENTUM = ("momentum", "nesterov")
DECAY = ("lr_end", "decay_over_epochs")


@dataclass(frozen=True)
class Course:
    """A run as schedules see it. Times are in steps of the first batch.

    Attributes:
        peak: Peak rate.
        end: Final rate of a schedule that has one (`optim.lr_end`).
        total_steps: End of the run.
        steps_per_epoch: Steps of one epoch.
        warmup_steps: End of the warm-up.
        decay_end: Time at which a schedule with a final rate reaches it.
    """

    peak: float
    end: float
    total_steps: float
    steps_per_epoch: float
    warmup_steps: float
    decay_end: float

    def left(self, time: float) -> float:
        """Returns the share of the decay that is left, 1 after the warm-up and 0 at `decay_end`."""
        span = max(self.decay_end - self.warmup_steps, 1.0)
        return 1.0 - min(max(time - self.warmup_steps, 0.0) / span, 1.0)


class OwnerSettings:
    """Base of the settings of an optimizer or a schedule.

    Attributes:
        READS: Those settings in `MOMENTUM` or `DECAY` that it uses.
    """

    READS: ClassVar[tuple[str, ...]] = ()

    def values(self, time: float, course: Course) -> Mapping[str, float]:
        """Returns values that change with time, but for the rate, by their names in parameter groups."""
        return {}


class ScheduleSettings(OwnerSettings):
    """Base of the settings of a schedule; subclasses are frozen dataclasses.

    Attributes:
        WARMS_UP: False for a schedule that rises by itself, or that has no warm-up: `rate` then has the
            whole run.
    """

    WARMS_UP: ClassVar[bool] = True

    def rate(self, time: float, course: Course) -> float:
        """Returns the rate at a time behind the warm-up."""
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(ScheduleSettings):
    """The peak rate, always."""

    def rate(self, time: float, course: Course) -> float:
        return course.peak


@dataclass(frozen=True)
class Cosine(ScheduleSettings):
    """Half a cosine from the peak rate to the final one."""

    READS: ClassVar[tuple[str, ...]] = DECAY

    def rate(self, time: float, course: Course) -> float:
        height = 0.5 * (1.0 + math.cos(math.pi * (1.0 - course.left(time))))
        return course.end + (course.peak - course.end) * height


@dataclass(frozen=True)
class Poly(ScheduleSettings):
    """A power of the time that is left."""

    READS: ClassVar[tuple[str, ...]] = DECAY

    power: float = 2.0
    """Exponent; 1 is linear decay."""

    def __post_init__(self) -> None:
        SettingChecks("optim.poly", self).number("power", "0 or more")

    def rate(self, time: float, course: Course) -> float:
        return course.end + (course.peak - course.end) * float(course.left(time) ** self.power)


@dataclass(frozen=True)
class Exponential(ScheduleSettings):
    """The same factor with every step, from the peak rate to the final one, which may be above it."""

    READS: ClassVar[tuple[str, ...]] = DECAY
    EXCLUSIONS: ClassVar[tuple[Exclusion, ...]] = (
        Exclusion(
            "optim.lr_end", one_of(0.0), {}, "no factor leads to it, with optim.schedule = 'exponential'",
            "try 1e-4",
        ),
    )  # fmt: skip

    def rate(self, time: float, course: Course) -> float:
        return course.peak * float((course.end / course.peak) ** (1.0 - course.left(time)))


def _passed(epochs: tuple[float, ...], time: float, course: Course) -> int:
    return sum(time >= epoch * course.steps_per_epoch for epoch in epochs)


@dataclass(frozen=True)
class Step(ScheduleSettings):
    """The rate changes at some epochs: `step` multiplies it by a factor, `piecewise` has a share of the
    peak rate for each part of the run."""

    TABLE: ClassVar[str] = "step"
    UNREAD: ClassVar[tuple[str, ...]] = ("factors",)

    epochs: tuple[float, ...] = (30.0, 60.0, 80.0)
    """Epochs at which the rate changes, or the batch grows."""
    factor: float = 0.1
    """Factor of each decay of `step`."""
    factors: tuple[float, ...] = (0.5, 0.075, 0.01, 0.001)
    """Shares of the peak rate for `piecewise`, before the first of `epochs` and from each of them on."""

    def __post_init__(self) -> None:
        SettingChecks("optim.step", self).number("factor", "in (0, 1]", "try 0.1")
        if list(self.epochs) != sorted(self.epochs):
            raise ConfigError("optim.step.epochs", list(self.epochs), "must rise")

    def rate(self, time: float, course: Course) -> float:
        return course.peak * float(self.factor ** _passed(self.epochs, time, course))


@dataclass(frozen=True)
class Piecewise(Step):
    """A share of the peak rate for each part of the run."""

    UNREAD: ClassVar[tuple[str, ...]] = ("factor",)

    def __post_init__(self) -> None:
        super().__post_init__()
        factors, epochs = list(self.factors), len(self.epochs)
        if len(factors) != epochs + 1:
            raise ConfigError(
                "optim.step.factors", factors,
                f"{len(factors)} factors for {epochs} optim.step.epochs",
                f"give {epochs + 1}: one before the first epoch, one from each on",
            )  # fmt: skip
        if any(not 0 <= factor < math.inf for factor in factors):
            raise ConfigError("optim.step.factors", factors, "must be 0 or more")

    def rate(self, time: float, course: Course) -> float:
        return course.peak * self.factors[_passed(self.epochs, time, course)]


def set_rate(
    optimizer: torch.optim.Optimizer, rate: float, others: Mapping[str, float] | None = None
) -> None:
    """Sets the rate of all groups, times their `lr_scale`, and the values that a schedule changes with
    it; the momentum of AdamW and LAMB is their β₁."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
        for name, value in (others or {}).items():
            if name == "momentum" and "betas" in group:
                group["betas"] = (value, group["betas"][1])
            else:
                group[name] = value


@dataclass(frozen=True)
class LrSchedule:
    """Linear warm-up from `warmup_start` to `peak`, then the schedule that the settings name; or that
    schedule alone, if it rises by itself.

    `total_steps` and `steps_per_epoch` are those of the first batch. Where the batch grows, `position`
    gives the number of samples before a step.
    """

    settings: OptimSettings
    peak: float
    total_steps: float
    steps_per_epoch: float
    position: Callable[[int], int] | None = None
    _own: tuple[ScheduleSettings, OptimizerSettings] = field(init=False, repr=False, compare=False)

    def time(self, step: int) -> float:
        """When `step` begins, in steps of the first batch."""
        if self.position is None:
            return step
        return self.position(step) / self.position(1)

    @property
    def warmup_steps(self) -> float:
        wanted = self.settings.warmup_epochs * self.steps_per_epoch
        return self._most_warmup_steps if self._cuts_warmup else wanted

    @property
    def _most_warmup_steps(self) -> float:
        return self.settings.warmup_max_share * self.total_steps

    @property
    def _cuts_warmup(self) -> bool:
        """Whether `warmup_max_share` shortens the warm-up by at least one step."""
        wanted = self.settings.warmup_epochs * self.steps_per_epoch
        return wanted >= self._most_warmup_steps + 1

    def __post_init__(self) -> None:
        own = (self.settings.own_schedule, self.settings.own_optimizer)
        object.__setattr__(self, "_own", own)

    @cached_property
    def course(self) -> Course:
        """The run as the schedule sees it."""
        over = self.settings.decay_over_epochs
        end = self.total_steps if over is None else over * self.steps_per_epoch
        return Course(
            self.peak, self.settings.lr_end, self.total_steps, self.steps_per_epoch,
            self.warmup_steps, end,
        )  # fmt: skip

    def describe_cut(self) -> str:
        """Describes a warm-up shorter than `warmup_epochs`, or none; otherwise empty."""
        wanted = self.settings.warmup_epochs
        if not self.settings.own_schedule.WARMS_UP:
            if not wanted:
                return ""
            return (
                f"none: {self.settings.schedule} rises by itself, optim.warmup_epochs = {wanted:g} "
                "is not used"
            )
        if self.settings.warmup_max_share == 1 or not self._cuts_warmup:
            return ""
        epochs = self.warmup_steps / self.steps_per_epoch
        return (
            f"{epochs:.3g} epochs instead of {wanted:g}: at most "
            f"{self.settings.warmup_max_share:.0%} of a run (--warmup-epochs overrides)"
        )

    def rate(self, step: int) -> float:
        """The rate of `step`, counted from 0. The first warm-up step is not 0, which would waste it."""
        rate = self._rate(step)
        if self.position is None:
            return rate
        first, batch = self.position(1), self.position(step + 1) - self.position(step)
        growth = self.settings.batch_growth
        return rate * growth.rate_factor(self.settings.batch_rate, batch, first)

    def others(self, step: int) -> dict[str, float]:
        """Values other than the rate that change with `step`, by their names in parameter groups."""
        time = self.time(step)
        schedule, optimizer = self._own
        return {**schedule.values(time, self.course), **optimizer.values(time, self.course)}

    def _rate(self, step: int) -> float:
        schedule, _ = self._own
        # The end of the step, as far as warm-up is concerned.
        done = self.time(step + 1)
        if schedule.WARMS_UP and done < self.warmup_steps:
            start = self.settings.warmup_start
            return start + (self.peak - start) * done / self.warmup_steps
        return schedule.rate(self.time(step), self.course)
