"""The gradient noise scale (McCandlish et al. 2018): the batch size up to which more ranks save time.

The inputs are the squared norm of a step's whole gradient and the squared norms of the gradients of its
micro-batches, which ranks compute anyway. From them follow estimates of the squared norm of the true
gradient and of the variance of one sample's gradient. The noise scale B_noise is the ratio variance /
squared gradient of the running averages. A run with batch size B takes about S·(1 + B_noise / B) steps
to a given loss, where S is the number of steps with an unlimited batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# The factor by which each step multiplies the running averages; they cover about 50 steps.
DECAY = 0.98
# Doubling ranks and batch is useful if it saves at least this share of the time.
LEAST_SAVING = 0.1


def concentration(samples: int, parts: int) -> float:
    """Returns Σ nᵢ² / N² for N samples in parts of nᵢ samples, for `NoiseEstimate`.

    The sizes nᵢ differ by at most one.
    """
    if not 1 <= parts <= samples:
        raise ValueError(f"{samples} samples cannot have {parts} parts")
    size, larger = divmod(samples, parts)
    return (larger * (size + 1) ** 2 + (parts - larger) * size**2) / samples**2


@dataclass(frozen=True)
class NoiseEstimate:
    """Unbiased estimates of the gradient's squared norm and variance from one step.

    `signal` estimates |G|², the squared norm of the true gradient, and can be negative. `variance`
    estimates tr Σ, the variance of one sample's gradient.
    """

    signal: float
    variance: float

    @classmethod
    def of(cls, whole: float, parts: float, samples: int, count: int) -> NoiseEstimate | None:
        """Estimates signal and variance from `whole` = |Σ gᵢ|² and `parts` = Σ |gᵢ|².

        Here gᵢ = (nᵢ/N)·(mean gradient of part i). The expected values are E whole = |G|² + tr Σ / N
        and E parts = c·|G|² + tr Σ / N with c = Σ nᵢ² / N². So the estimate is also exact for parts of
        different sizes.

        Args:
            whole: The squared norm of the whole gradient.
            parts: The sum of the squared norms of the parts.
            samples: Number of samples N.
            count: Number of parts, whose sizes differ by at most one sample.

        Returns:
            The estimate, or None if there is only one part or a norm is not finite.
        """
        if count < 2 or not (math.isfinite(whole) and math.isfinite(parts)):
            return None
        signal = (whole - parts) / (1 - concentration(samples, count))
        return cls(signal, samples * (whole - signal))


@dataclass
class NoiseScale:
    """Running averages of `NoiseEstimate`s over steps; their ratio is the noise scale.

    Both averages start at 0. Their bias in the first steps is the same and cancels in the ratio.
    """

    signal: float = 0.0
    variance: float = 0.0
    weight: float = 0.0

    def add(self, estimate: NoiseEstimate) -> None:
        self.signal = DECAY * self.signal + (1 - DECAY) * estimate.signal
        self.variance = DECAY * self.variance + (1 - DECAY) * estimate.variance
        self.weight = DECAY * self.weight + (1 - DECAY)

    @property
    def value(self) -> float | None:
        """The noise scale in samples.

        None before the first step, or if an average is not positive because of noise.
        """
        if self.weight == 0 or self.signal <= 0 or self.variance <= 0:
            return None
        return self.variance / self.signal


def relative_steps(noise_scale: float, batch: float) -> float:
    """Returns the number of steps to a given loss, relative to training with an unlimited batch."""
    return 1 + noise_scale / batch


def time_saved(noise_scale: float, batch: float, larger: float) -> float:
    """Returns the fraction of training time that a larger batch saves if steps take equally long.

    Args:
        noise_scale: B_noise in samples.
        batch: The present batch size in samples.
        larger: The larger batch size in samples.
    """
    return 1 - relative_steps(noise_scale, larger) / relative_steps(noise_scale, batch)


def useful_batch(noise_scale: float) -> float:
    """Returns the largest useful batch size.

    Doubling ranks and batch up to this size saves at least the fraction `LEAST_SAVING` of the time.
    """
    return noise_scale * (0.5 - LEAST_SAVING) / LEAST_SAVING


def describe_noise(noise_scale: float, batch: int) -> str:
    """Explains what a noise scale means for a run with batch size `batch`."""
    saved = time_saved(noise_scale, batch, 2 * batch)
    return (
        f"{noise_scale:,.0f} samples; twice the ranks and batch would save {saved:.0%} of the time at "
        f"equal step times, and at least {LEAST_SAVING:.0%} up to a batch of "
        f"{useful_batch(noise_scale):,.0f}"
    )
