"""Settings of the number formats: the section `[precision]` of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

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
    loss_scale: float | None = None
    """Fixed loss scale for fp16; unset, the scale is dynamic."""
    loss_scale_init: float = 65536.0
    """Initial dynamic loss scale."""
    loss_scale_interval: int = 1000
    """Steps without overflow after which the scale doubles."""
    loss_scale_min: float = 1.0
    """Smallest dynamic loss scale; an overflow at this scale ends the run as diverged."""
    loss_scale_max: float = 2.0**24
    """Largest dynamic loss scale."""

    def __post_init__(self) -> None:
        check = SettingChecks("precision", self)
        check.known("amp_dtype", AMP_DTYPES)
        for name in ("loss_scale", "loss_scale_init", "loss_scale_min", "loss_scale_max"):
            check.number(name, "above 0", "65536 is usual")
        if not self.loss_scale_min <= self.loss_scale_init <= self.loss_scale_max:
            raise check.error(
                "loss_scale_init",
                f"must lie between loss_scale_min = {self.loss_scale_min:g} and "
                f"loss_scale_max = {self.loss_scale_max:g}",
            )
        check.number("loss_scale_interval", "at least 1")
