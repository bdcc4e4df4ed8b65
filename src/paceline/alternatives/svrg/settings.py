"""Settings of SVRG and HALP, and the settings that they exclude."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.config.settings import SYNCHRONOUS
from paceline.core.errors import ConfigError
from paceline.core.exclusions import Exclusion, not_in, one_of
from paceline.core.settings import SettingChecks
from paceline.optim.registry import SGD, OptimizerSettings
from paceline.optim.schedules import Course

DRAW = "draw"
_FP32 = ("{optim.name} computes in fp32", "use --amp-dtype fp32")
_RANDOM = "{optim.name} needs the same gradient of a sample in every pass"


def _fixed(name: str, allowed: object) -> Exclusion:
    """Refuses all values of a setting except `allowed`, because they would make gradients random."""
    shown = str(allowed).lower() if isinstance(allowed, bool) else allowed
    return Exclusion(name, not_in(allowed), {}, _RANDOM, f"use {name}={shown}")


EXCLUSIONS: tuple[Exclusion, ...] = (
    *(
        Exclusion(
            f"optim.{name}", not_in(wanted), {}, "is not defined for {optim.name}",
            f"set optim.{name} = {wanted!r}",
        )
        for name, wanted in (
            ("momentum", 0.0), ("nesterov", False), ("clip_norm", 0.0), ("batch_schedule", ""),
        )
    ),
    Exclusion(
        "optim.cycle.momentum", not_in(()), {"optim.schedule": one_of("one_cycle", "triangular")},
        "is not defined for {optim.name}", "set it to []",
    ),
    Exclusion(
        "run.strategy", not_in(SYNCHRONOUS), {},
        "cannot compute the full gradients of {optim.name}", f"use {SYNCHRONOUS!r}",
    ),
    Exclusion("precision.amp_dtype", not_in("auto", "fp32"), {}, *_FP32),
    Exclusion("precision.amp_dtype", one_of("auto"), {"job.device": one_of("cuda")}, *_FP32),
    _fixed("data.augment", "none"),
    _fixed("data.flip", False),
    _fixed("data.cutout", 0),
    _fixed("data.color_jitter", (0.0, 0.0, 0.0, 0.0)),
    _fixed("run.mixup", 0.0),
    _fixed("run.cutmix", 0.0),
    Exclusion(
        "run.noise_scale", one_of(True), {},
        "would measure the differences of gradients that {optim.name} exchanges", "use false",
    ),
    Exclusion("data.randaugment", lambda value: value[0] > 0, {}, _RANDOM, "use [0, 9]"),
    *(
        Exclusion(
            f"program.{name}", not_in(None), {},
            f"{_RANDOM}; an own augmentation may be random", "leave it out",
        )
        for name in ("augment", "device_augment")
    ),
    Exclusion(
        "comm.wire", not_in("auto", "float32", "bfloat16"), {},
        "could overflow in the full gradients of {optim.name}", "use 'auto' or 'bfloat16'",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class SvrgSettings(OptimizerSettings):
    """Settings of `svrg` and `halp`."""

    TABLE: ClassVar[str] = "svrg"
    CREATE: ClassVar[str] = "alternatives.svrg.optimizer:create"
    RATES: ClassVar[str] = SGD
    GRADIENTS: ClassVar[str] = "svrg"
    UNREAD: ClassVar[tuple[str, ...]] = ("bits", "mu")
    EXCLUSIONS: ClassVar[tuple[Exclusion, ...]] = EXCLUSIONS

    center_epochs: float = 1.0
    """Epochs from one full gradient to the next."""
    bits: int = 8
    """Bits of the integers of `halp`: 8 or 16."""
    mu: float = 0.1
    """Assumed strong convexity μ of `halp`."""

    def __post_init__(self) -> None:
        if self.bits not in (8, 16):
            raise ConfigError("optim.svrg.bits", self.bits, "must be 8 or 16", "try 8")
        check = SettingChecks("optim.svrg", self)
        for name in ("mu", "center_epochs"):
            check.number(name, "above 0")

    def values(self, time: float, course: Course) -> Mapping[str, float]:
        """Returns the step number, which seeds random numbers.

        `time` equals the step number, because the batch is constant.
        """
        return {DRAW: time}

    def interval(self, steps_per_epoch: float) -> int:
        """Returns the number of steps from one full gradient to the next."""
        return max(1, round(self.center_epochs * steps_per_epoch))

    def passes(self, steps_per_epoch: float) -> float:
        """Returns how many gradients a step computes per sample, including full gradients."""
        return 2 + steps_per_epoch / self.interval(steps_per_epoch)


@dataclass(frozen=True)
class HalpSettings(SvrgSettings):
    """Settings of `halp`, which is SVRG with a low-precision offset."""

    UNREAD: ClassVar[tuple[str, ...]] = ()
