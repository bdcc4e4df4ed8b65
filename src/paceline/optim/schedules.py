"""Computes learning rate, momentum and other scheduled values as pure functions of the step.

Schedules have no state, so a resumed run does not have to restore any. `LrSchedule` computes the warm-up,
followed by one of the schedules. The class of a schedule also defines the schedule's settings
(`[optim.poly]` and so on). Times are counted in steps of the first batch, so that a schedule does not
depend on the growth of the batch. This module does not import torch.
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


@dataclass(frozen=True)
class Course:
    """The length and the learning rates of a run, on which schedules depend.

    Times are in steps of the first batch.

    Attributes:
        peak: Peak learning rate.
        end: Final learning rate (`optim.lr_end`), for schedules that have one.
        total_steps: Time at the end of the run.
        steps_per_epoch: Number of steps in one epoch.
        warmup_steps: Time at the end of the warm-up.
        decay_end: Time at which the rate reaches `end`.
    """

    peak: float
    end: float
    total_steps: float
    steps_per_epoch: float
    warmup_steps: float
    decay_end: float

    def left(self, time: float) -> float:
        """Returns the remaining fraction of the decay of the learning rate at `time`.

        It is 1 after the warm-up, and 0 at `decay_end`.
        """
        span = max(self.decay_end - self.warmup_steps, 1.0)
        return 1.0 - min(max(time - self.warmup_steps, 0.0) / span, 1.0)


class OwnerSettings:
    """Base class of the settings of an optimizer or a schedule."""

    def values(self, time: float, course: Course) -> Mapping[str, float]:
        """Returns scheduled values other than the learning rate, by their keys in parameter groups."""
        return {}


class ScheduleSettings(OwnerSettings):
    """Base class of learning-rate schedules; subclasses are frozen dataclasses with the settings.

    Attributes:
        WARMS_UP: False for a schedule without a separate warm-up; `rate` then covers the whole run.
    """

    WARMS_UP: ClassVar[bool] = True

    def rate(self, time: float, course: Course) -> float:
        """Returns the learning rate at `time`, which is after the warm-up."""
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(ScheduleSettings):
    """The schedule `constant`: keeps the peak learning rate."""

    def rate(self, time: float, course: Course) -> float:
        return course.peak


@dataclass(frozen=True)
class Cosine(ScheduleSettings):
    """The schedule `cosine`: decays from the peak to the final learning rate along half a cosine wave."""

    def rate(self, time: float, course: Course) -> float:
        height = 0.5 * (1.0 + math.cos(math.pi * (1.0 - course.left(time))))
        return course.end + (course.peak - course.end) * height


@dataclass(frozen=True)
class Poly(ScheduleSettings):
    """Decays from the peak to the final learning rate by a power of the remaining time."""

    power: float = 2.0
    """Exponent of the remaining time; 1 is linear decay."""

    def __post_init__(self) -> None:
        SettingChecks("optim.poly", self).number("power", "0 or more")

    def rate(self, time: float, course: Course) -> float:
        return course.end + (course.peak - course.end) * float(course.left(time) ** self.power)


@dataclass(frozen=True)
class Exponential(ScheduleSettings):
    """The schedule `exponential`: from the peak to the final rate, which may also be higher."""

    EXCLUSIONS: ClassVar[tuple[Exclusion, ...]] = (
        Exclusion(
            "optim.lr_end", one_of(0.0), {}, "must be above 0 with optim.schedule = 'exponential'",
            "try 1e-4",
        ),
    )  # fmt: skip

    def rate(self, time: float, course: Course) -> float:
        return course.peak * float((course.end / course.peak) ** (1.0 - course.left(time)))


def _passed(epochs: tuple[float, ...], time: float, course: Course) -> int:
    return sum(time >= epoch * course.steps_per_epoch for epoch in epochs)


@dataclass(frozen=True)
class Step(ScheduleSettings):
    """Changes the learning rate at given epochs, each time by the same factor.

    The table `[optim.step]` also has the settings of `piecewise`.
    """

    TABLE: ClassVar[str] = "step"
    UNREAD: ClassVar[tuple[str, ...]] = ("factors",)

    epochs: tuple[float, ...] = (30.0, 60.0, 80.0)
    """Epochs at which the learning rate changes or the batch grows."""
    factor: float = 0.1
    """Factor of the learning rate at each epoch of `step`."""
    factors: tuple[float, ...] = (0.5, 0.075, 0.01, 0.001)
    """Learning rates of `piecewise` as fractions of the peak: before the first epoch, and from each
    on.
    """

    def __post_init__(self) -> None:
        SettingChecks("optim.step", self).number("factor", "in (0, 1]", "try 0.1")
        if list(self.epochs) != sorted(self.epochs):
            raise ConfigError("optim.step.epochs", list(self.epochs), "must be in rising order")

    def rate(self, time: float, course: Course) -> float:
        return course.peak * float(self.factor ** _passed(self.epochs, time, course))


@dataclass(frozen=True)
class Piecewise(Step):
    """The schedule `piecewise`: sets the rate to given fractions of the peak rate at given epochs."""

    UNREAD: ClassVar[tuple[str, ...]] = ("factor",)

    def __post_init__(self) -> None:
        super().__post_init__()
        factors, epochs = list(self.factors), len(self.epochs)
        if len(factors) != epochs + 1:
            raise ConfigError(
                "optim.step.factors", factors,
                f"{len(factors)} factors for {epochs} optim.step.epochs",
                f"give {epochs + 1} factors: one before the first epoch, and one for each epoch",
            )  # fmt: skip
        if any(not 0 <= factor < math.inf for factor in factors):
            raise ConfigError("optim.step.factors", factors, "must be 0 or more")

    def rate(self, time: float, course: Course) -> float:
        return course.peak * self.factors[_passed(self.epochs, time, course)]


def set_rate(
    optimizer: torch.optim.Optimizer, rate: float, others: Mapping[str, float] | None = None
) -> None:
    """Sets the learning rate and other scheduled values of an optimizer.

    Args:
        optimizer: Optimizer whose groups receive the values.
        rate: Learning rate, multiplied by the `lr_scale` of each group.
        others: Further scheduled values by their keys in parameter groups. For AdamW and LAMB,
            `momentum` sets β₁.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
        for name, value in (others or {}).items():
            if name == "momentum" and "betas" in group:
                group["betas"] = (value, group["betas"][1])
            else:
                group[name] = value


@dataclass(frozen=True)
class LrSchedule:
    """Linear warm-up from `warmup_start` to `peak`, followed by the schedule that the settings name.

    Attributes:
        settings: Settings of the section `[optim]`.
        peak: Peak learning rate.
        total_steps: Length of the run, in steps of the first batch.
        steps_per_epoch: Length of an epoch, in steps of the first batch.
        position: Function that returns the number of samples before a step; None if the batch is
            constant.

    Example:
        >>> schedule = LrSchedule(OptimSettings(schedule="cosine"), 0.1, 1000, 100)
        >>> set_rate(optimizer, schedule.rate(step))
    """

    settings: OptimSettings
    peak: float
    total_steps: float
    steps_per_epoch: float
    position: Callable[[int], int] | None = None
    _own: tuple[ScheduleSettings, OptimizerSettings] = field(init=False, repr=False, compare=False)

    def time(self, step: int) -> float:
        """Returns the time at the start of `step`, counted in steps of the first batch."""
        if self.position is None:
            return step
        return self.position(step) / self.position(1)

    @property
    def warmup_steps(self) -> float:
        """Length of the warm-up, in steps of the first batch."""
        wanted = self.settings.warmup_epochs * self.steps_per_epoch
        return self._most_warmup_steps if self._cuts_warmup else wanted

    @property
    def _most_warmup_steps(self) -> float:
        return self.settings.warmup_max_share * self.total_steps

    @property
    def _cuts_warmup(self) -> bool:
        """True if `warmup_max_share` shortens the warm-up by at least one step."""
        wanted = self.settings.warmup_epochs * self.steps_per_epoch
        return wanted >= self._most_warmup_steps + 1

    def __post_init__(self) -> None:
        own = (self.settings.own_schedule, self.settings.own_optimizer)
        object.__setattr__(self, "_own", own)

    @cached_property
    def course(self) -> Course:
        """Length and learning rates of the run, on which the schedule depends."""
        over = self.settings.decay_over_epochs
        end = self.total_steps if over is None else over * self.steps_per_epoch
        return Course(
            self.peak, self.settings.lr_end, self.total_steps, self.steps_per_epoch,
            self.warmup_steps, end,
        )  # fmt: skip

    def describe_cut(self) -> str:
        """Describes how the warm-up differs from `warmup_epochs`; "" if it does not."""
        wanted = self.settings.warmup_epochs
        if not self.settings.own_schedule.WARMS_UP:
            return f"none with optim.schedule = {self.settings.schedule!r}" if wanted else ""
        if self.settings.warmup_max_share == 1 or not self._cuts_warmup:
            return ""
        epochs = self.warmup_steps / self.steps_per_epoch
        return (
            f"shortened from {wanted:g} to {epochs:.3g} epochs (at most "
            f"{100 * self.settings.warmup_max_share:.0f} % of a run; --warmup-epochs overrides)"
        )

    def rate(self, step: int) -> float:
        """Returns the learning rate of `step`, counted from 0. The first rate is above 0."""
        rate = self._rate(step)
        if self.position is None:
            return rate
        first, batch = self.position(1), self.position(step + 1) - self.position(step)
        growth = self.settings.batch_growth
        return rate * growth.rate_factor(self.settings.batch_rate, batch, first)

    def others(self, step: int) -> dict[str, float]:
        """Returns scheduled values other than the learning rate, by their keys in parameter groups."""
        time = self.time(step)
        schedule, optimizer = self._own
        return {**schedule.values(time, self.course), **optimizer.values(time, self.course)}

    def _rate(self, step: int) -> float:
        schedule, _ = self._own
        # The warm-up uses the end of the step, so that the first rate is not 0.
        done = self.time(step + 1)
        if schedule.WARMS_UP and done < self.warmup_steps:
            start = self.settings.warmup_start
            return start + (self.peak - start) * done / self.warmup_steps
        return schedule.rate(self.time(step), self.course)
