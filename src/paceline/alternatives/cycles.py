"""Cyclic learning-rate schedules (Smith 2017): `one_cycle` and `triangular`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.core.errors import ConfigError
from paceline.core.exclusions import Exclusion, not_in, one_of
from paceline.core.settings import SettingChecks
from paceline.optim.schedules import Course, ScheduleSettings

# Lowest rate of a cycle, as a fraction of the peak rate.
CYCLE_FLOOR = 0.1
# Fraction of the run after the cycle of `one_cycle`, in which the rate falls to `optim.lr_end`.
CYCLE_TAIL = 0.1


@dataclass(frozen=True)
class Cycle(ScheduleSettings):
    """Cycles of the learning rate, with opposite cycles of the momentum."""

    TABLE: ClassVar[str] = "cycle"
    WARMS_UP: ClassVar[bool] = False
    EXCLUSIONS: ClassVar[tuple[Exclusion, ...]] = (
        Exclusion(
            "optim.cycle.momentum", not_in(()), {"optim.name": lambda optimizer: ":" in optimizer},
            "cannot change the momentum of {optim.name}", "set it to []",
        ),
        Exclusion(
            "optim.cycle.momentum", not_in(()), {"run.strategy": one_of("asynchronous")},
            "parameter servers use a constant momentum", "use []",
        ),
    )  # fmt: skip

    momentum: tuple[float, ...] = (0.85, 0.95)
    """Momentum (β₁ of AdamW and LAMB) at the highest and the lowest learning rate. An empty list keeps
    `optim.momentum`.
    """
    epochs: float = 8.0
    """Epochs of one cycle of `triangular`."""
    decay: float = 1.0
    """Factor of the peak from each cycle of `triangular` to the next; 0.5 is Smith's `triangular2`."""

    def __post_init__(self) -> None:
        momenta = list(self.momentum)
        if momenta and not (len(momenta) == 2 and 0 <= momenta[0] <= momenta[1] < 1):
            raise ConfigError(
                "optim.cycle.momentum", momenta,
                "must be a lower and a higher value in [0, 1)",
                "try [0.85, 0.95], or [] to keep optim.momentum",
            )  # fmt: skip
        check = SettingChecks("optim.cycle", self)
        check.number("decay", "in (0, 1]", "try 0.5")
        check.number("epochs", "above 0", "try 8")

    def rate(self, time: float, course: Course) -> float:
        floor = course.peak * CYCLE_FLOOR
        return floor + (course.peak - floor) * self.height(time, course)

    def values(self, time: float, course: Course) -> Mapping[str, float]:
        if not self.momentum:
            return {}
        low, high = self.momentum
        return {"momentum": high - (high - low) * self.height(time, course)}

    def height(self, time: float, course: Course) -> float:
        """Returns where the learning rate is between the lowest (0) and the peak (1) of a cycle."""
        raise NotImplementedError


@dataclass(frozen=True)
class OneCycle(Cycle):
    """The schedule `one_cycle`: one cycle of the learning rate, then a tail at low rates."""

    UNREAD: ClassVar[tuple[str, ...]] = ("epochs", "decay")

    def rate(self, time: float, course: Course) -> float:
        floor, tail = course.peak * CYCLE_FLOOR, CYCLE_TAIL * course.total_steps
        if time > course.total_steps - tail:
            left = max((course.total_steps - time) / tail, 0.0)
            return course.end + (floor - course.end) * left
        return super().rate(time, course)

    def height(self, time: float, course: Course) -> float:
        whole = max((1.0 - CYCLE_TAIL) * course.total_steps, 1.0)
        return max(1.0 - abs(2.0 * time / whole - 1.0), 0.0)


@dataclass(frozen=True)
class Triangular(Cycle):
    """The schedule `triangular`: cycles of equal length."""

    def height(self, time: float, course: Course) -> float:
        cycles, phase = divmod(time / (self.epochs * course.steps_per_epoch), 1.0)
        return float(self.decay**cycles) * (1.0 - abs(2.0 * phase - 1.0))
