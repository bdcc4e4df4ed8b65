"""The learning-rate range test (Smith 2017): a short run whose rate grows with every step.

`RangeTest` is a callback that keeps rate and loss of each step and ends the run where the loss explodes;
`RangeResult` says which rates the losses suggest, and draws them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.errors import RunError
from paceline.core.events import StepEvent
from paceline.report.chart import Chart, Line, Marker
from paceline.train.callbacks import Callback, RunControl

# Weight of the past in the smoothed loss; losses of single steps are too noisy for a slope.
SMOOTHING = 0.9
# The run ends where the smoothed loss is this many times the lowest one.
EXPLODED = 4.0
# Before, the smoothed loss is that of few steps.
_LEAST_STEPS = 10


@dataclass(frozen=True)
class RangeResult:
    """`rates` and `losses` of the finite steps, and the smoothed losses.

    `suggested` is the rate at which the smoothed loss falls fastest with the logarithm of the rate;
    `largest` the one at its lowest point, an upper bound for the peak of a cycle.
    """

    rates: Sequence[float]
    losses: Sequence[float]
    smoothed: Sequence[float]
    suggested: float
    largest: float
    exploded: bool

    @classmethod
    def of(cls, rates: Sequence[float], losses: Sequence[float], exploded: bool) -> RangeResult:
        """RunError where there are too few losses to say anything."""
        if len(rates) < _LEAST_STEPS:
            raise RunError(
                f"only {len(rates)} steps had a finite loss", "start with a lower --from"
            )
        smoothed = smooth(losses)
        lowest = min(range(len(smoothed)), key=smoothed.__getitem__)
        # A slope over several steps, up to the lowest point; where there is none, the first rate.
        reach = max(2, len(rates) // 20)
        slopes = {
            n: (smoothed[n + reach] - smoothed[n - reach])
            / math.log(rates[n + reach] / rates[n - reach])
            for n in range(reach, min(lowest + 1, len(rates) - reach))
        }
        steepest = min(slopes, key=slopes.__getitem__, default=0)
        return cls(rates, losses, smoothed, rates[steepest], rates[lowest], exploded)

    def to_table(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "suggested_lr": self.suggested,
            "largest_lr": self.largest,
            "exploded": self.exploded,
            "lr": list(self.rates),
            "loss": list(self.losses),
            "smoothed_loss": list(self.smoothed),
        }

    def chart(self) -> Chart:
        """Loss by the decimal logarithm of the rate."""
        powers = [math.log10(rate) for rate in self.rates]
        # Losses far above the lowest one would flatten all others.
        top = 2.0 * max(self.smoothed[: len(self.smoothed) // 2 + 1])
        lines = [
            Line("loss", [(x, min(y, top)) for x, y in zip(powers, self.losses, strict=True)], 1, True),
            Line("smoothed", [(x, min(y, top)) for x, y in zip(powers, self.smoothed, strict=True)], 1),
        ]  # fmt: skip
        markers = [
            Marker(math.log10(self.suggested), f"suggested: {self.suggested:.3g}"),
            Marker(math.log10(self.largest), f"lowest loss: {self.largest:.3g}"),
        ]
        return Chart(
            "Learning-rate range test", "learning rate, as a power of ten", lines, markers=markers,
            note=f"suggested {self.suggested:.3g}, lowest loss at {self.largest:.3g}",
        )  # fmt: skip


def smooth(losses: Sequence[float]) -> list[float]:
    """The exponential moving average, without the bias of its first values."""
    found, average = [], 0.0
    for n, loss in enumerate(losses, start=1):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        found.append(average / (1 - SMOOTHING**n))
    return found


@dataclass
class RangeTest(Callback):
    """Ends the run after `steps` steps, or where the loss explodes or is not finite."""

    steps: int
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    exploded: bool = False

    def on_step(self, run: RunControl, event: StepEvent) -> None:
        if self.exploded:
            return  # the step that was already under way
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
        """What was found."""
        return RangeResult.of(self.rates, self.losses, self.exploded)
