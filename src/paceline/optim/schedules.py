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


def _check_epochs(section: str, epochs: tuple[float, ...]) -> None:
    if list(epochs) != sorted(epochs):
        raise ConfigError(f"{section}.epochs", list(epochs), "must rise")


def _passed(epochs: tuple[float, ...], time: float, course: Course) -> int:
    return sum(time >= epoch * course.steps_per_epoch for epoch in epochs)


@dataclass(frozen=True)
class Step(ScheduleSettings):
    """The rate falls by a factor at some epochs."""

    epochs: tuple[float, ...] = (30.0, 60.0, 80.0)
    """Epochs at which the rate is multiplied by `factor`, or the batch grows."""
    factor: float = 0.1
    """Factor of each decay."""

    def __post_init__(self) -> None:
        SettingChecks("optim.step", self).number("factor", "in (0, 1]", "try 0.1")
        _check_epochs("optim.step", self.epochs)

    def rate(self, time: float, course: Course) -> float:
        return course.peak * float(self.factor ** _passed(self.epochs, time, course))


@dataclass(frozen=True)
class Piecewise(ScheduleSettings):
    """A share of the peak rate for each part of the run."""

    epochs: tuple[float, ...] = (30.0, 60.0, 80.0)
    """Epochs at which the next of `factors` begins."""
    factors: tuple[float, ...] = (0.5, 0.075, 0.01, 0.001)
    """Shares of the peak rate, before the first of `epochs` and from each of them on."""

    def __post_init__(self) -> None:
        _check_epochs("optim.piecewise", self.epochs)
        factors, epochs = list(self.factors), len(self.epochs)
        if len(factors) != epochs + 1:
            raise ConfigError(
                "optim.piecewise.factors", factors,
                f"{len(factors)} factors for {epochs} optim.piecewise.epochs",
                f"give {epochs + 1}: one before the first epoch, one from each on",
            )  # fmt: skip
        if any(not 0 <= factor < math.inf for factor in factors):
            raise ConfigError("optim.piecewise.factors", factors, "must be 0 or more")

    def rate(self, time: float, course: Course) -> float:
        return course.peak * self.factors[_passed(self.epochs, time, course)]
