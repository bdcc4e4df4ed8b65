"""Settings of the number formats: the section `[precision]` of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import ConfigError, nearest

AMP_DTYPES = ("auto", "fp16", "bf16", "fp32")


@dataclass(frozen=True)
class PrecisionSettings:
    """What is computed in which number format.

    `amp_dtype` is fp16, bf16, fp32, or auto: fp16 on a GPU, fp32 on a CPU. Masters, statistics and the
    update are fp32 in any case. `tf32` lets a GPU round the factors of fp32 products to 10 bits.
    fp16 scales the loss: by `loss_scale`, or, unset, by a scale that starts at `loss_scale_init`, halves
    at every overflow, doubles after `loss_scale_interval` steps without one, and stays between
    `loss_scale_min` and `loss_scale_max`.
    """

    amp_dtype: str = "auto"
    tf32: bool = True
    loss_scale: float | None = None
    loss_scale_init: float = 65536.0
    loss_scale_interval: int = 1000
    loss_scale_min: float = 1.0
    loss_scale_max: float = 2.0**24

    def __post_init__(self) -> None:
        if self.amp_dtype not in AMP_DTYPES:
            raise ConfigError(
                "precision.amp_dtype",
                self.amp_dtype,
                "unknown",
                nearest(self.amp_dtype, AMP_DTYPES),
            )
        for name in ("loss_scale", "loss_scale_init", "loss_scale_min", "loss_scale_max"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"precision.{name}", value, "must be above 0", "65536 is usual")
        if not self.loss_scale_min <= self.loss_scale_init <= self.loss_scale_max:
            raise ConfigError(
                "precision.loss_scale_init",
                self.loss_scale_init,
                f"must lie between loss_scale_min = {self.loss_scale_min:g} and "
                f"loss_scale_max = {self.loss_scale_max:g}",
            )
        if self.loss_scale_interval < 1:
            raise ConfigError(
                "precision.loss_scale_interval", self.loss_scale_interval, "must be at least 1"
            )
