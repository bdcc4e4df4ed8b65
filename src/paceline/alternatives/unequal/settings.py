"""Settings of the strategy `unequal`: the table `[run.unequal]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.core.errors import ConfigError
from paceline.core.exclusions import Exclusion, switched_off

PROBED = "probe"


@dataclass(frozen=True)
class UnequalSettings:
    """Divides the global batch in proportion to the speed of ranks."""

    shares: str = PROBED
    """Relative speeds of the ranks: `probe` (measured before the first step), or a number per rank as in
    `3:3:1`.
    """
    rebalance: bool = False
    """Divide the batch again at every checkpoint, by the measured step times."""

    def __post_init__(self) -> None:
        if self.shares == PROBED:
            return
        try:
            speeds = self.speeds
        except ValueError:
            speeds = []
        if len(speeds) < 2 or not all(0 < speed < 1e9 for speed in speeds):
            raise ConfigError(
                "run.unequal.shares", self.shares, "must be 'probe', or a positive number for each rank",
                "try 'probe', or 3:3:1 for three ranks",
            )  # fmt: skip

    @property
    def speeds(self) -> list[float]:
        """The given relative speeds of the ranks; empty if speeds are measured."""
        return [] if self.shares == PROBED else [float(part) for part in self.shares.split(":")]

    EXCLUSIONS: ClassVar[tuple[Exclusion, ...]] = switched_off(
        {"optim.batch_schedule": "", "run.noise_scale": False},
        "is not supported with run.strategy = 'unequal'",
    )
