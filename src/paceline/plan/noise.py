"""The gradient noise scale (McCandlish et al. 2018), and up to which batch more ranks save time.

In: the squared norms of a step's whole gradient and of its parts, from the micro-batches that ranks
compute anyway. Out: estimates of the squared true gradient and of the variance of one sample's, their
running averages, and B_noise = variance / squared gradient. A run at batch B takes about
S·(1 + B_noise / B) steps to the same loss, where S is the number of steps at an unlimited batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

# Share of the running averages that a step leaves: they reach about 50 steps back.
DECAY = 0.98
# Doubling ranks and batch counts as useful where it saves at least this share of the time.
LEAST_SAVING = 0.1


def concentration(samples: int, parts: int) -> float:
    """Σ nᵢ² / N² for N samples in parts whose sizes differ by at most one."""
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
        """From `whole` = |Σ gᵢ|² and `parts` = Σ |gᵢ|², where gᵢ = (nᵢ/N)·(mean gradient of part i).

        E whole = |G|² + tr Σ / N and E parts = c·|G|² + tr Σ / N with c = Σ nᵢ² / N², so that unequal
        parts need no approximation. None where there is one part only, or a norm is not finite.
        """
        if count < 2 or not (math.isfinite(whole) and math.isfinite(parts)):
            return None
        signal = (whole - parts) / (1 - concentration(samples, count))
        return cls(signal, samples * (whole - signal))


@dataclass
class NoiseScale:
    """Running averages of estimates, each divided by the weight that they have gathered."""

    signal: float = 0.0
    variance: float = 0.0
    weight: float = 0.0

    def add(self, estimate: NoiseEstimate) -> None:
        self.signal = DECAY * self.signal + (1 - DECAY) * estimate.signal
        self.variance = DECAY * self.variance + (1 - DECAY) * estimate.variance
        self.weight = DECAY * self.weight + (1 - DECAY)

    @property
    def value(self) -> float | None:
        """B_noise in samples; None before the first step, and where noise hides the gradient."""
        if self.weight == 0 or self.signal <= 0 or self.variance <= 0:
            return None
        return self.variance / self.signal


def _check(noise_scale: float, **batches: float) -> None:
    for name, value in {"noise_scale": noise_scale, **batches}.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} = {value}: must be above 0, and finite")


def relative_steps(noise_scale: float, batch: float) -> float:
    """Steps to the same loss, in units of those at an unlimited batch."""
    _check(noise_scale, batch=batch)
    return 1 + noise_scale / batch


def time_saved(noise_scale: float, batch: float, larger: float, step_ratio: float = 1.0) -> float:
    """Share of the time to the same loss that `larger` saves where its steps take `step_ratio` times
    as long; negative where it costs time."""
    _check(noise_scale, batch=batch, larger=larger, step_ratio=step_ratio)
    steps = relative_steps(noise_scale, larger) / relative_steps(noise_scale, batch)
    return 1 - step_ratio * steps


def useful_batch(
    noise_scale: float, step_ratio: float = 1.0, least_saving: float = LEAST_SAVING
) -> float:
    """The batch from which doubling it, with twice the ranks and steps that take `step_ratio` times as
    long, still saves the share `least_saving`; 0 where no doubling does, inf where every one does."""
    _check(noise_scale, step_ratio=step_ratio)
    gain, cost = 1 - least_saving - step_ratio / 2, step_ratio - 1 + least_saving
    if gain <= 0:
        return 0.0
    return math.inf if cost <= 0 else noise_scale * gain / cost


def fastest_batch(noise_scale: float, step_s: Mapping[int, float]) -> int:
    """Of batches with known step times, the one that reaches the same loss soonest; the smallest of
    equals."""
    if not step_s:
        raise ValueError("step_s is empty: give at least one batch and its step time")
    return min(sorted(step_s), key=lambda b: relative_steps(noise_scale, b) * step_s[b])


def describe_noise(noise_scale: float, batch: int) -> str:
    """What a noise scale means for a run at `batch`."""
    saved = time_saved(noise_scale, batch, 2 * batch)
    return (
        f"{noise_scale:,.0f} samples; twice the ranks and batch would save {saved:.0%} of the time at "
        f"equal step times, and at least {LEAST_SAVING:.0%} up to a batch of "
        f"{useful_batch(noise_scale):,.0f}"
    )
