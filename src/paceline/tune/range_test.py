"""Learning-rate range test (Smith 2017) in a short run whose learning rate grows.

The callback `RangeTest` records the learning rate and loss of each step and ends the run if the
loss explodes. `RangeResult` contains the learning rates that the losses suggest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from paceline.core.errors import RunError
from paceline.core.events import StepEvent
from paceline.train.callbacks import Callback, RunControl

# The decay of the moving average of losses; without smoothing, losses are too noisy for a slope.
SMOOTHING = 0.9
# The run ends if the smoothed loss is this many times the lowest one.
EXPLODED = 4.0
# The least number of steps for which the smoothed loss is meaningful.
_LEAST_STEPS = 10
# The fall of the smoothed loss is measured from its highest value after these first steps, in which
# the average covers too few losses.
_SETTLING_STEPS = 4
# A fall by less than this many standard deviations of the losses is taken for noise. Losses without
# a trend fall that far in at most 2 % of tests, whether a test has 10 or 1,000 steps.
_CLEAR_FALL = 1.85
# `_noise` averages this share of the absolute second differences, the smallest ones. For normally
# distributed losses, that average is 0.5586 √6 standard deviations of the losses.
_COUNTED_BENDS = 0.8
_BEND_OF_NOISE = 1.368


@dataclass(frozen=True)
class RangeResult:
    """The result of a range test.

    Attributes:
        rates: The learning rate of each step with a finite loss.
        losses: The loss of each of these steps.
        smoothed: The smoothed loss after each of these steps (see `smooth`).
        suggested: The learning rate at which the smoothed loss falls fastest, as a function of the
            logarithm of the rate. None if the fall is too small to tell from noise.
        largest: The rate at which the smoothed loss is lowest, an upper bound for a schedule's
            peak.
        exploded: True if the loss exploded or was not finite.
        fall: The fall of the smoothed loss, in standard deviations of the losses (see `_noise`).
    """

    rates: Sequence[float]
    losses: Sequence[float]
    smoothed: Sequence[float]
    suggested: float | None
    largest: float
    exploded: bool
    fall: float

    @classmethod
    def of(cls, rates: Sequence[float], losses: Sequence[float], exploded: bool) -> RangeResult:
        """Computes the result from the learning rate and loss of each step.

        Raises RunError if there are too few steps.
        """
        if len(rates) < _LEAST_STEPS:
            raise RunError(
                f"only {len(rates)} steps had a finite loss", "start with a lower --from"
            )
        smoothed = smooth(losses)
        lowest = min(range(len(smoothed)), key=smoothed.__getitem__)
        # Slopes over `reach` steps to each side, up to the lowest point of the smoothed loss. If
        # there is no slope, the first rate is suggested.
        reach = max(2, len(rates) // 20)
        slopes = {
            n: (smoothed[n + reach] - smoothed[n - reach])
            / math.log(rates[n + reach] / rates[n - reach])
            for n in range(reach, min(lowest + 1, len(rates) - reach))
        }
        steepest = min(slopes, key=slopes.__getitem__, default=0)
        highest = max(smoothed[_SETTLING_STEPS : lowest + 1], default=smoothed[lowest])
        # Even if all losses are equal, their smoothed values differ by rounding.
        noise = max(_noise(losses[: max(lowest + 1, _LEAST_STEPS)]), 1e-9 * abs(highest)) or 1.0
        fall = (highest - smoothed[lowest]) / noise
        suggested = rates[steepest] if fall >= _CLEAR_FALL else None
        return cls(rates, losses, smoothed, suggested, rates[lowest], exploded, fall)

    def to_table(self) -> dict[str, Any]:
        """Returns the result as a dict that can be written as JSON."""
        return {
            "suggested_lr": self.suggested,
            "fall": self.fall,
            "largest_lr": self.largest,
            "exploded": self.exploded,
            "lr": list(self.rates),
            "loss": list(self.losses),
            "smoothed_loss": list(self.smoothed),
        }


def _noise(losses: Sequence[float]) -> float:
    """Estimates the standard deviation of losses around their trend, from second differences.

    A steady descent does not change second differences. An explosion changes only the largest ones,
    which are left out.
    """
    bends = sorted(abs(a - 2 * b + c) for (a, b), (_, c) in pairwise(pairwise(losses)))
    return fmean(bends[: int(_COUNTED_BENDS * len(bends))]) / _BEND_OF_NOISE


def smooth(losses: Sequence[float]) -> list[float]:
    """Returns the exponential moving average after each loss, corrected for its start at zero."""
    smoothed, average = [], 0.0
    for n, loss in enumerate(losses, start=1):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        smoothed.append(average / (1 - SMOOTHING**n))
    return smoothed


@dataclass
class RangeTest(Callback):
    """Records learning rates and losses, and ends the run after `steps` steps or an explosion.

    A loss that is not finite ends the run, too.
    """

    steps: int
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    exploded: bool = False

    def on_step(self, run: RunControl, event: StepEvent) -> None:
        if self.exploded or len(self.rates) == self.steps:
            return  # this step was already in flight when the run was stopped
        if not math.isfinite(event.loss):
            self.exploded = True
            run.stop("the loss is not finite")
            return
        self.rates.append(event.lr)
        self.losses.append(event.loss)
        smoothed = smooth(self.losses)
        if len(smoothed) > _LEAST_STEPS and smoothed[-1] > EXPLODED * min(smoothed):
            self.exploded = True
            run.stop(f"the loss is {EXPLODED:g} times its lowest value")
        elif event.step == self.steps - 1:
            run.stop("the last rate is reached")  # after the next step

    def result(self) -> RangeResult:
        """Returns the result for all recorded steps."""
        return RangeResult.of(self.rates, self.losses, self.exploded)
