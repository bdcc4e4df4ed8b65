"""The gradient noise scale (McCandlish et al. 2018): up to which batch more ranks save time.

The estimates use the squared norms of a step's whole gradient and of its parts, from the micro-batches
that ranks compute anyway: the squared true gradient, the variance of one sample's gradient, and their
running averages. Then B_noise = variance / squared gradient. A run at batch B takes about S·(1 +
B_noise / B) steps to the same loss, where S is the number of steps at an unlimited batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# The share of the running averages that a step keeps: they reach about 50 steps back.
DECAY = 0.98
# Doubling ranks and batch is useful if it saves at least this share of the time.
LEAST_SAVING = 0.1


def concentration(samples: int, parts: int) -> float:
    """Returns Σ nᵢ² / N² for N samples in parts whose sizes differ by at most one."""
    if not 1 <= parts <= samples:
        raise ValueError(f"{samples} samples cannot have {parts} parts")
    size, larger = divmod(samples, parts)
    return (larger * (size + 1) ** 2 + (parts - larger) * size**2) / samples**2


@dataclass(frozen=True)
class NoiseEstimate:
    """Unbiased estimates of one step: |G|², which single steps may put below 0, and tr Σ."""

    signal: float
    variance: float

    @classmethod
    def of(cls, whole: float, parts: float, samples: int, count: int) -> NoiseEstimate | None:
        """Estimates signal and variance from `whole` = |Σ gᵢ|² and `parts` = Σ |gᵢ|².

        Here gᵢ = (nᵢ/N)·(mean gradient of part i). E whole = |G|² + tr Σ / N and E parts = c·|G|² + tr
        Σ / N with c = Σ nᵢ² / N², so unequal parts need no approximation.

        Args:
            whole: The squared norm of the whole gradient.
            parts: The sum of the squared norms of the parts.
            samples: Number of samples N.
            count: Number of parts.

        Returns:
            The estimate; None if there is only one part, or a norm is not finite.
        """
        if count < 2 or not (math.isfinite(whole) and math.isfinite(parts)):
            return None
        signal = (whole - parts) / (1 - concentration(samples, count))
        return cls(signal, samples * (whole - signal))


@dataclass
class NoiseScale:
    """Running averages of the estimates, with bias correction for the first steps."""

    signal: float = 0.0
    variance: float = 0.0
    weight: float = 0.0

    def add(self, estimate: NoiseEstimate) -> None:
        self.signal = DECAY * self.signal + (1 - DECAY) * estimate.signal
        self.variance = DECAY * self.variance + (1 - DECAY) * estimate.variance
        self.weight = DECAY * self.weight + (1 - DECAY)

    @property
    def value(self) -> float | None:
        """Returns B_noise in samples; None before the first step, or if noise hides the gradient."""
        if self.weight == 0 or self.signal <= 0 or self.variance <= 0:
            return None
        return self.variance / self.signal


def _check(noise_scale: float, **batches: float) -> None:
    for name, value in {"noise_scale": noise_scale, **batches}.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} = {value}: must be above 0, and finite")


def relative_steps(noise_scale: float, batch: float) -> float:
    """Returns the steps to the same loss, relative to training with an unlimited batch."""
    _check(noise_scale, batch=batch)
    return 1 + noise_scale / batch


def time_saved(noise_scale: float, batch: float, larger: float, step_ratio: float = 1.0) -> float:
    """Returns the fraction of training time that a larger batch saves; negative if it is slower.

    Args:
        noise_scale: B_noise in samples.
        batch: The batch.
        larger: The larger batch.
        step_ratio: The time of a step with the larger batch, relative to a step with `batch`.
    """
    _check(noise_scale, batch=batch, larger=larger, step_ratio=step_ratio)
    steps = relative_steps(noise_scale, larger) / relative_steps(noise_scale, batch)
    return 1 - step_ratio * steps


def useful_batch(noise_scale: float) -> float:
    """Returns the batch from which doubling ranks and batch still saves the share `LEAST_SAVING`."""
    _check(noise_scale)
    return noise_scale * (0.5 - LEAST_SAVING) / LEAST_SAVING


def describe_noise(noise_scale: float, batch: int) -> str:
    """Explains what a noise scale means for a run with batch size `batch`."""
    saved = time_saved(noise_scale, batch, 2 * batch)
    return (
        f"{noise_scale:,.0f} samples; twice the ranks and batch would save {saved:.0%} of the time at "
        f"equal step times, and at least {LEAST_SAVING:.0%} up to a batch of "
        f"{useful_batch(noise_scale):,.0f}"
    )
