"""Schedules of the learning rate after the warm-up, and their settings: `[optim.poly]` and so on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from paceline.core.errors import ConfigError
from paceline.core.settings import SettingChecks
from paceline.optim.registry import DECAY, Course, ScheduleSettings


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
