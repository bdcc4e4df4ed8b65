"""`RangeTest`: the learning-rate range test (Smith 2017), a callback of a short run whose rate grows.

It records rate and loss of each step and ends the run if the loss explodes. `RangeResult` has the rates
that the losses suggest.
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

# Weight of the past in the smoothed loss; losses of single steps are too noisy for a slope.
SMOOTHING = 0.9
# The run ends if the smoothed loss is this many times the lowest one.
EXPLODED = 4.0
# With fewer steps the smoothed loss is not meaningful.
_LEAST_STEPS = 10
# A fall of the smoothed loss counts from its highest value after these first steps, because their average
# covers few values.
_SETTLING_STEPS = 4
# A fall by less than this many standard deviations of the losses is noise: that of losses without any
# trend is as large in at most two tests of a hundred, of 10 steps as of 1,000.
_CLEAR_FALL = 1.85
# The share of second differences that counts, the smallest ones, and their mean for normal numbers, in
# their standard deviations: 0.5586 √6.
_COUNTED_BENDS = 0.8
_BEND_OF_NOISE = 1.368


@dataclass(frozen=True)
class RangeResult:
    """The result of a range test.

    Attributes:
        rates: The rates of the steps with a finite loss.
        losses: Their losses.
        smoothed: Their smoothed losses.
        suggested: The rate at which the smoothed loss falls fastest with the logarithm of the rate.
            None if its fall is lost in noise.
        largest: The rate at its lowest point, an upper bound for the peak of a cycle.
        exploded: The loss exploded or was not finite.
        fall: The fall of the smoothed loss, in standard deviations of the losses from step to step.
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
        """Computes the result. Raises RunError if there are too few losses."""
        if len(rates) < _LEAST_STEPS:
            raise RunError(
                f"only {len(rates)} steps had a finite loss", "start with a lower --from"
            )
        smoothed = smooth(losses)
        lowest = min(range(len(smoothed)), key=smoothed.__getitem__)
        # A slope over several steps, up to the lowest point; if there is none, the first rate.
        reach = max(2, len(rates) // 20)
        slopes = {
            n: (smoothed[n + reach] - smoothed[n - reach])
            / math.log(rates[n + reach] / rates[n - reach])
            for n in range(reach, min(lowest + 1, len(rates) - reach))
        }
        steepest = min(slopes, key=slopes.__getitem__, default=0)
        highest = max(smoothed[_SETTLING_STEPS : lowest + 1], default=smoothed[lowest])
        # Equal losses have a smoothed loss that differs by rounding.
        noise = max(_noise(losses[: max(lowest + 1, _LEAST_STEPS)]), 1e-9 * abs(highest)) or 1.0
        fall = (highest - smoothed[lowest]) / noise
        suggested = rates[steepest] if fall >= _CLEAR_FALL else None
        return cls(rates, losses, smoothed, suggested, rates[lowest], exploded, fall)

    def to_table(self) -> dict[str, Any]:
        """Returns the result for JSON."""
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
    """Returns the standard deviation around a trend.

    A steady descent does not change second differences, and an explosion does not change the smaller
    ones.
    """
    bends = sorted(abs(a - 2 * b + c) for (a, b), (_, c) in pairwise(pairwise(losses)))
    return fmean(bends[: int(_COUNTED_BENDS * len(bends))]) / _BEND_OF_NOISE


def smooth(losses: Sequence[float]) -> list[float]:
    """Returns the exponential moving average, without the bias of its first values."""
    smoothed, average = [], 0.0
    for n, loss in enumerate(losses, start=1):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        smoothed.append(average / (1 - SMOOTHING**n))
    return smoothed


@dataclass
class RangeTest(Callback):
    """Ends the run after `steps` steps, or if the loss explodes or is not finite."""

    steps: int
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    exploded: bool = False

    def on_step(self, run: RunControl, event: StepEvent) -> None:
        if self.exploded or len(self.rates) == self.steps:
            return  # a step that was already under way: there may be several
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
        """Returns the result of the test."""
        return RangeResult.of(self.rates, self.losses, self.exploded)
