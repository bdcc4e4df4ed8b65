"""Settings of the strategy `synced_norms`: the table `[run.synced_norms]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.core.exclusions import Exclusion, not_in
from paceline.core.settings import SettingChecks


@dataclass(frozen=True)
class SyncedNormsSettings:
    """Batch norm with statistics over the micro-batches of several ranks."""

    ranks: int = 2
    """Number of consecutive ranks with common statistics."""

    def __post_init__(self) -> None:
        SettingChecks("run.synced_norms", self).number("ranks", "at least 2")

    # A norm contains a collective, which fused kernels, compiled code and CUDA graphs cannot contain.
    EXCLUSIONS: ClassVar[tuple[Exclusion, ...]] = tuple(
        Exclusion(
            f"run.{name}", not_in("auto", "off"), {},
            "cannot be used with run.strategy = 'synced_norms'", "use 'auto'",
        )
        for name in ("accel.fused_norm", "accel.fused_convolutions", "accel.compile", "cuda_graphs")
    )  # fmt: skip
