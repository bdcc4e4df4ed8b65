"""Settings of the number formats: the section `[precision]` of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.core.settings import SettingChecks

AMP_DTYPES = ("auto", "fp16", "bf16", "fp32")


@dataclass(frozen=True)
class PrecisionSettings:
    """Number formats and the loss scale; master weights, statistics and the update are always fp32."""

    amp_dtype: str = "auto"
    """Format of weights, activations and gradients: `fp16`, `bf16`, `fp32`, or `auto` (fp16 on a
    GPU, fp32 on a CPU)."""
    tf32: bool = True
    """Allow TF32 for fp32 matrix products and convolutions on a GPU."""
    loss_scale_init: float = 65536.0
    """Initial loss scale of fp16."""

    # Bounds of the loss scale. An overflow at the lowest scale ends the run as diverged.
    LOWEST_SCALE: ClassVar[float] = 1.0
    HIGHEST_SCALE: ClassVar[float] = 2.0**24
    # Number of steps without overflow after which the scale doubles.
    SCALE_INTERVAL: ClassVar[int] = 1000

    def __post_init__(self) -> None:
        check = SettingChecks("precision", self)
        check.known("amp_dtype", AMP_DTYPES)
        if not self.LOWEST_SCALE <= self.loss_scale_init <= self.HIGHEST_SCALE:
            raise check.error(
                "loss_scale_init",
                f"must be between {self.LOWEST_SCALE:g} and {self.HIGHEST_SCALE:g}",
                "65536 is usual",
            )
