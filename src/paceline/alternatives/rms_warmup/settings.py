"""Settings and schedule of `rmsprop_warmup`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.core.exclusions import Exclusion, one_of
from paceline.core.settings import SettingChecks
from paceline.optim.registry import SGD, OptimizerSettings
from paceline.optim.schedules import Course

SGD_SHARE = "sgd_share"


def sgd_share(epoch: float, center: float, width: float) -> float:
    """Returns the weight of SGD in the update, which grows from almost 0 to 1.

    It is ½·exp(2(e − c)/w) before epoch c, then ½ + (e − c)/w, at most 1.

    Args:
        epoch: Current epoch e.
        center: Epoch c at which the weight is ½.
        width: Width w of the transition, in epochs.
    """
    if epoch < center:
        return 0.5 * math.exp(2 * (epoch - center) / width)
    return min(0.5 + (epoch - center) / width, 1.0)


@dataclass(frozen=True)
class RmspropWarmupSettings(OptimizerSettings):
    """Settings of SGD that begins as RMSprop."""

    CREATE: ClassVar[str] = "alternatives.rms_warmup.optimizer:create"
    RATES: ClassVar[str] = SGD
    EXCLUSIONS: ClassVar[tuple[Exclusion, ...]] = (
        Exclusion(
            "optim.name", one_of("rmsprop_warmup"), {"run.strategy": one_of("asynchronous")},
            "needs the epoch, which parameter servers do not know",
            "use another optimizer, such as 'sgd'",
        ),
    )  # fmt: skip

    center_epochs: float = 10.0
    """Epoch at which SGD and RMSprop have equal weights."""
    width_epochs: float = 5.0
    """Epochs of the transition to SGD, half of them after `center_epochs`."""

    def __post_init__(self) -> None:
        check = SettingChecks("optim.rmsprop_warmup", self)
        check.number("center_epochs", "0 or more")
        check.number("width_epochs", "above 0", "try 5")

    def values(self, time: float, course: Course) -> Mapping[str, float]:
        epoch = time / course.steps_per_epoch
        return {SGD_SHARE: sgd_share(epoch, self.center_epochs, self.width_epochs)}
